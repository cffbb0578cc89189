"""The first batch's watch over state: who reads and writes what on modules, and where.

The state of modules is compared with what it was; that it was *read* only the modules themselves can tell. So for the
first batch they are of a class that does.
"""

import copy
import functools
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.pipeline.rng import generator_state, is_generator

Key = tuple[int, str]
"""An attribute: the module's id, and the name."""

OF_ALL_MODULES = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""
_MAX_ITEMS = 1000
_FRAMEWORKS = {"torch", "torchmetrics", "lightning", "pytorch_lightning", "transformers", "numpy"}
_NOT_PLAIN = _FRAMEWORKS | {"asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading"}
_SEQUENCES = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
ATOMS = {bool, int, float, str, bytes, types.NoneType}
"""Values that hold nothing and cannot be changed in place."""
_watch = threading.local()


class Accesses:
    """What a microbatch has read on modules before it had set it itself."""

    def __init__(self) -> None:
        self.read: set[Key] = set()
        """Since the present stretch of code began."""
        self.read_by_layer: set[Key] = set()
        """The same, on modules that are no part of the layer that runs, whether it had set it or not."""
        self.in_layer = False
        self.last_read: dict[Key, int] = {}
        """When something was last read within the layer call; see :func:`moment`."""
        self.moment = 0
        self.written: set[Key] = set()
        self.just_written: set[Key] = set()
        """What was set since the present stretch of code began."""
        self.touched: set[int] = set()
        """The modules, by id, that were accessed since the present stretch of code began."""
        self.before_touch: Callable[[int], None] | None = None
        """Called before a module's first access in it."""
        self.stands_for: dict[int, int] = {}
        """For shells of modules, by id: the module that they stand for."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what this thread does to watched modules."""
        with _noting(self):
            yield

    def touch(self, number: int) -> None:
        """A module is going to be accessed."""
        if number not in self.touched:
            self.touched.add(number)
            if self.before_touch is not None:
                self.before_touch(number)


@contextmanager
def _noting(accesses: Accesses | None) -> Iterator[None]:
    before = getattr(_watch, "accesses", None)
    _watch.accesses = accesses
    try:
        yield
    finally:
        _watch.accesses = before


def noting_nothing() -> AbstractContextManager[None]:
    """What this thread does to watched modules is not noted for a while."""
    return _noting(None)


def moment() -> int:
    """Tells what this thread reads later from what it has read, where that is noted."""
    accesses: Accesses | None = getattr(_watch, "accesses", None)
    return 0 if accesses is None else accesses.moment


def stand_for(shells: Iterable[nn.Module], modules: Iterable[nn.Module]) -> None:
    """What is read on the shells counts as read on the modules."""
    accesses: Accesses | None = getattr(_watch, "accesses", None)
    if accesses is not None:
        accesses.stands_for.update((id(shell), id(module)) for shell, module in zip(shells, modules, strict=True))


class _StandsIn:
    """Comes before a module's own class."""

    def __init_subclass__(cls, **_: Any) -> None:
        """The module's class is not to learn of a subclass."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the module's own class."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        return function, tuple(plain(a) if isinstance(a, type) else a for a in arguments), *rest


set_elsewhere: set[int] = set()
"""Modules, by id, on which something was set outside of any microbatch's forward."""


def _change_of(module: object) -> tuple[Accesses, int] | None:
    """Before an attribute is set or deleted: by whom, if by a microbatch's forward, and on which module, by id."""
    accesses: Accesses | None = getattr(_watch, "accesses", None)
    if accesses is None:
        set_elsewhere.add(id(module))
        return None
    number = accesses.stands_for.get(id(module), id(module))
    accesses.touch(number)
    return accesses, number


class _TellsOfWrites(_StandsIn):
    """Tells what was set, and costs nothing where it is read."""

    def __setattr__(self, name: str, value: Any) -> None:
        if (change := _change_of(self)) is not None:
            accesses, number = change
            # What a microbatch sets is its own, but for buffers.
            if name not in object.__getattribute__(self, "__dict__").get("_buffers", ()):
                accesses.written.add((number, name))
                accesses.just_written.add((number, name))
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if (change := _change_of(self)) is not None:
            accesses, number = change
            accesses.written.add((number, name))
        super().__delattr__(name)


_ALL_ATTRIBUTES = ("__dict__", "_buffers")


class _Watched(_TellsOfWrites):
    """Tells of every attribute."""

    def __getattribute__(self, name: str) -> Any:
        accesses: Accesses | None = getattr(_watch, "accesses", None)
        if accesses is None:
            return super().__getattribute__(name)
        number = accesses.stands_for.get(id(self))
        key = id(self) if number is None else number, name
        accesses.touch(key[0])
        if name not in _ALL_ATTRIBUTES:  # which name none
            if key not in accesses.written:
                accesses.read.add(key)
            if accesses.in_layer:
                accesses.moment += 1
                accesses.last_read[key] = accesses.moment
                if number is None:
                    accesses.read_by_layer.add(key)
        return super().__getattribute__(name)


