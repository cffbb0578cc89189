"""Lightning's accelerators, for a module that stays in host memory: the devices are a pool, and none is its root.

Whatever accelerator Lightning (or the user) chose keeps its class and state; it is extended by the mixin.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, MPSAccelerator, XLAAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

Devices = Callable[[], Sequence[torch.device]]


class HostRoot(Accelerator):
    """Mixin for Lightning's accelerators; see :func:`with_host_root`."""

    _pool: Devices

    def setup_device(self, device: torch.device) -> None:
        """Sets the pool's devices up, the first one last: it is the main thread's current one."""
        for each in reversed(self._pool()):
            super().setup_device(each)  # type: ignore[safe-super]

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The statistics of all devices of the pool, each with the device's name before its own."""
        stats: dict[str, Any] = {}
        for each in self._pool():
            stats.update({f"{each}/{name}": value for name, value in super().get_device_stats(each).items()})
        return stats


def with_host_root(accelerator: Accelerator, pool: Devices) -> Accelerator:
    """The accelerator, extended by :class:`HostRoot`, unless its devices are the host's own.

    Args:
        accelerator: Lightning's. It is left as it is; its state is shared.
        pool: The devices, as Lightning has parsed them.

    Raises:
        MisconfigurationException: When layers cannot be run on such devices.
    """
    if isinstance(accelerator, CPUAccelerator):
        return accelerator
    if isinstance(accelerator, (MPSAccelerator, XLAAccelerator)):
        raise MisconfigurationException(
            f"Devices of {type(accelerator).__name__} have no streams and events of torch's device-neutral API. Use"
            " Trainer(accelerator='cpu', devices=...), or a GPU."
        )
    kind: Any = type(accelerator)
    if issubclass(kind, HostRoot):
        kind = next(base for base in kind.__mro__[1:] if not issubclass(base, HostRoot))
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__, "__doc__": kind.__doc__}
    extended: Any = object.__new__(type(kind.__name__, (HostRoot, kind), names))
    extended.__dict__ = {**accelerator.__dict__, "_pool": pool}
    return extended
