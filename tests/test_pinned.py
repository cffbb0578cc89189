"""Host memory that devices reach by themselves: as large as was asked for, and registered for as long as it is held;
and how much of what is copied lies in such memory.

CUDA's runtime is a stand-in here; `test_gpu.py` has the true one.
"""

import mmap
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, fit, fit_microbatches, one_layer_a_stage, result
from test_devices import Counts, Labelled, labelled
from torch import Tensor

from lightning_roundpipe.devices import SimulatedDevice, simulated
from lightning_roundpipe.devices.pinned import Pinning, dense_strides, pinned_memory
from lightning_roundpipe.garbage import collect


class Runtime:
    """Notes what is registered."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1, "for all devices"
        if self.answer == 0:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_its_own(dtype: torch.dtype) -> None:
    runtime = Runtime()
    like = torch.randn(1001, 700).t()
    tensor = pinned_memory(like, dtype, runtime)
    assert tensor.shape == like.shape and tensor.stride() == like.stride() and tensor.dtype == dtype
    ((address, size),) = runtime.registered.items()
    assert address == tensor.data_ptr() and address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert 0 <= size - tensor.numel() * dtype.itemsize < mmap.PAGESIZE
    assert torch.equal(tensor.copy_(like), like.to(dtype))
    part = tensor[3]
    del tensor
    assert runtime.registered and torch.equal(part, like[3].to(dtype)), "the view holds it"
    del part
    assert not runtime.registered


def test_gaps_are_left_out() -> None:
    like = torch.randn(600, 2000)[:, ::2]
    tensor = pinned_memory(like, torch.float32, Runtime())
    assert tensor.stride() == dense_strides(like) == (1000, 1)


def test_what_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match=r"2002944 bytes of host memory cannot be pinned \(error 2\)"):
        pinned_memory(torch.empty(500, 1000), torch.float32, Runtime(answer=2))
    like = torch.empty(500, 1000)
    refused = partial(pinned_memory, like, torch.float32, Runtime(answer=2))
    with pytest.raises(
        RuntimeError, match=r"let 2 MB more .* be pinned \(.*error 2\)\)\. .*ulimit -l.*pin_memory='auto'"
    ):
        Pinning(True).memory(like.nbytes, refused, lambda: like)


# --- how much


def make(nbytes: int, pinning: Pinning) -> tuple[str, Tensor]:
    """A tensor, and the kind of its memory."""
    made: list[str] = []

    def of(kind: str) -> Tensor:
        made.append(kind)
        return torch.empty(nbytes, dtype=torch.uint8)

    tensor = pinning.memory(nbytes, partial(of, "pinned"), partial(of, "ordinary"))
    return made[-1], tensor


@pytest.mark.parametrize(("wanted", "kind"), [(True, "pinned"), (False, "ordinary"), ("auto", "pinned")])
def test_without_limits(wanted: Any, kind: str) -> None:
    assert make(10**6, Pinning(wanted))[0] == kind


def test_auto_keeps_to_its_share() -> None:
    said: list[str] = []
    pinning = Pinning("auto", 100, said.append)
    kind, first = make(60, pinning)
    assert kind == "pinned" and not said
    assert make(50, pinning)[0] == "ordinary" and make(50, pinning)[0] == "ordinary"
    assert len(said) == 1 and "100 bytes are pinned, as much as is sensible" in said[0] and "the host waits" in said[0]
    kind, second = make(40, pinning)
    assert kind == "pinned"
    view = first[:5]
    del first
    assert make(60, pinning)[0] == "ordinary", "the view holds it"
    del view, second
    assert make(100, pinning)[0] == "pinned"


def test_auto_keeps_to_what_the_system_allows() -> None:
    """Where it has refused once, it is not asked for more again."""
    said: list[str] = []
    asked: list[int] = []
    pinning = Pinning("auto", None, said.append)
    kept = [make(100, pinning)[1]]

    def refused(nbytes: int) -> Tensor:
        asked.append(nbytes)
        raise RuntimeError("no more")

    for _ in range(2):
        other = torch.empty(50)
        assert pinning.memory(50, partial(refused, 50), lambda other=other: other) is other
    assert asked == [50] and len(said) == 1 and "does not let 50 bytes more be pinned (no more)" in said[0]
    kept.clear()
    assert make(100, pinning)[0] == "pinned"


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_errors_that_are_no_matter_of_pinning(wanted: Any) -> None:
    """A device's memory, or an error of a kernel that torch reports late."""

    def fails(kind: type[Exception]) -> Tensor:
        raise kind("as ever")

    pinning = Pinning(wanted, None, pytest.fail)
    for kind in (torch.OutOfMemoryError, RuntimeError):
        with pytest.raises(kind, match=r"^as ever$"):
            pinning.memory(10, partial(fails, kind), partial(fails, kind))


