"""Names of layers and classes where a table has little room for them."""

from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from lightning_roundpipe.table_names import Name

LORA = "base_model.model.model.layers.10.self_attn.q_proj.lora_A.default"


@pytest.mark.parametrize(
    ("name", "width", "lines"),
    [
        ("blocks.0", 8, ["blocks.0"]),
        ("blocks.0", 7, ["blocks.", "0"]),
        (LORA, 24, ["base_model.model.model.", "layers.10.self_attn.", "q_proj.lora_A.default"]),
        ("model.layers.0 .. 63", 16, ["model.layers.0", ".. 63"]),
        ("model.layers.0 .. 63", 12, ["model.", "layers.0 ..", "63"]),
        ("Qwen3DecoderLayer", 13, ["Qwen3Decoder", "Layer"]),
        ("embed_tokens", 6, ["embed_", "tokens"]),
        ("one_thatisverylong.x", 6, ["one_", "thatis", "verylo", "ng.x"]),
        ("", 4, [""]),
    ],
)
def test_broken_between_its_parts(name: str, width: int, lines: list[str]) -> None:
    assert Name(name).lines(width) == lines


def test_in_a_table() -> None:
    """Markup in it is none, and a table that has room enough breaks nothing."""
    for width in (120, 40):
        table = Table("layer", "class", "parameters")
        table.add_row(Name(LORA), Name("Linear[red]"), "1,000")
        text = StringIO()
        Console(file=text, width=width).print(table)
        rows = [line.split("│")[1:-1] for line in text.getvalue().splitlines() if line.startswith("│")]
        assert "".join(row[0].strip() for row in rows) == LORA
        assert "".join(row[1].strip() for row in rows) == "Linear[red]"
        assert (len(rows) == 1) == (width == 120)
        if width == 40:
            assert all(row[0].strip()[-1] in "._" for row in rows[:-1])
