"""Accelerators that Lightning chooses: the pipeline runs on the devices that it has parsed, and the module stays on the
host.

There need be no GPU: a stand-in for Lightning's accelerator has simulated devices.
"""

import gc
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Batches, assert_equal, fit_microbatches, result
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_exactness import data, make
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import SimulatedDevice, hardware
from lightning_roundpipe.devices.hardware import TorchHardware, hardware_of
from lightning_roundpipe.devices.simulated import simulated_device


class Pretended(Accelerator):
    """Four devices, which are simulated."""

    set_up: list[torch.device] = []

    def setup_device(self, device: torch.device) -> None:
        if device.type != "meta":  # as CUDA's refuses others
            raise MisconfigurationException(f"Device should be simulated, got {device}")
        self.set_up.append(device)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"peak": float(simulated_device(torch.device(device)).memory.peak)}

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("meta", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "pretended"


@pytest.fixture(autouse=True)
def fresh_devices() -> None:
    """Without what other tests have left on theirs."""
    for index in range(4):
        SimulatedDevice(index)
    Pretended.set_up = []


def train(devices: Any, module: L.LightningModule | None = None, **options: Any) -> L.Trainer:
    settings = {"logger": False, "enable_checkpointing": False, "max_epochs": 1} | options
    trainer = L.Trainer(
        strategy=RoundPipeStrategy(microbatches=3, split="step"),
        accelerator=Pretended(),
        devices=devices,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    L.seed_everything(0, verbose=False)
    trainer.fit(module or make("mlp", torch.float64), Batches(data("mlp", torch.float64)))
    return trainer


@pytest.mark.parametrize(("devices", "used"), [([0, 2], [0, 2]), (1, [0]), ("auto", [0, 1, 2, 3])])
def test_devices_that_lightning_has_parsed(devices: Any, used: list[int]) -> None:
    trainer = train(devices)
    assert [row.name for row in trainer.strategy.report().devices] == [f"meta:{index}" for index in used]
    assert all((simulated_device(torch.device("meta", index)).up.count > 0) == (index in used) for index in range(4))
    L.seed_everything(0, verbose=False)
    assert_equal(result(trainer), result(fit_microbatches(make("mlp", torch.float64), data("mlp", torch.float64), 3)))


def test_the_module_stays_in_host_memory_and_nothing_on_devices() -> None:
    module = make("mlp", torch.float64)
    before = {name: (id(p), p.data_ptr()) for name, p in module.named_parameters()}
    trainer = train(2, module)
    assert trainer.strategy.root_device == module.device == torch.device("cpu")
    assert {name: (id(p), p.data_ptr()) for name, p in module.named_parameters()} == before
    assert Pretended.set_up == [torch.device("meta", 1), torch.device("meta", 0)], "the first one is the current one"
    assert type(trainer.accelerator).__name__ == "Pretended" and isinstance(trainer.accelerator, Pretended)
    for _ in range(3):  # a graph in C++ that a cycle held lets go of the next cycle only when it is gone
        gc.collect()
    assert [simulated_device(torch.device("meta", index)).memory.live for index in range(4)] == [0] * 4


def test_device_stats_monitor(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    train([1, 3], logger=logger, callbacks=[DeviceStatsMonitor()], log_every_n_steps=1)
    (line, *_) = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    for index in (1, 3):
        assert f"DeviceStatsMonitor.on_train_batch_end/meta:{index}/peak" in line


MULTITHREADED: list[bool] = []


class InBackward(torch.autograd.Function):
    """Notes whether autograd may go on in threads of devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        MULTITHREADED.append(torch._C._is_multithreading_enabled())
        return gradient


class Noting(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return InBackward.apply(super().forward(x))


class Notes(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Noting(4, 4) for _ in range(3))

    def training_step(self, x: Tensor, index: int) -> Tensor:
        for layer in self.layers:
            x = InBackward.apply(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_backward_stays_in_its_microbatch_s_thread() -> None:
    """Autograd's thread of a device would wait within one call for the turn of another that is behind it."""
    MULTITHREADED.clear()
    trainer = L.Trainer(
        strategy=RoundPipeStrategy(microbatches=2, split="step"),
        accelerator=Pretended(),
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Notes(), Batches([torch.randn(4, 4)] * 2))
    assert MULTITHREADED == [False] * (2 * 2 * 6), "for each batch, microbatch, layer, and the code after it"
    assert torch._C._is_multithreading_enabled()


def test_gpus() -> None:
    """As far as can be seen without one: Lightning's choice is taken as it is."""
    strategy = RoundPipeStrategy()
    strategy.accelerator = CUDAAccelerator()
    strategy.parallel_devices = CUDAAccelerator.get_parallel_devices([0, 2])
    assert isinstance(strategy.accelerator, CUDAAccelerator)
    assert strategy._hardware == [torch.device("cuda", 0), torch.device("cuda", 2)]
    assert strategy._device_count() == 2 and strategy.root_device == torch.device("cpu")


def test_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's device-neutral API, whatever kind of device it is."""
    calls: list[str] = []
    module = SimpleNamespace(
        init=lambda: calls.append("init"),
        default_generators=("g0", "g1", "g2"),
        max_memory_allocated=lambda device: 1000 + device.index,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = hardware_of(torch.device("xpu", 2))
    assert isinstance(device, TorchHardware) and device.generator == "g2" and device.name == "xpu:2"
    assert calls == ["init"] and device.peak_memory() == 1002

    class Event:
        def __init__(self, torch_device: torch.device, *, enable_timing: bool) -> None:
            calls.append(f"event of {torch_device}, {enable_timing}")

        def record(self, stream: str) -> None:
            calls.append(f"recorded on {stream}")

    monkeypatch.setattr(torch, "Event", Event)
    assert isinstance(device.timestamp("compute"), Event)
    assert calls[1:] == ["event of xpu:2, True", "recorded on compute"]
    assert hardware_of(torch.device("meta", 1)) is simulated_device(torch.device("meta", 1))
    with pytest.raises(ValueError, match="has no index"):
        hardware_of(torch.device("cuda"))


def test_marks_are_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock tells only how much time there was between two events of it."""
    device_clock, host_clock = iter([500.0, 530.0, 570.0]), iter([7.0])

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert device == torch.device("xpu", 0) and enable_timing
            self.waited = False

        def record(self, stream: str) -> None:
            assert stream == "a stream"
            self.milliseconds = next(device_clock)

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, end: "Event") -> float:
            assert self.waited and end.waited
            return end.milliseconds - self.milliseconds

    module = SimpleNamespace(init=lambda: None, default_generators=("g0",))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(host_clock))
    device = hardware_of(torch.device("xpu", 0))
    start, end = device.mark("a stream"), device.mark("a stream")
    monkeypatch.undo()
    assert (start(), end()) == pytest.approx((7.03, 7.07))


def test_what_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="are simulated devices, and Lightning has chosen CUDAAccel"):
        RoundPipeStrategy(devices=[SimulatedDevice(0)]).accelerator = CUDAAccelerator()
    with pytest.raises(MisconfigurationException, match="MPSAccelerator have no streams"):
        RoundPipeStrategy().accelerator = object.__new__(MPSAccelerator)
    strategy = RoundPipeStrategy(devices=[SimulatedDevice(0)])
    strategy.accelerator = accelerator = CPUAccelerator()
    assert strategy.accelerator is accelerator


@pytest.mark.parametrize("devices", [2, "auto"])
def test_a_number_of_devices_is_the_trainer_s(devices: Any) -> None:
    """Python's own words: an int is not iterable."""
    with pytest.raises(TypeError, match=rf"list of devices.*Trainer\(devices={devices!r}\)"):
        RoundPipeStrategy(devices=devices)
