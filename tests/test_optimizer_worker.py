"""The background worker by itself: what it steps, in what order, and what it hands back."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.turnstile import Cancelled, Monitor
from lightning_roundpipe.state.gradients import Gradients
from lightning_roundpipe.state.optimizer import (
    OptimizerWorker,
    StepJob,
    holds_parameters_elsewhere,
    needs_closure,
    steps_by_parameter,
)
from lightning_roundpipe.state.parameters import ParameterStore

SECONDS = 10
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


class Bench:
    """A chain of layers, their gradients, and a worker."""

    in_half_precision = False

    def __init__(self, optimizer: Callable[..., Optimizer]) -> None:
        self.root = chain()
        layers = [Layer(i, str(i), layer) for i, layer in enumerate(self.root)]
        self.monitor = Monitor()
        self.store = ParameterStore(self.root, layers, self.monitor, staleness=0)
        self.gradients = Gradients(self.store, self.monitor)
        self.worker = OptimizerWorker(self.store, self.gradients, self.monitor, self.store.units, 1)
        self.optimizer = optimizer(self.root.parameters())

    def submit(self, gradients: list[Tensor | None], before: Any = None, after: Any = None) -> None:
        batch = self.gradients.begin_batch(1)
        for parameter, gradient in zip(self.root.parameters(), gradients, strict=True):
            if gradient is not None:
                batch.add(0, parameter, gradient)
        self.worker.submit(StepJob(self.optimizer, batch, before, after, in_half_precision=self.in_half_precision))
        for unit in self.store.units:
            batch.finish(0, unit)

    def close(self) -> None:
        self.monitor.fail(Cancelled())
        self.worker.close()


def chain() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))


def gradients(seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) for parameter in chain().parameters()]


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(optimizer: Callable[..., Optimizer] = MOMENTUM) -> Bench:
        made.append(Bench(optimizer))
        return made[-1]

    yield build
    for each in made:
        each.close()


def plain(optimizer: Callable[..., Optimizer], *steps: list[Tensor | None]) -> tuple[nn.Module, Optimizer]:
    root = chain()
    made = optimizer(root.parameters())
    for each in steps:
        for parameter, gradient in zip(root.parameters(), each, strict=True):
            parameter.grad = gradient
        made.step()
    return root, made


class Counting(SGD):
    """Known to nobody: stepped as a whole."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "fused adamw": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "rprop": torch.optim.Rprop,
    "counting": partial(Counting, lr=0.1),
}


class Waiting(Counting):
    """Each step needs what the test lets through, and notes the memory of its gradients."""

    let_through = threading.Semaphore(0)
    memory: list[set[int]] = []

    def step(self, closure: Any = None) -> Any:
        assert self.let_through.acquire(timeout=SECONDS)
        self.memory.append({p.grad.data_ptr() for group in self.param_groups for p in group["params"]})
        return super().step(closure)


