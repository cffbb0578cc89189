"""Parameters that user code reaches past the pipeline: by custom autograd functions, reentrant checkpoints, scripts, or
between batches. They train to the same bits as in plain Lightning, whatever the order of events, or end with an error
that says what to do.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    PATIENCE,
    SIMULATED,
    assert_alike,
    assert_equal,
    differs,
    fit_microbatches,
    fit_pipeline,
    result,
    trainer_for,
    weights,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.pipeline import turnstile
from lightning_roundpipe.pipeline.layers import find_layers, names_of_scripts

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

WIDTH, SIZE, BATCHES = 6, 12, 4
WAYS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 3)]
"""Numbers of microbatches and devices."""


@pytest.fixture(autouse=True)
def in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)


def data(count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SIZE, WIDTH, generator=generator), torch.randn(SIZE, WIDTH, generator=generator))
        for _ in range(count)
    ]


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Outside(L.LightningModule):
    """Three blocks and a weight of its own. A case says how its `output` comes about."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), block(), block())
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.1))

    def output(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.output(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


Kind = Callable[[], L.LightningModule]


def make(kind: Kind) -> L.LightningModule:
    torch.manual_seed(7)
    return kind()


@cache
def expected(kind: Kind, m: int, accumulate: int = 1) -> dict:
    reference = result(fit_microbatches(make(kind), data(), m, accumulate_grad_batches=accumulate))
    assert differs(reference["weights"], weights(make(kind)))
    return reference


def trained(kind: Kind, m: int, devices: int, run: dict[str, Any] | None = None, **options: Any) -> dict:
    return result(fit_pipeline(make(kind), data(), m, devices, run=run, **options))


def delay_handovers(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(turnstile, "handover_hook", lambda: time.sleep(chance.random() * 1e-3))


# --- gradients that autograd computes for the parameters themselves

PAST_US: list[type[Outside]] = []


def past_us(kind: type[Outside]) -> type[Outside]:
    PAST_US.append(kind)
    return kind


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


@past_us
class CustomFunction(Outside):
    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = Multiply.apply(layer(x), self.weight)
        return x


@past_us
class CustomFunctionOfALayersParameter(Outside):
    """The layer's gradients are complete long before the custom function's: it stands at the very beginning."""

    def output(self, x: Tensor) -> Tensor:
        return self.net(Multiply.apply(x, self.net[2][0].bias))


@past_us
class CustomFunctionWithHooks(CustomFunction):
    """A hook on a parameter sees each gradient once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.register_hook(lambda gradient: gradient * 0.5 + 0.01)


class HookOnAParameterUsedInTwoWays(CustomFunctionOfALayersParameter):
    def __init__(self) -> None:
        super().__init__()
        self.net[2][0].bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@past_us
class ReentrantBetweenLayers(Outside):
    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = checkpoint(lambda x: torch.sin(x * self.weight), layer(x), use_reentrant=True)
        return x


@past_us
class ReentrantAroundLayers(Outside):
    def output(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for layer in self.net[1:]:
            x = checkpoint(lambda x, layer=layer: layer(x) * self.weight, x, use_reentrant=True)
        return x


@past_us
class ReentrantAndNot(Outside):
    """A layer is called within a checkpoint and outside of it."""

    def output(self, x: Tensor) -> Tensor:
        x = checkpoint(self.net[1], self.net[0](x), use_reentrant=True)
        return self.net[2](self.net[1](x) * self.weight)


class Nested(Outside):
    """A checkpoint within another around layers and code, of which at least one is reentrant."""

    inner_reentrant = outer_reentrant = True

    def output(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.sin(self.net[1](torch.sin(x)) * self.weight)

        def outer(x: Tensor) -> Tensor:
            made = checkpoint(inner, self.net[0](x) * self.weight, use_reentrant=self.inner_reentrant)
            return torch.tanh(made)

        return self.net[2](checkpoint(outer, self.net[2](x), use_reentrant=self.outer_reentrant))


past_us(Nested)


@past_us
class ReentrantWithinAnother(Nested):
    outer_reentrant = False


@past_us
class AnotherWithinReentrant(Nested):
    inner_reentrant = False


@past_us
class ReentrantAndSavedElsewhere(Outside):
    """Hooks on saved tensors within a reentrant checkpoint."""

    def output(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return torch.sin(self.net[1](torch.sin(x)) * self.weight)

        return self.net[2](checkpoint(inner, self.net[0](x), use_reentrant=True))


class Unfreezes(Outside):
    """Frozen when a batch begins; whether it is when the step ends decides about its gradient."""

    frozen_again = False

    def __init__(self) -> None:
        super().__init__()
        self.weight.requires_grad_(False)

    def output(self, x: Tensor) -> Tensor:
        self.weight.requires_grad = True
        x = Multiply.apply(self.net(x), self.weight) * self.weight
        self.weight.requires_grad_(not self.frozen_again)
        return x

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@past_us
class UnfrozenByTheStep(Unfreezes):
    pass


@past_us
class UnfrozenForAWhile(Unfreezes):
    frozen_again = True


@past_us
class FrozenAcrossCalls(Outside):
    """A layer is frozen while others are called: each microbatch must find the flags that it has set."""

    def output(self, x: Tensor) -> Tensor:
        self.net[2].requires_grad_(False)
        judged = self.net[2](self.net[1](self.net[0](x)))
        self.net[2].requires_grad_(True)
        return judged + self.net[2](self.net[0](x)) * self.weight


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", PAST_US)
def test_gradients_past_the_pipeline(kind: Kind, m: int, devices: int, accumulate: int) -> None:
    run = {"accumulate_grad_batches": accumulate}
    assert_equal(trained(kind, m, devices, run), expected(kind, m, accumulate))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [CustomFunction, CustomFunctionOfALayersParameter, ReentrantAroundLayers])
def test_no_timing_loses_them(kind: Kind, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Lightning's zero_grad nor the next batch on the main thread meets them, however late the backward is."""
    references = {m: expected(kind, m, accumulate) for m in (1, 2, 3, 4)}
    for repetition in range(12 * PATIENCE):  # each pair of numbers, at least
        m, devices = 1 + repetition % 4, 1 + repetition % 3
        delay_handovers(monkeypatch, repetition)
        found = trained(kind, m, devices, {"accumulate_grad_batches": accumulate})
        assert_equal(found, references[m], f"repetition {repetition}")


@pytest.mark.parametrize("options", [{"background_step": False}, {"microbatches": 2}], ids=["in line", "background"])
def test_dot_grad_stays_clean(options: dict[str, Any]) -> None:
    """What is in `.grad` before and during fit is the user's."""
    seen = []

    class Watching(CustomFunction):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(self.weight.grad)
            return super().training_step(batch, batch_idx)

    fit_pipeline(make(Watching), data(), 2, 2, **{k: v for k, v in options.items() if k != "microbatches"})
    assert len(seen) >= 2 * BATCHES
    if "microbatches" in options:
        assert all(gradient is None for gradient in seen)


class CustomFunctionLater(Outside):
    """The custom function comes up in the third batch, for a layer that is done by then."""

    def output(self, x: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0)
        return self.net(Multiply.apply(x, self.net[2][0].bias) if self.trainer.global_step > 1 else x)


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (2, 2), (4, 3)])
def test_first_used_so_in_a_later_batch(m: int, devices: int) -> None:
    in_line = {"background_step": False}
    assert_equal(trained(CustomFunctionLater, m, devices, **in_line), expected(CustomFunctionLater, m))
    with pytest.raises(RuntimeError, match=r"'net\.2\.0\.bias' is used.*not in the first batch.*Use it so from"):
        trained(CustomFunctionLater, m, devices)


class OneStepBehind(Outside):
    """As `CustomFunction`, by torch's own functions."""

    def output(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x) * self.weight
        return x


@pytest.mark.parametrize("kind", [CustomFunction, ReentrantAroundLayers])
@pytest.mark.parametrize("m", [1, 2])
def test_refused_one_step_behind(kind: Kind, m: int) -> None:
    """But where the parameter is brought to a device for the function: then it is the old value."""
    if SIMULATED and kind is CustomFunction:
        assert_equal(trained(kind, m, 2, staleness=1), trained(OneStepBehind, m, 2, staleness=1))
        return
    with pytest.raises(RuntimeError, match=r"cannot be the value one step behind.*staleness 0"):
        trained(kind, m, 2, staleness=1)


def test_a_hook_that_cannot_see_the_sum_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"'net\.2\.0\.bias', which has a hook.*cannot see the sum"):
        trained(HookOnAParameterUsedInTwoWays, 2, 2)