@pytest.mark.parametrize("wanted", [1, 0, None, "yes", "True"])
def test_what_is_no_choice(wanted: Any) -> None:
    with pytest.raises(ValueError, match="`pin_memory` must be True, False or 'auto'"):
        RoundPipeStrategy(pin_memory=wanted)


# --- training


def trained(
    pin_memory: Any, staleness: int = 0, pinnable: int | None = None, precision: str = "64-true", devices: int = 2
) -> tuple[L.Trainer, Counts]:
    collect()
    hardware = [SimulatedDevice(index, pinnable=pinnable) for index in range(devices)]
    counts = Counts(hardware)
    strategy = RoundPipeStrategy(3, staleness, split="step", devices=hardware, pin_memory=pin_memory)
    return fit(Labelled().double(), labelled(3), strategy, callbacks=[counts], precision=precision), counts


@pytest.fixture
def pinned_at_most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were pinned whenever some had been."""
    one_layer_a_stage(monkeypatch)
    found: list[int] = []
    note = simulated._note_pinned

    def noted(tensor: Tensor) -> Tensor:
        tensor = note(tensor)
        found.append(simulated.pinned_bytes())
        return tensor

    monkeypatch.setattr(simulated, "_note_pinned", noted)
    return found


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("pin_memory", [True, False, "auto"])
def test_numbers_and_waits(pin_memory: Any, staleness: int, pinned_at_most: list[int]) -> None:
    """The same bits; and the host waits for copies only where nothing is pinned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*pin_memory.*")
        trainer, counts = trained(pin_memory, staleness)
    assert bool(pinned_at_most) == (pin_memory is not False)
    assert all((waits > 0) == (pin_memory is False) for waits in counts.waits)
    if not staleness:
        expected = fit_microbatches(Labelled().double(), labelled(3), 3)
        assert_equal(result(trainer)["weights"], result(expected)["weights"])
    else:
        assert_equal(result(trainer), result(trained(True, 1)[0]))


@pytest.mark.parametrize("limit", ["system", "share"])
@pytest.mark.parametrize("most", [0, 3000, 20_000])
def test_beyond_the_limit(most: int, limit: str, pinned_at_most: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary memory, with one warning; the same bits."""
    expected = result(fit_microbatches(Labelled().double(), labelled(3), 3))["weights"]
    if limit == "share":
        monkeypatch.setattr("lightning_roundpipe.strategy.most_to_pin", lambda: most)
    collect()
    before = simulated.pinned_bytes()  # by whatever other tests have left
    with pytest.warns(UserWarning, match="pin_memory='auto'") as caught:
        trainer, counts = trained("auto", pinnable=before + most if limit == "system" else None)
    assert len([warning for warning in caught if "pin_memory" in str(warning.message)]) == 1
    assert max(pinned_at_most, default=0) <= before + most and bool(pinned_at_most) == (most > 0)
    assert all(waits > 0 for waits in counts.waits)
    assert_equal(result(trainer)["weights"], expected)


def test_all_is_to_be_pinned_and_the_system_refuses() -> None:
    with pytest.raises(
        RuntimeError, match=r"does not let .* be pinned .*ulimit -l.*RoundPipeStrategy\(pin_memory='auto'\)"
    ):
        trained(True, pinnable=2000)
    trained("auto")


def test_half_precision_copies_that_are_not_pinned(pinned_at_most: list[int]) -> None:
    found = [result(trained(pin_memory, 1, precision="bf16-mixed")[0]) for pin_memory in (False, True)]
    assert pinned_at_most
    assert_equal(*found)
