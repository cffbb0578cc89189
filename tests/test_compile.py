"""torch.compile by the user, and `RoundPipeStrategy(compile=...)`, against the same model uncompiled."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_alike, differs, fit, fit_microbatches, fit_pipeline, result, weights
from models import Lit, batches_of
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.pipeline.compiling import compile_settings
from lightning_roundpipe.pipeline.escapes import saving_nothing
from lightning_roundpipe.pipeline.replica import Layer, Replica, share_compiled_code

BACKEND = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


def recompilation_limit_was_hit() -> bool:
    return any("limit" in reason for reason in counters["graph_break"])


def sequences(n: int, length: int = 5) -> dict[str, Tensor]:
    return {"x": torch.randn(n, length, 8), "y": torch.randn(n, 3)}


class Block(nn.Module):
    """Attention and an MLP with names of its own, a scale, dropout, and the number of the layer."""

    def __init__(self, index: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(dropout))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.scale * self.mlp(x)


class Net(Lit):
    """Blocks between two other layers, and a step that uses a parameter of its own."""

    def __init__(self, depth: int = 4, dropout: float = 0.0, glue_dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.embed = nn.Linear(8, 8)
        self.blocks: Any = nn.Sequential(*[Block(i, dropout) for i in range(depth)])
        self.head = nn.Linear(8, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.scores: Callable[..., Tensor] = lambda x, temperature: x.tanh() * temperature
        self.glue_dropout = glue_dropout

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.embed(x), self.glue_dropout, self.training)
        return self.scores(self.head(self.blocks(x)).mean(1), self.temperature)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


# --- what the user has compiled


def blocks_in_place(model: Net) -> Any:
    for block in model.blocks:
        block.compile(**BACKEND)
    return model


def blocks_wrapped(model: Net) -> Any:
    model.blocks = nn.Sequential(*[torch.compile(block, **BACKEND) for block in model.blocks])
    return model


def container(model: Net) -> Any:
    model.blocks = torch.compile(model.blocks, fullgraph=True, **BACKEND)
    return model


def container_in_place(model: Net) -> Any:
    model.blocks.compile(fullgraph=True, **BACKEND)
    return model


def forward_of_blocks(model: Net) -> Any:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **BACKEND)
    return model


def forward_of_the_module(model: Net) -> Any:
    model.forward = torch.compile(model.forward, **BACKEND)
    return model


def whole(model: Net) -> Any:
    return torch.compile(model, **BACKEND)


def function_between_layers(model: Net) -> Any:
    model.scores = torch.compile(model.scores, **BACKEND)
    return model


def within_blocks(model: Net) -> Any:
    for block in model.blocks:
        block.qkv = torch.compile(block.qkv, **BACKEND)
        block.mlp = torch.compile(block.mlp, **BACKEND)
    return model


def within_blocks_in_place(model: Net) -> Any:
    for block in model.blocks:
        block.mlp.compile(**BACKEND)
    return model


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in weights(module).items()}


COMPILED = [
    blocks_in_place,
    blocks_wrapped,
    container,
    container_in_place,
    forward_of_blocks,
    forward_of_the_module,
    whole,
    function_between_layers,
    within_blocks,
    within_blocks_in_place,
]


@pytest.mark.parametrize("compiled", COMPILED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_the_user_has_compiled(compiled: Callable[[Net], Any], staleness: int) -> None:
    """A compiled module calls the modules that it was made of: the pipeline must run its own in their place."""
    data = batches_of(sequences, 4, 6)
    model, expected = net(), net()
    given = compiled(model)
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    fit(given, data, RoundPipeStrategy(microbatches=3, staleness=staleness), devices=2)
    if compiled is not within_blocks_in_place:  # dynamo itself leaves the modules of torch.nn as they are
        assert compilations() > 0
    assert compilations() <= 4 and not recompilation_limit_was_hit(), (
        "one for each kind, and for the first without grad"
    )
    fit_pipeline(expected, data, 3, 2, staleness=staleness)
    assert_alike(plain_weights(model), weights(expected), 1e-12)
    for name, module in model.named_modules():
        for key in ("forward", "_compiled_call_impl"):
            assert compiled is whole or module.__dict__.get(key) == attributes[name].get(key), (name, key)


def test_the_layers_of_a_compiled_model_are_found() -> None:
    model = blocks_wrapped(net())
    trainer = fit_pipeline(model, batches_of(sequences, 1, 4), 2)
    names = [layer.name for layer in trainer.strategy.report().layers]
    assert names == ["embed", *(f"blocks.{i}._orig_mod" for i in range(4)), "head"]


def test_a_compiled_container_can_be_named_as_a_layer() -> None:
    model, expected = container(net()), net()
    trainer = fit_pipeline(model, batches_of(sequences, 3, 4), 2, layers=["blocks"])
    assert [layer.name for layer in trainer.strategy.report().layers][1] == "blocks._orig_mod"
    fit_microbatches(expected, batches_of(sequences, 3, 4), 2)
    assert_alike(plain_weights(model), weights(expected), 1e-12)


def test_a_compiled_function_that_calls_layers_is_interrupted_there() -> None:
    class Calls(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.scores(self.middle(x), self.temperature)

        def middle(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.embed(x).sin()).cos()).mean(1)

    data = batches_of(sequences, 3, 6)
    torch.manual_seed(0)
    model = Calls().double()
    expected = copy.deepcopy(model)
    model.middle = torch.compile(model.middle, **BACKEND)
    fit_pipeline(model, data, 3, 2)
    fit_microbatches(expected, data, 3)
    assert_alike(weights(model), weights(expected), 1e-12)


@torch.compile(**BACKEND)
def gate(x: Tensor) -> Tensor:
    return x * x.sigmoid()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(gate(self.linear(x)))


def test_a_compiled_function_within_layers() -> None:
    data = batches_of(sequences, 3, 6) + batches_of(sequences, 2, 5)
    results = []
    for stance in ("default", "force_eager"):
        model = net()
        model.blocks = nn.Sequential(*[Gated() for _ in range(4)]).double()
        model.load_state_dict({k: torch.linspace(-1, 1, v.numel()).view_as(v) for k, v in weights(model).items()})
        with torch.compiler.set_stance(stance):
            fit_pipeline(model, data, 3, 2)
        results.append(weights(model))
    assert compilations() > 0
    assert_alike(*results, 1e-12)


# --- the option


def test_layers_of_one_kind_are_compiled_once() -> None:
    """Neither the tensors nor the number of a layer are part of the code, and forward, recompute and fused stage share
    it.
    """
    data = batches_of(sequences, 4, 6)
    model, expected = net(depth=12), net(depth=12)
    fit_pipeline(model, data, 3, 2, compile=BACKEND)
    assert compilations() == 3, "embedding, block, head"
    assert counters["frames"] == {"total": 3, "ok": 3}
    fit_microbatches(expected, data, 3)
    assert_alike(weights(model), weights(expected), 1e-12)


@pytest.mark.parametrize("devices", [1, 3])
def test_compiled_layers_draw_the_same_random_numbers(devices: int) -> None:
    """Compiling in the middle of the training, for new shapes, must not set the random generators back."""
    data = batches_of(sequences, 2, 6) + batches_of(lambda n: sequences(n, 7), 2, 7) + batches_of(sequences, 1, 5)
    compiled, eager, fixed = (net(dropout=0.2, glue_dropout=0.2), net(dropout=0.2, glue_dropout=0.2), net())
    actual = fit_pipeline(compiled, data, 3, devices, compile=BACKEND)
    assert compilations() > 3
    assert_alike(result(actual), result(fit_pipeline(eager, data, 3, devices)), 1e-12)
    fit_pipeline(fixed, data, 3, devices)
    assert differs(weights(fixed), weights(eager))


def test_new_shapes_are_compiled_while_others_run() -> None:
    data = [batch for n in (5, 9, 4, 7, 6) for batch in batches_of(lambda size, n=n: sequences(size, n), 1, 3 + n)]
    compiled, eager = net(glue_dropout=0.2), net(glue_dropout=0.2)
    actual = fit_pipeline(compiled, data, 4, 3, compile={"backend": "eager"})
    assert not recompilation_limit_was_hit()
    assert_alike(result(actual), result(fit_pipeline(eager, data, 4, 3)), 1e-12)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 2e-2), ("bf16-true", 5e-2)])
def test_precisions(precision: str, tolerance: float) -> None:
    data = batches_of(sequences, 4, 6, dtype=torch.float32)
    compiled, eager = net().float(), net().float()
    fit_pipeline(compiled, data, 3, 2, compile=BACKEND, run={"precision": precision})
    assert compilations() >= 3
    fit_pipeline(eager, data, 3, 2, run={"precision": precision})
    assert_alike(weights(compiled), weights(eager), tolerance)


def test_a_compiled_forward_keeps_nothing_for_its_backward() -> None:
    module = nn.Sequential(Block(0))
    layer = Layer(0, "0", module[0])
    share_compiled_code(module, [layer], compile_settings(BACKEND))
    replica = Replica(layer)
    replica.load(
        layer.attributes(),
        [],
        layer.parameters,
        layer.buffers(),
        merge_norm_statistics=False,
        copies={},
        code=layer.compiled,
    )
    x = torch.randn(2, 5, 8, requires_grad=True)
    with saving_nothing("the layer"):
        out = replica.forward(x)
    assert "CompiledFunction" in out.grad_fn.name()
    assert not [value for value in vars(out.grad_fn).values() if isinstance(value, Tensor)]
    with pytest.raises(RuntimeError, match="made inside the layer is used outside"):
        out.sum().backward()
    assert torch.equal(out, module(x))


class Decides(nn.Module):
    """Control flow that depends on the values: dynamo interrupts its graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sin().mean()
        return x + (self.a(x).tanh() if x.sum() > 0 else self.b(x.cos()))


class Normalizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class InPlace(nn.Module):
    """Changes its argument, writes a buffer, and returns two views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("sum", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.sum += x.detach().sum((0, 1))
        y = self.linear(x)
        y.mul_(2.0)
        return y.view(-1, 8).view_as(x) * self.sum.tanh()


@pytest.mark.parametrize("kind", [Decides, Normalizes, InPlace])
def test_layers_that_dynamo_or_the_pipeline_must_look_into(kind: Callable[[], nn.Module]) -> None:
    data = batches_of(sequences, 4, 6)
    results = []
    for options in ({}, {"compile": BACKEND}):
        model = net()
        torch.manual_seed(5)
        model.blocks = nn.Sequential(*[kind() for _ in range(4)]).double()
        results.append(result(fit_pipeline(model, data, 3, 2, **options)))
    assert_alike(*results, 1e-12)


def test_hooks_inside_compiled_layers() -> None:
    class Penalized(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.mlp.register_forward_hook(lambda module, args, out: self.outs.append(out))

        def loss(self, batch: Any) -> Tensor:
            self.outs: list[Tensor] = []
            loss = super().loss(batch)
            assert len(self.outs) == len(self.blocks)
            return loss + sum(out.square().mean() for out in self.outs)

    data = batches_of(sequences, 3, 6)
    results = []
    for options in ({}, {"compile": BACKEND}):
        torch.manual_seed(0)
        results.append(result(fit_pipeline(Penalized().double(), data, 3, 2, **options)))
    assert_alike(*results, 1e-12)


def test_what_cannot_be_compiled_runs_uncompiled() -> None:
    @torch._dynamo.register_backend(name="fails_on_gelu")
    def backend(graph: Any, inputs: Any) -> Any:
        if "gelu" in graph.code:
            raise ValueError("no gelu here")
        return graph.forward

    data = batches_of(sequences, 3, 6)
    model, eager = net(dropout=0.2), net(dropout=0.2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_pipeline(model, data, 3, 2, compile={"backend": "fails_on_gelu"})
    told = [str(warning.message) for warning in caught if "roundpipe" in str(warning.message)]
    assert len(told) == 1 and "Block (layer 'blocks.0') runs uncompiled" in told[0] and "no gelu here" in told[0]
    fit_pipeline(eager, data, 3, 2)
    assert_alike(weights(model), weights(eager), 1e-12)


def test_errors_of_a_compiled_layer_are_its_own() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 2:
                raise ValueError("too many")
            return self.linear(x)

    model = net()
    model.blocks = nn.Sequential(*[Wrong() for _ in range(3)]).double()
    with pytest.raises(ValueError, match="too many") as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_pipeline(model, batches_of(sequences, 2, 4) + batches_of(sequences, 2, 6), 2, 2, compile=BACKEND)
    assert "layer 'blocks.0'" in caught.value.__notes__[0]


@pytest.mark.parametrize("compile", [{"nonsense": 1}, {"mode": "fastest"}, "inductor", 1])
def test_wrong_values_of_the_option(compile: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        RoundPipeStrategy(compile=compile)


def test_the_option_is_data() -> None:
    options = {"backend": "inductor", "mode": "max-autotune-no-cudagraphs", "dynamic": True}
    assert RoundPipeStrategy(compile=options).compile == json.loads(json.dumps(options))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor() -> None:
    data = batches_of(sequences, 3, 6) + batches_of(sequences, 1, 5)
    model, eager = net(dropout=0.2, depth=3), net(dropout=0.2, depth=3)
    fit_pipeline(model, data, 3, 2, compile=True)
    assert compilations() >= 3
    fit_pipeline(eager, data, 3, 2)
    assert_alike(weights(model), weights(eager), 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductors_own_random_numbers_are_the_same_in_the_recompute() -> None:
    """The first batch compares each recompute with the forward; so it must be right for new shapes, too."""
    data = batches_of(sequences, 2, 6) + batches_of(lambda n: sequences(n, 7), 2, 6)
    results = []
    for devices in (1, 2):
        model = net(dropout=0.5, depth=3)
        model.blocks = torch.compile(model.blocks)
        results.append(plain_weights(fit_pipeline(model, data, 2, devices).lightning_module))
    assert_alike(*results, 1e-10)
