"""Layer calls: what happens when a microbatch comes to a layer, and when autograd comes back to it."""

from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_roundpipe.devices import AcceleratorDevice, Device
from lightning_roundpipe.devices.base import arrival
from lightning_roundpipe.pipeline.arguments import Structure
from lightning_roundpipe.pipeline.attributes import ModuleAttributes
from lightning_roundpipe.pipeline.batch import Microbatch, present
from lightning_roundpipe.pipeline.collecting import Collector
from lightning_roundpipe.pipeline.executing import Executor
from lightning_roundpipe.pipeline.footprints import Footprints
from lightning_roundpipe.pipeline.handover import Handover
from lightning_roundpipe.pipeline.hooks import run_and_check_hooks, run_hooks
from lightning_roundpipe.pipeline.interception import handling_no_calls, in_checkpoint
from lightning_roundpipe.pipeline.nodes import CallOwner
from lightning_roundpipe.pipeline.recording import FOR_STEP
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.runs import Escaped, Mode, Run
from lightning_roundpipe.pipeline.stand_ins import StandIns
from lightning_roundpipe.pipeline.tape import Call
from lightning_roundpipe.pipeline.traffic import count_backward, count_forward, count_gradients
from lightning_roundpipe.pipeline.turns import Turns
from lightning_roundpipe.pipeline.watching import put_for
from lightning_roundpipe.state.parameters import ParameterStore
from lightning_roundpipe.state.sharing import is_held


