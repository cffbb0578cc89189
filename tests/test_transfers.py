"""How things come to devices with memory of their own: large parameters in pieces, and what overtakes them; activations
straight from another device.
"""

import re
from io import StringIO
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import test_exactness as exactness
import test_habits as habits
import torch
from helpers import RoundPipeStrategy, assert_equal, break_for, fit, fit_microbatches, one_layer_a_stage, result
from hypothesis import given
from hypothesis import strategies as st
from models import UNet, batches_of, images
from rich.console import Console
from test_devices import ACTIVATION, DOUBLE, PARAMETERS, Counts, data, make
from torch import Tensor, nn

from lightning_roundpipe.devices import (
    AcceleratorDevice,
    SimulatedDevice,
    SimulatedStream,
    StreamOrderError,
    accelerator,
    simulating,
)
from lightning_roundpipe.devices.accelerator import moved_in_pieces, pieces
from lightning_roundpipe.devices.hardware import hardware_of
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


# --- from device to device


def among_peers(devices: int, depth: int = 12, peer_access: bool = True) -> tuple[L.Trainer, Counts]:
    hardware = [SimulatedDevice(index, peer_access=peer_access) for index in range(devices)]
    counts = Counts(hardware)
    strategy = RoundPipeStrategy(devices + 1, split="step", devices=hardware)
    return fit(make(depth), data(devices + 1), strategy, callbacks=[counts]), counts


