"""Frozen parameters that are mapped from files: only uploads, or layers in place, read them; nothing copies them.

Each case runs in a process of its own, whose memory the kernel counts: anonymous memory, which is the process's alone,
and pages of files, which the kernel takes back whenever it needs memory.
"""

import json
import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import fit, one_layer_a_stage
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import SimulatedDevice
from lightning_roundpipe.devices.file_pages import release_file_pages

LAYERS, WIDTH, RANK = 24, 2048, 4
MIB = 2**20


class Adapted(nn.Module):
    """A frozen linear map, and a trained one of low rank beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(L.LightningModule):
    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(width) for _ in range(layers))

    def training_step(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


def resident() -> dict[str, int]:
    """Bytes of the process by kind: "RssAnon", "RssFile", "RssShmem"."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss"))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in lines}


class Resident(L.Callback):
    """The most that there was at any batch. It reads nothing of the model, so the step stays in the background."""

    def __init__(self) -> None:
        self.most = resident()

    def on_train_batch_end(self, *_: Any) -> None:
        self.most = {kind: max(self.most[kind], size) for kind, size in resident().items()}

    on_train_batch_start = on_train_epoch_end = on_train_batch_end


def mapped(path: str, width: int) -> Model:
    """A model of one layer per frozen weight in the file, which stays where it is."""
    state = load_file(path) if path.endswith(".safetensors") else torch.load(path, mmap=True)
    with torch.device("meta"):
        model = Model(len(state), width)
    model.load_state_dict(state, strict=False, assign=True)
    for block in model.blocks:
        block.base.requires_grad_(False)
        for small in (block.down, block.up):
            small.to_empty(device="cpu").reset_parameters()
    return model


def train(path: str, simulated: bool, precision: str, staleness: int) -> dict[str, Any]:
    """Maps the weights and trains. Returns by how many bytes the process has grown at most, by kind, what simulated
    devices have held at most, and the size of all that is trained."""
    torch.set_num_threads(1)
    one_layer_a_stage(pytest.MonkeyPatch())  # to the end of the process
    hardware = [SimulatedDevice(0), SimulatedDevice(1)] if simulated else None

    def run(model: Model, width: int, callbacks: list[L.Callback]) -> L.Trainer:
        strategy = RoundPipeStrategy(microbatches=2, split="step", devices=hardware, staleness=staleness)
        batches = [torch.randn(4, width) for _ in range(4)]
        return fit(model, batches, strategy, devices=2, precision=precision, callbacks=callbacks)

    run(Model(2, 64), 64, [])  # whatever is loaded and allocated for the first time
    for device in hardware or []:
        device.memory.reset_peak()
    model, before, watch = mapped(path, WIDTH), resident(), Resident()
    trainer = run(model, WIDTH, [watch])
    assert len({row.backward_stage for row in trainer.strategy.report().layers}) == LAYERS
    return {
        "grown": {kind: watch.most[kind] - before[kind] for kind in before},
        "on_devices": sum(device.memory.peak for device in hardware or []),
        "small": sum(p.nbytes for p in model.parameters() if p.requires_grad),
    }


def weights_in(path: Path) -> Path:
    torch.manual_seed(0)
    one = torch.randn(WIDTH, WIDTH).mul_(WIDTH**-0.5)
    state = {f"blocks.{i}.base.weight": one.roll(i) for i in range(LAYERS)}
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    return path


def in_a_process(path: Path, **options: Any) -> dict[str, Any]:
    arguments = json.dumps({"path": str(path), "simulated": False, "precision": "32-true", "staleness": 0} | options)
    # The C library would keep what threads have freed, more or less of it, for each thread.
    environment = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, __file__, arguments], check=True, capture_output=True, text=True, env=os.environ | environment
    ).stdout
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells of a process's memory")
@pytest.mark.parametrize(
    ("file", "options"),
    [("w.safetensors", {"precision": "bf16-mixed", "staleness": 1}), ("w.pt", {"simulated": True})],
    ids=["virtual CPU devices", "simulated devices"],
)
def test_grows_by_less_than_a_stage(tmp_path: Path, file: str, options: dict[str, Any]) -> None:
    path = weights_in(tmp_path / file)
    found = in_a_process(path, **options)
    path.unlink()
    grown, stage = found["grown"], WIDTH * WIDTH * 4
    # The small parameters with gradients, Adam's state, and two versions of them; a simulated device's memory is here.
    besides = 8 * found["small"] + found["on_devices"]
    assert grown["RssAnon"] + grown["RssShmem"] < 1.2 * stage + besides
    if options.get("simulated"):  # what has been uploaded does not stay resident; in place, it may
        assert grown["RssFile"] < 1.2 * stage
        assert found["on_devices"] < 2 * 4 * stage