class LayerCalls(CallOwner):
    """Takes each call from the code between layers to its device, at its turn and without the baton, and back.

    Args:
        root: The user's module.
        devices: The devices.
        store: The parameters.
        turns: What is waited for before a call runs.
        handover: The baton.
        executor: Runs the calls.
        footprints: Told of what they need of a device's memory.
        attributes: Where layers leave what they set on modules.
        stand_ins: Told of parameters that a layer changes.
        collector: Takes the gradients.
        run_serially: Called with the reason where only a serial order of the microbatches can be right.
        keeps_graphs: Whether calls keep their graph from the forward to the backward, wherever they can.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[Device],
        store: ParameterStore,
        turns: Turns,
        handover: Handover,
        executor: Executor,
        footprints: Footprints,
        attributes: ModuleAttributes,
        stand_ins: StandIns,
        collector: Collector,
        run_serially: Callable[[str], None],
        *,
        keeps_graphs: bool,
    ) -> None:
        self._devices = devices
        self._store = store
        self._turns = turns
        self._handover = handover
        self._executor = executor
        self._footprints = footprints
        self._attributes = attributes
        self._stand_ins = stand_ins
        self._collector = collector
        self._run_serially = run_serially
        self._keeps_graphs = keeps_graphs
        self._parametrized = any(map(parametrize.is_parametrized, root.modules()))

    def call(self, microbatch: Microbatch, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One layer call of the user's step."""
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"{layer.label} is called within a transform of torch.func (vmap, grad, jvp...), which cannot see"
                " through the pipeline. Keep the layer out of it with RoundPipeStrategy(layers=...)."
            )
        if self._parametrized and parametrize._cache_enabled:
            raise RuntimeError(
                f"{layer.label} is called within torch.nn.utils.parametrize.cached(), whose cache belongs to the"
                " whole process, while layers run for several microbatches and again for the backward pass. Leave the"
                " context out: a parametrization is computed once in each call."
            )
        batch, store = microbatch.batch, self._store
        batch.recomputes |= in_checkpoint()
        with handling_no_calls(), microbatch.outside.paused():
            call, grad = self._make_call(microbatch, layer, args, kwargs)
            leaves = call.parameters
            number = len(microbatch.calls)
            microbatch.calls.append(call)
            microbatch.sequence.append(layer.index)
            self._handover.release(microbatch)
            stage = microbatch.stage
            self._turns.enter_forward(microbatch, call)
            device = self._devices[microbatch.device]
            microbatch.where = f"{call.label}; device {device.name}"
            microbatch.ran_on.setdefault(layer.index, set()).add(microbatch.device)
            with microbatch.waiting(FOR_STEP):
                store.wait(store.units_of_layer(layer), batch.version, batch.number)
            microbatch.units_awaited.update(store.units_of_layer(layer))
            self._footprints.before(microbatch, layer, device)
            device.begin_call(_stage(microbatch, number))
            self._footprints.begin(microbatch, call, device)
            versions = [leaf._version for leaf in leaves]
            run_mode = self._mode(microbatch, call) if grad else Mode.PLAIN
            call.stays = self._has_room(microbatch, call, graph=False)
            count_forward(device, microbatch, call, run_mode, enters=microbatch.stage != stage or number == 0)
            ordered = (call.has_state or layer.traits.writes_state) and not batch.serial
            in_turn = not ordered or batch.enter_layer(layer.index, microbatch.index)
            run = self._executor.forward(microbatch, call, run_mode, number)
            self._footprints.end_forward(microbatch, call, device)
            store.note_upload(layer, device)
            if ordered:
                batch.leave_layer(layer.index)
            if layer.traits.writes_state and not in_turn:
                raise RuntimeError(
                    f"{call.label}: it keeps a state (buffers or attributes that its forward writes), and microbatches"
                    " call it in another order than one after the other, which they did not in the first batch. So the"
                    " state would not be that of a plain run. Train with RoundPipeStrategy(microbatches=1), or keep"
                    " the layer out of the pipeline with RoundPipeStrategy(layers=...)."
                )
            read, microbatch.accesses.last_read = microbatch.accesses.last_read, {}
            place = self._handover.request()
            if device.is_host:  # elsewhere what came out is in the device's memory: the turn lasts to the next stage
                self._turns.leave_forward(microbatch, call)
            self._handover.take(microbatch, place)
            microbatch.where = ""
            if (now := [leaf._version for leaf in leaves]) != versions:
                for parameter, leaf, before, after in zip(layer.parameters, leaves, versions, now, strict=True):
                    if after != before:
                        self._stand_ins.touched(microbatch, parameter, leaf, True)
            microbatch.norm_statistics += run.norm_statistics
            escaped = call.link(run, self, microbatch.token)
            self._note_foreign_parameters(microbatch, call)
        self._deliver(microbatch, call, run, escaped)
        if not device.is_host:  # the device's memory is not to be held by what the recompute does not need
            call.arguments.forget()
        if batch.records:
            run_and_check_hooks(layer, escaped, read)
        else:
            run_hooks(layer, escaped)
        return escaped.output

    def call_again(self, microbatch: Microbatch, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer call within the backward: a checkpoint around it and code between layers runs its part of the step
        again, to see what autograd saved of that code. Of the layer itself nothing was saved, so nothing is now."""
        if not microbatch.runs_again():  # a reentrant checkpoint: its gradients go past us
            assert layer.intercept is not None
            with handling_no_calls():
                return layer.intercept(*args, **kwargs)
        several = microbatch.batch.microbatches > 1
        if several and layer.traits.writes_state:
            self._run_serially("a checkpoint runs a layer again that writes its own state")
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
        with handling_no_calls(), microbatch.outside.paused():
            call, grad = self._make_call(microbatch, layer, args, kwargs)
            run = call.run(self._device_of(microbatch, layer), Mode.DROP if grad else Mode.PLAIN)
            escaped = call.link(run, self, microbatch.token)
        self._deliver(microbatch, call, run, escaped)
        run_hooks(layer, escaped)
        return escaped.output

    def _device_of(self, microbatch: Microbatch, layer: Layer) -> Device:
        """Where a layer ran that a checkpoint runs again: it expects its tensors where they were."""
        ran_on = microbatch.ran_on.get(layer.index, {microbatch.device})
        if len(ran_on) > 1 and not self._devices[0].is_host:
            raise RuntimeError(
                f"{layer.label}: a checkpoint runs it again that is called several times in a step, on several devices,"
                " and so cannot tell on which. Checkpoint nothing but whole layers (the pipeline recomputes them"
                " anyway), or train on one device."
            )
        return self._devices[next(iter(ran_on))]

    def call_backward(self, call: Call, gradients: Sequence[Tensor | None], *, parameters: bool) -> list[Tensor | None]:
        """The backward of one layer call; runs when autograd comes to its node."""
        microbatch = present()
        if microbatch is None:
            raise RuntimeError(
                f"{call.label}: gradients through this layer are asked for outside of training_step, by way of a tensor"
                " with a gradient that came out of it there: keep such tensors detached."
            )
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
        self._handover.release(microbatch)
        with handling_no_calls(), microbatch.outside.paused():
            self._turns.enter_backward(microbatch, call)
            device = self._devices[microbatch.device]
            microbatch.where = f"{call.label}; device {device.name}"
            self._footprints.before(microbatch, call.layer, device)
            device.begin_call(_stage(microbatch, id(call)))
            self._footprints.begin(microbatch, call, device)
            count_backward(device, microbatch, call)
            defers = (microbatch.stage, microbatch.index) in microbatch.batch.deferring
            defers = defers and self._turns.has_turn_of(microbatch, call)
            sums = self._collector.device_sums(microbatch, device, call)
            inputs, found = self._executor.backward(
                microbatch, call, gradients, parameters=parameters, defers=defers, sums=sums
            )
            self._footprints.end_backward(microbatch, call, device, found)
            count_gradients(device, microbatch, found)
            self._store.note_upload(call.layer, device)
            found = self._collector.lasting(microbatch, call, found)
            if isinstance(device, AcceleratorDevice):
                done = microbatch.frozen if sums is None else microbatch.frozen | sums.taken
                found = _brought_down(device, found, done)
            self._collector.take(microbatch, call, found)
            place = self._handover.request()
            if device.is_host:
                self._turns.leave_backward(microbatch, call)
            self._handover.take(microbatch, place)
            microbatch.where = ""
        return inputs

    def _make_call(
        self, microbatch: Microbatch, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, bool]:
        """The call, and whether anything in it may have a gradient."""
        batch = microbatch.batch
        state = layer.attributes()
        attributes = [state.dicts[i][key] for i, key in state.inputs]
        arguments = Structure((*args, *kwargs.values(), *attributes))
        arguments.leaves = [microbatch.outside.replace(leaf) for leaf in arguments.leaves]
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        grad = grad and (
            any(parameter.requires_grad for parameter in layer.parameters)
            or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in arguments.leaves)
            or bool(layer.traits.foreign)
        )
        leaves = self._store.layer_leaves(layer, batch.version)
        call = Call(layer, layer.label, arguments, tuple(kwargs), state, leaves, record=batch.records)
        call.merge_norm_statistics = batch.microbatches > 1
        return call, grad

    def _mode(self, microbatch: Microbatch, call: Call) -> str:
        """How a call with gradients runs for the first time."""
        traits = call.layer.traits
        if call.is_new or traits.changed_inputs:  # what is changed in place must not be part of a kept graph
            return Mode.DROP
        if microbatch.ticket is not None and microbatch.ticket[1].kind == "FB":
            return Mode.KEEP
        if not self._keeps_graphs or traits.needs_recompute:
            return Mode.DROP
        if self._devices[microbatch.device].is_host:
            return Mode.KEEP
        return Mode.LEND if self._has_room(microbatch, call, graph=True) else Mode.DROP

    def _has_room(self, microbatch: Microbatch, call: Call, *, graph: bool) -> bool:
        """Whether a call's graph, or else its inputs, can stay on the device that it is on."""
        plan = microbatch.batch.plan
        if plan is None or call.position not in (plan.staying.graphs if graph else plan.staying.inputs):
            return False
        return self._turns.comes_back(microbatch, call) and not self._footprints.has_grown(call, plan.staying.growth)

    def _deliver(self, microbatch: Microbatch, call: Call, run: Run, escaped: Escaped) -> None:
        """Puts what came out of a call besides its output where the caller would find it."""
        run.built.write_back(escaped.argument_changes)
        state = call.state
        if escaped.held:
            linked = {id(inner): outer for inner, outer in zip(run.held, escaped.held, strict=True)}
            for index, name in state.holding:
                put_for(state.dicts[index][name], linked, set())
        for index, name, value in escaped.attribute_changes:
            self._attributes.set(microbatch, call.layer.modules[index], name, value, call.state.dicts[index])

    def _note_foreign_parameters(self, microbatch: Microbatch, call: Call) -> None:
        """The layer turned out to use parameters of others: from now on it waits for their optimizer steps, too."""
        layer, foreign = call.layer, call.layer.traits.foreign
        for parameter in call.reached:
            if not self._store.owns(parameter) or any(parameter is other for other in foreign):
                continue
            self._store.add_to_layer(layer, parameter)
            foreign.append(parameter)
            unit = self._store.unit_of(parameter)
            if not microbatch.batch.settled and unit not in microbatch.units_awaited:
                raise RuntimeError(
                    f"{call.label}: it uses the parameter {self._store.name(parameter)!r} of another module past its"
                    " arguments, which it did not do in the first batch, so that parameter's optimizer step was not"
                    " waited for. Pass it as an argument, or step in line with"
                    " RoundPipeStrategy(background_step=False)."
                )
        call.reached = []


def _brought_down(
    device: AcceleratorDevice, found: list[tuple[Tensor, Tensor]], done: Container[int]
) -> list[tuple[Tensor, Tensor]]:
    """The (parameter, gradient) pairs in host memory, but for parameters that are done with, by id. Empties the list.

    What others hold may be changed in place: before that is computed, it must have come down.
    """
    down = []
    found.reverse()
    while found:
        parameter, gradient = found.pop()
        if id(parameter) in done:
            continue
        on_host = device.bring_down(gradient)
        down.append((parameter, on_host))
        if (event := arrival(on_host)) is not None and is_held(gradient):
            device.compute_after(event)
    return down


def _stage(microbatch: Microbatch, call: Hashable) -> Hashable:
    """How long parameters stay on a device: for a stage and all its microbatches. In a batch that has no stages yet,
    for a call."""
    batch = microbatch.batch
    if batch.serial:
        return batch.number, microbatch.number, microbatch.in_backward, call
    return (batch.number, batch.first) if batch.resident else (batch.number, batch.first, microbatch.stage)
