"""State on modules, hooks, metrics, generators: as in a plain loop over the microbatches, however they take turns."""

import copy
import functools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import PATIENCE, assert_equal, fit_microbatches, fit_pipeline, weights
from test_habits import WIDTH, Habit, data, expected, in_double_precision, linear, make, trained
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.aggregation import CatMetric

from lightning_roundpipe.pipeline import turnstile
from lightning_roundpipe.pipeline.runtime import Pipeline

__all__ = ["in_double_precision"]

WAYS = [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)]


@pytest.fixture(autouse=True)
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hand-over between threads takes a random time."""
    chance = random.Random(0)
    monkeypatch.setattr(turnstile, "handover_hook", lambda: time.sleep(chance.random() * 3e-4))


CASES: list[type[Habit]] = []


def case(kind: type[Habit]) -> type[Habit]:
    CASES.append(kind)
    return kind


class OfLayers(Habit):
    """Every block is a layer that keeps some state, which is compared at the end."""

    layer: type["Keeps"]

    def __init__(self) -> None:
        super().__init__(type(self).layer)

    def on_train_end(self) -> None:
        self.seen = {number: layer.state() for number, layer in enumerate(self.net)}


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.keep(x.detach())
        return torch.tanh(x) * self.factor()

    def keep(self, x: Tensor) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        raise NotImplementedError

    def factor(self) -> float:
        """What the output depends on."""
        return 1.0


def of_layers(layer: type[Keeps]) -> type[Keeps]:
    case(type(layer.__name__, (OfLayers,), {"layer": layer}))
    return layer


# --- metrics in layers


class HoldsMetric(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.metric = self.make()

    make: Callable[[], Any] = MeanMetric

    def keep(self, x: Tensor) -> None:
        self.metric.update(x)

    def state(self) -> Any:
        return [self.metric.compute(), self.metric.update_count]


@of_layers
class UpdatesMetric(HoldsMetric):
    pass


@of_layers
class UpdatesMetricOfLists(HoldsMetric):
    make = CatMetric


@of_layers
class CallsMetric(HoldsMetric):
    def keep(self, x: Tensor) -> None:
        self.value = float(self.metric(x))

    def factor(self) -> float:
        return 1 + 0.1 * self.value


@of_layers
class ReadsMetric(HoldsMetric):
    def factor(self) -> float:
        return 1 + 0.1 * float(self.metric.compute())


@of_layers
class UpdatesCollection(HoldsMetric):
    @staticmethod
    def make() -> MetricCollection:
        return MetricCollection([MeanMetric(), SumMetric()])

    def state(self) -> Any:
        return self.metric.compute()


class LogsMetricOfALayer(Habit):
    """The value of the step is the whole batch's: no microbatch counts twice, by the recompute, or not at all."""

    def __init__(self) -> None:
        super().__init__(CallsSum)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("rows", self.net[0].metric, on_step=True, on_epoch=False)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen[len(self.seen)] = float(self.trainer.callback_metrics["rows"])


class CallsSum(HoldsMetric):
    make = SumMetric

    def keep(self, x: Tensor) -> None:
        self.metric(float(len(x)))


@pytest.mark.parametrize(("m", "devices"), WAYS)
def test_logged_metric_of_a_layer(m: int, devices: int) -> None:
    module = make(LogsMetricOfALayer)
    fit_pipeline(module, data(), m, devices)
    assert module.seen == dict.fromkeys(range(4), 6.0)


