"""One batch in flight, and what belongs to each of its microbatches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices import arrived
from lightning_roundpipe.pipeline.interception import OutsideParameters, in_checkpoint
from lightning_roundpipe.pipeline.looking import Looks
from lightning_roundpipe.pipeline.measuring import Note
from lightning_roundpipe.pipeline.occupancy import Occupancy
from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.pipeline.recording import Recording
from lightning_roundpipe.pipeline.replica import NormStatistics
from lightning_roundpipe.pipeline.rng import RandomState
from lightning_roundpipe.pipeline.tape import Call
from lightning_roundpipe.pipeline.turnstile import Monitor, Place
from lightning_roundpipe.pipeline.watching import Accesses, Key
from lightning_roundpipe.schedules import Action
from lightning_roundpipe.schedules.schedule import Kind
from lightning_roundpipe.state.gradients import BatchGradients, PartGradients
from lightning_roundpipe.state.parameters import Unit

_present = threading.local()
_NOTHING = nullcontext()


class Microbatch:
    """What belongs to one microbatch of one batch."""

    def __init__(self, batch: "Batch", index: int) -> None:
        self.batch = batch
        self.index = index
        self.calls: list[Call] = []
        self.sequence: list[int] = []
        self.ran_on: dict[int, set[int]] = {}
        """The devices that each layer, by index, has run on in the forward."""
        self.position = 0
        self.stage = -1
        """The last stage that was entered, forward and backward stages counted on."""
        self.ticket: tuple[int, Action] | None = None
        self.device = 0
        self.place: Place | None = None
        self.in_backward = False
        self.before_compiling: RandomState | None = None
        """Set while it holds the baton because something was compiled in its present call."""
        self.token = torch.empty(0, requires_grad=True)
        self.stand_ins: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self.random_state: RandomState | None = None
        self.device_random_state: Tensor | None = None
        self.outside_random_state: Tensor | None = None
        self.backward_random_state: Tensor | None = None
        self.attributes: dict[Key, Any] = {}
        """What this microbatch has set on modules."""
        self.stretch = 0
        """How often it has had the baton: its place in the step."""
        self.first_take = True
        """Whether it has not had the baton yet."""
        self.before: dict[int, dict[str, Any]] = {}
        """First batch: all attributes before the step."""
        self.buffers: dict[int, dict[str, Any]] = {}
        """The buffers of modules between layers when it took the baton, by the modules' ids."""
        self.versions: list[tuple[Key, Tensor, int]] = []
        """Buffers and plain tensors of modules between layers, with their versions when it took the baton."""
        self.looks: Looks | None = None
        """First batch: what has changed on modules."""
        self.accesses = Accesses()
        self.seen: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        """The attributes of modules when it took the baton, by the module's id."""
        self.norm_statistics: list[NormStatistics] = []
        self.found: list[tuple[Call, list[tuple[Tensor, Tensor]]]] = []
        """Gradients that wait for those of W actions, so that all are added in order."""
        self.parts_of_gradients: list[tuple[Tensor, Tensor, int]] = []
        """Parameters that several calls use on devices, what counts the changes of each gradient, and their number."""
        self.calls_left: dict[Unit, int] = {}
        self.uses: dict[Unit, int] = {}
        """How many calls each unit gets gradients from, or -1 where it may get some from elsewhere."""
        self.units_counted: dict[Call, list[Unit]] = {}
        """Which units each call counts for: a layer may be found to use more of them by another microbatch."""
        self.units_left: set[Unit] = set()
        self.units_awaited: set[Unit] = set()
        """Units whose optimizer step this microbatch knows to be done."""
        self.lent: list[tuple[nn.Parameter, Tensor, int]] = []
        """Memory of parameters that the code between layers was given, and its version then."""
        self.flagged: dict[nn.Parameter, None] = {}
        """Parameters whose ``requires_grad`` the code between layers has set."""
        self.frozen: set[int] = set()
        """Those of them, by id, that were frozen when the step ended: autograd leaves them without gradient."""
        self._graph_task = -1
        self.where = ""
        self.phase = "forward"
        self.mode: OutsideParameters | None = None
        self.parts = 1
        """Number of the next microbatch of a call that is split."""

    def drop(self) -> None:
        """Lets go of what only the backward needs."""
        for call in self.calls:
            call.retire()
        self.calls = []
        self.units_counted = {}
        self.found = []
        self.parts_of_gradients = []
        self.stand_ins = {}
        self.mode = None

    @property
    def number(self) -> int:
        """Tells it apart from all others of the same step."""
        return self.batch.first + self.index

    @property
    def identity(self) -> tuple[int, int]:
        """Tells it apart from all others, without keeping it."""
        return self.batch.number, self.number

    @property
    def outside(self) -> OutsideParameters:
        """What stands before the parameters in its code between layers."""
        assert self.mode is not None
        return self.mode

    def note_graph_task(self) -> None:
        """Called by autograd when it begins with the loss."""
        self._graph_task = torch._C._current_graph_task_id()

    def in_graph_task(self) -> bool:
        """Whether autograd is in the loss's own graph, and not in one within it (a reentrant checkpoint's)."""
        return torch._C._current_graph_task_id() == self._graph_task

    def runs_again(self) -> bool:
        """Within the backward: whether a checkpoint runs its part of the step again, to see what autograd saved of it.
        Not a reentrant one, which runs it to differentiate that by itself."""
        node = torch._C._current_autograd_node()
        return in_checkpoint() and self.in_graph_task() and node.name() != "CheckpointFunctionBackward"

    def noting(self, layer: int) -> Note | None:
        """What is told of a layer's call on the device; None where nobody wants to know."""
        return self.batch.noting(self.device, self.index, self.phase, layer)

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Around what may have to wait while the device is the microbatch's."""
        recording = self.batch.recording
        if recording is None:
            return _NOTHING
        return recording.waiting(self.device, name, self.batch.number, self.number)

    @property
    def label(self) -> str:
        """Names it in errors, and apart from those of other batches."""
        return f"microbatch {self.index + 1} of {self.batch.microbatches} in batch {self.batch.number}"


