"""Tensors that are not where they are used: moved, instead of an error.

The code of a step finds its activations on the device of the layer before, and that is another one for each stage. What
it brings itself (masks that it makes, attributes, labels) lies on the host, or where an earlier layer ran.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, _make_grads
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lightning_roundpipe.devices import arrived
from lightning_roundpipe.pipeline.watching import OF_ALL_MODULES, is_plain_object

_JOINING = {
    torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.dstack,
    torch.column_stack, torch.row_stack,
}  # fmt: skip
"""They take no host tensor for a number."""
_IN_ITS_PLACE = {"__setitem__", "__getitem__"}
_MOVING = {"to", "copy_", "cpu", "cuda", "type", "type_as", "__set__", "set_"}
_SEEDS = {torch.autograd.grad: "grad_outputs", Tensor.backward: "gradient"}
"""What differentiates, and the name of the gradients that it begins with: each of them where its tensor is."""


class Strays(TorchFunctionMode):
    """Lets operations have all their tensors on one device: where what they change is, or else where the first of them
    is that is on a device. A checkpoint that runs code again thus finds everything where it was.

    Args:
        staged: Makes what goes up from host memory; see :meth:`Device.staged`.
    """

    def __init__(self, staged: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._staged = staged
        _watch_custom_functions()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            with self:  # a torch function by itself: without this, no stray tensor would be moved in it
                return self._backward(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # quickly: most look at an attribute of it
            return func(*args)
        found = list(_tensors((*args, *kwargs.values())))
        if len(found) < 2:
            return func(*args, **kwargs)
        devices = {tensor.device for tensor in found}
        if len(devices) == 1 or (name := getattr(func, "__name__", "")) in _MOVING:
            return func(*args, **kwargs)
        if (seeds := _SEEDS.get(func)) is not None:
            return func(*args, **{**kwargs, seeds: self._move_to_each(kwargs.get(seeds), args[0])})
        target = next(tensor.device for tensor in found if tensor.device.type != "cpu")
        if isinstance(kwargs.get("out"), Tensor):
            target = kwargs["out"].device
        elif isinstance(args[0], Tensor) and (name in _IN_ITS_PLACE or _is_in_place(name)):
            target = args[0].device
        numbers = func not in _JOINING and target.type != "cpu"  # which the host may have
        args = tuple(self._move(item, target, numbers) for item in args)
        return func(*args, **{key: self._move(item, target, numbers) for key, item in kwargs.items()})

    def _backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward``, with each gradient moved to where its tensor is."""
        gradients = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors or (None,) * len(tensors)
        seeds = _make_grads(tensors, self._move_to_each(gradients, tensors), is_grads_batched=False)
        keep = create_graph if retain_graph is None else retain_graph
        _engine_run_backward(tensors, seeds, keep, create_graph, tuple(inputs or ()), True, accumulate_grad=True)

    def _move(self, item: Any, target: torch.device, numbers: bool) -> Any:
        if isinstance(item, Tensor):
            stays = item.device == target or (numbers and item.dim() == 0 and item.device.type == "cpu")
            return item if stays else self.move(item, target)
        if type(item) in (list, tuple):
            return type(item)(self._move(part, target, numbers) for part in item)
        return item

    def _move_to_each(self, item: Any, tensors: Any) -> Any:
        """Values, each to where its tensor is."""
        if isinstance(item, Tensor):
            return self.move(item, tensors.device if isinstance(tensors, Tensor) else tensors[0].device)
        if type(item) in (list, tuple):
            return type(item)(map(self._move_to_each, item, tensors))
        return item

    def move(self, tensor: Tensor, target: torch.device) -> Tensor:
        """The tensor there. The host does not wait for what goes up, if it need not."""
        if tensor.device.type != "cpu" or target.type == "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.to(target)
        source = self._staged(tensor)
        return source.to(target, non_blocking=source is not tensor)


@cache
def _watch_custom_functions() -> None:
    """From now on, custom autograd functions among strays get what they differentiate on one device, too: a gradient
    must be where its input is, and no mode sees the call."""
    apply = Function.__dict__["apply"].__func__

    def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        strays = next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, Strays)), None)
        if strays is not None:
            on_devices = [arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type != "cpu"]
            if on_devices:
                args = tuple(
                    strays.move(arg, on_devices[0]) if isinstance(arg, Tensor) and arg.requires_grad else arg
                    for arg in args
                )
        return apply(cls, *args, **kwargs)

    Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]


def bring_home(root: nn.Module, bring_down: Callable[[Tensor], Tensor]) -> None:
    """After a step: what it has left on the modules, in lists and dicts, too, goes to host memory, where the module is.

    Args:
        root: The user's module.
        bring_down: See :meth:`Device.bring_down`.
    """
    brought: dict[int, tuple[Tensor, Tensor]] = {}  # what is in several places stays one tensor

    def down(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in brought:  # what has a gradient keeps it
            brought[id(tensor)] = tensor, tensor.to("cpu") if tensor.requires_grad else bring_down(tensor)
        return brought[id(tensor)][1]

    _replace_all(root, down)
    for _, tensor in brought.values():
        arrived(tensor)


def let_go_of_graphs(root: nn.Module) -> None:
    """After the last step: of what steps have left on the modules only the values stay. The graph of how they came
    about would hold what autograd has saved of it, on the devices."""
    _replace_all(root, lambda tensor: tensor if tensor.grad_fn is None else tensor.detach())


def _replace_all(root: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
    """Puts other tensors in place of those among the modules' attributes and buffers."""
    for module in root.modules():
        attributes, buffers = module.__dict__, module._buffers
        for name in [name for name in attributes if name not in OF_ALL_MODULES]:
            attributes[name] = _replaced(attributes[name], new, _DEPTH)
        for name, buffer in buffers.items():
            buffers[name] = None if buffer is None else new(buffer)


_DEPTH = 4
"""How many containers and objects within one another are looked into."""


def _replaced(value: Any, new: Callable[[Tensor], Tensor], depth: int) -> Any:
    """The value with other tensors in place of its own. It is the same object, unless it is a tensor or a tuple."""
    if isinstance(value, Tensor):
        return new(value)
    if not depth:
        return value
    holder: Any = vars(value) if is_plain_object(value) else value
    if isinstance(holder, tuple):
        items = [_replaced(item, new, depth - 1) for item in holder]
        if all(map(operator.is_, items, holder)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(holder, (list, deque, dict)):
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if (replaced := _replaced(item, new, depth - 1)) is not item:
                holder[key] = replaced
    return value


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif type(item) in (list, tuple):
            yield from _tensors(item)
