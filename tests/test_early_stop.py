"""The recompute stops with the last tensor that autograd needs, and the gradients are still those of a plain run."""

from itertools import count
from typing import Any

import pytest
import torch
from helpers import assert_alike, fit_microbatches, fit_pipeline, result
from models import Lit, batches_of, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.pipeline.saved import Complete, MissingTensors
from lightning_roundpipe.pipeline.tape import runs_again

M, BATCHES = 3, 5


class Ticks:
    """Counts what is passed, in calls of a layer."""

    def __init__(self) -> None:
        self._count = count()

    def tick(self) -> None:
        next(self._count)

    @property
    def total(self) -> int:
        return int(repr(self._count)[len("count(") : -1])


begun, ended = Ticks(), Ticks()


class Body(nn.Module):
    """Begins, does what a subclass does, and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        begun.tick()
        x = self.run(x)
        ended.tick()
        return x

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class OnlyAdds(Body):
    def run(self, x: Tensor) -> Tensor:
        return x + self.down.bias


class HookHoldsTheLayer(Body):
    """The replica would be loaded for another call by the time that the hook runs."""

    def run(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * self.scale)
        return x + self.down(h)


class HookOnANode(Body):
    def run(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda gradients: (gradients[0] * self.scale,))
        return x + self.down(h)


class HookOnATensor(Body):
    """Nothing of the layer in it."""

    def run(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return x + self.down(h)


class Square(torch.autograd.Function):
    """Keeps a tensor past autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.x * gradient


class OwnFunction(Body):
    def run(self, x: Tensor) -> Tensor:
        return x + self.down(Square.apply(torch.tanh(self.up(x))))


class CheckpointInside(Body):
    def run(self, x: Tensor) -> Tensor:
        return x + self.down(checkpoint(lambda h: torch.tanh(self.up(h)), x, use_reentrant=False))


