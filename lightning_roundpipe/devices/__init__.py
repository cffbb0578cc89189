"""Devices: where layers run. Nothing else in the package touches copies, streams or events."""

from lightning_roundpipe.devices.accelerator import AcceleratorDevice
from lightning_roundpipe.devices.base import Device, Event, Hardware, Stopwatch, Traffic, arrived
from lightning_roundpipe.devices.cpu import CpuDevice
from lightning_roundpipe.devices.simulated import DeviceMixError, SimulatedDevice, SimulatedTensor, simulating
from lightning_roundpipe.devices.simulated_streams import SimulatedEvent, SimulatedStream, StreamOrderError

__all__ = [
    "AcceleratorDevice",
    "CpuDevice",
    "Device",
    "DeviceMixError",
    "Event",
    "Hardware",
    "SimulatedDevice",
    "SimulatedEvent",
    "SimulatedStream",
    "SimulatedTensor",
    "Stopwatch",
    "StreamOrderError",
    "Traffic",
    "arrived",
    "simulating",
]
