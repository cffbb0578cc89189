"""What people see of a run while it goes on: metrics in their loggers, and once what could be better."""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_roundpipe import microbatch as mb
from lightning_roundpipe.advice import Observed, StageTime, advise
from lightning_roundpipe.callbacks import callbacks_of
from lightning_roundpipe.host_need import resident_memory
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.processes import MultiProcessStrategy
from lightning_roundpipe.report import PipelineReport, stages_in_words
from lightning_roundpipe.schedules.costs import stage_ranges
from lightning_roundpipe.units import GB

if TYPE_CHECKING:
    from lightning_roundpipe.strategy import RoundPipeStrategy

_WARM = 2
_ADVISED = 10
"""Advice is given after so many batches, by what those after the first two have shown."""


class PipelineMonitor(Callback):
    """Logs what the pipeline does, and says once if a run is slower or larger than it need be. A strategy adds one to
    its trainer unless there is one.

    Every ``log_every_n_steps`` steps it gives the trainer's loggers ``roundpipe/device0_busy`` and others: what has
    happened since it did so the last time, as the difference of two of the strategy's reports.

    Args:
        metrics: Whether it logs, where the trainer has loggers, and measures what takes measuring.
    """

    def __init__(self, metrics: bool = True) -> None:
        self.metrics = metrics
        self._advised = False
        self._begin_anew()

    def _begin_anew(self, pipeline: Pipeline | None = None) -> None:
        self._pipeline = pipeline
        """What it tells of. A strategy builds another one where modules were replaced, by pruning, say."""
        self.logged: PipelineReport | None = None
        """The strategy's report when metrics were logged the last time."""
        self._batches = self._microbatches = 0
        self._counts = Counts()
        self._warm: PipelineReport | None = None

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """
        Raises:
            MisconfigurationException: With any other strategy.
        """
        if not isinstance(trainer.strategy, MultiProcessStrategy):
            raise MisconfigurationException(
                f"PipelineMonitor tells of RoundPipeStrategy, and this trainer has {type(trainer.strategy).__name__}."
            )

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._begin_anew()
        self._advised = False

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._pipeline = None

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: RoundPipeStrategy = trainer.strategy  # type: ignore[assignment]
        pipeline = strategy.pipeline
        if pipeline is None or not trainer.is_global_zero:  # manual optimization
            return
        if pipeline is not self._pipeline:
            self._begin_anew(pipeline)
        if pipeline.batches == self._batches:
            return  # a batch without the pipeline
        self._batches = pipeline.batches
        self._microbatches = max(self._microbatches, pipeline.last_microbatches)
        if self._batches == 1 and shows_summary(trainer):
            for plan in pipeline.plans():
                rank_zero_info(f"roundpipe: {stages_in_words(plan)}")
        if self._batches == _WARM:
            self._warm = strategy.report()
        if self._batches == _ADVISED and self._warm is not None and not self._advised:
            self._advised = True
            seen = observed(pipeline, self._microbatches, strategy.way[0], self._warm, strategy.report())
            for message in advise(seen):
                rank_zero_info(f"roundpipe: {message}")
        if not (self.metrics and trainer.loggers):
            return
        self._counts.add(batch)
        if trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate():
            self._log(trainer, strategy)

    def _log(self, trainer: "pl.Trainer", strategy: "RoundPipeStrategy") -> None:
        report = strategy.report()
        metrics = metrics_between(self.logged, report, self._counts)
        if not strategy.steps_in_background:
            del metrics["optimizer_lag"]  # Lightning makes the step, and all of it is waited for
        if (resident := resident_memory()) is not None:
            metrics["host_memory_GB"] = resident / GB
        self.logged = report
        self._counts = Counts()
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics({f"roundpipe{logger.group_separator}{k}": v for k, v in metrics.items()}, step=step)


class Counts:
    """Samples and tokens of some batches; None where one of them does not tell."""

    def __init__(self) -> None:
        self.samples: int | None = 0
        self.tokens: int | None = 0

    def add(self, batch: Any) -> None:
        self.samples = _sum(self.samples, mb.batch_size(batch) if mb.can_be_split(batch) else None)
        self.tokens = _sum(self.tokens, mb.count_tokens(batch))


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


