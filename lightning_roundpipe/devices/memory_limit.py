"""How much of each device's memory stages may take."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from lightning_roundpipe.devices.base import Device
from lightning_roundpipe.units import size_text

DeviceMemory: TypeAlias = int | float | Literal["auto"]
"""Bytes, a share of all there are, or ``"auto"``: what is free."""


LEAST = 10**6
"""Bytes. Who gives a smaller number has meant another unit."""


def check_device_memory(wanted: object, *, simulated: bool = False) -> None:
    """
    Args:
        wanted: What is to be looked at.
        simulated: Whether the devices are simulated, and so may be as small as one likes.

    Raises:
        ValueError: It is neither a number of bytes, nor a share, nor ``"auto"``; or so few bytes that another unit must
            have been meant.
    """
    is_bytes = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0
    if not (wanted == "auto" or is_bytes or (isinstance(wanted, float) and 0 < wanted <= 1)):
        raise ValueError(
            "`device_memory` must be a whole number of bytes, a share of the device's memory above 0 and up to 1.0, or"
            f" 'auto'; got {wanted!r}."
        )
    if is_bytes and isinstance(wanted, int) and wanted < LEAST and not simulated:
        meant = (
            "1.0, all of the device's memory"
            if wanted == 1
            else f"{wanted} * 10**9, {wanted} GB"
            if wanted < 1000
            else f"{wanted} * 10**6, {wanted} MB"
        )
        raise ValueError(
            f"`device_memory` is {wanted}, a whole number and so in bytes: no stage fits into that. You probably meant"
            f" {meant}."
        )


def memory_limit(wanted: DeviceMemory, devices: Sequence[Device], warn: Callable[[str], None]) -> int | None:
    """The bytes that may be taken of each of the devices, any of which may get any stage; None: as many as it takes.

    Args:
        wanted: What the user has asked for.
        devices: The devices.
        warn: Told where that is more than a device has. Then it is what is free.

    Raises:
        ValueError: A share is asked for of a device of which it is not known how much it has.
    """
    free = min((free for device in devices if (free := device.free_memory()) is not None), default=None)
    if wanted == "auto":
        return free
    if isinstance(wanted, int):
        known = [(total, device) for device in devices if (total := device.total_memory()) is not None]
        total, smallest = min(known, key=lambda each: each[0], default=(wanted, None))
        if wanted <= total or smallest is None or free is None:
            return wanted
        warn(
            f"roundpipe: device_memory={wanted} is {size_text(wanted)}, and {smallest.name} has {size_text(total)}:"
            f" stages may take what is free of it, {size_text(free)}, as with device_memory='auto'."
        )
        return free
    totals = []
    for device in devices:
        if (total := device.total_memory()) is None:
            raise ValueError(
                f"`device_memory` is {wanted}, a share of the device's memory, but {device.name} has no limit to it"
                " that is known. Give a number of bytes instead."
            )
        totals.append(total)
    return int(wanted * min(totals))
