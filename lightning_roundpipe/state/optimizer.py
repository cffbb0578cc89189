"""The optimizer worker: a thread that steps in the background, layer by layer, and publishes what it stepped.

A step works on a snapshot of the optimizer: a shallow copy with the groups' values of the moment it was handed in (a
scheduler may change them meanwhile), and what steps that were pending then have changed in them, on aliases of the
parameters (so that no two threads touch ``.grad`` of the user's parameters), sharing the per-parameter state.

It starts when the batch's backward has gone through: were layers stepped as soon as their gradients are there, an
error in the rest of the backward would leave a model of which one half has made the step.
"""

import inspect
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import FunctionType, GeneratorType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_roundpipe.devices.pinned import dense_strides
from lightning_roundpipe.pipeline.recording import Recording
from lightning_roundpipe.pipeline.turnstile import Cancelled, Monitor
from lightning_roundpipe.state.gradients import BatchGradients, Gradients
from lightning_roundpipe.state.parameters import ParameterStore, Unit
from lightning_roundpipe.state.sharing import is_same_memory

BeforeStep = Callable[[Optimizer], bool]
"""Runs on the snapshot with all gradients in place: unscales, clips. Returns whether to step at all."""

GroupChanges: TypeAlias = dict[str, tuple[Any, Any]]
"""What a step has changed in a parameter group: the value before, and after."""


class StepJob:
    """One optimizer step, handed in.

    Args:
        optimizer: The user's.
        gradients: Those of the last batch before the step.
        before_step: What comes before it, if anything.
        after_step: What comes after it.
        in_half_precision: Whether the gradients were computed in half precision. Then the step is fused where that is
            left to torch: several times faster, and what it rounds otherwise is far below the gradients' own rounding.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: BatchGradients,
        before_step: BeforeStep | None,
        after_step: Callable[[], None] | None,
        *,
        in_half_precision: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.gradients = gradients
        self.before_step = before_step
        self.after_step = after_step
        self.in_half_precision = in_half_precision
        self.recording: Recording | None = None
        """Where it is noted what happens when, if it is."""
        self.groups: list[dict[str, Any]] = []
        """The optimizer's groups when the step was handed in."""
        self.behind = 0
        """How many steps had been written back by then: what later ones have changed in the groups is not in these."""

    def take_groups(self, written: int) -> None:
        """Takes the groups as they are now, after so many steps."""
        self.behind = written
        self.groups = [dict(group) for group in self.optimizer.param_groups]
        for group in self.groups:
            group["params"] = list(group["params"])
            if isinstance(group.get("lr"), Tensor):
                group["lr"] = group["lr"].clone()

    def catch_up(self, changes: Iterable[Sequence[GroupChanges]]) -> None:
        """Puts into the groups what steps have changed there since, but for what somebody else has changed before."""
        for of_groups in changes:
            for group, of_group in zip(self.groups, of_groups, strict=False):
                for key, (before, after) in of_group.items():
                    if group.get(key) is before:
                        group[key] = after

    def recorded(self, name: str | None = None) -> AbstractContextManager[None]:
        """Around the step, or around a part of it with this name."""
        recording = self.recording
        if recording is None:
            return nullcontext()
        if name is None:
            return recording.adding(recording.steps, "optimizer step", self.gradients.number)
        return recording.adding(recording.units, name, self.gradients.number)


