"""What looks at modules find, and how many modules they look at."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fit_pipeline
from test_habits import Habit, data, in_double_precision, make
from torch import nn

from lightning_roundpipe.pipeline.attributes import ModuleAttributes
from lightning_roundpipe.pipeline.looking import MISSING, Looks

__all__ = ["in_double_precision"]


class Modules:
    """Two of them; the second one is within a layer."""

    def __init__(self) -> None:
        self.first, self.second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.modules = {1: self.first, 2: self.second}

    def looks(self, *named_by_code: Any) -> Looks:
        looks = Looks(self.modules, {1}, named_by_code)
        looks.begin()
        return looks


@pytest.fixture
def modules() -> Modules:
    return Modules()


def test_nothing_has_changed(modules: Modules) -> None:
    changes = modules.looks().look([1, 2])
    assert not changes.attributes
    assert not changes.in_place


def test_attributes_with_their_values_before(modules: Modules) -> None:
    looks = modules.looks()
    modules.first.eps = 0.5
    modules.first.new = 3
    del modules.second.momentum
    assert looks.look([1, 2]).attributes == {(1, "eps"): 1e-5, (1, "new"): MISSING, (2, "momentum"): 0.1}
    assert not looks.look([1, 2]).attributes


def test_only_what_is_looked_at(modules: Modules) -> None:
    looks = modules.looks()
    modules.first.eps = modules.second.eps = 0.5
    assert list(looks.look([2]).attributes) == [(2, "eps")]
    assert list(looks.look([1, 2]).attributes) == [(1, "eps")]


def test_what_the_pipeline_sets_itself(modules: Modules) -> None:
    looks = modules.looks()
    modules.first.eps = modules.first.momentum = 0.5
    looks.set(1, "eps", 0.5)
    assert list(looks.look([1]).attributes) == [(1, "momentum")]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2)),
        ({"a": [1]}, lambda value: value["a"].append(2)),
        (SimpleNamespace(count=1), lambda value: setattr(value, "count", 2)),
        (torch.zeros(2), lambda value: value.add_(1)),
        (([1], 2), lambda value: value[0].append(2)),
        (torch.Generator(), lambda value: torch.rand(1, generator=value)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changes_in_place_of_what_two_modules_hold(modules: Modules, value: Any, change: Any) -> None:
    modules.first.one = modules.second.other = value
    looks = modules.looks()
    change(value)
    assert set(looks.look([2]).in_place) == {(1, "one"), (2, "other")}
    assert not looks.look([1, 2]).in_place


def test_buffers(modules: Modules) -> None:
    """That they are other tensors concerns all microbatches where no layer has them for itself."""
    looks = modules.looks()
    for module in (modules.first, modules.second):
        module.running_mean.add_(1)
        module.running_var = torch.zeros(2)
    assert set(looks.look([1, 2]).in_place) == {(1, "running_mean"), (1, "running_var"), (2, "running_mean")}
    modules.second.running_var.add_(1)
    assert set(looks.look([2]).in_place) == {(2, "running_var")}


def test_what_code_has_in_hand(modules: Modules) -> None:
    modules.first.history = history = []
    looks = modules.looks()
    looks.hand_out([(1, "history"), (1, "eps"), (3, "unknown")])
    history.append(1)
    assert set(looks.look([]).in_place) == {(1, "history")}
    looks.begin()
    history.append(1)
    assert not looks.look([]).in_place  # the next microbatch has not asked for it


def test_what_code_names(modules: Modules) -> None:
    history: list[int] = []
    looks = modules.looks(history)
    history.append(1)
    assert set(looks.look([]).in_place) == {(id(history), "")}


class ManyBetween(Habit):
    """As many modules between the layers as there are layers."""

    def __init__(self, layers: int) -> None:
        super().__init__(count=layers)
        self.between = nn.ModuleList(nn.Identity() for _ in range(layers))


@pytest.mark.parametrize(("kind", "method", "batches"), [(Looks, "_compare", 1), (ModuleAttributes, "_found", 3)])
def test_as_many_looks_for_each_layer_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, batches: int
) -> None:
    looks: list[int] = []
    look = getattr(kind, method)

    def counted(self: Any, number: int, *others: Any) -> Any:
        looks.append(number)
        return look(self, number, *others)

    monkeypatch.setattr(kind, method, counted)
    counts = []
    for layers in (4, 8, 16):
        looks.clear()
        fit_pipeline(make(partial(ManyBetween, layers)), data()[:batches], 2, 2)
        counts.append(len(looks))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
