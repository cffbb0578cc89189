"""What the README says is true: its commands exist, its tables are the package's. Its code: test_documents.py."""

import dataclasses
import gc
import inspect
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import Traffic
from lightning_roundpipe.host_need import HostBytes, bytes_of_trained
from lightning_roundpipe.monitor import Counts, metrics_between
from lightning_roundpipe.report import DeviceRow, LayerRow, PipelineReport

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(first_column: str) -> list[list[str]]:
    """The cells of the table with this first column, without its head."""
    lines = README.partition(f"| {first_column} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_fields_of_the_report() -> None:
    rows = table("field")
    assert [name for name, _ in rows] == [field.name for field in dataclasses.fields(PipelineReport)]
    for row, kind in zip(rows, (LayerRow, DeviceRow), strict=False):
        assert re.findall(r"`(\w+)`", row[1]) == [field.name for field in dataclasses.fields(kind)]


def test_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\$ make (\w+)", README, flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_options_are_the_constructors() -> None:
    parameters = inspect.signature(RoundPipeStrategy).parameters.values()
    of_any_strategy = {"accelerator", "checkpoint_io", "precision_plugin"}
    expected = [(p.name, repr(p.default).replace("'", '"')) for p in parameters if p.name not in of_any_strategy]
    assert [(name, default) for name, default, _ in table("option")] == expected


def test_metrics_are_those_that_are_logged() -> None:
    """By a batch of two devices with memory of their own, and one with labels; of devices the first."""
    report = PipelineReport(
        [], [DeviceRow(f"meta:{i}", 1.0, 1, Traffic(), 0.5, 10**9) for i in range(2)], 2, 1, 2.0, 2.0, 0.5
    )
    counts = Counts()
    counts.add({"x": torch.zeros(2, 3), "labels": torch.zeros(2, 3, dtype=torch.long)})
    logged = [*metrics_between(None, report, counts), "host_memory_GB"]
    assert {name for name, _ in table("metric")} == {f"roundpipe/{name}" for name in logged if "device1" not in name}


@pytest.mark.parametrize("row", table("precision"), ids=lambda row: row[0].strip('"'))
def test_host_memory_is_what_is_counted_before_training(row: list[str]) -> None:
    mixed = row[0].strip('"').endswith("mixed")
    parameters, gradients, optimizer, *copies, _, _ = (int(cell) for cell in row[1:])
    for staleness in (0, 1):
        counted = bytes_of_trained(parameters, mixed=mixed, staleness=staleness)
        assert counted == HostBytes(parameters, gradients, optimizer, copies[staleness])


class HostMemory(L.LightningModule):
    """Notes, when everything has come to rest, how many bytes per parameter the tensors made since `known` hold."""

    def __init__(self) -> None:
        super().__init__()
        self.known = set(storages())
        self.net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_epoch_end(self) -> None:
        held = sum(size for address, size in storages().items() if address not in self.known)
        free = self.trainer.strategy._pipeline.gradients.memory._free.items()
        if any(dtype == torch.bfloat16 for (_, _, dtype), _ in free):  # the sums in full precision come on top
            held -= sum(t.nbytes for (_, _, dtype), tensors in free for t in tensors if dtype == torch.float32)
        self.bytes_per_parameter = held / sum(parameter.numel() for parameter in self.parameters())


def storages() -> dict[int, int]:
    """Sizes in bytes of all tensors' memory, by address."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    memory = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in memory}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("row", table("precision"), ids=lambda row: row[0].strip('"'))
def test_host_memory(row: list[str], staleness: int) -> None:
    """Two percent are left for batches, buffers and step counters."""
    precision, numbers = row[0].strip('"'), [int(cell) for cell in row[1:]]
    *parts, copies, stale_copies, total, stale_total = numbers
    assert total == sum(parts) + copies and stale_total == sum(parts) + stale_copies
    model = HostMemory()
    trainer = L.Trainer(
        strategy=RoundPipeStrategy(staleness=staleness),
        accelerator="cpu",
        devices=2,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    dtype = torch.float64 if precision == "64-true" else torch.bfloat16 if precision == "bf16-true" else torch.float32
    trainer.fit(model, DataLoader(torch.randn(18, 256, dtype=dtype), batch_size=6))
    assert model.bytes_per_parameter == pytest.approx(stale_total if staleness else total, rel=0.02)
