"""What the cases share: layers and batches small enough to work out by hand, and the ways to train them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy

near = partial(pytest.approx, rel=1e-5, abs=1e-6)


def col(*values: float) -> Tensor:
    """One sample a row, one number a sample."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


X = col(1, 2, 3, 6)  # mean 3, sum 12


def lin(weight: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def mean_output(module: Net, batch: Tensor) -> Tensor:
    return module.net(batch).mean()


def half_square(module: Net, batch: Tensor) -> Tensor:
    return 0.5 * module.net(batch).pow(2).mean()


Optimizes = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(lr: float) -> Optimizes:
    return partial(torch.optim.SGD, lr=lr)


def adam(lr: float) -> Optimizes:
    return partial(torch.optim.Adam, lr=lr)


sgd_of_lr_one = sgd(1.0)


class Net(L.LightningModule):
    """Layers in a row, trained on `loss(module, batch)`."""

    def __init__(
        self,
        *layers: nn.Module,
        loss: Callable[[Any, Any], Any] = mean_output,
        optimizer: Optimizes = sgd_of_lr_one,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.loss = loss
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self, batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def weights(module: nn.Module) -> list[float]:
    """All weights of a module whose weights are single numbers."""
    return [parameter.item() for parameter in module.parameters()]


class AtBatchEnd(Callback):
    """Keeps what `read(module, outputs)` finds after each training batch; by default the loss that the trainer reports.

    Somebody who looks after each batch: steps are made by then, so none of them runs behind the next batch.
    """

    def __init__(self, read: Callable[[Any, Any], Any] = lambda module, outputs: outputs["loss"].item()) -> None:
        self.read = read
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.read(pl_module, outputs))


class LogsLoss(Net):
    """Logs its loss at every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LoggedLosses(DummyLogger):
    """Keeps the losses that are logged: seen without looking into the training, whose steps stay in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.seen.append(metrics["loss"])


@dataclass(frozen=True)
class Way:
    """One way to train: with plain Lightning, or through the pipeline."""

    microbatches: int
    devices: int
    background_step: bool = True
    staleness: int = 0
    plain: bool = False
    split: str = "auto"

    def __str__(self) -> str:
        if self.plain:
            return "plain"
        step = "background" if self.background_step else "inline"
        split = "" if self.split == "auto" else f"-{self.split}"
        return f"M{self.microbatches}-D{self.devices}-{step}" + ("-stale" if self.staleness else "") + split

    def trainer(self, strategy: dict[str, Any] | None = None, **options: Any) -> L.Trainer:
        """A quiet trainer of one epoch; `strategy` holds further options of the pipeline."""
        defaults = {
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
        }
        return L.Trainer(accelerator="cpu", **self.placement(**(strategy or {})), **(defaults | options))

    def placement(self, **strategy: Any) -> dict[str, Any]:
        if self.plain:
            return {"devices": 1, "strategy": "auto"}
        options = {
            "microbatches": self.microbatches,
            "staleness": self.staleness,
            "background_step": self.background_step,
            "split": self.split,
        }
        return {"devices": self.devices, "strategy": RoundPipeStrategy(**(options | strategy))}


class SlowSGD(torch.optim.SGD):
    """A step that takes longer than a batch, so that an unordered step would show; nothing waits for the time."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


PLAIN = Way(microbatches=1, devices=1, plain=True)
PIPELINES = [Way(m, devices, (m + devices) % 2 == 0) for m, devices in product((1, 2, 3, 4), (1, 2, 3))]
FEW = [Way(1, 1, False), Way(2, 2, True), Way(2, 3, False), Way(3, 3, True), Way(4, 1, True), Way(4, 2, False)]
# A loss of zero, that of many a small net here, shows nothing about how its batch may be split: the batch stays whole
# unless that is said.
STEP = [Way(*setting, split="step") for setting in ((2, 2), (3, 3, False), (4, 2), (4, 1, False))]
MODEL = [Way(*setting, split="model") for setting in ((2, 2), (4, 3, False))]
STALE = [*(Way(m, d, staleness=1) for m, d in ((1, 1), (2, 2), (3, 3), (4, 2))), Way(3, 2, staleness=1, split="step")]

in_every_way = pytest.mark.parametrize("way", [PLAIN, *PIPELINES, *STEP, *MODEL], ids=str)
in_every_default_way = pytest.mark.parametrize("way", [PLAIN, *PIPELINES], ids=str)
in_every_pipeline = pytest.mark.parametrize("way", [*PIPELINES, *STEP, *MODEL], ids=str)
in_few_ways = pytest.mark.parametrize("way", [PLAIN, *FEW, STEP[0], MODEL[1]], ids=str)
in_few_pipelines = pytest.mark.parametrize("way", [*FEW, STEP[0], MODEL[1]], ids=str)


def loader(batches: Any) -> DataLoader:
    """Yields the batches as they are."""
    return DataLoader(batches, batch_size=None)


def fit(
    module: L.LightningModule,
    batches: Any,
    way: Way,
    val: Any = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> L.Trainer:
    """Trains the module on the batches, and sees to it that no thread outlives the training."""
    threads = set(threading.enumerate())
    trainer = way.trainer(strategy, **options)
    trainer.fit(module, loader(batches), None if val is None else loader(val))
    assert set(threading.enumerate()) <= threads
    return trainer
