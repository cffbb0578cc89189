"""The first batch runs serially and shows what the step does; the same inputs again in the batches after it, whose
microbatches run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import nn

from .common import FEW, MODEL, PLAIN, STEP, Net, Way, X, col, fit, lin, sgd
from .test_optimizer_worker import TwoColumns
from .test_parameters import SharedWeight
from .test_recompute import Adapter, TrainsSome, mean_square
from .test_split_auto import contrast, variance
from .test_splitting import IDS, AddsPosition, Everything, Rows, SeesIds, all_arguments

BATCHES = 5


class Case(NamedTuple):
    make: Callable[[], L.LightningModule]
    batch: Any
    per_sample: bool = True
    """Whether the step may be split: the loss is a mean over samples."""
    microbatches: int = 4
    """Into how many, at most."""
    options: dict[str, Any] = {}


def three_layers(loss: Callable[[Any, Any], Any]) -> Net:
    return Net(lin(2), lin(3), lin(5), loss=loss, optimizer=sgd(0.001))


def with_id() -> Rows:
    rows = Rows(X, IDS)
    rows.note = "kept"
    return rows


def convolutions() -> Net:
    torch.manual_seed(0)
    block = nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.ReLU(inplace=True))
    ramp = torch.tensor([1.0, 2.0, 3.0])
    return Net(
        nn.Conv1d(1, 2, 1),
        block,
        loss=lambda module, batch: (module.net(batch) * ramp).pow(2).mean(),
        optimizer=sgd(0.01),
    )


TWO_COLUMNS = torch.tensor([[1.0, 2.0], [5.0, 6.0]])

CASES = {
    "mean": Case(lambda: three_layers(lambda module, batch: module.net(batch).mean()), X),
    "sum": Case(lambda: three_layers(lambda module, batch: module.net(batch).sum()), X, per_sample=False),
    "variance": Case(lambda: Net(lin(1), loss=variance, optimizer=sgd(0.1)), col(0, 0, 2, 2), per_sample=False),
    "contrast": Case(lambda: Net(lin(1), loss=contrast, optimizer=sgd(0.1)), col(0, 1, 2, 3), per_sample=False),
    "all arguments": Case(lambda: Net(Everything(), loss=all_arguments), X),
    "arguments left out": Case(lambda: Net(Everything()), X),
    "one row": Case(
        lambda: Net(AddsPosition(), loss=lambda module, batch: module.net[0](batch["x"], batch["pos"]).mean()),
        {"x": X, "pos": torch.tensor([[10.0]])},
    ),
    "dict": Case(SeesIds, {"x": X, "id": IDS}),
    "dataclass": Case(SeesIds, with_id()),
    "ragged": Case(
        lambda: Net(lin(0), loss=lambda module, batch: module.net(torch.cat(batch)).mean()),
        [col(1), col(2, 2), col(3, 3, 3)],
        per_sample=False,
    ),
    "BatchNorm": Case(
        lambda: Net(nn.BatchNorm1d(1), lin(1), loss=mean_square, optimizer=sgd(0.1)), col(0, 4, 0, 4), microbatches=2
    ),
    "in place after a layer": Case(lambda: Net(lin(1), nn.ReLU(inplace=True), optimizer=sgd(0.05)), X),
    "in place inside a layer": Case(convolutions, torch.tensor([[[1.0, 2.0, 4.0]], [[0.0, 1.0, 5.0]]])),
    "adapter": Case(lambda: TrainsSome(lin(2).requires_grad_(False), Adapter(), optimizer=sgd(0.1)), X),
    "clipping by norm": Case(TwoColumns, TWO_COLUMNS, options={"gradient_clip_val": 1.0}),
    "clipping by value": Case(
        TwoColumns, TWO_COLUMNS, options={"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    ),
    "shared weight": Case(SharedWeight, col(1, 1)),
}


@pytest.mark.parametrize("way", [*FEW, *STEP, *MODEL], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_in_the_first_batch(name: str, way: Way) -> None:
    """Right in the first batch only."""
    case = CASES[name]
    if way.split == "step" and not case.per_sample:
        strategy: dict[str, Any] = {"split": "whole"}
    else:
        strategy = {}
    strategy["microbatches"] = min(way.microbatches, case.microbatches)
    plain, ours = case.make(), case.make()
    start = [parameter.detach().clone() for parameter in plain.parameters()]
    fit(plain, [case.batch] * BATCHES, PLAIN, **case.options)
    fit(ours, [case.batch] * BATCHES, way, strategy=strategy, **case.options)
    assert not all(map(torch.equal, start, plain.parameters()))
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