class BackwardWithinTheStep(CustomFunction):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Multiply.apply(batch[0], self.weight).sum().backward()
        return super().training_step(batch, batch_idx)


def test_a_backward_within_the_step_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"backward within training_step.*manual optimization"):
        trained(BackwardWithinTheStep, 2, 2)


# --- the model used between batches, on the main thread


class Mined(torch.utils.data.IterableDataset):
    """Weights each target by what the model says about the sample at the time when it is fetched."""

    def __init__(self, model: L.LightningModule, use: Callable[[L.LightningModule, Tensor], Tensor]) -> None:
        self.model, self.use = model, use

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in data(6):
            with torch.no_grad():
                yield x, y + self.use(self.model, x)


class SlowSGD(torch.optim.SGD):
    """Takes its time: whoever doesn't wait sees the weights before or in the middle of the step."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)
        return super().step(closure)


class Plain(Outside):
    def output(self, x: Tensor) -> Tensor:
        return self.net(x) * self.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowSGD(self.parameters(), lr=0.1, momentum=0.9)


def forward_through_a_device_mode(model: Plain, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return model.net(x)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "forward": lambda model, x: model.output(x),
    "layer": lambda model, x: model.net[2](x),
    "parameter": lambda model, x: x * model.weight,
    "data": lambda model, x: x * model.net[0][0].weight.data.norm(),
    "state dict": lambda model, x: x * model.state_dict()["net.2.0.bias"],
    "vector": lambda model, x: x * nn.utils.parameters_to_vector(model.parameters()).norm(),
    "copy": lambda model, x: copy.deepcopy(model.net)(x),
    "numpy": lambda model, x: x * float(model.weight.detach().numpy().sum()),
    "mode": forward_through_a_device_mode,
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_datasets_see_all_steps_made(use: str, accumulate: int) -> None:
    def run(strategy: Any) -> dict:
        model = make(Plain)
        trainer = trainer_for(strategy, accumulate_grad_batches=accumulate)
        trainer.fit(model, torch.utils.data.DataLoader(Mined(model, USES[use]), batch_size=None))
        return result(trainer)

    strategy = RoundPipeStrategy(microbatches=1)
    assert_equal(run(strategy), run("auto"))
    assert differs(run("auto")["weights"], weights(make(Plain)))


class WithDataHooks(L.LightningDataModule):
    """Hooks of a data module run between batches, too; and what it collates."""

    def __init__(self, model: Plain, where: str) -> None:
        super().__init__()
        self.model, self.where = model, where

    @torch.no_grad()
    def look(self, where: str, batch: Any) -> Any:
        x, y = batch
        return (x, y + self.model.net(x)) if where == self.where else batch

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(
            [tuple(sample) for batch in data() for sample in zip(*batch, strict=True)],
            batch_size=SIZE,
            collate_fn=lambda samples: self.look("collate", torch.utils.data.default_collate(samples)),
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.look("before", batch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.look("transfer", batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.look("after", batch)


@pytest.mark.parametrize("where", ["collate", "before", "transfer", "after"])
def test_data_modules_see_all_steps_made(where: str) -> None:
    def run(strategy: Any) -> dict:
        model = make(Plain)
        trainer = trainer_for(strategy)
        trainer.fit(model, WithDataHooks(model, where))
        return result(trainer)

    strategy = RoundPipeStrategy(microbatches=1)
    assert_equal(run(strategy), run("auto"))
    assert strategy.report() is not None


def test_ordinary_data_does_not_wait() -> None:
    """Torch functions on other tensors settle nothing, and no mode stays on the stack."""
    settled = []
    strategy = RoundPipeStrategy(microbatches=2)

    def ordinary(model: Plain, x: Tensor) -> Tensor:
        if strategy._worker is not None:
            settled.append(strategy._worker._finished == strategy._pipeline.store.enqueued)
        _ = model.weight.shape, model.weight.requires_grad, model.device
        return torch.stack(list(x)).mul(0.1)

    model = make(Plain)
    trainer_for(strategy).fit(model, torch.utils.data.DataLoader(Mined(model, ordinary), batch_size=None))
    assert not all(settled)
    assert not _get_current_function_mode_stack()


class LeavesAModeOn(torch.utils.data.IterableDataset):
    """A generator that is within a mode of its own whenever it hands out a batch."""

    def __init__(self, model: Plain) -> None:
        self.model = model

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with torch.device("cpu"):
            for x, y in data(6):
                yield x, y + self.model.net(x).detach()


def test_modes_of_generators() -> None:
    def run(strategy: Any) -> dict:
        model = make(Plain)
        trainer = trainer_for(strategy)
        trainer.fit(model, torch.utils.data.DataLoader(LeavesAModeOn(model), batch_size=None))
        return result(trainer)

    assert_equal(run(RoundPipeStrategy(microbatches=1)), run("auto"))
    assert not _get_current_function_mode_stack()


def test_an_error_leaves_no_mode_behind() -> None:
    def fails(model: Plain, x: Tensor) -> Tensor:
        if model.trainer.global_step == 3:
            raise ValueError("no more data")
        return x

    model = make(Plain)
    with pytest.raises(ValueError, match="no more data"):
        trainer_for(RoundPipeStrategy(microbatches=2)).fit(
            model, torch.utils.data.DataLoader(Mined(model, fails), batch_size=None)
        )
    assert not _get_current_function_mode_stack()


# --- scripts: they read parameters and compute gradients past every torch function

SCRIPTED: list[type[Outside]] = []


def scripted(kind: type[Outside]) -> type[Outside]:
    SCRIPTED.append(kind)
    return kind


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale

    @torch.jit.export
    def half(self, x: Tensor) -> Tensor:
        return self.linear(x) * 0.5


class SlowOutside(Outside):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowSGD(self.parameters(), lr=0.1, momentum=0.9)


@scripted
class ScriptBetweenLayers(SlowOutside):
    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(Scaled())

    def output(self, x: Tensor) -> Tensor:
        return self.net[2](self.script.half(self.net[1](self.script(self.net[0](x)))))


@scripted
class ScriptInAContainer(SlowOutside):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), torch.jit.script(Scaled()), block())

    def output(self, x: Tensor) -> Tensor:
        return self.net(x)


class HoldsAScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(Scaled())
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.script(x))


@scripted
class ScriptInALayer(SlowOutside):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), HoldsAScript(), HoldsAScript())

    def output(self, x: Tensor) -> Tensor:
        return self.net(x)


class Squashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.squash = torch.jit.script(nn.Sequential(nn.Tanh(), nn.Softplus()))

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(self.linear(x))


class ScriptsWithoutTensors(SlowOutside):
    """They stay within their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), Squashed(), Squashed())

    def output(self, x: Tensor) -> Tensor:
        return self.net(x) * self.weight


