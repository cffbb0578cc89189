"""Errors, interrupts and further fits: nothing is left behind, on the module, in memory or among the threads."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import in_backward
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_roundpipe import RoundPipeStrategy

from .common import (
    PIPELINES,
    PLAIN,
    STALE,
    Net,
    Way,
    X,
    col,
    fit,
    in_every_way,
    in_few_ways,
    lin,
    loader,
    mean_output,
    near,
    sgd,
    weights,
)

ROOT = Path(__file__).parents[2]

BAD = 13.0
GOOD_AND_BAD = [X, X, col(1, 2, 3, BAD), X, X, X]
AFTER_TWO_STEPS = [0.553] * 3  # each from 1: less 0.1 * 3 * 1 ** 2, then less 0.1 * 3 * 0.7 ** 2
AFTER_TWO_STALE_STEPS = [0.4] * 3  # the second gradient is again that at 1


class Fails(nn.Linear):
    """A layer that refuses a bad row: in the forward, or only when that is computed again within the backward."""

    def __init__(self, in_recompute: bool) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)
        self.in_recompute = in_recompute

    def forward(self, x: Tensor) -> Tensor:
        if in_backward() == self.in_recompute and x.max() > BAD / 2:
            raise ValueError("bad row")
        return super().forward(x)


class CountsExceptions(Callback):
    def __init__(self) -> None:
        self.seen: list[type] = []

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen.append(type(exception))


class Interrupted(Net):
    """Is interrupted in the third batch, after its layers ran."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise KeyboardInterrupt
        return loss


class InterruptedAtOnce(Net):
    """Is interrupted in the third batch, when the step of the second may not have begun."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


class InterruptedBySignal(Net):
    """Is interrupted in the third batch as a user would, who knows nothing of threads."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lightning leaves SIGINT ignored after an interrupt."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def train_again(way: Way) -> None:
    module = Net(lin(1), optimizer=sgd(0.1))
    fit(module, [X], way)
    assert weights(module) == near([0.7])


in_every_way_and_stale = pytest.mark.parametrize("way", [PLAIN, *PIPELINES, *STALE], ids=str)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "interrupted",
    [Interrupted, InterruptedAtOnce, InterruptedBySignal],
    ids=["after the layers", "at once", "by a signal"],
)
@in_every_way_and_stale
def test_ctrl_c_inside_the_step(way: Way, interrupted: type[Net], interruptible: None) -> None:
    """A hang, threads left alive, half a step, or the step of a finished batch dropped."""
    threads = set(threading.enumerate())
    module, exceptions = interrupted(lin(1), lin(1), lin(1), optimizer=sgd(0.1)), CountsExceptions()
    with pytest.raises(SystemExit):
        fit(module, [X] * 6, way, callbacks=[exceptions])
    assert exceptions.seen == [KeyboardInterrupt]
    assert set(threading.enumerate()) <= threads
    assert weights(module) == near(AFTER_TWO_STALE_STEPS if way.staleness else AFTER_TWO_STEPS)
    train_again(way)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("way", "in_recompute"),
    [(PLAIN, False), *((way, in_recompute) for way in [*PIPELINES, *STALE] for in_recompute in (False, True))],
    ids=["plain-forward", *(f"{way}-{phase}" for way in [*PIPELINES, *STALE] for phase in ("forward", "recompute"))],
)
def test_an_error_inside_a_layer(way: Way, in_recompute: bool) -> None:
    """Another error or none, a traceback that does not lead to the layer, or half a step."""
    threads = set(threading.enumerate())
    module, exceptions = Net(lin(1), Fails(in_recompute), lin(1), optimizer=sgd(0.1)), CountsExceptions()
    recomputes_all = {"schedule": "gpipe"}  # where the last layers' backward follows at once, they are not recomputed
    strategy = recomputes_all if in_recompute else {}
    with pytest.raises(ValueError, match="bad row") as caught:
        fit(module, GOOD_AND_BAD, way, callbacks=[exceptions], strategy=strategy)
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert (__file__, "forward") in frames
    assert exceptions.seen == [ValueError]
    assert set(threading.enumerate()) <= threads
    assert weights(module) == near(AFTER_TWO_STALE_STEPS if way.staleness else AFTER_TWO_STEPS)
    train_again(way)


