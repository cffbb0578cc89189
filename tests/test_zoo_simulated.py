"""Models of the zoo on simulated accelerators: trained on 1, 2 and 4 of them as by plain autograd on the CPU.

Every operation is checked there: that its tensors are on one device, and that streams wait for what they use. Memory is
limited: whatever they hold at a time has to fit.
"""

from collections.abc import Iterator

import pytest
import torch
from helpers import fit
from models import batches_of
from zoo.entries import ZOO
from zoo.test_zoo import TOLERANCE, Watched, build, largest_error, optimizer_state, sizes_for, train_plain

from lightning_roundpipe.devices import SimulatedDevice

MICROBATCHES = 3
MODELS = {
    1: ["GPT-2", "Mamba", "BERT", "Qwen2-MoE", "Swin", "LSTM seq2seq", "U-Net", "VAE", "Hypernetwork"],
    2: ["Llama", "Gemma 3", "T5", "Mixtral", "Residual CNN", "Teacher and student", "Graph network", "LayerDrop"],
    4: [
        "Falcon", "BART", "DeBERTa", "ViT", "Whisper", "Spectral norm", "Mixture of experts", "Early exit",
        "Checkpointed blocks, reentrant",
    ],
}  # fmt: skip
CAPACITY = 2**20
"""Bytes of a device."""


@pytest.fixture(autouse=True)
def attention_as_on_a_device() -> Iterator[None]:
    """The CPU has a kernel of its own for it."""
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(flash)


@pytest.mark.parametrize(("name", "devices"), [(name, count) for count, names in MODELS.items() for name in names])
def test_equals_plain_autograd(name: str, devices: int) -> None:
    _, entry = ZOO[name]
    plain, ours = build(entry), build(entry)
    size = 2 * MICROBATCHES if sizes_for(plain)[0] > 5 else MICROBATCHES + 1
    batches = [batches_of(entry.data, 1, size, seed=seed)[0] for seed in range(2)]
    plain_losses, plain_optimizer = train_plain(plain, batches, MICROBATCHES)
    hardware = [SimulatedDevice(index, capacity=CAPACITY) for index in range(devices)]
    strategy = Watched(microbatches=MICROBATCHES, layers=entry.layers, split="step", devices=hardware)
    trainer = fit(ours, batches, strategy, precision="64-true")
    assert largest_error(dict(ours.named_parameters()), dict(plain.named_parameters())) <= TOLERANCE
    states = optimizer_state(plain, plain_optimizer)
    assert states and largest_error(optimizer_state(ours, trainer.optimizers[0]), states) <= TOLERANCE
    assert largest_error(dict(ours.named_buffers()), dict(plain.named_buffers())) <= TOLERANCE
    assert largest_error(dict(enumerate(strategy.losses)), dict(enumerate(plain_losses))) <= TOLERANCE
    used = sum(device.memory.peak > 0 for device in hardware)
    assert used >= min(devices, 2)  # how many stages there are depends on the time that layers take