class OptimizerWorker:
    """Runs step jobs one after the other in a thread of its own.

    Args:
        store: Where steps are published.
        gradients: Where gradients come from.
        monitor: An error of the worker fails the pipeline through it, and the other way round.
        order: The units in the order in which the next batch needs them.
        threads: Number of cores for the step.
        average: Where there are several processes, averages their gradients, in place, before each step.
        in_thread: Around all that it does.
    """

    def __init__(
        self,
        store: ParameterStore,
        gradients: Gradients,
        monitor: Monitor,
        order: Sequence[Unit],
        threads: int,
        average: Callable[[], None] | None = None,
        in_thread: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._store = store
        self._gradients = gradients
        self._monitor = monitor
        self.order = order
        self._threads = threads
        self._average = average
        self._in_thread = in_thread
        self._jobs: queue.SimpleQueue[StepJob | None] = queue.SimpleQueue()
        self._idle = monitor.condition()
        self._finished = 0
        self._last_batch = -1
        self._aliases: dict[int, nn.Parameter] = {}
        self._groups_lock = threading.Lock()
        """Around what the main thread and this one do to the user's parameter groups."""
        self._written = 0
        """Number of steps written back."""
        self._changes: deque[list[GroupChanges]] = deque()
        """What the last of them have changed in the groups: those that a job handed in may not know of."""
        self._thread = threading.Thread(target=self._loop, name="roundpipe-optimizer", daemon=True)
        self._thread.start()

    def submit(self, job: StepJob) -> None:
        self._store.enqueued += 1
        self._last_batch = job.gradients.number
        with self._groups_lock:
            job.take_groups(self._written)
        self._jobs.put(job)

    def wait_idle(self) -> None:
        """Waits for every step handed in so far.

        Raises:
            Cancelled: When one of them cannot be made.
        """
        self.wait_for(self._store.enqueued)

    def wait_for(self, steps: int) -> None:
        """Waits for so many steps. A batch's own thread must not wait for all: its own step may be among them.

        Raises:
            Cancelled: When one of them cannot be made.
        """
        with self._monitor.lock:
            self._monitor.wait_for(self._idle, lambda: self._finished >= steps, self._last_batch)

    def has_made(self, steps: int) -> bool:
        """Whether so many of the steps handed in are done."""
        return self._finished >= steps

    def skip_to(self, steps: int) -> None:
        """Counts steps as finished that were made elsewhere."""
        self._finished = steps

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)
        while (job := self._jobs.get()) is not None:
            try:
                job.gradients.wait_complete()
                with self._in_thread(), job.recorded():
                    self._step(job)
            except Cancelled:
                continue
            except BaseException as error:
                error.add_note(f"roundpipe: raised in the background step of {type(job.optimizer).__name__}")
                self._monitor.fail(error)
                continue
            with self._monitor.lock:
                self._finished += 1
                self._idle.notify_all()

    def _step(self, job: StepJob) -> None:
        with self._monitor.lock:
            self._store.step_waits.begin_step()
        try:
            self._make(job)
        finally:
            with self._monitor.lock:
                self._store.step_waits.end_step()

    def _make(self, job: StepJob) -> None:
        if self._average is not None:
            with job.recorded("average over processes"):
                self._average()
        optimizer = job.optimizer
        while len(self._changes) > self._written - job.behind:  # jobs to come are no further behind
            self._changes.popleft()
        job.catch_up(self._changes)
        by_unit = steps_by_parameter(optimizer)
        whole = self._snapshot(job, lazily=by_unit and job.before_step is None)
        go = True
        if job.before_step is not None:
            with job.recorded("unscale and clip"):
                go = job.before_step(whole)
        if not by_unit:
            with job.recorded(type(optimizer).__name__):
                for unit in self.order:
                    self._store.wait_uploads(unit)
                taken = self._gradients.take(self.order)
                if go:
                    whole.step()
                _drop_gradients(whole)
                self._gradients.give_back(taken)
        group_of = {id(alias): i for i, group in enumerate(whole.param_groups) for alias in group["params"]}
        for unit in self.order:
            with job.recorded(unit.name):
                if go and by_unit:
                    self._store.wait_uploads(unit)
                    self._step_unit(whole, unit, group_of, fuses=job.in_half_precision)
                if by_unit:
                    self._gradients.clear(unit)
                self._store.publish(unit)
        with self._groups_lock:
            self._changes.append(self._write_back(job, whole) if go else [])
            self._written += 1
        _drop_gradients(whole)
        if job.after_step is not None:
            job.after_step()

    def _step_unit(self, whole: Optimizer, unit: Unit, group_of: dict[int, int], *, fuses: bool) -> None:
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in unit.parameters:
            alias = self._aliases.get(id(parameter))
            if alias is None or (group := group_of.get(id(alias))) is None:
                continue
            if alias.grad is None:
                alias.grad = self._gradients.get(parameter)
            if alias.grad is not None:
                members.setdefault(group, []).append(alias)
        if not members:
            return
        part = _copy_of(whole)
        part.param_groups = [{**whole.param_groups[group], "params": members[group]} for group in sorted(members)]
        for values in part.param_groups if fuses else ():
            if _may_be_fused(part, values):
                values["fused"] = True
        part.step()  # the state is the same object as the whole's
        for alias in chain.from_iterable(members.values()):
            alias.grad = None

    def _snapshot(self, job: StepJob, *, lazily: bool) -> Optimizer:
        """The optimizer on aliases, with the gradients in place; or only those that are in full precision."""
        whole = _copy_of(job.optimizer)
        whole.param_groups = []
        whole.state = type(job.optimizer.state)(dict)
        whole.state.update(_state_of_all(job.optimizer))
        for group in job.groups:
            aliases = []
            for parameter in group["params"]:
                alias = self._alias(parameter)
                there = self._store.owns(parameter) and not (lazily and self._gradients.is_rounded(parameter))
                alias.grad = self._gradients.get(parameter) if there else None
                if parameter in job.optimizer.state:
                    whole.state[alias] = job.optimizer.state[parameter]
                aliases.append(alias)
            whole.param_groups.append({**group, "params": aliases})
        return whole

    def _write_back(self, job: StepJob, whole: Optimizer) -> list[GroupChanges]:
        """Hands state, changed group values and changed attributes over to the user's optimizer. Returns what the step
        has changed in the groups."""
        for name, value in vars(whole).items():
            if name not in _PARTS and vars(job.optimizer).get(name) is not value:
                setattr(job.optimizer, name, value)
        job.optimizer.state.update(_state_of_all(whole))
        changes: list[GroupChanges] = []
        for before, after, group in zip(job.groups, whole.param_groups, job.optimizer.param_groups, strict=False):
            for parameter, alias in zip(before["params"], after["params"], strict=True):
                if alias in whole.state:
                    job.optimizer.state[parameter] = whole.state[alias]
            changes.append(
                {
                    key: (before.get(key), value)
                    for key, value in after.items()
                    if key != "params" and value is not before.get(key)
                }
            )
            group.update((key, value) for key, (_, value) in changes[-1].items())
        return changes

    def _alias(self, parameter: nn.Parameter) -> nn.Parameter:
        alias = self._aliases.get(id(parameter))
        if alias is None or not is_same_memory(alias, parameter):
            alias = self._aliases[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=True)
        alias.__dict__ = parameter.__dict__  # marks of the user's, by which the optimizer may treat it
        return alias