TWO_PIPELINES = """
import gc, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader
import lightning_roundpipe

class Fails(L.LightningModule):
    def __init__(self, inner=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
        self.inner = inner
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        if batch_idx == 1 and self.inner is None:
            raise KeyError("stop")
        return loss
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.inner is not None:
            train(self.inner())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def train(module):
    trainer = L.Trainer(strategy="roundpipe_async", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, DataLoader([torch.ones(4, 1)] * 3, batch_size=None))

try:
    train(Fails(inner=Fails))
except KeyError as error:
    print("stopped by", error)
gc.collect()
print("collected")
"""


@pytest.mark.timeout(60)
def test_two_pipelines_collected_while_both_were_at_work() -> None:
    """An interpreter that waits for ever for threads of pipelines that nobody holds any more."""
    command = [sys.executable, "-c", TWO_PIPELINES]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["stopped", "by", "'stop'", "collected"]


HOOK_TABLES = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


def traces(module: nn.Module) -> dict[str, Any]:
    """All that a strategy could leave on the layers of a module."""
    return {
        name: (type(layer), set(vars(layer)), *(len(getattr(layer, table)) for table in HOOK_TABLES))
        for name, layer in module.named_modules()
    }


def two_layers() -> Net:
    return Net(lin(2), lin(1), optimizer=sgd(0.1))


@in_every_way
def test_fit_twice_then_another_module_then_none_of_ours(way: Way) -> None:
    """A second module that is not trained, or layers of the first that still go through the pipeline."""
    first = two_layers()
    parameters, before = list(first.parameters()), traces(first.net)
    trainer = fit(first, [X], way)
    assert weights(first) == near([1.7, 0.4])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(first, loader([X]))
    assert weights(first) == near([1.58, -0.11])

    second = two_layers()
    fit(second, [X], way)
    assert weights(second) == near([1.7, 0.4])
    assert weights(first) == near([1.58, -0.11])

    assert traces(first.net) == before
    assert "forward" not in vars(first)
    for parameter, now in zip(parameters, first.parameters(), strict=True):
        assert now is parameter
        assert type(now) is nn.Parameter
        assert (now.device.type, now.is_leaf, now.requires_grad, now._base) == ("cpu", True, True, None)
        assert not vars(now) and not now._backward_hooks and not now._post_accumulate_grad_hooks
    storages = {parameter.untyped_storage().data_ptr() for parameter in first.parameters()}
    assert storages.isdisjoint(parameter.untyped_storage().data_ptr() for parameter in second.parameters())

    first.zero_grad()
    first.net(X).mean().backward()
    assert [parameter.grad.item() for parameter in first.parameters()] == near([-0.33, 4.74])
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    assert weights(first) == near([1.613, -0.584])


@in_few_ways
def test_what_the_module_carries_after_fit_is_what_lightning_put_there(way: Way) -> None:
    """Attributes of the pipeline left on the LightningModule itself."""
    module, plain = two_layers(), two_layers()
    fit(module, [X], way)
    fit(plain, [X], PLAIN)
    assert traces(module) == traces(plain)


class Takes(Callback):
    """Counts live tensors and resident memory at the end of each epoch. Without what the C library keeps for later, and
    without files' pages, which the system takes and brings back as it likes: both differ by megabytes.
    """

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.memory: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.state_dict()  # waits for all that is still going on
        gc.collect()
        self.tensors.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's own
            trim(0)
        self.memory.append(anonymous_memory())


