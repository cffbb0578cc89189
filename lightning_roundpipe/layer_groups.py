"""Layers that are alike, together in tables."""

from collections.abc import Hashable, Iterable, Sequence


def alike(keys: Iterable[Hashable]) -> list[list[int]]:
    """The positions of equal keys, in the order in which the keys are met first."""
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def name_of(names: Sequence[str]) -> str:
    """One name for several: ``blocks.0 .. 47``."""
    if len(names) == 1:
        return names[0]
    (first_owner, *_), (last_owner, _, last) = (name.rpartition(".") for name in (names[0], names[-1]))
    return f"{names[0]} .. {last if first_owner == last_owner else names[-1]}"


def sizes_of(stages: Iterable[range]) -> str:
    """Numbers of layers in stages, equal neighbours together: ``1, 8 x 3``."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][1] == len(stage):
            runs[-1][0] += 1
        else:
            runs.append([1, len(stage)])
    return ", ".join(str(size) if count == 1 else f"{count} x {size}" for count, size in runs) or "none"
