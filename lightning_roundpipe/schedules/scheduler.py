"""Which stages a batch has and who runs them, batch after batch: by a schedule's name, or by one given as data."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.memory import NOTHING_STAYS, Memory, Staying, comes_back
from lightning_roundpipe.schedules.named import BOUND, CHUNKS
from lightning_roundpipe.schedules.one_f_one_b import one_f_one_b
from lightning_roundpipe.schedules.partition import Partition, balance, bound, cut
from lightning_roundpipe.schedules.planner import plan
from lightning_roundpipe.schedules.roundpipe import roundpipe
from lightning_roundpipe.schedules.schedule import Action, Schedule

ScheduleName: TypeAlias = Literal[
    "roundpipe", "gpipe", "1f1b", "interleaved", "zb1p", "dualpipe", "model_parallel", "sequential"
]

_OUT_OF_ORDER = ("dualpipe", "model_parallel")

NAMES = ("roundpipe", *BOUND)


class Scheduler:
    """Makes the stages and the schedule of each batch.

    Args:
        method: The schedule's name, or one as data, for batches of as many microbatches as it has.
        devices: Number of devices.
        lanes: For ``"roundpipe"``: into how many groups the devices are divided; see :func:`roundpipe`. ``"auto"``: as
            :meth:`plan` finds best.

    Raises:
        ValueError: There is no such schedule, or the numbers do not suit it.
    """

    def __init__(
        self, method: ScheduleName | Schedule = "roundpipe", devices: int = 1, lanes: int | Literal["auto"] = 1
    ) -> None:
        if isinstance(method, str) and method not in NAMES:
            raise ValueError(f"`schedule` must be one of {', '.join(NAMES)}, or a Schedule; got {method!r}.")
        if lanes != 1 and method != "roundpipe":
            raise ValueError(f"`lanes` are for schedule='roundpipe' only; `schedule` is {method!r}.")
        if lanes != "auto" and (lanes < 1 or devices % lanes):
            raise ValueError(f"{devices} devices cannot be divided into {lanes} lanes of equal size.")
        if isinstance(method, Schedule):
            method.validate()
            if (backward := Action("B", 0, 0)) in method.device_of():
                raise ValueError(f"The schedule has {backward} before any forward.")
            if len(method.devices) != devices:
                raise ValueError(f"The schedule is for {len(method.devices)} devices, but there are {devices}.")
        self._method = method
        self._devices = devices
        self._lanes_wanted = lanes
        self.lanes = 1 if lanes == "auto" else lanes
        """Number of lanes as long as nothing else is planned."""
        self._next_device = 0

    @property
    def can_be_planned(self) -> bool:
        """Whether the stages are not given by the method."""
        return self._method == "roundpipe"

    @property
    def keeps_order(self) -> bool:
        """Whether microbatches come to each stage in their order, whatever is planned."""
        if isinstance(self._method, Schedule):
            return _keeps_order(self._method)
        return self._method not in _OUT_OF_ORDER and self._lanes_wanted == 1

    def keep_order(self) -> bool:
        """Makes it so from the next batch on, with a single lane. Returns whether that could be done."""
        if self._method == "roundpipe":
            self._lanes_wanted = self.lanes = 1
        return self.keeps_order

    def plan(
        self,
        forward_costs: Sequence[float],
        backward_costs: Sequence[float],
        microbatches: int,
        staleness: int,
        memory: Memory | None = None,
        kept: Sequence[bool] = (),
        give_way: Callable[[], None] | None = None,
    ) -> tuple[Partition, int]:
        """Searches the stages, and the number of lanes, that take the least time per batch. Takes up to a second.

        Args:
            forward_costs: As for :meth:`partition`.
            backward_costs: As for :meth:`partition`.
            microbatches: Number of microbatches of a batch.
            staleness: How many steps the parameters of a batch may be behind.
            memory: What stages must fit into.
            kept: As for :meth:`partition`.
            give_way: Called after each trial.
        """
        recompute = [0.0 if keeps else cost for cost, keeps in _with_kept(forward_costs, kept)]
        backward = [max(both - again, 0.0) for again, both in zip(recompute, backward_costs, strict=True)]
        lanes = None if self._lanes_wanted == "auto" else self._lanes_wanted
        if lanes is not None and lanes > microbatches:
            lanes = 1
        found = plan(
            Costs(forward_costs, backward, recompute),
            microbatches,
            self._devices,
            staleness=staleness,
            lanes=lanes,
            memory=memory,
            give_way=give_way,
        )
        return found.partition, found.lanes

    def check(self, microbatches: int) -> None:
        """Whether batches of so many microbatches can be scheduled in the way that was asked for.

        Raises:
            ValueError: They cannot.
        """
        if isinstance(self._method, Schedule):
            wanted = 1 + max((action.microbatch for line in self._method.devices for action in line), default=-1)
            if wanted != microbatches:
                raise ValueError(f"The schedule is for {wanted} microbatches, but `microbatches` is {microbatches}.")
        elif self._method in BOUND:
            BOUND[self._method](self._devices, microbatches)

    def partition(
        self,
        forward_costs: Sequence[float],
        backward_costs: Sequence[float],
        *,
        fused: bool = True,
        memory: Memory | None = None,
        kept: Sequence[bool] = (),
    ) -> Partition:
        """Cuts a microbatch's calls into stages.

        Args:
            forward_costs: Time of each call's forward, in call order.
            backward_costs: Time of each call's backward including the recompute, if there is one, in call order.
            fused: Whether the backward may follow the forward at once.
            memory: What stages must fit into, unless they are given by the method.
            kept: Whether each call keeps its graph for the backward, which then has no recompute; left out: none does.
        """
        calls = len(forward_costs)
        fused_costs = [
            both + cost if keeps else both
            for (cost, keeps), both in zip(_with_kept(forward_costs, kept), backward_costs, strict=True)
        ]
        if isinstance(self._method, Schedule) and fused:
            kinds = {
                action.stage: action.kind for line in self._method.devices for action in line if action.kind != "W"
            }
            below = sum(kind == "F" for kind in kinds.values())
            return cut(
                forward_costs,
                backward_costs,
                below,
                len(kinds) - below,
                fused="FB" in kinds.values(),
                fused_costs=fused_costs,
            )
        if self._method in BOUND and calls:
            chunks = CHUNKS if self._method == "interleaved" and calls >= CHUNKS else 1
            return bound(forward_costs, backward_costs, min(self._devices, calls // chunks) * chunks)
        if memory is not None:
            return memory.balance(forward_costs, backward_costs, fused=fused, fused_costs=fused_costs)
        return balance(forward_costs, backward_costs, fused=fused, fused_costs=fused_costs)

    def staying(self, partition: Partition, lanes: int, memory: Memory | None, *, graphs: bool = False) -> Staying:
        """What stays on devices from a call's forward to its backward; see :meth:`Memory.staying`. Where no limit is
        known, graphs if they are wanted, and no inputs. Other schedules than RoundPipe's hold other things than are
        counted there: nothing."""
        if self._method != "roundpipe":
            return NOTHING_STAYS
        devices = self._devices // lanes
        if memory is None:
            return Staying(frozenset(comes_back(partition, devices))) if graphs else NOTHING_STAYS
        return memory.staying(partition, devices)

    def schedule(self, partition: Partition, microbatches: int, *, lanes: int = 1, deferred: bool = False) -> Schedule:
        """The next batch's schedule.

        Where the method has none (for the last, smaller batch of an epoch, say), the stages are dealt round-robin.

        Args:
            partition: The stages, as :meth:`partition` has made them.
            microbatches: Number of microbatches of the batch.
            lanes: Number of lanes.
            deferred: Whether no backward may begin before all forwards are done.
        """
        made = None if deferred else self._made(partition, microbatches)
        if made is None:
            lanes = lanes if microbatches >= lanes and self._lanes_wanted != 1 else 1
            made = roundpipe(partition, microbatches, self._devices, self._next_device, lanes)
        self._next_device = (made.last_device + 1) % self._devices
        return made

    def _made(self, partition: Partition, microbatches: int) -> Schedule | None:
        if self._method == "roundpipe" or partition.stage_count() == 0:
            return None
        try:
            if isinstance(self._method, Schedule):
                self.check(microbatches)
                return self._method
            make, stages = BOUND[self._method], len(partition.forward)
            if self._method == "interleaved":
                if stages % CHUNKS:  # a model of fewer layers than that
                    make = one_f_one_b
                else:
                    stages //= CHUNKS
            schedule = make(stages, microbatches)
        except ValueError:
            return None
        idle = self._devices - len(schedule.devices)
        return Schedule((*schedule.devices, *([()] * idle)), schedule.last_device, schedule.resident)


def _with_kept(costs: Sequence[float], kept: Sequence[bool]) -> Iterable[tuple[float, bool]]:
    """The time of each call, and whether its graph is kept."""
    return zip(costs, kept or (False,) * len(costs), strict=True)


def _keeps_order(schedule: Schedule) -> bool:
    devices: dict[tuple[str, int], int] = {}
    latest: dict[tuple[str, int], int] = {}
    for device, line in enumerate(schedule.devices):
        for action in line:
            stage = action.kind, action.stage
            if devices.setdefault(stage, device) != device or action.microbatch < latest.get(stage, -1):
                return False
            latest[stage] = action.microbatch
    return True
