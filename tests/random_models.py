"""Random training steps: what people do between and inside layers, put together at random.

A program is plain data: which layers there are, and what the step does with them. It works on a growing list of
activations, each of shape [samples, WIDTH]; a number modulo the length of the list picks one, so that every program is
valid. Programs are such that plain autograd runs them: nothing is changed in place after it was saved for backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3

# --- layers: each is a module, and the way in which a step uses it


class Part(nn.Module):
    """A layer of random models. ``use`` is what the step does with it: code between layers."""

    simple = False
    """Called with one tensor, returns one."""
    changeable = False
    """Whether its output may be changed in place: nothing has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        return [self(a)]


class Plain(Part):
    simple = changeable = True

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Residual(Part):
    simple = changeable = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


class Normed(Part):
    simple = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Two(Part):
    """Defaults, keyword tensors, strings, flags."""

    changeable = True

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, scale: Tensor | None = None, mode: str = "add", flip: bool = False
    ) -> Tensor:
        h = self.linear(x)
        if y is not None:
            h = h + y if mode == "add" else h * torch.tanh(y)
        if scale is not None:
            h = h * scale
        return x - h if flip else h + 0.5

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        match step.key % 5:
            case 0:
                return [self(a)]
            case 1:
                return [self(a, b, mode="mul")]
            case 2:
                return [self(a, y=b, flip=True)]
            case 3:
                return [self(x=a, scale=torch.tanh(b.mean()))]
            case _:
                return [self(a, a, scale=torch.tanh(b[:1]), mode="mul")]


class Pair(Part):
    """Returns a nested tuple with None, a number, a string, indices; some of it is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        return h, None, 2, "name", h.argmax(-1), (self.other(x), h > 0)

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        h, none, number, name, index, (other, mask) = self(a)
        assert none is None and name == "name" and index.dtype == torch.int64
        if step.key % 2:
            return [h * number * mask]
        return [h + index[:, None] * 0.1, other]


class Named(Part):
    """Returns a dict of dicts."""

    changeable = True

    def forward(self, x: Tensor, *, options: dict[str, Any]) -> dict[str, Any]:
        h = self.linear(x)
        if options["residual"]:
            h = h + options["inner"]["b"]
        return {"h": h, "extra": {"n": 2, "mask": x > 0}, "options": options["name"]}

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        out = self(a, options={"residual": bool(step.key % 2), "inner": {"b": b}, "name": step.names[0]})
        assert out["options"] == step.names[0] and out["extra"]["n"] == 2
        return [out["h"], torch.where(out["extra"]["mask"], out["h"], b)] if step.key % 3 else [out["h"]]


@dataclass
class Record:
    h: Tensor
    mask: Tensor | None = None
    name: str = ""
    cached: Any = field(default=None, init=False)


class TakesRecord(Part):
    """A dataclass in, which it fills, and a dataclass out."""

    def forward(self, record: Record) -> Record:
        record.cached = self.linear(record.h)
        h = torch.tanh(record.cached)
        return Record(h if record.mask is None else h * record.mask, record.mask, record.name)

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        record = Record(a, b > 0 if step.key % 2 else None, "one")
        out = self(record)
        assert out.name == "one"
        return [out.h, record.cached]


class Gathers(Part):
    """Lists and tuples of tensors in, in any number."""

    changeable = True

    def forward(self, first: list[Tensor], rest: tuple[Tensor, ...] = ()) -> Tensor:
        total = self.linear(torch.stack(first).mean(0))
        for item in rest:
            total = total + 0.5 * item
        return total

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        return [self([a, b][: 1 + step.key % 2], (b,) * (step.key % 3))]


class LooksUp(Part):
    """Indices in, no activation: a first layer."""

    changeable = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH)

    def forward(self, ids: Tensor, x: Tensor | None = None) -> Tensor:
        h = self.linear(self.table(ids))
        return h if x is None else h + x

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        return [self(step.keys) if step.key % 2 else self(step.keys, x=a)]


class Aux(Part):
    """Leaves tensors on itself, for the step to read."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        self.aux = {"loss": h.pow(2).mean(), "size": len(x)}
        self.last = h
        return h + x

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        h = self(a)
        step.late[id(self)] = lambda: self.aux["loss"]
        return [h, self.last * self.aux["size"]] if step.key % 2 else [h]


