"""When the streams of an accelerator are at work, for a timeline."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_roundpipe.devices.accelerator import AcceleratorDevice
from lightning_roundpipe.devices.base import Mark

Add = Callable[[Mark, Mark], None]
"""Takes the start and the end of some work."""


class RecordedHardware:
    """An accelerator of whose streams it is noted when they do what they are given.

    Args:
        device: Whose hardware it stands before, until it is put back.
        wants: Asked with the stream's name where work for it begins. Returns who is to be told, or None.
    """

    def __init__(self, device: AcceleratorDevice, wants: Callable[[str], Add | None]) -> None:
        self._hardware = device.hardware
        self._names = {id(stream): name for name, stream in device.streams.items()}
        self._wants = wants

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Within it, this thread's work on the device goes to a stream."""
        name = self._names.get(id(stream))
        add = None if name is None else self._wants(name)
        with self._hardware.on(stream):
            if add is None:
                yield
                return
            start = self._hardware.mark(stream)
            yield
            add(start, self._hardware.mark(stream))

    def put_back(self, device: AcceleratorDevice) -> None:
        """The device is not recorded any more."""
        device.hardware = self._hardware
