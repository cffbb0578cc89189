"""``self.log`` inside a split step: recorded per microbatch, replayed once as if the batch had not been split."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torchmetrics import Metric

from lightning_roundpipe.devices import arrived
from lightning_roundpipe.microbatch import merge_losses
from lightning_roundpipe.pipeline.tape import in_layer, runs_again
from lightning_roundpipe.trees import map_tree, tensors

current_microbatch: ContextVar[int] = ContextVar("roundpipe_microbatch")

_LOG_SIGNATURE = signature(pl.LightningModule.log)


class StepLogging:
    """Stands in for ``LightningModule.log`` and the ``forward`` of metrics while the microbatches run.

    Args:
        module: The user's module.
        sizes: Number of samples in each microbatch, or any weights in place of them.
        fresh_metrics: Clones of the metrics, by id, kept from batch to batch.
        before_sync: Called before a metric talks to other processes, if there are any.
        bring_down: Brings a tensor to host memory, where it will have arrived when all microbatches' losses have.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        sizes: Sequence[float],
        fresh_metrics: dict[int, Metric],
        before_sync: Callable[[], None],
        bring_down: Callable[[Tensor], Tensor],
    ) -> None:
        self._module = module
        self._sizes = sizes
        self._fresh_metrics = fresh_metrics
        self._before_sync = before_sync
        self._bring_down = bring_down
        self._logs: list[list[dict[str, Any]]] = [[] for _ in sizes]
        # By id: a metric's hash follows its state.
        self._updates: dict[int, list[list[tuple[Any, Any]]]] = {}
        self.layers_log = False
        """Whether a layer has called ``log``: what stands in for it must stay to the end of the backward then."""

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """With a single microbatch: only what layers log again in their recompute is left out."""
        module = self._module.__dict__
        own_log, log = module.get("log"), self._module.log

        def log_once(*args: Any, **kwargs: Any) -> None:
            if not runs_again():
                self.layers_log |= in_layer()
                log(*args, **kwargs)

        module["log"] = log_once
        try:
            yield
        finally:
            put_back(module, "log", own_log)

    @contextmanager
    def recording(self) -> Iterator[None]:
        module = self._module.__dict__
        own_log = module.get("log")
        metrics = [metric for metric in self._module.modules() if isinstance(metric, Metric)]
        own_forwards = [metric.__dict__.get("forward") for metric in metrics]
        own_syncs = [metric.__dict__.get("sync") for metric in metrics]
        module["log"] = self._log
        for metric in metrics:
            metric.__dict__["forward"] = self._forward_of(metric, metric.forward)
            metric.__dict__["sync"] = self._sync_of(metric.sync)
        try:
            yield
        finally:
            put_back(module, "log", own_log)
            for metric, forward, sync in zip(metrics, own_forwards, own_syncs, strict=True):
                put_back(metric.__dict__, "forward", forward)
                put_back(metric.__dict__, "sync", sync)

    def replay(self, losses: Sequence[Tensor | None], loss_weights: Sequence[float]) -> None:
        """Logs every name once, with the value of the whole batch.

        Args:
            losses: The microbatches' losses. Where it is these that were logged, they are merged as losses are.
            loss_weights: Their weights.
        """
        self._wait_for_values()
        occurrences: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
        for microbatch, entries in enumerate(self._logs):
            seen: dict[str, int] = {}
            for entry in entries:
                name = entry["name"]
                number = seen.get(name, 0)
                seen[name] = number + 1
                occurrences.setdefault((name, number), []).append((microbatch, entry))
        for parts in occurrences.values():
            self._module.log(**self._merge(parts, losses, loss_weights))

    def _log(self, *args: Any, **kwargs: Any) -> None:
        if runs_again():
            return
        self.layers_log |= in_layer()
        entry = _LOG_SIGNATURE.bind(self._module, *args, **kwargs).arguments
        entry.pop("self")
        if isinstance(entry["value"], Tensor) and not entry.get("enable_graph", False):
            entry["value"] = self._copied(entry["value"].detach())
        self._logs[current_microbatch.get()].append(dict(entry))

    def _copied(self, value: Tensor) -> Tensor:
        """The value as it is now, in host memory, for the main thread."""
        down = self._bring_down(value)
        return value.clone() if down is value else down

    def _wait_for_values(self) -> None:
        """They may be on their way down."""
        logged = (entry["value"] for entries in self._logs for entry in entries)
        updates = (values for of_metric in self._updates.values() for of_part in of_metric for values in of_part)
        for value in chain(logged, updates):
            if not isinstance(value, Metric):
                for tensor in tensors(value):
                    arrived(tensor)

    def _forward_of(self, metric: Metric, forward: Callable[..., Any]) -> Callable[..., Any]:
        number = id(metric)  # within a layer, its replica is called

        def recording_forward(*args: Any, **kwargs: Any) -> Any:
            if not runs_again():
                updates = self._updates.setdefault(number, [[] for _ in self._sizes])
                updates[current_microbatch.get()].append(self._at_hand((args, kwargs)))
            return forward(*args, **kwargs)

        return recording_forward

    def _at_hand(self, values: Any) -> Any:
        """Values for the main thread, where the module's tensors are."""
        if all(tensor.device.type == "cpu" for tensor in tensors(values)):
            return values
        return map_tree(lambda leaf: self._bring_down(leaf) if isinstance(leaf, Tensor) else leaf, values)

    def _sync_of(self, sync: Callable[..., None]) -> Callable[..., None]:
        def announced_sync(*args: Any, should_sync: bool = True, **kwargs: Any) -> None:
            if should_sync:
                self._before_sync()
            sync(*args, should_sync=should_sync, **kwargs)

        return announced_sync

    def _merge(
        self, parts: list[tuple[int, dict[str, Any]]], losses: Sequence[Tensor | None], loss_weights: Sequence[float]
    ) -> dict[str, Any]:
        merged = dict(parts[0][1])
        values = [entry["value"] for _, entry in parts]
        if isinstance(values[0], Metric):
            self._put_batch_value(values[0])
            return merged
        weights = [entry.get("batch_size") or self._sizes[microbatch] for microbatch, entry in parts]
        if merged.get("batch_size") is not None:
            merged["batch_size"] = sum(weights)
        reduce_fx = merged.get("reduce_fx", "mean")
        is_loss = [_is_the_loss(entry["value"], losses[microbatch]) for microbatch, entry in parts]
        if all(is_loss) and reduce_fx in ("mean", torch.mean) and any(loss_weights[i] for i, _ in parts):
            counted = [i for i, _ in parts if loss_weights[i]]  # the others' need not even be numbers
            value = merge_losses([losses[i] for i in counted], [loss_weights[i] for i in counted])
            assert value is not None
            merged["value"] = value if isinstance(values[0], Tensor) else value.item()
        else:
            merged["value"] = _reduce(values, weights, reduce_fx)
        return merged

    def _put_batch_value(self, metric: Metric) -> None:
        """The metric's step value becomes that of the whole batch instead of the last microbatch."""
        updates = self._updates.get(id(metric))
        if updates is None:
            return
        fresh = self._fresh_metrics.get(id(metric))
        if fresh is None:
            fresh = self._fresh_metrics[id(metric)] = metric.clone()
        fresh.reset()
        fresh._to_sync = metric.dist_sync_on_step  # as in the metric's own forward: compute alone would always
        for microbatch in updates:
            for args, kwargs in microbatch:
                fresh.update(*args, **kwargs)
        metric._forward_cache = fresh.compute()
        fresh.reset()


