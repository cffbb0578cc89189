"""The runtime: executes a schedule with one thread per microbatch.

This is the main thread's side of it. It lines a batch up, starts the microbatches' threads and waits for them; what
they do is in :mod:`steps`. It never hands them work on the way.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.out_of_memory import release_frames
from lightning_roundpipe.pipeline.attributes import ModuleAttributes
from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.pipeline.call_split import CallSplit
from lightning_roundpipe.pipeline.calling import LayerCalls
from lightning_roundpipe.pipeline.collecting import Collector
from lightning_roundpipe.pipeline.compiling import count_compilations
from lightning_roundpipe.pipeline.device_rng import DeviceGenerators
from lightning_roundpipe.pipeline.executing import Executor
from lightning_roundpipe.pipeline.fanning_out import FanningOut
from lightning_roundpipe.pipeline.footprints import Footprints
from lightning_roundpipe.pipeline.handover import Handover
from lightning_roundpipe.pipeline.interception import Interception
from lightning_roundpipe.pipeline.layers import LayerSpec, find_layers
from lightning_roundpipe.pipeline.lines import LineUp
from lightning_roundpipe.pipeline.measuring import Measured
from lightning_roundpipe.pipeline.mixed import half_parameters
from lightning_roundpipe.pipeline.occupancy import Peaks
from lightning_roundpipe.pipeline.plan import Plan, repeated
from lightning_roundpipe.pipeline.planning import Planning
from lightning_roundpipe.pipeline.recording import Recording
from lightning_roundpipe.pipeline.replica import Layer, commit_norm_statistics, share_compiled_code
from lightning_roundpipe.pipeline.stand_ins import StandIns
from lightning_roundpipe.pipeline.steps import Step, Steps
from lightning_roundpipe.pipeline.strays import let_go_of_graphs
from lightning_roundpipe.pipeline.threads import Threads
from lightning_roundpipe.pipeline.turns import Turns
from lightning_roundpipe.pipeline.turnstile import Cancelled, Monitor, Turnstiles
from lightning_roundpipe.pipeline.weight_actions import WeightActions
from lightning_roundpipe.schedules import Scheduler
from lightning_roundpipe.state.gradients import BatchGradients, Gradients
from lightning_roundpipe.state.host_memory import give_back_surplus
from lightning_roundpipe.state.parameters import ParameterStore, Unit


class Pipeline:
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
        memory_limit: Bytes of each device that stages may take; by default as many as it takes.
        refuses: Whether layers are refused that need more than that by themselves. Otherwise they are tried.
        keeps_graphs: Whether calls keep their graph from the forward to the backward, so that nothing is run again,
            but for the first batch and for layers of which something is changed in place.
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
        memory_limit: int | None = None,
        refuses: bool = True,
        keeps_graphs: bool = False,
    ) -> None:
        self.root = root
        self.devices = list(devices)
        self.scheduler = scheduler or Scheduler(devices=len(self.devices))
        self.seed = seed
        self.step = first_step
        self.failure_told = False
        """Whether the main thread has been told of what failed, and so its caller."""
        self.layers = [Layer(i, name, module) for i, (name, module) in enumerate(find_layers(root, layers).items())]
        share_compiled_code(root, self.layers, compile_settings)
        count_compilations()
        self.monitor = Monitor()
        self.store = ParameterStore(root, self.layers, self.monitor, staleness, self.devices[0].host_memory)
        self.gradients = Gradients(self.store, self.monitor)
        self.measured = Measured(
            len(self.layers),
            self.devices,
            lambda index: not keeps_graphs or self.layers[index].traits.needs_recompute,
        )
        self.peaks = [Peaks() for _ in self.devices]
        self.batch: Batch | None = None
        """The last batch."""
        self.batches = 0
        self.last_microbatches = 0
        self.serial_reason: str | None = None
        """Why microbatches run one after the other, if they do."""
        self.recording: Recording | None = None
        """What records chosen batches, if anything does."""
        self.on_serial: Callable[[str], None] = lambda reason: None
        self._has_seen_several = False
        """Whether there has been a first batch of several microbatches."""

        self._interception = Interception(root, self.layers)
        self._attributes = ModuleAttributes(root, self.layers, self.run_serially, self._keep_order)
        footprints = Footprints(
            self.layers, self.store, len(self.devices), memory_limit, refuses=refuses, keeps_graphs=keeps_graphs
        )
        self._planning = Planning(
            self.scheduler,
            self.measured,
            staleness,
            self.monitor.fail,
            footprints.memory,
            graphs_stay=keeps_graphs and not self.devices[0].is_host,
        )
        self._line_up = LineUp(self.scheduler, self.layers, self.peaks)
        self._turnstiles = Turnstiles(self.monitor, len(self.devices) + 1)  # the last one is the start line
        self._threads = Threads("roundpipe")
        self._weight_actions = WeightActions(self.devices, self.monitor, self._turnstiles, self.measured)
        turns = Turns(self._turnstiles)
        self._handover = Handover(self.monitor, self._attributes, DeviceGenerators(self.devices, seed), seed)
        self._collector = Collector(self.store, self.layers, self.run_serially)
        stand_ins = StandIns(self.store, self._handover, self.run_serially)
        calls = LayerCalls(
            root,
            self.devices,
            self.store,
            turns,
            self._handover,
            Executor(self.devices, self.layers, self._handover, self.measured, seed),
            footprints,
            self._attributes,
            stand_ins,
            self._collector,
            self.run_serially,
            keeps_graphs=keeps_graphs,
        )
        self._steps = Steps(
            self.devices,
            self.layers,
            self.monitor,
            self.store,
            turns,
            self._handover,
            self._attributes,
            calls,
            stand_ins,
            self._collector,
        )
        self._fanning_out = FanningOut(
            self.layers,
            self._steps,
            self._threads,
            self._line_up,
            self._turnstiles,
            self._planning,
            self._handover,
            self._attributes,
            lambda: self.serial_reason is not None,
        )

    # -- a batch ---------------------------------------------------------------------------------------------------

    def split_calls(self, splits: Mapping[tuple[nn.Module, Hashable], CallSplit], microbatches: int) -> None:
        """From the next batch on the step runs once, with the whole batch, and these calls are split.

        Args:
            splits: How each is split: by module and :func:`signature` of its arguments.
            microbatches: Into how many, at most.
        """
        self._fanning_out.set_up(splits, microbatches)
        self._interception.split_calls({module: None for module, _ in splits})

    def start_batch(
        self,
        steps: Sequence[Step],
        weights: Sequence[float],
        scale: Callable[[], float],
        *,
        deferred: bool = False,
        values_changed: bool = False,
        rounds_gradients: bool = False,
    ) -> Batch:
        """Runs the forward of a batch, and starts its backward. Returns when all losses are known.

        Args:
            steps: The user's step for each microbatch.
            weights: The weight of each microbatch's loss in the batch's loss.
            scale: Factor of the batch's loss; asked for when the first backward begins.
            deferred: Whether the backward waits for :meth:`Batch.release`.
            values_changed: Whether user code may have changed parameters since the last batch. No step may be pending.
            rounds_gradients: Whether gradients of parameters that travel in half precision are kept in it for the
                step that follows.

        Raises:
            BaseException: Whatever was raised in a microbatch, with a note that says where.
        """
        self.check()
        if replaced := self.replaced():
            raise RuntimeError(
                f"The model's modules or parameters were replaced during training: {', '.join(replaced)}."
                " Change them before fit, or call fit again after the change."
            )
        self.store.refresh(values=values_changed)
        self._collector.refresh()
        if self.batch is not None and self.batch.released and (self._collector.units_past_us or self.batch.recomputes):
            self.wait_backward()  # a checkpoint runs the user's own modules in it
        gradients = self.gradients.begin_batch(len(weights), rounds=rounds_gradients)
        batch = self._make_batch(weights, scale, gradients, deferred=deferred)
        if self.recording is not None:
            batch.recording = self.recording.begin_batch(batch.number, batch.is_done, settled=self._planning.settled)
        batch.settled = values_changed or self.store.enqueued == 0
        batch.pending_units = {unit for unit in self.store.units if unit.done < batch.version}
        self._has_seen_several |= batch.microbatches > 1
        self.last_microbatches = self._fanning_out.microbatches if batch.splits_calls else batch.microbatches
        self.batches += 1
        self.step += 1
        self.batch = batch
        self._attributes.begin_batch(batch)
        if not batch.splits_calls:  # such a step has the pipeline for itself
            forward, backward = self._line_up.lines(batch)
            self._turnstiles.extend([[*first, *then] for first, then in zip(forward, backward, strict=True)])
            self._weight_actions.start(batch, forward)
        splitter = self._fanning_out.call if batch.splits_calls else None
        watches = self.last_microbatches > 1 and (batch.records or not batch.serial)
        with self._handover.lending_generators(batch):
            self._interception.install()
            try:
                with self._attributes.watching(records=batch.records) if watches else nullcontext():
                    for index, step in enumerate(steps):
                        work = partial(self._steps.run, batch, index, step, splitter)
                        self._threads.submit(index, work, then=batch.thread_done)
                    self.until(batch.wait_forward)
                    batch.wait_losses()
                    if not deferred and (batch.serial or self.draws_on_the_host()):
                        self.until(batch.wait_all)
            finally:
                if not (deferred and batch.recomputes and self.monitor.failure is None):
                    self._interception.remove()  # or else in `wait_backward`
        if batch.microbatches > 1:
            self._attributes.end_batch(batch)
        commit_norm_statistics([run.norm_statistics for run in batch.runs if run is not None])
        self._learn(batch, rounds_gradients)
        batch.forget_runs()
        return batch

    def _make_batch(
        self, weights: Sequence[float], scale: Callable[[], float], gradients: BatchGradients, *, deferred: bool
    ) -> Batch:
        splits_calls = self._fanning_out.active
        if self.batch is not None and self.batch.records:
            self._fanning_out.plan_again()
        first = self._planning.plan is None and not self._fanning_out.plans
        records = first or (len(weights) > 1 and not self._has_seen_several)  # it shows what is new
        serial = splits_calls or records or self.serial_reason is not None
        return Batch(
            self.monitor,
            self.batches,
            self.step,
            weights,
            scale,
            deferred,
            None if serial else self._planning.next(deferred=deferred),
            records,
            gradients,
            self.store.version_for_next_batch(),
            splits_calls=splits_calls,
        )

    def _learn(self, batch: Batch, rounds_gradients: bool) -> None:
        """Takes what the batch has shown for the next one."""
        sequences = [tuple(run.sequence) for run in batch.runs if run is not None]
        for layer in self.layers:
            layer.traits.known |= layer.traits.dropped
        if batch.records:
            foreign = (map(id, layer.traits.foreign) for layer in self.layers)
            self.store.travel_in_half(half_parameters(self.layers, batch.used_outside.union(*foreign)))
            if batch.serial and not batch.deferred:
                give_back_surplus(self.gradients.settle(rounds=rounds_gradients))
        with_state = {layer.index for layer in self.layers if layer.traits.writes_state}
        if with_state and not with_state.isdisjoint(repeated(sequences)):
            self.run_serially("a layer that writes its own state is called several times in a step")
        if not batch.splits_calls:  # each call has a plan of its own
            self._planning.follow(batch, sequences)
        if batch.records:
            self.measured.forget_costs()

    def replaced(self) -> list[str]:
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
            self.failure_told = True
            raise
        self.check()

    def check(self) -> None:
        """Raises the error that the pipeline failed with, if it did."""
        failure = self.monitor.failure
        self.failure_told = failure is not None
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
        if self.batch is not None:
            self.until(self.batch.wait_all)
            self._interception.remove()
            for device in self.devices:
                device.settle()
        self.check()

    def take_own_gradients(self) -> None:
        """From now on, gradients that the main thread's own code computes belong to the last batch."""
        self._collector.take_own()

    def add_own_gradients(self) -> None:
        """Adds what the main thread's own code has computed, such as a penalty in an overridden ``backward``."""
        if own := self._collector.own():
            self.wait_backward()
            for parameter, gradient in own:
                self.gradients.add(parameter, gradient)

    def close(self) -> None:
        """Ends all threads. Whatever still runs is cancelled."""
        self.monitor.fail(Cancelled())
        self._threads.close()
        self._weight_actions.close()
        self._interception.remove()
        self._collector.close()
        self._planning.close()
        self.batch = None
        if isinstance(self.monitor.failure, torch.OutOfMemoryError):
            release_frames(self.monitor.failure)
        self._attributes.forget()
        for layer in self.layers:
            layer.forget()
        if not all(device.is_host for device in self.devices):
            let_go_of_graphs(self.root)
        for device in self.devices:
            device.let_go()

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the step, as soon as there is one."""
        return self._planning.plan

    def plans(self) -> list[Plan]:
        """The plan of the step, or those of the calls in it that are split."""
        return [self.plan] if self.plan is not None else list(self._fanning_out.plans.values())

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
        if self._handover.backward_draws or (self.batch is not None and self.batch.recomputes):
            return True
        if any(layer.traits.sets_generator for layer in self.layers):
            return True
        return any(device.shares_host_generator for device in self.devices) and any(
            layer.draws() or layer.traits.compiles for layer in self.layers
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
