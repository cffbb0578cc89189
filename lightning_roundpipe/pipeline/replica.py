"""Layers as the pipeline sees them, and replicas: shells of a layer's modules that run on tensors given to them.

A replica shares the layer's code and attributes but not its tensors, so that one layer can run for several microbatches
and devices at once while the user's modules stay as they are.
"""

import functools
import operator
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_roundpipe.pipeline.compiling import (
    CompiledKind,
    compile_function,
    compiled_function,
    prepared,
    same_settings,
    settings_by_module,
    warn_uncompiled,
)
from lightning_roundpipe.pipeline.watching import (
    OF_ALL_MODULES,
    can_be_watched,
    contents,
    copy_of,
    gradients_in,
    may_hold,
    moment,
    stand_for,
    watched_class,
)

_EMPTY = types.CellType()
_NONE: frozenset[int] = frozenset()
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
    holding: list[tuple[int, str]]
    """Attributes that hold something that can be changed in place: also plain objects, arrays and generators."""

    def copies(self, changed: Collection[tuple[int, str]] = ()) -> dict[tuple[int, str], Any]:
        """Copies of what a call may change in place among the attributes; deep ones of those that it changes."""
        copies: dict[tuple[int, str], Any] = {(i, key): self.dicts[i][key].clone() for i, key in self.tensors}
        copies.update(self.container_copies())
        made: dict[int, Any] = {}  # what two attributes share stays shared
        for i, key in self.holding:
            if (i, key) in changed:
                copies[i, key] = copy_of(self.dicts[i][key], made)
        return copies

    def contents(self) -> dict[tuple[int, str], list[Any]]:
        """What is held, to be compared with what it was."""
        return {(i, key): contents(self.dicts[i][key]) for i, key in self.holding}

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
    dropped: bool = False
    """Whether it has run without its graph kept, which shows what a recompute needs."""
    known: bool = False
    """Whether it had before the present batch. Until then everything is copied."""
    sets_generator: bool = False
    """Sets the process's generator for a while, in the forward or, as a checkpoint does, in the backward."""
    changed_inputs: set[int] = field(default_factory=set)
    """Leaves of the arguments that are changed in place, by the layer or later: the recompute needs copies."""
    writes_state: bool = False
    """Writes buffers, plain tensors or lists of its own: the recompute needs them as they were before the call."""
    changed_attributes: set[tuple[int, str]] = field(default_factory=set)
    """Attributes, by module index and name, in which a call changes something."""
    gradient_attributes: set[tuple[int, str]] = field(default_factory=set)
    """Those in which it puts tensors with gradients."""
    state_versions: list[tuple[int, int]] | None = None
    """First batch: the versions of buffers and plain tensors after the last call. If anyone changes them before the
    next one, a recompute that comes later needs copies."""
    half: dict[int, torch.dtype] | None = None
    """Parameters, by index, that may travel in half precision. None before the layer has run under autocast."""
    escapes: set[str] = field(default_factory=set)
    """How tensors leave the layer besides being returned, in words."""
    foreign: list[Tensor] = field(default_factory=list)
    """Parameters of others that the layer reaches by itself, past its arguments."""
    repeats_whole: bool = False
    """Its recompute saved something else for autograd than its first run: it is not stopped early any more."""
    compiles: bool = False
    """Calls functions that the user has compiled, and so may set the random generators back at any time."""

    @property
    def needs_recompute(self) -> bool:
        """Whether its graph cannot be kept from the forward to the backward: what it computes with is changed in place
        meanwhile, by other microbatches, say. The recompute has copies."""
        return bool(self.changed_inputs) or self.writes_state


