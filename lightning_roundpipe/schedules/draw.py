"""Timelines of simulations as pictures, as in the papers' figures."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from lightning_roundpipe.schedules.simulate import Simulation

# On a page of its own colour, so that the picture is readable whatever it lies on, light or dark.
PAGE, INK, IDLE = "#fbfaf7", "#22262b", "#e9e6df"
COLOURS = {"F": "#8ab6e8", "FB": "#c7a0dc", "B": "#93c98f", "W": "#f0be6f"}
WORDS = {"F": "forward", "FB": "fused forward and backward", "B": "backward", "W": "weight gradients"}


def draw(simulations: Mapping[str, Simulation], path: str | Path, *, until: float | None = None) -> None:
    """Saves the timelines of simulations, one below the other on one time axis.

    Each line is a device. Actions carry the number of their microbatch where there is room for any, and every other
    batch is darker.

    Args:
        simulations: The simulations, by title.
        path: Where to save the picture; the ending (``.png``, ``.svg``, ``.pdf``) says in which format.
        until: The end of the time axis; ``None``: when the longest simulation ends.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("Pictures are drawn with Matplotlib: pip install 'lightning_roundpipe[plot]'") from error
    end = float(max(s.makespan for s in simulations.values())) if until is None else until
    heights = [max(len(s.devices), 1) for s in simulations.values()]
    line, gap, top, bottom = 0.24, 0.42, 0.34, 0.76  # inches
    inches = top + sum(line * height for height in heights) + gap * (len(heights) - 1) + bottom
    figure = Figure(figsize=(12, inches), facecolor=PAGE)
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    figure.subplots_adjust(
        left=0.075, right=0.985, top=1 - top / inches, bottom=bottom / inches,
        hspace=gap * len(heights) / (line * sum(heights)),
    )  # fmt: skip
    kinds: set[str] = set()
    for ax, (title, simulation) in zip(axes, simulations.items(), strict=True):
        count = len(simulation.devices)
        ax.set_facecolor(PAGE)
        ax.broken_barh([(0, end)], (-0.42, count - 0.16), facecolors=IDLE)
        digits = len(str(max((span.action.microbatch for span in simulation.actions), default=0)))
        bars: dict[tuple[str, int], list[tuple[float, float]]] = {}  # those of one colour on one device
        for span in simulation.actions:
            start, stop = float(span.start), min(float(span.end), end)
            if start >= stop:
                continue
            kinds.add(span.action.kind)
            bars.setdefault((_shade(COLOURS[span.action.kind], span.batch), span.device), []).append(
                (start, stop - start)
            )
            if stop - start > 0.007 * end * digits:
                ax.text(
                    (start + stop) / 2, span.device, str(span.action.microbatch),
                    ha="center", va="center_baseline", fontsize=6.5, color=INK,
                )  # fmt: skip
        for (colour, device), spans in bars.items():
            narrow = median(length for _, length in spans) < 0.004 * end
            ax.broken_barh(
                spans, (device - 0.42, 0.84), facecolors=colour, edgecolors=PAGE, linewidth=0.1 if narrow else 0.4
            )
        ax.set_title(title, loc="left", fontsize=9.5, color=INK)
        ax.set_xlim(0, end)
        ax.set_ylim(count - 0.5, -0.5)
        ax.set_yticks(range(count), [f"device {device}" for device in range(count)], fontsize=7, color=INK)
        ax.tick_params(colors=INK, labelsize=7, length=0)
        ax.spines[:].set_visible(False)
        if ax is not axes[-1]:
            ax.set_xticks([])
    axes[-1].set_xlabel("time", fontsize=8, color=INK)
    legend = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS if kind in kinds]
    figure.legend(
        handles=[*legend, Patch(color=IDLE, label="idle")], loc="lower center", ncols=5, fontsize=8, frameon=False,
        labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=130, facecolor=PAGE, metadata={"Software": None} if str(path).endswith("png") else None)


def _shade(colour: str, batch: int) -> str:
    """Darker for every other batch."""
    if batch % 2 == 0:
        return colour
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(part * 0.8):02x}" for part in parts)
