"""The runtime: executes a schedule with one thread per microbatch.

A microbatch's thread runs the user's step from beginning to end, and then its backward. It executes the layers itself,
on the device that the schedule names; it never hands work to another thread. Between layers it holds the baton.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from lightning_roundpipe.devices import Device
from lightning_roundpipe.pipeline.arguments import Structure
from lightning_roundpipe.pipeline.attributes import ModuleAttributes
from lightning_roundpipe.pipeline.batch import Batch, Microbatch
from lightning_roundpipe.pipeline.call_split import CallSplit, CannotSplitError, signature
from lightning_roundpipe.pipeline.catching import GradientCatcher
from lightning_roundpipe.pipeline.compiling import before_compiling, count_compilations, unprepared_compilations
from lightning_roundpipe.pipeline.fan_out import FanOut, Lines
from lightning_roundpipe.pipeline.interception import (
    Interception,
    OutsideParameters,
    handling_calls,
    handling_no_calls,
    in_checkpoint,
    splitting_calls,
)
from lightning_roundpipe.pipeline.layers import LayerSpec, find_layers
from lightning_roundpipe.pipeline.occupancy import Occupancy, Peaks
from lightning_roundpipe.pipeline.plan import Costs, Plan, merge_sequences, repeated
from lightning_roundpipe.pipeline.planning import Planning
from lightning_roundpipe.pipeline.replica import AttributeState, Layer, commit_norm_statistics, share_compiled_code
from lightning_roundpipe.pipeline.rng import RandomState, derive_seed, noting_sets, seed_all
from lightning_roundpipe.pipeline.tape import Call, CallOwner, Escaped, Mode, Run, graph_leaves
from lightning_roundpipe.pipeline.threads import WorkThread
from lightning_roundpipe.pipeline.traffic import count_backward, count_forward, count_gradients
from lightning_roundpipe.pipeline.turns import Turns
from lightning_roundpipe.pipeline.turnstile import Baton, Cancelled, Monitor, Turnstiles
from lightning_roundpipe.pipeline.watching import contents, put_for, same
from lightning_roundpipe.schedules import Action, Scheduler
from lightning_roundpipe.state.gradients import Gradients
from lightning_roundpipe.state.parameters import ParameterStore, Unit
from lightning_roundpipe.trees import flatten, tensors

Step = Callable[[], Tensor | None]
"""The user's step for one microbatch. Returns the loss, or None where there is nothing to train."""

_running = threading.local()
"""The microbatch of the current thread."""


@dataclass(slots=True)
class DeviceUse:
    """How long a device has been busy, and with how many calls."""

    busy_seconds: float = 0.0
    calls: int = 0


