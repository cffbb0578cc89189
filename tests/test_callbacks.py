"""Every callback that Lightning has, and its tuner, with the pipeline and without. Writes docs/callbacks.md.

A callback's run has two references: plain Lightning on the same batches, where the pipeline has one microbatch, so that
everything must be equal, what the callback has made included; and plain Lightning on the microbatches, with gradient
accumulation, whose weights must be equal.
"""

import csv
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from callback_table import PATH, Row, page
from helpers import Batches, RoundPipeStrategy, assert_equal, optimizer_states, split, trainer_for, weights
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from models import Lit
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_roundpipe.devices import SimulatedDevice

MICROBATCHES = 2


class Net(Lit):
    """A backbone and a head, with one Linear for each of its blocks."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.lr_scheduler.StepLR, step_size=1))
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class HeadFirst(Net):
    """Only the head is handed to the optimizer: the callback adds what it unfreezes."""

    def __init__(self) -> None:
        super().__init__()
        self.make_groups = lambda module: [p for p in module.parameters() if p.requires_grad]


class Fails(Net):
    """In its fourth step, before the fourth optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3:
            raise ValueError("the fourth batch is bad")
        return super().training_step(batch, batch_idx)


class Rises(Net):
    """Its loss jumps in the fourth step, and it validates ever worse."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 if self.trainer.global_step < 3 else 100 * self.trainer.global_step)


class Loads(Net):
    """Has loaders of its own, and numbers that a tuner may change."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.lr = 2, 0.01

    def train_dataloader(self) -> DataLoader:
        samples = {name: torch.cat([batch[name] for batch in LONG]) for name in ("x", "y")}
        rows = [{name: rows[i] for name, rows in samples.items()} for i in range(len(samples["x"]))]
        return DataLoader(rows, self.batch_size)

    def val_dataloader(self) -> Batches:
        return Batches(VAL)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(4, size, generator=generator, dtype=torch.float64) for name, size in (("x", 6), ("y", 3))}
        for _ in range(count)
    ]


TRAIN, VAL, LONG = data(3, 1), data(2, 2), data(16, 3)


def make(kind: type[Net]) -> Net:
    torch.manual_seed(3)
    return kind().double()


# --- what there is, and what is to be equal


@dataclass(frozen=True)
class Case:
    """A callback in a training of three epochs.

    Attributes:
        make: Makes the callback; it may write to the folder.
        made: What the callback has made: equal with and without the pipeline.
        model: What is trained.
        run: Further options of the Trainer.
        raises: An error that ends the training.
        counts_batches: Whether microbatches would be batches to it, so that there is no second reference.
        notes: For the table.
    """

    make: Callable[[Path], Callback]
    made: Callable[[Callback, L.Trainer, Path], Any]
    model: type[Net] = Net
    run: dict[str, Any] = field(default_factory=dict)
    raises: type[Exception] | None = None
    counts_batches: bool = False
    notes: str = ""


def nothing(callback: Callback, trainer: L.Trainer, folder: Path) -> None:
    """Nothing is left of it but the weights."""


def logged(folder: Path, *, values: bool = True) -> list[dict[str, str]]:
    """Rows of the log: of times only what there is one of. Those of the pipeline's own monitor are left out."""
    with (folder / "metrics.csv").open() as file:
        return [
            {
                name: text if values else str(bool(text))
                for name, text in row.items()
                if not name.startswith("roundpipe/")
            }
            for row in csv.DictReader(file)
            if not row.get("roundpipe/bubble")
        ]


def saved(path: Path | str) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=False)
    return {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "global_step", "epoch", "lr_schedulers")}


class Unfreezes(callbacks.BaseFinetuning):
    """One block after the other, from the last."""

    def freeze_before_training(self, module: L.LightningModule) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(module.backbone[-epoch], optimizer, lr=0.005)


class Writes(callbacks.BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: L.Trainer, module: L.LightningModule, prediction: Any, *_: Any) -> None:
        self.written.append(prediction)

    def write_on_epoch_end(self, trainer: L.Trainer, module: L.LightningModule, predictions: Any, *_: Any) -> None:
        self.written.append(predictions)