@scripted
class ScriptWithoutGradients(SlowOutside):
    """A target by the very script that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(Scaled())

    def output(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.script(x)
        return self.script(self.net(x)) - target


@scripted
class Traced(SlowOutside):
    def __init__(self) -> None:
        super().__init__()
        self.traced = torch.jit.trace(Scaled(), torch.randn(2, WIDTH))
        self.net = nn.Sequential(block(), nn.Sequential(torch.jit.trace(block(), torch.randn(2, WIDTH)), block()))

    def output(self, x: Tensor) -> Tensor:
        return self.net(self.traced(x))


@scripted
class SharedWithAScript(SlowOutside):
    """The script and a layer are of the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(self.net[1])

    def output(self, x: Tensor) -> Tensor:
        return self.script(self.net(x))


@torch.jit.script
def scripted_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sin(x * weight)


@scripted
class ScriptedFunction(SlowOutside):
    def output(self, x: Tensor) -> Tensor:
        return self.net(scripted_product(x, self.weight))


def refused_on_devices(kind: Kind) -> AbstractContextManager[Any]:
    """A script reads its parameters where they are, which is not where its inputs are."""
    if SIMULATED and names_of_scripts(make(kind)):
        return pytest.raises(MisconfigurationException, match=r"a script \(torch.jit\) reads its parameters")
    return nullcontext()


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripts(kind: Kind, m: int, devices: int) -> None:
    with refused_on_devices(kind):
        assert_alike(trained(kind, m, devices), expected(kind, m), 1e-14)


