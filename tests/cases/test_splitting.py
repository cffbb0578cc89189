"""Batches of every shape, and layers with every kind of argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .common import FEW, PLAIN, AtBatchEnd, Net, Way, X, col, fit, half_square, in_every_way, lin, near, sgd, weights


@in_every_way
def test_an_uneven_last_batch(way: Way) -> None:
    """A mean of means over microbatches of unequal size."""
    module = Net(lin(0))
    fit(module, [X, col(4, 4, 4, 4), col(1, 2, 6)], way)
    assert weights(module) == near([-10.0])


@in_every_way
def test_a_batch_smaller_than_the_number_of_microbatches(way: Way) -> None:
    """Empty microbatches, whose mean is not a number."""
    rows: list[int] = []

    class CountsRows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            return super().forward(x)

    layer = CountsRows(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    module = Net(layer)
    fit(module, [X, col(7)], way)
    assert weights(module) == near([-10.0])
    assert min(rows) > 0


class CountedNorm(nn.BatchNorm2d):
    """Of pictures of one pixel."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, **options)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super().forward(x[..., None, None])[..., 0, 0]


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}], ids=str)
@in_every_way
def test_a_small_batch_where_there_is_a_batch_norm(way: Way, options: dict[str, Any]) -> None:
    """Microbatches of one sample, of which BatchNorm can make nothing: one device can train such a batch."""
    states = []
    for each in (way, PLAIN):
        norm = CountedNorm(**options)
        fit(module := Net(norm, lin(2), loss=half_square, optimizer=sgd(0.1)), [col(1, 2, 6), col(4, 8)], each)
        assert set(norm.rows) == {2, 3}
        states.append(module.state_dict())
    torch.testing.assert_close(*states)


@in_every_way
def test_a_small_last_batch_where_there_is_a_batch_norm(way: Way) -> None:
    """Later batches do as the first one has shown; fewer microbatches than others have are no matter."""
    norm = CountedNorm()
    batches = [col(*range(8)), col(1, 2, 6), col(5, 1, 3, 4, 9)]
    fit(Net(norm, lin(2), loss=half_square, optimizer=sgd(0.1)), batches, way)
    assert min(norm.rows) >= 2
    assert (norm.running_mean.item(), norm.running_var.item()) == near(running_statistics(batches))


def running_statistics(batches: list[Tensor]) -> tuple[float, float]:
    mean, variance = 0.0, 1.0
    for batch in batches:
        mean, variance = 0.9 * mean + 0.1 * batch.mean().item(), 0.9 * variance + 0.1 * batch.var().item()
    return mean, variance


def test_a_norm_in_evaluation_leaves_microbatches_of_one_sample() -> None:
    class Frozen(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].eval()

    norm = CountedNorm()
    fit(Frozen(norm, lin(2), optimizer=sgd(0.1)), [col(1, 2, 6)], Way(3, 2, split="step"))
    assert set(norm.rows) == {1}


class Everything(nn.Module):
    """A layer with every kind of argument and of result."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = False, extra: tuple = ()) -> Any:
        y = self.w * x
        if scale is not None:
            y = y * scale
        if flag:
            y = -y
        if not extra:
            return y
        a, (b, none) = extra
        return y + a * b, none, {"twice": 2 * y}


def all_arguments(module: Net, batch: Tensor) -> dict[str, Tensor]:
    ones = torch.ones(len(batch), 1)
    out, none, more = module.net[0](batch, scale=torch.tensor(10.0), flag=True, extra=(ones, (2 * ones, None)))
    assert none is None
    return {"loss": out.mean(), "twice": more["twice"].detach()}


@in_every_way
def test_keywords_flags_scalars_and_nested_arguments(way: Way) -> None:
    """Keywords, flags or None dropped on the way, a 0-d tensor cut, a dict lost on merging."""
    module = Net(Everything(), loss=all_arguments)
    outputs = AtBatchEnd(lambda module, outputs: (outputs["loss"].item(), outputs["twice"]))
    fit(module, [X], way, callbacks=[outputs])
    ((loss, twice),) = outputs.seen
    assert loss == near(-58.0)
    assert twice.shape == (4, 1)
    assert twice.mean().item() == near(-120.0)
    assert weights(module) == near([32.0])


@in_every_way
def test_keywords_left_out_take_their_defaults(way: Way) -> None:
    """Arguments that were not given replaced by something else than the layer's defaults."""
    module = Net(Everything())
    fit(module, [X], way)
    assert weights(module) == near([-1.0])


class AddsPosition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        assert pos.shape == (1, 1)
        return self.w * (x + pos)


@pytest.mark.parametrize("where", ["in the batch", "in the step"])
@in_every_way
def test_a_tensor_of_one_row_is_given_whole_to_every_microbatch(way: Way, where: str) -> None:
    """A position tensor of shape [1, T] cut along with the samples."""
    if where == "in the batch":
        module = Net(AddsPosition(), loss=lambda module, batch: module.net[0](batch["x"], batch["pos"]).mean())
        batches: list[Any] = [{"x": X, "pos": torch.tensor([[10.0]])}]
    else:
        module = Net(AddsPosition(), loss=lambda module, batch: module.net[0](batch, pos=torch.tensor([[10.0]])).mean())
        batches = [X]
    fit(module, batches, way)
    assert weights(module) == near([-11.0])


@dataclass
class Rows:
    x: Tensor
    id: list[str]
    note: str = field(init=False)


class SeesIds(Net):
    """Multiplies each row by the length of its id; keeps which id came with which row."""

    def __init__(self) -> None:
        super().__init__(lin(0))
        self.seen: list[tuple[str, float]] = []
        self.notes: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Rows):
            x, ids = batch.x, batch.id
            self.notes.add(batch.note)
        else:
            x, ids = batch["x"], batch["id"]
        self.seen += zip(ids, x.flatten().tolist(), strict=True)
        return (self.net(x) * col(*map(len, ids))).mean()


IDS = ["a", "bb", "ccc", "dddd"]
IDS_BESIDE_ROWS = [("a", 1.0), ("bb", 2.0), ("ccc", 3.0), ("dddd", 6.0)]


@in_every_way
def test_a_dict_of_tensors_and_strings(way: Way) -> None:
    """Labels or ids paired with the wrong rows."""
    module = SeesIds()
    fit(module, [{"x": X, "id": IDS}], way)
    assert weights(module) == near([-9.5])
    assert sorted(module.seen) == IDS_BESIDE_ROWS


@in_every_way
def test_a_dataclass_keeps_its_type_and_its_other_fields(way: Way) -> None:
    """A dataclass that cannot be rebuilt from its fields, since one of them is not an argument."""
    batch = Rows(X, IDS)
    batch.note = "kept"
    module = SeesIds()
    fit(module, [batch], way)
    assert weights(module) == near([-9.5])
    assert sorted(module.seen) == IDS_BESIDE_ROWS
    assert module.notes == {"kept"}


@pytest.mark.parametrize("way", [PLAIN, *FEW], ids=str)
def test_tensors_of_different_length_without_splitting(way: Way) -> None:
    """A ragged batch cut, or refused, although no split was asked for."""
    module = Net(lin(0), loss=lambda module, batch: module.net(torch.cat(batch)).mean())
    fit(module, [[col(1), col(2, 2), col(3, 3, 3)]], way, strategy={"split": "whole"})
    assert weights(module) == near([-14 / 6])