@case
class MetricBetweenLayers(Habit):
    """Updated twice in a step, with layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric()

    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
            self.metric.update(x.detach())
        return x

    def on_train_end(self) -> None:
        self.seen["sum"] = [self.metric.compute(), self.metric.update_count]


# --- counters in layers


@of_layers
class CountsCalls(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def keep(self, x: Tensor) -> None:
        self.calls += 1

    def factor(self) -> float:
        return 1 + 0.01 * self.calls

    def state(self) -> Any:
        return self.calls


@of_layers
class CountsWithoutUse(CountsCalls):
    def factor(self) -> float:
        return 1.0


@of_layers
class AddsUpANumber(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def keep(self, x: Tensor) -> None:
        self.total += x.sum().item()

    def state(self) -> Any:
        return self.total


@of_layers
class AveragesATensor(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(())

    def keep(self, x: Tensor) -> None:
        self.average = 0.9 * self.average + 0.1 * x.mean()

    def factor(self) -> float:
        return 1 + float(self.average)

    def state(self) -> Any:
        return self.average


@of_layers
class CountsInADict(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {"calls": 0, "rows": []}

    def keep(self, x: Tensor) -> None:
        self.stats["calls"] += 1
        self.stats["rows"].append(len(x))

    def factor(self) -> float:
        return 1 + 0.01 * self.stats["calls"]

    def state(self) -> Any:
        return self.stats


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1


@of_layers
class UpdatesAnObject(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def keep(self, x: Tensor) -> None:
        self.meter.update(x.mean().item())

    def state(self) -> Any:
        return vars(self.meter)


@of_layers
class CountsInANamespace(UpdatesAnObject):
    def __init__(self) -> None:
        super().__init__()
        self.meter = SimpleNamespace(sum=0.0)

    def keep(self, x: Tensor) -> None:
        self.meter.sum += x.mean().item()

    def factor(self) -> float:
        return 1 + 0.01 * self.meter.sum


@of_layers
class DependsOnAnObject(UpdatesAnObject):
    def factor(self) -> float:
        return 1 + 0.01 * self.meter.sum


@of_layers
class CountsInAnArray(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(2)

    def keep(self, x: Tensor) -> None:
        self.counts[0] += 1

    def factor(self) -> float:
        return 1 + 0.01 * float(self.counts[0])

    def state(self) -> Any:
        return self.counts.tolist()


@of_layers
class KeepsTheLast(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.last: deque[float] = deque(maxlen=3)

    def keep(self, x: Tensor) -> None:
        self.last.append(x.mean().item())

    def factor(self) -> float:
        return 1 + 0.1 * sum(self.last)

    def state(self) -> Any:
        return list(self.last)


@of_layers
class CountsInAClosure(CountsCalls):
    def __init__(self) -> None:
        super().__init__()
        self.keep = lambda x: setattr(self, "calls", self.calls + 1)
        self.apply_linear = functools.partial(lambda module, x: module.linear(x), self)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        return torch.tanh(self.apply_linear(x)) * self.factor()


# --- tensors with gradients in lists and objects of layers


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.losses: Any = self.make()

    make: Callable[[], Any] = list

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.keep(y)
        return torch.tanh(y)

    def keep(self, y: Tensor) -> None:
        self.losses.append(y.mean())  # its graph saves no tensor

    def take(self) -> Tensor:
        loss = sum(self.losses)
        self.losses.clear()
        return loss


class WithAuxiliary(Habit):
    layer: type[Auxiliary]

    def __init__(self) -> None:
        super().__init__(type(self).layer)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(layer.take() for layer in self.net)


def auxiliary(layer: type[Auxiliary]) -> type[Auxiliary]:
    case(type(layer.__name__, (WithAuxiliary,), {"layer": layer}))
    return layer


auxiliary(type("AppendsToAList", (Auxiliary,), {}))


@auxiliary
class AppendsTwo(Auxiliary):
    def keep(self, y: Tensor) -> None:
        self.losses.append(y.mean())
        self.losses.append(self.linear.weight.sum() * 0.01)
        self.losses.append(y.pow(2).mean())


@auxiliary
class AppendsToADeque(Auxiliary):
    make = deque


@auxiliary
class PutsIntoADict(Auxiliary):
    make = dict

    def keep(self, y: Tensor) -> None:
        self.losses["mean"] = y.mean()
        self.losses.setdefault("more", []).append(y.pow(2).mean())

    def take(self) -> Tensor:
        loss = self.losses["mean"] + sum(self.losses["more"])
        self.losses.clear()
        return loss


class Record:
    loss: Tensor | None = None


@auxiliary
class PutsIntoAnObject(Auxiliary):
    make = Record

    def keep(self, y: Tensor) -> None:
        self.losses.loss = y.mean()

    def take(self) -> Tensor:
        loss, self.losses.loss = self.losses.loss, None
        return loss


@auxiliary
class SetsAList(Auxiliary):
    def keep(self, y: Tensor) -> None:
        self.losses = [y.mean(), y.pow(2).mean()]

    def take(self) -> Tensor:
        return sum(self.losses)


@auxiliary
class SetsANestedDict(Auxiliary):
    def keep(self, y: Tensor) -> None:
        self.losses = {"a": [y.mean()], "b": (y.pow(2).mean(), len(y))}

    def take(self) -> Tensor:
        return self.losses["a"][0] + self.losses["b"][0]


@case
class OneListForAllLayers(Habit):
    def __init__(self) -> None:
        super().__init__(Auxiliary)
        self.losses: list[Tensor] = []
        for layer in self.net:
            layer.losses = self.losses

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.losses.clear()
        return super().training_step(batch, batch_idx) + sum(self.losses)


class AppendsByClosure(Habit):
    """Of what a closure holds, nothing is known."""

    def __init__(self) -> None:
        super().__init__(Auxiliary)
        self.losses = losses = []
        for layer in self.net:
            layer.keep = lambda y: losses.append(y.mean())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.losses.clear()
        return super().training_step(batch, batch_idx) + sum(self.losses)


class AppendsWeightsByClosure(AppendsByClosure):
    def __init__(self) -> None:
        super().__init__()
        losses = self.losses
        for layer in self.net:
            layer.keep = lambda y, layer=layer: losses.append(layer.linear.weight.sum())


class AppendsLate(Auxiliary):
    calls = 0

    def keep(self, y: Tensor) -> None:
        type(self).calls += 1
        self.losses.append(y.mean() if type(self).calls > 30 else 0.0)


# --- attributes that the step sets


@case
class CountsSteps(Habit):
    """Set at the start of the step, read later between layers."""

    steps = 0

    def output(self, x: Tensor) -> Tensor:
        self.steps += 1
        for layer in self.net:
            x = layer(x)
            if self.steps % 2:
                x = 2 * x
        return x

    def on_train_end(self) -> None:
        self.seen["steps"] = self.steps


class KnowsTheModel(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.model: list[nn.Module] = []

    def keep(self, x: Tensor) -> None:
        pass

    def factor(self) -> float:
        return 1 + 0.01 * self.model[0].steps


class Scaled(Keeps):
    scale = 1.0

    def keep(self, x: Tensor) -> None:
        pass

    def factor(self) -> float:
        return self.scale


@case
class CountsStepsForLayers(Habit):
    """Set at the start of the step, read within layers."""

    def __init__(self) -> None:
        super().__init__(KnowsTheModel)
        self.steps = 0
        for layer in self.net:
            layer.model = [self]

    def output(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.net(x)


@case
class TurnsAnAttributeOfLayers(Habit):
    """Set on layers at the start of the step, by a counter; read within."""

    parallel = True

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.steps = 0

    def output(self, x: Tensor) -> Tensor:
        self.steps += 1
        for layer in self.net:
            layer.scale = 1 + 0.01 * self.steps
        return self.net(x)


@case
class AveragesTheLoss(Habit):
    """Set at the end of the step, read at its start."""

    average = 1.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x * self.average), y)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss


@case
class SumsAtTheEnd(Habit):
    """Set and read at one place only."""

    parallel = True
    total = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.total += loss.item()
        self.last = loss.item()
        return loss * (1 + self.total)

    def on_train_end(self) -> None:
        self.seen = {"total": self.total, "last": self.last}


@case
class QueueInABuffer(Habit):
    """Read at the start of the step, written at its end, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(4, WIDTH))

    def output(self, x: Tensor) -> Tensor:
        similar = x @ self.queue.clone().T
        x = self.net(x)
        with torch.no_grad():
            self.queue[:-1] = self.queue[1:].clone()
            self.queue[-1] = x.mean(0)
        return x * similar.mean(-1, keepdim=True)


