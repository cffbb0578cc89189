"""The caller's autocast state, which a layer call takes with it."""

import functools
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


@functools.cache
def _device_kinds() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


class AutocastState:
    """The caller's autocast state, to be entered again and again."""

    __slots__ = ("_settings",)

    def __init__(self) -> None:
        self._settings = [
            (kind, torch.get_autocast_dtype(kind)) for kind in _device_kinds() if torch.is_autocast_enabled(kind)
        ]

    def half_type(self, kind: str) -> torch.dtype | None:
        """What autocast casts to on devices of a kind, if it is on."""
        return dict(self._settings).get(kind)

    def again(self) -> AbstractContextManager[Any]:
        """Brings the state into force for a while."""
        if not self._settings and not torch.is_autocast_enabled("cpu"):
            return _NOTHING
        stack = ExitStack()
        wanted = {kind for kind, _ in self._settings}
        for kind, dtype in self._settings:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        if "cpu" not in wanted and torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        return stack
