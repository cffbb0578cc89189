"""What stands between the user's step and the layers: their ``forward`` during a step, and parameters used outside.

Both are in force only while a step runs, and only in the threads of its microbatches. In between, the user's module is
untouched.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from lightning_roundpipe.pipeline.compiling import compiled_function
from lightning_roundpipe.pipeline.replica import Layer

CallHandler = Callable[[Layer, tuple[Any, ...], dict[str, Any]], Any]
SplitHandler = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Returns NotImplemented where the call is not split."""

_current = threading.local()

# What is about the parameter object itself rather than its values.
_ABOUT_THE_OBJECT = {
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__deepcopy__",
    "__reduce_ex__", "__setstate__", "detach_", "set_", "share_memory_", "is_shared", "data_ptr", "__hash__",
    "untyped_storage", "backward", "size", "dim", "numel", "stride", "__len__", "__repr__", "__format__",
}  # fmt: skip
_DIFFERENTIABLE_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}


@contextmanager
def handling_calls(handler: CallHandler) -> Iterator[None]:
    """Lets the handler execute the layer calls of this thread."""
    _current.handler = handler
    try:
        yield
    finally:
        _current.handler = None


class handling_no_calls:  # a class, and no generator, because it is entered in every call
    """Lets layers that are called from within a layer run as they are."""

    def __enter__(self) -> None:
        self._handler = _current.handler
        _current.handler = None

    def __exit__(self, *exc: object) -> None:
        _current.handler = self._handler


@contextmanager
def splitting_calls(handler: SplitHandler) -> Iterator[None]:
    """Lets the handler split calls of modules in this thread, except those within a call that it has split."""
    _current.splitter = handler
    try:
        yield
    finally:
        _current.splitter = None


def in_checkpoint() -> bool:
    """Whether hooks on saved tensors are in force: a (non-reentrant) checkpoint runs its part of the step, or, within
    the backward, runs it again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class Interception:
    """Puts our ``forward`` on the layers, and takes it off again."""

    def __init__(self, root: nn.Module, layers: Sequence[Layer]) -> None:
        self._root = root
        self._layers = layers
        self._split: list[_SplitForward] = []
        self._checkpointing: list[dict[str, Any]] = []
        self._compiled: list[tuple[dict[str, Any], str, Any]] = []
        self._intercepts = [_InterceptedForward(layer) for layer in layers]
        for layer, intercept in zip(layers, self._intercepts, strict=True):
            layer.intercept = intercept

    def split_calls(self, modules: Iterable[nn.Module]) -> None:
        """Calls of these modules, too, are intercepted."""
        chosen = {id(module): module for module in modules}
        for layer, intercept in zip(self._layers, self._intercepts, strict=True):
            intercept.splits = chosen.pop(id(layer.module), None) is not None
        self._split = [_SplitForward(module) for module in chosen.values()]

    def install(self) -> None:
        """Also switches off compiled code around the layers, and transformers' gradient checkpointing of them: the
        pipeline recomputes them itself.
        """
        for attributes, name, value in list(_compiled_around(self._root, self._layers)):
            self._compiled.append((attributes, name, attributes[name]))
            attributes[name] = value
        self._checkpointing = [
            module.__dict__
            for layer in self._layers
            for module in layer.modules
            if module.__dict__.get("gradient_checkpointing") is True
        ]
        for attributes in self._checkpointing:
            attributes["gradient_checkpointing"] = False
        for layer in self._layers:
            attributes = layer.module.__dict__
            layer.own_forward = attributes.get("forward")
            attributes["forward"] = layer.intercept
        for split in self._split:
            split.put_on()

    def remove(self) -> None:
        for split in self._split:
            split.take_off()
        for attributes in self._checkpointing:
            attributes["gradient_checkpointing"] = True
        self._checkpointing = []
        for layer in self._layers:
            attributes = layer.module.__dict__
            if attributes.get("forward") is layer.intercept:
                if layer.own_forward is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = layer.own_forward
        for attributes, name, value in self._compiled:
            attributes[name] = value
        self._compiled = []


def _compiled_around(root: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where compiled code is called that leads to layers: attributes, name, and what stands there during a step."""
    inside = {id(module) for layer in layers for module in layer.modules[1:]}
    tops = {id(layer.module) for layer in layers}
    for module in root.modules():
        if id(module) in inside or not any(id(submodule) in tops for submodule in module.modules()):
            continue
        attributes = module.__dict__
        if isinstance(module, OptimizedModule):
            yield attributes, "forward", module._orig_mod.__call__
        elif (compiled := compiled_function(attributes.get("forward"))) is not None:
            yield attributes, "forward", compiled[1]
        if attributes.get("_compiled_call_impl") is not None:
            yield attributes, "_compiled_call_impl", None


