"""The examples run as they stand, shortly."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_char_gpt(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "char_gpt.py", "--seconds", "5", "--devices", "2"]
    environment = os.environ | {"COLUMNS": "120"}  # tables in full width
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr

    def found(pattern: str) -> tuple[str, ...]:
        match = re.search(pattern, run.stdout, flags=re.MULTILINE | re.DOTALL)
        assert match, f"{pattern!r} is not in\n{run.stdout}"
        return match.groups()

    parameters, blocks = found(r"^model: +([\d,]+) parameters in (\d+) blocks$")
    assert 0.9e6 < int(parameters.replace(",", "")) < 1.1e6 and int(blocks) >= 8
    (characters,) = found(r"^text: +([\d,]+) characters")
    assert int(characters.replace(",", "")) > 300_000
    for kind in ("training", "validation"):
        before, after = found(rf"^{kind} loss: +([\d.]+) before, ([\d.]+) after")
        assert float(after) < float(before), kind
    tokens_per_second, batches = found(r"^speed: +([\d,]+) tokens per second \((\d+) batches\)$")
    assert int(tokens_per_second.replace(",", "")) > 0
    (checkpoint,), (log,) = found(r"^checkpoint: +(\S.*?)$"), found(r"^logs: +(\S.*?)$")
    assert Path(checkpoint).is_relative_to(tmp_path.resolve()) and Path(log).is_relative_to(tmp_path.resolve())
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["global_step"] == int(batches) and "pos" in saved["state_dict"]
    assert sum(1 for line in Path(log).read_text().splitlines() if line) > int(batches)
    seconds, loss, _ = found(r"^ +(\d+) s: batch \d+, loss ([\d.]+), ([\d,]+) tokens per second$")
    assert int(seconds) <= 6 and float(loss) < 10
    (text,) = found(r"^generated text:\n(.*)\Z")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith("The statement ") and len(text.rstrip("\n")) > 200
    for name in ("tok", *(f"blocks.{index}" for index in range(int(blocks))), "cpu:0", "cpu:1"):
        assert f"│ {name} " in run.stdout, name
