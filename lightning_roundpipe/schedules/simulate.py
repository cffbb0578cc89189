"""Times a schedule by discrete events: the same object that the runtime executes."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isclose
from typing import cast

from lightning_roundpipe.schedules.costs import Costs, duration, stage_ranges
from lightning_roundpipe.schedules.partition import Cost, Partition
from lightning_roundpipe.schedules.roundpipe import roundpipe
from lightning_roundpipe.schedules.schedule import Action, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """What occupied a device or a link: an action, or the copy of a stage's parameters or gradients."""

    device: int
    batch: int
    action: Action
    start: Cost
    end: Cost


@dataclass(frozen=True, slots=True)
class Parts:
    """How a device spent its time. The sum is the time from its first moment to its last.

    Attributes:
        busy: Computing, recomputation included.
        bubble: Waiting for a stage's input or for the end of a batch whose step is needed, or with nothing left to do.
        upload: Waiting for parameters that were on their way, to this device or to one whose output it needs.
        optimizer: Waiting for parameters that the optimizer had not stepped yet though it had the gradients; the same.
    """

    busy: Cost = 0
    bubble: Cost = 0
    upload: Cost = 0
    optimizer: Cost = 0

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(
            self.busy + other.busy,
            self.bubble + other.bubble,
            self.upload + other.upload,
            self.optimizer + other.optimizer,
        )

    @property
    def total(self) -> Cost:
        return self.busy + self.bubble + self.upload + self.optimizer


