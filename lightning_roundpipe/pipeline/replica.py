"""Layers as the pipeline sees them, and replicas: shells of a layer's modules that run on tensors given to them.

A replica shares the layer's code and attributes but not its tensors, so that one layer can run for several microbatches
and devices at once while the user's modules stay as they are.
"""

import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

_TENSOR_DICTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class AttributeState:
    """The ``__dict__`` of each module of a layer at one moment (shallow)."""

    dicts: list[dict[str, Any]]
    special: list[tuple[int, str]]
    """Attributes that refer to the layer's own modules or parameters: (module index, name)."""
    inputs: list[tuple[int, str]]
    """Attributes that are tensors with a gradient: as good as arguments of the call."""
    tensors: list[tuple[int, str]]
    """Attributes that are plain tensors."""
    containers: list[tuple[int, str]]
    """Attributes that are lists, dicts or sets."""

    def copies(self) -> dict[tuple[int, str], Any]:
        """Copies of what a call may change in place among the attributes."""
        copies: dict[tuple[int, str], Any] = {(i, key): self.dicts[i][key].clone() for i, key in self.tensors}
        copies.update(((i, key), self.dicts[i][key].copy()) for i, key in self.containers)
        return copies

    def container_copies(self) -> dict[tuple[int, str], Any]:
        return {(i, key): self.dicts[i][key].copy() for i, key in self.containers}

    def sizes(self) -> list[int]:
        """Changes when a call appends to one of the containers."""
        return [len(self.dicts[i][key]) for i, key in self.containers]


@dataclass(slots=True)
class Traits:
    """What the first batch showed of a layer's behaviour."""

    draws: bool = False
    """Draws random numbers."""
    changed_inputs: set[int] = field(default_factory=set)
    """Leaves of the arguments that are changed in place, by the layer or later: the recompute needs copies."""
    writes_state: bool = False
    """Writes buffers, plain tensors or lists of its own: the recompute needs them as they were before the call."""
    state_versions: list[tuple[int, int]] | None = None
    """First batch: the versions of buffers and plain tensors after the last call. If anyone changes them before the
    next one, a recompute that comes later needs copies."""
    half: dict[int, torch.dtype] | None = None
    """Parameters, by index, that may travel in half precision. None before the layer has run under autocast."""
    escapes: set[str] = field(default_factory=set)
    """How tensors leave the layer besides being returned, in words."""
    foreign: list[Tensor] = field(default_factory=list)
    """Parameters of others that the layer reaches by itself, past its arguments."""