class _Attribute:
    """Tells of one attribute, and costs nothing for the others."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, kind: type) -> Any:
        accesses: Accesses | None = getattr(_watch, "accesses", None)
        if accesses is not None and (key := (id(module), self._name)) not in accesses.written:
            accesses.read.add(key)
        try:
            return module.__dict__[self._name]
        except KeyError:
            return getattr(super(kind, module), self._name)  # of the class, or else a buffer

    def __set__(self, module: Any, value: Any) -> None:
        accesses: Accesses | None = getattr(_watch, "accesses", None)
        if accesses is not None:
            accesses.written.add((id(module), self._name))
        module.__dict__[self._name] = value

    def __delete__(self, module: Any) -> None:
        if self._name not in module.__dict__:
            raise AttributeError(self._name)
        del module.__dict__[self._name]


def watched_class(kind: type, names: frozenset[str] | None = None) -> Any:
    """A class like the given one whose objects tell what is read: all, or of some attributes; then also of writes."""
    return _watched_class(kind, names)


@cache
def _watched_class(kind: Any, names: frozenset[str] | None) -> Any:
    members: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members.update((name, _Attribute(name)) for name in names or ())

    def set_on_kind(cls: Any, name: str, value: Any) -> None:
        """What the code sets on its class is for all its modules, watched or not."""
        type.__setattr__(cls if name.startswith("__") else kind, name, value)

    meta = type(type(kind).__name__, (type(kind),), {"__setattr__": set_on_kind})
    return meta(kind.__name__, (_Watched if names is None else _TellsOfWrites, kind), members)


def plain(kind: type) -> type:
    """The other way round."""
    return next(base for base in kind.__mro__[1:] if not issubclass(base, _StandsIn)) if _stands_in(kind) else kind


def is_watched(module: nn.Module) -> bool:
    """Whether a module tells what is read on it."""
    return _stands_in(type(module))


def _stands_in(kind: type) -> bool:
    return kind.__bases__[:1] in ((_Watched,), (_TellsOfWrites,))


def can_be_watched(root: nn.Module) -> list[nn.Module]:
    """All modules but compiled ones, whose code is made for their class."""
    modules = dict.fromkeys(root.modules())
    for module in list(modules):
        if isinstance(module, (torch._dynamo.OptimizedModule, torch.jit.ScriptModule)) or module._compiled_call_impl:
            for inner in module.modules():
                modules.pop(inner, None)
    return list(modules)


@contextmanager
def watching(modules: Iterable[nn.Module], names: Mapping[int, frozenset[str]] | None = None) -> Iterator[None]:
    """Lets modules tell what is read on them: all, or the attributes named, by the module's id."""
    kinds = [(module, type(module)) for module in modules]
    try:
        for module, kind in kinds:
            with suppress(TypeError):  # a class with slots or a metaclass of its own: it is not watched
                new = watched_class(kind, None if names is None else names[id(module)])
                object.__setattr__(module, "__class__", new)
        yield
    finally:
        for module, kind in kinds:
            object.__setattr__(module, "__class__", kind)


# --- what is inside of an attribute


