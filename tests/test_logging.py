"""What the user logs is what plain Lightning logs on the same batches: step values of the whole batch, epoch values,
every option.
"""

import csv
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from helpers import RoundPipeStrategy, assert_alike, differs, fit
from lightning.pytorch.loggers import CSVLogger, Logger
from models import MLP, Lit, batches_of, vectors
from torch import Tensor, nn

# batches of different sizes, the last one too small for all microbatches, so that every weight matters
BATCHES = [batches_of(vectors, 1, size, seed=size)[0] for size in (8, 6, 7, 2)]
VAL = batches_of(vectors, 2, 5, seed=50)
TOLERANCE = 1e-6


class Kept(Logger):
    """Keeps every row that Lightning hands to a logger, but those of the pipeline's own monitor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name, version = "kept", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not all(name.startswith("roundpipe/") for name in metrics):
            self.rows.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Shown(L.Callback):
    """What a callback, and the progress bar, see after every batch and every epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, dict[str, float]]] = []

    def look(self, trainer: L.Trainer) -> None:
        everything = {
            "callback": trainer.callback_metrics,
            "logged": trainer.logged_metrics,
            "bar": trainer.progress_bar_metrics,
        }
        self.seen.append(
            {kind: {name: float(value) for name, value in found.items()} for kind, found in everything.items()}
        )

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.look(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.look(trainer)


class Logs(MLP):
    """Logs what `report` says about a batch's outputs."""

    def __init__(self, report: Callable[["Logs", dict[str, Tensor], Tensor, Tensor], None], **options: Any) -> None:
        super().__init__(**options)
        self.report = report
        self.mean = torchmetrics.MeanMetric()
        self.error = torchmetrics.MeanSquaredError()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.both = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
        )
        self.worst = torchmetrics.MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch["x"])
        loss = nn.functional.mse_loss(out, batch["y"])
        self.report(self, batch, out.detach(), loss)
        return loss


def two_runs(
    report: Callable, m: int | None = 3, devices: int = 2, make: type[Logs] = Logs, **run: Any
) -> tuple[tuple[list, list], tuple[list, list]]:
    """(what callbacks saw, what the logger got) of ours and of plain Lightning."""
    found = []
    for strategy, count in ((RoundPipeStrategy(microbatches=m), devices), ("auto", 1)):
        torch.manual_seed(7)
        shown, kept = Shown(), Kept()
        options = {"max_epochs": 2, "val_batches": VAL} | run
        fit(make(report).double(), BATCHES, strategy, devices=count, callbacks=[shown], logger=kept, **options)
        found.append((shown.seen, kept.rows))
    return found[0], found[1]


def assert_logs_alike(report: Callable, *names: str, **run: Any) -> None:
    ours, plain = two_runs(report, **run)
    everything = {name for seen in plain[0] for name in seen["callback"]}
    assert set(names) <= everything, everything
    assert_alike(list(ours), list(plain), TOLERANCE)