@pytest.mark.parametrize("devices", [2, 4])
def test_bytes_between_peers(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula of docs/memory.md; and the same bits as by the host."""
    one_layer_a_stage(monkeypatch)
    depth, microbatches = 12, devices + 1
    trainer, counts = among_peers(devices)
    recomputed, stages = depth - 1, 2 * depth - 1
    moved_on = depth - 1  # inputs that come from another device: all but the batch
    crossings = 0
    for block in range(1, depth):  # gradients, as in test_devices.py
        backward, forward_before = stages - 1 - block, block - 1
        crossings += (backward - forward_before) % devices != 0
        crossings += (backward + 1 - forward_before) % devices != 0
    losses = 3 * microbatches * DOUBLE
    for of_batch in counts.copies:
        up, down, across = (sum(copies.nbytes for copies in kind) for kind in zip(*of_batch, strict=True))
        assert up == stages * PARAMETERS + microbatches * (recomputed + 1) * ACTIVATION
        assert down == depth * PARAMETERS + microbatches * (recomputed - 1) * ACTIVATION + losses
        assert across == microbatches * (moved_on + crossings) * ACTIVATION
    assert counts.waits == [0, 0]
    by_the_host, _ = among_peers(devices, peer_access=False)
    assert_equal(result(trainer), result(by_the_host))
    assert_equal(result(trainer), result(fit_microbatches(make(depth), data(microbatches), microbatches)))


def test_the_report_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from a peer comes neither up nor, if no recompute needs it, down."""
    one_layer_a_stage(monkeypatch)
    depth, microbatches = 6, 3
    reports = [among_peers(2, depth, access)[0].strategy.report() for access in (True, False)]
    sums = [[sum(getattr(row.traffic, kind) for row in report.devices) for kind in KINDS] for report in reports]
    (up, down, across), (up_by_host, down_by_host, none) = sums
    batches = 2  # after the first one, which is on one device
    assert none == 0 and across == batches * microbatches * (depth - 1) * ACTIVATION == up_by_host - up
    assert down_by_host - down == batches * microbatches * ACTIVATION  # the last block's input
    text = StringIO()
    Console(file=text, width=200).print(reports[0].table())
    assert "MB across" in text.getvalue()


KINDS = ("activations_up", "activations_down", "across")


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("model", ["gpt", "tied by hand", "u-net"])
def test_models_among_peers(model: str, staleness: int, devices: int) -> None:
    """Whatever way activations take: the same bits. With several inputs, some of which come from far."""
    found = []
    for peer_access in (True, False):
        hardware = [SimulatedDevice(index, peer_access=peer_access) for index in range(devices)]
        strategy = RoundPipeStrategy(3, staleness, split="step", devices=hardware)
        if model == "u-net":
            torch.manual_seed(0)
            module, batches = UNet().double(), batches_of(images, 3, 6)
        else:
            module, batches = exactness.make(model, torch.float64), exactness.data(model, torch.float64, 3, 6)
        found.append(result(fit(module, batches, strategy)))
        across = sum(device.across.nbytes for device in hardware)
        assert across > 0 or not peer_access
    assert_equal(*found)


@pytest.mark.parametrize(
    "kind",
    [habits.InPlaceFirst, habits.ReturnsItsArgument, habits.ResidualStreamInPlace],
    ids=lambda kind: kind.__name__,
)
def test_inputs_that_are_changed_in_place(kind: type) -> None:
    """On their way to another device they are still what they were."""
    torch.set_default_dtype(torch.float64)
    hardware = [SimulatedDevice(index, peer_access=True) for index in range(2)]
    trainer = fit(habits.make(kind), habits.data(), RoundPipeStrategy(3, split="step", devices=hardware))
    assert_equal(result(trainer), habits.expected(kind, 3))


def test_only_those_that_reach_one_another() -> None:
    """The others, by the host."""
    hardware = [SimulatedDevice(index, peer_access=index < 2) for index in range(4)]
    peers: dict[torch.device, AcceleratorDevice] = {}
    devices = [AcceleratorDevice(device, peers) for device in hardware]
    reached = [[b.torch_device.index for b in devices if a.reaches(b.torch_device)] for a in devices]
    assert reached == [[1], [0], [], []] and not devices[0].reaches(torch.device("cpu"))
    with devices[0].in_thread():
        x = torch.ones(3, 2).to(devices[0].torch_device).t()
        assert devices[1].to_device(x).stride() == x.stride()
        assert devices[0].send(x, devices[2].torch_device).tolist() == x.tolist()
        assert devices[0].send(x, devices[1].torch_device).tolist() == x.tolist()
    assert [device.across.count for device in hardware] == [0, 2, 0, 0]
    assert [device.up.count for device in hardware] == [1, 0, 1, 0]


def test_cudas_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch tells; of other kinds of devices it tells nothing."""
    module = SimpleNamespace(init=lambda: None, default_generators=("g0", "g1"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b.index) == (0, 1))
    first, second, other = (hardware_of(torch.device(name)) for name in ("cuda:0", "cuda:1", "xpu:0"))
    assert first.reaches(second.torch_device) and not second.reaches(first.torch_device)
    assert not other.reaches(torch.device("xpu", 1)) and not first.reaches(other.torch_device)


# --- what must be waited for


def fails() -> str:
    with pytest.raises(RuntimeError) as caught:
        among_peers(2, 6)
    return str(caught.value)


def test_a_copy_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer_a_stage(monkeypatch)
    wait = AcceleratorDevice._wait_for_upload

    def wait_for_others(self: AcceleratorDevice, event: Any) -> None:
        if self._incoming not in event.known:
            wait(self, event)

    monkeypatch.setattr(AcceleratorDevice, "_wait_for_upload", wait_for_others)
    assert re.search("reads, on the default stream of .* what the stream to others .* may not have written", fails())


def test_a_copy_of_what_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer_a_stage(monkeypatch)
    break_for(monkeypatch, SimulatedStream, "wait_event", "the stream to others")
    assert re.search("reads, on the stream to others .* what the default stream .* may not have written", fails())


def test_memory_that_is_used_again_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to another device is let go of at once; the allocator must know of the copy."""
    one_layer_a_stage(monkeypatch)
    break_for(monkeypatch, accelerator, "_used_by", "the stream to others")
    assert re.search("of meta:. was freed while the stream to others .* may still use it", fails())


def test_an_input_that_is_changed_before_it_is_copied() -> None:
    devices: list[AcceleratorDevice] = []
    peers: dict[torch.device, AcceleratorDevice] = {}
    devices += [AcceleratorDevice(SimulatedDevice(index, peer_access=True), peers) for index in range(2)]
    with devices[0].in_thread():
        x = torch.ones(2).to(devices[0].torch_device)
        devices[1].to_device(x)
        x.zero_()  # it waits
        devices[1]._bring_across(x)
        with pytest.raises(StreamOrderError, match=r"overwrites, on the default stream .* what the stream to others"):
            x.zero_()
