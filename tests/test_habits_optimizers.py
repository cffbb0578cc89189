"""Optimizers that do more than step their parameters, hooks on parameters and layers, and callbacks that average
weights: the same bits as in plain Lightning, whether the optimizer steps in the background or not.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, differs, fit_microbatches, fit_pipeline, optimizer_states, result, weights
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

WAYS = [(1, 1), (2, 2), (3, 3)]
"""Numbers of microbatches and devices."""
SIZE, WIDTH = 6, 6

Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)


def data(count: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SIZE, WIDTH, generator=generator), torch.randn(SIZE, WIDTH, generator=generator))
        for _ in range(count)
    ]


class Blocks(L.LightningModule):
    """Three blocks in a row."""

    def __init__(self, optimizer: Callable[["Blocks"], Optimizer] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.make_optimizer = optimizer or (lambda module: SGD(module.parameters(), lr=0.1, momentum=0.9))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self)


def make(kind: Callable[[], L.LightningModule]) -> L.LightningModule:
    torch.manual_seed(7)
    return kind()


def outcome(trainer: L.Trainer) -> dict[str, Any]:
    """With the attributes that optimizers keep for themselves."""
    own = [
        {name: value for name, value in vars(optimizer).items() if isinstance(value, int) and not name.startswith("_")}
        for optimizer in trainer.optimizers
    ]
    return {**result(trainer), "attributes": own}


def trained(
    kind: Callable[[], L.LightningModule], m: int, devices: int, run: dict | None = None, **options: Any
) -> dict:
    return outcome(fit_pipeline(make(kind), data(), m, devices, run=run, **options))


@cache
def expected(kind: Callable[[], L.LightningModule], m: int) -> dict:
    trainer = fit_microbatches(make(kind), data(), m)
    assert differs(weights(trainer.lightning_module), weights(make(kind)))
    return outcome(trainer)


# --- optimizers of people's own


def evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradients(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


class CountsSteps(SGD):
    """Counts in an attribute, and looks at all gradients before it steps."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        self.steps += 1
        size = sum(float(parameter.grad.norm()) for _, parameter in with_gradients(self))
        for group, parameter in with_gradients(self):
            parameter.sub_(parameter.grad, alpha=group["lr"] / (size * self.steps))
        return loss


