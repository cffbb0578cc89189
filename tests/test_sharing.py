"""Who else holds a tensor: another variable, a view, or what it is a view of."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices import SimulatedDevice, simulating
from lightning_roundpipe.state.sharing import is_held, is_shared


@pytest.fixture(params=["cpu", "meta:0"])
def x(request: pytest.FixtureRequest) -> Iterator[Tensor]:
    SimulatedDevice(0)
    with simulating(), torch.no_grad():
        yield torch.randn(4, 4).to(request.param)


def test_one_variable(x: Tensor) -> None:
    fresh = x * 2
    view = (x @ x).t()
    of_a_view = (x @ x).t().t()
    reduced = x.sum(0, keepdim=True).view(4)
    held = [is_held(fresh), is_held(view), is_held(of_a_view), is_held(reduced)]
    assert not any(held)


def test_others(x: Tensor) -> None:
    several = [x * 2]
    again = several[0]
    held = [is_held(again)]
    whole = x * 2
    part = whole[1:]
    held += [is_held(part), is_held(whole), is_shared(whole)]
    detached = whole.detach()
    held += [is_held(detached), is_shared(detached)]
    assert all(held) and len(several) == 1


def test_sparse_tensors() -> None:
    assert is_held(torch.eye(3).to_sparse()) and is_held(torch.eye(3).to_sparse_csr())


def test_siblings() -> None:
    """Views of the same tensor, which itself nobody holds."""
    base = torch.randn(4, 4)
    first, second = base.t(), base[:2]
    del base
    both = is_held(first), is_held(second)
    del second
    one = is_held(first)
    assert both == (True, True) and not one
