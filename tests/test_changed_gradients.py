"""Gradients that hooks change in place when they are a parameter's, too: autograd has added them up by then, or copied
them. So they must not be on their way to host memory, or waiting for something, as they are.
"""

import threading
from functools import cache
from typing import Any

import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, differs, fit, fit_microbatches, result
from models import Lit
from torch import Tensor, nn

from lightning_roundpipe.devices import SimulatedDevice

WIDTH, ROWS = 6, 4
_held = threading.local()


def held() -> list[Tensor]:
    """Gradients of the microbatch whose thread this is."""
    if not hasattr(_held, "gradients"):
        _held.gradients = []
    return _held.gradients


class Shift(nn.Module):
    """The gradient of its parameter is that of its argument: the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p


class Holds(Shift):
    """The gradient of its parameter is kept elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda gradient: held().append(gradient))
        return y + self.p


class Transposed(nn.Module):
    """The gradient of its parameter is another view of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p.t()


def double(gradient: Tensor) -> None:
    for other in held():
        other.mul_(3)
    held().clear()
    gradient.mul_(2)


class Hooked(Lit):
    def __init__(self, kind: type[nn.Module], calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.calls = calls
        self.double()

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch["x"])
        for block in [*self.blocks] * self.calls:
            x = torch.sin(x)
            x.register_hook(double)
            x = block(x)
        return x.square().mean()


def data(microbatches: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(microbatches * ROWS, WIDTH).double()} for _ in range(3)]


@cache
def expected(kind: type[nn.Module], microbatches: int, calls: int = 1) -> dict[str, Any]:
    held().clear()
    return result(fit_microbatches(Hooked(kind, calls), data(microbatches), microbatches))


def trained(
    kind: type[nn.Module], microbatches: int, devices: int, calls: int = 1, simulated: bool = True, **options: Any
) -> dict[str, Any]:
    held().clear()
    if simulated:
        options["devices"] = [SimulatedDevice(index) for index in range(devices)]
    strategy = RoundPipeStrategy(microbatches, **{"split": "step", **options})
    return result(fit(Hooked(kind, calls), data(microbatches), strategy, devices=1 if simulated else devices))


KINDS = pytest.mark.parametrize("kind", [Shift, Holds, Transposed], ids=lambda kind: kind.__name__)


@KINDS
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_while_they_come_down(kind: type[nn.Module], microbatches: int, devices: int) -> None:
    assert_equal(trained(kind, microbatches, devices), expected(kind, microbatches))


@KINDS
@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize(
    ("microbatches", "options"),
    [(2, {"schedule": "zb1p"}), (4, {"schedule": "dualpipe"}), (1, {"split": "model"}), (1, {"split": "whole"})],
    ids=lambda value: str(value),
)
def test_while_they_wait(kind: type[nn.Module], microbatches: int, options: dict[str, Any], simulated: bool) -> None:
    """For W actions, or for the end of a step with the whole batch."""
    assert_equal(trained(kind, microbatches, 2, simulated=simulated, **options), expected(kind, microbatches))


class Gate(torch.autograd.Function):
    """Opens for the backward of the first microbatch when the second is through."""

    opened: threading.Event | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if Gate.opened is not None and ctx.number == 0:
            assert Gate.opened.wait(30)
        return gradient.clone(), None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return Gate.apply(self.linear(x), number)


class LateFirst(Hooked):
    def __init__(self) -> None:
        super().__init__(Shift)
        self.last = Gated().double()

    def loss(self, batch: Any) -> Tensor:
        number = int(batch["number"][0])
        x = self.first(batch["x"])
        if number == 1:
            x.register_hook(lambda _: None if Gate.opened is None else Gate.opened.set())
        for block in self.blocks:
            x = torch.sin(x)
            x.register_hook(double)
            x = block(x)
        return self.last(x, number).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        is_pipelined = isinstance(self.trainer.strategy, RoundPipeStrategy) and batch_idx > 0
        Gate.opened = threading.Event() if is_pipelined else None


def test_while_an_earlier_microbatch_is_not_done() -> None:
    """Each has a device of its own."""
    numbered = [{**batch, "number": torch.arange(2).repeat_interleave(ROWS)} for batch in data(2)]
    strategy = RoundPipeStrategy(2, split="step", lanes=2)
    trainer = fit(LateFirst(), numbered, strategy, devices=2)
    assert_equal(result(trainer), result(fit_microbatches(LateFirst(), numbered, 2)))


def test_before_those_of_other_calls_are_added() -> None:
    """Autograd adds them up as they are then. What has come down cannot follow."""
    assert differs(expected(Shift, 1, 2), expected(Shift, 1))
    assert_equal(trained(Shift, 1, 1, 2, simulated=False), expected(Shift, 1, 2))
    for schedule in ("roundpipe", "zb1p"):
        with pytest.raises(
            RuntimeError, match=r"parameter 'blocks\.\d\.p', which several layer calls use, was changed in"
        ):
            trained(Shift, 2, 2, 2, schedule=schedule)
