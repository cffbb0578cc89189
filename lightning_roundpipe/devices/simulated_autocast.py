"""Autocast on simulated devices: what the CPU's autocast casts of tensors on the CPU is cast of those on a device.

torch has no autocast for ``meta``. The casts must be above autograd, which differentiates them, and simulated
operations are computed below it. So simulated tensors have a dispatch key that comes before autograd's; there, the
operations that autocast knows cast their arguments first. Which, and to what, is asked of the CPU's autocast itself.
What it casts of a weight is not kept for the next use, whether ``cache_enabled`` or not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# One of autocast's keys, so that it is none of a backend; of no other use here.
_KEY = torch._C.DispatchKey.AutocastIPU  # type: ignore[attr-defined]
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
KEYS = torch._C.DispatchKeySet(_KEY)
"""The dispatch keys of simulated tensors besides those that torch gives them."""

_libraries: list[library.Library] = []
_known: dict[tuple[Any, ...], dict[int, torch.dtype]] = {}
"""What each argument, by number, is cast to, by the operation, autocast's type and those of all arguments."""


@cache
def autocast_as_on_the_host(kind: type[Tensor]) -> None:
    """From now on, autocast for the CPU is in force for simulated tensors, too, and ``"meta"`` is a name for it.

    Args:
        kind: The class of simulated tensors.
    """
    everything = library.Library("_", "IMPL")
    everything.fallback(library.fallthrough_kernel, _KEY.name)
    _libraries.append(everything)
    by_namespace: dict[str, library.Library] = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
        namespace, _, operation = name.partition("::")
        if namespace not in by_namespace:
            by_namespace[namespace] = library.Library(namespace, "IMPL")
        by_namespace[namespace].impl(operation, partial(_run, kind, _overload(namespace, operation)), _KEY.name)
    _libraries.extend(by_namespace.values())
    for owner, name in ((torch.autocast, "__init__"), (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype")):
        setattr(owner, name, _for_the_host(getattr(owner, name)))


@contextmanager
def watching_casts() -> Iterator[None]:
    """In this thread, simulated tensors are cast where autocast is on."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, True)


def _overload(namespace: str, name: str) -> Any:
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _for_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes a kind of device, asked about the CPU when asked about simulated devices."""

    def name(value: Any) -> Any:
        return "cpu" if isinstance(value, str) and value == "meta" else value

    @wraps(function)
    def of_host(*args: Any, **kwargs: Any) -> Any:
        return function(*map(name, args), **{key: name(value) for key, value in kwargs.items()})

    return of_host


def _run(kind: type[Tensor], func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation; under autocast, on what it casts its arguments to."""
    if any(isinstance(leaf, _StandIn) for leaf in tree_leaves((args, kwargs))):
        raise _Begins(args, kwargs)
    with torch._C.DisableTorchFunction():  # which is behind us, and does not see casts
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = _cast(kind, func, args, kwargs)
        with torch._C._ExcludeDispatchKeyGuard(KEYS | _CPU):
            return func(*args, **kwargs)


def _cast(kind: type[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    types = [leaf.dtype if isinstance(leaf, kind) else None for leaf in leaves]
    key = func, torch.get_autocast_dtype("cpu"), structure, *types
    wanted = _known.get(key)
    if wanted is None:
        stand_ins = [_StandIn(i, leaf.size(), type_) if (type_ := types[i]) is not None else leaf
                     for i, leaf in enumerate(leaves)]  # fmt: skip
        wanted = _known[key] = _casts(func, *tree_unflatten(stand_ins, structure))
    cast = [leaf.to(wanted[i]) if i in wanted else leaf for i, leaf in enumerate(leaves)]
    return tree_unflatten(cast, structure)


def _casts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.dtype]:
    """What an operation gets in the place of stand-ins, after autocast."""
    try:
        func.redispatch(_CPU, *args, **kwargs)
    except _Begins as begins:
        return {leaf.number: leaf.dtype for leaf in tree_leaves(begins.args) if isinstance(leaf, _StandIn)}
    raise AssertionError(f"{func} does not begin after autocast")


class _Begins(Exception):
    """An operation begins, with these arguments."""


class _StandIn(Tensor):
    """A tensor on the CPU without values, and its number among an operation's arguments: all that autocast looks at."""

    number: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, number: int, size: torch.Size, dtype: torch.dtype) -> "_StandIn":
        self: _StandIn = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, _extra_dispatch_keys=KEYS)
        self.number = number
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func is torch.ops.aten._to_copy.default and kwargs is not None, func
        return _StandIn(args[0].number, args[0].size(), kwargs["dtype"])
