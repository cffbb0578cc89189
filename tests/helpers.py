"""Run a LightningModule over given batches, and compare two runs.

The reference of a test is never ours: it is plain Lightning (`strategy="auto"`) fed the microbatches with gradient
accumulation, or a plain loop of autograd and `torch.optim`.
"""

import copy
import csv
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import SimulatedDevice
from lightning_roundpipe.schedules.memory import finest
from lightning_roundpipe.schedules.partition import Partition
from lightning_roundpipe.schedules.scheduler import Scheduler

SIMULATED = os.environ.get("ROUNDPIPE_DEVICES") == "simulated"
"""Whether `fit_pipeline` trains on simulated accelerators instead of virtual CPU devices."""
RECOMPUTE = os.environ.get("ROUNDPIPE_RECOMPUTE", "layer")
"""What `fit_pipeline` lets run again for the backward, unless a test says so itself."""
PATIENCE = int(os.environ.get("ROUNDPIPE_PATIENCE", 1))
"""How many times more often than usual tests repeat a training under random delays: rare orders of events need more."""

# --- running


class Batches:
    """Serves ready-made batches in order, and can go on in the middle of an epoch: Lightning saves and loads its
    position.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.served = self.start = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.served, self.start = self.start, 0
        while self.served < len(self.batches):
            self.served += 1
            yield self.batches[self.served - 1]

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["served"] % len(self.batches)


def trainer_for(strategy: str | Strategy = "auto", *, devices: int = 1, **options: Any) -> L.Trainer:
    """A quiet CPU Trainer: no logger, checkpoint, progress bar or summary unless asked for."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    defaults = {"max_epochs": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    if isinstance(strategy, RoundPipeStrategy):  # a strategy belongs to one Trainer; tests reuse their options
        assert strategy.lightning_module is None, "this strategy has been used"
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **(quiet | defaults | options))


