"""A microbatch's gradients: which units will get some, from how many calls, and where they arrive."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from lightning_roundpipe.devices import AcceleratorDevice, Device
from lightning_roundpipe.pipeline.batch import Microbatch, present
from lightning_roundpipe.pipeline.catching import GradientCatcher
from lightning_roundpipe.pipeline.device_sums import DeviceSums
from lightning_roundpipe.pipeline.nodes import reached_by
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.tape import Call
from lightning_roundpipe.state.gradients import BatchGradients
from lightning_roundpipe.state.parameters import ParameterStore, Unit
from lightning_roundpipe.state.sharing import is_held, version_of


class Collector:
    """Brings gradients from calls, stand-ins and the parameters themselves into the batch's sums, and finishes each
    unit as soon as the microbatch has nothing more to add to it.

    Args:
        store: The parameters.
        layers: All layers.
        run_serially: Called with the reason where only a serial order of the microbatches can be right.
    """

    def __init__(
        self,
        store: ParameterStore,
        layers: Sequence[Layer],
        run_serially: Callable[[str], None],
    ) -> None:
        self.units_past_us: set[Unit] = set()
        """Units whose parameters autograd has reached past our stand-ins, by custom functions, say."""
        self._store = store
        self._layers = layers
        self._run_serially = run_serially
        self._catcher = GradientCatcher(store.parameters(), self._catch)
        self._own: list[tuple[nn.Parameter, Tensor]] | None = None
        """Gradients of the main thread's own backward, while it is between a batch's forward and the end of that."""
        self._main_thread = threading.get_ident()

    # -- in a microbatch's thread ----------------------------------------------------------------------------------

    def count_calls(self, microbatch: Microbatch, roots: Sequence[Tensor]) -> None:
        """After the forward: which units get gradients, from how many calls. The others are finished."""
        units = self._store.units
        for leaf in reached_by(roots, through_calls=True).leaves:
            if isinstance(leaf, nn.Parameter) and self._store.owns(leaf):
                self._note_use_past_us(microbatch, leaf)
        microbatch.units_left = set(units)
        late = {self._store.unit_of(parameter) for parameter, _ in microbatch.stand_ins.values()}
        late |= self.units_past_us
        left = microbatch.calls_left
        for call in microbatch.calls:
            call.check_aliases()
            called = microbatch.units_counted[call] = list(self._store.units_of_layer(call.layer))
            if call.differentiable:
                for unit in called:
                    left[unit] = left.get(unit, 0) + 1
            elif self.units_past_us:
                late.update(called)  # a reentrant checkpoint may run it again, with gradients
        if microbatch.batch.splits_calls:  # what its parts will add is not known yet
            late |= set(units)
        for unit in late:
            left[unit] = -1  # finished at the very end
        microbatch.uses = dict(left)
        for unit in units:
            if unit not in left:
                self._finish(microbatch, unit)

    def device_sums(self, microbatch: Microbatch, device: Device, call: Call) -> DeviceSums | None:
        """Where a device with memory of its own adds up itself what a call's backward finds: where it has all
        microbatches of the stage, in their order, and nothing else comes before or between.
        """
        batch, plan = microbatch.batch, microbatch.batch.plan
        if (
            not isinstance(device, AcceleratorDevice)
            or plan is None
            or call.position is None
            or plan.backward_stage[call.position] != microbatch.stage
            or microbatch.stage not in batch.summed_on_device
            or not isinstance(batch.gradients, BatchGradients)
            or not batch.gradients.begins_window
            or batch.deferring
        ):
            return None
        alone = {unit for unit, uses in microbatch.uses.items() if uses == 1}
        return DeviceSums(
            {
                id(parameter)
                for unit in alone.intersection(microbatch.units_counted[call])
                for parameter in unit.parameters
                if not parameter._backward_hooks  # which are to see each microbatch's gradient
            },
            partial(batch.gradients.add_on_device, call.position, device),
        )

    def lasting(
        self, microbatch: Microbatch, call: Call, found: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """The (parameter, gradient) pairs of a call's backward, with copies of gradients in host memory that wait for
        something before they are added up, if hooks may hold them, and change them in place meanwhile. In autograd this
        changes one that waits for the parameter's other uses. On a device, whose gradients come down, it is an error.
        Empties the list, so that nobody is left who holds a gradient but those.
        """
        batch, left, uses = microbatch.batch, microbatch.calls_left, microbatch.uses
        units = microbatch.units_counted[call]
        alone = [unit for unit in units if uses.get(unit, -1) <= 1]
        waiting = {
            unit
            for unit in alone
            if batch.deferring or left.get(unit, -1) != 1 or not batch.gradients.adds_at_once(microbatch.index, unit)
        }
        if not waiting and len(alone) == len(units):
            return found
        lasting = []
        found.reverse()
        while found:
            parameter, gradient = found.pop()
            unit = self._store.unit_of(parameter)  # type: ignore[arg-type]
            on_host = gradient.device.type == "cpu"
            if not on_host and unit not in alone and left.get(unit, -1) != 1:
                microbatch.parts_of_gradients.append((parameter, version_of(gradient), gradient._version))
            if on_host and unit in waiting and is_held(gradient):
                gradient = gradient.clone()
            lasting.append((parameter, gradient))
        return lasting

    def take(self, microbatch: Microbatch, call: Call, found: list[tuple[Tensor, Tensor]]) -> None:
        """Takes the (parameter, gradient) pairs of a call's backward."""
        batch = microbatch.batch
        if batch.deferring:
            microbatch.found.append((call, found))
            if call.deferred is not None:
                batch.deferring[microbatch.stage, microbatch.index].append(call)
            return
        self._add(microbatch, found)
        left = microbatch.calls_left
        for unit in microbatch.units_counted[call]:
            if left.get(unit, -1) > 0:
                left[unit] -= 1
                if left[unit] == 0:
                    self._finish(microbatch, unit)

    def end(self, microbatch: Microbatch) -> None:
        """After the backward, and after the microbatch's W actions: nothing more comes.

        Raises:
            RuntimeError: When a gradient was changed in place that would have gone on to other uses' sum so.
        """
        for parameter, counter, version in microbatch.parts_of_gradients:
            if counter._version != version:
                raise RuntimeError(
                    f"The gradient of the parameter {self._store.name(parameter)!r}, which several layer calls use, was"  # type: ignore[arg-type]
                    " changed in place by a hook after one of them, before those of the others were added. A hook on a"
                    " gradient should return a new tensor (gradient * 2 instead of gradient.mul_(2))."
                )
        for call, found in microbatch.found:
            self._add(microbatch, [*found, *call.deferred_gradients])
        for parameter, leaf in microbatch.stand_ins.values():
            if leaf.grad is not None:
                self._add(microbatch, [(parameter, leaf.grad)])
                leaf.grad = None
        for unit in sorted(microbatch.units_left, key=lambda unit: unit.index):
            self._finish(microbatch, unit)

    def _add(self, microbatch: Microbatch, found: Sequence[tuple[Tensor, Tensor]]) -> None:
        for parameter, gradient in found:
            if id(parameter) not in microbatch.frozen:
                microbatch.batch.gradients.add(microbatch.index, parameter, gradient)  # type: ignore[arg-type]

    def _finish(self, microbatch: Microbatch, unit: Unit) -> None:
        microbatch.units_left.discard(unit)
        with microbatch.waiting("adds gradients"):
            microbatch.batch.gradients.finish(microbatch.index, unit)

    # -- past the stand-ins ----------------------------------------------------------------------------------------

    def _catch(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        """A gradient that autograd computed for a parameter itself, past our stand-ins."""
        microbatch = present()
        if microbatch is None:
            if self._own is None or threading.get_ident() != self._main_thread:
                return False
            self._own.append((parameter, gradient.clone()))  # hooks may change it in place
            return True
        if not microbatch.in_backward:
            raise RuntimeError(
                f"The gradient of the parameter {self._store.name(parameter)!r} is computed by a backward within"
                " training_step, before the step's own. Return one loss, or use manual optimization."
            )
        self._note_use_past_us(microbatch, parameter)
        if id(parameter) in microbatch.frozen:
            return True
        gradients, gradient = microbatch.batch.gradients, gradient.clone()  # hooks may change it in place
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
        batch, unit, name = microbatch.batch, self._store.unit_of(parameter), self._store.name(parameter)
        how = (
            "in a way that hides it from the pipeline (a custom autograd function, a reentrant checkpoint or a script)"
        )
        if self._store.staleness:
            raise RuntimeError(
                f"The parameter {name!r} is used {how}, so it cannot be the value one step behind. Use"
                " strategy='roundpipe' (staleness 0)."
            )
        if unit not in self.units_past_us:
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
            self.units_past_us.add(unit)
            if any(layer.traits.writes_state or layer.norms(training=True) for layer in self._layers):
                self._run_serially("a reentrant checkpoint may run a layer again that writes its own state")

    # -- on the main thread ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Follows what the user has done to the parameters since the last batch."""
        self._catcher.refresh()

    def take_own(self) -> None:
        """From now on, gradients that the main thread's own code computes are kept."""
        self._own = []

    def own(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What has been kept, which it is no longer."""
        own, self._own = self._own, None
        return own or []

    def close(self) -> None:
        self._catcher.close()
