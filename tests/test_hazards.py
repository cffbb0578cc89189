"""What real models do between and inside their layers, one small model for each: trained through the pipeline and by
plain autograd, in fp64, over batches and microbatches of uneven size.
"""

import copy
import random
from collections import namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import default_dtype, fit
from models import Lit, batches_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput
from zoo.test_zoo import Watched, by_text, largest_error, moved, optimizer_state, sizes_for, train_plain

TOLERANCE = 1e-12
DEVICES, MICROBATCHES = 2, 4
WIDTH, TIME = 8, 4


def sequences(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, TIME, 6), "y": torch.randn(n, 3), "flag": torch.randint(2, (n,))}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Model(Lit):
    """Embeds, runs blocks, and averages over time. A hazard says what comes in between, or of what kind blocks are."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self.head(self.between(self.embed(batch["x"]), batch).mean(1)), batch["y"])


HAZARDS: dict[str, type[Model]] = {}


def hazard(what: str) -> Callable[[type[Model]], type[Model]]:
    def add(kind: type[Model]) -> type[Model]:
        assert what not in HAZARDS
        HAZARDS[what] = kind
        return kind

    return add


# --- arguments


class Masked(Block):
    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * positions[..., None]).masked_fill(mask[..., None], 0.5)


@hazard("integer and bool tensors besides activations")
class IntegersAndBools(Model):
    block = Masked

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        positions, mask = torch.arange(TIME).expand(len(x), -1), x.detach()[..., 0] > 0
        for block in self.blocks:
            x = block(x, positions, mask)
        return x


class Keyword(Block):
    def forward(self, *, hidden: Tensor, shift: Tensor | None = None, scale: float = 1.0) -> Tensor:
        out = self.linear(hidden) * scale
        return torch.tanh(out if shift is None else out + shift)


@hazard("tensors by keyword, with and without gradient, and left out")
class Keywords(Model):
    block = Keyword

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        start = x
        for number, block in enumerate(self.blocks):
            shifts = [{"shift": start}, {}, {"shift": batch["x"][..., :1]}, {"scale": 2.0}]
            x = block(hidden=x, **shifts[number])
        return x


class Windowed(Block):
    def forward(self, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        windows = x.reshape(-1, 2, WIDTH)  # twice as many as samples
        return (torch.tanh(self.linear(windows)) * mask).reshape(x.shape) + table


@hazard("inputs whose dimension 0 is not the batch")
class OtherDimensions(Model):
    """Position ids and masks of size 1, sequence first, windows folded into dimension 0, as many rows as samples."""

    block = Windowed

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        table = torch.linspace(-1, 1, TIME * WIDTH).view(1, TIME, WIDTH)
        x = self.blocks[0](x, table, torch.ones(1, 1, 1))
        folded = x.reshape(-1, 2, WIDTH)
        x = self.blocks[1](folded, table.view(2, 2, WIDTH)[:1], torch.ones(2, 1)).view_as(x)
        x = self.blocks[2](x.transpose(0, 1).contiguous(), torch.zeros(len(x), WIDTH), torch.ones(1)).transpose(0, 1)
        return self.blocks[3](x, table, torch.ones(()))


@dataclass
class Cache:
    """As the cache of a decoder: layers append to it and read it again."""

    keys: list[Tensor] = field(default_factory=list)
    seen: int = 0


class Caching(Block):
    def forward(self, x: Tensor, cache: Cache, notes: dict[str, Any], found: list[Tensor]) -> Tensor:
        out = torch.tanh(self.linear(x) + sum(cache.keys[-2:]))
        cache.keys.append(out * 0.5)
        cache.seen += 1
        notes.setdefault("norms", []).append(out.square().mean())
        notes["last"] = out
        found += [out * 2]
        return out * cache.seen


@hazard("a layer writes into an object that it was handed")
class WritesIntoObjects(Model):
    block = Caching

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        cache, notes, found = Cache(), {}, []
        for block in self.blocks:
            x = block(x, cache, notes, found)
        assert len(cache.keys) == cache.seen == len(notes["norms"]) == len(found) == 4
        return x + cache.keys[1] + notes["norms"][2] + notes["last"] + sum(found)


class TakesObjects(Block):
    def forward(self, given: Any, options: dict[str, Any]) -> Tensor:
        hidden = given.mean if isinstance(given, torch.distributions.Normal) else given.hidden
        spread = given.stddev if isinstance(given, torch.distributions.Normal) else 1.0
        return torch.tanh(self.linear(hidden) * spread * options["scale"] + options["deep"][0]["bias"])


@hazard("layers get objects: dict, dataclass, namespace, distribution")
class Objects(Model):
    block = TakesObjects

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        @dataclass
        class Given:
            hidden: Tensor
            name: str = "given"

        options = {"scale": 0.5, "deep": [{"bias": x.mean(1, keepdim=True)}], "none": None}
        for number, block in enumerate(self.blocks):
            wrapped = [Given(x), SimpleNamespace(hidden=x), torch.distributions.Normal(x, x.square() + 1)]
            x = block(wrapped[number % 3], options)
        return x


class TakesLists(Block):
    def forward(self, parts: list[Tensor] | tuple[Any, ...]) -> Tensor:
        first = parts[0][0] if isinstance(parts[0], tuple) else parts[0]
        return torch.tanh(self.linear(sum(parts[1:], first)))


@hazard("lists and tuples of tensors as arguments")
class Lists(Model):
    block = TakesLists

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        parts = [x]
        for number, block in enumerate(self.blocks):
            parts.append(block(parts if number % 2 else ((parts[0], None), *parts[1:])))
        return parts[-1] + parts[1]


@hazard("several inputs that need gradients")
class SeveralInputs(Model):
    class Mixed(Block):
        def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) * memory + bias)

    block = Mixed

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        memory, skip = x.sin(), x
        for block in self.blocks:
            x, skip = block(x, memory, skip), x
        return x


@hazard("kinds of arguments and shapes differ between calls and microbatches")
class Differing(Model):
    class Optional(Block):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            x = torch.tanh(self.linear(x))
            return x if mask is None else x * mask

    block = Optional

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        length = 2 + int(batch["flag"][0]) * 2  # padding cut off where there is none
        mask = None if int(batch["flag"][-1]) else batch["x"][:, :length, :1]
        x = x[:, :length]
        x = self.blocks[0](x, mask)
        x = self.blocks[0](x[:, :1], None) + self.blocks[0](x[:, 1], None)[:, None] + x  # one layer, three shapes
        for block in self.blocks[1:]:
            x = block(x, mask)
        return x


# --- what Python does


@hazard("value-dependent Python outside layers")
class BranchesOutside(Model):
    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = x * x.amax().item()
            x = x[:, : max(1, int((x[0, :, 0] > -2).sum()))]
        return x


@hazard("value-dependent Python inside a layer")
class BranchesInside(Model):
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            chosen = (flat[:, 0] > 0).nonzero().squeeze(1)
            out = self.linear(flat)
            if len(chosen):
                out = out.index_add(0, chosen, self.other(flat[chosen]))
            out[flat[:, 1] > 0] *= 1 + abs(out.detach().mean().item())
            return torch.tanh(out).view_as(x)

    block = Routed


@hazard("which layers are called, and how often, differs between microbatches")
class Dropped(Model):
    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        order = [number for number in range(4) if int(batch["x"][0, number, 0] > -0.3)]
        for number in (*order, *reversed(order[: int(batch["flag"].sum())])):
            x = self.blocks[number](x)
        return x


@hazard("one layer called several times")
class Repeated(Model):
    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for _ in range(3):
            x = self.blocks[1](self.blocks[0](x)) + self.blocks[0](-x)
        return x


scale: ContextVar[float] = ContextVar("scale", default=1.0)
current: ContextVar[list[Tensor] | None] = ContextVar("current", default=None)


@hazard("a context variable set around each layer call and read inside")
class ContextVariable(Model):
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale.get()

    block = Scaled

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for number, block in enumerate(self.blocks):
            token = scale.set(2.0 + number + len(batch["x"]))
            x = block(x)
            scale.reset(token)
        return x


@hazard("a context variable set around the layer calls, read by a hook that records outputs")
class Recorder(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.linear.register_forward_hook(self.record)

    @staticmethod
    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        found = current.get()
        assert found is not None
        found.append(output)

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        found: list[Tensor] = []
        token = current.set(found)
        x = super().between(x, batch)
        current.reset(token)
        return x + torch.stack(found).square().mean(0)


# --- outputs


Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    hidden: Tensor
    count: int
    nothing: None = None


class Structures(Block):
    number = 0

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        kinds = [
            (out, None, {"side": out * 2, "count": 3}),
            Pair(out, [x, "text"]),
            Output(out, out.shape[1]),
            BaseModelOutput(last_hidden_state=out, attentions=(out * 2, out.detach())),
        ]
        return kinds[self.number]


@hazard("outputs with None, dict, named tuple, dataclass, model output, numbers inside")
class Outputs(Model):
    block = Structures

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.number = number

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        x, nothing, more = self.blocks[0](x)
        assert nothing is None and more["count"] == 3
        pair = self.blocks[1](x + more["side"])
        assert isinstance(pair, Pair) and pair.right[1] == "text"
        out = self.blocks[2](pair.left + pair.right[0])
        assert isinstance(out, Output) and out.count == TIME and out.nothing is None
        last = self.blocks[3](out.hidden)
        assert isinstance(last, BaseModelOutput) and last.hidden_states is None
        return last.last_hidden_state + last["attentions"][0] * last[1][1]


@hazard("outputs without gradient; outputs that are, or are views of, an input")
class Views(Model):
    class Passes(Block):
        def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
            out = super().forward(x)
            return out, memory, memory.transpose(1, 2), out.argmax(-1), out[:, :2], (x[..., 0] > 0)

    block = Passes

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        memory = x.cos()
        for block in self.blocks:
            x, memory, turned, best, part, positive = block(x, memory)
            assert not best.requires_grad and not positive.requires_grad
            x = x + turned.transpose(1, 2) * part.mean() + best[..., None] * 0.01 + positive[..., None] * 0.1
        return x + memory


@hazard("the caller changes a layer's output in place")
class ChangesOutputs(Model):
    class Affine(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(x))

    block = Affine

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for block in self.blocks:
            out = block(x)
            out *= 0.5
            out[:, 0] += x[:, 1]
            x = out
        return x


@hazard("a layer changes its input in place")
class ChangesInputs(Model):
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5)
            x[:, 0].add_(1)
            return torch.tanh(self.linear(x))

    block = InPlace

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for block in self.blocks:
            x = x * 1
            x = block(x) + x  # the changed one
        return x


@hazard("training_step changes its batch in place")
class ChangesTheBatch(Model):
    """Before, between and after the layers. The microbatches are views of one batch."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        first, *_ = batch["x"].unbind(1)
        first.mul_(-1)
        batch["x"][:, 1] += 0.5
        hidden = self.blocks[0](self.embed(batch["x"]))
        batch["flag"].add_(1)
        batch["y"].mul_(2).add_(first[:, :3])
        return F.mse_loss(self.head(self.blocks[1](hidden * batch["flag"][:, None, None]).mean(1)), batch["y"])


