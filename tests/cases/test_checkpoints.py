"""Checkpoints are ordinary ones, and a run resumed from one is the run that was never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .common import PLAIN, Net, Way, X, adam, col, fit, in_few_pipelines, in_few_ways, lin, loader, near, weights

BATCHES = [col(1, 2), col(3, 4), col(5, 6), col(7, 8)]
PAIRED = [PLAIN, Way(1, 1, False), Way(1, 2, True), Way(2, 2, False), Way(2, 3, True)]


def distance_to_one(module: Net, batch: Tensor) -> Tensor:
    return (module.net(batch) - 1).pow(2).mean()


def regression() -> Net:
    return Net(lin(0), loss=distance_to_one, optimizer=adam(0.1))


@in_few_ways
def test_two_epochs_at_a_stretch(way: Way) -> None:
    """The straight run already differs."""
    module = regression()
    trainer = fit(module, BATCHES, way, max_epochs=2)
    assert weights(module) == pytest.approx([0.1482591], rel=1e-6)
    assert trainer.global_step == 8


@pytest.mark.parametrize("second", PAIRED, ids=str)
@pytest.mark.parametrize("first", PAIRED, ids=str)
def test_one_epoch_and_one_more_from_its_checkpoint(first: Way, second: Way, tmp_path: Path) -> None:
    """Optimizer state missing from the checkpoint, or from an earlier step than the weights."""
    path = tmp_path / "epoch.ckpt"
    fit(regression(), BATCHES, first).save_checkpoint(path)
    module = regression()
    trainer = second.trainer(max_epochs=2)
    trainer.fit(module, loader(BATCHES), ckpt_path=path)
    assert weights(module) == pytest.approx([0.1482591], rel=1e-6)
    assert trainer.global_step == 8


class TwoLayers(Net):
    def __init__(self) -> None:
        super().__init__(lin(2), lin(3))


def check_plain_file(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path)
    state = checkpoint["state_dict"]
    assert list(state) == ["net.0.weight", "net.1.weight"]
    for value in state.values():
        assert value.device.type == "cpu"
        assert value.dtype == torch.float32
        assert value.untyped_storage().nbytes() == value.nbytes
    return state


@in_few_ways
def test_a_checkpoint_holds_the_modules_own_tensors(way: Way, tmp_path: Path) -> None:
    """Prefixed names, device tensors, or slices that each drag a whole buffer into the file."""
    path, plain_path = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    fit(TwoLayers(), [X], way).save_checkpoint(path)
    fit(TwoLayers(), [X], PLAIN).save_checkpoint(plain_path)
    state = check_plain_file(path)
    assert [value.item() for value in state.values()] == near([-7.0, -3.0])
    assert path.stat().st_size == pytest.approx(plain_path.stat().st_size, rel=0.1)
    assert weights(TwoLayers.load_from_checkpoint(path)) == near([-7.0, -3.0])


@pytest.mark.parametrize("devices", [1, 4])
def test_saved_with_two_devices_and_loaded_with_others(devices: int, tmp_path: Path) -> None:
    """A checkpoint that remembers how many devices wrote it."""
    path = tmp_path / "two.ckpt"
    fit(TwoLayers(), [X], Way(2, 2)).save_checkpoint(path)
    module = TwoLayers()
    trainer = Way(2, devices).trainer(max_epochs=2)
    trainer.fit(module, loader([X]), ckpt_path=path)
    assert weights(module) == near([2.0, 18.0])
    assert trainer.global_step == 2


OUTSIDER = """
import sys, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader

class Outsider(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

path = sys.argv[1]
torch.load(path)
module = Outsider.load_from_checkpoint(path)
assert [p.item() for p in module.parameters()] == [-7.0, -3.0]
trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(Outsider(), DataLoader([torch.tensor([[1.0], [2.0], [3.0], [6.0]])], batch_size=None), ckpt_path=path)
assert [p.item() for p in trainer.lightning_module.parameters()] == [2.0, 18.0], trainer.lightning_module.state_dict()
assert not any(name.startswith("lightning_roundpipe") for name in sys.modules)
"""


@pytest.mark.timeout(60)
def test_a_checkpoint_is_loaded_where_the_package_is_not(tmp_path: Path) -> None:
    """A checkpoint that cannot be read without the package that wrote it."""
    path = tmp_path / "ours.ckpt"
    fit(TwoLayers(), [X], Way(2, 2)).save_checkpoint(path)
    command = [sys.executable, "-c", OUTSIDER, path]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


class Compiled(TwoLayers):
    """Compiles its layers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


@pytest.mark.parametrize("way", [PLAIN, Way(1, 2), Way(3, 2)], ids=str)
def test_compiling_in_place_adds_no_prefix(way: Way, tmp_path: Path) -> None:
    """Names that a compiled module leaves in the checkpoint; or a compiled module that the pipeline cannot train."""
    path = tmp_path / "compiled.ckpt"
    module = Compiled()
    fit(module, [X], way).save_checkpoint(path)
    assert weights(module) == near([-7.0, -3.0])
    check_plain_file(path)


@in_few_pipelines
def test_a_checkpoint_saved_during_the_training_holds_the_finished_step(way: Way, tmp_path: Path) -> None:
    """Weights or optimizer state saved while a step is pending."""

    class Saves(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    module = Saves(lin(0), optimizer=adam(0.1))
    fit(module, [X] * 3, way)
    for step in range(3):
        checkpoint = torch.load(tmp_path / f"{step}.ckpt")
        assert checkpoint["global_step"] == step + 1
        assert checkpoint["state_dict"]["net.0.weight"].item() == near(-0.1 * (step + 1))
        assert checkpoint["optimizer_states"][0]["state"][0]["step"] == step + 1