class CheckpointOfAFunction(Body):
    """What it runs again does not lead to the layer."""

    def run(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        return x + self.down(checkpoint(lambda h: torch.tanh(nn.functional.linear(h, weight)), x, use_reentrant=False))


class InPlace(Body):
    def run(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h[:, 0] *= 2
        h.add_(1).tanh_()
        return self.down(h).mul_(2)


class CatchesEverything(Body):
    """The end of the recompute goes through the layer's own code."""

    def run(self, x: Tensor) -> Tensor:
        try:
            h = self.down(torch.tanh(self.up(x)))
        except:  # noqa: E722
            h = self.down(torch.tanh(self.up(x))) * 2
        return x + h


class RaisesAnother(Body):
    """As a script does."""

    def run(self, x: Tensor) -> Tensor:
        try:
            return x + self.down(torch.tanh(self.up(x)))
        except BaseException as error:
            raise ValueError("something went wrong in here") from error


@torch.jit.script
def _scripted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(torch.tanh(x), weight)


class Scripted(Body):
    def run(self, x: Tensor) -> Tensor:
        return x + _scripted(self.up(x), self.down.weight)


class LeavesATrace(Body):
    """An attribute that is there only for a moment."""

    def run(self, x: Tensor) -> Tensor:
        assert not hasattr(self, "kept")
        self.kept = torch.tanh(self.up(x))
        x = x + self.down(self.kept)
        del self.kept
        return x


class Several(Body):
    """One of several outputs goes nowhere; another is an argument."""

    def forward(self, x: Tensor) -> Any:
        begun.tick()
        h = torch.tanh(self.up(x))
        outputs = self.down(h).exp(), h.sum(), x
        ended.tick()
        return outputs


class Net(Lit):
    def __init__(self, kind: type[Body]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(6, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return (self.head(x) - batch["y"]).pow(2).mean()


STOPS = [
    Body,
    OnlyAdds,
    HookOnATensor,
    CheckpointOfAFunction,
    InPlace,
    LeavesATrace,
    CatchesEverything,
    RaisesAnother,
    Scripted,
    Several,
]
GOES_ON = [HookHoldsTheLayer, HookOnANode, OwnFunction, CheckpointInside]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", [*STOPS, *GOES_ON], ids=lambda kind: kind.__name__)
def test_equals_plain_autograd(kind: type[Body], devices: int) -> None:
    data = batches_of(vectors, BATCHES, 6)
    actual, expected = Net(kind).double(), Net(kind).double()
    before = begun.total, ended.total
    trained = fit_pipeline(actual, data, M, devices)
    first, whole = begun.total - before[0], ended.total - before[1]
    reference = fit_microbatches(expected, data, M)
    assert_alike(result(trained), result(reference), 0.0 if devices == 1 else 1e-12)
    assert (whole < first) == (kind in STOPS and kind is not OnlyAdds), "the layer's end runs less often, where it may"


def test_nothing_is_run_again_where_nothing_is_missing() -> None:
    data = batches_of(vectors, BATCHES, 6)
    before = begun.total
    fit_pipeline(Net(OnlyAdds).double(), data, M)
    calls = len(data) * M * 4
    assert begun.total - before == calls + M * 4, "only in the first batch, which finds out"


class LooksTwice(Body):
    """Computes something more in the recompute, for whatever reason. What it returns is the same."""

    def run(self, x: Tensor) -> Tensor:
        if runs_again():
            self.look(x)
        return x + self.down(torch.tanh(self.up(x)))


class LooksAtTheSize(LooksTwice):
    def look(self, x: Tensor) -> None:
        assert x.norm() >= 0


class LooksAtTheLike(LooksTwice):
    """What autograd saves is no other in type and shape."""

    def look(self, x: Tensor) -> None:
        assert x.exp().sin().shape == x.shape


class LooksAway(Body):
    def run(self, x: Tensor) -> Tensor:
        if not runs_again():
            assert x.norm() >= 0
        return x + self.down(torch.tanh(self.up(x)))


class KeepsAList(LooksAtTheSize):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = [1, 2]


@pytest.mark.parametrize("kind", [LooksAtTheSize, LooksAtTheLike, LooksAway, KeepsAList])
def test_a_recompute_that_goes_another_way_is_made_as_a_whole(kind: type[Body]) -> None:
    data = batches_of(vectors, BATCHES, 6)
    actual, expected = Net(kind).double(), Net(kind).double()
    assert_alike(result(fit_pipeline(actual, data, M)), result(fit_microbatches(expected, data, M)), 0.0)


class CountsCalls(LooksAtTheSize):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().run(x)


def test_unless_it_cannot_be_made_again() -> None:
    with pytest.raises(RuntimeError, match="did not return the same: autograd saved") as caught:
        fit_pipeline(Net(CountsCalls).double(), batches_of(vectors, BATCHES, 6), M, schedule="gpipe")  # none is fused
    assert "layer 'blocks." in str(caught.value)


class TestMissingTensors:
    def test_a_second_run_ends_with_the_last_tensor(self) -> None:
        x = torch.randn(3, requires_grad=True)
        missing = MissingTensors("refused")
        with missing.leaving_out():
            y = x.exp().sin() + 1
        assert len(missing) == 2
        with missing.filling_in(), pytest.raises(Complete):
            _ = x.exp().sin() + 1
        missing.check()
        assert missing.difference is None
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, x.exp() * x.exp().cos())

    def test_what_is_not_there_is_refused(self) -> None:
        x = torch.randn(3, requires_grad=True)
        missing = MissingTensors("refused: this is why")
        with missing.leaving_out():
            y = x.exp()
        with pytest.raises(RuntimeError, match="this is why"):
            y.sum().backward()

    def test_a_change_in_place_is_seen(self) -> None:
        x = torch.randn(3, requires_grad=True)
        missing = MissingTensors("refused")
        with missing.leaving_out():
            y = x.exp().sin()
        h = x.exp()
        with missing.filling_in(), pytest.raises(Complete):
            x.exp()
            h.sin()
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_fewer_tensors_are_a_difference(self) -> None:
        x = torch.randn(3, requires_grad=True)
        missing = MissingTensors("refused")
        with missing.leaving_out():
            x.exp().sin()
        with missing.filling_in():
            x.exp()
        missing.check()
        assert missing.difference == "autograd saved 1 tensors instead of 2"