class Layer:
    """A layer of the user's model: its modules, parameters (masters) and buffers in a fixed order."""

    def __init__(self, index: int, name: str, module: nn.Module) -> None:
        self.index = index
        self.name = name
        self.label = f"layer {name!r}"
        """Names it in errors."""
        self.module = module
        self.modules = own_modules(module)
        self.kinds = [type(submodule) for submodule in self.modules]
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
        self.compiled: CompiledKind | None = None
        """The compiled code, if it is to run compiled."""
        self._state: AttributeState | None = None
        self._state_items = Items(())
        self._free: list[Replica] = []

    def is_current(self) -> bool:
        """Whether the module still consists of the same modules and parameters."""
        now = own_modules(self.module)
        if len(self.modules) != len(now) or not all(map(operator.is_, self.modules, now)):
            return False
        return self.has_own_parameters() and sum(len(module._parameters) for module in self.modules) == len(
            self.parameter_slots
        )

    def draws(self) -> bool:
        """Whether a call now may draw random numbers: it did before, or it has dropout that is in force."""
        return (
            self.traits.draws
            or self.traits.sets_generator
            or any(module.training and module.p > 0 for module in self._dropouts)
        )

    def structure(self) -> Any:
        """Layers that differ in it cannot share compiled code."""
        modules = tuple((name, type(module)) for name, module in self.module.named_modules())
        parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in self.parameters)
        return modules, tuple(self.parameter_slots), parameters

    def compiled_for_call(self, *, merge_norm_statistics: bool) -> CompiledKind | None:
        """The compiled code for a call now. Where the replica must note what happens inside, there is none."""
        if self.compiled is None or self.compiled.failed:
            return None
        if any(module._forward_hooks for module in self.modules[1:]):
            return None
        return None if merge_norm_statistics and self.norms(training=True) else self.compiled

    def has_own_parameters(self) -> bool:
        """Whether its parameters are in place, and not others put there for a moment (``functional_call``)."""
        return all(
            self.modules[i]._parameters.get(key, self) is (None if index is None else self.parameters[index])
            for i, key, index in self.parameter_slots
        )

    def attributes(self) -> AttributeState:
        """The modules' attributes now. The same object as long as nothing changed."""
        state, present = self._state, [module.__dict__ for module in self.modules]
        if state is not None and self._state_items.same(present):
            return state
        self._state_items = Items(present)
        dicts = self._state_items.dicts()
        special = [
            (i, key)
            for i, attributes in enumerate(dicts)
            for key, value in attributes.items()
            if key not in _TENSOR_DICTS and self.refers_inside(value)
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
            if type(value) in (list, dict, set) and key not in OF_ALL_MODULES
        ]
        holding = [
            (i, key)
            for i, attributes in enumerate(dicts)
            for key, value in attributes.items()
            if key not in OF_ALL_MODULES and not isinstance(value, Tensor) and may_hold(value)
        ]
        self._state = AttributeState(dicts, special, inputs, tensors, containers, holding)
        return self._state

    def buffers(self) -> list[dict[str, Tensor | None]]:
        return [module._buffers for module in self.modules]

    def inner_pre_hooks(self) -> list[tuple[nn.Module, Any]]:
        """The forward pre-hooks that run on replicas, with their modules; not those of the layer itself, nor those
        that are bound to its modules, which then work on the replica's."""
        return [
            (module, hook)
            for module in self.modules[1:]
            for hook in module._forward_pre_hooks.values()
            if self.module_index(getattr(hook, "__self__", None)) is None
        ]

    def norms(self, *, training: bool) -> frozenset[int]:
        """The modules with running statistics of batches, by index, that update them (or else read them)."""
        return frozenset(i for i in self._norms if self.modules[i].training == training) if self._norms else _NONE

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

    def borrow(self, *, watched: bool = False) -> "Replica":
        """A replica; a watched one notes what is read on its modules."""
        if watched or not self._free:
            return Replica(self, watched=watched)
        return self._free.pop()

    def give_back(self, replica: "Replica") -> None:
        replica.release()
        if replica.can_be_reused():
            self._free.append(replica)

    def forget(self) -> None:
        """Lets go of the attributes that it had, and of replicas in waiting, which have them, too."""
        self._state, self._state_items, self._free = None, Items(()), []

    def module_index(self, value: object) -> int | None:
        return self._module_index.get(id(value))

    def parameter_index(self, value: object) -> int | None:
        return self._parameter_index.get(id(value))

    def refers_inside(self, value: Any) -> bool:
        """Whether a value leads to the layer's own modules or parameters."""
        return self._refers_inside(value, set())

    def _refers_inside(self, value: Any, visited: set[int]) -> bool:
        if isinstance(value, nn.Module):
            return id(value) in self._module_index
        if isinstance(value, Tensor):
            return id(value) in self._parameter_index
        if isinstance(value, types.MethodType):
            return id(value.__self__) in self._module_index
        if isinstance(value, weakref.ref):
            return self._refers_inside(value(), visited)
        if id(value) in visited:
            return False
        if (compiled := compiled_function(value)) is not None:
            return self._refers_inside(compiled[1], visited)
        if isinstance(value, (types.FunctionType, functools.partial)):
            visited.add(id(value))
            return any(self._refers_inside(part, visited) for part in _bound(value))
        if type(value) in (list, tuple, dict, OrderedDict):  # an OrderedDict holds hooks
            visited.add(id(value))
            return any(self._refers_inside(v, visited) for v in (value.values() if isinstance(value, dict) else value))
        return False