def _is_the_loss(value: Any, loss: Tensor | None) -> bool:
    if loss is None or not isinstance(value, (Tensor, float)):
        return False
    value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    return value.numel() == 1 and torch.equal(
        value.reshape(()).double().nan_to_num(), loss.reshape(()).double().nan_to_num()
    )


def put_back(attributes: dict[str, Any], name: str, own: Any) -> None:
    """Ends a stand-in among an object's attributes: None where there was none before."""
    if own is None:
        attributes.pop(name, None)
    else:
        attributes[name] = own


def _reduce(values: Sequence[Any], weights: Sequence[float], reduce_fx: Any) -> Any:
    """One value of several microbatches' values. Numbers stay Python numbers where all are equal."""
    if len(values) == 1:
        return values[0]
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    tensors = [torch.as_tensor(value) for value in values]
    if not all(tensor.numel() == 1 for tensor in tensors):
        return values[0]  # Lightning refuses it when it is replayed, naming the value
    stacked = torch.stack([tensor.detach().reshape(()).double() for tensor in tensors])
    if name == "sum":
        reduced = stacked.sum()
    elif name == "min":
        reduced = stacked.min()
    elif name == "max":
        reduced = stacked.max()
    else:
        if bool((stacked == stacked[0]).all()):
            return values[0]
        share = torch.tensor(weights, dtype=torch.float64)
        reduced = (stacked * share.to(stacked.device)).sum() / share.sum()
    if not isinstance(values[0], Tensor):
        return reduced.item()
    dtype = values[0].dtype
    return reduced.to(dtype if dtype.is_floating_point or name != "mean" else torch.get_default_dtype())


@contextmanager
def logging_nothing(trainer: "pl.Trainer") -> Iterator[None]:
    """Loggers are not told of what happens meanwhile; steps find others in their place that take anything."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