@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripts_are_refused_one_step_behind(kind: Kind) -> None:
    with refused_on_devices(kind), pytest.raises(RuntimeError, match=r"one step behind.*staleness 0"):
        trained(kind, 2, 2, staleness=1)


class FrozenScript(SlowOutside):
    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(Scaled().requires_grad_(False))

    def output(self, x: Tensor) -> Tensor:
        return self.net(self.script(x)) * self.weight


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", [FrozenScript, ScriptsWithoutTensors])
def test_scripts_that_are_not_trained(kind: Kind, m: int, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer goes on in the background."""
    submitted = []
    submit = RoundPipeStrategy.submit_step
    monkeypatch.setattr(RoundPipeStrategy, "submit_step", lambda *args: submitted.append(submit(*args)))
    with refused_on_devices(kind):
        assert_equal(trained(kind, m, devices), expected(kind, m))
        assert len(submitted) == BATCHES


def test_what_holds_a_script_is_no_layer() -> None:
    assert list(find_layers(make(ScriptInALayer))) == ["net.0.0", "net.1.linear", "net.2.linear"]
    assert list(find_layers(make(ScriptsWithoutTensors))) == ["net.0.0", "net.1", "net.2"]


# --- parameters that the step itself writes

WRITES: list[type[Outside]] = []


def writes(kind: type[Outside]) -> type[Outside]:
    WRITES.append(kind)
    return kind


class Writes(Outside):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        raise NotImplementedError

    def output(self, x: Tensor) -> Tensor:
        h = self.net[0](x)
        self.write(h)
        return self.net[2](self.net[1](h)) * self.weight


@writes
class SetsItems(Writes):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        self.weight[0] = x.mean()
        self.net[1][0].bias[1:3] = 0.3


@writes
class OneForAll(Writes):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        torch._foreach_mul_(list(self.net[1].parameters()), 0.9)


@writes
class WritesOut(Writes):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        torch.add(self.weight, x.mean(0), out=self.weight)


@writes
class WritesADetachedView(Writes):
    def write(self, x: Tensor) -> None:
        self.weight.detach()[1:].mul_(0.9)


@writes
class WritesInOneMicrobatchOnly(Writes):
    """Which one, the data tells."""

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        if x.sum() > 0:
            self.weight.mul_(0.9)


@writes
class Renormalizes(Writes):
    def output(self, x: Tensor) -> Tensor:
        ids = (x[:, :1].abs() * 10).long() % WIDTH
        rows = F.embedding(ids[:, 0], self.net[1][0].weight, max_norm=0.5)
        return self.net(x) + rows * self.weight


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding((x[:, 0].abs() * 10).long() % 4)


@writes
class RenormalizesInALayer(Outside):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), Embeds(), block())

    def output(self, x: Tensor) -> Tensor:
        return self.net(x) * self.weight


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", WRITES)
def test_written_by_the_step(kind: Kind, m: int, devices: int) -> None:
    assert_equal(trained(kind, m, devices), expected(kind, m))


@pytest.mark.parametrize("kind", WRITES)
def test_writes_are_refused_one_step_behind(kind: Kind) -> None:
    with pytest.raises(RuntimeError, match=r"The step changes the parameter.*two values.*staleness 0"):
        trained(kind, 2, 2, staleness=1)


class WritesLater(Writes):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        if self.trainer.global_step > 1:
            self.weight[0] = 0.1


def test_written_first_in_a_later_batch() -> None:
    with pytest.raises(RuntimeError, match=r"changes the parameter 'weight' itself.*not do in the first batch"):
        trained(WritesLater, 2, 2)
    assert_equal(trained(WritesLater, 1, 2), expected(WritesLater, 1))


# --- other ways around the layers

AROUND: list[type[Outside]] = []


def around(kind: type[Outside]) -> type[Outside]:
    AROUND.append(kind)
    return kind


@around
class FunctionalCallOfItself(Outside):
    def output(self, x: Tensor) -> Tensor:
        scaled = {name: 0.9 * parameter for name, parameter in self.net.named_parameters()}
        return torch.func.functional_call(self.net, scaled, (x,)) * self.weight + self.net(x)


@around
class InnerGradient(Outside):
    """One inner step, as in MAML: on parameters of the step's own."""

    def output(self, x: Tensor) -> Tensor:
        fast = {name: parameter for name, parameter in self.net.named_parameters()}
        inner = torch.func.functional_call(self.net, {k: p * 1.0 for k, p in fast.items()}, (x,)).pow(2).mean()
        gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True, allow_unused=True)
        return self.net(x) * self.weight + 0.0 * sum(g.sum() for g in gradients if g is not None)


