"""Gradients in host memory: for each parameter one sum, in an order that no timing can change.

The order is autograd's own for a loop over the microbatches: all uses of a parameter within a microbatch are added up
first (last use first), then the microbatches in turn, batch after batch until the optimizer steps.
"""

import threading
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices import AcceleratorDevice, Event, arrived
from lightning_roundpipe.devices.pinned import dense_strides
from lightning_roundpipe.pipeline.turnstile import Monitor
from lightning_roundpipe.state.parameters import ParameterStore, Unit
from lightning_roundpipe.state.sharing import is_held, is_shared


def add(first: Tensor, second: Tensor) -> Tensor:
    """The sum of two gradients, each of which may be sparse: torch adds a sparse one to a dense one only."""
    return second + first if first.is_sparse else first + second


@dataclass(slots=True)
class _Deposit:
    """A gradient that autograd had ready for a parameter's ``.grad``."""

    index: int
    """Of the parameter in its unit."""
    gradient: Tensor
    alone: bool
    """Whether it comes from a graph of its own."""
    comes_first: bool = False
    """Whether some of what the pipeline adds up for the parameter came later."""


class _Memory:
    """Tensors that are used again and again, by shape, strides and type.

    Args:
        make: Makes a new one.
    """

    def __init__(self, make: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self.made = 0
        """How many there are."""

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """One without meaningful contents."""
        with self._lock:
            if free := self._free.get((like.shape, dense_strides(like), dtype)):
                return free.pop()
            self.made += 1
        return self._make(like.detach(), dtype)

    def give_back(self, tensor: Tensor) -> None:
        if not tensor.is_sparse:
            with self._lock:
                self._free.setdefault((tensor.shape, tensor.stride(), tensor.dtype), []).append(tensor)

    def let_go(self) -> int:
        """Keeps only what is in use. Returns how many bytes were not."""
        with self._lock:
            tensors = list(chain.from_iterable(self._free.values()))
            self.made -= len(tensors)
            self._free.clear()
        return sum(tensor.nbytes for tensor in tensors)


class _Sum:
    """The gradients of one unit, summed over the batches of a window (those between two optimizer steps). A sum of
    several is in the master's precision, until it is rounded; what is alone stays as it came.

    With staleness 1 a window may begin before the step of the one before it, which starts when the whole batch has gone
    through its backward. The sums that this step is to read are then set aside.
    """

    def __init__(self, unit: Unit, memory: _Memory) -> None:
        self.unit = unit
        self.gradients: list[Tensor | None] = [None] * len(unit.parameters)
        """For each parameter the sum, or None if nothing contributed."""
        self.batches = 0
        """Number of batches that are complete for this unit. Guarded by the monitor's lock."""
        self._window = 0
        """How many steps had been handed in before what is being added up."""
        self._aside: list[Tensor | None] | None = None
        """The sums of the window before it, as long as its step has not read them. Guarded by ``_lock``."""
        self._taken = 0
        """Number of the last optimizer step that has read its sums. Guarded by ``_lock``."""
        self._lock = threading.Lock()
        self._arrivals: dict[int, Event] = {}
        """For those that a device brings down, when they are there."""
        self._memory = memory

    def can_begin(self, steps: int) -> bool:
        """Whether the window after so many steps has begun, or can: there are two sets of sums, and a step under way
        may have one of them in its hands."""
        is_free = self._aside is None and self.unit.done >= steps - 1
        return self._window == steps or is_free or self._has_been_read(steps)

    def begin(self, steps: int) -> None:
        """Begins the window after so many steps, if it has not begun. What a step is still to read is set aside."""
        if self._window == steps:
            return
        with self._lock:
            if not self._has_been_read(steps):
                self._aside = self._start_anew()
        self._window = steps

    def _has_been_read(self, steps: int) -> bool:
        return self.unit.done >= steps or self._taken >= steps

    def read(self, index: int) -> Tensor | None:
        """For the next optimizer step: the sum in the master's precision."""
        with self._lock:
            return self._full(self._of_step(), index)

    def is_rounded(self, index: int) -> bool:
        """For the next optimizer step: whether the sum is kept in half precision."""
        with self._lock:
            present = self._of_step()[index]
            return present is not None and present.dtype != self.unit.parameters[index].dtype

    def replace(self, index: int, gradient: Tensor) -> None:
        """For the next optimizer step: puts another gradient in the place of the sum."""
        with self._lock:
            self._of_step()[index] = gradient

    def take(self) -> list[Tensor | None]:
        """Hands the sums over to the next optimizer step, or to what gives their memory back after it."""
        with self._lock:
            taken, self._aside = self._aside, None
            self._taken = self.unit.done + 1
            return self._start_anew() if taken is None else taken

    def _of_step(self) -> list[Tensor | None]:
        return self.gradients if self._aside is None else self._aside

    def bring_down(self, index: int, gradient: Tensor, device: AcceleratorDevice) -> None:
        """Adds what is on a device. Nobody waits until it is there."""
        if self.gradients[index] is not None:
            self.add({index: device.to_host(gradient)})
            return
        memory = self.gradients[index] = self._memory.take(self.unit.parameters[index], gradient.dtype)
        self._arrivals[index] = device.bring_gradient_down(gradient, memory)

    def let_arrive_before_computing(self, index: int, device: AcceleratorDevice) -> None:
        """What the device is given from now on comes after the sum has come down."""
        if (event := self._arrivals.get(index)) is not None:
            device.compute_after(event)

    def wait_arrival(self, index: int) -> None:
        """Before the host reads the sum: waits until it is there."""
        if (event := self._arrivals.pop(index, None)) is not None:
            event.synchronize()

    def add(self, gradients: Mapping[int, Tensor]) -> None:
        """Adds gradients, by the parameter's number in the unit."""
        added: list[tuple[Tensor, Tensor]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for index, gradient in gradients.items():
            parameter = self.unit.parameters[index]
            present = self.full(index)
            if present is None and gradient.is_sparse:
                self.gradients[index] = gradient.to(parameter.dtype)
            elif present is None:
                half = gradient.dtype in (torch.bfloat16, torch.float16)
                memory = self._memory.take(parameter, gradient.dtype if half else parameter.dtype)
                self.gradients[index] = memory
                copied.append((memory, gradient))
            elif present.is_sparse or gradient.is_sparse:
                self.gradients[index] = add(present, gradient) if present.is_sparse else present.add_(gradient)
            else:
                added.append((present, gradient))
        # All at once, which is the same, and asks for the interpreter once.
        if copied:
            torch._foreach_copy_([memory for memory, _ in copied], [gradient for _, gradient in copied])
        if added:
            torch._foreach_add_([present for present, _ in added], [gradient for _, gradient in added])

    def full(self, index: int) -> Tensor | None:
        """The sum in the master's precision."""
        return self._full(self.gradients, index)

    def _full(self, gradients: list[Tensor | None], index: int) -> Tensor | None:
        if gradients is self.gradients:
            self.wait_arrival(index)
        present = gradients[index]
        if present is not None and present.dtype != self.unit.parameters[index].dtype:
            rounded, present = present, self._convert(gradients, index, self.unit.parameters[index].dtype)
            self._memory.give_back(rounded)
        return present

    def round(self, index: int, dtype: torch.dtype) -> None:
        """Keeps the sum in half precision until :meth:`full` is called: half the memory, and no more is lost than when
        the batch had been computed as a whole, whose gradient would have this precision."""
        present = self.gradients[index]
        if present is not None and not present.is_sparse and present.dtype != dtype:
            self.wait_arrival(index)
            self._convert(self.gradients, index, dtype)
            self._memory.give_back(present)

    def _convert(self, gradients: list[Tensor | None], index: int, dtype: torch.dtype) -> Tensor:
        present = gradients[index]
        assert present is not None
        converted = gradients[index] = self._memory.take(self.unit.parameters[index], dtype).copy_(present)
        return converted

    def hand_over(self) -> list[Tensor | None]:
        """Starts the window anew, in other memory."""
        with self._lock:
            return self._start_anew()

    def _start_anew(self) -> list[Tensor | None]:
        for index in list(self._arrivals):
            self.wait_arrival(index)
        gradients, self.gradients = self.gradients, [None] * len(self.gradients)
        return gradients


class Gradients:
    """The sums of all parameters."""

    def __init__(self, store: ParameterStore, monitor: Monitor) -> None:
        self.store = store
        self.monitor = monitor
        self.memory = _Memory(store.host_memory)
        self.sums = [_Sum(unit, self.memory) for unit in store.units]
        self.position = {
            id(parameter): (unit.index, i) for unit in store.units for i, parameter in enumerate(unit.parameters)
        }
        self._batches = 0
        self._steps = 0
        """Number of optimizer steps when the last batch began."""

    def begin_batch(self, microbatches: int, *, rounds: bool = False) -> "BatchGradients":
        """
        Args:
            microbatches: Their number.
            rounds: Whether gradients of parameters that travel in half precision are kept in it. Only where an
                optimizer step follows at once.
        """
        batch = BatchGradients(self, self._batches, microbatches, rounds)
        batch.begins_window = self._batches == 0 or self._steps != self.store.enqueued
        self._batches += 1
        self._steps = self.store.enqueued
        return batch

    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum that the next step takes for a parameter, or None if nothing contributed. Its memory is reused after
        :meth:`clear`."""
        unit, index = self.position[id(parameter)]
        return self.sums[unit].read(index)

    def replace(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """What the next step takes instead."""
        unit, index = self.position[id(parameter)]
        self.sums[unit].replace(index, gradient)

    def is_rounded(self, parameter: nn.Parameter) -> bool:
        """Whether that sum is kept in half precision."""
        unit, index = self.position[id(parameter)]
        return self.sums[unit].is_rounded(index)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds to a parameter's sum, between batches."""
        unit, index = self.position[id(parameter)]
        self.sums[unit].add({index: gradient})

    def round(self, unit: Unit) -> None:
        """Keeps the unit's complete sums as their parameters travel."""
        for index, parameter in enumerate(unit.parameters):
            if (half := self.store.half_precision(parameter)) is not None:
                self.sums[unit.index].round(index, half)

    def settle(self, *, rounds: bool) -> int:
        """After the first batch, which is complete and has shown what travels in half precision: keeps its sums so, and
        lets go of the memory that is left over. Returns its bytes.
        """
        for unit in self.store.units if rounds else ():
            self.round(unit)
        return self.memory.let_go()

    def clear(self, unit: Unit) -> None:
        """After the unit's step: gives the memory back of what it has read."""
        for gradient in self.sums[unit.index].take():
            if gradient is not None:
                self.memory.give_back(gradient)

    def take(self, units: Iterable[Unit]) -> list[Tensor]:
        """Hands the units' sums over to a step that needs all of them until its end. Returns their memory."""
        taken: list[Tensor] = []
        for unit in units:
            sums = self.sums[unit.index].take()
            taken += (each.detach() for each in sums if each is not None and not each.is_sparse)
            with self.monitor.lock:
                unit.changed.notify_all()
        return taken

    def give_back(self, taken: Iterable[Tensor]) -> None:
        """Lets memory be used again, but for what the optimizer has kept, as its state, say."""
        for memory in taken:
            if not is_shared(memory):
                self.memory.give_back(memory)

    def adopt(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Goes on adding to a gradient that is there already."""
        unit, index = self.position[id(parameter)]
        self.sums[unit].gradients[index] = gradient

    def hand_over(self, unit: Unit) -> None:
        """Starts the sums of the unit's present window anew, leaving their memory to whoever holds it."""
        self.sums[unit.index].hand_over()


class BatchGradients:
    """What one batch contributes. Batches may overlap; each unit's sum takes them one after the other.

    Attributes:
        number: Number of the batch.
        begins_window: Whether it is the first since the last optimizer step.
    """

    begins_window = False

    def __init__(self, gradients: Gradients, index: int, microbatches: int, rounds: bool) -> None:
        self._gradients = gradients
        self.number = index
        self._microbatches = microbatches
        self._rounds = rounds
        self._required_steps = gradients.store.enqueued
        units = len(gradients.sums)
        self._parts: list[dict[int, dict[int, Tensor]]] = [{} for _ in range(units)]
        self._deposits: list[dict[int, list[_Deposit]]] = [{} for _ in range(units)]
        self._finished: list[set[int]] = [set() for _ in range(units)]
        self._on_devices: list[dict[tuple[int, int], tuple[Tensor, AcceleratorDevice]]] = [{} for _ in range(units)]
        """What devices have added up over the microbatches, by the call's place in the step and the parameter."""
        self._next = [0] * units
        self._locks = [threading.Lock() for _ in range(units)]
        self._open_units = units
        self._complete = gradients.monitor.condition()

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds one use's gradient to the microbatch's own sum. Called by the microbatch's thread only."""
        unit, index = self._gradients.position[id(parameter)]
        if microbatch in self._finished[unit]:
            # Only in the first batch, one microbatch after the other: a layer was found to use another's parameter.
            self._fold(self._gradients.sums[unit], {index: gradient})
            return
        parts = self._parts[unit].setdefault(microbatch, {})
        present = parts.get(index)
        # Half-precision gradients are summed in the master's precision, as autocast's backward does.
        parts[index] = gradient if present is None else add(arrived(present).to(parameter.dtype), arrived(gradient))
        for deposit in self._deposits[unit].get(microbatch, ()):
            deposit.comes_first |= deposit.index == index

    def add_on_device(
        self, position: int, device: AcceleratorDevice, parameter: nn.Parameter, gradient: Tensor
    ) -> None:
        """Adds a microbatch's gradient to the device's own sum for a call, which comes down once for all microbatches.

        Args:
            position: The call's place in the step. Its microbatches run on one device, one after the other.
            device: The device.
            parameter: The parameter.
            gradient: Its gradient, on that device.
        """
        unit, index = self._gradients.position[id(parameter)]
        sums = self._on_devices[unit]
        if (position, index) in sums:
            sums[position, index][0].add_(gradient)
        elif self._microbatches == 1:
            sums[position, index] = gradient, device
        else:  # in memory of its own, and in the master's precision, as autocast's backward does
            sums[position, index] = gradient.to(parameter.dtype, copy=True), device

    def deposit(self, microbatch: int, parameter: nn.Parameter, gradient: Tensor, *, alone: bool) -> None:
        """Adds a gradient that autograd had ready for ``.grad``: by itself, and not shown to the parameter's hooks
        again. Called by the microbatch's thread only.

        Args:
            microbatch: The microbatch.
            parameter: The parameter.
            gradient: Its gradient, as the parameter's hooks have left it.
            alone: Whether it comes from a graph of its own, so that hooks were right not to see it in a sum.
        """
        unit, index = self._gradients.position[id(parameter)]
        deposit = _Deposit(index, gradient, alone)
        if microbatch in self._finished[unit]:  # the first batch only, as in `add`
            self._fold_deposit(self._gradients.sums[unit], deposit, {})
            return
        self._deposits[unit].setdefault(microbatch, []).append(deposit)

    def has_finished(self, microbatch: int, unit: Unit) -> bool:
        """Whether the microbatch can add nothing more to the unit. Called by the microbatch's thread only."""
        return microbatch in self._finished[unit.index]

    def adds_at_once(self, microbatch: int, unit: Unit) -> bool:
        """Whether nothing is before the microbatch, which has not finished the unit: what it finishes is added up while
        it waits."""
        return self._next[unit.index] == microbatch

    def finish(self, microbatch: int, unit: Unit) -> None:
        """Tells that the microbatch has nothing more to add to the unit."""
        number = unit.index
        finished = self._finished[number]
        with self._locks[number]:
            finished.add(microbatch)
            if self._next[number] not in finished:
                return
            sum_ = self._gradients.sums[number]
            monitor = self._gradients.monitor
            if sum_.batches < self.number or not sum_.can_begin(self._required_steps):
                # The batch before comes first, and only one window's sums are set aside.
                with monitor.lock:
                    monitor.wait_for(
                        unit.changed,
                        lambda: sum_.batches == self.number and sum_.can_begin(self._required_steps),
                        self.number,
                    )
            sum_.begin(self._required_steps)
            while self._next[number] in finished:
                parts = self._parts[number].pop(self._next[number], {})
                deposits = self._deposits[number].pop(self._next[number], [])
                for deposit in (deposit for deposit in deposits if deposit.comes_first):
                    self._fold_deposit(sum_, deposit, parts)
                if parts:
                    self._fold(sum_, parts)
                for deposit in (deposit for deposit in deposits if not deposit.comes_first):
                    self._fold_deposit(sum_, deposit, parts)
                self._next[number] += 1
            if self._next[number] < self._microbatches:
                return
            for place in sorted(self._on_devices[number], reverse=True):  # last use first
                gradient, device = self._on_devices[number].pop(place)
                with device.running():
                    sum_.bring_down(place[1], gradient, device)
                if self._microbatches == 1 and is_held(gradient):  # and so may be changed in place
                    sum_.let_arrive_before_computing(place[1], device)
            if self._rounds:
                self._gradients.round(unit)
        with monitor.lock:
            sum_.batches = self.number + 1
            unit.changed.notify_all()
            self._open_units -= 1
            if self._open_units == 0:
                self._complete.notify_all()

    def _fold(self, sum_: _Sum, parts: dict[int, Tensor]) -> None:
        with torch.no_grad():
            for index, gradient in parts.items():
                parameter = sum_.unit.parameters[index]
                gradient = arrived(gradient)
                for hook in (parameter._backward_hooks or {}).values():
                    gradient = gradient.to(parameter.dtype)
                    changed = hook(gradient)
                    gradient = gradient if changed is None else changed
                parts[index] = gradient
            sum_.add(parts)

    def _fold_deposit(self, sum_: _Sum, deposit: _Deposit, parts: Container[int]) -> None:
        if deposit.index in parts and not deposit.alone:
            name = self._gradients.store.name(sum_.unit.parameters[deposit.index])
            raise RuntimeError(
                f"The parameter {name!r}, which has a hook on its gradient, is used both by its layer or torch"
                " functions and in a way that hides it from the pipeline (a custom autograd function or a script), so"
                " the hook cannot see the sum of both. Use its value in the same way everywhere, or let the hook go."
            )
        sum_.add({deposit.index: deposit.gradient})

    @property
    def complete(self) -> bool:
        """Whether every microbatch has added everything."""
        return self._open_units == 0

    def wait_complete(self) -> None:
        """Waits for every microbatch.

        Raises:
            Cancelled: When the pipeline has failed.
        """
        monitor = self._gradients.monitor
        with monitor.lock:
            monitor.wait_for(self._complete, lambda: self._open_units == 0, self.number)


class PartGradients:
    """What the microbatches of one split call contribute to the batch whose step made the call, in their order."""

    def __init__(self, outer: BatchGradients, microbatch: int, parts: int) -> None:
        self._outer = outer
        self._microbatch = microbatch
        self._parts = parts
        units = len(outer._gradients.sums)
        self._own: list[dict[int, dict[nn.Parameter, Tensor]]] = [{} for _ in range(units)]
        self._deposits: list[dict[int, list[tuple[nn.Parameter, Tensor, bool]]]] = [{} for _ in range(units)]
        self._finished: list[set[int]] = [set() for _ in range(units)]
        self._next = [0] * units
        self._locks = [threading.Lock() for _ in range(units)]

    def add(self, part: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        """As :meth:`BatchGradients.add`."""
        unit, _ = self._outer._gradients.position[id(parameter)]
        own = self._own[unit].setdefault(part, {})
        present = own.get(parameter)
        own[parameter] = gradient if present is None else add(arrived(present).to(parameter.dtype), arrived(gradient))

    def deposit(self, part: int, parameter: nn.Parameter, gradient: Tensor, *, alone: bool) -> None:
        """As :meth:`BatchGradients.deposit`."""
        unit, _ = self._outer._gradients.position[id(parameter)]
        if part in self._finished[unit]:
            self._outer.deposit(self._microbatch, parameter, gradient, alone=alone)
        else:
            self._deposits[unit].setdefault(part, []).append((parameter, gradient, alone))

    def has_finished(self, part: int, unit: Unit) -> bool:
        """As :meth:`BatchGradients.has_finished`."""
        return part in self._finished[unit.index]

    def adds_at_once(self, part: int, unit: Unit) -> bool:
        """As :meth:`BatchGradients.adds_at_once`: the batch adds them up at its end."""
        return False

    def finish(self, part: int, unit: Unit) -> None:
        """As :meth:`BatchGradients.finish`."""
        number = unit.index
        with self._locks[number]:
            self._finished[number].add(part)
            while self._next[number] in self._finished[number]:
                for parameter, gradient, alone in self._deposits[number].pop(self._next[number], ()):
                    self._outer.deposit(self._microbatch, parameter, gradient, alone=alone)
                for parameter, gradient in self._own[number].pop(self._next[number], {}).items():
                    self._outer.add(self._microbatch, parameter, gradient)
                self._next[number] += 1