@case
class HistoryOfLosses(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scale = 1 + 0.1 * sum(self.history[-3:])
        loss = super().training_step(batch, batch_idx) * scale
        self.history.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        self.seen["history"] = self.history


# --- generators of the user's own


class Noisy(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.generator = self.make()

    make: Callable[[], Any]

    def draw(self) -> float:
        raise NotImplementedError

    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x) * (1 + self.draw())
        return x


@case
class OfTorch(Noisy):
    @staticmethod
    def make() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    def draw(self) -> float:
        return torch.rand((), generator=self.generator).item()


@case
class OfNumPy(Noisy):
    @staticmethod
    def make() -> np.random.Generator:
        return np.random.default_rng(3)

    def draw(self) -> float:
        return float(self.generator.random())


@case
class OfOldNumPy(OfNumPy):
    @staticmethod
    def make() -> np.random.RandomState:
        return np.random.RandomState(3)

    def draw(self) -> float:
        return float(self.generator.rand())


@case
class OfPython(OfNumPy):
    @staticmethod
    def make() -> random.Random:
        return random.Random(3)


@case
class InADict(OfPython):
    @staticmethod
    def make() -> dict[str, random.Random]:
        return {"noise": random.Random(3)}

    def draw(self) -> float:
        return self.generator["noise"].random()


GENERATOR = random.Random()


@case
class Global(Noisy):
    @staticmethod
    def make() -> None:
        GENERATOR.seed(3)

    def draw(self) -> float:
        return GENERATOR.random()


def noise() -> float:
    return GENERATOR.random()


@case
class GlobalByAFunction(Global):
    def draw(self) -> float:
        return noise()


@case
class InAClosure(Noisy):
    def __init__(self) -> None:
        super().__init__()
        generator = random.Random(3)
        type(self).draw = lambda self: generator.random()

    @staticmethod
    def make() -> None:
        pass


STATE = {"steps": 0}


@case
class CountsInAGlobal(Noisy):
    @staticmethod
    def make() -> None:
        STATE["steps"] = 0

    def draw(self) -> float:
        STATE["steps"] += 1
        return 0.01 * STATE["steps"]


@of_layers
class DrawsFromItsOwn(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(3), np.random.default_rng(3)]
        self.generator = random.Random(3)

    def keep(self, x: Tensor) -> None:
        self.noise = float(torch.rand((), generator=self.generators[0])) + float(self.generators[1].random())

    def factor(self) -> float:
        return 1 + self.noise + self.generator.random()

    def state(self) -> Any:
        return self.generator.random()


@case
class OneGeneratorForAllLayers(OfLayers):
    layer = DrawsFromItsOwn

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            layer.generators, layer.generator = self.net[0].generators, self.net[0].generator


@case
class AtOnePlace(OfPython):
    parallel = True

    def output(self, x: Tensor) -> Tensor:
        return self.net(x) * (1 + self.draw())


# --- changed without access to the module


@case
class AppendsByAnAlias(Habit):
    """To a list of a block's, which the code between the blocks does not ask the block for."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].history = history = []
        self.append = history.append

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        first, *others = self.net
        append = self.append
        x = first(batch[0])
        for block in others:
            append(x.mean().item())
            x = block(x)
        return F.mse_loss(x, batch[1]) * self.factor()

    def factor(self) -> float:
        history: list[float] = self.net[2].history
        return 1 + 0.01 * len(history) * history[-1]


@case
class CountsByAnAlias(Habit):
    """In a module's attributes, of which the step has got hold before."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = nn.Identity()
        self.counter.calls = 0

    def output(self, x: Tensor) -> Tensor:
        blocks, attributes = list(self.net), self.counter.__dict__
        for block in blocks:
            attributes["calls"] += 1
            x = block(x) * (1 + 0.01 * attributes["calls"])
        return x


@case
class DeletesAnAttribute(Habit):
    """Each step makes it anew where it is first needed."""

    def output(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.net):
            if not hasattr(self.net[0], "scale"):
                self.net[0].scale = 1 + x.detach().abs().mean()
            x = block(x) * self.net[0].scale
            if number == 1:
                del self.net[0].scale
        return x


# --- hooks inside layers


class Gated(nn.Module):
    """Multiplies with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.gate: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gate

    def set_gate(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.gate = args[0].mean()


class Pair(nn.Module):
    """Two submodules in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gated(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Hooked(Habit):
    def __init__(self) -> None:
        super().__init__(Pair)
        self.kept: dict[Any, Any] = {}
        for layer in self.net:
            self.hook(layer)

    def hook(self, layer: Pair) -> None:
        raise NotImplementedError


@case
class PreHookChangesInputs(Hooked):
    def hook(self, layer: Pair) -> None:
        layer.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


@case
class PreHookSetsAnAttribute(Hooked):
    def hook(self, layer: Pair) -> None:
        layer.second.register_forward_pre_hook(lambda module, args: setattr(module, "gate", args[0].mean()))


@case
class PreHookSetsAnAttributeOfItsObject(Hooked):
    def hook(self, layer: Pair) -> None:
        layer.second.register_forward_pre_hook(layer.second.set_gate)


@case
class PreHookSetsAnAttributeByItsClosure(Hooked):
    def hook(self, layer: Pair) -> None:
        layer.first.register_forward_pre_hook(lambda module, args: setattr(layer.second, "gate", args[0].mean()))


@case
class HookKeepsOutputs(Hooked):
    def hook(self, layer: Pair) -> None:
        layer.first.register_forward_hook(lambda module, args, output: self.kept.__setitem__(module, output))

    def output(self, x: Tensor) -> Tensor:
        x = self.net(x)
        return x * sum(self.kept[layer.first].mean() for layer in self.net)

    def on_train_end(self) -> None:
        self.kept.clear()


@case
class HookSetsForTheNextCall(Hooked):
    """Read before it is set: the one call's value is the next one's."""

    def hook(self, layer: Pair) -> None:
        layer.second.register_forward_hook(
            lambda module, args, output: setattr(layer.first, "gate", 1 + float(output.mean()))
        )


class HookSetsForALaterSubmodule(Hooked):
    def hook(self, layer: Pair) -> None:
        layer.first.register_forward_hook(lambda module, args, output: setattr(layer.second, "gate", output.mean()))


class HookFillsForALaterSubmodule(Hooked):
    def hook(self, layer: Pair) -> None:
        kept = layer.second.kept = {"gate": 1.0}
        layer.first.register_forward_hook(lambda module, args, output: kept.__setitem__("gate", output.mean()))
        layer.second.register_forward_pre_hook(lambda module, args: (args[0] * module.kept["gate"],))


class HookPassesAClosureOn(Hooked):
    def hook(self, layer: Pair) -> None:
        kept = {"gate": 1.0}
        layer.first.register_forward_hook(lambda module, args, output: kept.__setitem__("gate", float(output.mean())))
        layer.second.register_forward_pre_hook(lambda module, args: (args[0] * kept["gate"],))


class PreHookKeepsInputs(Hooked):
    def hook(self, layer: Pair) -> None:
        layer.second.register_forward_pre_hook(lambda module, args: self.kept.__setitem__(module, args[0]))


class PreHookCounts(Hooked):
    calls = 0

    def hook(self, layer: Pair) -> None:
        layer.second.register_forward_pre_hook(self.count)

    def count(self, module: nn.Module, args: Any) -> None:
        self.calls += 1


REFUSED = {
    HookSetsForALaterSubmodule: "hook on Gated inside it sets 'gate' of Gated, which the layer reads in the same call",
    HookFillsForALaterSubmodule: "hook on Gated inside it sets 'kept' of Gated, which the layer reads in the same call",
    HookPassesAClosureOn: "did not return the same: the values differ",
    PreHookKeepsInputs: "pre-hook on Gated inside it keeps something outside of the layer.* Put the hook on the layer",
    PreHookCounts: "pre-hook on Gated inside it keeps something outside of the layer.* Put the hook on the layer",
}


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_hooks_that_are_refused(kind: type[Habit], m: int, devices: int) -> None:
    with pytest.raises(RuntimeError, match=f"layer .*{REFUSED[kind]}"):
        trained(kind, m, devices)


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_equals_plain_lightning(kind: type[Habit], m: int, devices: int) -> None:
    assert_equal(trained(kind, m, devices), expected(kind, m))


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", [AppendsByClosure, AppendsWeightsByClosure])
def test_gradients_that_leave_by_a_closure_are_refused(kind: type[Habit], m: int, devices: int) -> None:
    with pytest.raises(RuntimeError, match=r"made inside the layer is used outside it.* Return it from the layer"):
        trained(kind, m, devices)


# --- many modules between layers


class Between(Habit):
    """With a dropout after each block, which is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.ModuleList(nn.Dropout(0.0) for _ in range(20))
        self.register_buffer("sum", torch.zeros(()))

    def output(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.net):
            self.change(number, x)
            x = self.drops[number](block(x)) * (1 + self.drops[3].p) * (1 + 0.01 * self.sum)
        return x

    def change(self, number: int, x: Tensor) -> None:
        """Comes with the second batch, so that the first one has not shown it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.late = self.global_step > 0
        return super().training_step(batch, batch_idx)


class SetsLate(Between):
    def change(self, number: int, x: Tensor) -> None:
        if self.late and number == 0:
            self.drops[3].p = float(x.mean().abs())


class SetsLateInALayer(Between):
    def change(self, number: int, x: Tensor) -> None:
        if self.late and number == 0:
            self.net[2][1].factor = 1 + float(x.mean().abs())

    def output(self, x: Tensor) -> Tensor:
        return super().output(x) * getattr(self.net[2][1], "factor", 1.0)


class TurnsLate(Between):
    """Each microbatch sets the very objects that others have set."""

    def change(self, number: int, x: Tensor) -> None:
        if self.late:
            self.drops[3].way = self.net[2][1].way = "up" if number == 0 else "down"

    def output(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.net):
            self.change(number, x)
            x = block(x)
            for module in (self.drops[3], self.net[2][1]):
                x = x * {"up": 2.0, "down": 0.5}[getattr(module, "way", "up")]
        return x


class DeletesLate(Between):
    def change(self, number: int, x: Tensor) -> None:
        if self.late:
            self.drops[3].last = x.mean()
            del self.drops[3].last


class SetsLateInTheBackward(Between):
    def change(self, number: int, x: Tensor) -> None:
        if self.late and number == 1:
            x.register_hook(lambda gradient: setattr(self.drops[4], "seen", gradient.norm()))


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", [Between, SetsLate, SetsLateInALayer, TurnsLate, DeletesLate, SetsLateInTheBackward])
def test_many_modules_between_layers(kind: type[Habit], m: int, devices: int) -> None:
    assert_equal(trained(kind, m, devices), expected(kind, m))


class WritesLate(Between):
    def change(self, number: int, x: Tensor) -> None:
        if self.late:
            vars(self.drops[3])["p"] = float(x.mean().abs())


class AddsLate(Between):
    """A sum over microbatches, which come to it in any order."""

    def change(self, number: int, x: Tensor) -> None:
        if self.late:
            self.sum += x.mean().detach().abs()


class RebindsLate(Between):
    def change(self, number: int, x: Tensor) -> None:
        if self.late:
            self.sum = self.sum + x.mean().detach().abs()


@pytest.mark.parametrize(("m", "devices"), [(2, 2), (3, 3)])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (WritesLate, r"drops\.3\.p changes in the step by way"),
        *((each, r"Late\.sum changes in the step, and") for each in (AddsLate, RebindsLate)),
    ],
)
def test_changes_between_layers_that_are_refused(kind: type[Habit], what: str, m: int, devices: int) -> None:
    with pytest.raises(RuntimeError, match=what):
        trained(kind, m, devices)