def _state_of_all(optimizer: Optimizer) -> dict[Any, Any]:
    """What an optimizer keeps for all parameters together, under keys of its own."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _drop_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


_PARTS = ("param_groups", "state", "defaults", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""What makes an optimizer; everything else in its ``__dict__`` is its class's own."""


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """A shallow copy whose ``step`` is the class's own: hooks and a scheduler's wrapper belong to the original."""
    part = object.__new__(type(optimizer))  # copy.copy would go through __setstate__, which rewrites the state
    part.__dict__ = dict(optimizer.__dict__)
    part.__dict__.pop("step", None)
    part._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()
    part._optimizer_step_post_hooks = type(optimizer._optimizer_step_post_hooks)()
    return part


def _may_be_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether torch has a fused form of the step for the group on the host, and the user has not chosen one.

    It goes through memory from one end to the other, whatever the strides are.
    """

    def fits(parameter: nn.Parameter) -> bool:
        strides = dense_strides(parameter)
        state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        return parameter.is_floating_point() and all(
            tensor is not None and tensor.layout == torch.strided and tensor.stride() == strides
            for tensor in (parameter, parameter.grad, *(value for value in state if value.dim()))
        )

    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and group["fused"] is None
        and group["foreach"] is None
        and not (group["differentiable"] or group["capturable"])
        and all(fits(parameter) for parameter in group["params"])
    )


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether stepping some parameters at a time is known to give the same as stepping all at once: torch's own do, and
    classes derived from them that leave what these have as it is."""
    kinds = type(optimizer).__mro__
    torchs = next((i for i, kind in enumerate(kinds) if f"{kind.__module__}.".startswith("torch.optim.")), None)
    if torchs is None or kinds[torchs] is Optimizer or needs_closure(optimizer):
        return False
    if not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
        return False
    own = {name for kind in kinds[:torchs] for name in vars(kind) if not name.startswith("__")}
    return not any(hasattr(kinds[torchs], name) for name in own - {"step"})  # torch puts its own there, wrapped


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` can only be called with a closure (LBFGS and the like)."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the user's code runs with each step, and may read the gradients."""
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
    )


def holds_parameters_elsewhere(optimizer: Optimizer) -> bool:
    """Whether the optimizer would step other tensors than those of its groups, so that no copy can step for it.

    So it is with wrappers of another optimizer, with optimizers that keep their parameters, or the ids of these, in an
    attribute, and with a ``step`` put on the instance.
    """
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def refers(value: Any) -> bool:
        if isinstance(value, Tensor):
            return id(value) in members
        if isinstance(value, int):
            return value in members
        if isinstance(value, (list, tuple, set, frozenset)):
            return any(refers(item) for item in _first_items(value))
        if isinstance(value, Mapping):
            return any(refers(item) for item in (*_first_items(value), *_first_items(value.values())))
        return hasattr(value, "param_groups") or isinstance(value, (nn.Module, FunctionType, MethodType, GeneratorType))

    for name, value in vars(optimizer).items():
        if name in _PARTS:
            continue
        if name == "step":
            if not getattr(value, "_wrapped_by_lr_sched", False):
                return True
            continue
        if refers(value):
            return True
    return False


def _first_items(values: Iterable[Any]) -> list[Any]:
    return list(values)[:64]