class Layer:
    """A layer of the user's model: its modules, parameters (masters) and buffers in a fixed order."""

    def __init__(self, index: int, name: str, module: nn.Module) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.modules = own_modules(module)
        self.traits = Traits()
        self.parameters: list[nn.Parameter] = []
        self.parameter_slots: list[tuple[int, str, int | None]] = []
        self._module_index = {id(submodule): i for i, submodule in enumerate(self.modules)}
        self._parameter_index: dict[int, int] = {}
        for i, submodule in enumerate(self.modules):
            for key, parameter in submodule._parameters.items():
                if parameter is None:
                    self.parameter_slots.append((i, key, None))
                    continue
                if id(parameter) not in self._parameter_index:
                    self._parameter_index[id(parameter)] = len(self.parameters)
                    self.parameters.append(parameter)
                self.parameter_slots.append((i, key, self._parameter_index[id(parameter)]))
        self.has_buffers = any(True for _ in module.buffers())
        self._dropouts = [submodule for submodule in self.modules if isinstance(submodule, _DropoutNd)]
        self._norms = [
            i
            for i, submodule in enumerate(self.modules)
            if isinstance(submodule, _BatchNorm) and submodule.track_running_stats
        ]
        self.intercept: Callable[..., Any] | None = None
        """The forward that stands in the module's ``__dict__`` during a step."""
        self.own_forward: Callable[..., Any] | None = None
        """A forward that the user put there."""
        self._state: AttributeState | None = None
        self._free: list[Replica] = []

    def is_current(self) -> bool:
        """Whether the module still consists of the same modules and parameters."""
        if len(self.modules) != len(own_modules(self.module)):
            return False
        return self.has_own_parameters() and sum(len(module._parameters) for module in self.modules) == len(
            self.parameter_slots
        )

    def draws(self) -> bool:
        """Whether a call now may draw random numbers: it did before, or it has dropout that is in force."""
        return self.traits.draws or any(module.training and module.p > 0 for module in self._dropouts)

    def has_own_parameters(self) -> bool:
        """Whether its parameters are in place, and not others put there for a moment (``functional_call``)."""
        return all(
            self.modules[i]._parameters.get(key, self) is (None if index is None else self.parameters[index])
            for i, key, index in self.parameter_slots
        )

    def attributes(self) -> AttributeState:
        """The modules' attributes now. The same object as long as nothing changed."""
        state = self._state
        if state is not None and all(map(same_items, (m.__dict__ for m in self.modules), state.dicts)):
            return state
        dicts = [dict(module.__dict__) for module in self.modules]
        special = [
            (i, key)
            for i, attributes in enumerate(dicts)
            for key, value in attributes.items()
            if key not in _TENSOR_DICTS and self._refers_inside(value, set())
        ]
        inputs = [
            (i, key)
            for i, attributes in enumerate(dicts)
            for key, value in attributes.items()
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in self._parameter_index
        ]
        tensors = [
            (i, key)
            for i, attributes in enumerate(dicts)
            for key, value in attributes.items()
            if isinstance(value, Tensor) and not value.requires_grad and id(value) not in self._parameter_index
        ]
        containers = [
            (i, key)
            for i, attributes in enumerate(dicts)
            for key, value in attributes.items()
            if type(value) in (list, dict, set) and key not in _TENSOR_DICTS
        ]
        self._state = AttributeState(dicts, special, inputs, tensors, containers)
        return self._state

    def buffers(self) -> list[dict[str, Tensor | None]]:
        return [module._buffers for module in self.modules]

    def norms(self, *, training: bool) -> frozenset[int]:
        """The modules with running statistics of batches, by index, that update them (or else read them)."""
        return frozenset(i for i in self._norms if self.modules[i].training == training)

    def state_versions(self, state: AttributeState, without: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
        """Identity and version of each buffer and plain tensor attribute, but for the buffers of some modules."""
        versions = [
            (id(buffer), buffer._version)
            for i, module in enumerate(self.modules)
            if i not in without
            for buffer in module._buffers.values()
            if buffer is not None and not buffer.is_inference()
        ]
        for i, key in state.tensors:
            tensor = state.dicts[i][key]
            if not tensor.is_inference():
                versions.append((id(tensor), tensor._version))
        return versions

    def copy_buffers(self) -> list[dict[str, Tensor | None]]:
        return [
            {key: None if buffer is None else buffer.detach().clone() for key, buffer in module._buffers.items()}
            for module in self.modules
        ]

    def borrow(self) -> "Replica":
        try:
            return self._free.pop()
        except IndexError:
            return Replica(self)

    def give_back(self, replica: "Replica") -> None:
        replica.release()
        self._free.append(replica)

    def module_index(self, value: object) -> int | None:
        return self._module_index.get(id(value))

    def parameter_index(self, value: object) -> int | None:
        return self._parameter_index.get(id(value))

    def _refers_inside(self, value: Any, visited: set[int]) -> bool:
        if isinstance(value, nn.Module):
            return id(value) in self._module_index
        if isinstance(value, Tensor):
            return id(value) in self._parameter_index
        if isinstance(value, types.MethodType):
            return id(value.__self__) in self._module_index
        if isinstance(value, weakref.ref):
            return self._refers_inside(value(), visited)
        if type(value) in (list, tuple, dict) and id(value) not in visited:
            visited.add(id(value))
            return any(self._refers_inside(v, visited) for v in (value.values() if type(value) is dict else value))
        return False


def own_modules(module: nn.Module) -> list[nn.Module]:
    """The modules of a layer that a replica stands for: all but scripts, which have no tensors there."""
    return [submodule for submodule in module.modules() if not isinstance(submodule, torch.jit.ScriptModule)]


def same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a.values(), b.values())) and a.keys() == b.keys()