def scalar(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.log("loss", loss)


def step_and_epoch(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)


def epoch_only(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(out))
    model.log("shown", loss * 2, prog_bar=True, logger=False)
    model.log("hidden", loss * 3, logger=False)


def by_dict(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.log_dict(
        {"loss": loss, "size": out.abs().mean()}, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(out)
    )


def named_reductions(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    for on_step in (False, True):
        where = {"on_step": on_step, "on_epoch": True, "batch_size": len(out)}
        model.log(f"mean{on_step}", out.mean(), reduce_fx="mean", **where)
        model.log(f"sum{on_step}", out.sum(), reduce_fx="sum", **where)
        model.log(f"count{on_step}", float(len(out)), reduce_fx="sum", **where)
        model.log(f"min{on_step}", out.min(), reduce_fx="min", **where)
        model.log(f"max{on_step}", out.max(), reduce_fx="max", **where)


def function_reductions(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.log("mean", out.mean(), reduce_fx=torch.mean, on_epoch=True, on_step=False, batch_size=len(out))
    model.log("sum", out.sum(), reduce_fx=torch.sum, on_epoch=True, on_step=False)
    model.log("min", out.min(), reduce_fx=torch.min, on_epoch=True, on_step=False)
    model.log("max", out.max(), reduce_fx=torch.max, on_epoch=True, on_step=False)


def numbers(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.log("float", loss.item(), on_step=True, on_epoch=True, batch_size=len(out))
    model.log("constant", 3, on_step=True, on_epoch=True, batch_size=len(out))
    model.log("step", float(model.global_step), on_step=True, on_epoch=False)
    model.log("batch", model.trainer.fit_loop.epoch_loop.batch_idx, on_epoch=True, on_step=False, batch_size=len(out))


def graph_kept(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.log("loss", loss, on_step=True, on_epoch=True, enable_graph=True)
    model.log("synced", loss, sync_dist=True, rank_zero_only=True, on_step=False, on_epoch=True)
    model.log("twice", loss, on_step=True, on_epoch=True)


def metric_forward(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    """The documented pattern: call the metric, log the object. The step value is that of the batch."""
    model.accuracy(out, batch["y"].argmax(1))
    model.log("accuracy", model.accuracy, on_step=True, on_epoch=True, prog_bar=True)
    model.error(out.contiguous(), batch["y"].contiguous())
    model.log("error", model.error, on_step=True, on_epoch=False)


def metric_update(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.mean.update(out.mean(), weight=len(out))
    model.log("mean", model.mean, on_step=False, on_epoch=True)
    model.worst.update(out.max())
    model.log("worst", model.worst, on_step=False, on_epoch=True)


def metric_collection(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    model.both(out.contiguous(), batch["y"].contiguous())
    model.log_dict(model.both, on_step=False, on_epoch=True)


def metric_value(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
    """Logs the value that a metric's forward returned, which is one of a microbatch: a mean over samples merges all the
    same.
    """
    model.log(
        "mse", model.error(out.contiguous(), batch["y"].contiguous()), on_step=True, on_epoch=True, batch_size=len(out)
    )


REPORTS: dict[Callable, list[str]] = {
    scalar: ["loss", "val_loss"],
    step_and_epoch: ["loss", "loss_step", "loss_epoch"],
    epoch_only: ["loss", "shown", "hidden"],
    by_dict: ["loss_step", "loss_epoch", "size_step", "size_epoch"],
    named_reductions: ["meanFalse", "sumTrue_step", "countTrue_epoch", "minTrue_step", "maxTrue_epoch"],
    function_reductions: ["mean", "sum", "min", "max"],
    numbers: ["float_epoch", "constant_epoch", "step", "batch"],
    graph_kept: ["loss_step", "synced", "twice_epoch"],
    metric_forward: ["accuracy_step", "accuracy_epoch", "error"],
    metric_update: ["mean", "worst"],
    metric_collection: ["mse", "mae"],
    metric_value: ["mse_step", "mse_epoch"],
}


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
def test_logs_equal_plain_lightning_s(report: Callable) -> None:
    for m, devices in ((1, 2), (3, 2)):
        assert_logs_alike(report, *REPORTS[report], m=m, devices=devices)


@pytest.mark.parametrize(
    "run",
    [{"accumulate_grad_batches": 2}, {"log_every_n_steps": 3}, {"max_steps": 5}, {"limit_train_batches": 2}],
    ids=str,
)
def test_logs_with_other_options_of_the_trainer(run: dict) -> None:
    for report in (step_and_epoch, metric_forward):
        assert_logs_alike(report, **run)


def test_logs_differ_from_those_of_the_last_microbatch() -> None:
    """The comparison can fail: the batches' losses differ from their parts'."""
    _, plain = two_runs(step_and_epoch)
    values = [seen["logged"]["loss_step"] for seen in plain[0] if "loss_step" in seen["logged"]]
    assert len(set(values)) >= 8
    assert differs(values[0], values[1])


class InHooks(Logs):
    """Logs from hooks and callbacks too: those run once per batch, on the main thread."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("started", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("ended", outputs["loss"], on_step=True, on_epoch=True, batch_size=len(batch["x"]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("gradient_norm", norm)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_done", self.current_epoch)


def test_logs_from_hooks() -> None:
    assert_logs_alike(
        step_and_epoch, "started", "ended_step", "ended_epoch", "gradient_norm", "epoch_done", make=InHooks
    )


class ByMetricOfItsOwn(Logs):
    """Computes and resets a metric by hand at the end of the epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.error.compute())
        self.error.reset()


def test_metric_computed_by_hand() -> None:
    def report(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
        model.error.update(out.contiguous(), batch["y"].contiguous())

    assert_logs_alike(report, "by_hand", make=ByMetricOfItsOwn)


def test_csv_logger_writes_one_row_a_step(tmp_path: Path) -> None:
    """Of the module's logs; the pipeline's monitor has rows of its own, as Lightning's monitors have."""
    tables = []
    for name, strategy, devices in (("ours", RoundPipeStrategy(microbatches=3), 2), ("plain", "auto", 1)):
        torch.manual_seed(7)
        logger = CSVLogger(tmp_path, name, version="0", flush_logs_every_n_steps=1)
        fit(
            Logs(step_and_epoch).double(),
            BATCHES,
            strategy,
            devices=devices,
            logger=logger,
            max_epochs=3,
            val_batches=VAL,
        )
        with open(tmp_path / name / "0" / "metrics.csv", newline="") as file:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        tables.append([row for row in rows if "roundpipe/bubble" not in row])
        assert len(rows) - len(tables[-1]) == (12 if name == "ours" else 0)
    steps = [row["step"] for row in tables[0] if "loss_step" in row]
    assert steps == [float(step) for step in range(12)]
    assert_alike(*tables, tolerance=TOLERANCE)


def test_logs_of_one_device_equal_those_of_several() -> None:
    first, _ = two_runs(step_and_epoch, devices=1)
    for devices in (2, 3, 2):
        assert two_runs(step_and_epoch, devices=devices)[0] == first


class Forgets(Logs):
    """One microbatch logs what the others don't."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.equal(batch["x"], BATCHES[0]["x"].tensor_split(2)[1]):
            self.log("rare", torch.tensor(5.0), on_step=True, on_epoch=False)
        return loss


def test_a_name_that_only_one_microbatch_logs() -> None:
    ours, _ = two_runs(scalar, m=2, make=Forgets)
    assert next(seen["callback"]["rare"] for seen in ours[0] if "rare" in seen["callback"]) == 5.0


def test_logging_a_wrong_value_fails_as_in_plain_lightning() -> None:
    def vector(model: Logs, batch: dict[str, Tensor], out: Tensor, loss: Tensor) -> None:
        model.log("vector", out)

    messages = []
    for strategy, devices in ((RoundPipeStrategy(microbatches=2), 2), ("auto", 1)):
        with pytest.raises(ValueError, match="single element") as caught:
            fit(Logs(vector).double(), BATCHES, strategy, devices=devices)
        messages.append(str(caught.value).split("vector")[0])
    assert messages[0] == messages[1]


class Prints(Lit):
    """`self.print`, `self.trainer`, `self.global_step` and `self.current_epoch` work inside a training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def loss(self, batch: Any) -> Tensor:
        self.print(f"epoch {self.current_epoch} step {self.global_step} of {self.trainer.max_epochs}")
        return self.layer(batch["x"]).mean()


def test_the_module_s_own_properties(capsys: pytest.CaptureFixture) -> None:
    fit(Prints().double(), BATCHES, RoundPipeStrategy(microbatches=2), devices=2)
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert lines == [f"epoch 0 step {step} of 1" for step in range(4) for _ in range(2)]


class LogsInside(nn.Module):
    """A layer that logs, by a reference to the module or to the trainer."""

    def __init__(self, owner: Callable[[], L.LightningModule]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.owner().log("mean", y.detach().mean(), on_step=True, on_epoch=True)
        self.owner().log_dict({"calls": 1.0}, reduce_fx="sum", on_step=False, on_epoch=True)
        return y


class HoldsLoggingLayers(L.LightningModule):
    def __init__(self, by: str) -> None:
        super().__init__()
        reference = weakref.ref(self)
        ways = {"module": lambda: reference(), "trainer": lambda: reference().trainer.lightning_module}
        self.net = nn.Sequential(LogsInside(ways[by]), nn.Linear(4, 4), nn.Linear(4, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HoldsThemWithABackwardOfItsOwn(HoldsLoggingLayers):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


@pytest.mark.parametrize("kind", [HoldsLoggingLayers, HoldsThemWithABackwardOfItsOwn])
@pytest.mark.parametrize("by", ["module", "trainer"])
@pytest.mark.parametrize(("m", "split"), [(1, "step"), (3, "step"), (3, "model"), (3, "whole")])
def test_layers_that_log_do_so_once(kind: type[HoldsLoggingLayers], by: str, m: int, split: str) -> None:
    """The recompute logged again, in part after the step's end."""
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
    seen = []
    for strategy in ("auto", RoundPipeStrategy(microbatches=m, split=split)):
        torch.manual_seed(0)
        logger = Kept()
        trainer = fit(kind(by).double(), batches, strategy, devices=1 if strategy == "auto" else 2, logger=logger)
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seen.append((values, [row["mean_step"] for _, row in logger.rows if "mean_step" in row]))
    (plain, plain_steps), (ours, our_steps) = seen
    assert ours["calls"] == plain["calls"] * (m if split == "step" else 1)
    assert ours["mean_epoch"] == pytest.approx(plain["mean_epoch"]) and our_steps == pytest.approx(plain_steps)
    assert len(our_steps) == 4