class Pipeline(CallOwner):
    """Trains one module's layers on a pool of devices.

    Args:
        root: The module.
        devices: The devices.
        layers: Which submodules are layers; see :func:`find_layers`.
        staleness: 0 or 1; see :class:`ParameterStore`.
        seed: Base of all random numbers drawn in microbatches.
        first_step: Number of batches trained so far, as a counter for the random numbers.
        compile_settings: How to compile layers that the user has not compiled (see :func:`compile_settings`), or None.
        scheduler: Makes stages and schedules; by default those of RoundPipe.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[Device],
        *,
        layers: LayerSpec | None = None,
        staleness: int = 0,
        seed: int = 0,
        first_step: int = 0,
        compile_settings: Any | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.root = root
        self.devices = list(devices)
        self.scheduler = scheduler or Scheduler(devices=len(self.devices))
        self.seed = seed
        self.step = first_step
        self.monitor = Monitor()
        self.turnstiles = Turnstiles(self.monitor, len(self.devices) + 1)  # the last one is the start line
        self.turns = Turns(self.turnstiles)
        self.baton = Baton(self.monitor)
        self.layers = [Layer(i, name, module) for i, (name, module) in enumerate(find_layers(root, layers).items())]
        share_compiled_code(root, self.layers, compile_settings)
        count_compilations()
        self.interception = Interception(root, self.layers)
        self.attributes = ModuleAttributes(root, self.layers, self.run_serially, self._keep_order)
        self.store = ParameterStore(root, self.layers, self.monitor, staleness)
        self.gradients = Gradients(self.store, self.monitor)
        self._parametrized = any(map(parametrize.is_parametrized, root.modules()))
        self.plan: Plan | None = None
        self._planning = Planning(self.scheduler, staleness, self.monitor.fail)
        self._splits: dict[tuple[int, Hashable], CallSplit] = {}
        """How calls are split in steps that see the whole batch: by module and kind of arguments."""
        self._split_into = 1
        self._call_plans: dict[tuple[int, Hashable], Plan] = {}
        self.forward_costs = [Costs() for _ in self.layers]
        self.backward_costs = [Costs() for _ in self.layers]
        self.use = [DeviceUse() for _ in self.devices]
        self.peaks = [Peaks() for _ in self.devices]
        self.batches = 0
        self.last_microbatches = 0
        self._threads: list[WorkThread] = []
        self._weight_threads: dict[int, WorkThread] = {}
        self._units_outside: dict[Unit, None] = {}
        """Units that the code between layers has used."""
        self._catcher = GradientCatcher(self.store.parameters(), self._catch_gradient)
        self._units_past_us: set[Unit] = set()
        """Units whose parameters autograd has reached past our stand-ins, by custom functions, say."""
        self._own: list[tuple[nn.Parameter, Tensor]] | None = None
        """Gradients of the main thread's own backward, while it is between a batch's forward and the end of that."""
        self._main_thread = threading.get_ident()
        self._batch: Batch | None = None
        self._left_random_state: Tensor | None = None
        self.serial_reason: str | None = None
        """Why microbatches run one after the other, if they do."""
        self.on_serial: Callable[[str], None] = lambda reason: None
        self._backward_draws = False
        """Whether the code between layers sets the generator in its backward, as a checkpoint does."""
        self._has_seen_several = False
        """Whether there has been a first batch of several microbatches."""
        self._swaps_everything = False
        """Whether the code between layers draws from Python's or NumPy's generator."""

    # -- called by the main thread ---------------------------------------------------------------------------------

    def split_calls(self, splits: Mapping[tuple[nn.Module, Hashable], CallSplit], microbatches: int) -> None:
        """From the next batch on the step runs once, with the whole batch, and these calls are split.

        Args:
            splits: How each is split: by module and :func:`signature` of its arguments.
            microbatches: Into how many, at most.
        """
        self._splits = {(id(module), kind): split for (module, kind), split in splits.items()}
        self._split_into = microbatches
        self.interception.split_calls({module: None for module, _ in splits})

    def start_batch(
        self,
        steps: Sequence[Step],
        weights: Sequence[float],
        scale: Callable[[], float],
        *,
        deferred: bool = False,
        values_changed: bool = False,
    ) -> Batch:
        """Runs the forward of a batch, and starts its backward. Returns when all losses are known.

        Args:
            steps: The user's step for each microbatch.
            weights: The weight of each microbatch's loss in the batch's loss.
            scale: Factor of the batch's loss; asked for when the first backward begins.
            deferred: Whether the backward waits for :meth:`Batch.release`.
            values_changed: Whether user code may have changed parameters since the last batch. No step may be pending.

        Raises:
            BaseException: Whatever was raised in a microbatch, with a note that says where.
        """
        self.check()
        if replaced := self._replaced():
            raise RuntimeError(
                f"The model's modules or parameters were replaced during training: {', '.join(replaced)}."
                " Change them before fit, or call fit again after the change."
            )
        self.store.refresh(values=values_changed)
        self._catcher.refresh()
        if self._batch is not None and self._batch.released and (self._units_past_us or self._batch.recomputes):
            self.wait_backward()  # a checkpoint runs the user's own modules in it
        splits_calls = bool(self._splits)
        plan = None if splits_calls else self._plan_for(deferred, len(weights))
        batch = Batch(
            self.monitor,
            self.batches,
            self.step,
            weights,
            scale,
            deferred,
            plan,
            self._is_new(len(weights)),
            self.gradients.begin_batch(len(weights)),
            self.store.version_for_next_batch(),
            splits_calls=splits_calls,
        )
        self._has_seen_several |= batch.microbatches > 1
        batch.settled = values_changed or self.store.enqueued == 0
        batch.pending_units = {unit for unit in self.store.units if unit.done < batch.version}
        self.batches += 1
        self.step += 1
        self.last_microbatches = self._split_into if splits_calls else batch.microbatches
        self._batch = batch
        self.attributes.begin_batch(batch)
        if not splits_calls:  # such a step has the pipeline for itself
            self._line_up(batch)
        self._provide_threads(batch.microbatches)
        outside = RandomState.capture() if batch.microbatches > 1 else None
        self._left_random_state = None
        self.interception.install()
        watches = batch.records and self.last_microbatches > 1
        try:
            with self.attributes.watching() if watches else nullcontext():
                for index, step in enumerate(steps):
                    context = contextvars.copy_context()
                    self._threads[index].submit(
                        partial(context.run, self._run_microbatch, batch, index, step), then=batch.thread_done
                    )
                self.until(batch.wait_forward)
                if not deferred and (batch.serial or self.draws_on_the_host()):
                    self.until(batch.wait_all)
        finally:
            if not (deferred and batch.recomputes and self.monitor.failure is None):
                self.interception.remove()  # or else in `wait_backward`
            if outside is not None:
                self._restore_random_state(batch, outside)
        if batch.microbatches > 1:
            self.attributes.end_batch(batch)
        commit_norm_statistics([run.norm_statistics for run in batch.runs if run is not None])
        self._replan(batch)
        return batch

    def _provide_threads(self, count: int) -> None:
        while len(self._threads) < count:
            self._threads.append(WorkThread(f"roundpipe-{len(self._threads)}"))

    def _replaced(self) -> list[str]:
        """The layers that are not what they were when the pipeline was built, and parameters that are new or gone."""
        found = [layer.name for layer in self.layers if not layer.is_current()]
        now = dict(self.root.named_parameters())
        known = {id(parameter) for parameter in self.store.parameters()}
        if found or {id(parameter) for parameter in now.values()} == known:
            return found
        new = [name for name, parameter in now.items() if id(parameter) not in known]
        return new or [self.store.name(p) for p in self.store.parameters() if all(p is not q for q in now.values())]

    def until(self, wait: Callable[[], None]) -> None:
        """Waits; raises what failed, and takes an interrupt of the wait for a failure of the pipeline."""
        try:
            wait()
            return
        except Cancelled:
            pass  # the true error is raised below, without this one as its context
        except BaseException as error:  # Ctrl-C arrives here
            self.monitor.fail(error, self.batches - 1)
            raise
        self.check()

    def check(self) -> None:
        """Raises the error that the pipeline failed with, if it did."""
        failure = self.monitor.failure
        if isinstance(failure, StopIteration):  # to the caller's loop it would be the end of the data, not an error
            error = RuntimeError(
                "StopIteration was raised in a training step, for example by a next() without a default. Give next() a"
                " default; to end an epoch early, return -1 from on_train_batch_start or set trainer.should_stop."
            )
            for note in failure.__notes__:
                error.add_note(note)
            raise error from failure
        if failure is not None:
            raise failure

    def wait_backward(self) -> None:
        """Waits for the backward of the last batch."""
        if self._batch is not None:
            self.until(self._batch.wait_all)
            self.interception.remove()
        self.check()

    def take_own_gradients(self) -> None:
        """From now on, gradients that the main thread's own code computes belong to the last batch."""
        self._own = []

    def add_own_gradients(self) -> None:
        """Adds what the main thread's own code has computed, such as a penalty in an overridden ``backward``."""
        own, self._own = self._own, None
        if own:
            self.wait_backward()
            for parameter, gradient in own:
                self.gradients.add(parameter, gradient)

    def close(self) -> None:
        """Ends all threads. Whatever still runs is cancelled."""
        self.monitor.fail(Cancelled())
        for thread in (*self._threads, *self._weight_threads.values()):
            thread.close()
        self.interception.remove()
        self._catcher.close()
        self._threads = []
        self._planning.close()
        self._weight_threads = {}
        self._batch = None

    def plans(self) -> list[Plan]:
        """The plan of the step, or those of the calls in it that are split."""
        return [self.plan] if self.plan is not None else list(self._call_plans.values())

    @property
    def batch(self) -> Batch | None:
        return self._batch

    def unit_order(self) -> list[Unit]:
        """The units in the order in which the batch that runs beside their step waits for them: the next forward for
        their values, or with staleness 1 its backward for the memory of their gradients."""
        found: dict[Unit, None] = {unit: None for unit in self.store.units}
        for layer in self.layers:
            for unit in self.store.units_of_layer(layer):
                found.pop(unit, None)
        for index in self.plan.calls if self.plan is not None else ():
            found.update(dict.fromkeys(self.store.units_of_layer(self.layers[index])))
        found.update(dict.fromkeys(self.store.units))
        return list(found)[::-1] if self.store.staleness else list(found)

    def draws_on_the_host(self) -> bool:
        """Whether a backward would take the process's generators, or the user's modules, away from the main thread's
        own code."""
        if self._backward_draws or (self._batch is not None and self._batch.recomputes):
            return True
        if any(layer.traits.sets_generator for layer in self.layers):
            return True
        return any(device.shares_host_generator for device in self.devices) and any(
            layer.draws() or layer.traits.compiles for layer in self.layers
        )

    def _restore_random_state(self, batch: Batch, outside: RandomState) -> None:
        """The main thread's own random numbers go on as if the microbatches had drawn none."""
        if batch.records or self._swaps_everything:
            outside.restore()
            return
        now = RandomState.capture()
        RandomState(outside.torch_cpu).restore()
        if not now.same_outside_torch(outside) and self.monitor.failure is None:
            raise RuntimeError(
                "Random numbers of Python's or NumPy's generator were drawn in this batch, and none in the first one:"
                " they are neither repeatable nor, if a layer drew them, the same in its recompute. Draw one in every"
                " training_step from the first batch on, use torch's, or train with RoundPipeStrategy(microbatches=1)."
            )

    def interleaves(self) -> bool:
        """Whether the next batch's microbatches take turns."""
        return self.batches > 0 and self.serial_reason is None

    def run_serially(self, reason: str) -> None:
        """From the next batch on, lets microbatches run one after the other: slower, and never wrong."""
        if self.serial_reason is None and self.last_microbatches > 1:
            self.serial_reason = reason
            self.on_serial(reason)

    def _keep_order(self, reason: str) -> None:
        """From the next batch on, lets microbatches come to each layer in their order."""
        if not self.scheduler.keeps_order and not self.scheduler.keep_order():
            self.run_serially(f"{reason}, and the schedule takes them in another order than theirs")

    # -- planning --------------------------------------------------------------------------------------------------

    def _is_new(self, microbatches: int) -> bool:
        """Whether the next batch is the first one, or the first one of several microbatches: it shows what is new."""
        first = self.plan is None and not self._call_plans
        return first or (microbatches > 1 and not self._has_seen_several)

    def _plan_for(self, deferred: bool, microbatches: int) -> Plan | None:
        if self.plan is None or self._is_new(microbatches) or self.serial_reason is not None:
            return None
        if not deferred:
            self.plan = self._planning.take(self.plan.calls) or self.plan
            return self.plan
        return self._make_plan(self.plan.calls, fused=False)

    def _make_plan(self, calls: Sequence[int], *, fused: bool) -> Plan:
        forward, backward = self._costs_of(calls)
        return Plan.make(calls, self.scheduler.partition(forward, backward, fused=fused), self.scheduler.lanes)

    def _costs_of(self, calls: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of each call's forward, and of its backward including the recompute."""
        forward = [self.forward_costs[i].mean for i in calls]
        return forward, [self.backward_costs[i].mean or 3 * self.forward_costs[i].mean for i in calls]

    def _replan(self, batch: Batch) -> None:
        """Plans the next batch by the calls that this one made, and by measured costs."""
        sequences = [tuple(run.sequence) for run in batch.runs if run is not None]
        merged = _merged_calls(batch.plan, sequences)
        for layer in self.layers:
            layer.traits.known |= layer.traits.dropped
        if batch.records:
            self.store.travel_in_half(self._half_parameters(batch))
        if any(layer.traits.writes_state and layer.index in repeated(sequences) for layer in self.layers):
            self.run_serially("a layer that writes its own state is called several times in a step")
        if batch.splits_calls:
            pass  # each call has a plan of its own
        elif batch.records or (batch.plan is not None and (merged != batch.plan.calls or batch.number == 1)):
            self.plan = self._make_plan(merged, fused=True)
        elif batch.plan is not None and not batch.deferred:
            self._planning.consider(merged, *self._costs_of(merged), batch.microbatches)
        if batch.records:
            # Whatever happens for the first time is slow: only what comes now is measured.
            self.forward_costs = [Costs() for _ in self.layers]
            self.backward_costs = [Costs() for _ in self.layers]

    def _half_parameters(self, batch: Batch) -> dict[nn.Parameter, torch.dtype]:
        """Parameters that every layer holding them takes in half precision, and that nothing else used."""
        used_outside = batch.used_outside.union(*(map(id, layer.traits.foreign) for layer in self.layers))
        votes: dict[nn.Parameter, set[torch.dtype | None]] = {}
        for layer in self.layers:
            half = layer.traits.half or {}
            for index, parameter in enumerate(layer.parameters):
                votes.setdefault(parameter, set()).add(half.get(index))
        return {
            parameter: dtype
            for parameter, (dtype, *others) in votes.items()
            if dtype is not None and not others and id(parameter) not in used_outside
        }

    def _line_up(self, batch: Batch) -> None:
        forward, backward = self._lines(batch)
        self.turnstiles.extend([[*first, *then] for first, then in zip(forward, backward, strict=True)])
        for device, line in enumerate(forward):
            turns = [turn for turn in line if turn[1].kind == "W"]
            if turns:
                if device not in self._weight_threads:
                    self._weight_threads[device] = WorkThread(f"roundpipe-weights-{device}")
                self._weight_threads[device].submit(partial(self._run_weights, batch, device, turns), lambda: None)

    def _lines(self, batch: Batch) -> tuple[Lines, Lines]:
        """The turns on each device, and at the start line; for a deferred batch those of the backward by themselves."""
        numbers = range(batch.first, batch.first + batch.microbatches)
        forward: Lines = [[] for _ in range(len(self.devices) + 1)]
        backward: Lines = [[] for _ in range(len(self.devices) + 1)]
        if batch.plan is None:
            # One microbatch after the other, on the first device.
            if batch.deferred:
                forward[0] = [(batch.number, _serial(i, False)) for i in numbers]
                backward[0] = [(batch.number, _serial(i, True)) for i in numbers]
            else:
                forward[0] = [(batch.number, _serial(i, back)) for i in numbers for back in (False, True)]
            return forward, backward
        schedule = self.scheduler.schedule(
            batch.plan.partition, batch.microbatches, lanes=batch.plan.lanes, deferred=batch.deferred
        )
        if not batch.deferred:
            sizes = [sum(parameter.numel() for parameter in layer.parameters) for layer in self.layers]
            batch.occupancy = [
                Occupancy(peaks, schedule, device, batch.plan, sizes) for device, peaks in enumerate(self.peaks)
            ]
        for device, line in enumerate(schedule.devices):
            for action in line:
                if action.kind == "W":
                    batch.deferring[action.stage, action.microbatch] = []
                    batch.weights_left[action.microbatch] = batch.weights_left.get(action.microbatch, 0) + 1
                else:
                    batch.places[action.stage, action.microbatch] = device, action.kind
                turn = Action(action.kind, action.stage, batch.first + action.microbatch)
                (backward if batch.deferred and action.kind != "F" else forward)[device].append((batch.number, turn))
        forward[-1] = [(batch.number, _start(i)) for i in numbers]
        return forward, backward

    # -- one microbatch, in its own thread -------------------------------------------------------------------------

    def _run_microbatch(self, batch: Batch, index: int, step: Step) -> None:
        microbatch = Microbatch(batch, index)
        with self._at_work(microbatch):
            roots = self._run_forward(microbatch, step)
            batch.forward_done()
            if batch.serial and not batch.splits_calls:
                self.turnstiles.leave((batch.number, _serial(microbatch.number, False)))
                self.turnstiles.enter((batch.number, _serial(microbatch.number, True)))
            if roots:
                batch.wait_released()
                self._backward(microbatch, roots, batch.seeds(index, roots))
            self._end_microbatch(microbatch)

    @contextmanager
    def _at_work(self, microbatch: Microbatch) -> Iterator[None]:
        """What fails is the batch's failure, with a note that says where."""
        _running.microbatch = microbatch
        before_compiling(lambda: self._compile_alone(microbatch))
        try:
            yield
        except Cancelled:
            microbatch.drop()  # the thread that failed holds the error
        except BaseException as error:
            where = f"; {microbatch.where}" if microbatch.where else ""
            error.add_note(f"roundpipe: {microbatch.label}{where}; phase {microbatch.phase}")
            if microbatch.batch.microbatches > 1 and "more than 1 value per channel" in str(error):
                error.add_note(
                    "roundpipe: BatchNorm cannot normalize a microbatch of a single sample. Set fewer `microbatches`;"
                    " if only the last batch is that small, set drop_last=True in the DataLoader."
                )
            self.monitor.fail(error, microbatch.batch.number)
            microbatch.drop()
        finally:
            before_compiling(None)
            _running.microbatch = None

    def _run_forward(self, microbatch: Microbatch, step: Callable[[], Any]) -> list[Tensor]:
        """Waits for its turn and runs the step. Returns what the backward begins with."""
        batch, number = microbatch.batch, microbatch.number
        batch.runs[microbatch.index] = microbatch
        if batch.splits_calls:
            self.store.wait(list(self._units_past_us), batch.version, batch.number)
            place = self.baton.request()
        elif batch.serial:
            self.turnstiles.enter((batch.number, _serial(number, False)))
            self.store.wait(list(self._units_past_us), batch.version, batch.number)
            place = self.baton.request()
        else:  # the steps begin in the order of the microbatches, and need not wait for parameters on the way
            self.store.wait(list(self._units_outside), batch.version, batch.number)
            self.turnstiles.enter((batch.number, _start(number)))
            place = self.baton.request()
            self.turnstiles.leave((batch.number, _start(number)))
        result = self._forward(microbatch, step, place)
        if batch.records and batch.microbatches > 1:
            self.attributes.end_step(microbatch)
        roots = batch.take(microbatch.index, result)
        self._count_calls(microbatch, roots)
        return roots

    def _end_microbatch(self, microbatch: Microbatch) -> None:
        """After the backward: nothing more comes."""
        self.turns.pass_remaining(microbatch)
        microbatch.batch.wait_weights(microbatch.index)
        for call, found in microbatch.found:
            self._add_gradients(microbatch, [*found, *call.deferred_gradients])
        for parameter, leaf in microbatch.stand_ins.values():
            if leaf.grad is not None:
                self._add_gradients(microbatch, [(parameter, leaf.grad)])
                leaf.grad = None
        self._finish_units(microbatch)
        if microbatch.batch.serial and not microbatch.batch.splits_calls:
            self.turnstiles.leave((microbatch.batch.number, _serial(microbatch.number, True)))
        microbatch.drop()

    # -- calls that are split --------------------------------------------------------------------------------------

    def _split_call(
        self, microbatch: Microbatch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call within a step that sees the whole batch: in microbatches, if it is known how to split it."""
        kind = signature((args, kwargs))
        split = self._splits.get((id(module), kind))
        mode = microbatch.mode
        if split is None or torch.is_inference_mode_enabled() or in_checkpoint():
            return NotImplemented  # a checkpoint's recompute could not see what threads of their own have saved
        inside = set(module.modules())
        if not all(layer.has_own_parameters() for layer in self.layers if layer.module in inside):
            return NotImplemented  # others stand there for a moment (functional_call)
        assert mode is not None
        leaves, rebuild = flatten((args, kwargs))
        with _without(mode), _naming(module):
            leaves = [mode.replace(leaf) for leaf in leaves]
            sizes = split.sizes(leaves, self._split_into)
            if len(sizes) == 1:
                return NotImplemented
            batch = microbatch.batch
            plan = None if batch.records or self.serial_reason is not None else self._call_plans.get((id(module), kind))
            fan_out = FanOut(batch, module, split, leaves, rebuild, sizes, microbatch.parts, plan)
            microbatch.parts += len(sizes)
            self._fan_out_forward(microbatch, fan_out)
            if batch.records or plan is None:
                calls = _merged_calls(plan, [tuple(run.sequence) for run in fan_out.runs if run is not None])
                self._call_plans[id(module), kind] = self._make_plan(calls, fused=False)
            return fan_out.join(self, microbatch.token, leaves)

    def _fan_out_forward(self, microbatch: Microbatch, fan_out: FanOut) -> None:
        forward, fan_out.backward_lines = self._lines(fan_out)
        self._provide_threads(1 + fan_out.microbatches)
        self._release_baton(microbatch)
        outside = RandomState.capture()
        self._left_random_state = None
        fan_out.settled, fan_out.pending_units = microbatch.batch.settled, microbatch.batch.pending_units
        self.attributes.begin_batch(fan_out)
        self.turnstiles.extend(forward)
        for index, thread in enumerate(self._threads[1 : 1 + fan_out.microbatches]):
            context = contextvars.copy_context()
            thread.submit(partial(context.run, self._run_part, fan_out, index), then=fan_out.forward_done)
        try:
            fan_out.wait_forward()
        finally:
            self._restore_random_state(fan_out, outside)
            self._left_random_state = None
        self.attributes.end_batch(fan_out)
        microbatch.batch.recomputes |= fan_out.recomputes
        commit_norm_statistics([run.norm_statistics for run in fan_out.runs if run is not None])
        self._take_baton(microbatch)

    def _run_part(self, fan_out: FanOut, index: int) -> None:
        part = Microbatch(fan_out, index)
        with self._at_work(part):
            self._run_forward(part, lambda: fan_out.step(index, part.token))
            if fan_out.serial:
                self.turnstiles.leave((fan_out.number, _serial(part.number, False)))

    def fan_out_backward(self, fan_out: FanOut, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The backward of a split call; runs when autograd comes to its node."""
        microbatch: Microbatch = _running.microbatch
        if not microbatch.in_backward or fan_out.done:
            raise RuntimeError(
                "Gradients through a call that the pipeline has split are asked for within training_step"
                " (torch.autograd.grad or backward), or a second time. Train with RoundPipeStrategy(split='whole') and"
                " keep the layers out of the pipeline with `layers`, or use manual optimization."
            )
        fan_out.done = True
        fan_out.give(gradients)
        for run in fan_out.runs:
            assert run is not None
            run.frozen |= microbatch.frozen
        self._release_baton(microbatch)
        self.turnstiles.extend(fan_out.backward_lines)
        for index, thread in enumerate(self._threads[1 : 1 + fan_out.microbatches]):
            context = contextvars.copy_context()
            thread.submit(partial(context.run, self._run_part_backward, fan_out, index), then=fan_out.thread_done)
        fan_out.wait_all()
        self._take_baton(microbatch)
        return fan_out.input_gradients()

    def _run_part_backward(self, fan_out: FanOut, index: int) -> None:
        part = fan_out.runs[index]
        assert part is not None
        with self._at_work(part):
            if fan_out.serial:
                self.turnstiles.enter((fan_out.number, _serial(part.number, True)))
            roots, seeds = fan_out.roots(index)
            if roots:
                self._backward(part, roots, seeds)
            self._end_microbatch(part)

    # -- forward and backward of a microbatch ----------------------------------------------------------------------

    def _forward(self, microbatch: Microbatch, step: Callable[[], Any], place: threading.Condition) -> Any:
        batch = microbatch.batch
        mode = microbatch.mode = OutsideParameters(
            self.store.owns,
            stand_in=partial(self._stand_in, microbatch),
            value=partial(self._value, microbatch),
            memory=partial(self._memory, microbatch),
            touched=partial(self._touched, microbatch),
            flagged=partial(self._flagged, microbatch),
        )
        self._take_baton(microbatch, place)
        try:
            with ExitStack() as stack:
                stack.enter_context(handling_calls(partial(self._call, microbatch)))
                if batch.splits_calls:
                    stack.enter_context(splitting_calls(partial(self._split_call, microbatch)))
                stack.enter_context(mode)
                if batch.records:
                    stack.enter_context(microbatch.accesses.noted())
                result = step()
            for parameter, tensor, version in microbatch.lent:
                if tensor._version != version:
                    self._touched(microbatch, parameter, tensor, True)
            microbatch.frozen = {id(parameter) for parameter in microbatch.flagged if not parameter.requires_grad}
        finally:
            self._release_baton(microbatch)
        if batch.plan is not None:
            fused = batch.plan.fused_stage
            if microbatch.stage < (fused if fused is not None else len(batch.plan.partition.forward)):
                self.turns.leave_ticket(microbatch)
                self.turns.skip_to(microbatch, len(batch.plan.partition.forward))
        return result

    def _backward(self, microbatch: Microbatch, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        batch = microbatch.batch
        microbatch.phase = "backward"
        microbatch.where = ""
        microbatch.in_backward = True
        handles = [root.register_hook(lambda _: microbatch.note_graph_task()) for root in roots if root.requires_grad]
        mode = microbatch.mode
        assert mode is not None
        mode.only_if = microbatch.runs_again
        self._take_baton(microbatch)
        try:
            with handling_calls(partial(self._call_again, microbatch)), mode:
                torch.autograd.backward(roots, seeds)
        finally:
            self._release_baton(microbatch)
            for handle in handles:
                handle.remove()
        if batch.records:
            for call in microbatch.calls:
                call.check_nothing_escaped()

    def _call(self, microbatch: Microbatch, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One layer call of the user's step."""
        if self._parametrized and parametrize._cache_enabled:
            raise RuntimeError(
                f"layer {layer.name!r} is called within torch.nn.utils.parametrize.cached(), whose cache belongs to the"
                " whole process, while layers run for several microbatches and again for the backward pass. Leave the"
                " context out: a parametrization is computed once in each call."
            )
        batch, store, mode = microbatch.batch, self.store, microbatch.mode
        assert mode is not None
        batch.recomputes |= in_checkpoint()
        call, grad = self._make_call(microbatch, layer, args, kwargs)
        leaves = call.parameters
        number = len(microbatch.calls)
        microbatch.calls.append(call)
        microbatch.sequence.append(layer.index)
        self._release_baton(microbatch)
        with handling_no_calls(), _without(mode):
            stage = microbatch.stage
            self.turns.enter_forward(microbatch, call)
            device = self.devices[microbatch.device]
            microbatch.where = f"{call.label}; device {device.name}"
            store.wait(store.units_of_layer(layer), batch.version, batch.number)
            microbatch.units_awaited.update(store.units_of_layer(layer))
            versions = [leaf._version for leaf in leaves]
            if not grad:
                run_mode = Mode.PLAIN
            elif (
                microbatch.ticket is not None
                and microbatch.ticket[1].kind == "FB"
                and not call.is_new
                and not layer.traits.changed_inputs  # what is changed in place must not be part of a kept graph
            ):
                run_mode = Mode.KEEP
            else:
                run_mode = Mode.DROP
            count_forward(device, microbatch, call, run_mode, enters=microbatch.stage != stage or number == 0)
            in_turn = batch.enter_layer(layer.index, microbatch.index)
            run = self._run_call(microbatch, call, device, run_mode, number)
            batch.leave_layer(layer.index)
            if layer.traits.writes_state and not in_turn and not batch.serial:
                raise RuntimeError(
                    f"{call.label}: it keeps a state (buffers or attributes that its forward writes), and microbatches"
                    " call it in another order than one after the other, which they did not in the first batch. So the"
                    " state would not be that of a plain run. Train with RoundPipeStrategy(microbatches=1), or keep"
                    " the layer out of the pipeline with RoundPipeStrategy(layers=...)."
                )
            read, microbatch.accesses.last_read = microbatch.accesses.last_read, {}
            place = self.baton.request()
            self.turns.leave_forward(microbatch, call)
            self._take_baton(microbatch, place)
            microbatch.where = ""
            for parameter, leaf, version in zip(layer.parameters, leaves, versions, strict=True):
                if leaf._version != version:
                    self._touched(microbatch, parameter, leaf, True)
            microbatch.norm_statistics += run.norm_statistics
            escaped = call.link(run, self, microbatch.token)
            self._note_foreign_parameters(microbatch, call)
        self._deliver(microbatch, call, run, escaped)
        for index, hook_args, hook_kwargs, output, moment in escaped.hook_calls:
            before = layer.attributes() if batch.records else None
            held = before.contents() if before is not None else {}
            _run_forward_hooks(layer, index, hook_args, hook_kwargs, output)
            if before is not None:
                _check_hooks(layer, index, before, held, {at for at, when in read.items() if when > moment})
        return escaped.output

    def _make_call(
        self, microbatch: Microbatch, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, bool]:
        """The call, and whether anything in it may have a gradient."""
        batch, mode = microbatch.batch, microbatch.mode
        assert mode is not None
        state = layer.attributes()
        attributes = [state.dicts[i][key] for i, key in state.inputs]
        arguments = Structure((args, kwargs, attributes))
        arguments.leaves = [mode.replace(leaf) for leaf in arguments.leaves]
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        grad = grad and (
            any(parameter.requires_grad for parameter in layer.parameters)
            or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in arguments.leaves)
            or bool(layer.traits.foreign)
        )
        leaves = self.store.layer_leaves(layer, batch.version)
        call = Call(layer, f"layer {layer.name!r}", arguments, state, leaves, record=batch.records)
        call.merge_norm_statistics = batch.microbatches > 1
        return call, grad

    def _call_again(self, microbatch: Microbatch, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer call within the backward: a checkpoint around it and code between layers runs its part of the step
        again, to see what autograd saved of that code. Of the layer itself nothing was saved, so nothing is now."""
        mode = microbatch.mode
        assert mode is not None and layer.intercept is not None
        if not microbatch.runs_again():  # a reentrant checkpoint: its gradients go past us
            with handling_no_calls():
                return layer.intercept(*args, **kwargs)
        several = microbatch.batch.microbatches > 1
        if several and layer.traits.writes_state:
            self.run_serially("a checkpoint runs a layer again that writes its own state")
            if not microbatch.batch.serial or microbatch.batch.deferred:
                raise RuntimeError(
                    f"layer {layer.name!r}: it writes its own state (buffers or attributes) and a checkpoint runs it"
                    " again in the backward, when the state is not that of a plain run. Checkpoint nothing but whole"
                    " layers (the pipeline recomputes them anyway), or train with RoundPipeStrategy(microbatches=1)."
                )
        if several and layer.draws():
            raise RuntimeError(
                f"layer {layer.name!r}: it draws random numbers within a checkpoint of code between layers, whose"
                " recompute could not draw them again. Checkpoint nothing but whole layers (the pipeline recomputes"
                " them anyway), or train with RoundPipeStrategy(microbatches=1)."
            )
        call, grad = self._make_call(microbatch, layer, args, kwargs)
        with handling_no_calls(), _without(mode):
            run = call.run(self.devices[microbatch.device], Mode.DROP if grad else Mode.PLAIN)
            escaped = call.link(run, self, microbatch.token)
        self._deliver(microbatch, call, run, escaped)
        for index, hook_args, hook_kwargs, output, _ in escaped.hook_calls:
            _run_forward_hooks(layer, index, hook_args, hook_kwargs, output)
        return escaped.output

    def _deliver(self, microbatch: Microbatch, call: Call, run: Run, escaped: Escaped) -> None:
        """Puts what came out of a call besides its output where the caller would find it."""
        run.built.write_back(escaped.argument_changes)
        state = call.state
        if escaped.held:
            linked = {id(inner): outer for inner, outer in zip(run.held, escaped.held, strict=True)}
            for index, name in state.holding:
                put_for(state.dicts[index][name], linked, set())
        for index, name, value in escaped.attribute_changes:
            self.attributes.set(microbatch, call.layer.modules[index], name, value, call.state.dicts[index])

    def _run_call(self, microbatch: Microbatch, call: Call, device: Device, mode: str, number: int) -> Run:
        """Runs the layer for the first time; with random numbers of its own where it draws some."""
        batch, traits = microbatch.batch, call.layer.traits
        many = batch.microbatches > 1
        watch = batch.serial or not many  # nothing else runs then, so whoever drew is the layer
        alone = traits.compiles or traits.sets_generator or (call.layer.draws() and device.shares_host_generator)
        if not (watch or alone):
            compiled = unprepared_compilations()
            run = self._timed(microbatch, self.forward_costs, call, lambda: call.run(device, mode))
            self._end_compiling(microbatch)
            if unprepared_compilations() != compiled:
                self._found_compilation(call)
            return run
        self._take_baton(microbatch)
        compiled = unprepared_compilations()
        before = RandomState.capture()
        call.random_state = before
        if many:
            call.seed = derive_seed(self.seed, batch.seed_step, microbatch.number, number)
            seed_all(call.seed)
            started = RandomState.capture()
        else:
            started = before
        microbatch.accesses.in_layer = batch.records
        with self._noting_sets(call):
            run = self._timed(microbatch, self.forward_costs, call, lambda: call.run(device, mode))
        microbatch.accesses.in_layer = False
        if watch and not RandomState.capture().same(started):
            traits.draws = True
        if unprepared_compilations() != compiled:
            traits.compiles = True
        if many:
            before.restore()
        if not call.layer.draws():
            call.seed = call.random_state = None
        self._release_baton(microbatch)
        return run

    def _noting_sets(self, call: Call) -> AbstractContextManager[None]:
        """First batch: finds the layers that set the generator for a while. From now on they hold the baton."""
        return (
            noting_sets(partial(setattr, call.layer.traits, "sets_generator", True)) if call.record else nullcontext()
        )

    def call_backward(self, call: Call, gradients: Sequence[Tensor | None], *, parameters: bool) -> list[Tensor | None]:
        """The backward of one layer call; runs when autograd comes to its node."""
        microbatch: Microbatch = _running.microbatch
        batch = microbatch.batch
        if not microbatch.in_backward:
            raise RuntimeError(
                f"{call.label}: gradients through this layer are asked for within training_step"
                " (torch.autograd.grad or backward), before the step's own backward. That is not supported through"
                " layers of the pipeline. Keep the layer out of it with RoundPipeStrategy(layers=...), or use manual"
                " optimization."
            )
        if call not in microbatch.units_counted:
            if all(gradient is None for gradient in gradients):  # autograd passes through, but nothing depends on it
                return [None] * len(call.gradient_inputs)
            raise RuntimeError(
                f"{call.label}: the loss of a microbatch reaches into an earlier batch or another microbatch, through a"
                " tensor with a gradient that came out of this layer there: keep such tensors detached."
            )
        self._release_baton(microbatch)
        assert microbatch.mode is not None
        with handling_no_calls(), _without(microbatch.mode):
            self.turns.enter_backward(microbatch, call)
            device = self.devices[microbatch.device]
            microbatch.where = f"{call.label}; device {device.name}"
            count_backward(device, microbatch, call)
            stage = microbatch.stage, microbatch.index
            defers = stage in batch.deferring and self.turns.has_turn_of(microbatch, call)
            traits = call.layer.traits
            alone = traits.compiles or (call.random_state is not None and device.shares_host_generator)

            def work() -> Any:
                with self._noting_sets(call):
                    return call.backward(device, gradients, parameters=parameters, defers=defers)

            if traits.sets_generator or (alone and call.kept is None):
                self._take_baton(microbatch)
                before = RandomState.capture()
                inputs, found = self._timed(microbatch, self.backward_costs, call, work)
                before.restore()
                self._release_baton(microbatch)
            else:
                inputs, found = self._timed(microbatch, self.backward_costs, call, work)
                self._end_compiling(microbatch)
            count_gradients(device, microbatch, found)
            if batch.deferring:
                microbatch.found.append((call, found))
                if call.deferred is not None:
                    batch.deferring[stage].append(call)
            else:
                self._add_gradients(microbatch, found)
                self._count_down(microbatch, call)
            place = self.baton.request()
            self.turns.leave_backward(microbatch, call)
            self._take_baton(microbatch, place)
            microbatch.where = ""
        return inputs

    def _add_gradients(self, microbatch: Microbatch, found: Sequence[tuple[Tensor, Tensor]]) -> None:
        for parameter, gradient in found:
            if id(parameter) not in microbatch.frozen:
                microbatch.batch.gradients.add(microbatch.index, parameter, gradient)  # type: ignore[arg-type]

    def _run_weights(self, batch: Batch, device: int, turns: Sequence[tuple[int, Action]]) -> None:
        """A device's W actions. They run no code of the user's, so a thread of the device's own does."""
        where = ""
        try:
            for number, action in turns:
                self.turnstiles.enter((number, action))
                index = action.microbatch - batch.first
                batch.begin_action(device, Action("W", action.stage, index))
                calls = batch.deferring[action.stage, index]
                for call in calls:
                    where = f"microbatch {index + 1} of {batch.microbatches} in batch {number}; {call.label}; device"
                    start = time.perf_counter()
                    with self.devices[device].running():
                        call.deferred_gradients = call.weight_gradients()
                    self.use[device].busy_seconds += time.perf_counter() - start
                calls.clear()
                batch.end_action(device, Action("W", action.stage, index))
                self.turnstiles.leave((number, action))
                batch.weights_done(index)
        except Cancelled:
            pass  # the thread that failed holds the error
        except BaseException as error:
            error.add_note(f"roundpipe: {where} {self.devices[device].name}; phase weight gradients")
            self.monitor.fail(error, batch.number)

    def _compile_alone(self, microbatch: Microbatch) -> None:
        """A layer's code is about to be compiled. It holds the baton until the end of the call: dynamo sets the
        process's random generators to what it found at first, which may be what another compilation left for a while.
        """
        if microbatch.place is None:
            self._take_baton(microbatch)
            microbatch.before_compiling = RandomState.capture()

    def _end_compiling(self, microbatch: Microbatch) -> None:
        if microbatch.before_compiling is not None:
            microbatch.before_compiling.restore()
            microbatch.before_compiling = None
            self._release_baton(microbatch)

    def _found_compilation(self, call: Call) -> None:
        """A function of the user's was compiled in a layer that did not hold the baton. From now on it does."""
        call.layer.traits.compiles = True
        if any(layer.draws() for layer in self.layers):
            raise RuntimeError(
                f"{call.label}: a function with torch.compile that the layer calls was compiled for the first time, or"
                " anew, while other microbatches may have drawn random numbers, which it takes back. Call it in the"
                " same way in the first batch, compile the layer as a whole with RoundPipeStrategy(compile=True), or"
                " train with RoundPipeStrategy(microbatches=1)."
            )

    def _note_foreign_parameters(self, microbatch: Microbatch, call: Call) -> None:
        """The layer turned out to use parameters of others: from now on it waits for their optimizer steps, too."""
        layer, foreign = call.layer, call.layer.traits.foreign
        for parameter in call.reached:
            if not self.store.owns(parameter) or any(parameter is other for other in foreign):
                continue
            self.store.add_to_layer(layer, parameter)
            foreign.append(parameter)
            unit = self.store.unit_of(parameter)
            if not microbatch.batch.settled and unit not in microbatch.units_awaited:
                raise RuntimeError(
                    f"{call.label}: it uses the parameter {self.store.name(parameter)!r} of another module past its"
                    " arguments, which it did not do in the first batch, so that parameter's optimizer step was not"
                    " waited for. Pass it as an argument, or step in line with"
                    " RoundPipeStrategy(background_step=False)."
                )
        call.reached = []

    def _timed(self, microbatch: Microbatch, costs: list[Costs], call: Call, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            seconds = time.perf_counter() - start
            use = self.use[microbatch.device]
            use.busy_seconds += seconds
            use.calls += 1
            costs[call.layer.index].add(seconds)

    # -- the baton, and what is swapped with it --------------------------------------------------------------------

    def _take_baton(self, microbatch: Microbatch, place: threading.Condition | None = None) -> None:
        place = place or self.baton.request()
        self.baton.take(place, microbatch.batch.number)
        microbatch.place = place
        try:
            if microbatch.in_backward:
                self._swap_in_backward(microbatch)
            elif microbatch.batch.microbatches > 1:
                self._swap_in(microbatch)
        except BaseException:
            self.baton.release(place)
            microbatch.place = None
            raise

    def _release_baton(self, microbatch: Microbatch) -> None:
        if microbatch.place is None:
            return
        if microbatch.in_backward:
            self._swap_out_backward(microbatch)
        elif microbatch.batch.microbatches > 1:
            self._swap_out(microbatch)
        self.baton.release(microbatch.place)
        microbatch.place = None

    def _swap_in(self, microbatch: Microbatch) -> None:
        batch = microbatch.batch
        now = torch.default_generator.get_state()
        if self._left_random_state is not None and not torch.equal(now, self._left_random_state):
            raise RuntimeError(
                "A layer drew random numbers on the CPU that it did not draw in the first batch, or a thread of your"
                " own did while the step ran: neither can be repeated in the recompute. If it is a layer, it is one of"
                " those running at this moment; let it draw from the first batch on. A thread should draw from a"
                " torch.Generator of its own. Or train with RoundPipeStrategy(microbatches=1)."
            )
        if microbatch.random_state is not None:
            microbatch.random_state.restore()
        else:
            everything = batch.records or self._swaps_everything
            seed_all(derive_seed(self.seed, batch.seed_step, microbatch.number, -1), everything=everything)
            microbatch.random_state = RandomState.capture(everything=everything)
        self.attributes.put(microbatch)

    def _swap_out(self, microbatch: Microbatch) -> None:
        batch = microbatch.batch
        state = RandomState.capture(everything=batch.records or self._swaps_everything)
        if batch.records and microbatch.random_state is not None and not self._swaps_everything:
            self._swaps_everything = not state.same_outside_torch(microbatch.random_state)
        microbatch.random_state = state
        self._left_random_state = state.torch_cpu
        self.attributes.note(microbatch)

    def _swap_in_backward(self, microbatch: Microbatch) -> None:
        """The backward draws nothing of its own, but a checkpoint in the step sets the generator for a while."""
        if not (microbatch.batch.records or self._backward_draws):
            return  # the generator belongs to the main thread, which may be at its own work by now
        microbatch.outside_random_state = torch.default_generator.get_state()
        if microbatch.backward_random_state is not None:
            torch.default_generator.set_state(microbatch.backward_random_state)

    def _swap_out_backward(self, microbatch: Microbatch) -> None:
        now, outside = torch.default_generator.get_state(), microbatch.outside_random_state
        microbatch.outside_random_state = microbatch.backward_random_state = None
        if outside is not None and not torch.equal(now, outside):
            self._backward_draws = True
            microbatch.backward_random_state = now
            torch.default_generator.set_state(outside)

    # -- parameters and gradients ----------------------------------------------------------------------------------

    def _stand_in(self, microbatch: Microbatch, parameter: nn.Parameter) -> Tensor:
        present = microbatch.stand_ins.get(id(parameter))
        if present is not None:
            return present[1]
        version = microbatch.batch.version
        self._settle(microbatch, parameter, version)
        leaf = self.store.full_precision_leaf(parameter, version).detach().requires_grad_(parameter.requires_grad)
        microbatch.lent.append((parameter, leaf, leaf._version))
        if leaf.requires_grad:
            leaf.register_hook(
                partial(_refuse_elsewhere, _identity(microbatch), microbatch.label, self.store.name(parameter))
            )
        leaf.is_stand_in = True  # type: ignore[attr-defined]  # so that a layer's graph shows where it leads
        microbatch.stand_ins[id(parameter)] = (parameter, leaf)
        microbatch.batch.used_outside.add(id(parameter))
        self._units_outside[self.store.unit_of(parameter)] = None
        return leaf

    def _value(self, microbatch: Microbatch, parameter: nn.Parameter) -> Tensor:
        """What the code between layers computes with, and may change, where gradients are disabled."""
        if self.store.keeps_versions(parameter):
            return self._stand_in(microbatch, parameter)
        self._settle(microbatch, parameter, self.store.enqueued)
        return parameter

    def _memory(self, microbatch: Microbatch, parameter: nn.Parameter) -> Tensor:
        """The memory that the code between layers gets when it asks for a parameter's own."""
        if not self.store.keeps_versions(parameter):
            self._settle(microbatch, parameter, self.store.enqueued)
            return parameter
        self._stand_in(microbatch, parameter)
        return self.store.full_precision_leaf(parameter, microbatch.batch.version)

    def _settle(self, microbatch: Microbatch, parameter: nn.Parameter, version: int) -> None:
        """Waits for a parameter that the code between layers uses. Not with the baton: the step may depend on it."""
        unit = self.store.unit_of(parameter)
        microbatch.units_awaited.add(unit)
        if unit.done < version:
            self._release_baton(microbatch)
            self.store.wait((unit,), version, microbatch.batch.number)
            self._take_baton(microbatch)

    def _touched(self, microbatch: Microbatch, parameter: nn.Parameter, memory: Tensor, written: bool) -> None:
        """The code between layers got hold of a parameter's memory, and may change it at this point of the step."""
        batch = microbatch.batch
        if self.store.keeps_versions(parameter):
            if written:
                raise RuntimeError(
                    f"The step changes the parameter {self.store.name(parameter)!r} itself. With staleness 1 it has two"
                    " values, the one that the step computes with and that after the optimizer's next step, and the"
                    " change belongs to both. Change it in a hook after the step (on_train_batch_end), freeze it with"
                    " requires_grad_(False) if the optimizer does not train it, or use strategy='roundpipe' (staleness"
                    " 0)."
                )
            microbatch.lent.append((parameter, memory, memory._version))
            return
        self.store.follow(parameter)
        batch.used_outside.add(id(parameter))
        if batch.microbatches == 1:
            return
        self.run_serially("the step changes parameters or takes their data")
        if written and not batch.serial:
            raise RuntimeError(
                f"The step changes the parameter {self.store.name(parameter)!r} itself, which it did not do in the"
                " first batch, while other microbatches compute with it. Do it from the first batch on, outside of"
                " training_step, or train with RoundPipeStrategy(microbatches=1)."
            )

    def _flagged(self, microbatch: Microbatch, parameter: nn.Parameter) -> None:
        """The code between layers sets a parameter's ``requires_grad``, which all microbatches see."""
        microbatch.flagged[parameter] = None
        batch = microbatch.batch
        if batch.microbatches == 1:
            return
        self.run_serially("the step freezes or unfreezes parameters")
        if not batch.serial:
            raise RuntimeError(
                f"The step freezes or unfreezes the parameter {self.store.name(parameter)!r}, which it did not do in"
                " the first batch, while other microbatches compute with it. Do it from the first batch on, outside of"
                " training_step, or train with RoundPipeStrategy(microbatches=1)."
            )

    def _count_calls(self, microbatch: Microbatch, roots: Sequence[Tensor]) -> None:
        """After the forward: which units get gradients, from how many calls. The others are finished."""
        units = self.store.units
        for leaf in graph_leaves(roots, through_calls=True)[0]:
            if isinstance(leaf, nn.Parameter) and self.store.owns(leaf):
                self._note_use_past_us(microbatch, leaf)
        microbatch.units_left = set(units)
        late = {self.store.unit_of(parameter) for parameter, _ in microbatch.stand_ins.values()}
        late |= self._units_past_us
        left = microbatch.calls_left
        for call in microbatch.calls:
            call.check_aliases()
            called = microbatch.units_counted[call] = list(self.store.units_of_layer(call.layer))
            if call.differentiable:
                for unit in called:
                    left[unit] = left.get(unit, 0) + 1
            elif self._units_past_us:
                late.update(called)  # a reentrant checkpoint may run it again, with gradients
        if microbatch.batch.splits_calls:  # what its parts will add is not known yet
            late |= set(units)
        for unit in late:
            left[unit] = -1  # finished at the very end
        for unit in units:
            if unit not in left:
                self._finish_unit(microbatch, unit)

    def _catch_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        """A gradient that autograd computed for a parameter itself, past our stand-ins."""
        microbatch: Microbatch | None = getattr(_running, "microbatch", None)
        if microbatch is None:
            if self._own is None or threading.get_ident() != self._main_thread:
                return False
            self._own.append((parameter, gradient))
            return True
        if not microbatch.in_backward:
            raise RuntimeError(
                f"The gradient of the parameter {self.store.name(parameter)!r} is computed by a backward within"
                " training_step, before the step's own. Return one loss, or use manual optimization."
            )
        self._note_use_past_us(microbatch, parameter)
        if id(parameter) in microbatch.frozen:
            return True
        gradients = microbatch.batch.gradients
        if microbatch.in_graph_task() and not parameter._backward_hooks:
            gradients.add(microbatch.index, parameter, gradient)  # autograd adds up the uses within one graph
        else:
            gradients.deposit(microbatch.index, parameter, gradient, alone=not microbatch.in_graph_task())
        return True

    def _note_use_past_us(self, microbatch: Microbatch, parameter: nn.Parameter) -> None:
        """Autograd will reach, or has reached, the parameter itself, and not what stands for it.

        Raises:
            RuntimeError: When its value may not have been the right one, or its gradient comes too late.
        """
        batch, unit, name = microbatch.batch, self.store.unit_of(parameter), self.store.name(parameter)
        how = (
            "in a way that hides it from the pipeline (a custom autograd function, a reentrant checkpoint or a script)"
        )
        if self.store.staleness:
            raise RuntimeError(
                f"The parameter {name!r} is used {how}, so it cannot be the value one step behind. Use"
                " strategy='roundpipe' (staleness 0)."
            )
        if unit not in self._units_past_us:
            if microbatch.in_backward:
                known_in_time = not batch.gradients.has_finished(microbatch.index, unit) and (
                    unit not in batch.pending_units or unit in microbatch.units_awaited
                )
            else:  # it may have been waited for only after the use
                known_in_time = batch.settled
            if not (batch.records or known_in_time):
                raise RuntimeError(
                    f"The parameter {name!r} is used {how}, which it was not in the first batch, so its optimizer step"
                    " was not waited for. Use it so from the first batch on, pass it to torch functions between layers"
                    " or within its layer, or step in line with RoundPipeStrategy(background_step=False)."
                )
            self._units_past_us.add(unit)
            self._units_outside[unit] = None
            if any(layer.traits.writes_state or layer.norms(training=True) for layer in self.layers):
                self.run_serially("a reentrant checkpoint may run a layer again that writes its own state")

    def _count_down(self, microbatch: Microbatch, call: Call) -> None:
        left = microbatch.calls_left
        for unit in microbatch.units_counted[call]:
            if left.get(unit, -1) > 0:
                left[unit] -= 1
                if left[unit] == 0:
                    self._finish_unit(microbatch, unit)

    def _finish_unit(self, microbatch: Microbatch, unit: Unit) -> None:
        microbatch.units_left.discard(unit)
        microbatch.batch.gradients.finish(microbatch.index, unit)

    def _finish_units(self, microbatch: Microbatch) -> None:
        for unit in sorted(microbatch.units_left, key=lambda unit: unit.index):
            self._finish_unit(microbatch, unit)


def _identity(microbatch: Microbatch) -> tuple[int, int]:
    return microbatch.batch.number, microbatch.number


def _refuse_elsewhere(owner: tuple[int, int], label: str, parameter: str, gradient: Tensor) -> None:
    """A leaf that stands for a parameter gets a gradient: in its own microbatch's backward, or nobody collects it."""
    microbatch: Microbatch | None = getattr(_running, "microbatch", None)
    if microbatch is None or _identity(microbatch) != owner:
        raise RuntimeError(
            f"A tensor that was made of the parameter {parameter!r} in {label} gets a gradient elsewhere, which would"
            " be lost. Make such tensors anew in each training_step, or keep them detached."
        )


@contextmanager
def _naming(module: nn.Module) -> Iterator[None]:
    """What goes wrong with the split of a module's call, in full."""
    try:
        yield
    except CannotSplitError as error:
        raise RuntimeError(
            f"The call of {type(module).__name__} cannot be split as in the first batch: {error}. Train with"
            " RoundPipeStrategy(split='whole')."
        ) from error


def _merged_calls(plan: Plan | None, sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Calls in an order that has a place for every call of the plan and of each sequence."""
    merged = plan.calls if plan is not None else ()
    for sequence in sequences:
        merged = merge_sequences(merged, sequence)
    return merged


def _start(microbatch: int) -> Action:
    """The turn to begin with the step."""
    return Action("F", -1, microbatch)


def _serial(microbatch: int, backward: bool) -> Action:
    """The turns of the warm-up batch."""
    return Action("B" if backward else "F", int(backward), microbatch)


@contextmanager
def _without(mode: OutsideParameters) -> Iterator[None]:
    """Inside layers, parameters are not replaced."""
    if _get_current_function_mode() is mode:
        with _pop_mode_temporarily():
            yield
    else:
        with mode.paused():
            yield


def _run_forward_hooks(layer: Layer, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Runs the user's forward hooks of a module inside a layer, after the call and on its outputs."""
    module = layer.modules[index]
    versions = [t._version for t in tensors(output) if not t.is_inference()]
    for number, hook in list(module._forward_hooks.items()):
        if number in module._forward_hooks_with_kwargs:
            result = hook(module, args, kwargs, output)
        else:
            result = hook(module, args, output)
        changed = [t._version for t in tensors(output) if not t.is_inference()] != versions
        if changed or (result is not None and result is not output):
            raise RuntimeError(
                f"layer {layer.name!r}: a forward hook on {type(module).__name__} inside it replaces or changes the"
                " module's output, which is not supported there. Put the hook on the layer itself, or keep the layer"
                " out of the pipeline with RoundPipeStrategy(layers=...)."
            )


def _check_hooks(
    layer: Layer,
    index: int,
    before: AttributeState,
    held: dict[tuple[int, str], list[Any]],
    read_later: set[tuple[int, str]],
) -> None:
    """First batch: the hooks have run too late for what the layer itself reads after them."""
    for i, (module, items) in enumerate(zip(layer.modules, before.dicts, strict=True)):
        now = module.__dict__
        for name in {**items, **now}:
            changed = name not in items or name not in now or now[name] is not items[name]
            if (i, name) in held and not changed:
                changed = not same(contents(now[name]), held[i, name])
            if changed and (id(module), name) in read_later:
                raise RuntimeError(
                    f"layer {layer.name!r}: a forward hook on {type(layer.modules[index]).__name__} inside it sets"
                    f" {name!r} of {type(module).__name__}, which the layer reads in the same call. Hooks inside a"
                    " layer run after it. Set it in the module's forward instead of a hook, or keep the layer out of"
                    " the pipeline with RoundPipeStrategy(layers=...)."
                )
