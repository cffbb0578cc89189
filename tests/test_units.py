"""Numbers of bytes in messages."""

import re
from pathlib import Path

import pytest

import lightning_roundpipe
from lightning_roundpipe.units import size_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (2184, "2.18 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
        (1.5e9, "1.5 GB"), (2e12, "2 TB"), (3.1416e15, "3,140 TB"),
    ],
)  # fmt: skip
def test_three_digits(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


def test_one_kind_of_units() -> None:
    """Messages, tables and metrics can be compared: all count in powers of 1000."""
    for path in Path(lightning_roundpipe.__file__).parent.rglob("*.py"):
        assert not re.search(r"\b[KMGT]iB\b", path.read_text(encoding="utf-8")), path