def present() -> Microbatch | None:
    """The microbatch whose thread this is."""
    return getattr(_present, "microbatch", None)


@contextmanager
def presenting(microbatch: Microbatch) -> Iterator[None]:
    """Lets this thread be the microbatch's."""
    _present.microbatch = microbatch
    try:
        yield
    finally:
        _present.microbatch = None


class Batch:
    """One batch in flight."""

    def __init__(
        self,
        monitor: Monitor,
        number: int,
        seed_step: int,
        weights: Sequence[float],
        scale: Callable[[], float],
        deferred: bool,
        plan: Plan | None,
        records: bool,
        gradients: BatchGradients | PartGradients,
        version: int,
        *,
        splits_calls: bool = False,
    ) -> None:
        self._monitor = monitor
        self.number = number
        self.seed_step = seed_step
        self.weights = weights
        self.microbatches = len(weights)
        self.scale = scale
        self.deferred = deferred
        self.plan = plan
        self.records = records
        """Whether this is the first batch, which shows what the layers are like."""
        self.gradients = gradients
        self.version = version
        self.splits_calls = splits_calls
        """Whether the step runs once, with the whole batch, and calls within it are split."""
        self.first = 0
        """Number of the first microbatch."""
        self.released = not deferred
        self.recomputes = False
        """Whether layers are called within a checkpoint, and so may be called again in its backward."""
        self.losses: list[Tensor | None] = [None] * self.microbatches
        self.runs: list[Microbatch | None] = [None] * self.microbatches
        self.places: dict[tuple[int, int], tuple[int, Kind]] = {}
        """For each stage and microbatch the device and the kind of the action."""
        self.resident = False
        """Whether parameters stay on the devices to the end of the batch."""
        self.summed_on_device: frozenset[int] = frozenset()
        """Stages of which one device runs all microbatches in their order, so that it can add up their gradients."""
        self.occupancy: list[Occupancy] = []
        """What each device holds of this batch, if it is counted."""
        self.recording: Recording | None = None
        """Where it is noted what happens when, if it is."""
        self._ranges: dict[int, torch.profiler.record_function] = {}
        """What a profiler of torch's sees of each device's present action, if there is a profiler."""
        self.weights_left: dict[int, int] = {}
        """For each microbatch the number of its W actions that are still to come, if the schedule has any."""
        self.deferring: dict[tuple[int, int], list[Call]] = {}
        """For each stage and microbatch with a W action the calls whose weight gradients are left to it."""
        self.private_before: dict[Key, Any] = {}
        """Attributes that each microbatch has for itself, as they were before the batch."""
        self.changed: dict[Key, Any] = {}
        """Attributes that microbatches have set, as they were before the batch."""
        self.pending_units: set[Unit] = set()
        """Units whose optimizer step was not done when the batch began."""
        self.last_to_read: dict[Key, int] = {}
        """For attributes that microbatches have read and not set before: the last of these microbatches."""
        self.last_in_place: dict[Key, int] = {}
        """For tensors on modules between layers: the last microbatch that has changed them in place."""
        self.last_to_change: dict[Key, int] = {}
        """The highest microbatch that has set an attribute to what may go on from its value, or changed its tensor."""
        self.settled = False
        """Whether no optimizer step can have been pending when the batch began."""
        self.used_outside: set[int] = set()
        """Parameters, by id, that the code between layers used."""
        self.uploaded: dict[tuple[int, int], set[int]] = {}
        """By stage, the layers whose parameters have travelled; see :mod:`traffic`."""
        self.downloaded: dict[tuple[int, int], set[int]] = {}
        """By stage, the parameters, by id, whose gradients have."""
        self._callers: dict[int, tuple[int, int]] = {}
        """The last microbatch that has called a layer, and how many do at the moment."""
        self._forwards_left = self.microbatches
        self._threads_left = self.microbatches
        self._needs_runs = True
        self._changed = monitor.condition()

    @property
    def serial(self) -> bool:
        """Whether the microbatches run one after the other."""
        return self.plan is None

    def take(self, index: int, result: Any, bring_down: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Takes what a microbatch's step returned. Returns the tensors that its backward begins with.

        Args:
            index: The microbatch.
            result: The loss, or None.
            bring_down: See :meth:`Device.bring_down`: no device's memory is held by what the caller of the step gets.
        """
        self.losses[index] = None if result is None else bring_down(result.detach())
        return [] if result is None else [result]

    def wait_losses(self) -> None:
        """Waits until every loss has come down."""
        for loss in self.losses:
            if loss is not None:
                arrived(loss)

    def seeds(self, index: int, roots: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of these tensors."""
        return [torch.full_like(root, self.weights[index] * self.scale()) for root in roots]

    def enter_layer(self, layer: int, microbatch: int) -> bool:
        """Notes that a layer is called. Returns whether no other microbatch is in a call of it, and no later one has
        made one: the order that a state needs."""
        with self._monitor.lock:
            last, running = self._callers.get(layer, (0, 0))
            self._callers[layer] = max(last, microbatch), running + 1
            return last <= microbatch and not running

    def leave_layer(self, layer: int) -> None:
        with self._monitor.lock:
            last, running = self._callers[layer]
            self._callers[layer] = last, running - 1

    def wait_forward(self) -> None:
        """Waits until every loss is known."""
        with self._monitor.lock:
            self._monitor.wait_for(self._changed, lambda: self._forwards_left == 0, self.number)

    def wait_all(self) -> None:
        """Waits until every microbatch's backward is done and its gradients are in the sums."""
        with self._monitor.lock:
            self._monitor.wait_for(self._changed, lambda: self._threads_left == 0, self.number)

    def release(self, scale: float) -> None:
        """Lets the backward of a deferred batch begin, with this gradient of the loss."""
        self.scale = lambda: scale
        with self._monitor.lock:
            self.released = True
            self._changed.notify_all()

    def wait_released(self) -> None:
        with self._monitor.lock:
            self._monitor.wait_for(self._changed, lambda: self.released, self.number)

    def begin_action(self, device: int, action: Action) -> None:
        """A device begins an action of the schedule, in the thread that calls."""
        if self.occupancy:
            self.occupancy[device].begin(action)
        if self.recording is not None:
            self.recording.begin(device, self.number, self._among_all(action))
        if torch.autograd.profiler._is_profiler_enabled:
            self._ranges[device] = torch.profiler.record_function(str(self._among_all(action)))
            self._ranges[device].__enter__()

    def end_action(self, device: int, action: Action) -> None:
        """The device ends it, in the same thread."""
        if self.occupancy:
            self.occupancy[device].end(action)
        if self.recording is not None:
            self.recording.end(device)
        if device in self._ranges:
            self._ranges.pop(device).__exit__(None, None, None)

    def _among_all(self, action: Action) -> Action:
        """The action with the microbatch's number in place of its index."""
        return Action(action.kind, action.stage, self.first + action.microbatch) if self.first else action

    def noting(self, device: int, index: int, phase: str, layer: int) -> Note | None:
        """What is told of a microbatch's call of a layer; None where nobody wants to know."""
        if self.recording is None:
            return None
        return partial(self.recording.add_call, device, self.number, self.first + index, phase, layer)

    def is_done(self) -> bool:
        """Whether every microbatch's backward is done."""
        return self._threads_left == 0

    def weights_done(self, index: int) -> None:
        with self._monitor.lock:
            self.weights_left[index] -= 1
            self._changed.notify_all()

    def wait_weights(self, index: int) -> None:
        """Waits for all weight gradients of a microbatch."""
        with self._monitor.lock:
            self._monitor.wait_for(self._changed, lambda: self.weights_left.get(index, 0) == 0, self.number)

    def forward_done(self) -> None:
        with self._monitor.lock:
            self._forwards_left -= 1
            self._changed.notify_all()

    def thread_done(self) -> None:
        with self._monitor.lock:
            self._threads_left -= 1
            self._let_go()
            self._changed.notify_all()

    def forget_runs(self) -> None:
        """Lets go of the microbatches as soon as they are done: they hold the batch, and so none would be freed before
        a garbage collection."""
        with self._monitor.lock:
            self._needs_runs = False
            self._let_go()

    def _let_go(self) -> None:
        if not self._needs_runs and self._threads_left == 0:
            self.runs = []
