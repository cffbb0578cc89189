"""How much of each device's memory stages may take."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from lightning_roundpipe.devices.base import Device

DeviceMemory: TypeAlias = int | float | Literal["auto"]
"""Bytes, a share of all there are, or ``"auto"``: what is free."""


def check_device_memory(wanted: object) -> None:
    """
    Raises:
        ValueError: It is neither a number of bytes, nor a share, nor ``"auto"``.
    """
    is_bytes = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0
    if not (wanted == "auto" or is_bytes or (isinstance(wanted, float) and 0 < wanted <= 1)):
        raise ValueError(
            "`device_memory` must be a whole number of bytes, a share of the device's memory above 0 and up to 1.0, or"
            f" 'auto'; got {wanted!r}."
        )


def memory_limit(wanted: DeviceMemory, devices: Sequence[Device]) -> int | None:
    """The bytes that may be taken of each of the devices, any of which may get any stage; None: as many as it takes.

    Raises:
        ValueError: A share is asked for of a device of which it is not known how much it has.
    """
    if wanted == "auto":
        return min((free for device in devices if (free := device.free_memory()) is not None), default=None)
    if isinstance(wanted, int):
        return wanted
    totals = []
    for device in devices:
        if (total := device.total_memory()) is None:
            raise ValueError(
                f"`device_memory` is {wanted}, a share of the device's memory, but {device.name} has no limit to it"
                " that is known. Give a number of bytes instead."
            )
        totals.append(total)
    return int(wanted * min(totals))
