"""What people see: metrics in their loggers, equal to the pipeline's own sums; the table at the start; advice."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Batches, fit
from lightning.pytorch.callbacks import ModelPruning, ModelSummary, RichModelSummary
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import MLP, batches_of, causal, gpt2, vectors

from lightning_roundpipe import PipelineMonitor, RoundPipeStrategy, Timeline
from lightning_roundpipe import microbatch as mb
from lightning_roundpipe.devices import SimulatedDevice
from lightning_roundpipe.devices.simulated_streams import StreamOrderError
from lightning_roundpipe.devices.stream_waits import StreamWaits
from lightning_roundpipe.report import PipelineReport
from lightning_roundpipe.state import step_waits
from lightning_roundpipe.state.step_waits import StepWaits

BATCHES = batches_of(vectors, 12, 6, torch.float32)
ALWAYS = {"device0_busy", "device1_busy", "bubble", "optimizer_lag", "upload_GBps", "samples_per_second"}
if Path("/proc/self/status").exists():
    ALWAYS.add("host_memory_GB")
OF_DEVICES = {"device0_memory_GB", "device1_memory_GB", "upload_wait"}


class Kept(Logger):
    """Keeps what it is given."""

    def __init__(self, separator: str = "/") -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}
        self.separator = separator

    @property
    def group_separator(self) -> str:
        return self.separator

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        prefix = f"roundpipe{self.separator}"
        ours = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if ours:
            assert step is not None and step not in self.rows
            self.rows[step] = ours


class Compared(Kept):
    """Compares what it is given with the pipeline's own sums at that moment, when nothing is under way, and with those
    of the timeline.
    """

    def __init__(self, monitor: PipelineMonitor, samples: int) -> None:
        super().__init__()
        self.monitor = monitor
        self.samples = samples
        self.trainer: L.Trainer | None = None
        self.before: PipelineReport | None = None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if step not in self.rows:
            return
        assert self.trainer is not None
        now, sums = self.monitor.logged, self.trainer.strategy.report()
        assert now is not None and now.devices == sums.devices and now.batches == sums.batches
        assert now.optimizer_wait_seconds == sums.optimizer_wait_seconds
        before, row = self.before, self.rows[step]
        seconds = now.training_seconds - (before.training_seconds if before else 0.0)
        busy = []
        for index, device in enumerate(now.devices):
            earlier = before.devices[index].busy_seconds if before else 0.0
            busy.append((device.busy_seconds - earlier) / seconds)
            assert row[f"device{index}_busy"] == busy[-1]
            calls = self.trainer.strategy.pipeline.recording.calls
            assert device.busy_seconds == sum(call.end - call.start for call in calls if call.device == index)
        assert row["bubble"] == 1 - sum(busy) / len(busy)
        up = sum(device.traffic.up for device in now.devices)
        up -= sum(device.traffic.up for device in before.devices) if before else 0
        assert row["upload_GBps"] == up / 10**9 / seconds and up > 0
        batches = now.batches - (before.batches if before else 0)
        assert row["samples_per_second"] == self.samples * batches / seconds
        self.before = now


def train(
    batches: list[Any], m: int = 3, model: L.LightningModule | None = None, hardware: Any = None, **options: Any
) -> L.Trainer:
    """On two devices."""
    strategy = RoundPipeStrategy(microbatches=m, split="step", devices=hardware)
    return fit(MLP() if model is None else model, batches, strategy, devices=2, **options)


# --- metrics


@pytest.mark.parametrize("every", [1, 4])
def test_metrics_are_the_pipeline_s_own_sums(every: int, tmp_path: Path) -> None:
    monitor = PipelineMonitor()
    logger = Compared(monitor, samples=6)
    timeline = Timeline(tmp_path / "timeline.json", batches=range(25))
    strategy = RoundPipeStrategy(
        microbatches=3,
        split="step",
        background_step=False,
        timeline=timeline,  # at rest at a batch's end
    )
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=logger, callbacks=[monitor],
        log_every_n_steps=every, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    logger.trainer = trainer
    trainer.fit(MLP(), Batches(BATCHES))
    assert list(logger.rows) == list(range(every - 1, 24, every))
    assert all(row.keys() == ALWAYS - {"optimizer_lag"} for row in logger.rows.values())
    assert monitor.logged is not None and monitor.logged.devices == strategy.report().devices


def test_beside_the_next_batch_they_add_up_all_the_same() -> None:
    monitor, logger = PipelineMonitor(), Kept()
    trainer = train(BATCHES, logger=logger, callbacks=[monitor])
    assert trainer.strategy.report().batches == len(logger.rows) == 12, "each step"
    assert all(row.keys() == ALWAYS for row in logger.rows.values())
    logged, end = monitor.logged, trainer.strategy.report()
    assert logged is not None and logged.batches == end.batches
    for before, after in zip(logged.devices, end.devices, strict=True):
        assert 0 < before.busy_seconds <= after.busy_seconds and before.traffic.up <= after.traffic.up
    assert all(row["optimizer_lag"] >= 0 for row in logger.rows.values())


@pytest.mark.parametrize("every", [1, 3, 4])
def test_modules_replaced_between_epochs(every: int) -> None:
    """The pipeline is built anew, and begins to count anew."""
    logger = Kept()
    trainer = L.Trainer(
        strategy=RoundPipeStrategy(microbatches=3, split="step"), accelerator="cpu", devices=2, max_epochs=3,
        logger=logger, callbacks=[ModelPruning("l1_unstructured", amount=0.2)], log_every_n_steps=every,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(MLP(), Batches(BATCHES[:4]))
    assert list(logger.rows) == list(range(every - 1, 12, every))
    assert all(value >= 0 for row in logger.rows.values() for name, value in row.items() if name != "bubble")


def test_labels_that_cannot_be_counted() -> None:
    labels = torch.ones(2, 3, dtype=torch.long)
    assert mb.count_tokens({"labels": labels}) == 6 and mb.count_tokens({"labels": labels.to_sparse()}) is None


def test_csv_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    train(BATCHES, logger=logger, log_every_n_steps=3)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == [2, 5, 8, 11]
    for row in rows:
        assert {f"roundpipe/{name}" for name in ALWAYS} <= row.keys()
        assert float(row["roundpipe/device0_busy"]) > 0 and float(row["roundpipe/bubble"]) < 1


def test_tensorboard_logger(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    train(BATCHES, logger=logger)
    told = b"".join(file.read_bytes() for file in Path(logger.log_dir).glob("events*"))
    assert all(f"roundpipe/{name}".encode() in told for name in ALWAYS)


def test_all_loggers_each_with_its_separator() -> None:
    loggers = [Kept(), Kept("-")]
    train(BATCHES[:2], logger=loggers)
    assert loggers[0].rows == loggers[1].rows and list(loggers[0].rows) == [0, 1]


def test_tokens() -> None:
    """Where the batch names labels: those that count."""
    monitor, logger = PipelineMonitor(), Kept()
    batches = batches_of(causal, 2, 6)
    assert batches[0]["labels"].dim() == 2
    strategy = RoundPipeStrategy(split="step", microbatches=2, loss_weight="tokens")
    fit(gpt2(), batches, strategy, logger=logger, callbacks=[monitor])
    for row, batch in zip(logger.rows.values(), batches, strict=True):
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        assert row["tokens_per_second"] == pytest.approx(row["samples_per_second"] * tokens / 6)


def test_accumulated_batches_count_together() -> None:
    logger = Kept()
    monitor = PipelineMonitor()
    train(BATCHES, logger=logger, accumulate_grad_batches=3, callbacks=[monitor])
    assert list(logger.rows) == [0, 1, 2, 3], "steps"


def test_metrics_off() -> None:
    logger = Kept()
    trainer = train(BATCHES[:3], hardware=simulated(), logger=logger, callbacks=[PipelineMonitor(metrics=False)])
    assert not logger.rows
    assert [row.upload_wait_seconds for row in trainer.strategy.report().devices] == [None, None]


def test_manual_optimization_has_no_pipeline() -> None:
    class ByHand(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    logger = Kept()
    fit(ByHand(), BATCHES[:2], RoundPipeStrategy(), logger=logger)
    assert not logger.rows


# --- the callback


def test_the_strategy_adds_one_for_the_time_of_fit() -> None:
    seen: list[list[PipelineMonitor]] = []

    class Looks(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append([callback for callback in trainer.callbacks if isinstance(callback, PipelineMonitor)])

    looks = Looks()
    trainer = train(BATCHES[:2], m=2, callbacks=[looks])
    assert len(seen[0]) == 1 and seen[0][0].metrics
    assert trainer.callbacks == [looks]
    own = PipelineMonitor(metrics=False)
    trainer = train(BATCHES[:2], m=2, callbacks=[own, looks])
    assert seen[1] == [own] and trainer.callbacks == [own, looks]


def test_it_lets_the_optimizer_step_in_the_background() -> None:
    logged: list[str] = []

    class Notes(Kept):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.extend(metrics)

    train(BATCHES[:2], m=2, logger=Notes(), callbacks=[PipelineMonitor()])
    assert "roundpipe/optimizer_lag" in logged


def test_each_fit_begins_anew() -> None:
    monitor, logger = PipelineMonitor(), Kept()
    for _ in range(2):
        logger.rows.clear()
        train(BATCHES[:3], m=2, logger=logger, callbacks=[monitor])
        assert list(logger.rows) == [0, 1, 2]
        assert monitor.logged is not None and monitor.logged.batches == 3


def test_it_is_not_for_other_strategies() -> None:
    with pytest.raises(MisconfigurationException, match=r"PipelineMonitor tells of RoundPipeStrategy, .* SingleDevice"):
        fit(MLP(), BATCHES[:1], "auto", callbacks=[PipelineMonitor()])


# --- what is waited for


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0

    def perf_counter(self) -> float:
        self.asked += 1
        return self.now


def test_waits_count_while_a_step_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(step_waits, "time", clock)
    waits = StepWaits()
    with waits.waiting():  # for the backward
        clock.now = 10.0
    waits.begin_step()
    clock.now = 20.0
    waits.end_step()
    assert waits.seconds == 0 and clock.asked == 0, "nobody has waited for a step"
    with waits.waiting():
        clock.now = 21.0
        waits.begin_step()
        clock.now = 24.0
        with waits.waiting():  # a second thread
            clock.now = 25.0
        clock.now = 26.0
    assert waits.seconds == 5.0
    with waits.waiting():
        clock.now = 27.0
        waits.end_step()
        clock.now = 30.0
    assert waits.seconds == 6.0 and clock.asked == 4
    with pytest.raises(KeyError), waits.waiting():
        raise KeyError
    waits.begin_step()
    assert waits.seconds == 6.0 and clock.asked == 4


def test_a_stream_s_waits() -> None:
    device = SimulatedDevice(0, bandwidth=1000.0)
    compute, copies = device.stream("compute"), device.stream("copies")
    waits = StreamWaits(partial(device.timestamp, compute))
    device.count("up", 3000, copies)
    with waits.measured():
        compute.wait_event(copies.record_event())
    copies.issue()
    with waits.measured():
        compute.wait_event(copies.record_event())  # which takes no time
    device.count("up", 500, copies)
    with waits.measured():
        compute.wait_event(copies.record_event())
    with pytest.raises(StreamOrderError, match="not known before both have come"):
        device.timestamp(copies).elapsed_time(device.timestamp(compute))
    copies.synchronize()
    waits.collect()
    assert waits.seconds == pytest.approx(3.5)
    waits.collect()
    assert waits.seconds == pytest.approx(3.5), "once"


def simulated(**options: Any) -> list[SimulatedDevice]:
    return [SimulatedDevice(index, **options) for index in range(2)]


def test_devices_with_memory_of_their_own() -> None:
    """By the model, computing takes no time, so all that a device does is wait."""
    logger, devices = Kept(), simulated(bandwidth=1e6)
    trainer = train(BATCHES, model=MLP(depth=6), hardware=devices, logger=logger)
    assert all(row.keys() == ALWAYS | OF_DEVICES for row in logger.rows.values())
    report = trainer.strategy.report()
    for device, row in zip(devices, report.devices, strict=True):
        assert row.peak_memory == device.memory.peak > 0
        assert row.upload_wait_seconds is not None and row.upload_wait_seconds > 0
    last = list(logger.rows.values())[-1]
    assert last["device1_memory_GB"] <= devices[1].memory.peak / 10**9
    assert all(row["upload_wait"] > 0 for row in logger.rows.values())


def test_nothing_is_waited_for_where_copies_take_no_time() -> None:
    trainer = train(BATCHES[:3], hardware=simulated())
    assert [row.upload_wait_seconds for row in trainer.strategy.report().devices] == [0.0, 0.0]


def test_virtual_devices_have_no_memory_of_their_own() -> None:
    for row in train(BATCHES[:2]).strategy.report().devices:
        assert row.upload_wait_seconds is None and row.peak_memory is None


def test_marks_are_collected_on_the_way() -> None:
    """They do not pile up, however long a run logs nothing."""
    most = 0
    collect = StreamWaits.collect

    class Watched(StreamWaits):
        def collect(self) -> None:
            nonlocal most
            collect(self)
            most = max(most, len(self._marks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_roundpipe.devices.accelerator.StreamWaits", Watched)
        train(BATCHES[:4], hardware=simulated())
        few = most
        train(BATCHES * 2, hardware=simulated())
    assert most < 2 * few, "in six times as many batches; the stages that are found may differ"


# --- the table at the start


@pytest.mark.parametrize("summary", [ModelSummary(), RichModelSummary(max_depth=2)])
def test_the_table_groups_equal_layers(summary: ModelSummary, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train(BATCHES[:2], model=MLP(depth=48), callbacks=[summary])
    text = " ".join(caplog.text.split())
    assert "│ net.2 .. 49 │ Sequential │ 48 │ 3,456 │ 13.8 kB │" in text
    assert "│ all │ │ 50 │ 3,539 │ 14.2 kB │" in text
    assert "Host memory, at least: 42.5 kB in all, 14.2 kB for parameters, 14.2 kB for gradients, 14.2 kB for" in text
    assert "cpu:0, cpu:1 take stages of these layers in turn" in text
    assert text.count("roundpipe: stages, in layers: forward ") == 1
    assert caplog.text.count("\n") < 60


@pytest.mark.parametrize("callbacks", [[], [ModelSummary(max_depth=0)]], ids=["none", "off"])
def test_no_summary_no_table(callbacks: list[L.Callback], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train(BATCHES[:2], callbacks=callbacks)
    assert "│" not in caplog.text and "stages, in layers" not in caplog.text
    assert caplog.text.count("roundpipe: ") == 1, "the devices, in one line"


def test_parameters_that_no_layer_has(caplog: pytest.LogCaptureFixture) -> None:
    class Shifted(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(6), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.shift)

    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train(BATCHES[:2], model=Shifted(), callbacks=[ModelSummary()])
    assert "│ (no layer) │ │ │ 6 │ 0 │ 24 bytes │" in " ".join(caplog.text.split())


# --- advice


def test_advice_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train(BATCHES, m=2, max_epochs=2)
    assert caplog.text.count("roundpipe: 2 microbatches for 2 devices: ") == 1
    assert "RoundPipeStrategy(microbatches=3)" in caplog.text


def test_advice_needs_some_batches(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train(BATCHES[:9], m=2)
    assert "microbatches for" not in caplog.text