@dataclass(frozen=True)
class Simulation:
    """What became of some batches.

    Attributes:
        actions: All actions, in the order in which they started.
        uploads: Copies of parameters to devices; the action is the first that needed them.
        downloads: Copies of gradients to the host; the action is the last that added to them.
        steps: The optimizer's start and end, for each batch.
        ends: When the last action of each batch ended.
        by_batch: For each batch, how each device spent its time on it, from the end of its last action before. The time
            after a device's last action is in none of them.
        useful: Time of forward and backward without recompute in one batch, all devices together.
        peak_parameters: The most parameters that each device held at a time, arriving ones included, in the unit of
            ``Costs.parameters``.
        peak_live: The most microbatches whose activations each device held at a time, counted once per stage. Where
            parameters are not resident, nothing stays on a device between actions.
    """

    actions: tuple[Span, ...]
    uploads: tuple[Span, ...]
    downloads: tuple[Span, ...]
    steps: tuple[tuple[Cost, Cost], ...]
    ends: tuple[Cost, ...]
    by_batch: tuple[tuple[Parts, ...], ...]
    useful: Cost
    peak_parameters: tuple[Cost, ...]
    peak_live: tuple[int, ...]

    @property
    def makespan(self) -> Cost:
        """When the last action of all ended."""
        return max(self.ends, default=0)

    @property
    def devices(self) -> tuple[Parts, ...]:
        """How each device spent the makespan."""
        sums = [sum(parts, Parts()) for parts in zip(*self.by_batch, strict=True)]
        return tuple(parts + Parts(bubble=self.makespan - parts.total) for parts in sums)

    @property
    def bubble(self) -> Cost:
        """The share of the devices' time, until the makespan, in which they did not compute."""
        return 1 - ratio(sum(parts.busy for parts in self.devices), len(self.devices) * self.makespan)

    @property
    def cycle(self) -> int:
        """After how many batches the last ones repeat themselves; 0: they don't."""
        for length in range(1, len(self.ends) // 3 + 1):
            gaps = [later - earlier for earlier, later in zip(self.ends, self.ends[length:], strict=False)]
            if all(isclose(gap, gaps[-1], rel_tol=1e-9) for gap in gaps[len(gaps) // 2 :]):
                return length
        return 0

    @property
    def period(self) -> Cost:
        """The time per batch in steady state; for a single batch its makespan."""
        if len(self.ends) < 2:
            return self.makespan
        length = self.cycle or len(self.ends) // 2
        return ratio(self.ends[-1] - self.ends[-1 - length], length)

    @property
    def steady(self) -> tuple[Parts, ...]:
        """How each device spends one batch in steady state, on average."""
        length = self.cycle or max(len(self.ends) // 2, 1)
        sums = [sum(parts, Parts()) for parts in zip(*self.by_batch[-length:], strict=True)]
        return tuple(
            Parts(ratio(p.busy, length), ratio(p.bubble, length), ratio(p.upload, length), ratio(p.optimizer, length))
            for p in sums
        )

    @property
    def steady_bubble(self) -> Cost:
        """The share of the devices' time in which they don't compute, in steady state."""
        return 1 - ratio(sum(parts.busy for parts in self.steady), len(self.steady) * self.period)

    @property
    def utilization(self) -> Cost:
        """The share of the devices' time that goes into forward and backward, without recompute, in steady state."""
        return ratio(self.useful, len(self.steady) * self.period)


def ratio(a: Cost, b: Cost) -> Cost:
    """``a / b``, exact where both are; 0 where there is nothing to divide."""
    if not b:
        return 0
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b)


def batches_of(partition: Partition, microbatches: int, devices: int, batches: int, lanes: int = 1) -> list[Schedule]:
    """RoundPipe for several batches, the round-robin going on from one to the next."""
    made: list[Schedule] = []
    for _ in range(batches):
        first = (made[-1].last_device + 1) % devices if made else 0
        made.append(roundpipe(partition, microbatches, devices, first, lanes))
    return made


def simulate(
    schedules: Schedule | Sequence[Schedule],
    partition: Partition,
    costs: Costs,
    *,
    staleness: int = 0,
    prefetch: int = 1,
    returns_at_losses: bool = True,
    recomputes_early: bool = False,
    together: Mapping[Action, Action] | None = None,
    together_time: Cost | None = None,
) -> Simulation:
    """Runs batches, one schedule each, and says when what happened.

    A device runs its actions in order. An action starts when its device is free, its input has arrived and its stage's
    parameters are there. Parameters are copied over the device's link, one stage after the other, and hold their place
    until their last action: without ``resident`` the device has room for the running stage and ``prefetch`` more.
    Gradients are copied back after a stage's last backward action there. The optimizer steps layer by layer, in forward
    order, as soon as all gradients of the batch are on the host.

    Args:
        schedules: The schedule of the only batch, or that of each batch.
        partition: The stages, of all batches.
        costs: The times of the layers.
        staleness: How many steps the parameters of a batch may be behind: batch ``b`` waits for step
            ``b - 1 - staleness``.
        prefetch: How many stages are copied ahead.
        returns_at_losses: Whether a batch begins when the losses of the one before are known, as a training loop does.
            Otherwise only devices and parameters hold it up.
        recomputes_early: Whether a ``B`` that is next on its device recomputes while its gradient is on its way, for it
            needs only the input that the forward has kept. Its span begins with the recompute and may have a pause.
        together: For forward actions, the backward actions that come next on their device and run at the same time:
            both begin when both can, and end together. None of them recomputes early.
        together_time: How long such a pair takes; ``None``: as long as one after the other.

    Raises:
        ValueError: A schedule can never be executed; see ``Schedule.validate``.
    """
    each = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    for schedule in set(each):
        schedule.validate(partition.stage_count() if any(schedule.devices) else None)
    run = _Run(each, partition, costs)
    run.staleness, run.prefetch, run.returns_at_losses = staleness, prefetch, returns_at_losses
    run.recomputes_early, run.together, run.together_time = recomputes_early, together or {}, together_time
    return run.run()


@dataclass(slots=True)
class _Visit:
    """Actions that follow each other on a device, and the copies that are made for the first and after the last."""

    batch: int
    first: Action
    calls: Sequence[int]  # whose parameters are copied to the device
    actions: int = 0  # that are still to come
    uploaded: Cost | None = None
    steppable: Cost = 0  # when the step that it needs had all gradients
    published: Cost = 0
    ended: Cost | None = None
    gradients: tuple[Action, Sequence[int]] | None = None  # after which action whose gradients are copied back


_CAUSES = ("optimizer", "upload")


class _Run:
    """A simulation under way.

    Of all actions and uploads whose start can be told, the earliest is given its time; this lets others be told. What
    cannot be told yet starts no earlier than that, so host memory serves the uploads in the order of their starts.
    """

    staleness: int
    prefetch: int
    returns_at_losses: bool
    recomputes_early: bool
    together: Mapping[Action, Action]
    together_time: Cost | None

    def __init__(self, schedules: list[Schedule], partition: Partition, costs: Costs) -> None:
        self.costs = costs
        self.ranges = stage_ranges(partition)
        self.loss_stage = len(partition.forward) - (not partition.fused)
        self.forward_of = {call: stage for stage, calls in enumerate(partition.forward) for call in calls}
        self.resident = any(schedule.resident for schedule in schedules)
        devices = range(max((len(schedule.devices) for schedule in schedules), default=0))
        batches = range(len(schedules))

        # What is to be done
        self.places = [schedule.device_of() for schedule in schedules]
        self.lines: list[list[tuple[int, Action, _Visit]]] = [[] for _ in devices]
        self.visits: list[list[_Visit]] = [[] for _ in devices]
        for batch, schedule in enumerate(schedules):
            for device, line in enumerate(schedule.devices):
                self._add(batch, device, line)
        self.actions_left = [len(places) for places in self.places]
        self.losses_left = [sum(a.stage == self.loss_stage for a in places) for places in self.places]
        self.gradients_left = [0 for _ in batches]
        self.copies: list[Counter[int]] = [Counter() for _ in batches]
        for visit in (visit for visits in self.visits for visit in visits):
            if visit.gradients is not None:
                self.gradients_left[visit.batch] += 1
                self.copies[visit.batch].update(visit.gradients[1])

        # What has got its time
        self.position = [0 for _ in devices]  # in the device's line
        self.upload_position = [0 for _ in devices]  # in its visits
        self.free: list[Cost] = [0 for _ in devices]
        self.up_free: list[Cost] = [0 for _ in devices]
        self.down_free: list[Cost] = [0 for _ in devices]
        self.host_free: Cost = 0
        self.done: dict[tuple[int, int, int], tuple[Cost, int]] = {}  # batch, stage, microbatch: its end and device
        self.waits: dict[tuple[int, int, int], list[tuple[Cost, Cost, str]]] = {}  # from when until when, for what
        self.losses: list[Cost] = [0 for _ in batches]
        self.gradients: list[Cost] = [0 for _ in batches]
        self.published: list[list[Cost]] = []  # of each step, when each call's parameters were stepped
        self.steps: list[tuple[Cost, Cost]] = []
        self.ends: list[Cost] = [0 for _ in batches]
        self.parts = [[Parts() for _ in devices] for _ in batches]
        self.spans: list[Span] = []
        self.uploads: list[Span] = []
        self.downloads: list[Span] = []

    def _add(self, batch: int, device: int, line: tuple[Action, ...]) -> None:
        """Appends a batch to what a device has to do."""
        last_use = {
            call: i for i, action in enumerate(line) if action.kind != "F" for call in self.ranges[action.stage]
        }
        there: set[int] = set()
        visit: _Visit | None = None
        for i, action in enumerate(line):
            calls = self.ranges[action.stage]
            if self.resident:
                visit = _Visit(batch, action, [call for call in calls if call not in there])
                there.update(calls)
                gradients = [call for call in calls if last_use.get(call) == i]
            else:
                following = line[i + 1] if i + 1 < len(line) else None
                if visit is None or visit.first.stage != action.stage:
                    visit = _Visit(batch, action, calls)
                over = following is None or following.stage != action.stage
                gradients = list(calls) if over and action.kind != "F" else []
            if visit.first is action:
                self.visits[device].append(visit)
            visit.actions += 1
            if gradients:
                visit.gradients = action, gradients
            self.lines[device].append((batch, action, visit))

    def run(self) -> Simulation:
        offers: list[tuple[Cost, int, bool]] = []  # start, device, whether an action
        offered: set[tuple[int, bool]] = set()
        while True:
            for device in range(len(self.lines)):
                for is_action in (False, True):
                    if (device, is_action) not in offered:
                        start = self._action_start(device) if is_action else self._upload_start(device)
                        if start is not None:
                            offered.add((device, is_action))
                            heapq.heappush(offers, (start, device, is_action))
            if not offers:
                break
            start, device, is_action = heapq.heappop(offers)
            offered.remove((device, is_action))
            if is_action:
                self._act(device, start)
            elif (later := cast(Cost, self._upload_start(device))) > start:  # others were served first
                offered.add((device, is_action))
                heapq.heappush(offers, (later, device, is_action))
            else:
                self._upload(device, start)
        return self._result()

    def _upload_start(self, device: int) -> Cost | None:
        """When the device's next upload starts; ``None``: that cannot be told yet."""
        position = self.upload_position[device]
        if position == len(self.visits[device]):
            return None
        visit = self.visits[device][position]
        room: Cost | None = 0
        if not self.resident and position > self.prefetch:
            room = self.visits[device][position - 1 - self.prefetch].ended
        step = visit.batch - 1 - self.staleness
        if room is None or step >= len(self.published):
            return None
        if step >= 0:
            visit.steppable = max(self.gradients[step], self.ends[step])
            visit.published = max((self.published[step][call] for call in visit.calls), default=0)
        start = max(room, visit.published, self.up_free[device])
        return max(start, self.host_free) if self.costs.host_links is not None and visit.calls else start

    def _upload(self, device: int, start: Cost) -> None:
        visit = self.visits[device][self.upload_position[device]]
        self.upload_position[device] += 1
        takes = sum(self.costs.upload[call] for call in visit.calls)
        visit.uploaded = self.up_free[device] = start + takes
        if self.costs.host_links is not None and visit.calls:
            self.host_free = start + ratio(takes, self.costs.host_links)
        if visit.calls:
            self.uploads.append(Span(device, visit.batch, visit.first, start, visit.uploaded))

    def _input(self, device: int, batch: int, action: Action) -> Cost | None:
        """When an action's input is there; ``None``: that cannot be told yet."""
        if action.stage == 0:
            if not batch or not self.returns_at_losses:
                return 0
            return None if self.losses_left[batch - 1] else self.losses[batch - 1]
        if action.kind == "W":
            found = self.done.get((batch, action.stage, action.microbatch))
            return None if found is None else found[0]
        return self._output(device, batch, action.stage - 1, action.microbatch)

    def _output(self, device: int, batch: int, stage: int, microbatch: int) -> Cost | None:
        """When what a stage made of a microbatch is on a device; ``None``: that cannot be told yet."""
        found = self.done.get((batch, stage, microbatch))
        if found is None:
            return None
        end, source = found
        return end if self.resident and source == device else end + self.costs.hop

    def _early(self, device: int, batch: int, action: Action) -> tuple[Cost, Cost] | None:
        """How long the recompute is that need not wait for the gradient, and when its input is there."""
        calls = self.ranges[action.stage]
        if not self.recomputes_early or action.kind != "B" or not calls or calls.start not in self.forward_of:
            return None
        if action in self.together.values():
            return None
        kept = self._output(device, batch, self.forward_of[calls.start], action.microbatch)
        return None if kept is None else (sum(self.costs.recompute[call] for call in calls), kept)

    def _action_start(self, device: int) -> Cost | None:
        """When the device's next action starts; ``None``: that cannot be told yet."""
        if self.position[device] == len(self.lines[device]):
            return None
        batch, action, visit = self.lines[device][self.position[device]]
        if visit.uploaded is None:
            return None
        arrival = self._input(device, batch, action)
        if (other := self.together.get(action)) is not None:
            second = self._input(device, batch, other)
            arrival = None if arrival is None or second is None else max(arrival, second)
        if arrival is None:
            return None
        early = self._early(device, batch, action)
        return max(self.free[device], visit.uploaded, arrival if early is None else min(early[1], arrival))

    def _act(self, device: int, start: Cost) -> None:
        batch, action, visit = self.lines[device][self.position[device]]
        free = self.free[device]
        arrival = cast(Cost, self._input(device, batch, action))
        other = self.together.get(action)
        ran = [action] if other is None else [action, other]
        takes = sum(self._duration(batch, action) for action in ran)
        if other is not None and self.together_time is not None:
            takes = self.together_time
        early = self._early(device, batch, action)
        if early is None:
            causes = self._causes(free, start, arrival, batch, action, visit)
            pause: Cost = 0
        else:
            recomputed = start + early[0]
            pause = max(arrival - recomputed, 0)
            causes = self._causes(free, start, min(early[1], arrival), batch, action, visit)
            causes += self._causes(recomputed, recomputed + pause, arrival, batch, action, visit)
        if causes and action.kind != "W":
            self.waits[batch, action.stage, action.microbatch] = causes
        optimizer, upload = (sum(end - begin for begin, end, cause in causes if cause == name) for name in _CAUSES)
        end = self.free[device] = start + takes + pause
        self.parts[batch][device] += Parts(takes, start - free + pause - optimizer - upload, upload, optimizer)
        for _ in ran:
            self._finish(device, start, end)

    def _causes(
        self, free: Cost, start: Cost, arrival: Cost, batch: int, action: Action, visit: _Visit
    ) -> list[tuple[Cost, Cost, str]]:
        """For which times between ``free`` and ``start`` more is to blame than the order of actions.

        While the input is on its way, what the action that it comes from was waiting for; then the stage's own
        parameters, as long as the optimizer has all it needs for them, and as long as they are copied.
        """
        here = min(max(free, arrival), start)
        before = self.waits.get((batch, action.stage - 1, action.microbatch), ()) if action.kind != "W" else ()
        causes = [(max(free, begin), min(here, end), cause) for begin, end, cause in before]
        ready = min(max(here, visit.steppable), start)
        stepped = min(max(ready, visit.published), start)
        causes += [
            (ready, stepped, "optimizer"),
            (stepped, min(max(stepped, cast(Cost, visit.uploaded)), start), "upload"),
        ]
        return [cause for cause in causes if cause[0] < cause[1]]

    def _duration(self, batch: int, action: Action) -> Cost:
        deferred = Action("W", action.stage, action.microbatch) in self.places[batch]
        return duration(self.costs, self.ranges[action.stage], action, deferred=deferred)

    def _finish(self, device: int, start: Cost, end: Cost) -> None:
        """Notes that the device's next action has its time, and what follows from that."""
        batch, action, visit = self.lines[device][self.position[device]]
        self.position[device] += 1
        self.spans.append(Span(device, batch, action, start, end))
        self.ends[batch] = max(self.ends[batch], end)
        self.actions_left[batch] -= 1
        if action.kind != "W":
            self.done[batch, action.stage, action.microbatch] = end, device
            if action.stage == self.loss_stage:
                self.losses_left[batch] -= 1
                self.losses[batch] = max(self.losses[batch], end)
        visit.actions -= 1
        if not visit.actions:
            visit.ended = end
        if visit.gradients is not None and visit.gradients[0] == action:
            begin = max(end, self.down_free[device])
            self.down_free[device] = begin + sum(self.costs.download[call] for call in visit.gradients[1])
            self.downloads.append(Span(device, batch, action, begin, self.down_free[device]))
            self.gradients_left[batch] -= 1
            self.gradients[batch] = max(self.gradients[batch], self.down_free[device])
        self._step()

    def _step(self) -> None:
        """Steps after each batch whose gradients are all on the host, one after the other."""
        while (batch := len(self.steps)) < len(self.ends):
            if self.gradients_left[batch] or self.actions_left[batch]:
                return
            start = now = max(self.gradients[batch], self.steps[-1][1] if self.steps else 0)
            published = []
            for call, (takes, adding) in enumerate(zip(self.costs.optimizer, self.costs.add, strict=True)):
                now += takes + adding * max(self.copies[batch][call] - 1, 0)
                published.append(now)
            self.published.append(published)
            self.steps.append((start, now))

    def _result(self) -> Simulation:
        costs = self.costs
        useful = sum(
            self._duration(0, a) - (sum(costs.recompute[call] for call in self.ranges[a.stage]) if a.kind == "B" else 0)
            for a in (self.places[0] if self.places else ())
        )
        return Simulation(
            tuple(sorted(self.spans, key=lambda span: (span.start, span.device))),
            tuple(self.uploads),
            tuple(self.downloads),
            tuple(self.steps),
            tuple(self.ends),
            tuple(tuple(parts) for parts in self.parts),
            useful,
            tuple(self._peak_parameters(visits) for visits in self.visits),
            tuple(self._peak_live(line) for line in self.lines),
        )

    def _peak_parameters(self, visits: list[_Visit]) -> Cost:
        sizes = self.costs.parameters
        if self.resident:
            return sum(sizes[call] for call in {call for visit in visits for call in visit.calls})
        # A visit takes its place when the one before the last leaves, whatever it then waits for.
        held = [sum(sizes[call] for call in visit.calls) for visit in visits]
        return max((sum(held[i : i + 1 + self.prefetch]) for i in range(len(held))), default=0)

    def _peak_live(self, line: list[tuple[int, Action, _Visit]]) -> int:
        if not self.resident:
            return min(len(line), 1)
        live = peak = 0
        for batch, action, _ in line:
            live += action.kind == "F"
            peak = max(peak, live)
            if action.kind == "W" or (
                action.kind == "B" and Action("W", action.stage, action.microbatch) not in self.places[batch]
            ):
                live -= 1
        return peak
