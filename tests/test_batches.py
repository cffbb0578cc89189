"""Batches as data loaders make them, through the Trainer: each trains as on one device with the unsplit batch, also the
uneven last one and one with fewer samples than microbatches.
"""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers import assert_alike, fit, fit_pipeline, weights
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from transformers import BatchEncoding

SIZES = (8, 5, 3, 1)
WORDS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg", "hhhhhhhh"]

Parts = namedtuple("Parts", "x y words")


@dataclass
class Record:
    x: Tensor
    y: Tensor
    words: list[str]
    unit: float = 1.0
    table: Tensor = field(default_factory=lambda: torch.ones(2, 3))
    note: str | None = None


def ragged(x: Tensor) -> list[Tensor]:
    """Rows of different lengths, whose means are those of x."""
    return [row[None].expand(1 + n % 3, -1) for n, row in enumerate(x)]


Seen = tuple[Tensor, Tensor, list[str]]
"""x, y and words, put together again by the step."""

KINDS: dict[str, tuple[Callable[[Tensor, Tensor, list[str]], Any], Callable[[Any], Seen]]] = {
    "tuple": (lambda x, y, words: (x, y, words), lambda b: (b[0], b[1], b[2])),
    "list": (lambda x, y, words: [x, y, words], lambda b: (b[0], b[1], b[2])),
    "words as a tuple": (lambda x, y, words: [x, y, tuple(words)], lambda b: (b[0], b[1], list(b[2]))),
    "dict": (lambda x, y, words: {"x": x, "y": y, "words": words}, lambda b: (b["x"], b["y"], b["words"])),
    "ordered dict": (
        lambda x, y, words: OrderedDict(words=words, y=y, x=x),
        lambda b: (b["x"], b["y"], b["words"]) if list(b) == ["words", "y", "x"] else None,
    ),
    "BatchEncoding": (
        lambda x, y, words: BatchEncoding({"x": x, "y": y, "words": words}),
        lambda b: (b.x, b["y"], b["words"]) if isinstance(b, BatchEncoding) else None,
    ),
    "named tuple": (Parts, lambda b: (b.x, b.y, b.words)),
    "dataclass": (Record, lambda b: (b.x * b.unit * b.table[0, 0], b.y, b.words) if b.note is None else None),
    "nested lists": (lambda x, y, words: [[x, [y]], [[words]]], lambda b: (b[0][0], b[0][1][0], b[1][0][0])),
    "scalars and None": (
        lambda x, y, words: {"scale": 1.0, "shift": torch.tensor(0.0), "none": None, "n": 7, "b": [x, y], "w": words},
        lambda b: (b["b"][0] * b["scale"] + b["shift"], b["b"][1], b["w"]) if b["none"] is None else None,
    ),
    "NumPy": (
        lambda x, y, words: {"x": x.numpy(), "y": y, "words": np.array(words)},
        lambda b: (torch.from_numpy(b["x"]), b["y"], [str(w) for w in b["words"]]),
    ),
    "ragged list": (
        lambda x, y, words: {"x": ragged(x), "y": y, "words": words},
        lambda b: (torch.stack([rows.mean(0) for rows in b["x"]]), b["y"], b["words"]),
    ),
    "list of samples": (
        lambda x, y, words: [
            {"x": a, "y": b, "word": w, "size": torch.ones(2)} for a, b, w in zip(x, y, words, strict=True)
        ],
        lambda b: (torch.stack([s["x"] for s in b]), torch.stack([s["y"] for s in b]), [s["word"] for s in b]),
    ),
    "packed sequence": (
        lambda x, y, words: {"x": pack_sequence(ragged(x), enforce_sorted=False), "y": y, "words": words},
        lambda b: (pad_packed_sequence(b["x"], batch_first=True)[0][:, 0], b["y"], b["words"]),
    ),
}


class Model(L.LightningModule):
    """Weighs each sample by its word's length, so that rows and words must belong together."""

    def __init__(self, unpack: Callable[[Any], Seen]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.unpack = unpack
        self.words: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, words = self.unpack(batch)
        assert len(x) == len(y) == len(words) > 0
        self.words += words
        lengths = torch.tensor([len(word) for word in words], dtype=x.dtype)
        return ((self.net(x) - y).square().mean(1) * lengths).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(kind: str) -> list[Any]:
    pack, _ = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    return [
        pack(*(torch.randn(n, 4, generator=generator, dtype=torch.float64) for _ in range(2)), WORDS[:n]) for n in SIZES
    ]


def model(kind: str) -> Model:
    torch.manual_seed(3)
    return Model(KINDS[kind][1]).double()


@pytest.mark.parametrize("split", ["step", "auto"])
@pytest.mark.parametrize(("m", "devices"), [(2, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_whole_batch(kind: str, m: int, devices: int, split: str) -> None:
    ours, plain = model(kind), model(kind)
    fit_pipeline(ours, batches(kind), m, devices, split=split)
    fit(plain, batches(kind))
    assert_alike(weights(ours), weights(plain), 1e-12)
    assert ours.words == plain.words


def test_an_object_that_is_no_container_is_refused_or_run_whole() -> None:
    """With what it is, and what to do about it."""
    KINDS["namespace"] = (
        lambda x, y, words: SimpleNamespace(x=x, y=y, words=words),
        lambda b: (b.x, b.y, b.words),
    )
    ours, plain = model("namespace"), model("namespace")
    before = weights(ours)
    with pytest.raises(ValueError, match=r"batch \(SimpleNamespace\).* a method `split\(self, batch, microbatches\)`"):
        fit_pipeline(ours, batches("namespace"), 2, split="step")
    assert_alike(weights(ours), before, 0.0)
    fit_pipeline(ours, batches("namespace"), 2, split="auto")
    fit(plain, batches("namespace"))
    assert_alike(weights(ours), weights(plain), 1e-12)