def fit(
    model: L.LightningModule,
    batches: Sequence[Any],
    strategy: str | Strategy = "auto",
    *,
    val_batches: Sequence[Any] | None = None,
    seed: int = 0,
    ckpt_path: str | None = None,
    **options: Any,
) -> L.Trainer:
    """Train `model` in place; `options` are `trainer_for`'s."""
    trainer = trainer_for(strategy, **options)
    L.seed_everything(seed, verbose=False)
    validation = None if val_batches is None else Batches(val_batches)
    trainer.fit(model, Batches(batches), validation, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    return trainer


def fit_pipeline(
    model: L.LightningModule,
    batches: Sequence[Any],
    m: int | None,
    devices: int = 1,
    *,
    run: dict | None = None,
    **options: Any,
) -> L.Trainer:
    """Train with RoundPipeStrategy(microbatches=m, **options); `run` goes to `fit`.

    What is compared with is mostly plain Lightning on the microbatches, so each runs the step unless asked otherwise.
    """
    if SIMULATED and "devices" not in options:
        options["devices"] = [SimulatedDevice(index) for index in range(devices)]
    return fit(
        model,
        batches,
        RoundPipeStrategy(microbatches=m, **{"split": "step", "recompute": RECOMPUTE, **options}),
        devices=devices,
        **(run or {}),
    )


def one_layer_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the layers' time. The last one is fused if it may be: it runs forward and backward at once."""

    def partition(self: Scheduler, forward: Any, *_: Any, fused: bool = True, **options: Any) -> Partition:
        return finest(len(forward), fused)

    monkeypatch.setattr(Scheduler, "partition", partition)
    monkeypatch.setattr(Scheduler, "can_be_planned", False)


def fit_microbatches(
    model: L.LightningModule, batches: Sequence[Any], m: int, *, accumulate_grad_batches: int = 1, **options: Any
) -> L.Trainer:
    """The reference: plain Lightning fed the m equal parts of every batch, stepping after the last part."""
    parts = [part for batch in batches for part in split(batch, m)]
    return fit(model, parts, "auto", accumulate_grad_batches=m * accumulate_grad_batches, **options)


def split(batch: Any, m: int, even: bool = True) -> list[Any]:
    """Every tensor of the batch in m parts along dimension 0, as equal as can be."""

    def parts(leaf: Any) -> list[Any]:
        if not isinstance(leaf, Tensor):
            return [leaf] * m
        assert leaf.shape[0] % m == 0 or not even, (
            "equal parts only: the mean of their means is then the mean of the batch"
        )
        return list(leaf.tensor_split(m))

    return [tree_map(lambda leaf, i=i: parts(leaf)[i], batch) for i in range(m)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plain_loop(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Any],
    m: int,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Train `model` in place with nothing but autograd and torch.optim: the mean of the losses of m equal parts."""
    stepper = optimizer(model.parameters())
    model.train()
    for batch in batches:
        stepper.zero_grad()
        for part in split(batch, m):
            (loss(model, part) / m).backward()
        stepper.step()
    return stepper


# --- watching


class Watch(L.Callback):
    """Notes, per batch of training, what the user sees: the returned loss, learning rates, and copies of the
    parameters.
    """

    def __init__(self, parameters: bool = False) -> None:
        self.parameters = parameters
        self.losses: list[Tensor] = []
        self.rates: list[list[float]] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].clone())
        self.rates.append([group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])
        if self.parameters:
            self.weights.append(weights(module))


class Validations(L.Callback):
    """Notes the metrics at the end of every validation."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def in_backward() -> bool:
    """Whether autograd runs: there a layer's forward is its recompute."""
    return torch._C._current_graph_task_id() != -1


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


# --- comparing


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Clones of all parameters and buffers, by name; tied ones under each of their names."""
    return {name: value.detach().clone() for name, value in module.state_dict(keep_vars=True).items()}


def optimizer_states(trainer: L.Trainer) -> list[Any]:
    return [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers]


def result(trainer: L.Trainer) -> dict[str, Any]:
    """Everything that training has made: weights, optimizer state, schedulers, counters, and losses where the module
    notes them.
    """
    module = trainer.lightning_module
    return {
        "weights": weights(module),
        "optimizers": optimizer_states(trainer),
        "schedulers": [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "losses": dict(getattr(module, "seen", {})),
    }


def at_host(value: Any) -> Any:
    """A tensor in host memory, wherever it was."""
    return value.cpu() if isinstance(value, Tensor) else value


def assert_equal(actual: Any, expected: Any, where: str = "result") -> None:
    """Bit for bit, with the same structure. The order of a dict's keys is free: the pipeline fills them as it goes."""
    if isinstance(expected, Tensor):
        actual, expected = at_host(actual), at_host(expected)
        assert isinstance(actual, Tensor) and actual.dtype == expected.dtype and actual.shape == expected.shape, where
        same = torch.equal(actual, expected)
        assert same, f"{where}: differs by up to {(actual - expected).abs().max()}, of {expected.abs().max()}"
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_equal(actual[index], value, f"{where}[{index}]")
    elif not callable(expected):
        assert actual == expected, f"{where}: {actual} is not {expected}"


def assert_alike(actual: Any, expected: Any, tolerance: float = 1e-10, where: str = "result") -> None:
    """As `assert_equal`, but floating point numbers within `tolerance` of the largest value beside them."""
    if isinstance(expected, Tensor) and expected.is_floating_point():
        actual, expected = at_host(actual), at_host(expected)
        assert isinstance(actual, Tensor) and actual.dtype == expected.dtype and actual.shape == expected.shape, where
        error, size = (float(x.abs().max()) if x.numel() else 0.0 for x in (actual - expected, expected))
        assert error <= tolerance * size, f"{where}: {error} of {size}"
    elif isinstance(expected, float):
        assert actual == expected or abs(actual - expected) <= tolerance * abs(expected), (
            f"{where}: {actual} is not {expected}"
        )
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_alike(actual[key], value, tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_alike(actual[index], value, tolerance, f"{where}[{index}]")
    else:
        assert_equal(actual, expected, where)


def differs(actual: Any, expected: Any) -> bool:
    """Whether two runs differ anywhere: guards the tests against comparing what training does not change."""
    try:
        assert_equal(actual, expected)
    except AssertionError:
        return True
    return False


def break_for(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, stream: str) -> None:
    """Leaves out what a function does for one of a simulated device's streams, its first argument."""
    function = getattr(where, name)

    def for_others(self: Any, *args: Any) -> None:
        if not self.name.startswith(stream):
            function(self, *args)

    monkeypatch.setattr(where, name, for_others)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each tensor within `tolerance` of its own largest value, or, where it is as good as zero, of the largest of all.

    Some gradients are zero but for rounding (the key bias of attention): their own size says nothing.
    """
    assert actual.keys() == expected.keys()
    largest = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=0.0)
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        if value.numel():
            error = float((actual[name] - value).abs().max())
            assert error <= tolerance * max(float(value.abs().max()), 1e-4 * largest), (
                f"{name}: {error} of {value.abs().max()}"
            )


def logged_rows(folder: Path) -> list[dict[str, str]]:
    """What the CSVLogger has written there of the module's and Lightning's own; the pipeline's metrics have rows of
    their own.
    """
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    own = [row for row in rows if not row.get("roundpipe/bubble")]
    return [{name: text for name, text in row.items() if not name.startswith("roundpipe/")} for row in own]
