"""What a model's layers compute and hold, found with tensors that have no memory: nothing is allocated or computed."""

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_roundpipe.pipeline.layers import find_layers

# Tensors on the meta device that say they are on another. So code that asks for values only where there are some works.
_without_memory = FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer, for one microbatch.

    Attributes:
        layer: The layer's name.
        kind: The layer's class.
        parameters: Number of its parameters.
        trainable: How many of them are trained.
        forward_flops: Floating point operations of the forward.
        backward_flops: Floating point operations of the backward, without the recompute.
        input_bytes: Size of the tensors that go in.
        activation_bytes: Size of all that autograd saves for the backward, parameters excepted, and of what comes out.
    """

    layer: str
    kind: str
    parameters: int
    trainable: int
    forward_flops: int
    backward_flops: int
    input_bytes: int
    activation_bytes: int


def load(path: str) -> Any:
    """What an import path such as ``package.module:name`` stands for.

    Raises:
        ValueError: It has no colon, or there is no such module or name.
    """
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"An import path is written 'package.module:name', not {path!r}.")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error


def build(model: Callable[[], nn.Module], batch: Callable[[int], Any], samples: int) -> tuple[nn.Module, Any]:
    """The model, and a batch of so many samples, without memory.

    Raises:
        ValueError: There are no samples, `model` or `batch` cannot be called like this, or what was made is no model.
    """
    if samples < 1:
        raise ValueError(f"A batch must have at least 1 sample, not {samples}.")
    _check_call("model", "without arguments", model)
    _check_call("batch", "with the number of samples", batch, samples)
    with _without_memory:
        made = model()
        if not isinstance(made, nn.Module):
            raise ValueError(f"What should make the model makes no torch.nn.Module, but {type(made).__name__}.")
        return made, batch(samples)


def _check_call(what: str, how: str, function: Any, *arguments: Any) -> None:
    if not callable(function):
        raise ValueError(
            f"What makes the {what} is called {how}: give a function or class, not a {_name(type(function))}."
        )
    try:
        signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{_name(function)}, which makes the {what}, is called {how}: {error}.") from error
    except ValueError:  # of some built-in functions it is not known
        return


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def trace(model: nn.Module, batch: Any) -> list[LayerCall]:
    """The layer calls of one training step, in call order.

    What the code between the layers keeps for its backward, such as that of the loss, counts as the last call's.

    Args:
        model: From ``build``. A ``LightningModule`` runs its ``training_step``; another module is called with the
            batch, as keyword arguments if that is a mapping, as arguments if it is a tuple or list.
        batch: One microbatch, from ``build``.

    Raises:
        RuntimeError: What the model computes depends on values. The message names the layer.
    """
    tracer = _Tracer()
    handles = []
    for name, layer in find_layers(model).items():
        handles.append(layer.register_forward_pre_hook(partial(tracer.enter, name)))
        handles.append(layer.register_forward_hook(partial(tracer.leave, name), with_kwargs=True))
    try:
        with torch.enable_grad(), _without_memory, saved_tensors_hooks(tracer.keep, lambda tensor: tensor):
            step = getattr(model, "training_step", None)
            if step is not None:
                step(batch, 0)
            elif isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, (tuple, list)):
                model(*batch)
            else:
                model(batch)
    except (RuntimeError, NotImplementedError) as error:
        place = f"layer {tracer.running!r}" if tracer.running else "the code between layers"
        raise RuntimeError(
            f"{place} cannot run without values: {error}. If what it computes depends on values, such as the routing "
            "of a mixture of experts, give the model another implementation for planning."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if tracer.calls:
        last = tracer.calls[-1]
        tracer.calls[-1] = replace(last, activation_bytes=last.activation_bytes + sum(tracer.between.values()))
    return tracer.calls


class _Tracer:
    """Measures each layer call by itself, forward and backward, and goes on with its outputs as if they were inputs."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.running = ""
        self.measuring = False
        self.between: dict[int, int] = {}  # what the code between layers saves, by storage
        self.known: dict[Hashable, LayerCall] = {}

    def enter(self, name: str, *_: Any) -> None:
        if not self.measuring:
            self.running = name

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.measuring:
            return None
        trained = any(call.trainable for call in self.calls)
        key = _likeness(module, args, kwargs, trained)
        if key not in self.known:
            self.measuring = True
            self.known[key] = _measure(name, module, args, kwargs, trained)
            self.measuring = False
        self.running = ""
        self.calls.append(replace(self.known[key], layer=name))
        return tree_map_only(Tensor, partial(_leaf, True), output)

    def keep(self, tensor: Tensor) -> Tensor:
        if not self.running:
            storage = tensor.untyped_storage()
            self.between[storage._cdata] = storage.nbytes()
        return tensor


def _likeness(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trained: bool) -> Hashable:
    """Equal for calls that cost the same: of alike layers, as most of a large model's are, one is measured.

    Alike are layers with equal submodules, parameters and settings. Where a layer stands (``layer_idx``) is none.
    """
    leaves, structure = tree_flatten((args, kwargs))
    inputs = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), str(x)) for x in leaves)
    settings = tuple(
        (name, setting, value)
        for name, part in module.named_modules()
        for setting, value in vars(part).items()
        if isinstance(value, (bool, int, float, str)) and not setting.endswith("idx")
    )
    parameters = tuple((x.shape, x.dtype, x.requires_grad) for x in module.parameters())
    return type(module), repr(module), parameters, settings, inputs, structure, trained


def _measure(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trained: bool) -> LayerCall:
    """A call's costs. ``trained``: whether its inputs need gradients."""
    parameters = list(module.parameters())
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) not in own:
            held[key] = tensor
        return tensor

    args, kwargs = tree_map_only(Tensor, partial(_leaf, trained), (args, kwargs))
    forward = FlopCounterMode(display=False, custom_mapping=_FLOPS)
    with forward, saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(*args, **kwargs)
    outputs = [keep(x) for x in tree_leaves(output) if isinstance(x, Tensor)]
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    wanted = [x for x in (*parameters, *tree_leaves((args, kwargs))) if isinstance(x, Tensor) and x.requires_grad]
    backward = FlopCounterMode(display=False, custom_mapping=_FLOPS)
    if roots and wanted:
        with backward:
            torch.autograd.grad(roots, wanted, [torch.empty_like(tensor) for tensor in roots], allow_unused=True)
    return LayerCall(
        name,
        type(module).__name__,
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        forward.get_total_flops(),
        backward.get_total_flops(),
        sum(x.numel() * x.element_size() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)),
        sum(tensor.untyped_storage().nbytes() for tensor in held.values()),
    )


def _leaf(needs_gradient: bool, tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(needs_gradient and tensor.is_floating_point())


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _grouped_product(a: torch.Size, b: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
    """Each row is multiplied by the matrix of its group; or, for a gradient, each group of rows makes one matrix."""
    inner = a[-1]
    return 2 * (out_shape[-2] * out_shape[-1] if len(b) == 3 or len(a) == 3 else b[-1] * a[-2]) * inner


# Products that PyTorch's counter does not know.
_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped_product,
}