# --- what is run serially, and what is not


class Caches(nn.Linear):
    """Makes what it needs once for each length, as attention masks are made."""

    length = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mask: Tensor | None = None
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.length != x.shape[1]:
            self.length = x.shape[1]
            self.mask = torch.ones(self.length)
        self.last = x.mean().item()
        self.auxiliary = x.pow(2).mean()
        return torch.tanh(self.norm(super().forward(x))) * self.mask


class Ordinary(Habit):
    """Many habits, none of which needs a serial order."""

    def __init__(self) -> None:
        super().__init__(Caches)
        self.metric, self.other = MeanMetric(), SumMetric()
        self.losses: list[Tensor] = []
        self.steps = 0
        self.seen_rows = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        self.mask = batch[0] > 0
        loss = super().training_step(batch, batch_idx)
        loss = loss + sum(layer.auxiliary for layer in self.net) * self.mask.double().mean()
        self.metric.update(loss.detach())
        self.log("loss", loss)
        self.log("other", self.other(loss.detach()))
        self.losses.append(loss.detach())
        self.seen_rows += len(batch[0])
        self.last_loss = loss.item()
        return loss


def serial_reasons(kind: type[Habit], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reasons: list[str] = []
    run_serially = Pipeline.run_serially

    def noted(pipeline: Pipeline, reason: str) -> None:
        reasons.append(reason)
        run_serially(pipeline, reason)

    monkeypatch.setattr(Pipeline, "run_serially", noted)
    trained(kind, 3, 2)
    return reasons


@pytest.mark.parametrize(
    "kind", [Ordinary, *(kind for kind in CASES if getattr(kind, "parallel", False))], ids=lambda kind: kind.__name__
)
def test_not_serial(kind: type[Habit], monkeypatch: pytest.MonkeyPatch) -> None:
    assert serial_reasons(kind, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in CASES if getattr(kind, "parallel", False)], ids=lambda kind: kind.__name__
)
def test_no_delay_changes_a_number(kind: type[Habit]) -> None:
    for m, devices in [(2, 2), (3, 3), (6, 3)] * 5 * PATIENCE:
        assert_equal(trained(kind, m, devices), expected(kind, m))