class Bar(callbacks.ProgressBar):
    """Notes what a bar of one's own would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        shown = self.get_metrics(trainer, module)
        self.shown.append((self.total_train_batches, {name: str(value) for name, value in shown.items()}))


class Average(Callback):
    """A hook that looks at weights after every batch."""

    def __init__(self) -> None:
        self.sum: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            now = nn.utils.parameters_to_vector(module.parameters()).detach()
            self.sum = now.clone() if self.sum is None else self.sum + now


class Norms(callbacks.LambdaCallback):
    """Reads gradients."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []
        super().__init__(on_before_optimizer_step=self.note)

    def note(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.norms.append(nn.utils.get_total_norm([p.grad for p in module.parameters()]))


class SavesByHand(callbacks.Checkpoint):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "mine.ckpt"

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def rates(callback: Callback, trainer: L.Trainer, folder: Path) -> Any:
    return [row["lr-AdamW"] for row in logged(folder)]


CASES = {
    "BackboneFinetuning": Case(
        lambda folder: callbacks.BackboneFinetuning(1, lambda epoch: 1.5),
        lambda callback, *_: callback.previous_backbone_lr,
        HeadFirst,
    ),
    "BaseFinetuning": Case(lambda folder: Unfreezes(), nothing, HeadFirst),
    "BasePredictionWriter": Case(
        lambda folder: Writes(), lambda callback, *_: callback.written, notes="prediction runs without the pipeline"
    ),
    "BatchSizeFinder": Case(
        lambda folder: callbacks.BatchSizeFinder(max_trials=3),
        lambda callback, trainer, folder: (callback.optimal_batch_size, trainer.lightning_module.batch_size),
        Loads,
        counts_batches=True,
        notes="tries again with smaller batches where a device is out of memory",
    ),
    "Callback": Case(
        lambda folder: Average(),
        lambda callback, *_: callback.sum,
        notes="in line where it has a hook between two batches: `on_train_batch_start`, `on_train_batch_end`,"
        " `on_before_zero_grad`, `on_before_backward`, `on_after_backward`, `on_before_optimizer_step`",
    ),
    "Checkpoint": Case(
        SavesByHand, lambda callback, *_: saved(callback.path), notes="saving waits for all optimizer steps"
    ),
    "DeviceStatsMonitor": Case(
        lambda folder: callbacks.DeviceStatsMonitor(),
        lambda callback, trainer, folder: logged(folder, values=False),
        notes="those of all devices, with the device's name before each",
    ),
    "EarlyStopping": Case(
        lambda folder: callbacks.EarlyStopping("val_loss", patience=1),
        lambda callback, *_: (callback.stopped_epoch, callback.best_score),
        Rises,
        {"max_epochs": 9},
    ),
    "EMAWeightAveraging": Case(
        lambda folder: callbacks.EMAWeightAveraging(decay=0.5),
        lambda callback, *_: weights(callback._average_model),
        notes="reads the weights after every step",
    ),
    "GradientAccumulationScheduler": Case(
        lambda folder: callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}),
        lambda callback, trainer, folder: trainer.global_step,
        counts_batches=True,
    ),
    "LambdaCallback": Case(
        lambda folder: Norms(), lambda callback, *_: callback.norms, notes="as `Callback`: this one reads gradients"
    ),
    "LearningRateFinder": Case(
        lambda folder: callbacks.LearningRateFinder(num_training_steps=14),
        lambda callback, trainer, folder: (callback.optimal_lr.results, trainer.lightning_module.lr),
        Loads,
        counts_batches=True,
    ),
    "LearningRateMonitor": Case(lambda folder: callbacks.LearningRateMonitor(), rates),
    "ModelCheckpoint": Case(
        lambda folder: callbacks.ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1),
        lambda callback, trainer, folder: [
            {path.name: saved(path) for path in folder.glob("*.ckpt")},
            Path(callback.best_model_path).name,
            callback.best_model_score,
        ],
        notes="saving waits for all optimizer steps",
    ),
    "ModelPruning": Case(
        lambda folder: callbacks.ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True),
        lambda callback, trainer, folder: [bool((p == 0).any()) for p in trainer.lightning_module.parameters()],
        notes="the pipeline is built anew after each pruning, and its report; refused with `staleness=1`, whose"
        " parameters of one step before would be others",
    ),
    "ModelSummary": Case(lambda folder: callbacks.ModelSummary(2), nothing),
    "OnExceptionCheckpoint": Case(
        lambda folder: callbacks.OnExceptionCheckpoint(folder),
        lambda callback, *_: saved(callback.ckpt_path),
        Fails,
        raises=ValueError,
        notes="holds the state after the last optimizer step of a whole batch",
    ),
    "ProgressBar": Case(lambda folder: Bar(), lambda callback, *_: callback.shown, run={"enable_progress_bar": True}),
    "RichModelSummary": Case(lambda folder: callbacks.RichModelSummary(2), nothing),
    "RichProgressBar": Case(lambda folder: callbacks.RichProgressBar(), nothing, run={"enable_progress_bar": True}),
    "SpikeDetection": Case(
        lambda folder: callbacks.SpikeDetection(warmup=2, exclude_batches_path=folder),
        lambda callback, *_: (callback.bad_batches, Path(callback.exclude_batches_path).read_text()),
        Rises,
        {"limit_val_batches": 0},
        raises=RuntimeError,
        counts_batches=True,
    ),
    "StochasticWeightAveraging": Case(
        lambda folder: callbacks.StochasticWeightAveraging(0.005, 1, 1),
        lambda callback, *_: (callback.n_averaged, weights(callback._average_model)),
        notes="in line where the module has a BatchNorm",
    ),
    "ThroughputMonitor": Case(
        lambda folder: callbacks.ThroughputMonitor(lambda batch: len(batch["x"]), window_size=2),
        lambda callback, trainer, folder: (logged(folder, values=False), callback._samples),
        notes="a batch counts when its loss is known; its backward may still be under way",
    ),
    "Timer": Case(
        lambda folder: callbacks.Timer({"hours": 1}),
        lambda callback, trainer, folder: (trainer.global_step, callback.time_elapsed("train") > 0),
    ),
    "TQDMProgressBar": Case(
        lambda folder: callbacks.TQDMProgressBar(), nothing, run={"enable_progress_bar": True}
    ),
    "WeightAveraging": Case(
        lambda folder: callbacks.WeightAveraging(),
        lambda callback, *_: weights(callback._average_model),
        notes="reads the weights after every step",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Row]]:
    """Takes a row from each test. If all have one, the page is written."""
    rows: dict[str, Row] = {}
    yield rows
    names = [*CASES, *TUNER]
    if rows.keys() == set(names):
        PATH.write_text(page([rows[name] for name in names]), encoding="utf-8")


