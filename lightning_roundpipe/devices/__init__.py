"""Devices: where layers run. Nothing else in the package touches copies, streams or events."""

from lightning_roundpipe.devices.base import Device, Traffic
from lightning_roundpipe.devices.cpu import CpuDevice

__all__ = ["CpuDevice", "Device", "Traffic"]
