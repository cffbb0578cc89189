"""The life of a microbatch in its own thread: the user's step from beginning to end, and then its backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from lightning_roundpipe.devices import Device
from lightning_roundpipe.pipeline.attributes import ModuleAttributes
from lightning_roundpipe.pipeline.batch import Batch, Microbatch, presenting
from lightning_roundpipe.pipeline.calling import LayerCalls
from lightning_roundpipe.pipeline.collecting import Collector
from lightning_roundpipe.pipeline.compiling import before_compiling
from lightning_roundpipe.pipeline.handover import Handover
from lightning_roundpipe.pipeline.interception import handling_calls, splitting_calls
from lightning_roundpipe.pipeline.out_of_memory import describe
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.stand_ins import StandIns
from lightning_roundpipe.pipeline.strays import Strays
from lightning_roundpipe.pipeline.turns import Turns
from lightning_roundpipe.pipeline.turnstile import Cancelled, Monitor
from lightning_roundpipe.state.parameters import ParameterStore

Step = Callable[[], Tensor | None]
"""The user's step for one microbatch. Returns the loss, or None where there is nothing to train."""

Splitter = Callable[[Microbatch, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a call within a microbatch's step in parts. Returns NotImplemented where the call is not split."""


class Steps:
    """Runs microbatches, each in the thread that calls it.

    Args:
        devices: The devices.
        layers: All layers.
        monitor: Told of what fails.
        store: The parameters.
        turns: Who may go on.
        handover: The baton.
        attributes: What steps leave on modules.
        calls: Executes layer calls.
        stand_ins: What stands for parameters between them.
        collector: Takes the gradients.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        layers: Sequence[Layer],
        monitor: Monitor,
        store: ParameterStore,
        turns: Turns,
        handover: Handover,
        attributes: ModuleAttributes,
        calls: LayerCalls,
        stand_ins: StandIns,
        collector: Collector,
    ) -> None:
        self._devices = devices
        self._layers = layers
        self._on_host = all(device.is_host for device in devices)
        self._monitor = monitor
        self._store = store
        self._turns = turns
        self._handover = handover
        self._attributes = attributes
        self._calls = calls
        self._stand_ins = stand_ins
        self._collector = collector

    def run(self, batch: Batch, index: int, step: Step, splitter: Splitter | None) -> None:
        """Runs a microbatch from its beginning to its end. Does not raise: what fails is the batch's failure.

        Args:
            batch: The batch.
            index: Number of the microbatch in it.
            step: The user's step.
            splitter: Asked at calls of modules that may be split, if the step has any.
        """
        microbatch = Microbatch(batch, index)
        with self._at_work(microbatch):
            roots = self._forward(microbatch, step, splitter)
            batch.forward_done()
            self._turns.end_step(microbatch)
            self._turns.begin_backward(microbatch)
            if roots:
                batch.wait_released()
                self._backward(microbatch, roots, batch.seeds(index, roots))
            self._end(microbatch)

    def run_forward(self, batch: Batch, index: int, step: Callable[[Microbatch], Any]) -> None:
        """As :meth:`run`, but the forward alone: of a part of a split call, which is the step."""
        microbatch = Microbatch(batch, index)
        with self._at_work(microbatch):
            self._forward(microbatch, partial(step, microbatch))
            self._turns.end_step(microbatch)

    def run_backward(self, microbatch: Microbatch, roots: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> None:
        """The backward of such a part.

        Args:
            microbatch: The part.
            roots: What the backward begins with, and the gradients of that.
        """
        with self._at_work(microbatch):
            self._turns.begin_backward(microbatch)
            tensors, seeds = roots()
            if tensors:
                self._backward(microbatch, tensors, seeds)
            self._end(microbatch)

    @contextmanager
    def _at_work(self, microbatch: Microbatch) -> Iterator[None]:
        """What fails is the batch's failure, with a note that says where."""
        with presenting(microbatch):
            before_compiling(lambda: self._handover.hold_to_compile(microbatch))
            try:
                with self._among_devices():
                    yield
            except Cancelled:
                microbatch.drop()  # the thread that failed holds the error
            except BaseException as error:
                where = f"; {microbatch.where}" if microbatch.where else ""
                error.add_note(f"roundpipe: {microbatch.label}{where}; phase {microbatch.phase}")
                if isinstance(error, torch.OutOfMemoryError):
                    error.add_note(describe(error, microbatch, self._layers, self._store))
                if microbatch.batch.microbatches > 1 and "more than 1 value per channel" in str(error):
                    error.add_note(
                        "roundpipe: BatchNorm cannot normalize a microbatch of a single sample. Set fewer"
                        " `microbatches`; if only the last batch is that small, set drop_last=True in the DataLoader."
                    )
                self._monitor.fail(error, microbatch.batch.number)
                microbatch.drop()
            finally:
                before_compiling(None)

    @contextmanager
    def _among_devices(self) -> Iterator[None]:
        """Tensors are where the microbatch's layers have run, and what it brings is not."""
        if self._on_host:
            yield
            return
        with self._devices[0].in_thread(), Strays(self._devices[0].staged):
            yield

    def _forward(
        self, microbatch: Microbatch, step: Callable[[], Any], splitter: Splitter | None = None
    ) -> list[Tensor]:
        """Waits for its turn and runs the step. Returns what the backward begins with."""
        batch = microbatch.batch
        batch.runs[microbatch.index] = microbatch
        past_us = self._collector.units_past_us
        if batch.serial:
            self._turns.begin_step(microbatch)
            self._store.wait(list(past_us), batch.version, batch.number)
            place = self._handover.request()
        else:  # the steps begin in the order of the microbatches, and need not wait for parameters on the way
            self._store.wait([*self._stand_ins.units, *past_us], batch.version, batch.number)
            self._turns.begin_step(microbatch)
            place = self._handover.request()
            self._turns.let_next_begin(microbatch)
        mode = microbatch.mode = self._stand_ins.mode(microbatch)
        self._handover.take(microbatch, place)
        try:
            with ExitStack() as stack:
                stack.enter_context(handling_calls(partial(self._calls.call, microbatch)))
                if splitter is not None:
                    stack.enter_context(splitting_calls(partial(splitter, microbatch)))
                stack.enter_context(mode)
                if batch.records or not batch.serial:
                    stack.enter_context(microbatch.accesses.noted())
                result = step()
            self._stand_ins.end_step(microbatch)
        finally:
            self._handover.release(microbatch)
        self._turns.pass_forward(microbatch)
        if batch.records and batch.microbatches > 1:
            self._attributes.end_step(microbatch)
        roots = batch.take(microbatch.index, result, partial(self._devices[microbatch.device].bring_down, copy=True))
        self._collector.count_calls(microbatch, roots)
        return roots

    def _backward(self, microbatch: Microbatch, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        microbatch.phase = "backward"
        microbatch.where = ""
        microbatch.in_backward = True
        handles = [root.register_hook(lambda _: microbatch.note_graph_task()) for root in roots if root.requires_grad]
        mode = microbatch.outside
        mode.only_if = microbatch.runs_again
        self._handover.take(microbatch)
        try:
            with handling_calls(partial(self._calls.call_again, microbatch)), mode:
                self._run_backward(roots, seeds)
        finally:
            self._handover.release(microbatch)
            for handle in handles:
                handle.remove()
        if microbatch.batch.records:
            for call in microbatch.calls:
                call.check_nothing_escaped()

    def _run_backward(self, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        if self._on_host:
            torch.autograd.backward(roots, seeds)
            return
        # Autograd has a thread for each device. A call that waited for its turn in it would let all others wait, too.
        with torch.autograd.set_multithreading_enabled(False):
            # Not `torch.autograd.backward`, a torch function: stray tensors in it would not be moved.
            _engine_run_backward(tuple(roots), tuple(seeds), False, False, (), True, accumulate_grad=True)

    def _end(self, microbatch: Microbatch) -> None:
        """After the backward: nothing more comes."""
        self._turns.pass_remaining(microbatch)
        microbatch.batch.wait_weights(microbatch.index)
        self._collector.end(microbatch)
        self._turns.end_backward(microbatch)
        microbatch.drop()
