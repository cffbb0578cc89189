"""The first batch's looks at modules: what has changed on them since the last one.

There is a hand-over at every layer call, so to look at all modules each time would take time in proportion to the
square of their number. Looked at are those that the stretch of code between two hand-overs has accessed: before its
first access and after its last, so that what is different then has changed within the stretch. What changed by another
way, such as an object that is held elsewhere, too, shows at the next look.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.pipeline.replica import same_items
from lightning_roundpipe.pipeline.watching import (
    OF_ALL_MODULES,
    Key,
    contents,
    is_constant,
    may_hold,
    noting_nothing,
    same,
)

MISSING: Any = object()
"""Stands for the value of an attribute that is not there."""


@dataclass(slots=True)
class Changes:
    """What is other than it was at the last look."""

    attributes: dict[Key, Any] = field(default_factory=dict)
    """What was set, with the value before."""
    in_place: dict[Key, None] = field(default_factory=dict)
    """What holds the same object with other contents; and buffers that are other tensors, which microbatches share."""


@dataclass(slots=True)
class _Held:
    """What may be changed in place: a list, a tensor, a plain object."""

    value: Any
    contents: list[Any]
    keys: dict[Key, None] = field(default_factory=dict)
    """The attributes that hold it."""

    def has_changed(self) -> bool:
        if isinstance(self.value, Tensor):  # quickly, as there may be many
            return not self.value.is_inference() and self.value._version != self.contents[1]
        return not same(contents(self.value), self.contents)


@dataclass(slots=True)
class _Seen:
    """A module at the last look."""

    attributes: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor | None] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    """The attributes and buffers that may be changed in place, with the ids of what they hold."""


class Looks:
    """Compares modules with what they were.

    Args:
        modules: All modules, by id.
        outside: Those whose buffers no layer has for itself.
        named_by_code: What their code may change in place besides; looked at every time.
    """

    def __init__(self, modules: Mapping[int, nn.Module], outside: Container[int], named_by_code: Iterable[Any]) -> None:
        self._modules = modules
        self._outside = outside
        self._seen = {number: _Seen() for number in modules}
        self._held: dict[int, _Held] = {}
        """By id."""
        self._named_by_code = [id(value) for value in named_by_code]
        self._in_hand: set[int] = set()
        """What the code may have kept from an earlier stretch, and change without access to a module."""
        for value in named_by_code:
            self._hold((id(value), ""), value)

    def begin(self) -> None:
        """A microbatch begins: whatever is there now has been there before."""
        self.look(self._modules)
        self._in_hand.clear()

    def look(self, numbers: Iterable[int]) -> Changes:
        """What has changed on these modules, and in what the code may change without access to one.

        Args:
            numbers: The modules' ids.
        """
        changes = Changes()
        with noting_nothing():
            found = [(number, self._seen[number]) for number in numbers]
            held = {each for _, seen in found for each in seen.held.values()}
            for each in (self._held.get(number) for number in {*held, *self._named_by_code, *self._in_hand}):
                if each is not None and each.has_changed():
                    changes.in_place.update(each.keys)
                    each.contents = contents(each.value)
            for number, seen in found:
                self._compare(number, seen, changes)
        return changes

    def hand_out(self, keys: Iterable[Key]) -> None:
        """These attributes were read: the code may keep what they hold for later stretches."""
        for number, name in keys:
            if number in self._seen and (held := self._seen[number].held.get(name)) is not None:
                self._in_hand.add(held)

    def set(self, number: int, name: str, value: Any) -> None:
        """An attribute was set by the pipeline itself."""
        seen = self._seen[number]
        seen.attributes[name] = value
        self._follow(number, seen, name, value)

    def _compare(self, number: int, seen: _Seen, changes: Changes) -> None:
        module = self._modules[number]
        now, buffers = module.__dict__, dict(module._buffers.items())  # of scripts it is no dict
        if not same_items(now, seen.attributes):
            for name in {**seen.attributes, **now}:
                value, before = now.get(name, MISSING), seen.attributes.get(name, MISSING)
                if value is not before:
                    changes.attributes[number, name] = before
                    self._follow(number, seen, name, value)
                    self.hand_out([(number, name)])  # whoever has set it may still have it
            seen.attributes = dict(now)
        if not same_items(buffers, seen.buffers):
            for name in {**seen.buffers, **buffers}:
                value, before = buffers.get(name, MISSING), seen.buffers.get(name, MISSING)
                if value is not before:
                    if number in self._outside:
                        changes.in_place[number, name] = None
                    self._follow(number, seen, name, value)
            seen.buffers = buffers

    def _follow(self, number: int, seen: _Seen, name: str, value: Any) -> None:
        """Notes what an attribute holds now."""
        key = number, name
        if (before := seen.held.pop(name, None)) is not None:
            held = self._held[before]
            del held.keys[key]
            if not held.keys:
                del self._held[before]
                self._in_hand.discard(before)
        if name not in OF_ALL_MODULES and value is not MISSING and may_hold(value) and not is_constant(value):
            seen.held[name] = id(value)
            self._hold(key, value)

    def _hold(self, key: Key, value: Any) -> None:
        held = self._held.get(id(value))
        if held is None:
            held = self._held[id(value)] = _Held(value, contents(value))
        held.keys[key] = None
