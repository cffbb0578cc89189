"""The table of docs/compatibility.md. It holds nothing that differs from run to run: no times, no last digits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "compatibility.md"

HEAD = """\
# Compatibility

Models that are trained through the pipeline in the tests and compared with plain autograd. This page is written by
`tests/zoo/test_zoo.py`; run `make test ARGS=tests/zoo` to write it again.

Every model is small and has random weights. It is trained in 64-bit precision for {steps} optimizer steps, with
{devices} devices and {microbatches} microbatches, on batches of {sizes} samples (with BatchNorm of two for each
microbatch at least). The reference is a plain loop: the same microbatches, the same losses weighted by number of
samples, `loss.backward()`, `optimizer.step()`. Parameters
(trained, frozen and unused ones), gradients as the optimizer's state sums them up, buffers and losses must agree to
{tolerance} of the largest value of the tensor, or, where that is next to zero, of a ten thousandth of the largest of
all. Running statistics of BatchNorm must be those of whole batches.

*Layers* is what the pipeline moves and calls as one, as it finds them by itself unless the notes give the option
`layers`. *Calls* is how many calls of layers one microbatch makes. *Error* is the largest relative error of a
parameter after the last step. The notes name what makes a model special for a pipeline.

{count} models, none changed for the pipeline:

"""
COLUMNS = ("model", "family", "parameters", "layers", "calls", "error", "notes")


@dataclass(frozen=True)
class Row:
    model: str
    family: str
    parameters: int
    layers: int
    calls: Sequence[int]
    error: float
    notes: Sequence[str]

    def cells(self) -> tuple[str, ...]:
        few, many = min(self.calls), max(self.calls)
        return (
            self.model,
            self.family,
            f"{self.parameters:,}",
            str(self.layers),
            str(few) if few == many else f"{few} to {many}",
            bound(self.error),
            ", ".join(self.notes),
        )


def bound(error: float) -> str:
    """A round number that the error is below of, the same on every machine."""
    return "< 1e-12" if error < 1e-12 else "< 1e-9"


def page(rows: Sequence[Row], **facts: object) -> str:
    lines = [COLUMNS, ("---", "---", "---:", "---:", "---:", "---:", "---"), *(row.cells() for row in rows)]
    return HEAD.format(count=len(rows), **facts) + "".join(f"| {' | '.join(line)} |\n" for line in lines)