class Notes(Callback):
    """Whether the optimizer steps in the background."""

    in_background = False

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.in_background = getattr(trainer.strategy, "steps_in_background", False)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_epoch_end(trainer, module)


def trained(case: Case, strategy: Any, folder: Path, m: int = 1, devices: int = 1) -> tuple[Any, L.Trainer, bool]:
    """What the callback has made, the Trainer, and whether the optimizer stepped in the background."""
    folder.mkdir()
    callback, notes = case.make(folder), Notes()
    checkpointing = isinstance(callback, callbacks.Checkpoint)
    trainer = trainer_for(
        strategy,
        devices=devices,
        **{
            "max_epochs": 3,
            "callbacks": [callback, notes],
            "logger": CSVLogger(folder, name="", version=""),
            "enable_checkpointing": checkpointing,
            "default_root_dir": folder,
            "enable_model_summary": "Summary" in type(callback).__name__,
            **case.run,
        },
    )
    module, batches = make(case.model), [part for batch in TRAIN for part in split(batch, m)]
    if m > 1 and trainer.accumulate_grad_batches == 1:
        trainer.accumulate_grad_batches = m
    L.seed_everything(0, verbose=False)
    loaders = () if case.model is Loads else (Batches(batches), Batches(VAL))
    with pytest.raises(case.raises) if case.raises is not None else nullcontext():
        trainer.fit(module, *loaders)
    if isinstance(callback, callbacks.BasePredictionWriter):
        trainer.predict(module, Batches(VAL))
    return case.made(callback, trainer, folder), trainer, notes.in_background


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_lightning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, Row]
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # tqdm's own thread never ends
    case = CASES[name]
    expected, plain, _ = trained(case, "auto", tmp_path / "plain")
    strategy = RoundPipeStrategy(microbatches=1, split="step")
    made, ours, in_background = trained(case, strategy, tmp_path / "ours", devices=2)
    assert_equal(made, expected)
    assert_equal(weights(ours.lightning_module), weights(plain.lightning_module))
    assert_equal(optimizer_states(ours), optimizer_states(plain))
    assert ours.current_epoch == plain.current_epoch and ours.global_step == plain.global_step > 0
    if not case.counts_batches:
        strategy = RoundPipeStrategy(microbatches=MICROBATCHES, split="step")
        _, ours, again = trained(case, strategy, tmp_path / "split", devices=2)
        _, plain, _ = trained(case, "auto", tmp_path / "accumulated", MICROBATCHES)
        assert_equal(weights(ours.lightning_module), weights(plain.lightning_module))
        assert again is in_background
    table[name] = Row(name, in_background, case.notes)


