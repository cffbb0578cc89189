"""What cannot be trained right ends with an error that names the layer (or what it is about) and the remedy.

docs/fidelity.md lists these under the same headings.
"""

import copy
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import fit_pipeline, weights
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Lit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.devices import stopwatch

DOCUMENT = Path(__file__).parents[1] / "docs" / "fidelity.md"
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Model(Lit):
    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(5))

    def output(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.output(batch).square().mean()


@dataclass(frozen=True)
class Refusal:
    kind: type[Model]
    says: str
    """What and where."""
    remedy: str
    late: bool = False
    """Whether it can only be seen after the first batch."""
    error: type[Exception] = RuntimeError
    staleness: int = 0


REFUSED: dict[str, list[Refusal]] = {}
OUT_OF_IT = r"[Kk]eep (it|the layer|this layer) out of (the pipeline|it) with RoundPipeStrategy\(layers=\.\.\.\)"


def refused(what: str, says: str, remedy: str, **more: Any) -> Callable[[type[Model]], type[Model]]:
    def add(kind: type[Model]) -> type[Model]:
        REFUSED.setdefault(what, []).append(Refusal(kind, says, remedy, **more))
        return kind

    return add


# --- derivatives


@refused("Second derivatives through layers", "layer 'blocks.4': create_graph=True", OUT_OF_IT)
class GradientPenalty(Model):
    create_graph = True

    def output(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        made = super().output(x)
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=self.create_graph)
        return made + slope


@refused("Transforms of `torch.func` around layers", "layer 'blocks.0' is called within a transform", OUT_OF_IT)
class MappedLayers(Model):
    def output(self, x: Tensor) -> Tensor:
        return torch.func.vmap(super().output)(x)


@refused("Gradients taken within `training_step`", "layer 'blocks.4': gradients .* within training_step", OUT_OF_IT)
class GradientInTheStep(GradientPenalty):
    create_graph = False


@refused("Gradients taken within `training_step`", "layer 'blocks.4': gradients .* within training_step", OUT_OF_IT)
class BackwardInTheStep(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.output(batch).mean().backward()
        return super().training_step(batch, batch_idx)


@refused("Second derivatives through layers", r"loss.backward\(create_graph=True\)", "strategy='auto'")
class BackwardWithGraph(Model):
    def backward(self, loss: Tensor) -> None:
        loss.backward(create_graph=True)


@refused(
    "A loss that is scaled after `training_step`",
    "backpropagated with a factor of 2.0, but 1.0 was expected",
    "Scale the loss within training_step",
)
class ScaledLater(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        run = optimizer_closure._backward_fn
        optimizer_closure._backward_fn = lambda loss: run(loss * 2)
        optimizer.step(closure=optimizer_closure)


# --- tensors that do not come by the arguments


@refused(
    "Tensors with a graph kept from batch to batch",
    "layer 'blocks.4': the loss of a microbatch reaches into an earlier batch or another microbatch",
    "keep such tensors detached",
)
@refused(
    "Tensors with a graph kept from batch to batch",
    "layer 'blocks.4': the loss of a microbatch reaches into an earlier batch or another microbatch",
    "keep such tensors detached",
    staleness=1,
)
class Remembers(Model):
    memory: Tensor | None = None

    def output(self, x: Tensor) -> Tensor:
        x = super().output(x if self.memory is None else x + self.memory[: len(x)])
        self.memory = x
        return x


@refused(
    "Tensors with a graph kept from batch to batch",
    "layer 'blocks.4': gradients through this layer are asked for outside of training_step",
    "keep such tensors detached",
    late=True,
)
class DifferentiatesLater(Model):
    def output(self, x: Tensor) -> Tensor:
        self.made = super().output(x)
        return self.made

    def on_train_batch_end(self, *args: Any) -> None:
        self.made.sum().backward()


class Taken(Block):
    def forward(self, take: Callable[[nn.Module], Tensor]) -> Tensor:
        return take(self.linear)


@refused("Tensors in closures", "layer 'blocks.1': .* a tensor made outside it .* none of its arguments", OUT_OF_IT)
class Closure(Model):
    block = Taken

    def output(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(lambda linear, x=x: torch.tanh(linear(x)))
        return x


class SumsQueue(Block):
    def forward(self, queue: deque[Tensor]) -> Tensor:
        return super().forward(sum(queue))


@refused(
    "Objects that cannot be looked into, and change",
    "layer 'blocks.1': .* a tensor made outside it .* none of its arguments",
    OUT_OF_IT,
)
class Queue(Model):
    block = SumsQueue

    def output(self, x: Tensor) -> Tensor:
        queue = deque([x], maxlen=2)
        for block in self.blocks:
            queue.append(block(queue))
        return queue[-1]


# --- layers that do not do the same again


class Counts(Block):
    calls = iter(range(10**9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(Counts.calls) % 7)


@refused("Layers that do not return the same again", "layer 'blocks.4': .* the values differ", OUT_OF_IT)
class HiddenCounter(Model):
    block = Counts


class Noise(Block):
    generator = np.random.default_rng()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(Noise.generator.random())


@refused("Layers that do not return the same again", "layer 'blocks.4': .* the values differ", OUT_OF_IT)
class OwnGenerator(Model):
    block = Noise


class Grows(Block):
    found: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        Grows.found.append(x.detach())
        return (super().forward(x), *Grows.found)


@refused("Layers that do not return the same again", "layer 'blocks.4': .* values came out instead of", OUT_OF_IT)
class GrowingOutputs(Model):
    block = Grows

    def output(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[0]
        return x


# --- layers that change themselves


class AddsModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        self.more.append(copy.deepcopy(self.linear))
        return super().forward(x) + self.more[-1](x)


class AddsParameter(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(WIDTH))
        return super().forward(x) * self.scale


class ReplacesParameter(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.bias = nn.Parameter(self.linear.bias.detach() * 2)
        return super().forward(x)


class RemovesModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.start is not None:
            x = self.start(x)
        self.start = None
        return super().forward(x)


class ReplacesModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear = copy.deepcopy(self.linear)
        return super().forward(x)


for forward in (AddsModule, AddsParameter, ReplacesParameter, RemovesModule, ReplacesModule):
    refused(
        "Layers that change their own structure",
        "layer 'blocks.0': the layer adds, removes or replaces modules or parameters .* in its forward",
        "Do it before fit, or " + OUT_OF_IT,
    )(type(forward.__name__, (Model,), {"block": forward}))


class Casts(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.to(torch.bfloat16)
        return super().forward(x.bfloat16()).to(x.dtype)


@refused(
    "Layers that change their own structure",
    "layer 'blocks.0': the layer changes type or shape of a parameter",
    "Do it before fit, or " + OUT_OF_IT,
)
class ChangesType(Model):
    block = Casts


@refused(
    "Modules or parameters replaced between batches",
    r"modules or parameters were replaced during training: blocks\.1",
    "Change them before fit, or call fit again",
    late=True,
)
class Replaced(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        self.blocks[1].linear = nn.Linear(WIDTH, WIDTH)


class Lazy(Model):
    block = partial(nn.LazyLinear, WIDTH)


refused("Lazy layers", "Lazy has lazy layers", "Call the model once on an example", error=MisconfigurationException)(
    Lazy
)


# --- hooks and checkpoints inside layers


class InnerHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].linear.register_forward_hook(self.hook)

    @staticmethod
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        raise NotImplementedError


INNER_HOOK = "layer 'blocks.1': a forward hook on Linear inside it replaces or changes the module's output"


@refused("Forward hooks inside a layer that replace or change outputs", INNER_HOOK, "Put the hook on the layer itself")
class Replaces(InnerHook):
    @staticmethod
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2


@refused("Forward hooks inside a layer that replace or change outputs", INNER_HOOK, "Put the hook on the layer itself")
class Changes(InnerHook):
    @staticmethod
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.mul_(2)


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


@refused(
    "Reentrant checkpoints inside a layer",
    r"layer 'blocks\.\d': the layer uses torch.utils.checkpoint with use_reentrant=True",
    "Set use_reentrant=False",
)
class ReentrantInside(Model):
    block = Reentrant

    def output(self, x: Tensor) -> Tensor:
        return super().output(x.requires_grad_())


# --- what begins only after the first batch


class From(Model):
    """Does from the third batch on what it did not do in the first."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.late = batch_idx >= 2
        return super().training_step(batch, batch_idx)


class DrawsLate(Block):
    late = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return F.dropout(x, 0.5) if self.late else x


@refused(
    "Layers that begin to draw random numbers after the first batch",
    "A layer drew random numbers on the CPU that it did not draw in the first batch",
    "let it draw from the first batch on",
    late=True,
)
class LayersDrawLate(From):
    block = DrawsLate


@refused(
    "Steps that begin to draw from Python's or NumPy's generator after the first batch",
    "Random numbers of Python's or NumPy's generator were drawn in this batch, and none in the first one",
    "Draw one in every training_step from the first batch on, use torch's",
    late=True,
)
class StepDrawsLate(From):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factor = np.random.rand() if batch_idx >= 2 else 1.0
        return super().training_step(batch, batch_idx) * factor


class WritesLate(Block):
    late = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.late:
            self.mean.add_(x.detach().mean(0))
        return x - self.mean


@refused(
    "Layers that begin to write buffers, or change arguments, after the first batch",
    r"layer 'blocks\.\d': buffers or attributes of the layer are written, which they were not in the first batch",
    "Let them be written from the first batch on, or " + OUT_OF_IT,
    late=True,
)
class BuffersWrittenLate(From):
    block = WritesLate


@refused(
    "Layers that begin to write buffers, or change arguments, after the first batch",
    r"layer 'blocks\.0': an argument was changed in place after the call, which it did not do in the first batch",
    OUT_OF_IT,
    late=True,
)
class ArgumentsChangedLate(From):
    def output(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        if self.blocks[0].late:
            x.add_(1)
        for block in self.blocks[1:]:
            y = block(y)
        return y


@refused(
    "Steps that begin to write parameters after the first batch",
    r"The step changes the parameter 'blocks\.0\.linear\.weight' itself, which it did not do in the first batch",
    "Do it from the first batch on, outside of training_step, or train with",
    late=True,
)
class ParametersWrittenLate(From):
    def output(self, x: Tensor) -> Tensor:
        if self.blocks[0].late:
            with torch.no_grad():
                self.blocks[0].linear.weight.clamp_(-0.1, 0.1)
        return super().output(x)


# --- the optimizer


@refused(
    "Optimizers with parameters that are not the module's",
    "1 parameters of the optimizer are not parameters of Strays",
    "Register them on the module",
    error=MisconfigurationException,
)
class Strays(Model):
    def configure_optimizers(self) -> Any:
        self.stray = [nn.Parameter(torch.ones(1))]
        return torch.optim.SGD([*self.parameters(), *self.stray], lr=0.1)


@refused(
    "Optimizers that evaluate the loss again, with staleness 1",
    "LBFGS evaluates the loss again at new parameters",
    r"Use RoundPipeStrategy\(staleness=0\)",
    error=MisconfigurationException,
    staleness=1,
)
class Closures(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Borrows(Block):
    def __init__(self) -> None:
        super().__init__()
        self.others: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.others[0].linear.weight) if self.others else super().forward(x)


@refused(
    "Layers that use another module's parameters past their arguments, with staleness 1",
    r"layer 'blocks\.4' uses the parameter 'blocks\.0\.linear\.weight' of another module past its arguments",
    "Pass it as an argument, or use strategy='roundpipe'",
    staleness=1,
)
class BorrowsWithStaleness(Model):
    block = Borrows

    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].others = (self.blocks[0],)


# --- the tests

CASES = [
    pytest.param(what, refusal, m, devices, id=f"{refusal.kind.__name__}-{m}-{devices}-{refusal.staleness}")
    for what, refusals in REFUSED.items()
    for refusal in refusals
    for m, devices in ((2, 2), (4, 1))
]


@pytest.fixture(autouse=True)
def all_calls_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the stage which keeps its graph, and needs no copies, is never all of the model."""
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=count().__next__))


@pytest.mark.parametrize(("what", "refusal", "m", "devices"), CASES)
def test_the_error_names_place_and_remedy(what: str, refusal: Refusal, m: int, devices: int) -> None:
    """And comes before any weight is changed, unless it cannot be known by then."""
    torch.manual_seed(1)
    module = refusal.kind()
    before = {} if refusal.kind is Lazy else weights(module)
    batches = [torch.randn(4, WIDTH) for _ in range(4)]
    with pytest.raises(refusal.error) as caught:
        fit_pipeline(module, batches, m, devices, staleness=refusal.staleness)
    assert re.search(f"{refusal.says}.*{refusal.remedy}", str(caught.value), re.DOTALL), caught.value
    if before and not refusal.late:
        for name, value in weights(module).items():
            if name in before:
                assert torch.equal(value, before[name].to(value.dtype)), name


def test_they_are_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("| what |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.strip("|").split("|")[0].strip() for line in table] == list(REFUSED)
