"""Names of layers and classes in tables."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

_SEAMS = (re.compile(r"(?<=[^. ][.])(?=[^.])|(?<= )"), re.compile(r"(?<=_)|(?<=[a-z0-9])(?=[A-Z])"))
"""Where a name may be broken: after a dot; if that is not enough, after an underscore and before a capital letter."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name as a cell of a table: where it is too long for its column, it goes on in the next line, part by part.

    Rich itself breaks what has no spaces wherever the line ends.
    """

    text: str

    def lines(self, width: int) -> list[str]:
        """The name in lines of at most so many characters. Only a word that is longer than that is cut."""
        return [line.rstrip() for line in _folded(self.text, width, _SEAMS)]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = max(map(len, self.lines(max(options.max_width, 1))), default=0)
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(self.lines(max(options.max_width, 1))), no_wrap=True)


def _folded(text: str, width: int, seams: Sequence[re.Pattern[str]]) -> list[str]:
    if not seams:
        return [text[i : i + width] for i in range(0, len(text), width)]
    lines: list[str] = []
    for part in seams[0].split(text):
        if lines and len(lines[-1] + part.rstrip()) <= width:
            lines[-1] += part
        else:
            lines += [part] if len(part.rstrip()) <= width else _folded(part, width, seams[1:])
    return lines