def test_pruning_with_staleness_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"parameters were replaced during training: .* Change them before fit"):
        trained(CASES["ModelPruning"], RoundPipeStrategy(1, split="step", staleness=1), tmp_path / "stale")


def test_no_callback_is_left_out() -> None:
    assert CASES.keys() == set(callbacks.__all__)


# --- the tuner

TUNER = {
    "Tuner.scale_batch_size": "as `BatchSizeFinder`; with `steps_per_trial` of 6 or more, for what a device holds is"
    " settled only after some batches",
    "Tuner.lr_find": "as `LearningRateFinder`",
}


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_batch_size_that_fits_a_device(mode: str, tmp_path: Path, table: dict[str, Row]) -> None:
    """The tuner runs out of memory, and training goes on as if it had not been there.

    A sample takes about 360 bytes, a batch of 19 samples 9,745.
    """

    def fits(size: int) -> bool:
        module = make(Loads)
        module.batch_size = size
        try:
            on_a_device().fit(module)
        except torch.OutOfMemoryError:
            return False
        return True

    def on_a_device() -> L.Trainer:
        strategy = RoundPipeStrategy(1, split="step", devices=[SimulatedDevice(0, capacity=9925)])
        return trainer_for(strategy, max_epochs=2, default_root_dir=tmp_path)

    module, trainer, notes = make(Loads), on_a_device(), Notes()
    trainer.callbacks.append(notes)
    found = Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=6, margin=0.0)
    assert found == module.batch_size
    assert fits(found) and not fits(found * 2 if mode == "power" else found + 1)
    plain = make(Loads)
    assert_equal(weights(module), weights(plain))
    plain.batch_size = found
    trainer.fit(module)
    trainer_for(max_epochs=2).fit(plain)
    assert_equal(weights(module), weights(plain))
    name = "Tuner.scale_batch_size"
    table[name] = Row(name, notes.in_background, TUNER[name])


@pytest.mark.parametrize("staleness", [0, 1])
def test_tuned_learning_rate(staleness: int, tmp_path: Path, table: dict[str, Row]) -> None:
    found = []
    for strategy in ("auto", RoundPipeStrategy(1, split="step", staleness=staleness)):
        module, notes = make(Loads), Notes()
        trainer = trainer_for(strategy, max_epochs=1, default_root_dir=tmp_path, callbacks=[notes])
        finder = Tuner(trainer).lr_find(module, num_training=14)
        trainer.fit(module)
        found.append((finder.results, module.lr, trainer.global_step, *([weights(module)] if not staleness else [])))
    assert found[0][2] == found[1][2] == 32
    if not staleness:
        assert_equal(*found)
    table["Tuner.lr_find"] = Row("Tuner.lr_find", notes.in_background, TUNER["Tuner.lr_find"])