def _split_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a call that this thread's handler splits, else NotImplemented."""
    splitter: SplitHandler | None = getattr(_current, "splitter", None)
    return NotImplemented if splitter is None else splitter(module, args, kwargs)


class _SplitForward:
    """The ``forward`` of a module that holds layers and whose calls may be split."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own: Callable[..., Any] | None = None

    def put_on(self) -> None:
        attributes = self._module.__dict__
        self._own = attributes.get("forward")
        attributes["forward"] = self

    def take_off(self) -> None:
        attributes = self._module.__dict__
        if attributes.get("forward") is self:
            if self._own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self._own

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = _split_call(self._module, args, kwargs)
        return self._plain()(*args, **kwargs) if output is NotImplemented else output

    def _plain(self) -> Callable[..., Any]:
        return self._own if self._own is not None else MethodType(type(self._module).forward, self._module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the module, made within a step, is a module of its own."""
        copied: nn.Module | None = memo.get(id(self._module))
        if copied is None or self._own is not None:
            return copy.deepcopy(self._plain(), memo)
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


class _InterceptedForward:
    """The ``forward`` that stands in a layer's ``__dict__`` during a step."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.splits = False
        """Whether its calls may be split."""

    @torch.compiler.disable  # a compiled function that calls layers is interrupted there
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        if self.splits and (output := _split_call(layer.module, args, kwargs)) is not NotImplemented:
            return output
        handler: CallHandler | None = getattr(_current, "handler", None)
        if handler is not None and layer.has_own_parameters():
            return handler(layer, args, kwargs)
        return self._plain(layer.module)(*args, **kwargs)

    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        if self._layer.own_forward is not None:
            return self._layer.own_forward
        return MethodType(type(module).forward, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the module, made within a step, is a module of its own."""
        copied: nn.Module | None = memo.get(id(self._layer.module))
        if copied is None or self._layer.own_forward is not None:
            return copy.deepcopy(self._plain(self._layer.module), memo)
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._layer.module, "forward")


