"""Parameters used by the main thread between batches, while optimizer steps are pending.

A dataset, a collate function or a scheduler may use the model: mine hard negatives with it, or look up its embeddings.
In plain Lightning it would find the weights with all steps made.
"""

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from lightning_roundpipe.pipeline.interception import any_parameter, is_about_the_object, touches_memory


class UseBetweenBatches(TorchFunctionMode):
    """Waits for what is pending as soon as the thread that began it uses one of the module's parameters.

    It is in force for a stretch of code that no ``with`` can enclose, and in which the user's own modes may begin and
    end: it lies below them on the stack. No module is touched, and torch functions on other tensors go through.

    Args:
        owns: Whether a tensor is one of the module's parameters.
        settle: Waits until every backward and optimizer step is done.
    """

    def __init__(self, owns: Callable[[object], bool], settle: Callable[[], None]) -> None:
        super().__init__()
        self._owns = owns
        self._settle = settle
        self._pending = False
        self._home = (os.getpid(), threading.get_ident())

    def begin(self) -> None:
        """From now on, something is pending."""
        self._pending = True
        stack = _get_current_function_mode_stack()
        if self not in stack:
            lowest = 1 if stack and stack[0] is _default_device() else 0
            _set_stack([*stack[:lowest], self, *stack[lowest:]])

    def end(self) -> None:
        """Nothing is pending any more. Within a torch function, the mode itself leaves with the next call of this."""
        self._pending = False
        stack = _get_current_function_mode_stack()
        if threading.get_ident() == self._home[1] and self in stack:
            _set_stack([mode for mode in stack if mode is not self])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            self._pending
            and (any_parameter(args, self._owns) or any_parameter(kwargs.values(), self._owns))
            and (touches_memory(func) or not is_about_the_object(func))
            and os.getpid() == self._home[0]  # a forked worker of a data loader has no steps to wait for
        ):
            self._pending = False
            self._settle()
        return func(*args, **kwargs)


def _default_device() -> object:
    """The mode of ``torch.set_default_device``, which must find itself at the bottom."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _set_stack(modes: Iterable[TorchFunctionMode]) -> None:
    while _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