def share_compiled_code(root: nn.Module, layers: Sequence[Layer], default: Any | None) -> None:
    """Gives layers that are to run compiled their code: one for all of the same structure and settings.

    Args:
        root: The user's module.
        layers: Its layers.
        default: How to compile layers that the user has not compiled; None: not at all.
    """
    settings = settings_by_module(root, default)
    kinds: dict[Any, list[CompiledKind]] = {}
    for layer in layers:
        wanted = settings[id(layer.module)]
        if wanted is None:
            continue
        alike = kinds.setdefault(layer.structure(), [])
        layer.compiled = next((kind for kind in alike if same_settings(kind.settings, wanted)), None)
        if layer.compiled is None:
            layer.compiled = CompiledKind(f"{type(layer.module).__name__} (layer {layer.name!r})", wanted)
            alike.append(layer.compiled)


def _bound(function: Any) -> list[Any]:
    """What a function brings along: its closure and defaults, or a partial's arguments."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*defaults, *(cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY)]


def own_modules(module: nn.Module) -> list[nn.Module]:
    """The modules of a layer that a replica stands for: all but scripts, which have no tensors there."""
    return [submodule for submodule in module.modules() if not isinstance(submodule, torch.jit.ScriptModule)]


def same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a.values(), b.values())) and a.keys() == b.keys()


class Items:
    """What some dicts hold at one moment, to be compared with later ones: all at once, which is the fastest way.

    Attributes:
        values: Those of all dicts, in order. To be replaced where others are put into the dicts under the same keys.
    """

    __slots__ = ("_keys", "_sizes", "values")

    def __init__(self, dicts: Sequence[Mapping[str, Any]]) -> None:
        self._sizes = list(map(len, dicts))
        self._keys = list(chain.from_iterable(dicts))
        self.values: list[Any] = list(chain.from_iterable(map(_values_of, dicts)))

    def same(self, dicts: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these hold the same objects under the same keys, in the same order."""
        return (
            list(map(len, dicts)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(map(_values_of, dicts)), self.values))
            and list(chain.from_iterable(dicts)) == self._keys
        )

    def dicts(self) -> list[dict[str, Any]]:
        """The dicts as they were."""
        items = zip(self._keys, self.values, strict=True)
        return [dict(islice(items, size)) for size in self._sizes]

    def places(self, key: str) -> list[int]:
        """Where the values of a key are."""
        return [place for place, present in enumerate(self._keys) if present == key]


_values_of = operator.methodcaller("values")


@dataclass(frozen=True, slots=True)
class HookCall:
    """An inner module's call as its forward hooks would see it."""

    module: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    moment: int
    """Tells, in the first batch, what the layer read after it."""