@dataclass(frozen=True, slots=True)
class HookCall:
    """An inner module's call as its forward hooks would see it."""

    module: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True, slots=True)
class NormStatistics:
    """Statistics of one BatchNorm call: per-channel mean and unbiased variance over ``count`` values."""

    module: _BatchNorm
    mean: Tensor
    variance: Tensor
    count: int


class Replica:
    """A shell of a layer. :meth:`load` gives it tensors and attributes; then :meth:`forward` runs it."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.shells: list[nn.Module] = [
            object.__new__(type(module))
            for module in layer.modules  # no __init__: the attributes come from the layer
        ]
        self._submodules = [
            {key: None if child is None else self._inside(child, ()) for key, child in module._modules.items()}
            for module in layer.modules
        ]
        self._masters: dict[int, Any] = {}
        self._original: list[dict[str, Any]] = []
        self.hook_calls: list[HookCall] = []
        self.norm_statistics: list[NormStatistics] = []

    def load(
        self,
        state: AttributeState,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        buffers: list[dict[str, Tensor | None]],
        *,
        merge_norm_statistics: bool,
        copies: dict[tuple[int, str], Any],
    ) -> None:
        """Prepares for one call.

        Args:
            state: The modules' attributes.
            inputs: What stands for the attributes that are inputs.
            parameters: One tensor per parameter of the layer.
            buffers: The buffer dict of each module. What the call assigns or writes goes there.
            merge_norm_statistics: Take BatchNorm's statistics aside instead of updating its running statistics.
            copies: What stands for attributes that the call may change in place, so that it is lost.
        """
        layer = self.layer
        self.hook_calls = []
        self.norm_statistics = []
        for i, (shell, attributes) in enumerate(zip(self.shells, state.dicts, strict=True)):
            new = dict(attributes)
            new["_parameters"] = {}
            new["_buffers"] = buffers[i]
            new["_modules"] = self._submodules[i]
            if i > 0 and new["_forward_hooks"]:
                self._defer_hooks(i, new)
            object.__setattr__(shell, "__dict__", new)
        for (i, key), value in copies.items():
            self.shells[i].__dict__[key] = value
        for (i, key), tensor in zip(state.inputs, inputs, strict=True):
            self.shells[i].__dict__[key] = tensor
        for i, key in state.special:
            self.shells[i].__dict__[key] = self._inside(self.shells[i].__dict__[key], parameters)
        if layer.intercept is not None and self.shells[0].__dict__.get("forward") is layer.intercept:
            if layer.own_forward is None:
                del self.shells[0].__dict__["forward"]
            else:
                self.shells[0].__dict__["forward"] = self._inside(layer.own_forward, parameters)
        for i, key, index in layer.parameter_slots:
            self.shells[i].__dict__["_parameters"][key] = None if index is None else parameters[index]
        if merge_norm_statistics:
            for i in layer.norms(training=True):
                self._take_statistics_aside(i, self.shells[i])
        self._original = [dict(shell.__dict__) for shell in self.shells]
        self._masters = {id(shell): module for shell, module in zip(self.shells, layer.modules, strict=True)}
        self._masters.update((id(tensor), layer.parameters[i]) for i, tensor in enumerate(parameters))

    def release(self) -> None:
        """Drops everything that was loaded: a shell in waiting keeps nothing alive."""
        for shell in self.shells:
            object.__setattr__(shell, "__dict__", {})
        self._original = []
        self._masters = {}
        self.hook_calls = []
        self.norm_statistics = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.shells[0].forward(*args, **kwargs)

    def attribute_changes(self) -> list[tuple[int, str, Any]]:
        """What the call set on the modules: (module index, attribute, value)."""
        changes = []
        for i, (shell, before) in enumerate(zip(self.shells, self._original, strict=True)):
            now = shell.__dict__
            if same_items(now, before):
                continue
            changes += [
                (i, key, self._outside(value))
                for key, value in now.items()
                if (key not in before or before[key] is not value) and key not in _TENSOR_DICTS
            ]
        return changes

    def _inside(self, value: Any, parameters: Sequence[Tensor]) -> Any:
        """A value of the layer's attributes with the layer's own modules and parameters replaced by the replica's."""
        layer = self.layer
        if isinstance(value, nn.Module):
            index = layer.module_index(value)
            return value if index is None else self.shells[index]
        if isinstance(value, Tensor):
            index = layer.parameter_index(value)
            return value if index is None else parameters[index]
        if isinstance(value, types.MethodType):
            index = layer.module_index(value.__self__)
            return value if index is None else types.MethodType(value.__func__, self.shells[index])
        if isinstance(value, weakref.ref):
            target = value()
            return value if target is None else weakref.ref(self._inside(target, parameters))
        if type(value) in (list, tuple):
            return type(value)(self._inside(item, parameters) for item in value)
        if type(value) is dict:
            return {key: self._inside(item, parameters) for key, item in value.items()}
        return value

    def _outside(self, value: Any) -> Any:
        """The other way round."""
        if isinstance(value, nn.Module):
            return self._masters.get(id(value), value)
        if isinstance(value, Tensor):
            return self._masters.get(id(value), value)
        if isinstance(value, weakref.ref):
            target = value()
            return value if target is None else weakref.ref(self._outside(target))
        if type(value) in (list, tuple):
            return type(value)(self._outside(item) for item in value)
        if type(value) is dict:
            return {key: self._outside(item) for key, item in value.items()}
        return value

    def _defer_hooks(self, index: int, attributes: dict[str, Any]) -> None:
        """Replaces the forward hooks by one that notes what they would see; they run after the call, on its outputs."""

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.hook_calls.append(HookCall(index, args, kwargs, output))

        attributes["_forward_hooks"] = OrderedDict({0: note})
        attributes["_forward_hooks_with_kwargs"] = OrderedDict({0: True})
        attributes["_forward_hooks_always_called"] = OrderedDict()

    def _take_statistics_aside(self, index: int, shell: nn.Module) -> None:
        master = self.layer.modules[index]
        assert isinstance(master, _BatchNorm)
        scratch = {key: None if buffer is None else torch.zeros_like(buffer) for key, buffer in shell._buffers.items()}
        attributes = shell.__dict__
        attributes["_buffers"] = scratch
        attributes["momentum"] = 1.0  # the running statistics then are those of the one call
        plain_forward = type(shell).forward

        def forward(x: Tensor) -> Tensor:
            output = plain_forward(shell, x)
            mean, variance = scratch["running_mean"], scratch["running_var"]
            if mean is not None and variance is not None:
                count = x.numel() // mean.numel()
                self.norm_statistics.append(NormStatistics(master, mean.clone(), variance.clone(), count))
            return output

        attributes["forward"] = forward


