"""Options from the command line and from a config file, with the LightningCLI of both packages."""

import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import yaml
from helpers import assert_equal, weights
from test_pytorch_lightning import PACKAGES, module_of

from lightning_roundpipe import Timeline
from lightning_roundpipe.devices import SimulatedDevice

PATHS = {pl: f"{ours.__name__}.RoundPipeStrategy" for pl, ours in PACKAGES.items()}
QUIET = {
    "accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def model_of(pl: Any) -> type:
    """A class that the command line can make."""

    class Model(type(module_of(pl))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.arange(72.0).reshape(12, 6).sin(), batch_size=6)

        def val_dataloader(self) -> list:
            return []

    return Model


def command_line(pl: Any, args: list[str], **options: Any) -> Any:
    cli = import_module(f"{pl.__name__}.cli").LightningCLI
    return cli(model_of(pl), args=args, save_config_callback=None, **options)


def parsed(pl: Any, *arguments: str) -> Any:
    """The strategy that the arguments make."""
    args = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    return command_line(pl, [*args, *arguments], run=False).trainer.strategy


@pytest.mark.parametrize("pl", PACKAGES, ids=lambda pl: pl.__name__)
def test_names(pl: Any) -> None:
    """The registered ones, and the class's with options of its own."""
    assert parsed(pl, "--trainer.strategy=roundpipe").staleness == 0
    assert parsed(pl, "--trainer.strategy=roundpipe_async").staleness == 1
    for name in ("RoundPipeStrategy", PATHS[pl]):
        strategy = parsed(pl, f"--trainer.strategy={name}", "--trainer.strategy.microbatches=4")
        assert isinstance(strategy, PACKAGES[pl].RoundPipeStrategy) and strategy.microbatches == 4


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("microbatches", "null", None),
        ("staleness", "1", 1),
        ("layers", "[Linear, net.0]", ["Linear", "net.0"]),
        ("layers", "Linear", ["Linear"]),
        ("loss_weight", "tokens", "tokens"),
        ("loss_weight", "math.prod", math.prod),
        ("compile", '{"backend": "eager"}', {"backend": "eager"}),
        ("compile", "true", True),
        ("schedule", "1f1b", "1f1b"),
        ("timeline", "runs/timeline", Timeline("runs/timeline.json")),
        (
            "timeline",
            '{"class_path": "lightning_roundpipe.Timeline", "init_args": {"path": "a.json", "batches": [3, 4]}}',
            Timeline("a.json", (3, 4)),
        ),
        ("timeline", '{"path": "a.json", "batches": [3, 4]}', Timeline("a.json", (3, 4))),
        ("lanes", "auto", "auto"),
        ("lanes", "2", 2),
    ],
)
def test_options(option: str, text: str, value: Any) -> None:
    strategy = parsed(lightning.pytorch, "--trainer.strategy=RoundPipeStrategy", f"--trainer.strategy.{option}={text}")
    assert getattr(strategy, option) == value


def test_nested_options() -> None:
    devices = [
        {"class_path": "lightning_roundpipe.devices.SimulatedDevice", "init_args": {"index": index, "capacity": 10**6}}
        for index in range(2)
    ]
    options = ("--trainer.strategy=RoundPipeStrategy", f"--trainer.strategy.devices={devices}")
    strategy = parsed(lightning.pytorch, *options)
    assert all(isinstance(device, SimulatedDevice) for device in strategy.devices)
    assert [device.memory.capacity for device in strategy.devices] == [10**6] * 2


@pytest.mark.parametrize(("option", "value"), [("staleness", "2"), ("split", "half"), ("microbatch", "4")])
def test_wrong_options_are_named(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(lightning.pytorch, "--trainer.strategy=RoundPipeStrategy", f"--trainer.strategy.{option}={value}")
    assert option in capsys.readouterr().err.rpartition("error:")[2]


@pytest.mark.parametrize("pl", PACKAGES, ids=lambda pl: pl.__name__)
def test_printed_config_trains_the_same(
    pl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --print_config shows is a config file with all options, which makes the same run."""
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def run(*arguments: str) -> Any:
        cli = command_line(pl, ["fit", *arguments])
        assert cli.trainer.global_step == 2 and isinstance(cli.trainer.strategy, PACKAGES[pl].RoundPipeStrategy)
        return cli.model

    options = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    options += ["--seed_everything=3", f"--trainer.strategy={PATHS[pl]}", "--trainer.strategy.microbatches=3"]
    with pytest.raises(SystemExit) as end:
        run(*options, "--print_config")
    assert end.value.code == 0
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)["trainer"]["strategy"]
    assert printed["class_path"] == PATHS[pl] and printed["init_args"]["microbatches"] == 3
    assert {"staleness": 0, "split": "auto", "lanes": 1}.items() <= printed["init_args"].items()
    (tmp_path / "config.yaml").write_text(text)
    again = run("--config", str(tmp_path / "config.yaml"))
    assert_equal(weights(again), weights(run(*options)))