@dataclass(frozen=True, slots=True)
class NormStatistics:
    """Statistics of one BatchNorm call: per-channel mean and unbiased variance over ``count`` values."""

    module: _BatchNorm
    mean: Tensor
    variance: Tensor
    count: int


class Replica:
    """A shell of a layer. :meth:`load` gives it tensors and attributes; then :meth:`forward` runs it."""

    def __init__(self, layer: Layer, *, watched: bool = False) -> None:
        self.layer = layer
        self.watched = watched
        watchable = set(map(id, can_be_watched(layer.module))) if watched else set()
        # No __init__: the attributes come from the layer.
        self.shells: list[nn.Module] = [
            object.__new__(watched_class(kind) if id(module) in watchable else kind)
            for kind, module in zip(layer.kinds, layer.modules, strict=True)
        ]
        self._submodules = [
            {key: None if child is None else self._inside(child, ()) for key, child in module._modules.items()}
            for module in layer.modules
        ]
        self._submodules_at_first = Items(self._submodules)
        self._parameters: list[dict[str, Any]] = [{} for _ in self.shells]
        for i, key, _ in layer.parameter_slots:
            self._parameters[i][key] = None
        self._parameters_at_first = Items(self._parameters)
        self._masters: dict[int, Any] = {id(s): m for s, m in zip(self.shells, layer.modules, strict=True)}
        self._runs_with: Sequence[Tensor] = ()
        """What stands for the layer's own parameters."""
        self._made: dict[int, Any] = {}
        """Functions of the layer's attributes, by id, bound to the shells."""
        self._original = Items(())
        """The shells' attributes when a call begins."""
        self._buffer_places: list[int] = []
        """Where among them the buffers are."""
        self._state: AttributeState | None = None
        """What is loaded, if another call can begin with it."""
        self._code: CompiledKind | None = None
        self._compiled_inside: dict[int, tuple[Any, Any]] = {}
        self._holding: list[Any] = []
        self._held: set[int] = set()
        self._references_at_first = self._references = self._count_references()
        """How many hold each shell, and how many do when a call begins."""
        self.is_untouched = False
        """Whether a call has ended that has set nothing on the shells, and made nothing that holds one of them."""
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
        code: CompiledKind | None = None,
        holding: Collection[tuple[int, str]] = (),
    ) -> None:
        """Prepares for one call.

        Args:
            state: The modules' attributes.
            inputs: What stands for the attributes that are inputs.
            parameters: One tensor per parameter of the layer.
            buffers: The buffer dict of each module. What the call assigns or writes goes there.
            merge_norm_statistics: Take BatchNorm's statistics aside instead of updating its running statistics.
            copies: What stands for attributes that the call may change in place, so that it is lost.
            code: The compiled code to run; by default, the modules' own.
            holding: Attributes into which the call may put tensors with gradients.
        """
        layer = self.layer
        self._code = code
        self.is_untouched = False
        norms = layer.norms(training=True) if merge_norm_statistics else _NONE
        special = bool(copies or holding or norms) or self._is_special(state)
        is_loaded = not special and state is self._state
        if not is_loaded:
            self._load_attributes(state)
        self._state = None if special else state
        for present, its_buffers in zip([shell.__dict__ for shell in self.shells], buffers, strict=True):
            present["_buffers"] = its_buffers
        values = [None if index is None else parameters[index] for _, _, index in layer.parameter_slots]
        for (i, key, _), parameter in zip(layer.parameter_slots, values, strict=True):
            self._parameters[i][key] = parameter
        for (i, key), value in copies.items():
            self.shells[i].__dict__[key] = value
        for (i, key), tensor in zip(state.inputs, inputs, strict=True):
            self.shells[i].__dict__[key] = tensor
        for i, key in state.special:  # the copies of such attributes, too
            self.shells[i].__dict__[key] = self._inside(self.shells[i].__dict__[key], parameters)
        if layer.own_forward is not None and "forward" in self.shells[0].__dict__:
            self.shells[0].__dict__["forward"] = self._inside(self.shells[0].__dict__["forward"], parameters)
        for i in norms:
            self._take_statistics_aside(i, self.shells[i])
        if holding:
            self._holding = [self.shells[i].__dict__[key] for i, key in holding]
            self._held = {id(tensor) for value in self._holding for tensor in gradients_in(value)}
        if is_loaded:
            for place, its_buffers in zip(self._buffer_places, buffers, strict=True):
                self._original.values[place] = its_buffers
        else:
            self._original = Items([shell.__dict__ for shell in self.shells])
            self._buffer_places = self._original.places("_buffers")
        self._parameters_at_first.values = values
        self._runs_with = parameters
        self._references = self._count_references()

    def _is_special(self, state: AttributeState) -> bool:
        """Whether what is loaded depends on more than the attributes, or should not be kept alive for another call."""
        return (
            bool(state.special or state.inputs or state.tensors or self.watched)
            or self.layer.own_forward is not None
            or any(attributes["_forward_hooks"] for attributes in state.dicts[1:])
        )

    def _load_attributes(self, state: AttributeState) -> None:
        layer = self.layer
        if self.watched:
            stand_for(self.shells, layer.modules)
        for i, (shell, attributes) in enumerate(zip(self.shells, state.dicts, strict=True)):
            new = dict(attributes)
            new["_parameters"] = self._parameters[i]
            new["_modules"] = self._submodules[i]
            if i > 0 and new["_forward_hooks"]:
                self._defer_hooks(i, new)
            object.__setattr__(shell, "__dict__", new)
        if layer.intercept is not None and self.shells[0].__dict__.get("forward") is layer.intercept:
            if layer.own_forward is None:
                del self.shells[0].__dict__["forward"]
            else:
                self.shells[0].__dict__["forward"] = layer.own_forward

    def is_held(self) -> bool:
        """Whether the call has made something that holds a shell and may outlast it, such as a hook on a gradient."""
        return self._count_references() != self._references

    def can_be_reused(self) -> bool:
        """After its release. Compiled code, which may hold it for good, has no other business with it."""
        compiled = self._code is not None or bool(self._compiled_inside)
        return not self.watched and (compiled or self.is_untouched or not self.is_held())

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self.shells))

    def release(self) -> None:
        """Drops what belongs to the call: a shell in waiting keeps no tensors alive."""
        if self._state is None or not (self.is_untouched or self._is_as_loaded()):
            self._state = None
            self._original = Items(())
            for shell in self.shells:
                object.__setattr__(shell, "__dict__", {})
        elif self.layer.has_buffers:
            for shell, place in zip(self.shells, self._buffer_places, strict=True):
                shell.__dict__["_buffers"] = self._original.values[place] = {}
        for parameters in self._parameters:
            parameters.clear()
        self._parameters_at_first.values = []
        self._runs_with = ()
        self._holding = []
        self._held = set()
        self._made = {}
        self._references = self._references_at_first
        self.hook_calls = []
        self.norm_statistics = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._code is not None:
            return self._code.run(self.shells[0], args, kwargs)
        return self.shells[0].forward(*args, **kwargs)

    def has_changed_structure(self) -> bool:
        """Whether the call has added, removed or replaced modules or parameters, as far as it can be seen."""
        unchanged = self._parameters_at_first.same([shell.__dict__["_parameters"] for shell in self.shells])
        return not ((unchanged or self._has_all_parameters()) and self._submodules_at_first.same(self._submodules))

    def _has_all_parameters(self) -> bool:
        """Whether the parameters are all there: the call may have put them in another order."""
        parameters, known = [shell.__dict__["_parameters"] for shell in self.shells], set(map(id, self._runs_with))
        return sum(map(len, parameters)) == len(self.layer.parameter_slots) and all(
            parameter is None or id(parameter) in known for items in parameters for parameter in items.values()
        )

    def attribute_changes(self) -> list[tuple[int, str, Any]]:
        """What the call set on the modules: (module index, attribute, value)."""
        if self._is_as_loaded():
            self.is_untouched = not self.is_held()
            return []
        return [
            (i, key, self._outside(value))
            for i, (before, shell) in enumerate(zip(self._original.dicts(), self.shells, strict=True))
            for key, value in shell.__dict__.items()
            if (key not in before or before[key] is not value) and key not in _TENSOR_DICTS
        ]

    def _is_as_loaded(self) -> bool:
        return self._original.same([shell.__dict__ for shell in self.shells])

    def held_gradients(self) -> list[Tensor]:
        """The tensors with gradients that the call has put into lists, dicts or objects of the modules'."""
        found = {id(tensor): tensor for value in self._holding for tensor in gradients_in(value)}
        return [tensor for number, tensor in found.items() if number not in self._held]

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
        if compiled_function(value) is not None:
            return self._compiled(value, parameters)
        if isinstance(value, (types.FunctionType, functools.partial)):
            return self._bound_inside(value, parameters) if layer.refers_inside(value) else value
        if type(value) in (list, tuple):
            return type(value)(self._inside(item, parameters) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._inside(item, parameters)) for key, item in value.items())
        return value

    def _compiled(self, function: Any, parameters: Sequence[Tensor]) -> Any:
        """A function that the user has compiled within the layer, for the shells."""
        compiled = compiled_function(function)
        assert compiled is not None
        settings, original = compiled
        if self.layer.compiled is not None:  # together with all the rest
            return self._inside(original, parameters)
        if id(function) not in self._compiled_inside:
            name = f"{getattr(original, '__qualname__', type(original).__name__)} in layer {self.layer.name!r}"
            settings = prepared(settings, lambda error: warn_uncompiled(name, error))
            self._compiled_inside[id(function)] = (
                function,
                compile_function(settings, self._inside(original, parameters)),
            )
        return self._compiled_inside[id(function)][1]

    def _bound_inside(self, function: Any, parameters: Sequence[Tensor]) -> Any:
        """A function that reaches the layer's modules by its closure, or a partial's arguments (metrics do this)."""
        if isinstance(function, functools.partial):
            keywords = {key: self._inside(value, parameters) for key, value in function.keywords.items()}
            args = [self._inside(value, parameters) for value in function.args]
            return functools.partial(self._inside(function.func, parameters), *args, **keywords)
        if id(function) in self._made:
            return self._made[id(function)]
        cells = list(function.__closure__ or ())
        new_cells = [
            types.CellType() if cell != _EMPTY and self.layer.refers_inside(cell.cell_contents) else cell
            for cell in cells  # those that hold something else stay shared
        ]
        new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(new_cells))
        self._made[id(function)] = new  # first of all: it may refer to itself
        if function.__defaults__ is not None:
            new.__defaults__ = tuple(self._inside(value, parameters) for value in function.__defaults__)
        if function.__kwdefaults__ is not None:
            new.__kwdefaults__ = {k: self._inside(value, parameters) for k, value in function.__kwdefaults__.items()}
        new.__dict__.update((key, self._inside(value, parameters)) for key, value in function.__dict__.items())
        for cell, new_cell in zip(cells, new_cells, strict=True):
            if new_cell is not cell:
                new_cell.cell_contents = self._inside(cell.cell_contents, parameters)
        return new

    def _outside(self, value: Any) -> Any:
        """The other way round."""
        if isinstance(value, nn.Module):
            return self._masters.get(id(value), value)
        if isinstance(value, Tensor):
            own = (master for master, x in zip(self.layer.parameters, self._runs_with, strict=True) if x is value)
            return next(own, value)
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
            self.hook_calls.append(HookCall(index, args, kwargs, output, moment()))

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
                place = master.running_mean.device if master.running_mean is not None else mean.device
                self.norm_statistics.append(
                    NormStatistics(master, mean.to(place, copy=True), variance.to(place, copy=True), count)
                )
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