def test_the_next_batch_adds_up_while_a_step_needs_all_gradients(bench: Callable[..., Bench]) -> None:
    Waiting.memory = []
    ours = bench(partial(Waiting, lr=0.1))
    ours.submit(gradients(0))
    for seed in range(1, 6):
        ours.submit(gradients(seed))  # would wait for the step before, which has not begun
        Waiting.let_through.release()
    Waiting.let_through.release()
    ours.worker.wait_idle()
    root, _ = plain(partial(SGD, lr=0.1), *map(gradients, range(6)))
    assert_equal(ours.root.state_dict(), root.state_dict())
    assert len(Waiting.memory) == 6
    assert len(set().union(*Waiting.memory)) <= 2 * len(Waiting.memory[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_optimizer_s_own(name: str, bench: Callable[..., Bench]) -> None:
    ours = bench(OPTIMIZERS[name])
    for seed in range(3):
        ours.submit(gradients(seed))
    ours.worker.wait_idle()
    root, optimizer = plain(OPTIMIZERS[name], *map(gradients, range(3)))
    assert_equal(ours.root.state_dict(), root.state_dict())
    assert_equal(ours.optimizer.state_dict(), optimizer.state_dict())
    assert getattr(ours.optimizer, "steps", 0) == getattr(optimizer, "steps", 0)
    assert all(parameter.grad is None for parameter in ours.root.parameters())


def test_parameters_without_gradient_are_not_stepped(bench: Callable[..., Bench]) -> None:
    ours = bench(OPTIMIZERS["adamw"])
    first: list[Tensor | None] = [None, *gradients(0)[1:5], None]
    for each in (first, first):
        ours.submit(each)
    ours.worker.wait_idle()
    root, optimizer = plain(OPTIMIZERS["adamw"], first, first)
    assert_equal(ours.root.state_dict(), root.state_dict())
    assert len(ours.optimizer.state) == len(optimizer.state) == 4


@pytest.mark.parametrize("laid_out", ["parameters with gaps", "gradients across", "state across"])
def test_a_fused_step_whatever_the_strides_are(bench: Callable[..., Bench], laid_out: str) -> None:
    """Torch's fused Adam would go through memory as if all were laid out alike."""
    optimizer = partial(torch.optim.Adam, lr=0.1)
    ours = bench(optimizer)
    ours.in_half_precision = True
    first = ours.root[0].weight
    if laid_out == "parameters with gaps":
        first.data = torch.stack([first.data, first.data], -1)[..., 0]
    ours.submit(gradients(0))
    ours.worker.wait_idle()
    if laid_out == "state across":
        state = ours.optimizer.state[first]
        state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    elif laid_out == "gradients across":
        ours.gradients.adopt(first, torch.zeros(3, 3).t())
    ours.submit(gradients(1))
    ours.worker.wait_idle()
    root, _ = plain(optimizer, gradients(0), gradients(1))
    for actual, expected in zip(ours.root.parameters(), root.parameters(), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_publishes_each_unit_once_a_step(bench: Callable[..., Bench]) -> None:
    ours = bench()
    assert [unit.done for unit in ours.store.units] == [0, 0, 0]
    for seed in range(2):
        ours.submit(gradients(seed))
    ours.worker.wait_idle()
    assert [unit.done for unit in ours.store.units] == [2, 2, 2]
    assert ours.store.version_for_next_batch() == 2


def test_units_are_published_in_the_order_of_their_use(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = bench()
    ours.worker.order = [ours.store.units[i] for i in (2, 0, 1)]
    published = []
    publish = ours.store.publish
    monkeypatch.setattr(ours.store, "publish", lambda unit: (published.append(unit.index), publish(unit)))
    ours.submit(gradients(0))
    ours.worker.wait_idle()
    assert published == [2, 0, 1]


def test_values_of_the_groups_are_those_of_when_it_was_handed_in(bench: Callable[..., Bench]) -> None:
    ours = bench(partial(SGD, lr=0.1))
    go = threading.Event()
    ours.submit(gradients(0), lambda _: go.wait(SECONDS))
    ours.optimizer.param_groups[0]["lr"] = 0.05
    go.set()
    ours.submit(gradients(0))
    ours.worker.wait_idle()
    for parameter, start, gradient in zip(ours.root.parameters(), chain().parameters(), gradients(0), strict=True):
        assert torch.allclose(parameter, start - 0.15 * gradient)
    assert ours.optimizer.param_groups[0]["lr"] == 0.05


def test_values_that_the_step_changes_are_written_back(bench: Callable[..., Bench]) -> None:
    class Decays(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.param_groups[0]["lr"] /= 2

    ours = bench(partial(Decays, lr=0.5))
    ours.submit(gradients(0))
    ours.worker.wait_idle()
    assert ours.optimizer.param_groups[0]["lr"] == 0.25


def test_before_and_after_the_step(bench: Callable[..., Bench]) -> None:
    ours, seen = bench(), []

    def before(optimizer: Optimizer) -> bool:
        seen.append([parameter.grad.clone() for group in optimizer.param_groups for parameter in group["params"]])
        return True

    ours.submit(gradients(0), before, lambda: seen.append("after"))
    ours.worker.wait_idle()
    assert_equal(seen, [gradients(0), "after"])


def test_a_step_that_is_called_off(bench: Callable[..., Bench]) -> None:
    """No change, but done: what waits for it goes on, and the next step has only its own gradients."""
    ours, calls = bench(), []
    ours.submit(gradients(0), lambda optimizer: False, lambda: calls.append("after"))
    ours.worker.wait_idle()
    assert_equal(ours.root.state_dict(), chain().state_dict())
    assert calls == ["after"]
    assert not ours.optimizer.state
    ours.submit(gradients(1))
    ours.worker.wait_idle()
    assert_equal(ours.root.state_dict(), plain(MOMENTUM, gradients(1))[0].state_dict())


def test_an_error_fails_the_pipeline(bench: Callable[..., Bench]) -> None:
    class Fails(SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no")

    ours = bench(partial(Fails, lr=0.1))
    ours.submit(gradients(0))
    with pytest.raises(Cancelled):
        ours.worker.wait_idle()
    assert isinstance(ours.monitor.failure, ValueError)
    assert ours.monitor.failure.__notes__ == ["roundpipe: raised in the background step of Fails"]


def test_steps_of_earlier_batches_are_made_when_a_later_one_fails(bench: Callable[..., Bench]) -> None:
    ours = bench()
    ours.submit(gradients(0))
    ours.gradients.begin_batch(1)
    ours.monitor.fail(ValueError(), batch=1)
    ours.worker.wait_idle()
    assert_equal(ours.root.state_dict(), plain(MOMENTUM, gradients(0))[0].state_dict())


# --- what can be stepped how


class Renamed(SGD):
    """Torch's own in everything but its name."""


class TakesClosure(Optimizer):
    def step(self, closure: Any) -> Any: ...


@pytest.mark.parametrize(
    ("kind", "by_parameter", "closure"),
    [
        (SGD, True, False),
        (torch.optim.AdamW, True, False),
        (torch.optim.Adafactor, True, False),
        (Renamed, True, False),
        (torch.optim.LBFGS, False, True),
        (Counting, False, False),
        (lambda parameters: TakesClosure(parameters, {}), False, True),
    ],
)
def test_kinds_of_optimizers(kind: Callable[..., Optimizer], by_parameter: bool, closure: bool) -> None:
    optimizer = kind(nn.Linear(2, 2).parameters())
    assert steps_by_parameter(optimizer) == by_parameter
    assert needs_closure(optimizer) == closure


def scheduled(root: nn.Module) -> Optimizer:
    optimizer = SGD(root.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def holding(value: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Optimizer]:
    def build(root: nn.Module) -> Optimizer:
        optimizer = SGD(root.parameters(), lr=0.1)
        optimizer.held = value(root)
        return optimizer

    return build


@pytest.mark.parametrize(
    ("build", "elsewhere"),
    [
        (lambda root: SGD(root.parameters(), lr=0.1), False),
        (scheduled, False),
        (holding(lambda root: 3), False),
        (holding(lambda root: [torch.zeros(2)]), False),
        (holding(lambda root: root), True),
        (holding(lambda root: root.weight), True),
        (holding(lambda root: [{"a": (root.bias,)}]), True),
        (holding(lambda root: SGD(root.parameters(), lr=0.1)), True),
        (holding(lambda root: root.parameters()), True),
        (holding(lambda root: lambda: root), True),
    ],
    ids=["none", "scheduler", "number", "tensors", "module", "parameter", "nested", "optimizer", "iterator", "closure"],
)
def test_parameters_held_elsewhere(build: Callable[[nn.Module], Optimizer], elsewhere: bool) -> None:
    assert holds_parameters_elsewhere(build(nn.Linear(2, 2))) == elsewhere


def test_a_step_put_on_the_instance() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None
    assert holds_parameters_elsewhere(optimizer)
