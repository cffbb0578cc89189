"""Timelines as pictures, as in the papers' figures: of simulations, and of what devices have really done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lightning_roundpipe.schedules.simulate import Simulation, Span

# On a page of its own colour, so that the picture is readable whatever it lies on, light or dark.
PAGE, INK, IDLE = "#fbfaf7", "#22262b", "#e9e6df"
COLOURS = {"F": "#8ab6e8", "FB": "#c7a0dc", "B": "#93c98f", "W": "#f0be6f", "step": "#d98880"}
WORDS = {
    "F": "forward",
    "FB": "fused forward and backward",
    "B": "backward",
    "W": "weight gradients",
    "step": "optimizer step",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of time on a line.

    Attributes:
        line: Number of the line, counted from above.
        start: Where it begins on the time axis.
        end: Where it ends.
        kind: That of an action, or ``"step"`` for the optimizer's.
        batch: Number of its batch; every other one is darker.
        label: Written upon it where there is room.
        stage: Bars of one stage have their labels together.
        waits: What the line did if it did not compute, for the legend. The bar is paler then.
    """

    line: int
    start: float
    end: float
    kind: str
    batch: int
    label: str = ""
    stage: int = -1
    waits: str = ""

    @classmethod
    def of_action(cls, span: Span, *, start: float, end: float, waits: str = "") -> "Bar":
        """What shows an action, with its microbatch's number."""
        action = span.action
        return cls(span.device, start, end, action.kind, span.batch, str(action.microbatch), action.stage, waits)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines and the bars upon them. Those that come later lie above.

    Attributes:
        lines: What the lines are called.
        bars: The bars.
        end: The end of the last one.
        unit: Of time, if there is one.
    """

    lines: Sequence[str]
    bars: Sequence[Bar]
    end: float
    unit: str = ""


def draw(simulations: Mapping[str, Simulation], path: str | Path, *, until: float | None = None) -> None:
    """Saves the timelines of simulations as :func:`draw_charts` does: each line is a device."""
    draw_charts({title: _chart(simulation) for title, simulation in simulations.items()}, path, until=until)


def _chart(simulation: Simulation) -> Chart:
    bars = [Bar.of_action(span, start=float(span.start), end=float(span.end)) for span in simulation.actions]
    lines = [f"device {device}" for device in range(len(simulation.devices))]
    return Chart(lines, bars, float(simulation.makespan))


def draw_charts(charts: Mapping[str, Chart], path: str | Path, *, until: float | None = None) -> None:
    """Saves charts, one below the other on one time axis.

    Actions carry the number of their microbatch where there is room for any, and every other batch is darker.

    Args:
        charts: The charts, by title.
        path: Where to save the picture; the ending (``.png``, ``.svg``, ``.pdf``) says in which format.
        until: The end of the time axis; ``None``: that of the longest chart.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("Pictures are drawn with Matplotlib: pip install 'lightning_roundpipe[plot]'") from error
    end = max(chart.end for chart in charts.values()) if until is None else until
    heights = [max(len(chart.lines), 1) for chart in charts.values()]
    line, gap, top, bottom = 0.24, 0.42, 0.34, 0.76  # inches
    inches = top + sum(line * height for height in heights) + gap * (len(heights) - 1) + bottom
    figure = Figure(figsize=(12, inches), facecolor=PAGE)
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    figure.subplots_adjust(
        left=0.075, right=0.985, top=1 - top / inches, bottom=bottom / inches,
        hspace=gap * len(heights) / (line * sum(heights)),
    )  # fmt: skip
    kinds: set[str] = set()
    waits: dict[str, str] = {}
    for ax, (title, chart) in zip(axes, charts.items(), strict=True):
        count = len(chart.lines)
        ax.set_facecolor(PAGE)
        ax.broken_barh([(0, end)], (-0.42, count - 0.16), facecolors=IDLE)
        legible = 0.007 * end * max((len(bar.label) for bar in chart.bars), default=0)
        lengths: dict[tuple[int, int, int], list[float]] = {}
        for bar in chart.bars:
            if bar.label:
                lengths.setdefault((bar.line, bar.batch, bar.stage), []).append(bar.end - bar.start)
        usual = {stage: median(of_stage) for stage, of_stage in lengths.items()}
        spans: dict[tuple[str, int], list[tuple[float, float]]] = {}  # of the bars of one colour on one line
        for bar in chart.bars:
            start, stop = bar.start, min(bar.end, end)
            if start >= stop:
                continue
            if bar.waits:
                waits.setdefault(bar.waits, _pale(COLOURS[bar.kind]))
            else:
                kinds.add(bar.kind)
            spans.setdefault((_colour(bar), bar.line), []).append((start, stop - start))
            if bar.label and stop - start > legible * (0.8 if usual[bar.line, bar.batch, bar.stage] > legible else 1.3):
                ax.text(
                    (start + stop) / 2, bar.line, bar.label,
                    ha="center", va="center_baseline", fontsize=6.5, color=INK,
                )  # fmt: skip
        for (colour, number), parts in spans.items():
            narrow = median(length for _, length in parts) < 0.004 * end
            ax.broken_barh(
                parts, (number - 0.42, 0.84), facecolors=colour, edgecolors=PAGE, linewidth=0.1 if narrow else 0.4
            )
        ax.set_title(title, loc="left", fontsize=9.5, color=INK)
        ax.set_xlim(0, end)
        ax.set_ylim(count - 0.5, -0.5)
        ax.set_yticks(range(count), chart.lines, fontsize=7, color=INK)
        ax.tick_params(colors=INK, labelsize=7, length=0)
        ax.spines[:].set_visible(False)
        if ax is not axes[-1]:
            ax.set_xticks([])
    unit = next(iter(charts.values())).unit
    axes[-1].set_xlabel(f"time ({unit})" if unit else "time", fontsize=8, color=INK)
    legend = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS if kind in kinds]
    legend += [Patch(color=colour, label=label) for label, colour in waits.items()]
    figure.legend(
        handles=[*legend, Patch(color=IDLE, label="idle")], loc="lower center", ncols=9, fontsize=8, frameon=False,
        labelcolor=INK, columnspacing=1.2, handlelength=1.5,
    )  # fmt: skip
    figure.savefig(path, dpi=130, facecolor=PAGE, metadata={"Software": None} if str(path).endswith("png") else None)


def _colour(bar: Bar) -> str:
    """Darker for every other batch, and paler where it waits."""
    colour = COLOURS[bar.kind]
    if bar.batch % 2:
        colour = _mixed(colour, "#000000", 0.2)
    return _pale(colour) if bar.waits else colour


def _pale(colour: str) -> str:
    return _mixed(colour, PAGE, 0.6)


def _mixed(colour: str, other: str, share: float) -> str:
    parts = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{int(a * (1 - share) + b * share):02x}" for a, b in parts)