def commit_norm_statistics(microbatches: Sequence[Sequence[NormStatistics]]) -> None:
    """Updates running statistics once per batch, from the statistics of its microbatches.

    The k-th call of a BatchNorm in each microbatch makes one update with the mean and unbiased variance over all of
    them, as if the layer had seen the whole batch.
    """
    calls: dict[_BatchNorm, list[list[NormStatistics]]] = {}
    for statistics in microbatches:
        occurrence: dict[_BatchNorm, int] = {}
        for item in statistics:
            number = occurrence.get(item.module, 0)
            occurrence[item.module] = number + 1
            rounds = calls.setdefault(item.module, [])
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(item)
    with torch.no_grad():
        for module, rounds in calls.items():
            for parts in rounds:
                _update_running_statistics(module, parts)


def _update_running_statistics(module: _BatchNorm, parts: Sequence[NormStatistics]) -> None:
    running_mean, running_var, tracked = module.running_mean, module.running_var, module.num_batches_tracked
    assert running_mean is not None and running_var is not None and tracked is not None
    tracked.add_(1)
    momentum = 1.0 / float(tracked) if module.momentum is None else module.momentum
    total = sum(part.count for part in parts)
    mean = torch.stack([part.mean.double() * part.count for part in parts]).sum(0) / total
    squares = torch.stack(
        [part.variance.double() * (part.count - 1) + part.count * (part.mean.double() - mean) ** 2 for part in parts]
    ).sum(0)
    variance = squares / max(total - 1, 1)
    running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    running_var.mul_(1 - momentum).add_(variance.to(running_var.dtype), alpha=momentum)
