"""Stand-ins for iterators, so that a step that takes from them can be tried and the items be there afterwards."""

import io
import itertools
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn

from lightning_roundpipe.pipeline.watching import is_iterator, is_plain_object

_BUILT_IN = {"builtins", itertools.__name__}
_OF_A_FUNCTION = type(iter(int, 1))


class CannotRepeatError(Exception):
    """A step that was to leave no trace takes from an iterator that cannot be copied."""


class StandIn(Iterator[Any]):
    """Gives what an iterator would give next, and leaves the iterator where it is; or refuses to give anything.

    Args:
        name: How the iterator is called in errors.
        kind: Its class.
        items: A copy of it; None: it cannot be copied.
    """

    __slots__ = ("_items", "_kind", "_name", "taken")

    def __init__(self, name: str, kind: type, items: Iterator[Any] | None) -> None:
        self._name = name
        self._kind = kind
        self._items = items
        self.taken = 0
        """How many items were taken."""

    def copy(self, made: dict[int, "StandIn"]) -> "StandIn":
        """One that goes on from here."""
        other = StandIn(self._name, self._kind, None if self._items is None else _copied(self._items, {}))
        other.taken = self.taken
        return made.setdefault(id(self), other)

    def __iter__(self) -> "StandIn":
        return self if self._items is not None else self._refuse()

    def __next__(self) -> Any:
        if self._items is None:
            self._refuse()
        item = next(self._items)
        self.taken += 1
        return item

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CannotRepeatError(
            f"the step uses {self._name}, of class {self._kind.__name__}, which cannot be copied and put back where it"
            " was: say with split='step' or split='model' how to split, or keep a list, or an iterator over one"
        )


def stand_in(name: str, value: Any, made: dict[int, StandIn]) -> StandIn | None:
    """What stands for an iterator; None for what is no iterator, or whose attributes are all that it is.

    Args:
        name: How to call it in errors.
        value: Anything.
        made: Those made so far, by the iterator's id: where one is held twice, both take from the same.
    """
    kind = type(value)
    if not is_iterator(value) or isinstance(value, nn.Module):
        return None
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, StandIn):
        return value.copy(made)
    if is_plain_object(value) or (isinstance(value, io.IOBase) and (value.closed or not value.readable())):
        return None
    try:
        items = _copied(value, {})
    except TypeError:
        items = None
    return made.setdefault(id(value), StandIn(name, kind, items))


def _copied(iterator: Any, made: dict[int, Any]) -> Any:
    """A copy that takes nothing from the iterator, nor from those within it; the items are the same.

    Raises:
        TypeError: There is no way to copy it.
    """
    if id(iterator) in made:
        return made[id(iterator)]
    kind = type(iterator)
    if kind.__module__ not in _BUILT_IN or kind is _OF_A_FUNCTION:
        raise TypeError(f"{kind.__name__} cannot be copied.")

    def part(value: Any) -> Any:
        if type(value) in (list, tuple) and any(map(is_iterator, value)):  # those that a chain comes to later
            return type(value)(map(part, value))
        return _copied(value, made) if is_iterator(value) else value

    def part_of_state(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(part_of_state, value))
        return list(value) if type(value) is list else part(value)  # a cycle appends to a list of its own

    function, arguments, *state = iterator.__reduce__()
    new = made[id(iterator)] = function(*map(part, arguments))
    if state and state[0] is not None:
        new.__setstate__(part_of_state(state[0]))
    return new