@pytest.mark.parametrize(
    ("kind", "where"), [(CountsCalls, "net.0.calls"), (AveragesTheLoss, "AveragesTheLoss.average")]
)
def test_says_what_makes_it_serial(kind: type[Habit], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = next(found for found in CASES if found.__name__ == kind.__name__)
    assert f"microbatches go on from what others leave in {where}" in serial_reasons(kind, monkeypatch)


def test_between_batches_and_in_copies_modules_are_of_their_own_class() -> None:
    class Copies(Habit):
        def output(self, x: Tensor) -> Tensor:
            self.seen[len(self.seen)] = {type(module) for module in copy.deepcopy(self.net).modules()}
            return super().output(x)

        def on_train_batch_end(self, *_: Any) -> None:
            assert type(self) is Copies

    module = make(Copies)
    kinds = {type(part) for part in module.net.modules()}
    fit_pipeline(module, data(), 2)
    assert all(seen == kinds for seen in module.seen.values())
    assert len(module.seen) == 8


def test_a_first_batch_of_one_sample() -> None:
    """The first batch that is split shows what a batch of one microbatch could not."""
    batches = [tuple(part[:1] for part in data()[0]), *data()]
    ours, plain = make(AveragesTheLoss), make(AveragesTheLoss)
    fit_pipeline(ours, batches, 3, 2)
    optimizer = plain.configure_optimizers()
    for batch in batches:
        parts = list(zip(*(part.tensor_split(min(3, len(part))) for part in batch), strict=True))
        optimizer.zero_grad()
        for part in parts:
            (plain.training_step(part, 0) / len(parts)).backward()
        optimizer.step()
    assert ours.average == plain.average
    assert_equal(weights(ours), weights(plain))


# --- what begins only after the first batch

KEPT: dict[str, tuple[Callable[[Any], Tensor], Callable[[Any, Tensor], Any]]] = {
    "number": (lambda m: m.number, lambda m, value: setattr(m, "number", float(value))),
    "number of the class": (lambda m: m.shared, lambda m, value: setattr(m, "shared", float(value))),
    "tensor changed in place": (lambda m: m.tensor.clone(), lambda m, value: m.tensor.copy_(value)),
    "buffer changed in place": (lambda m: m.buffer.clone(), lambda m, value: m.buffer.copy_(value)),
    "buffer": (lambda m: m.buffer, lambda m, value: setattr(m, "buffer", value)),
    "buffer of none": (
        lambda m: 0.5 if m.absent is None else m.absent,
        lambda m, value: setattr(m, "absent", value),
    ),
    "list": (lambda m: m.items[0], lambda m, value: m.items.__setitem__(0, value)),
    "object": (lambda m: m.record.value, lambda m, value: setattr(m.record, "value", value)),
}


class ReadsAndWrites(L.LightningModule):
    """Reads a value before one layer, and sets it after one.

    Args:
        kept: What value; see `KEPT`.
        read, write: Before and after which layer.
        begins: From which step on it reads.
    """

    shared = 0.5

    def __init__(self, kept: str, read: int, write: int, begins: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.number = 0.5
        self.tensor = torch.tensor(0.5)
        self.register_buffer("buffer", torch.tensor(0.5))
        self.register_buffer("absent", None)
        self.items = [0.5]
        self.record = SimpleNamespace(value=0.5)
        self.get, self.put = KEPT[kept]
        self.read, self.write, self.begins = read, write, begins

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for index, layer in enumerate(self.layers):
            if index == self.read and self.trainer.global_step >= self.begins:
                x = x * (1 + self.get(self))
            x = torch.tanh(layer(x))
            if index == self.write:
                self.put(self, x.detach().mean())
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Every three of the four choices are met together; which lanes is told by the others.
READS = [
    (kept, begins, read, write, 3 if (a + b + begins) % 2 else 1)
    for (a, kept), begins, (b, (read, write)) in product(
        enumerate(KEPT), (0, 1, 2), enumerate([(0, 3), (1, 1), (2, 1), (3, 0)])
    )
]


@pytest.mark.parametrize(("kept", "begins", "read", "write", "lanes"), READS)
def test_reads_of_what_those_before_have_left(kept: str, begins: int, read: int, write: int, lanes: int) -> None:
    """Microbatches that read before the one before them has written, and buffers that are set, were not seen."""
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
    ours, plain = (ReadsAndWrites(kept, read, write, begins).double() for _ in range(2))
    fit_microbatches(plain, batches, 3)
    try:
        fit_pipeline(ours, batches, 3, 3, lanes=lanes)
    except RuntimeError as error:
        assert begins > 0 and "changes in the step, and microbatches come to it in another order" in str(error)
        return
    assert_equal(weights(ours), weights(plain))


FACTORS = [0.1 + (7 * index % 11) / 5 for index in range(200)]


class TakesFactors(ReadsAndWrites):
    """From an iterator, at several places of a step or at one."""

    def __init__(self, factors: Iterator[float], where: set[int], begins: int) -> None:
        super().__init__("number", 0, 0, 0)
        self.factors, self.where, self.begins = factors, where, begins

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for index, layer in enumerate(self.layers):
            if index in self.where and (index == 1 or self.trainer.global_step >= self.begins):
                x = x * next(self.factors)
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(("where", "begins"), [({0, 1, 3}, 0), ({1}, 0), ({1, 3}, 1)])
@pytest.mark.parametrize("kind", [iter, lambda factors: (factor for factor in factors)], ids=["list", "generator"])
def test_iterators_are_taken_from_in_order(
    kind: Callable[[list[float]], Iterator[float]], where: set[int], begins: int, lanes: int
) -> None:
    """Microbatches took items as they came."""
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
    ours, plain = (TakesFactors(kind(FACTORS), where, begins).double() for _ in range(2))
    fit_microbatches(plain, batches, 3)
    try:
        fit_pipeline(ours, batches, 3, 3, lanes=lanes)
    except RuntimeError as error:
        assert begins > 0 and "changes in the step, and microbatches come to it in another order" in str(error)
        return
    assert_equal(weights(ours), weights(plain))
    assert next(ours.factors) == next(plain.factors)
