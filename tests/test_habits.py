"""What people do in `training_step` and inside layers, besides passing tensors along: each case a small module that
trains to the same bits as in plain Lightning, or ends with an error that says what to do.

The reference of a case is plain Lightning fed the microbatches with gradient accumulation.
"""

import copy
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_alike, assert_equal, differs, fit_microbatches, fit_pipeline, result, weights
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WAYS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3)]
"""Numbers of microbatches and devices."""
WHOLE = [(1, 1), (1, 2), (1, 3)]
"""The same for batches that are not split."""
BATCHES, SIZE, WIDTH = 4, 6, 6


@pytest.fixture(autouse=True)
def in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)  # also of tensors that the cases make themselves


def data(count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SIZE, WIDTH, generator=generator), torch.randn(SIZE, WIDTH, generator=generator))
        for _ in range(count)
    ]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def block() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh())


class Habit(L.LightningModule):
    """Three blocks in a row. A case says how its `output` comes about, or its whole step."""

    exact = True
    """To the last bit; or else up to the order in which gradients are summed."""
    ways = WAYS

    def __init__(self, make_block: Callable[[], nn.Module] = block, count: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(*(make_block() for _ in range(count)))
        self.seen: dict[Any, Any] = {}

    def output(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.output(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def make(kind: Callable[[], L.LightningModule]) -> L.LightningModule:
    torch.manual_seed(7)
    return kind()


def trained(kind: Callable[[], L.LightningModule], m: int, devices: int = 1, **options: Any) -> dict:
    return result(fit_pipeline(make(kind), data(), m, devices, **options))


@cache
def expected(kind: Callable[[], L.LightningModule], m: int) -> dict:
    reference = result(fit_microbatches(make(kind), data(), m))
    assert differs(reference["weights"], weights(make(kind)))
    return reference


CASES: list[type[Habit]] = []


def case(kind: type[Habit]) -> type[Habit]:
    CASES.append(kind)
    return kind


# --- attributes set by the step and read between layers


@case
class MaskOnTheModule(Habit):
    def output(self, x: Tensor) -> Tensor:
        self.mask = (x > 0).to(x.dtype)
        for layer in self.net:
            x = layer(x) * self.mask
        return x


@case
class ListOfOutputs(Habit):
    def output(self, x: Tensor) -> Tensor:
        self.outputs: list[Tensor] = []
        for layer in self.net:
            x = layer(x)
            self.outputs.append(x)
        return torch.stack(self.outputs).mean(0)


@case
class ListThatIsCleared(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def output(self, x: Tensor) -> Tensor:
        self.outputs.clear()
        for layer in self.net:
            x = layer(x)
            self.outputs.append(x)
        return torch.stack(self.outputs).mean(0)


@case
class CountsBetweenLayers(Habit):
    calls = 0

    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            self.calls += 1
            x = layer(x) * (1 + 0.01 * self.calls)
        return x

    def on_train_end(self) -> None:
        self.seen["calls"] = self.calls


class Halved(nn.Module):
    """Shows without random numbers in which mode it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (1.0 if self.training else 0.5)


@case
class TogglesMode(Habit):
    def __init__(self) -> None:
        super().__init__(Halved)

    def output(self, x: Tensor) -> Tensor:
        self.net.eval()
        with torch.no_grad():
            target = self.net(x)
        self.net.train()
        return self.net(x + 0.1) - target


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.condition: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.condition


@case
class ConditionThroughAnAttribute(Habit):
    def __init__(self) -> None:
        super().__init__(Conditioned)
        self.encoder = linear()

    def output(self, x: Tensor) -> Tensor:
        condition = self.encoder(x)
        for layer in self.net:
            layer.condition = condition
        return self.net(x)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x) if self.hidden is None else self.hidden
        self.hidden = torch.tanh(self.linear(torch.cat([x, hidden], -1)))
        return self.hidden


@case
class CellThatKeepsItsState(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def output(self, x: Tensor) -> Tensor:
        self.cell.hidden = None
        for time in range(3):
            hidden = self.cell(x * time)
        return self.net(hidden)


class FeaturesByHooks(Habit):
    """Hooks on layers, or inside of them, fill a dict that the step reads."""

    inside = False

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, Tensor] = {}
        for number, layer in enumerate(self.net):
            module = layer[0] if self.inside else layer
            module.register_forward_hook(
                lambda module, args, output, number=number: self.features.__setitem__(number, output)
            )

    def output(self, x: Tensor) -> Tensor:
        return self.net(x) + self.features[0] * self.features[1]


@case
class FeaturesByHooksOnLayers(FeaturesByHooks):
    pass


@case
class FeaturesByHooksInsideLayers(FeaturesByHooks):
    inside = True


# --- parameters outside layers


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Weighted(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.1))


@case
class CheckpointBetweenLayers(Weighted):
    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = checkpoint(lambda x: torch.sin(x * self.weight), layer(x), use_reentrant=False)
        return x


@case
class CheckpointAroundLayers(Habit):
    def output(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for layer in self.net[1:]:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@case
class CheckpointAroundLayersAndCode(Weighted):
    """Its recompute finds what autograd saves of the code, and nothing of the layers."""

    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = checkpoint(lambda x, layer=layer: torch.sin(layer(torch.sin(x)) * self.weight), x, use_reentrant=False)
        return x


@case
class CheckpointsInOneAnother(Weighted):
    def output(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.sin(self.net[1](torch.sin(x)) * self.weight)

        def outer(x: Tensor) -> Tensor:
            return torch.tanh(checkpoint(inner, self.net[0](x) * self.weight, use_reentrant=False))

        return self.net[2](checkpoint(outer, x, use_reentrant=False))


@case
class FunctionOfActivations(Weighted):
    """A custom autograd function; the parameter enters it as part of an expression."""

    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = Multiply.apply(layer(x), self.weight * 1.5)
        return x


@case
class PenaltyOfAllWeights(Habit):
    exact = False  # each parameter is used in three places

    def output(self, x: Tensor) -> Tensor:
        penalty = sum(parameter.pow(2).sum() for parameter in self.parameters())
        return F.linear(self.net(x), self.net[0][0].weight.T, self.net[1][0].bias) + 0.01 * penalty


@case
class FunctionalCall(Habit):
    def output(self, x: Tensor) -> Tensor:
        scaled = {name: parameter * 1.5 for name, parameter in self.net.named_parameters()}
        return torch.func.functional_call(self.net, scaled, (x,))


@case
class FrozenForOneCall(Habit):
    """A discriminator trains on real data and only judges what is generated."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = block()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        made = self.net(x)
        self.critic.requires_grad_(False)
        judged = self.critic(made).mean()
        self.critic.requires_grad_(True)
        return judged + F.mse_loss(self.critic(y), y)


@case
class CopiesALayerOnce(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.teachers: list[nn.Module] = []

    def output(self, x: Tensor) -> Tensor:
        if not self.teachers:
            self.teachers.append(copy.deepcopy(self.net).requires_grad_(False))
        with torch.no_grad():
            target = self.teachers[0](x)
        return self.net(x) - target


@case
class CopiesAWeight(Habit):
    def output(self, x: Tensor) -> Tensor:
        return self.net(x) * copy.deepcopy(self.net[0][0].weight).detach().abs().mean()


# --- parameters changed by the step


class Teacher(Habit):
    """The moving average of a student, as in BYOL and MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        raise NotImplementedError

    def output(self, x: Tensor) -> Tensor:
        for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            self.follow(teacher, student)
        with torch.no_grad():
            target = self.teacher(x)
        return self.net(x) - target


@case
class TeacherWithoutGrad(Teacher):
    @torch.no_grad()
    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.mul_(0.5).add_(student, alpha=0.5)


@case
class TeacherByData(Teacher):
    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


@case
class TeacherByNewData(Teacher):
    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.data = teacher.data * 0.5 + student.data * 0.5


@case
class NormalizesByNewData(Habit):
    def output(self, x: Tensor) -> Tensor:
        self.net[1][0].weight.data = F.normalize(self.net[1][0].weight.data)
        return self.net(x)


@case
class NormalizesByCopy(Habit):
    """Prototypes, as in SwAV."""

    @torch.no_grad()
    def normalize(self) -> None:
        self.net[1][0].weight.copy_(F.normalize(self.net[1][0].weight.data.clone()))

    def output(self, x: Tensor) -> Tensor:
        self.normalize()
        return self.net(x)


@case
class ClampsWithoutGrad(Habit):
    def output(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)
        return self.net(x)


@case
class ClampsData(Habit):
    def output(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return self.net(x)


# --- arguments changed in place


@case
class InPlaceFirst(Habit):
    """Residual blocks that begin with an activation in place: what is added is the activated input."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.ReLU(inplace=True), linear()))
        self.first = linear()

    def output(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.net:
            change = layer(x)
            x = x + change
        return x


class AddsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> None:
        x.add_(self.bias)


class WithBias(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.add_bias = AddsBias()


@case
class ReturnsNothing(WithBias):
    def output(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x) * 1.0
        self.add_bias(hidden)
        return self.net[1:](hidden)


@dataclass(slots=True)
class Slots:
    hidden: Tensor
    last: Tensor | None = None


@dataclass(slots=True, frozen=True)
class FrozenSlots:
    slots: Slots


class TakesSlots(nn.Linear):
    def forward(self, given: FrozenSlots) -> FrozenSlots:
        slots = given.slots
        slots.last = slots.hidden
        slots.hidden = torch.tanh(super().forward(slots.hidden))
        return FrozenSlots(slots)


@case
class TensorsInSlots(Habit):
    def __init__(self) -> None:
        super().__init__(lambda: TakesSlots(WIDTH, WIDTH))

    def output(self, x: Tensor) -> Tensor:
        slots = Slots(x)
        given = FrozenSlots(slots)
        for layer in self.net:
            given = layer(given)
            assert given.slots is slots
        return slots.hidden + slots.last


@case
class OutArgument(WithBias):
    def output(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        self.add_bias(out)
        return self.net(x) + out


class Passes(nn.Linear):
    """Skipped, as in stochastic depth."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@case
class ReturnsItsArgument(Habit):
    """What a layer returns is its argument, and changed as such."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = Passes(WIDTH, WIDTH)

    def output(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x) * 1.0
        same = self.passes(hidden)
        same.mul_(2)
        return self.net[1:](hidden) + same


class AddsInPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(super().forward(x.clone()))
        return x


@case
class ResidualStreamInPlace(Habit):
    """Each block adds to the one tensor and returns it; the step uses it under all of its names."""

    def __init__(self) -> None:
        super().__init__(lambda: AddsInPlace(WIDTH, WIDTH))
        self.first = linear()

    def output(self, x: Tensor) -> Tensor:
        start = self.first(x)
        x = self.net[0](start)
        x += 1
        x = self.net[1](x)
        self.net[2](x)
        return x + start.square()


class DoublesLate(nn.Linear):
    late = False

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            x.mul_(2)
        return super().forward(x)


@case
class LastLayerChangesItsArgumentLate(Habit):
    """Its graph is kept: no copy for a recompute is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.last = DoublesLate(WIDTH, WIDTH)

    def output(self, x: Tensor) -> Tensor:
        hidden = self.net(x) * 1.0
        return self.last(hidden) + hidden

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.last.late = self.trainer.global_step >= 2
        return super().training_step(batch, batch_idx)


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor, out: Tensor, start: int) -> None:
        out[:, start : start + WIDTH // 2] = self.linear(x)


@case
class TwoLayersFillOneTensor(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Fills(), Fills()])

    def output(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, layer in enumerate(self.halves):
            layer(x, out, number * WIDTH // 2)
        return self.net(out)


class TwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).chunk(2, -1)


@case
class ChangesViewsOfAnOutput(Habit):
    def __init__(self) -> None:
        super().__init__(TwoHalves)

    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            value, gate = layer(x)
            value = value * 1
            value.add_(1)
            x = value * gate.sigmoid()
        return x


# --- parametrizations, and layers of other kinds


def pruned() -> nn.Module:
    return prune.l1_unstructured(linear(), "weight", 0.3)


# The old ways set plain attributes with a gradient in hooks before the forward.
OLD_STYLE: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: weight_norm(linear()),
    "spectral_norm": lambda: spectral_norm(linear()),
    "pruned": pruned,
}
PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "parametrized_weight_norm": lambda: parametrizations.weight_norm(linear()),
    "parametrized_spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
}


def built_of(make_linear: Callable[[], nn.Module], inside: bool) -> type[Habit]:
    class BuiltOf(Habit):
        def __init__(self) -> None:
            super().__init__(lambda: nn.Sequential(make_linear(), nn.Tanh()) if inside else make_linear())

    return BuiltOf


for name, make_linear in {**OLD_STYLE, **PARAMETRIZED}.items():
    for inside in (True, False):
        kind = case(built_of(make_linear, inside))
        kind.__name__ = f"{name}_{'inside' if inside else 'as'}_layers"
        if name == "spectral_norm" and not inside:
            kind.ways = WHOLE


class MovingMean(nn.Module):
    """Buffers that are written and read in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(self.linear(x)) - self.mean


@case
class BuffersThatAreWritten(Habit):
    def __init__(self) -> None:
        super().__init__(MovingMean)


@case
class BuffersOfALayerThatIsCalledTwice(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.shared = MovingMean()

    def output(self, x: Tensor) -> Tensor:
        return self.shared(self.net(self.shared(x)))


class Counts(nn.Module):
    """Keeps a list and a plain tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.sums: list[float] = []
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.sums.append(float(x.detach().sum()))
        self.calls += 1
        return torch.tanh(self.linear(x)) * (1 + 0.01 * self.calls)


@case
class CountersInLayers(Habit):
    def __init__(self) -> None:
        super().__init__(Counts)

    def on_train_end(self) -> None:
        self.seen = {number: [list(layer.sums), layer.calls] for number, layer in enumerate(self.net)}


class CountsInANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x)) * (1 + 0.01 * self.calls)


@case
class NumberInLayers(Habit):
    ways = WHOLE

    def __init__(self) -> None:
        super().__init__(CountsInANumber)

    def on_train_end(self) -> None:
        self.seen = {number: layer.calls for number, layer in enumerate(self.net)}


@pytest.mark.parametrize(
    ("kind", "m", "devices"),
    [pytest.param(kind, *way, id=f"{kind.__name__}-{way[0]}-{way[1]}") for kind in CASES for way in kind.ways],
)
def test_equals_plain_lightning(kind: type[Habit], m: int, devices: int) -> None:
    compare = assert_equal if kind.exact else partial(assert_alike, tolerance=1e-14)
    compare(trained(kind, m, devices), expected(kind, m))


@pytest.mark.parametrize("devices", [1, 2])
def test_microbatches_begin_in_order(devices: int) -> None:
    class NotesOrder(Habit):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[float] = []

        def output(self, x: Tensor) -> Tensor:
            self.order.append(float(x[0, 0]))
            return self.net(x)

    batches = data(20)
    model = make(NotesOrder)
    fit_pipeline(model, batches, 3, devices)
    assert model.order == [float(part[0, 0]) for x, _ in batches for part in x.tensor_split(3)]


# --- what is refused, with a word on what to do


class Taken(nn.Module):
    """Hands its output through something that is opaque to the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, take: Callable[[nn.Module], Tensor]) -> Tensor:
        return take(self.linear)


class ClosureOverATensor(Habit):
    def __init__(self) -> None:
        super().__init__(Taken)
        self.first = linear()

    def output(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.net:
            x = layer(lambda linear, x=x: torch.tanh(linear(x)))
        return x


class TwoViews(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = super().forward(x)
        return hidden, hidden[:, :2]


class ViewsChangedLater(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.views = TwoViews(WIDTH, WIDTH)

    def output(self, x: Tensor) -> Tensor:
        hidden, part = self.views(self.net[0](x))
        hidden.mul_(2)
        return self.net[1:](hidden) + part.sum()


class Turns(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


class ViewOfAnArgumentChangedLater(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(WIDTH, WIDTH)

    def output(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x) * 1.0
        self.turns(hidden).mul_(2)
        return self.net[1:](hidden)


class DoublesTheFirst(nn.Linear):
    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x) + part.sum()


class ArgumentWithAView(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.doubles = DoublesTheFirst(WIDTH, WIDTH)

    def output(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x) * 1.0
        return self.net[1:](self.doubles(hidden, hidden[:, :2]))


class SumsQueue(nn.Linear):
    def forward(self, queue: deque[Tensor]) -> Tensor:
        return torch.tanh(super().forward(sum(queue)))


class QueueThatChanges(Habit):
    def __init__(self) -> None:
        super().__init__(lambda: SumsQueue(WIDTH, WIDTH))

    def output(self, x: Tensor) -> Tensor:
        queue = deque([x], maxlen=2)
        for layer in self.net:
            queue.append(layer(queue))
        return queue[-1]


class InnerHook(Habit):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            layer[0].register_forward_hook(self.hook)

    @staticmethod
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        raise NotImplementedError


class InnerHookReplacesOutputs(InnerHook):
    @staticmethod
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2


class InnerHookChangesOutputs(InnerHook):
    @staticmethod
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.mul_(2)


class GradientInTheStep(Habit):
    create_graph = False

    def output(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        made = self.net(x)
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=self.create_graph)
        return made + slope.pow(2).mean()


class GradientPenalty(GradientInTheStep):
    create_graph = True


class RandomLayersInACheckpoint(Habit):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(linear(), nn.Dropout(0.5)))

    def output(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.sin(self.net(torch.sin(x))), x, use_reentrant=False)


class Borrows(nn.Module):
    """Uses another layer's weight, though no argument says so, and first in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.others: list[nn.Linear] = []

    def forward(self, x: Tensor, borrows: bool) -> Tensor:
        x = torch.tanh(self.linear(x))
        return F.linear(x, self.others[0].weight) if borrows else x


class BorrowsLater(Habit):
    def __init__(self) -> None:
        super().__init__(Borrows)
        self.net[0].others.append(self.net[2].linear)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for number, layer in enumerate(self.net):
            x = layer(x, self.trainer.global_step > 1 and number == 0)
        return F.mse_loss(x, y)


REFUSED = {
    ClosureOverATensor: "uses a tensor made outside it that is none of its arguments.* Pass it as an argument",
    ViewsChangedLater: r"share memory with one another .* changed in place after the call.*tensor\.clone\(\)",
    ViewOfAnArgumentChangedLater: r"share memory .* with its arguments .* changed in place after the call",
    ArgumentWithAView: r"changes an argument in place that shares memory with another one.* Pass a copy",
    QueueThatChanges: "uses a tensor made outside it that is none of its arguments.* Pass it as an argument",
    InnerHookReplacesOutputs: "hook on Linear inside it replaces or changes the module's output.* on the layer itself",
    InnerHookChangesOutputs: "hook on Linear inside it replaces or changes the module's output.* on the layer itself",
    GradientInTheStep: "gradients .* are asked for within training_step.* Keep the layer out of it",
    GradientPenalty: "create_graph=True .* not supported.* Keep this layer out of it",
}


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_refused(kind: type[Habit], m: int, devices: int) -> None:
    with pytest.raises(RuntimeError, match=f"layer .*{REFUSED[kind]}"):
        trained(kind, m, devices)


def test_random_layers_in_a_checkpoint_with_code_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"layer 'net\.\d': it draws .* nothing but whole layers"):
        trained(RandomLayersInACheckpoint, 2, 2)


@pytest.mark.parametrize(("m", "devices"), WAYS)
def test_a_layer_borrows_a_parameter_later(m: int, devices: int) -> None:
    assert_equal(trained(BorrowsLater, m, devices, background_step=False), expected(BorrowsLater, m))
    with pytest.raises(
        RuntimeError, match=r"layer 'net\.0': it uses the parameter 'net\.2\.linear\.weight' of another"
    ):
        trained(BorrowsLater, m, devices)


class ChangedAfterTheLayer(Habit):
    """Refused by plain Lightning, too: a sigmoid needs its output for its gradient."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(linear(), nn.Sigmoid()))

    def output(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[1](self.net[0](x))).mul_(2)


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (2, 2)])
def test_what_autograd_needs_was_changed_in_place(m: int, devices: int) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        expected(ChangedAfterTheLayer, m)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        trained(ChangedAfterTheLayer, m, devices)
    remedy, where = caught.value.__notes__
    assert "layer 'net.2'" in remedy
    assert "instead of x += y" in remedy
    assert f"microbatch 1 of {m} in batch " in where


class Lazy(Habit):
    def __init__(self) -> None:
        super().__init__(lambda: nn.LazyLinear(WIDTH))


class ChangedUnderHooks(Habit):
    """What a layer of a kept graph has saved is changed in place, under hooks of the step: there autograd does not
    look."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(linear(), nn.Sigmoid()))

    def output(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda saved: saved):
            for layer in self.net:
                x = layer(x)
                x *= 1.5
        return x


class ChangedInCheckpoint(ChangedUnderHooks):
    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = checkpoint(lambda x, layer=layer: layer(x).mul_(1.5), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("recompute", ["layer", "none"])
@pytest.mark.parametrize("kind", [ChangedUnderHooks, ChangedInCheckpoint], ids=lambda kind: kind.__name__)
def test_a_kept_graph_under_hooks_of_the_step(kind: type[Habit], recompute: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        trained(kind, 2, recompute=recompute)
    assert any("layer 'net." in note and "out of place" in note for note in caught.value.__notes__)


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Lazy has lazy layers .* Call the model once on an example"):
        trained(Lazy, 1)


def test_lazy_layers_that_were_called_once() -> None:
    def called() -> Habit:
        module = Lazy()
        module(torch.zeros(1, WIDTH))
        return module

    Lazy.forward = Lazy.output
    assert_equal(trained(called, 2, 2), expected(called, 2))


class DrawsLate(Habit):
    """Begins to draw random numbers in the third batch."""

    draw: Callable[[], Any]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        factor = float(type(self).draw()) if batch_idx == 2 else 1.0
        return super().training_step(batch, batch_idx) * factor


class DrawsLateFromPython(DrawsLate):
    draw = random.random


class DrawsLateFromNumPy(DrawsLate):
    draw = np.random.rand


class DrawsLateFromTorch(DrawsLate):
    draw = partial(torch.rand, ())


@pytest.mark.parametrize("kind", [DrawsLateFromPython, DrawsLateFromNumPy])
@pytest.mark.parametrize("devices", [1, 2])
def test_late_random_numbers_of_python_and_numpy_are_refused(kind: type[Habit], devices: int) -> None:
    with pytest.raises(RuntimeError, match=r"Python's or NumPy's .* from the first batch on, use torch's"):
        trained(kind, 2, devices)


@pytest.mark.parametrize("kind", [DrawsLateFromPython, DrawsLateFromNumPy, DrawsLateFromTorch])
def test_late_random_numbers_of_a_whole_batch(kind: type[Habit]) -> None:
    assert_equal(trained(kind, 1), expected(kind, 1))


def test_late_random_numbers_of_torch_do_not_depend_on_devices() -> None:
    first = trained(DrawsLateFromTorch, 2, 1)
    for devices in (2, 3):
        assert_equal(trained(DrawsLateFromTorch, 2, devices), first)


class DropsLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return F.dropout(x, self.rate) if self.rate else x


class LayersDrawLate(Habit):
    def __init__(self) -> None:
        super().__init__(DropsLate)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        for layer in self.net:
            layer.rate = 0.5 * (batch_idx == 2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_draw_late_are_refused(devices: int) -> None:
    with pytest.raises(RuntimeError, match=r"A layer drew random numbers .* did not draw in the first batch"):
        trained(LayersDrawLate, 2, devices)


class RunsWhileAThreadDraws(nn.Linear):
    """A thread of the user's own, say one that makes data, happens to draw while the layer runs."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
        return super().forward(x)


class ThreadDrawsLate(Habit):
    def __init__(self) -> None:
        super().__init__(lambda: RunsWhileAThreadDraws(WIDTH, WIDTH))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net[1].late = batch_idx == 2
        return super().training_step(batch, batch_idx)


def test_threads_that_draw_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"or a thread of your own .* from a torch\.Generator of its own"):
        trained(ThreadDrawsLate, 2, 2)


def test_layers_that_draw_late_in_a_whole_batch() -> None:
    assert_equal(trained(LayersDrawLate, 1), expected(LayersDrawLate, 1))