def metrics_between(before: PipelineReport | None, after: PipelineReport, counts: Counts) -> dict[str, float]:
    """What happened between two reports; without an earlier one, since the first batch began.

    Args:
        before: The earlier one.
        after: The later one.
        counts: Samples and tokens meanwhile.
    """
    seconds = after.training_seconds - (before.training_seconds if before else 0.0)
    batches = after.batches - (before.batches if before else 0)
    waited = after.optimizer_wait_seconds - (before.optimizer_wait_seconds if before else 0.0)
    metrics: dict[str, float] = {}
    busy, uploads, up = [], [], 0
    for index, device in enumerate(after.devices):
        earlier = before.devices[index] if before else None
        busy.append((device.busy_seconds - (earlier.busy_seconds if earlier else 0.0)) / seconds)
        metrics[f"device{index}_busy"] = busy[-1]
        up += device.traffic.up - (earlier.traffic.up if earlier else 0)
        if device.upload_wait_seconds is not None:
            sofar = (earlier.upload_wait_seconds or 0.0) if earlier else 0.0
            uploads.append((device.upload_wait_seconds - sofar) / seconds)
        if device.peak_memory is not None:
            metrics[f"device{index}_memory_GB"] = device.peak_memory / GB
    metrics["bubble"] = 1 - sum(busy) / len(busy)
    if uploads:
        metrics["upload_wait"] = sum(uploads) / len(uploads)
    metrics["optimizer_lag"] = waited / batches
    metrics["upload_GBps"] = up / GB / seconds
    for name, count in (("samples", counts.samples), ("tokens", counts.tokens)):
        if count is not None:
            metrics[f"{name}_per_second"] = count / seconds
    return metrics


def observed(
    pipeline: Pipeline, microbatches: int, split: str, before: PipelineReport, after: PipelineReport
) -> Observed:
    """What advice is given by.

    Args:
        pipeline: The pipeline.
        microbatches: The most that a batch was split into.
        split: How batches are split.
        before: The report when things had settled down.
        after: A later one.
    """
    batches = after.batches - before.batches
    waits = [
        device.upload_wait_seconds - (earlier.upload_wait_seconds or 0.0)
        for earlier, device in zip(before.devices, after.devices, strict=True)
        if device.upload_wait_seconds is not None
    ]
    return Observed(
        len(after.devices),
        microbatches,
        split,
        pipeline.store.staleness,
        {row.name: row.parameters for row in after.layers},
        stage_times(pipeline),
        (after.training_seconds - before.training_seconds) / batches,
        (after.optimizer_wait_seconds - before.optimizer_wait_seconds) / batches,
        sum(waits) / len(waits) / batches if waits else None,
    )


def stage_times(pipeline: Pipeline) -> list[StageTime]:
    """What the stages take by the measured costs, where microbatches take turns in those of one plan."""
    plan = pipeline.plan
    if plan is None or pipeline.serial_reason is not None:
        return []
    names = [pipeline.layers[call].name for call in plan.calls]
    found = []
    forward, backward = pipeline.measured.costs_of(plan.calls)
    for stage, calls in enumerate(stage_ranges(plan.partition)):
        below = stage < len(plan.partition.forward)
        seconds = sum((forward if below else backward)[call] for call in calls)
        if stage == plan.fused_stage:  # instead of a recompute there is the forward
            kept = (call for call in calls if not pipeline.measured.recomputes(plan.calls[call]))
            seconds += sum(forward[call] for call in kept)
        found.append(StageTime(f"{'F' if below else 'B'}{stage}", [names[call] for call in calls], seconds))
    return found


def shows_summary(trainer: "pl.Trainer") -> bool:
    """Whether Lightning prints its model summary, here."""
    summaries = (callback for callback in callbacks_of(trainer) if isinstance(callback, ModelSummary))
    return trainer.is_global_zero and any(summary._max_depth for summary in summaries)
