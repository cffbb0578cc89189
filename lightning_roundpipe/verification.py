"""What :func:`verify` has found, as data and as tables."""

from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.table_names import Name

Kind = Literal[
    "difference", "error", "recompute", "split", "side effect", "escape", "mutated input", "random", "parameters",
    "no gradient", "serial",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a layer, or the step itself, does besides computing.

    Attributes:
        kind: What it is.
        layer: Which layer does it; None for the code between layers and for the step as a whole.
        text: What was found, and where it is a fault, the remedy.
        serious: Whether numbers would be wrong, or training stop with an error. The others are dealt with.
    """

    kind: Kind
    layer: str | None
    text: str
    serious: bool = False


@dataclass(frozen=True, slots=True)
class GradientError:
    """How far one parameter's gradient is from the expected one.

    Attributes:
        parameter: Its name.
        layer: The layer that holds it; None for parameters that the code between layers uses.
        norm: The expected gradient's norm (2-norm); None where there is none.
        error: The largest difference of an entry.
        relative: The difference's norm as a share of the expected gradient's. Where that is as good as zero, of a ten
            thousandth of the largest norm of all.
        missing: ``"expected"`` or ``"found"`` where only the other one is a gradient at all.
    """

    parameter: str
    layer: str | None
    norm: float | None
    error: float
    relative: float
    missing: Literal["expected", "found"] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Loss and gradients of one run against those of another.

    Attributes:
        name: What was run.
        expected: What it was compared with.
        loss: The loss found.
        expected_loss: The loss expected.
        gradients: One per parameter that requires a gradient.
        tolerance: The largest relative difference that counts as rounding.
    """

    name: str
    expected: str
    loss: float | None
    expected_loss: float | None
    gradients: list[GradientError]
    tolerance: float

    @property
    def loss_error(self) -> float:
        """The relative difference of the losses."""
        if self.loss is None or self.expected_loss is None:
            return 0.0 if self.loss is self.expected_loss else float("inf")
        if self.loss == self.expected_loss or (self.loss != self.loss and self.expected_loss != self.expected_loss):
            return 0.0
        return abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1e-12)

    @property
    def worst(self) -> GradientError | None:
        """The gradient that is farthest off."""
        return max(self.gradients, key=lambda g: (g.missing is not None, _with_nan_as_inf(g.relative)), default=None)

    @property
    def wrong(self) -> list[GradientError]:
        """The gradients that differ by more than rounding."""
        return [g for g in self.gradients if g.missing is not None or not g.relative <= self.tolerance]

    @property
    def ok(self) -> bool:
        return self.loss_error <= self.tolerance and not self.wrong

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.loss_error == 0 and all(g.error == 0 and g.missing is None for g in self.gradients)


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer.

    Attributes:
        name: Its path in the module.
        kind: Its class.
        parameters: Number of values in its parameters.
        calls: How often the batch's microbatches called it, all together.
        error: The largest relative gradient error of its parameters through the pipeline; None if nothing was compared.
    """

    name: str
    kind: str
    parameters: int
    calls: int
    error: float | None


@dataclass(frozen=True, slots=True)
class Verification:
    """One batch through the pipeline against plain autograd.

    ``print`` shows it as text, ``rich.print`` in colour; :meth:`to_dict` gives plain data.

    Attributes:
        module: The module's class.
        devices: Number of devices.
        microbatches: Into how many microbatches the batch was split.
        split: How the batch was split; with ``split="auto"``, what was chosen.
        loss_weight: How the microbatches' losses were weighed, likewise.
        pipeline: The runs through the pipeline against plain autograd on the same microbatches: the first batch, which
            records what layers are like, and one after it, as all later ones run.
        whole: The microbatches against the whole batch, both by plain autograd: whether this split fits this loss.
            None if the batch was not split, or it could not be told.
        layers: The layers.
        findings: What they do besides computing, and what went wrong.
        seconds: How long it took.
    """

    module: str
    devices: int
    microbatches: int
    split: str
    loss_weight: str
    pipeline: list[Comparison]
    whole: Comparison | None
    layers: list[LayerCheck]
    findings: list[Finding]
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether the pipeline computes what plain autograd does on the same microbatches, but for rounding."""
        serious = any(finding.serious and finding.kind != "split" for finding in self.findings)
        return bool(self.pipeline) and all(comparison.ok for comparison in self.pipeline) and not serious

    @property
    def fits(self) -> bool | None:
        """Whether the microbatches add up to the whole batch. None if that could not be told."""
        return None if self.whole is None else self.whole.ok

    @property
    def ok(self) -> bool:
        """Whether the module can be trained like this and gives what one device would, but for rounding."""
        return self.exact and self.fits is not False and not any(finding.serious for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, for ``json.dumps``."""
        comparisons = [*self.pipeline, *([] if self.whole is None else [self.whole])]
        verdicts = {"ok": self.ok, "exact": self.exact, "fits": self.fits}
        data = {**verdicts, **asdict(self)}
        for comparison, found in zip(comparisons, [*data["pipeline"], data["whole"]], strict=False):
            found.update(ok=comparison.ok, equal=comparison.equal, loss_error=comparison.loss_error)
        return data

    def verdict(self) -> str:
        """The outcome in a sentence or two."""
        if not self.ok:
            faults = [_sentence(finding) for finding in self.findings if finding.serious]
            if not faults:
                return "NOT VERIFIED. " + " ".join(finding.text for finding in self.findings if finding.kind == "split")
            return "NOT OK. " + " ".join(dict.fromkeys(faults))
        if all(comparison.equal for comparison in self.pipeline):
            how = "to the last bit"
        else:
            how = f"to within rounding ({_largest(self.pipeline):.1e})"
        text = f"OK. Loss and gradients through the pipeline equal those of plain autograd {how}."
        if self.whole is not None:
            text += f" The microbatches add up to the whole batch ({_largest([self.whole]):.1e})."
        elif self.microbatches > 1 and self.split == "step":
            text += " Whether the microbatches add up to the whole batch could not be told."
        return text

    def table(self) -> Group:
        """The report for a terminal."""
        style = "bold green" if self.ok else "bold red"
        parts: list[Any] = [Text(self.verdict(), style=style)]
        if self.pipeline or self.whole:
            parts.append(self._comparisons())
        if wrong := [(c, g) for c in (*self.pipeline, *filter(None, [self.whole])) for g in c.wrong]:
            parts.append(_gradients(wrong))
        if self.layers:
            parts.append(self._layers())
        if self.findings:
            parts.append(self._findings())
        return Group(*parts)

    def __rich__(self) -> Group:
        return self.table()

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=80, color_system=None).print(self.table())
        return text.getvalue().rstrip()

    def _comparisons(self) -> Table:
        table = _table(
            f"{self.module}: {self.microbatches} microbatch{'es' * (self.microbatches > 1)} on {self.devices}"
            f" device{'s' * (self.devices > 1)}, split={self.split!r}, loss_weight={self.loss_weight!r}"
        )
        for title in ("run", "expected is"):
            table.add_column(title, min_width=_WORD)
        for title in ("loss", "expected", "rounding"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("largest gradient error", justify="right")
        for comparison in (*self.pipeline, *filter(None, [self.whole])):
            worst = comparison.worst
            table.add_row(
                comparison.name,
                comparison.expected,
                _number(comparison.loss),
                _number(comparison.expected_loss),
                f"{comparison.tolerance:.0e}",
                "-" if worst is None else _error(worst),
            )
        return table

    def _layers(self) -> Table:
        table = _table("Layers", "calls: by all microbatches of a batch; gradient error: relative")
        for title in ("layer", "class"):
            table.add_column(title)
        for title in ("parameters", "calls", "gradient\nerror"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("found", min_width=_WORD)
        for layer in self.layers:
            kinds = dict.fromkeys(finding.kind for finding in self.findings if finding.layer == layer.name)
            error = "-" if layer.error is None else f"{layer.error:.1e}" if layer.error else "0"
            cells = f"{layer.parameters:,}", f"{layer.calls:,}", error, ", ".join(kinds)
            table.add_row(Name(layer.name), Name(layer.kind), *cells)
        return table

    def _findings(self) -> Table:
        table = _table("Found", show_lines=True)
        table.add_column("what", no_wrap=True)
        table.add_column("where", max_width=24)
        table.add_column("", overflow="fold")
        same: dict[tuple[bool, Kind, str], list[str]] = {}
        for finding in sorted(self.findings, key=lambda finding: not finding.serious):
            where = same.setdefault((finding.serious, finding.kind, finding.text), [])
            where.append(finding.layer or "the step")
        for (serious, kind, text), where in same.items():
            table.add_row(Text(kind, style="bold red" if serious else ""), Name(_counted(where)), Text(text))
        return table


_WORD = len("microbatches,")
"""The longest word in columns of words: narrower, they would break it."""


def _table(title: str, caption: str | None = None, *, show_lines: bool = False) -> Table:
    """One that fits into 80 columns: without lines between its columns."""
    return Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_lines=show_lines)


def _counted(places: list[str]) -> str:
    """The first of them, and how often it or others are there."""
    first, others = places[0], len(set(places)) - 1
    times = f", {len(places)} times" if len(places) > others + 1 else ""
    return f"{first} and {others} more{times}" if others else f"{first}{times}"


def _gradients(wrong: list[tuple[Comparison, GradientError]], limit: int = 20) -> Table:
    table = _table("Gradients that differ", f"and {len(wrong) - limit} more" if len(wrong) > limit else None)
    table.add_column("run", min_width=_WORD)
    table.add_column("parameter")
    for title in ("expected\nnorm", "largest\ndifference", "relative"):
        table.add_column(title, justify="right", no_wrap=True)
    for comparison, gradient in wrong[:limit]:
        norm = "none" if gradient.norm is None else f"{gradient.norm:.3g}"
        table.add_row(comparison.name, Name(gradient.parameter), norm, f"{gradient.error:.1e}", _error(gradient))
    return table


def _error(gradient: GradientError) -> str:
    if gradient.missing is not None:
        return "no gradient" if gradient.missing == "found" else "none expected"
    return f"{gradient.relative:.1e}" if gradient.error else "0"


def _largest(comparisons: list[Comparison]) -> float:
    return max(
        (max(c.loss_error, _with_nan_as_inf(c.worst.relative if c.worst is not None else 0.0)) for c in comparisons),
        default=0.0,
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _with_nan_as_inf(value: float) -> float:
    return value if value == value else float("inf")


def _sentence(finding: Finding) -> str:
    named = finding.layer is None or repr(finding.layer) in finding.text
    return finding.text if named else f"Layer {finding.layer!r}: {finding.text}"