class Scaled(Part):
    """Reads a buffer."""

    simple = changeable = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale) + 1


class Counts(Part):
    """Writes a buffer, in place and by assignment, and a number."""

    simple = changeable = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.total = self.total + x.detach().sum(0)
        return self.linear(x)


class Moving(Part):
    """Writes a buffer, and computes with it: the order of the calls matters."""

    simple = changeable = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.linear(x - self.mean.clone())


class Halves(Part):
    """Changes its argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.linear(x)

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        changed = a + 0.1 * b
        return [self(changed), changed]


class Same(Part):
    """Returns its argument, which the step then changes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x.mean(0, keepdim=True))

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        given = a + 0.1 * b
        back, row = self(given)
        return [back + row, given, back]


class Views(Part):
    """Returns views of its argument and of one another."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x)
        return x.flatten(), h.t(), h[:, :1]

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        flat, turned, column = self(a)
        return [flat.view_as(a) + column, turned.t()] if step.key % 2 else [turned.t()]


class Caches(Part):
    """Appends to a list and fills a dict that it is handed."""

    def forward(self, x: Tensor, cache: list[Tensor], notes: dict[str, Any]) -> Tensor:
        h = self.linear(x)
        for earlier in cache:
            h = h + 0.5 * earlier
        cache.append(torch.tanh(h))
        notes["n"] = notes.get("n", 0) + 1
        notes["last"] = h
        return h

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        h = self(a, step.cache, step.notes)
        return [h + step.notes["n"], step.cache[-1] * step.notes["last"]]


class Given(Part):
    """Reads an attribute that the step sets before the call."""

    changeable = True

    def __init__(self) -> None:
        super().__init__()
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.tanh(self.given)

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        self.given = b
        h = self(a)
        self.given = None
        return [h]


class TakesParameter(Part):
    """Is handed a parameter of the model's, and a view of one."""

    changeable = True

    def forward(self, x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x) + bias + F.linear(x, weight)

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        return [self(a, step.model.bias, self.linear.weight.t())]


class Routes(Part):
    """Python and indexing that depend on values, within the layer."""

    changeable = True

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for expert in (x[:, 0] > 0, x[:, 0] <= 0):
            if expert.any():
                h[expert] = h[expert] + self.linear(x[expert])
            if float(h.sum()) > 1:
                break
        return h + x


class Idle(Part):
    """Holds parameters that it does not use."""

    simple = changeable = True

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.1 if float(x[0, 0]) > 0.5 else self.linear(x)


class Hooked(Part):
    """A forward hook within the layer takes out what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.linear.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen = output

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        h = self(a)
        assert self.seen is not None
        return [h, self.seen]


class Holds(Part):
    """A container: layers within a layer, and a parameter of its own that its forward uses between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Residual(), Plain()])
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.first[0](x) * self.gain
        if times != 1:
            x = self.first[1](x + self.linear(x))
        return x

    def use(self, step: "Step", a: Tensor, b: Tensor) -> list[Tensor]:
        return [self(a, step.key % 3)]


class Borrows(Part):
    """Uses a parameter of another layer past its arguments."""

    changeable = True

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Part] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for other in self.others:
            h = h + F.linear(x, other.linear.weight)
        return h


PARTS: list[type[Part]] = [
    Residual, Plain, Normed, Two, Pair, Named, TakesRecord, Gathers, LooksUp, Aux, Scaled, Counts, Moving, Halves, Same,
    Views, Caches, Given, TakesParameter, Routes, Idle, Hooked, Holds, Borrows,
]  # fmt: skip