# --- after an error


class FailsAfterStep(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 4:
            raise ValueError("enough")


class FailsBeforeBackward(Net):
    def backward(self, loss: Tensor) -> None:
        if self.trainer.global_step == 3:
            raise ValueError("the fourth loss is bad")
        loss.backward()


class FailsBetween(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.trainer.global_step == 3:
            raise ValueError("the fourth loss is bad")


@pytest.mark.parametrize("model", [FailsAfterStep, FailsBeforeBackward, FailsBetween])
def test_checkpoint_of_an_error(model: type[Net], tmp_path: Path) -> None:
    """Wherever it was raised: the state after the last step that was made."""
    case = replace(CASES["OnExceptionCheckpoint"], model=model)
    expected, _, _ = trained(case, "auto", tmp_path / "plain")
    made, _, _ = trained(case, RoundPipeStrategy(1, split="step"), tmp_path / "ours", devices=2)
    assert_equal(made, expected)


class Drops(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fails = True

    def loss(self, batch: Any) -> Tensor:
        if self.fails and self.trainer.global_step == 3:
            raise ValueError("the first batch of the second epoch is bad")
        return super().loss({"x": F.dropout(batch["x"], 0.3, self.training), "y": batch["y"]})


@pytest.mark.parametrize("staleness", [0, 1])
def test_run_resumed_after_an_error(staleness: int, tmp_path: Path) -> None:
    """It ends as one that had no error."""

    def train(fails: bool, path: str | None = None) -> L.LightningModule:
        module, strategy = make(Drops), RoundPipeStrategy(MICROBATCHES, split="step", staleness=staleness)
        module.fails = fails
        run = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": True}
        trainer = trainer_for(strategy, devices=2, callbacks=[callbacks.OnExceptionCheckpoint(tmp_path)], **run)
        L.seed_everything(4, verbose=False)
        trainer.fit(module, DataLoader(TRAIN, batch_size=None), ckpt_path=path, weights_only=False if path else None)
        assert trainer.global_step == 6
        return module

    expected = weights(train(fails=False))
    with pytest.raises(ValueError, match="is bad"):
        train(fails=True)
    assert_equal(weights(train(fails=False, path=str(tmp_path / "on_exception.ckpt"))), expected)


class BadGradient(torch.autograd.Function):
    """Its backward waits for the event, and fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, event: threading.Event) -> Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert ctx.event.wait(20)
        raise ValueError("no gradient")


class FailsInBackward(Net):
    """In the last batch of the first epoch, whose backward is still under way when validation begins."""

    def __init__(self) -> None:
        super().__init__()
        self.validates = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.backbone:
            x = block(x)
        if self.training and self.trainer.global_step == 2:
            x = BadGradient.apply(x, self.validates)
        return self.head(x)

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.validates.set()


def test_error_of_training_when_validation_begins(tmp_path: Path) -> None:
    """It leaves the module in training mode, so that the next fit trains as the first would have. That a checkpoint
    lacks a step which the Trainer counts is not concealed.
    """
    module, saver = make(FailsInBackward), callbacks.OnExceptionCheckpoint(tmp_path)
    run = {"max_epochs": 2, "callbacks": [saver], "enable_checkpointing": True}
    trainer = trainer_for(RoundPipeStrategy(1, split="step"), devices=2, **run)
    with pytest.raises(ValueError, match="no gradient"), pytest.warns(UserWarning, match="weights before that step"):
        trainer.fit(module, Batches(TRAIN), Batches(VAL))
    assert all(part.training for part in module.modules())
    plain = make(Net)
    trainer_for(max_steps=2).fit(plain, Batches(TRAIN))
    assert_equal(weights(module), weights(plain))
    assert saved(saver.ckpt_path)["global_step"] == 3