class OutsideParameters(TorchFunctionMode):
    """Parameters used by the code between layers: replaced by leaves of the microbatch's own.

    So their gradients are the microbatch's, not added by several threads to the module's parameters in any order.

    Args:
        owns: Whether a tensor is one of the module's parameters.
        stand_in: The leaf that stands for a parameter in this microbatch.
        value: The same where gradients are disabled, as in an in-place update of a teacher.
        memory: What stands for it where its memory is asked for (``.data``).
        touched: Told of a parameter whose memory the code was given, and whether it certainly changes it.
        flagged: Told of a parameter whose ``requires_grad`` is going to be changed.
    """

    def __init__(
        self,
        owns: Callable[[object], bool],
        *,
        stand_in: Callable[[nn.Parameter], Tensor],
        value: Callable[[nn.Parameter], Tensor],
        memory: Callable[[nn.Parameter], Tensor],
        touched: Callable[[nn.Parameter, Tensor, bool], None],
        flagged: Callable[[nn.Parameter], None],
    ) -> None:
        super().__init__()
        self._owns = owns
        self._stand_in = stand_in
        self._value = value
        self._memory = memory
        self._touched = touched
        self._flagged = flagged
        self._paused = False
        self.only_if: Callable[[], bool] | None = None
        """When to replace at all, if not always: in the backward, only in what a checkpoint runs again."""

    def paused(self) -> "_Paused":
        """Replaces nothing for a while: inside layers."""
        return _Paused(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or (self.only_if is not None and not self.only_if()):
            return func(*args, **kwargs)
        involved = any_parameter(args, self._owns) or any_parameter(kwargs.values(), self._owns)
        if involved and touches_memory(func):
            return self._with_memory(func, args, kwargs)
        if involved and not is_about_the_object(func):
            return self._with_stand_ins(func, args, kwargs)
        if involved and _freezes_or_unfreezes(func, args, kwargs):
            self._flagged(args[0])
        return func(*args, **kwargs)

    @torch.compiler.disable
    def _with_stand_ins(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        used: list[tuple[nn.Parameter, Tensor]] = []
        args = tuple(self.replace(item, used) for item in args)
        kwargs = {key: self.replace(item, used) for key, item in kwargs.items()}
        versions = [tensor._version for _, tensor in used]
        result = func(*args, **kwargs)
        for (parameter, tensor), version in zip(used, versions, strict=True):
            if tensor._version != version:
                self._touched(parameter, tensor, True)
        return result

    @torch.compiler.disable
    def _with_memory(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Functions that read or write a parameter's own memory."""
        writes = getattr(func, "__name__", "") in ("__set__", "set_")
        if writes and isinstance(args[0], nn.Parameter) and self._owns(args[0]):
            parameter = args[0]
            self._memory(parameter)  # after its pending step
            args = (parameter, *(self._memory_of(item) for item in args[1:]))
            self._touched(parameter, parameter, True)
            result = func(*args, **kwargs)
            self._touched(parameter, parameter, True)
            return result
        parameters = [item for item in (*args, *kwargs.values()) if isinstance(item, nn.Parameter) and self._owns(item)]
        result = func(
            *(self._memory_of(item) for item in args),
            **{key: self._memory_of(item) for key, item in kwargs.items()},
        )
        for parameter in parameters:
            self._touched(parameter, result if isinstance(result, Tensor) else parameter, False)
        return result

    def _memory_of(self, item: Any) -> Any:
        return self._memory(item) if isinstance(item, nn.Parameter) and self._owns(item) else item

    def replace(self, item: Any, used: list[tuple[nn.Parameter, Tensor]] | None = None) -> Any:
        """A value with the module's parameters replaced, in lists and tuples, too. Notes in ``used`` what was."""
        if isinstance(item, nn.Parameter) and self._owns(item):
            new = self._stand_in(item) if torch.is_grad_enabled() else self._value(item)
            if used is not None:
                used.append((item, new))
            return new
        if type(item) in (list, tuple) and any_parameter(item, self._owns):
            return type(item)(self.replace(part, used) for part in item)
        return item


class _Paused:
    def __init__(self, mode: OutsideParameters) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._on_top = _get_current_function_mode() is self._mode
        if self._on_top:
            _pop_mode()
        else:
            self._mode._paused = True  # a mode of the user's own lies above this one on the stack

    def __exit__(self, *exc: object) -> None:
        if self._on_top:
            _push_mode(self._mode)
        else:
            self._mode._paused = False


def any_parameter(items: Iterable[Any], owns: Callable[[object], bool]) -> bool:
    """Whether one of the module's parameters is among the items, or in lists and tuples among them."""
    return any(
        (isinstance(item, nn.Parameter) and owns(item)) or (type(item) in (list, tuple) and any_parameter(item, owns))
        for item in items
    )


def touches_memory(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    return name in ("__deepcopy__", "__reduce_ex__", "set_", "untyped_storage", "data_ptr", "numpy", "share_memory_")


def _freezes_or_unfreezes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "requires_grad":
        wanted = args[1]
    elif name == "requires_grad_":
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    else:
        return False
    return bool(wanted) != args[0].requires_grad


def is_about_the_object(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _DIFFERENTIABLE_PROPERTIES
    return name in _ABOUT_THE_OBJECT