# --- pages of files


@pytest.fixture
def on_file(tmp_path: Path) -> Tensor:
    """A mebibyte that is mapped from a file, and has been read."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * 4096)
    tensor = torch.from_file(str(path), size=MIB, dtype=torch.uint8)
    assert int(tensor[255]) == 255 and int(tensor.long().sum()) == 4096 * 255 * 128
    return tensor


def pages_of(tensor: Tensor, *, own: bool = False) -> int:
    """How many of the tensor's pages are in this process's memory; of those that are its own."""
    with open("/proc/self/pagemap", "rb") as page_map:
        page_map.seek(tensor.data_ptr() // mmap.PAGESIZE * 8)
        entries = page_map.read(tensor.nbytes // mmap.PAGESIZE * 8)
    wanted = (0b101, 0b100) if own else (0, 0)  # in memory, swapped, of a file
    return sum(
        bool(entry >> 63) and (entry >> 61 & wanted[0]) == wanted[1] for (entry,) in struct.iter_unpack("<Q", entries)
    )


def test_pages_that_were_read_are_let_go_of(on_file: Tensor) -> None:
    assert pages_of(on_file) > 0
    release_file_pages([on_file])
    assert pages_of(on_file) == 0
    assert on_file.tolist() == list(range(256)) * 4096


def test_pages_that_were_written_stay(on_file: Tensor) -> None:
    """The file does not have what was written: a page that were let go of would be the file's again."""
    on_file[5000] = 7
    before = pages_of(on_file)
    release_file_pages([on_file, on_file[: MIB // 2]])
    assert pages_of(on_file) == before and on_file[5000] == 7
    release_file_pages([on_file[MIB // 2 :]])
    assert pages_of(on_file) < before and on_file[5000] == 7


def test_ordinary_memory_stays() -> None:
    tensor = torch.arange(MIB)
    part = torch.empty(1)
    release_file_pages([tensor, part, tensor[::2], torch.empty(0), torch.eye(3).to_sparse()])
    assert torch.equal(tensor, torch.arange(MIB))


class Teacher(L.LightningModule):
    """A frozen weight on a file, of which the step takes views; it may write to one."""

    def __init__(self, weight: Tensor, way: str) -> None:
        super().__init__()
        self.net, self.teacher, self.way = nn.Linear(8, 8), nn.Parameter(weight, requires_grad=False), way

    def training_step(self, x: Tensor, index: int) -> Tensor:
        if self.way == "view":
            self.teacher[0].add_(1)
        elif self.way == "numpy":
            self.teacher.data[0].numpy()[:] += 1
        return (self.net(x) @ self.teacher.t()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize("way", ["reads", "constant", "view", "numpy"])
def test_trying_a_split_copies_only_what_is_written(tmp_path: Path, way: str) -> None:
    """The first batch runs without gradients before it trains, which is undone."""
    path = tmp_path / "numbers"
    torch.manual_seed(0)
    path.write_bytes((torch.ones if way == "constant" else torch.randn)(4096, 8).numpy().tobytes())
    weight = torch.from_file(str(path), size=4096 * 8).view(4096, 8)
    own = pages_of(weight, own=True)
    fit(Teacher(weight, way), [torch.ones(4, 8)], RoundPipeStrategy(microbatches=2))
    expected = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(4096, 8)
    writes = way in ("view", "numpy")
    expected[0] += 1 if writes else 0  # once: such a step is not split
    assert torch.equal(weight, expected)
    assert (pages_of(weight, own=True) > own) == writes


if __name__ == "__main__":
    print(json.dumps(train(**json.loads(sys.argv[1]))))