def anonymous_memory() -> int:
    """Resident bytes of this process that belong to no file."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(1024 * int(line[1]) for line in lines if line[0] == "RssAnon:")


class LogsLoss(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", [Way(3, 2)], ids=str)
def test_memory_is_steady_over_epochs(way: Way) -> None:
    """Saved inputs or records of finished batches that stay alive."""
    torch.manual_seed(0)
    module, takes = LogsLoss(*(nn.Linear(512, 512) for _ in range(4)), optimizer=sgd(0.01)), Takes()
    fit(module, [torch.randn(256, 512) for _ in range(20)], way, max_epochs=10, callbacks=[takes])
    assert set(takes.tensors[2:]) == {takes.tensors[2]}
    assert min(takes.memory[-3:]) - min(takes.memory[2:5]) < 5e6  # the least: what is under way comes on top


PEAK = """
import os, resource, sys, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader
import lightning_roundpipe

class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(2500, 2500, bias=False) for _ in range(16)))
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
strategy, devices = sys.argv[1], int(sys.argv[2])
trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Wide(), DataLoader([torch.ones(4, 2500)] * 3, batch_size=None))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


def peak_memory(strategy: str, devices: int) -> int:
    command = [sys.executable, "-c", PEAK, strategy, str(devices)]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1])


@pytest.mark.timeout(120)
def test_no_second_copy_of_the_model_in_host_memory() -> None:
    """Two or three further copies of all weights: the peak of 400 MB of weights stays near that of plain training. A
    copy would show in each run; how many gradients are in flight depends on what else the machine does."""
    plain = peak_memory("auto", 1)
    assert any(peak_memory("roundpipe", 2) <= 1.5 * plain for _ in range(3))


@pytest.mark.parametrize("run", range(3))
def test_in_a_notebook(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused as if several devices needed several processes."""
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector"
    monkeypatch.setattr(f"{connector}._IS_INTERACTIVE", True)
    process = os.getpid()

    class SeesProcess(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            assert os.getpid() == process
            return super().training_step(batch, batch_idx)

    module = SeesProcess(lin(0))
    trainer = Way(2, 2, split="step").trainer()
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    trainer.fit(module, loader([X, col(7)]))
    assert weights(module) == near([-10.0])


def sum_output(module: Net, batch: Tensor) -> Tensor:
    return module.net(batch).sum()


class FromCommandLine(Net):
    def __init__(self, sums: bool = False) -> None:
        super().__init__(lin(0), loss=sum_output if sums else mean_output)

    def train_dataloader(self) -> DataLoader:
        return loader([X, col(7)])


def command_line(directory: Path, *arguments: str) -> LightningCLI:
    """Trains as `python train.py fit ...` would, and saves the config in the directory."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return LightningCLI(
        FromCommandLine,
        args=["fit", *arguments, f"--trainer.default_root_dir={directory}"],
        trainer_defaults=quiet | {"enable_model_summary": False, "max_epochs": 1, "accelerator": "cpu", "devices": 2},
    )


CONFIG = """
model:
  sums: true
trainer:
  strategy:
    class_path: lightning_roundpipe.RoundPipeStrategy
    init_args:
      microbatches: 3
      staleness: 1
      layers: [Linear]
      split: step
      loss_weight: sum
      background_step: false
"""


