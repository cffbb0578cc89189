"""A device without memory left: the error says where, for what, and what helps; and training can be tried again."""

import gc
import re
from typing import Any

import lightning as L
import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, fit, fit_microbatches, result
from test_devices import ACTIVATION, PARAMETERS, Deep, data, make, one_block_a_stage  # noqa: F401  # a fixture
from torch import Tensor

from lightning_roundpipe.devices import SimulatedDevice

DEPTH = 6


def run(capacity: int | None, microbatches: int, samples: int, **options: Any) -> tuple[L.Trainer, SimulatedDevice]:
    device = SimulatedDevice(0, capacity=capacity)
    strategy = RoundPipeStrategy(microbatches=microbatches, split="step", devices=[device], **options)
    return fit(make(DEPTH), data(samples), strategy), device


def error_of(
    capacity: int, microbatches: int, samples: int, module: L.LightningModule | None = None, **options: Any
) -> str:
    device = SimulatedDevice(0, capacity=capacity)
    strategy = RoundPipeStrategy(microbatches=microbatches, split="step", devices=[device], **options)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(module or make(DEPTH), data(samples), strategy)
    text = "\n".join([str(raised.value), *raised.value.__notes__])
    del raised, strategy
    for _ in range(3):  # a graph in C++ that a cycle held lets go of the next cycle only when it is gone
        gc.collect()
    assert device.memory.live == 0, "nothing is left of what has failed"
    return text


@pytest.mark.parametrize(
    ("capacity", "purpose", "phase", "first"),
    [
        (PARAMETERS // 2, "parameters", "forward", "layers"),
        (2 * PARAMETERS + ACTIVATION, "activations", "forward", "microbatches"),
        (2 * PARAMETERS + 8 * ACTIVATION, "gradients", "backward", "layers"),
    ],
)
def test_the_error_says_where_for_what_and_what_helps(capacity: int, purpose: str, phase: str, first: str) -> None:
    text = error_of(capacity, 1, 1)
    assert re.search(r"Tried to allocate \d+ bytes", text) and "meta:0 out of memory" in text
    assert re.search(rf"microbatch 1 of 1 in batch \d; layer 'blocks\.\d'; device meta:0; phase {phase}", text), text
    assert re.search(rf"no memory left for {purpose}\. Stage( \d+)? \(layers: blocks\.", text)
    assert "needs 2.18 kB for parameters, up to 2.18 kB for gradients" in text
    helps = re.findall(r"\((\d)\) .*?(microbatches|layers|precision)=", text)
    assert [number for number, _ in helps] == ["1", "2", "3"] and helps[0][1] == first
    assert len({argument for _, argument in helps}) == 3


def test_code_between_layers() -> None:
    text = error_of(2 * PARAMETERS + 4 * ACTIVATION, 1, 1)
    assert "no memory left for activations. It was asked for by code between layers. What helps" in text


class Hungry(Deep):
    """In the second batch the step takes all the memory."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + torch.zeros(10**6, device=loss.device).sum() if self.global_step else loss


@pytest.mark.parametrize(
    ("recompute", "remedy"),
    [
        ("none", r"graphs of calls stay .* RoundPipeStrategy\(recompute='layer'\) leaves more room"),
        (
            "layer",
            r"inputs of calls stay .* RoundPipeStrategy\(device_memory=...\) with a lower limit leaves more room",
        ),
    ],
)
def test_what_stays_is_named(recompute: str, remedy: str) -> None:
    assert re.search(remedy, error_of(10**6, 2, 2, module=Hungry(DEPTH).double(), recompute=recompute))


def test_training_again_in_the_same_process() -> None:
    """With smaller microbatches, on a device of the same size."""
    (_, small), (_, large) = run(None, 8, 16), run(None, 1, 16)
    capacity = (small.memory.peak + large.memory.peak) // 2  # how much several hold at a time depends on their threads
    text = error_of(capacity, 1, 16)
    assert "(1) RoundPipeStrategy(microbatches=2)" in text
    trainer, device = run(capacity, 8, 16)
    assert device.memory.peak <= capacity
    assert_equal(result(trainer), result(fit_microbatches(make(DEPTH), data(16), 8)))
    del trainer
    gc.collect()
    assert device.memory.live == 0
