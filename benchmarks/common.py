"""What the benchmarks share: a GPT, Lightning without its trimmings, alternating rounds, and rows for the table.

Each benchmark is a module with a function ``measure() -> list[Row]``; ``run.py`` runs them all.
"""

import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_roundpipe.schedules import Action, Schedule

RESULTS = Path(__file__).parent / "results"
Name = TypeVar("Name", bound=Hashable)
FIRST = 3
"""Batches that are not counted: whatever happens for the first time is slow."""


@dataclass
class Row:
    """One line of the table. What has no target is there for comparison."""

    what: str
    measured: float
    unit: str = ""
    target: float | None = None
    at_most: bool = False
    """Whether the target is an upper bound."""
    peer: str = ""
    """What it is compared with, and how that did."""

    @property
    def holds(self) -> bool:
        if self.target is None:
            return True
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    @property
    def bar(self) -> str:
        return "" if self.target is None else f"{'at most' if self.at_most else 'at least'} {self.target:g}"

    @property
    def shown(self) -> str:
        return f"{self.measured:.3g} {self.unit}".strip()

    @property
    def verdict(self) -> str:
        return "" if self.target is None else "holds" if self.holds else "MISSED"


def show(title: str, rows: Sequence[Row], file: str | None = None) -> None:
    """Prints the rows as a table, and writes them as JSON."""
    table = Table(title=title)
    for name in ("what", "target", "measured", "compared with", ""):
        table.add_column(name, justify="right" if name in ("target", "measured") else "left")
    for row in rows:
        table.add_row(row.what, row.bar, row.shown, row.peer, row.verdict)
    Console().print(table)
    if file is not None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / file).write_text(json.dumps([asdict(row) | {"holds": row.holds} for row in rows], indent=1) + "\n")


def quiet() -> None:
    """No word of Lightning's about hardware, processes and checkpoints."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


class Block(nn.Module):
    """A transformer block (pre-norm, causal)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # B, heads, 3, T, d
        query, key, value = heads.unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(L.LightningModule):
    """Next-token prediction; `checkpoint` runs each block under ``torch.utils.checkpoint``, for hand-written loops."""

    def __init__(
        self, layers: int, width: int, tokens: int, vocabulary: int = 256, *, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
        self.checkpoint = checkpoint

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)

    def training_step(self, tokens: Tensor, index: int = 0) -> Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def some_tokens(samples: int, tokens: int, vocabulary: int = 256) -> Tensor:
    """Shape (samples, tokens + 1), so that each token has a next one."""
    return torch.randint(vocabulary, (samples, tokens + 1), generator=torch.Generator().manual_seed(0))


class Batches:
    """Gives the same batch so many times, and notes when each is asked for. (A hook of the module's that did would keep
    the optimizer from stepping in the background.)
    """

    def __init__(self, batch: Any, count: int, note: Callable[[], Any] | None = None) -> None:
        self.batch, self.count = batch, count
        self.times: list[float] = []
        self.notes: list[Any] = []
        self._note = note

    def __len__(self) -> int:
        return self.count + FIRST

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count + FIRST):
            if number >= FIRST:
                self.times.append(time.perf_counter())
                if self._note is not None:
                    self.notes.append(self._note())
            yield self.batch

    def seconds(self) -> list[float]:
        """From batch to batch."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def train(module: L.LightningModule, batches: Any, strategy: Any, devices: int = 1, **options: Any) -> L.Trainer:
    """One epoch through Lightning, without its trimmings."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(strategy=strategy, devices=devices, **(settings | options))
    trainer.fit(module, batches)
    return trainer


def all_recomputed(microbatches: int, devices: int) -> Schedule:
    """One forward and one backward stage; each device runs both for its share of the microbatches. Other schedules of
    ours keep the activations of the fused stage, which may be the whole model on one device."""
    cuts = [device * microbatches // devices for device in range(devices + 1)]
    lines = (
        tuple(Action(kind, int(kind == "B"), microbatch) for microbatch in range(*cut) for kind in ("F", "B"))
        for cut in pairwise(cuts)
    )
    return Schedule(tuple(lines), devices - 1)


def alternate(contestants: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, float]:
    """Runs each in turn, round after round, and returns the median of what each has returned: a neighbour on the
    machine then slows all of them, and not one.
    """
    found: dict[Name, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            found[name].append(contestant())
    return {name: statistics.median(values) for name, values in found.items()}


def in_turns(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """What both return, round after round. Which of them runs first takes turns, too."""
    values = []
    for number in range(rounds):
        if number % 2:
            of_second = second()
            values.append((first(), of_second))
        else:
            values.append((first(), second()))
    return values


def paired_ratio(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    """The median over rounds of first by second, and the medians of both."""
    values = in_turns(first, second, rounds)
    ratios = [a / b if b else math.inf for a, b in values]
    return (
        statistics.median(ratios),
        statistics.median(a for a, _ in values),
        statistics.median(b for _, b in values),
    )