# --- parameters


@hazard("a layer with parameters whose inputs need no gradient")
class NoGradientBelow(Model):
    """A frozen embedding, an adapter upon it, and the first layers of all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.other = nn.ModuleList([nn.Linear(6, WIDTH), nn.Linear(6, WIDTH)])

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        assert not x.requires_grad
        return super().between(x, batch) + self.other[0](batch["x"]) * self.other[1](batch["x"])


@hazard("frozen layers, wholly or partly")
class PartlyFrozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].linear.weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)


@hazard("tied parameters; one parameter in two layers, and in a layer and outside")
class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.blocks[3].linear = self.blocks[1].linear

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.linear(super().between(x, batch), self.blocks[0].linear.weight, self.blocks[1].linear.bias)


@hazard("a container's own parameter, in its forward and in training_step")
class OwnParameters(Model):
    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.full((1, 1, WIDTH), 0.3))
            self.position = nn.Parameter(torch.full((1, TIME + 1, WIDTH), 0.1))
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
            for layer in self.layers:
                x = layer(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.container, self.scale = self.Container(), nn.Parameter(torch.tensor(1.5))

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.container(super().between(x, batch)) * self.scale


@hazard("containers of layers nested in layers")
class Nested(Model):
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Block(), nn.ModuleDict({"a": Block()}), nn.Sequential(Block())])

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner[2](self.inner[1]["a"](self.inner[0](x)))

    block = Stage


@hazard("trainable parameters that get no gradient at all")
class Unused(Model):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.never = nn.Parameter(torch.ones(3)), Block()

        class Half(Block):
            def __init__(self) -> None:
                super().__init__()
                self.unused = nn.Linear(WIDTH, WIDTH)

        self.blocks.append(Half())


@hazard("a layer's parameters while it is not running; a layer whose forward is bypassed")
class Bypassed(Model):
    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        x = F.linear(self.blocks[0](x), self.blocks[1].linear.weight, self.blocks[1].linear.bias)
        weights = {name: p * 0.5 for name, p in self.blocks[2].named_parameters()}
        return self.blocks[3](torch.func.functional_call(self.blocks[2], weights, (x,)))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        penalty = sum(p.abs().sum() for p in self.blocks.parameters()) + self.head.weight.square().sum()
        return super().loss(batch) + 0.01 * penalty


@hazard("a parameter, or a view of one, passed to a layer")
class PassedParameters(Model):
    class Scaled(Block):
        def forward(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) * scale + bias)

    block = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, self.scale, bias=self.table[number])
        return x


@hazard("parametrizations: the weight is computed at attribute access")
class Parametrized(Model):
    @staticmethod
    def block() -> nn.Module:  # type: ignore[override]
        block = Block()
        parametrizations.weight_norm(block.linear)
        return block

    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.weight_norm(self.head)
        self.embed = parametrizations.orthogonal(self.embed)


@hazard("no layer container at all")
class NoContainer(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.lstm(x)[0]


# --- state


@hazard("buffers change in a training forward, in a layer and outside")
class Buffers(Model):
    class Moving(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(TIME, momentum=0.3)
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.rows = self.rows + x.detach().square().sum()
            return self.norm(super().forward(x))

    block = Moving

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.total += batch["x"].sum()
        return super().between(x, batch)


@hazard("attributes change in forward: counters, cached tensors, a tensor with graph left for later")
class Attributes(Model):
    class Leaves(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None
            self.penalty: Tensor | None = None
            self.shapes: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or len(self.table) < x.shape[1]:
                self.table = torch.linspace(0, 1, x.shape[1] * WIDTH, dtype=x.dtype).view(x.shape[1], WIDTH)
            out = torch.tanh(self.linear(x) + self.table)
            self.penalty = out.square().mean()
            self.shapes.append(len(x))
            return out

    block = Leaves

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        out = super().between(x, batch)
        return out + sum(block.penalty for block in self.blocks)

    def on_train_end(self) -> None:
        self.seen[0, "rows", 0.0] = torch.tensor([block.shapes for block in self.blocks])


@hazard("forward hooks, on layers and on modules inside them")
class Hooks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        for number, block in enumerate(self.blocks):
            for name, module in {"block": block, "linear": block.linear}.items():
                module.register_forward_hook(
                    lambda module, args, output, key=f"{name}{number}": self.found.__setitem__(key, output)
                )
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.blocks[1].register_forward_hook(lambda module, args, output: output * 3)

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        x = super().between(x, batch)
        return x + self.found["linear1"] * self.found["block2"] + self.found["linear3"]


@hazard("layers run with gradients disabled inside the step")
class Teachers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            target = x
            for block in (*self.teacher, self.blocks[0]):  # a layer that is trained, too
                target = block(target)
        assert not target.requires_grad
        with torch.inference_mode():
            weight = float(self.blocks[1](x.clone()).mean())
        return super().between(x, batch) * (1 + weight) + target


# --- autograd


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


@hazard("custom autograd functions, between layers and inside them")
class CustomFunctions(Model):
    class Reverses(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Reversal.apply(super().forward(x), 0.5)

    block = Reverses

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return Reversal.apply(super().between(x, batch), 2.0)


@hazard("backward hooks on modules, tensors and parameters")
class BackwardHooks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
        self.blocks[1].linear.weight.register_hook(lambda gradient: gradient * 0.5)
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        x = super().between(x, batch)
        x.register_hook(lambda gradient: gradient * 3)
        return x


@hazard("random numbers of the user's own, seeded by the data")
class OwnRandomNumbers(Model):
    class Noisy(Block):
        def forward(self, x: Tensor, seed: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            sign = random.Random(seed).choice([-1.0, 1.0])
            return super().forward(x) + sign * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    block = Noisy

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x, int(batch["x"][0, 0, 0] * 1e6) % 1000)
        return x


# --- the traps: what a naive pipeline got wrong


@hazard("tensors that escape by inner hooks and attributes: gradients of a router")
class Routers(Model):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.balance: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            chances = self.router(x).softmax(-1)
            best, choice = chances.max(-1, keepdim=True)
            self.balance = chances.mean((0, 1)).square().sum()
            return x + best * torch.where(choice == 0, self.experts[0](x), self.experts[1](x)).tanh()

    block = Experts

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []
        for block in self.blocks:
            block.router.register_forward_hook(lambda module, args, output: self.logits.append(output))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.logits.clear()
        loss = super().loss(batch)
        assert len(self.logits) == 4
        entropy = sum(F.softmax(each, -1).square().mean() for each in self.logits)
        return loss + 0.1 * entropy + 0.1 * sum(block.balance for block in self.blocks)


@hazard("lists of parameters, plain tensors that are no buffers, references to itself")
class Replicas(Model):
    class Odd(Block):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.weights = [self.linear.weight, self.linear.bias]
            self.table = torch.linspace(-1, 1, WIDTH)
            self.apply_linear = self.linear.forward
            self.by_name = {"linear": self.linear}

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(self.lstm(x)[0], *self.weights) + self.apply_linear(x) * self.table.to(x)
            return torch.tanh(x + self.by_name["linear"](x))

    block = Odd


@hazard("spectral norm: buffers of a parametrization that every forward writes")
class Spectral(Model):
    @staticmethod
    def block() -> nn.Module:  # type: ignore[override]
        block = Block()
        block.linear = parametrizations.spectral_norm(block.linear)
        return block


@hazard("autocast around some of the calls, and switched off inside a layer")
class Autocast(Model):
    class Full(Block):
        def forward(self, x: Tensor) -> Tensor:
            found = torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False):
                return torch.tanh(self.linear(x)) * (2.0 if found else 1.0)

    block = Full

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 0):
                x = block(x)
        return x


@hazard("checkpoints of the user's own, around layers, inside them, and between them")
class Checkpoints(Model):
    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    block = Inside

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=False)
        x = checkpoint(torch.sin, x, use_reentrant=False)
        return super().between(x, batch)


@hazard("BatchNorm on several levels, called once and twice")
class Norms(Model):
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)

    block = Normed

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TIME, affine=False)

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().between(self.norm(x), batch)


@hazard("a parameter outside a layer: positions added, a head that is the embedding's weight")
class Outside(Model):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, TIME, WIDTH))

    def between(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        x = super().between(x + self.position[:, : x.shape[1]], batch)
        return x + F.linear(F.linear(x, self.embed.weight.T), self.embed.weight) + torch.ones(TIME, 1)


# --- the tests


def made(kind: type[Model]) -> Model:
    torch.manual_seed(3)
    with default_dtype(torch.float64):
        return kind().double()


NORMALIZE = (
    "buffers change in a training forward, in a layer and outside",
    "BatchNorm on several levels, called once and twice",
)
"""What is normalized by the statistics of the microbatch, by default, too."""


@pytest.mark.parametrize("split", ["step", "auto"])
@pytest.mark.parametrize("what", HAZARDS)
def test_equals_plain_autograd(what: str, split: str) -> None:
    """Of the microbatches, and by default of the whole batch."""
    kind = HAZARDS[what]
    parts = MICROBATCHES if split == "step" or what in NORMALIZE else 1
    start, plain, ours = (made(kind) for _ in range(3))
    batches, plain_batches = (
        [batches_of(sequences, 1, size, seed=seed)[0] for seed, size in enumerate(sizes_for(start))] for _ in range(2)
    )
    plain_losses, plain_optimizer = train_plain(plain, plain_batches, parts)
    plain.on_train_end()
    strategy = Watched(microbatches=MICROBATCHES, split=split)
    trainer = fit(ours, batches, strategy, devices=DEVICES, precision="64-true")

    assert any(moved(start, plain).values()), "nothing was trained"
    states = optimizer_state(plain, plain_optimizer)
    assert largest_error(dict(ours.named_parameters()), dict(plain.named_parameters())) <= TOLERANCE
    assert largest_error(optimizer_state(ours, trainer.optimizers[0]), states) <= TOLERANCE
    assert largest_error(dict(ours.named_buffers()), dict(plain.named_buffers())) <= TOLERANCE
    if split == "step":
        assert largest_error(by_text(ours.seen), by_text(plain.seen)) <= TOLERANCE
    assert largest_error(dict(enumerate(strategy.losses)), dict(enumerate(plain_losses))) <= TOLERANCE
    for batch, plain_batch in zip(batches, plain_batches, strict=True):
        assert largest_error(batch, plain_batch) == 0
    assert split == "auto" or strategy.report().microbatches == MICROBATCHES
