"""The examples run as they stand, shortly, and print what their first lines say."""

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "model_configs")


def header(name: str) -> tuple[list[str], list[str]]:
    """The commands in an example's docstring, and the lines that it says to print."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    shown = [line[4:] for line in docstring.splitlines() if line.startswith("    ")]
    commands = [line.partition("  #")[0].rstrip() for line in shown if line.startswith("python ")]
    return commands, [line for line in shown if not line.startswith("python ")]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example with arguments; returns what it prints: its header's lines, with whatever numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # examples set it: undone after the test
    for option in ("PROGRESS_BAR", "MODEL_SUMMARY"):
        monkeypatch.setenv(f"PL_TRAINER_ENABLE_{option}", "False")

    def run(name: str, arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            assert not end.code, end
        printed = " ".join(capsys.readouterr().out.split())
        for line in header(name)[1]:
            pattern = re.sub(r"[\d,.]*\d", "NUMBER", " ".join(line.partition("->")[0].split()))
            assert re.search(re.escape(pattern).replace("NUMBER", r"[\d,.]*\d"), printed), (
                f"{line!r} is not in\n{printed}"
            )
        return printed

    return run


def numbers(pattern: str, printed: str) -> list[float]:
    found = re.search(pattern, printed)
    assert found, f"{pattern!r} is not in\n{printed}"
    return [float(group.replace(",", "")) for group in found.groups()]


@pytest.mark.parametrize("name", NAMES)
def test_headers(name: str) -> None:
    """Commands that name the file, lines that are printed, and less than a hundred lines but for the demo."""
    commands, printed = header(name)
    assert commands and all(command.startswith(f"python examples/{name}.py") for command in commands)
    assert name == "char_gpt" or (printed and len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 100)


@pytest.mark.parametrize("lora", [False, True])
def test_finetune_a_tiny_llama(lora: bool, example: Callable[..., str]) -> None:
    printed = example("finetune_causal_lm", "--steps 8 --learning-rate 0.01" + " --lora" * lora)
    total, trained = numbers(r"LlamaForCausalLM: ([\d,]+) parameters, ([\d,]+) of them trained", printed)
    assert trained < total / 4 if lora else trained == total
    before, after = numbers(r"validation loss: ([\d.]+) before, ([\d.]+) after", printed)
    assert after < before


def test_finetune_from_a_folder_and_save(tmp_path: Path, example: Callable[..., str]) -> None:
    """Without a tokenizer in it, tokens are bytes."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "given")
    printed = example("finetune_causal_lm", f"{tmp_path / 'given'} --lora --steps 2 --save adapters")
    assert "has no tokenizer: its tokens are bytes" in printed
    assert (tmp_path / "adapters" / "adapter_config.json").exists()


def test_classify_digits(example: Callable[..., str]) -> None:
    (accuracy,) = numbers(r"accuracy on the validation set: ([\d.]+)", example("classify_digits", "--epochs 2"))
    assert accuracy > 0.5


def test_reverse_words(example: Callable[..., str]) -> None:
    printed = example("reverse_words", "--steps 20")
    before, after = numbers(r"spelled right: ([\d.]+) before, ([\d.]+) after 20 steps", printed)
    assert 0 <= before <= after <= 1


def test_gan(example: Callable[..., str]) -> None:
    printed = example("gan", "--steps 200")
    before, after = numbers(r"([\d.]+) of the points .*? before .* ([\d.]+) of the points .*? after 200 steps", printed)
    assert after > before


def test_cli(example: Callable[..., str]) -> None:
    config = EXAMPLES / "config.yaml"
    printed = example("cli", f"fit --config {config} --trainer.max_epochs 2 --trainer.strategy.microbatches 3")
    assert "3 microbatches, staleness 1" in printed


def test_plan_32b(example: Callable[..., str]) -> None:
    assert "roundpipe: fits" in example("plan_32b", "--schedules roundpipe roundpipe_async")


def test_char_gpt_tells_a_speed_when_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    progress = runpy.run_path(str(EXAMPLES / "char_gpt.py"))["Progress"](seconds=0)
    trainer: Any = SimpleNamespace(global_step=0)
    progress.on_train_start(trainer, None)
    progress.on_before_backward(trainer, None, torch.tensor(4.5))
    assert capsys.readouterr().out == "    0 s: batch 0, loss 4.500\n"
    trainer.global_step = 2
    progress.on_before_backward(trainer, None, torch.tensor(4.25))
    assert re.fullmatch(r" +\d+ s: batch 2, loss 4\.250, [\d,]+ tokens per second\n", capsys.readouterr().out)


@pytest.mark.slow
def test_char_gpt(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "char_gpt.py", "--seconds", "12", "--devices", "2"]
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
    assert int(seconds) <= 13 and float(loss) < 10
    (text,) = found(r"^generated text:\n(.*)\Z")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith("The statement ") and len(text.rstrip("\n")) > 200
    for name in ("tok", *(f"blocks.{index}" for index in range(int(blocks))), "cpu:0", "cpu:1"):
        assert f"│ {name} " in run.stdout, name