@around
class VectorPenalty(Outside):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        penalty = nn.utils.parameters_to_vector(self.parameters()).pow(2).sum()
        return F.mse_loss(self.net(x) * self.weight, y) + 0.01 * penalty


@around
class FlatNorms(Outside):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        norms = torch._foreach_norm(list(self.parameters()))
        return F.mse_loss(self.net(x) * self.weight, y) + 0.01 * torch.stack(norms).sum()


class Head(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear = norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class NormOutside(Outside):
    """The layer's normalized weight is used without calling the layer."""

    norm: Callable[[nn.Module], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(type(self).norm)

    def output(self, x: Tensor) -> Tensor:
        return F.linear(self.net(x), self.head.linear.weight.T) * self.weight + self.head(x)


@around
class WeightNorm(NormOutside):
    norm = staticmethod(nn.utils.parametrizations.weight_norm)


@around
class Orthogonal(NormOutside):
    norm = staticmethod(nn.utils.parametrizations.orthogonal)


@around
class SpectralNormInGlue(Outside):
    """A container's own parametrized weight, and its power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(WIDTH) + 0.1)
        nn.utils.parametrizations.spectral_norm(self, "matrix")

    def output(self, x: Tensor) -> Tensor:
        return self.net(x) @ self.matrix * self.weight


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", AROUND)
def test_around_the_layers(kind: Kind, m: int, devices: int) -> None:
    assert_alike(trained(kind, m, devices), expected(kind, m), 1e-12)


class CachedParametrization(NormOutside):
    norm = staticmethod(nn.utils.parametrizations.weight_norm)

    def output(self, x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return self.head(self.head(self.net(x))) * self.weight


class CachedInGlue(SpectralNormInGlue):
    def output(self, x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return self.net(x @ self.matrix) @ self.matrix * self.weight


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", [CachedParametrization, CachedInGlue])
def test_cached_parametrizations_are_refused(kind: Kind, m: int) -> None:
    with pytest.raises(RuntimeError, match=r"parametrize\.cached\(\).*Leave"):
        trained(kind, m, 2)


class KeepsItsGraph(Outside):
    """A tensor made of a parameter in the first batch is used in the second, where autograd would allow it."""

    def output(self, x: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = self.weight + 0.5
        return self.net(x) * self.kept


@pytest.mark.parametrize("m", [1, 2])
def test_a_graph_that_outlives_its_microbatch_is_refused(m: int) -> None:
    with pytest.raises(RuntimeError, match=r"parameter 'weight' in microbatch 1 of \d in batch 0 gets a gradient else"):
        trained(KeepsItsGraph, m, 2)


# --- gradients that the user's own code on the main thread adds


class PenaltyInBackward(Outside):
    """Of a parameter that the step does not use: its background step may be pending."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = nn.Parameter(torch.ones(3))

    def output(self, x: Tensor) -> Tensor:
        return self.net(x) * self.weight

    def penalty(self) -> Tensor:
        return 0.05 * (self.weight.pow(2).sum() + self.apart.pow(2).sum() + self.net[0][0].weight.pow(2).sum())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss + self.penalty()).backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowSGD(self.parameters(), lr=0.1, momentum=0.9)


class PenaltyInItsOwnZeroGrad(PenaltyInBackward):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class PenaltyBeforeBackward(PenaltyInBackward):
    def on_before_backward(self, loss: Tensor) -> None:
        self.penalty().backward()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class PenaltyAfterBackward(PenaltyBeforeBackward):
    def on_before_backward(self, loss: Tensor) -> None:
        pass

    def on_after_backward(self) -> None:
        self.penalty().backward()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize(
    "kind", [PenaltyInBackward, PenaltyInItsOwnZeroGrad, PenaltyBeforeBackward, PenaltyAfterBackward]
)
def test_gradients_of_the_main_thread(kind: Kind, m: int, devices: int, accumulate: int) -> None:
    """Once per batch: the reference is the whole batch."""
    found = trained(kind, m, devices, {"accumulate_grad_batches": accumulate})
    assert_alike(found, expected(kind, 1, accumulate), 1e-12)


def test_a_penalty_with_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for repetition in range(12):
        delay_handovers(monkeypatch, repetition)
        m, devices = 1 + repetition % 4, 1 + repetition % 3
        assert_alike(trained(PenaltyInBackward, m, devices), expected(PenaltyInBackward, 1), 1e-12)
