"""How things come to devices with memory of their own: large parameters in pieces, and what overtakes them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, fit, fit_microbatches, result
from hypothesis import given
from hypothesis import strategies as st
from test_devices import PARAMETERS, Counts, data, make
from torch import Tensor, nn

from lightning_roundpipe.devices import AcceleratorDevice, SimulatedDevice, accelerator, simulating
from lightning_roundpipe.devices.accelerator import moved_in_pieces, pieces
from lightning_roundpipe.devices.pinned import Pinning
from lightning_roundpipe.devices.simulated_links import Link, Time

# --- in pieces


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_pieces_are_few_and_alike(length: int, most: int) -> None:
    made = pieces(length, most)
    sizes = [stop - start for start, stop in made]
    assert made[0][0] == 0 and made[-1][1] == length and all(a[1] == b[0] for a, b in pairwise(made))
    assert len(made) == max(1, -(-length // most)) and max(sizes) <= most and max(sizes) - min(sizes) <= 1


LARGE = torch.randn(60, 50)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize(
    ("tensor", "copies"),
    [
        (LARGE, 12), (LARGE.t(), 12), (LARGE[3:], 12), (LARGE.half(), 6), (LARGE[:5], 1), (LARGE[:, ::2], 1),
        (LARGE[:1].expand(60, 50), 1), (LARGE.reshape(3, 20, 50).permute(2, 0, 1), 12), (LARGE[0, 0], 1),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.stride()}" if isinstance(value, Tensor) else "",
)  # fmt: skip
def test_bits_strides_and_copies(
    tensor: Tensor, copies: int, pin: bool, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "PIECE", 1024)
    device = SimulatedDevice(0)
    with simulating():
        there = moved_in_pieces(tensor, device.torch_device, Pinning(pin), staged=staged)
        assert there.device == device.torch_device and there.stride() == tensor.stride() and there.dtype == tensor.dtype
        assert torch.equal(there.cpu(), tensor)
    assert device.up.count == copies
    assert device.up.nbytes == (200 if tensor.stride(0) == 0 else tensor.nbytes) if tensor.dim() else 4


def test_training_with_parameters_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "PIECE", 512)
    for pin_memory in (True, False):
        hardware = [SimulatedDevice(0), SimulatedDevice(1)]
        counts = Counts(hardware)
        strategy = RoundPipeStrategy(3, split="step", devices=hardware, pin_memory=pin_memory)
        trainer = fit(make(6), data(3), strategy, callbacks=[counts])
        assert_equal(result(trainer), result(fit_microbatches(make(6), data(3), 3)))
        for of_batch in counts.copies:
            assert sum(up.count for up, _, _ in of_batch) > sum(up.nbytes for up, _, _ in of_batch) // PARAMETERS


# --- who overtakes whom


def test_streams_take_turns_on_a_link() -> None:
    link, other = Link(), Link()
    first, second = Time(), Time()
    for _ in range(3):
        first = first.and_copy(link, "first", 2.0)
    for _ in range(2):
        second = second.and_copy(link, "second", 1.0)
    elsewhere = Time().and_copy(other, "first", 4.0)
    after_both = second.and_also(elsewhere).and_copy(other, "third", 1.0)
    assert second.seconds() == 2 + 1 + 2 + 1, "after two of the first"
    late = Time(known=7.5).and_copy(link, "late", 1.0)
    assert late.seconds() == 9.0 and first.seconds() == 8.0
    assert elsewhere.seconds() == 4.0 and after_both.seconds() == 7.0
    assert first.and_also(Time(known=20.0)).seconds() == 20.0


def test_what_has_been_asked_for_stays() -> None:
    link = Link()
    done = Time().and_copy(link, "first", 2.0).and_copy(link, "first", 2.0)
    assert done.seconds() == 4.0
    assert Time().and_copy(link, "second", 1.0).seconds() == 5.0 and done.seconds() == 4.0


def up_at(piece: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """When a large parameter is up, and an input that is handed out after it, at a byte a second."""
    monkeypatch.setattr(accelerator, "PIECE", piece)
    device = AcceleratorDevice(SimulatedDevice(0, bandwidth=1.0), {})
    with device.in_thread():
        device.begin_call("stage")
        device.upload([nn.Parameter(LARGE)])
        parameters: Any = device.uploaded
        x = device.to_device(torch.ones(50))
        inputs = device.streams["inputs up"].record_event()
        assert x.sum().item() == 50
        return parameters.time.seconds(), inputs.time.seconds()


def test_an_input_overtakes_a_large_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for one piece at most."""
    parameter, x = LARGE.nbytes, 200
    assert up_at(32 * 10**6, monkeypatch) == (parameter, parameter + x), "as a whole, none can"
    assert up_at(1000, monkeypatch) == (parameter + x, 1000 + x)