def saved_options(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["trainer"]["strategy"]["init_args"]


def test_on_the_command_line_by_name(tmp_path: Path) -> None:
    """A name that the command line does not know, or a config that cannot be saved or loaded again."""
    cli = command_line(tmp_path, "--trainer.strategy=roundpipe")
    assert isinstance(cli.trainer.strategy, RoundPipeStrategy)
    assert weights(cli.model) == near([-10.0])
    again = command_line(tmp_path / "again", f"--config={tmp_path / 'config.yaml'}")
    assert isinstance(again.trainer.strategy, RoundPipeStrategy)
    assert weights(again.model) == near([-10.0])


def test_on_the_command_line_by_config(tmp_path: Path) -> None:
    """Options that are not set, or that the saved config has lost."""
    config = tmp_path / "strategy.yaml"
    config.write_text(CONFIG)
    cli = command_line(tmp_path / "first", f"--config={config}")
    assert isinstance(cli.trainer.strategy, RoundPipeStrategy)
    again = command_line(tmp_path / "again", f"--config={tmp_path / 'first' / 'config.yaml'}")
    assert isinstance(again.trainer.strategy, RoundPipeStrategy)
    for directory in ("first", "again"):
        options = saved_options(tmp_path / directory / "config.yaml")
        assert options["microbatches"] == 3
        assert options["staleness"] == 1
        assert options["layers"] == ["Linear"]
        assert options["split"] == "step"
        assert options["loss_weight"] == "sum"
        assert options["background_step"] is False
    assert weights(again.model) == weights(cli.model) == near([-19.0])  # less 12, less 7


@pytest.mark.parametrize(
    ("profiler", "entries"),
    [
        (SimpleProfiler, ["training_step", "optimizer_step"]),
        (AdvancedProfiler, ["training_step", "optimizer_step"]),
        (PyTorchProfiler, ["training_step", "optimizer_step", "Linear: net.0", "aten::mm"]),
    ],
)
@pytest.mark.parametrize("way", [PLAIN, Way(2, 2, False), Way(2, 2)], ids=str)
def test_profilers(way: Way, profiler: type, entries: list[str], tmp_path: Path) -> None:
    """A crash in a thread that the profiler does not know, or a report without the layers or the optimizer in it."""
    module = Net(lin(0))
    fit(module, [X] * 3, way, profiler=profiler(dirpath=tmp_path, filename="report"))
    assert weights(module) == near([-9.0])
    report = "".join(path.read_text() for path in tmp_path.iterdir())
    assert [entry for entry in entries if entry not in report] == []


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_profilers_by_name(profiler: str, tmp_path: Path) -> None:
    """The same where Lightning makes the profiler."""
    module = Net(lin(0))
    fit(module, [X] * 3, Way(2, 2, split="step"), profiler=profiler, default_root_dir=tmp_path)
    assert weights(module) == near([-9.0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", [PLAIN, Way(2, 2, split="step"), Way(2, 2, staleness=1)], ids=str)
def test_loader_workers_started_during_the_training(way: Way, persistent: bool) -> None:
    """A worker process forked while a thread holds a lock, which then waits for it for ever."""

    class Validates(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.net(batch)

    module = Validates(lin(0))
    loaders = [
        DataLoader(col(*values), 2, num_workers=2, persistent_workers=persistent) for values in (range(6), (1, 2))
    ]
    trainer = way.trainer(val_check_interval=1)
    trainer.fit(module, *loaders)
    assert weights(module) == near([-7.5])


class MakesTensors(nn.Module):
    """A layer that makes tensors like its input, and on its input's device."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        ones, rows = x.new_ones(len(x), 1), torch.arange(len(x), device=x.device).unsqueeze(1)
        return self.w * x * ones + 0 * rows


class Measures(Net):
    """Updates a metric, and makes tensors on the module's device."""

    def __init__(self) -> None:
        super().__init__(lin(1), MakesTensors(), optimizer=sgd(0.0))
        self.metric = MeanMetric()

    def step(self, batch: Tensor) -> Tensor:
        y = self.net(batch)
        z = torch.zeros(len(batch), 1, device=self.device)
        assert batch.device == y.device == z.device == self.device
        self.metric.update(y.detach())
        return (y + z).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch)

    def on_train_epoch_start(self) -> None:
        self.metric.reset()

    def on_validation_epoch_start(self) -> None:
        self.trained = (self.metric.weight.item(), self.metric.compute().item())
        self.metric.reset()

    def on_validation_epoch_end(self) -> None:
        self.validated = (self.metric.weight.item(), self.metric.compute().item())


@in_every_way
def test_metrics_and_devices_in_the_step(way: Way) -> None:
    """Rows counted twice by the recompute or by one microbatch only; tensors on two devices in one expression."""
    module = Measures()
    fit(module, [X, col(1, 2, 6)], way, val=[X], num_sanity_val_steps=0)
    assert module.trained == near((7.0, 3.0))
    assert module.validated == near((4.0, 3.0))
