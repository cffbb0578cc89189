"""The table of docs/callbacks.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).parents[1] / "docs" / "callbacks.md"

HEAD = """\
# Callbacks

All callbacks of Lightning, and its tuner, in a training with the pipeline. This page is written by
`tests/test_callbacks.py`; run `make test ARGS=tests/test_callbacks.py` to write it again.

*Works* means: what the callback makes (stopped epochs, averaged weights, masks, logs, checkpoints), weights and
optimizer state are bit for bit those of plain Lightning on the same batches; and so are weights where the batch is
split, compared with gradient accumulation over the same microbatches, unless the callback counts these. Callbacks of
your own work likewise: see `Callback`.

*Optimizer* tells where the optimizer steps: in the *background*, which is faster, or *in line*, on the main thread,
because the callback has a hook that may look at weights or gradients right after a batch. One line says so at the first
batch. Logs, progress bars and epoch ends never make it step in line.

"""
COLUMNS = ("callback", "", "optimizer", "what to know")


@dataclass(frozen=True)
class Row:
    name: str
    in_background: bool
    notes: str

    def cells(self) -> tuple[str, ...]:
        return f"`{self.name}`", "works", "background" if self.in_background else "in line", self.notes


def page(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in rows)]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)
