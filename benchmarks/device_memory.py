"""Memory of devices, counted: the most that one holds, and what is allocated in a steady state.

    python benchmarks/device_memory.py [--batches 30]

Simulated devices with memory of their own, of which `device_memory` leaves room for stages of one block. The most that
they hold is compared with what the invariant allows: two stages' parameters, one stage's gradients, the activations of
the calls in flight. What one call takes by itself is measured on such a device without the pipeline. New are the blocks
that an allocator which keeps what is freed for the same stream and size would have to ask the device or the system for
(CUDA's are less strict). Virtual devices have the host's memory: there, the pages are counted that the system gives a
batch anew, against plain Lightning's.
"""

import argparse
import resource
from typing import Any

import lightning as L
import torch
from common import Batches, Block, Row, alternate, quiet, show, train
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import SimulatedDevice, simulating
from lightning_roundpipe.devices.simulated import new_pinned_blocks

DEVICES = 2
HEAD_WIDTH = 64


class Blocks(L.LightningModule):
    """Equal transformer blocks."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, width // HEAD_WIDTH) for _ in range(layers))

    def training_step(self, x: Tensor, index: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def by_itself(layers: int, x: Tensor, *, backward: bool = True, adds_up: bool = False) -> int:
    """The most bytes that the model's forward and backward hold on a device, without any pipeline. Where it adds up,
    gradients are added to those of a microbatch before."""
    device = SimulatedDevice(0)
    with simulating():
        module = Blocks(layers, x.shape[-1]).to(device.torch_device)
        if adds_up:
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
        loss = module.training_step(x.to(device.torch_device).requires_grad_())
        if backward:
            loss.backward()
        return device.peak_memory()


def bound(x: Tensor, microbatches: int) -> int:
    """The bytes that the invariant allows a device with stages of one block each, for microbatches of this input: the
    block by itself, with its parameters, gradients and activations; another stage's parameters; and for each microbatch
    what it is at, a block's input or the gradient of it, what has gone on to another device and may be held until the
    call there is over, and a few numbers of its loss."""
    of_microbatches = microbatches * (2 * x.nbytes + 4 * x.element_size())
    return by_itself(1, x, adds_up=True) + parameters_of_a_block(x) + of_microbatches


def room(x: Tensor, microbatches: int) -> int:
    """The bytes that a plan asks for stages of one block: more than the bound, for it reckons with all of a block's new
    gradients beside the sums, and with all that its forward keeps beside both."""
    parameters = parameters_of_a_block(x)
    return 4 * parameters + by_itself(1, x, backward=False) - parameters + 2 * microbatches * x.nbytes


def parameters_of_a_block(x: Tensor) -> int:
    """In bytes."""
    return sum(parameter.nbytes for parameter in Blocks(1, x.shape[-1]).parameters())


def on_devices(layers: int, batch: Tensor, batches: int, limit: int | str) -> list[dict[str, int]]:
    """For each batch the most that a device held, and how many new blocks devices and host had taken until then."""
    devices = [SimulatedDevice(index) for index in range(DEVICES)]
    strategy = RoundPipeStrategy(len(batch), split="step", devices=devices, device_memory=limit)

    def note() -> dict[str, int]:
        strategy.settle()
        most = max(device.peak_memory() for device in devices)
        for device in devices:
            device.reset_peak_memory()
        taken = sum(device.memory.blocks.new for device in devices)
        return {"most": most, "device blocks": taken, "pinned blocks": new_pinned_blocks()}

    source = Batches(batch, batches, note)
    train(Blocks(layers, batch.shape[-1]), source, strategy)
    return source.notes


def fresh_pages(layers: int, batch: Tensor, batches: int, strategy: Any, devices: int) -> float:
    """MiB of memory that the system had to give a batch, the mean of the later half of the batches."""
    source = Batches(batch, batches, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    train(Blocks(layers, batch.shape[-1]), source, strategy, devices)
    late = source.notes[len(source.notes) // 2 :]
    return (late[-1] - late[0]) * resource.getpagesize() / 2**20 / max(1, len(late) - 1)


def measure(
    batches: int = 30,
    width: int = 128,
    tokens: int = 32,
    depths: tuple[int, ...] = (6, 24),
    microbatches: int = 3,
    rounds: int = 3,
) -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.randn(microbatches, tokens, width)
    x = batch[:1]
    allowed, limit, parameters = bound(x, microbatches), room(x, microbatches), parameters_of_a_block(x)
    rows = []
    for depth in depths:
        notes = on_devices(depth, batch, 4, limit)
        rows.append(
            Row(
                f"most that one of {DEVICES} devices holds, {depth} blocks of {parameters / 1e6:.2f} MB",
                max(note["most"] for note in notes[1:]) / 1e6,
                "MB",
                target=round(allowed / 1e6, 2),
                at_most=True,
                peer=f"plain, on one device: {by_itself(depth, batch) / 1e6:.1f} MB",
            )
        )
    early = min(10, batches // 2)
    for name, memory in (("stages of one block", limit), ("as many blocks a stage as are best", "auto")):
        notes = on_devices(depths[0], batch, batches, memory)
        rows.extend(
            Row(
                f"new {kind} from batch {early} to {batches}, {name}",
                notes[-1][kind] - notes[early][kind],
                target=0,
                at_most=True,
                peer=f"{notes[early][kind]} before",
            )
            for kind in ("device blocks", "pinned blocks")
        )
    large = torch.randn(2 * DEVICES, 4 * tokens, 2 * width)
    fresh = alternate(
        {
            "plain": lambda: fresh_pages(depths[0], large, batches, "auto", 1),
            "ours": lambda: fresh_pages(
                depths[0], large, batches, RoundPipeStrategy(len(large), split="step"), DEVICES
            ),
        },
        rounds,
    )
    rows.append(
        Row(
            f"fresh memory of the system for each batch, {DEVICES} virtual devices",
            fresh["ours"],
            "MiB",
            target=round(fresh["plain"], 2),
            at_most=True,
            peer=f"plain Lightning: {fresh['plain']:.2f} MiB",
        )
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=30)
    options = parser.parse_args()
    quiet()
    show("Memory of devices, counted", measure(options.batches), "device_memory.json")


if __name__ == "__main__":
    main()