class HoldsTheModule(Optimizer):
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        super().__init__(module.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for parameter in self.module.parameters():
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


class Lookahead(Optimizer):
    """Wraps another optimizer, and every second step goes back half of the way."""

    def __init__(self, fast: Optimizer) -> None:
        self.fast, self.steps = fast, 0
        super().__init__(fast.param_groups, fast.defaults)
        self.param_groups = fast.param_groups
        self.slow = [[parameter.detach().clone() for parameter in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.fast.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, anchor in zip(group["params"], slow, strict=True):
                    anchor.add_(parameter.detach() - anchor, alpha=0.5)
                    parameter.data.copy_(anchor)
        return loss


class DecaysItsOwnRate(torch.optim.Adam):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


class KeepsTheGradient(SGD):
    """Adds to a gradient a share of the one before, which it keeps as it is."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group, parameter in with_gradients(self):
            before = self.state[parameter].get("before", torch.zeros_like(parameter))
            parameter.sub_(group["lr"] * (parameter.grad + 0.5 * before))
            self.state[parameter]["before"] = parameter.grad
        return loss


class ScheduleFree(Optimizer):
    """Keeps counters in its groups and a second set of parameters in its state."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "weight": 0.0, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            group["weight"] += group["lr"]
            group["steps"] += 1
        for group, parameter in with_gradients(self):
            share = group["lr"] / group["weight"]
            z = self.state[parameter].setdefault("z", parameter.clone())
            parameter.lerp_(z, share).add_(parameter.grad, alpha=-group["lr"] * (1 - 0.9 * share))
            z.sub_(parameter.grad, alpha=group["lr"])
        return loss


class SlowlyScheduleFree(ScheduleFree):
    """Changes its counters long before they are handed over."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        time.sleep(0.02)
        return loss


class CountsForAll(SGD):
    """Keeps a count among the state, under a key that is no parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        of_all = self.state["all"]
        of_all["steps"] = of_all.get("steps", 0) + 1
        for group, parameter in with_gradients(self):
            parameter.sub_(parameter.grad, alpha=group["lr"] / of_all["steps"])
        return loss


class Tells(SGD):
    """Steps some parameters further than others, and finds out which."""

    def is_slow(self, parameter: nn.Parameter) -> bool:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group, parameter in with_gradients(self):
            parameter.sub_(parameter.grad, alpha=group["lr"] * (0.1 if self.is_slow(parameter) else 1))
        return loss


class TellsById(Tells):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self.slow = {id(parameter) for group in self.param_groups for parameter in group["params"][::2]}

    def is_slow(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.slow


class TellsByKey(Tells):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self.slow = {p: i % 2 == 0 for group in self.param_groups for i, p in enumerate(group["params"])}

    def is_slow(self, parameter: nn.Parameter) -> bool:
        return self.slow[parameter]


class TellsByMark(Tells):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            for parameter in group["params"][::2]:
                parameter.is_slow = True

    def is_slow(self, parameter: nn.Parameter) -> bool:
        return getattr(parameter, "is_slow", False)


class NormalizesGradients(SGD):
    """Changes gradients by what all have in common, in a part of torch's own step."""

    def _init_group(self, group: dict[str, Any], params: list, grads: list, buffers: list) -> bool:
        result = super()._init_group(group, params, grads, buffers)
        size = torch.stack([gradient.norm() for gradient in grads]).norm()
        grads[:] = [gradient / size for gradient in grads]
        return result


def adds_gradients_after_the_step(module: Blocks) -> Optimizer:
    made = SGD(module.parameters(), lr=0.1)

    @torch.no_grad()
    def add(*_: Any) -> None:
        for parameter in module.parameters():
            parameter.add_(parameter.grad, alpha=-0.1)

    made.register_step_post_hook(add)
    return made


def clamps_after_the_step(module: Blocks, optimizer: type[Optimizer] = SGD) -> Optimizer:
    made = optimizer(module.parameters(), lr=0.5)

    @torch.no_grad()
    def clamp(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)

    made.register_step_post_hook(clamp)
    return made


class Slow(SGD):
    """Takes longer than a batch, so that what reads the weights too early would show."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        time.sleep(0.02)
        super().step()
        return loss


def all_but_the_middle(module: Blocks) -> Optimizer:
    return torch.optim.AdamW([*module.net[0].parameters(), *module.net[2].parameters()], lr=0.1)


OPTIMIZERS: dict[str, Callable[[Blocks], Optimizer]] = {
    "counts steps": lambda module: CountsSteps(module.parameters(), lr=0.1),
    "holds the module": lambda module: HoldsTheModule(module.net),
    "lookahead": lambda module: Lookahead(SGD(module.parameters(), lr=0.1, momentum=0.9)),
    "decays its own rate": lambda module: DecaysItsOwnRate(module.parameters(), lr=0.1),
    "keeps the gradient": lambda module: KeepsTheGradient(module.parameters(), lr=0.1),
    "schedule-free": lambda module: ScheduleFree(module.parameters()),
    "slowly schedule-free": lambda module: SlowlyScheduleFree(module.parameters()),
    "counts for all": lambda module: CountsForAll(module.parameters(), lr=0.1),
    "tells parameters by id": lambda module: TellsById(module.parameters(), lr=0.1),
    "tells parameters by key": lambda module: TellsByKey(module.parameters(), lr=0.1),
    "tells parameters by a mark": lambda module: TellsByMark(module.parameters(), lr=0.1),
    "normalizes gradients": lambda module: NormalizesGradients(module.parameters(), lr=0.1),
    "adds gradients after the step": adds_gradients_after_the_step,
    "clamps after the step": clamps_after_the_step,
    "clamps after a slow step": partial(clamps_after_the_step, optimizer=Slow),
    "named parameters": lambda module: torch.optim.AdamW(module.named_parameters(), lr=0.1),
    "some parameters": all_but_the_middle,
    "amsgrad": lambda module: torch.optim.AdamW(module.parameters(), lr=0.1, amsgrad=True),
    "nadam": lambda module: torch.optim.NAdam(module.parameters(), lr=0.01),
    "adamax": lambda module: torch.optim.Adamax(module.parameters(), lr=0.01),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1),
    "asgd": lambda module: torch.optim.ASGD(module.parameters(), lr=0.01, t0=2),
    "rprop": lambda module: torch.optim.Rprop(module.parameters(), lr=0.01),
}
MODULES: dict[str, Callable[[], Blocks]] = {name: partial(Blocks, optimizer) for name, optimizer in OPTIMIZERS.items()}


@pytest.mark.parametrize(("m", "devices", "background_step"), [*((*way, True) for way in WAYS), (2, 2, False)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_plain_lightning(name: str, m: int, devices: int, background_step: bool) -> None:
    actual = trained(MODULES[name], m, devices, background_step=background_step)
    assert_equal(actual, expected(MODULES[name], m))


def test_the_optimizer_goes_on_counting() -> None:
    assert expected(MODULES["counts steps"], 2)["attributes"] == [{"steps": 5}]


class SkipsBatches(Blocks):
    """Nothing waits for the step that is pending when the next one is handed in."""

    def __init__(self) -> None:
        super().__init__(lambda module: SlowlyScheduleFree(module.parameters()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)


def test_counters_of_steps_without_a_loss() -> None:
    assert_equal(trained(SkipsBatches, 1, 1), expected(SkipsBatches, 1))


class HooksItsStepLate(Blocks):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.optimizers(use_pl_optimizer=False).register_step_post_hook(lambda *_: None)
        return super().training_step(batch, batch_idx)


def test_a_hook_that_comes_too_late() -> None:
    with pytest.raises(RuntimeError, match=r"hook has been registered on the step of SGD .* in configure_optimizers"):
        trained(HooksItsStepLate, 1, 1)
    assert_equal(trained(HooksItsStepLate, 1, 1, background_step=False), expected(HooksItsStepLate, 1))


# --- embeddings that change themselves, and sparse gradients


class Embeds(Blocks):
    sparse, max_norm = False, None

    def __init__(self) -> None:
        super().__init__(lambda module: SGD(module.parameters(), lr=0.1))
        self.embedding = nn.Embedding(9, WIDTH, max_norm=self.max_norm, sparse=self.sparse)

    def embedded(self, x: Tensor) -> Tensor:
        return self.embedding((x.abs().sum(1) * 9).long() % 9)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(self.embedded(x)), y)


class SparseGradients(Embeds):
    sparse = True


class SparseAndDenseGradients(SparseGradients):
    """The table is used as the head, too, without the embedding."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(F.linear(self.net(self.embedded(x)), self.embedding.weight)[:, :WIDTH], y)


class SparseOrDenseGradients(SparseGradients):
    """Sparse in some microbatches only."""

    def embedded(self, x: Tensor) -> Tensor:
        self.embedding.sparse = bool(x.sum() > 0)
        return super().embedded(x)


class BoundedNorm(Embeds):
    max_norm = 1.0


class BoundedNormTwice(BoundedNorm):
    def embedded(self, x: Tensor) -> Tensor:
        return super().embedded(x) + super().embedded(x.flip(0))


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize(
    "kind", [SparseGradients, SparseAndDenseGradients, SparseOrDenseGradients, BoundedNorm, BoundedNormTwice]
)
def test_embeddings_equal_plain_lightning(kind: type[Blocks], m: int, devices: int) -> None:
    assert_equal(trained(kind, m, devices), expected(kind, m))


# --- hooks


class ScalesGradients(Blocks):
    def __init__(self) -> None:
        super().__init__()
        for number, parameter in enumerate(self.parameters()):
            parameter.register_hook(lambda gradient, number=number: gradient * (number + 1) * 0.5)


class HooksALayersBackward(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {"calls": torch.zeros(())}
        self.net[1].register_full_backward_hook(self.halve)

    def halve(self, module: nn.Module, gradients: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
        self.seen["calls"] += 1
        return tuple(gradient * 0.5 for gradient in gradients)


class TargetsOfTheModel(Blocks):
    """Uses the weights between batches, where a step may be on its way."""

    def __init__(self) -> None:
        super().__init__(lambda module: Slow(module.parameters(), lr=0.1))

    @torch.no_grad()
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        x, y = batch
        return x, self.net(y)


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize("kind", [ScalesGradients, HooksALayersBackward, TargetsOfTheModel])
def test_hooks_equal_plain_lightning(kind: type[Blocks], m: int, devices: int) -> None:
    assert_equal(trained(kind, m, devices), expected(kind, m))


class DropsABatch(Blocks):
    """As a guard against numbers that are none."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 2:
            self.zero_grad()


class ClampsNewGradients(Blocks):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)


class ClampsBeforeBackward(Blocks):
    """The gradients of the batches before, in place."""

    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)


class DropsBeforeBackward(Blocks):
    def on_before_backward(self, loss: Tensor) -> None:
        if self.trainer.fit_loop.batch_idx == 2:
            self.zero_grad()


class DropsOneGradient(Blocks):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0][0].weight.grad = None


class TransposesAWeight(Blocks):
    def on_train_epoch_start(self) -> None:
        self.net[1][0].weight.data = self.net[1][0].weight.data.t()


@pytest.mark.parametrize("background_step", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        DropsABatch, ClampsNewGradients, ClampsBeforeBackward, DropsBeforeBackward, DropsOneGradient,
        TransposesAWeight,
    ],
)  # fmt: skip
def test_gradients_and_parameters_replaced_within_a_window(
    kind: type[Blocks], devices: int, background_step: bool
) -> None:
    run = {"accumulate_grad_batches": 3, "max_epochs": 2}
    plain, untouched = (fit_microbatches(make(which), data(7), 1, **run) for which in (kind, Blocks))
    assert differs(*(weights(trainer.lightning_module) for trainer in (plain, untouched)))
    ours = fit_pipeline(make(kind), data(7), 1, devices, run=run, background_step=background_step)
    assert_equal(weights(ours.lightning_module), weights(plain.lightning_module))
    assert_equal(optimizer_states(ours), optimizer_states(plain))


# --- averages of weights


def stochastic() -> L.Callback:
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2)


@pytest.mark.parametrize("background_step", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("average", [stochastic, WeightAveraging, partial(EMAWeightAveraging, decay=0.5)])
def test_averaged_weights_equal_plain_lightning(
    average: Callable[[], L.Callback], devices: int, background_step: bool
) -> None:
    run = {"max_epochs": 5}
    plain = fit_microbatches(make(Blocks), data(), 1, callbacks=[average()], **run)
    ours = fit_pipeline(
        make(Blocks), data(), 1, devices, run={**run, "callbacks": [average()]}, background_step=background_step
    )
    assert_equal(weights(ours.lightning_module), weights(plain.lightning_module))
    assert_equal(optimizer_states(ours), optimizer_states(plain))


class Normalized(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(WIDTH))


@pytest.mark.parametrize("background_step", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
def test_averaged_weights_with_batch_norm(devices: int, background_step: bool) -> None:
    """The epoch for the statistics ends with one more step, with the last batch's gradients."""
    run = {"max_epochs": 5}
    plain = fit_microbatches(make(Normalized), data(), 1, callbacks=[stochastic()], **run)
    ours = fit_pipeline(
        make(Normalized), data(), 1, devices, run={**run, "callbacks": [stochastic()]}, background_step=background_step
    )
    assert_equal(weights(ours.lightning_module), weights(plain.lightning_module))
    assert_equal(optimizer_states(ours), optimizer_states(plain))