# --- programs


@dataclass(frozen=True)
class Layer:
    """A layer of a program: its kind, what of it is frozen, and whether its weight is the one of the layer before."""

    kind: type[Part]
    frozen: str = ""
    tied: bool = False

    def __repr__(self) -> str:
        return f"Layer({self.kind.__name__}, {self.frozen!r}, {self.tied})"


@dataclass(frozen=True)
class Test:
    """A number 0, 1 or 2 that tells microbatches apart, by their data or by an activation."""

    by: str
    salt: int

    __test__ = False  # no class of tests


@dataclass(frozen=True)
class Call:
    """Uses a layer; ``after`` changes its output in place."""

    layer: int
    a: int
    b: int
    how: str = ""
    after: str = ""


@dataclass(frozen=True)
class Glue:
    """Computes without a layer."""

    kind: str
    a: int
    b: int


@dataclass(frozen=True)
class If:
    test: Test
    then: tuple[Any, ...]
    otherwise: tuple[Any, ...]


@dataclass(frozen=True)
class Repeat:
    test: Test
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Reorder:
    """Runs its parts in an order that depends on the microbatch."""

    test: Test
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    layers: tuple[Layer, ...]
    body: tuple[Any, ...]
    loss: str = "mean"
    skips: bool = False
    """Whether some microbatches have no loss."""


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 3 * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 3 * gradient * weight, (3 * gradient * x).sum(0)


class Step:
    """One run of a program for one microbatch."""

    def __init__(self, model: "RandomModel", batch: dict[str, Any]) -> None:
        self.model = model
        self.values: list[Tensor] = [batch["x"]]
        self.keys: Tensor = batch["key"]
        self.key = int(self.keys[0])
        self.names: list[str] = batch["name"]
        self.terms: list[Tensor] = []
        self.cache: list[Tensor] = []
        self.notes: dict[str, Any] = {}
        self.late: dict[int, Callable[[], Tensor]] = {}
        """What the layers have left on themselves, to be read at the end of the step."""

    def run(self, body: tuple[Any, ...]) -> None:
        for item in body:
            match item:
                case Call():
                    self.call(item)
                case Glue():
                    self.values.append(self.glue(item))
                case If():
                    self.run(item.then if self.answer(item.test) else item.otherwise)
                case Repeat():
                    for _ in range(self.answer(item.test)):
                        self.run(item.body)
                case Reorder():
                    turn = self.answer(item.test) % len(item.parts)
                    self.run(item.parts[turn:] + item.parts[:turn])

    def answer(self, test: Test) -> int:
        if test.by == "data":
            return (self.key * 5 + test.salt) % 3
        return int(float(self.values[-1].detach().sum()) * 7 + test.salt) % 3

    def value(self, number: int) -> Tensor:
        return self.values[number % len(self.values)]

    def call(self, item: Call) -> None:
        part: Any = self.model.parts[item.layer % len(self.model.parts)]
        a, b = self.value(item.a), self.value(item.b)
        if item.how == "no_grad":
            with torch.no_grad():
                made = part.use(self, a, b)
        elif item.how == "checkpoint" and part.simple and not list(part.buffers()):
            made = [checkpoint(part, a, use_reentrant=False)]
        elif item.how == "plain arguments":
            made = part.use(self, a.detach(), b.detach())
        else:
            made = part.use(self, a, b)
        if part.changeable and len(made) == 1 and item.how != "checkpoint":
            if item.after == "add":
                made[0] += b
            elif item.after == "scale":
                made[0].mul_(0.5)
            elif item.after == "view":
                made[0][:, :1].mul_(0.5)
        self.values += made

    def glue(self, item: Glue) -> Tensor:
        model, a, b = self.model, self.value(item.a), self.value(item.b)
        match item.kind:
            case "add":
                return 0.5 * (a + b)
            case "mul":
                return a * torch.tanh(b)
            case "detach":
                return a.detach() * 0.9
            case "bias":
                return a + model.bias
            case "gain":
                return a * model.gain
            case "weight":
                return torch.tanh(F.linear(a, model.parts[item.b % len(model.parts)].linear.weight))
            case "function":
                return Triple.apply(torch.tanh(a), model.gain)
            case "change":
                changed = a + 0.0
                changed[:, 0] = b[:, 1]
                changed += 0.1
                return changed
            case "count":
                model.count += 1
                return a * (1 + 0.01 * model.count)
            case "sum":
                with torch.no_grad():
                    model.total += a.mean(0)
                return a + 0.01 * model.total.clone()
            case "mean":
                return a - a.mean(0, keepdim=True)
            case _:
                return a * float(b.detach().mean())


