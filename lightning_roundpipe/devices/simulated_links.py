"""When copies of simulated devices would be done: on a link they are made one at a time, and streams take turns.

A copy begins when what it comes after is done and the link is free. Of several that could begin at the same time, the
stream's that has waited for its turn the longest does. So when a copy will be done depends on those that are handed
out later; it is settled as soon as somebody asks, or the host waits.
"""

import threading
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

_lock = threading.RLock()
_pending: "list[LinkCopy]" = []
"""Those that have not begun, in the order in which they were handed out."""
_numbers = count()


class Link:
    """One way between two memories."""

    def __init__(self) -> None:
        self.free = 0.0
        """When its last copy is done, in seconds."""
        self.turns: dict[Any, int] = {}
        """The number of the last copy of each stream."""


class LinkCopy:
    """A copy that takes some time.

    Attributes:
        end: When it is done, in seconds, or None while that is open.
    """

    __slots__ = ("after", "end", "link", "number", "seconds", "stream")

    def __init__(self, link: Link, stream: Any, seconds: float, after: "Time") -> None:
        self.link = link
        self.stream = stream
        self.seconds = seconds
        self.after: Time | None = after
        self.end: float | None = None
        self.number = next(_numbers)


class Time:
    """When some work is done: after these copies, of each stream the last, and not before a moment that is known."""

    __slots__ = ("copies", "known")

    def __init__(self, copies: Mapping[Any, LinkCopy] | None = None, known: float = 0.0) -> None:
        self.copies = dict(copies or {})
        self.known = known

    def and_copy(self, link: Link, stream: Any, seconds: float) -> "Time":
        """When a copy is done that is handed out now, to be made after this."""
        with _lock:
            copy = LinkCopy(link, stream, seconds, self)
            _pending.append(copy)
            return Time({**self.copies, stream: copy}, self.known)

    def and_also(self, other: "Time") -> "Time":
        """When both are done."""
        later = {
            stream: copy
            for stream, copy in other.copies.items()
            if stream not in self.copies or self.copies[stream].number < copy.number
        }
        return Time({**self.copies, **later}, max(self.known, other.known))

    def seconds(self) -> float:
        """The moment."""
        with _lock:
            _settle(self.copies.values())
            self.known = max([self.known, *(copy.end for copy in self.copies.values() if copy.end is not None)])
            self.copies = {}
            return self.known


def _settle(copies: Iterable[LinkCopy]) -> None:
    """Lets copies begin, in the order of their beginning, until these have."""
    while any(copy.end is None for copy in copies):
        can_begin = [(max(ready, copy.link.free), copy) for copy in _pending if (ready := _ready(copy)) is not None]
        begin, copy = min(
            can_begin, key=lambda each: (each[0], each[1].link.turns.get(each[1].stream, -1), each[1].number)
        )
        copy.end = copy.link.free = begin + copy.seconds
        copy.link.turns[copy.stream] = max(copy.link.turns.values(), default=0) + 1
        copy.after = None
        _pending.remove(copy)


def _ready(copy: LinkCopy) -> float | None:
    """When a copy could begin if the link were free; None while that is open."""
    assert copy.after is not None
    ends = [before.end for before in copy.after.copies.values()]
    known = [end for end in ends if end is not None]
    return max([copy.after.known, *known]) if len(known) == len(ends) else None