def contents(value: Any) -> list[Any]:
    """What a container, plain object, array or generator holds, as far as it may be changed in place; see :func:`same`.

    Numbers, modules and the like hold nothing.
    """
    found: list[Any] = []
    _take(value, found, set())
    return found


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether nothing was changed between two looks at the contents."""
    return len(a) == len(b) and all(map(_is_same, a, b))


def named_by_code(modules: Iterable[nn.Module]) -> list[Any]:
    """What the code of the modules refers to besides them, and may change in place: globals, closures, and attributes
    of their classes. Functions that it calls by a global name are looked at, too."""
    kinds = {kind: None for module in modules for kind in type(module).__mro__ if not _is_of_a_framework(kind)}
    found: dict[int, Any] = {}
    values = [getattr(value, "__func__", value) for kind in kinds for value in vars(kind).values()]
    seen: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            values += [] if _is_of_a_framework(value) else _named_by(value)
        elif may_hold(value):
            found[id(value)] = value
    return list(found.values())


def _is_of_a_framework(item: Any) -> bool:
    package = (getattr(item, "__module__", None) or "builtins").partition(".")[0]
    return package in sys.stdlib_module_names or package in _FRAMEWORKS


def _named_by(function: types.FunctionType) -> list[Any]:
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [*cells, *(function.__globals__[name] for name in names if name in function.__globals__)]


def contents_of_function(function: Any) -> list[Any]:
    """What a hook can reach to keep something there: its closure, its object, attributes of modules among them."""
    reached: list[Any] = []
    if isinstance(function, functools.partial):
        reached = [function.args, function.keywords, *contents_of_function(function.func)]
    elif isinstance(function, types.MethodType):
        reached = [function.__self__, *contents_of_function(function.__func__)]
    elif isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        reached = [function.__defaults__, function.__kwdefaults__, *cells]
    elif hasattr(function, "__dict__"):
        reached = [dict(vars(function))]
    return contents([_own_attributes(item) if isinstance(item, nn.Module) else item for item in reached])


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_ALL_MODULES}


def may_hold(value: Any) -> bool:
    """Whether there may be contents, without looking into them."""
    if type(value) in weakref.ProxyTypes:  # what it stands for may be no more
        return False
    if isinstance(value, (bool, int, float, str, types.NoneType, nn.Module)):
        return False
    numpy = sys.modules.get("numpy")
    return (
        isinstance(value, (Tensor, tuple))
        or type(value) in (*_SEQUENCES, *_MAPPINGS, set)
        or (numpy is not None and isinstance(value, numpy.ndarray))
        or is_generator(value)
        or is_plain_object(value)
    )


def is_constant(value: Any) -> bool:
    """Whether it is a tuple, such as a size, in which nothing can change."""
    return isinstance(value, tuple) and all(
        is_constant(item) or isinstance(item, (bool, int, float, str, types.NoneType)) for item in value
    )


def items_of(value: Any) -> Iterable[Any] | None:
    """The parts of a container or plain object, keys included; None for what is neither."""
    if isinstance(value, tuple) or type(value) in _SEQUENCES:
        return value
    if type(value) is set:
        return sorted(value, key=id)
    if type(value) in _MAPPINGS:
        return [part for pair in value.items() for part in pair]
    if is_plain_object(value):
        return [part for pair in vars(value).items() for part in pair]
    return None


def copy_of(value: Any, made: dict[int, Any]) -> Any:
    """A copy of what can be changed in place; what is no container, array, generator or plain object stays itself.

    Args:
        value: What to copy.
        made: Copies made so far, by the original's id.
    """
    if len(contents(value)) >= _MAX_ITEMS or not may_hold(value):
        return value
    if id(value) in made:
        return made[id(value)]
    new: Any
    kind: Any = type(value)
    if isinstance(value, Tensor):
        new = value if value.requires_grad else value.clone()
    elif isinstance(value, torch.Generator):
        new = value.clone_state()
    elif isinstance(value, tuple):
        items = [copy_of(item, made) for item in value]
        new = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_plain_object(value):
        new = made[id(value)] = kind.__new__(kind)  # first of all: it may contain itself
        new.__dict__.update((key, copy_of(item, made)) for key, item in vars(value).items())
    elif type(value) in _SEQUENCES:
        new = made[id(value)] = copy.copy(value)
        for index, item in enumerate(value):
            new[index] = copy_of(item, made)
    elif type(value) in _MAPPINGS:
        new = made[id(value)] = copy.copy(value)
        for key, item in value.items():
            new[key] = copy_of(item, made)
    else:
        new = copy.deepcopy(value) if is_generator(value) else copy.copy(value)
    made[id(value)] = new
    return new


def gradients_in(value: Any) -> list[Tensor]:
    """The tensors with gradients in a container or plain object."""
    return [item for item in contents(value) if isinstance(item, Tensor) and item.requires_grad]


def put_for(value: Any, tensors: dict[int, Tensor], seen: set[int]) -> None:
    """Replaces tensors, given by id, in a container or plain object."""
    if id(value) in seen or isinstance(value, Tensor):
        return
    seen.add(id(value))
    items: Iterable[tuple[Any, Any]]
    if type(value) in _SEQUENCES:
        holder, items = value, list(enumerate(value))
    elif type(value) in _MAPPINGS:
        holder, items = value, list(value.items())
    elif is_plain_object(value):
        holder, items = vars(value), list(vars(value).items())
    else:
        return
    for key, item in items:
        if id(item) in tensors:
            holder[key] = tensors[id(item)]
        else:
            put_for(item, tensors, seen)


def is_iterator(value: Any) -> bool:
    """Whether using it changes it: generators, files, iterators of every kind."""
    return hasattr(type(value), "__next__") and type(value) not in weakref.ProxyTypes


def is_plain_object(value: Any) -> bool:
    """Whether an object is nothing but its attributes: a meter, a record of settings."""
    kind: Any = type(value)
    if kind in weakref.ProxyTypes:  # what it stands for may be no more
        return False
    if kind is types.SimpleNamespace:
        return True
    return (
        type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, (nn.Module, Tensor, type, types.ModuleType, types.FunctionType))
        and not callable(value)
        and kind.__getattribute__ is object.__getattribute__
        and kind.__setattr__ is object.__setattr__
        and kind.__new__ is object.__new__
        and kind.__module__.partition(".")[0] not in _NOT_PLAIN
    )


def _take(value: Any, found: list[Any], seen: set[int]) -> None:
    if len(found) >= _MAX_ITEMS or id(value) in seen:
        return
    if type(value) in ATOMS:  # quickly: most are keys, numbers and names
        found.append(value)
        return
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        found += [value, -1 if value.is_inference() else value._version]
    elif numpy is not None and isinstance(value, numpy.ndarray):
        found.append(value.tobytes())
    elif is_generator(value):
        found.append(generator_state(value))
    elif (items := items_of(value)) is not None:
        seen.add(id(value))
        items = list(items)
        found.append(len(items))
        for item in items:
            _take(item, found, seen)
    else:
        found.append(value)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str, bytes, tuple)) and a == b)
