"""Which layer calls are expected of a microbatch, and the stages that they make."""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from lightning_roundpipe.schedules import Partition
from lightning_roundpipe.schedules.memory import NOTHING_STAYS, Staying


@dataclass(frozen=True, slots=True)
class Plan:
    """The expected layer calls of a microbatch, and the stages they make."""

    calls: tuple[int, ...]
    """Layer indices in call order."""
    partition: Partition
    lanes: int
    positions: dict[int, list[int]]
    forward_stage: tuple[int, ...]
    backward_stage: tuple[int, ...]
    staying: Staying = NOTHING_STAYS
    """Calls, by position, of which something stays on a device with memory of its own."""

    @classmethod
    def make(
        cls,
        calls: Sequence[int],
        partition: Partition,
        lanes: int,
        staying: Staying = NOTHING_STAYS,
    ) -> "Plan":
        positions: dict[int, list[int]] = {}
        for position, layer in enumerate(calls):
            positions.setdefault(layer, []).append(position)
        offset = len(partition.forward)
        forward_stage = [offset] * len(calls)
        for stage, range_ in enumerate(partition.forward):
            for position in range_:
                forward_stage[position] = stage
        backward_stage = [offset] * len(calls)
        for number, range_ in enumerate(partition.backward):
            for position in range_:
                backward_stage[position] = offset + number
        stages = tuple(forward_stage), tuple(backward_stage)
        return cls(tuple(calls), partition, lanes, positions, *stages, staying)

    def locate(self, layer: int, start: int) -> int | None:
        """The first position of the layer from ``start`` on."""
        positions = self.positions.get(layer, [])
        i = bisect.bisect_left(positions, start)
        return positions[i] if i < len(positions) else None

    @property
    def fused_stage(self) -> int | None:
        return len(self.partition.forward) if self.partition.fused and self.partition.backward else None


def merged_calls(plan: Plan | None, sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Calls in an order that has a place for every call of the plan and of each sequence."""
    merged = plan.calls if plan is not None else ()
    for sequence in sequences:
        merged = merge_sequences(merged, sequence)
    return merged


def merge_sequences(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """A sequence that has both as subsequences, so that every call of either has its place in it."""
    if not a or _is_subsequence(a, b):
        return b
    if _is_subsequence(b, a):
        return a
    merged: list[int] = []
    for tag, a_start, a_stop, b_start, b_stop in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        merged += a[a_start:a_stop]
        if tag != "equal":
            merged += b[b_start:b_stop]
    return tuple(merged)


def _is_subsequence(a: Sequence[int], b: Sequence[int]) -> bool:
    rest = iter(b)
    return all(item in rest for item in a)


def repeated(sequences: Sequence[Sequence[int]]) -> set[int]:
    """What occurs several times in one of the sequences."""
    return {item for sequence in sequences for item, count in Counter(sequence).items() if count > 1}