class RandomModel(L.LightningModule):
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
        self.parts = nn.ModuleList([layer.kind() for layer in program.layers])
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.8))
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.count = 0
        before: Any = None
        for layer, part in zip(program.layers, self.parts, strict=True):
            if layer.tied and before is not None:
                part.linear.weight = before.linear.weight
            if isinstance(part, Borrows) and before is not None:
                part.others.append(before)
            before = part
        for layer, part in zip(program.layers, self.parts, strict=True):
            freeze(part, layer.frozen)
        self.double()

    def loss(self, batch: dict[str, Any]) -> Tensor | None:
        step = Step(self, batch)
        if self.program.skips and step.key % 4 == 0:
            return None
        step.run(self.program.body)
        error = (step.values[-1] - batch["y"]).pow(2)
        loss = error.mean() if self.program.loss == "mean" else 0.1 * error.sum()
        for late in step.late.values():
            loss = loss + 0.1 * late()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        return self.loss(batch)


class Waits(RandomModel):
    """Overrides the backward, so that the pipeline's waits for it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


def freeze(part: nn.Module, what: str) -> None:
    """Freezes all of a layer, only its weight, or nothing."""
    if what == "all":
        part.requires_grad_(False)
    elif what == "weight":
        part.linear.weight.requires_grad_(False)


# --- hypothesis draws them

NUMBERS = st.integers(0, 30)
TESTS = st.builds(Test, st.sampled_from(["data", "value"]), st.integers(0, 2))
CALLS = st.builds(
    Call,
    st.integers(0, 5),
    NUMBERS,
    NUMBERS,
    st.sampled_from(["", "", "", "", "no_grad", "checkpoint", "plain arguments"]),
    st.sampled_from(["", "", "add", "scale", "view"]),
)
GLUE = st.builds(
    Glue,
    st.sampled_from(
        ["add", "mul", "detach", "bias", "gain", "weight", "function", "change", "mean", "number", "count", "sum"]
    ),
    NUMBERS,
    NUMBERS,
)


def bodies(depth: int, longest: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Statements, nested up to a depth."""
    items = [CALLS, CALLS, CALLS, GLUE]
    if depth:
        inner = bodies(depth - 1, 3)
        items += [
            st.builds(If, TESTS, inner, inner),
            st.builds(Repeat, TESTS, inner),
            st.builds(Reorder, TESTS, inner.filter(bool)),
        ]
    return st.lists(st.one_of(items), max_size=longest).map(tuple)


def programs(kinds: list[type[Part]] = PARTS) -> st.SearchStrategy[Program]:
    layers = st.builds(
        Layer,
        st.sampled_from(kinds),
        st.sampled_from(["", "", "", "", "all", "weight"]),
        st.sampled_from([False, False, False, True]),
    )
    return st.builds(
        Program,
        st.lists(layers, min_size=1, max_size=6).map(tuple),
        st.tuples(CALLS, bodies(2, 7)).map(lambda parts: (parts[0], *parts[1])),
        st.sampled_from(["mean", "sum"]),
        st.sampled_from([False, False, False, True]),
    )
