"""What goes into a layer call and comes out of it, taken apart into leaves and put together again.

A layer may write into what it is handed: a cache that it appends to, a dict that it fills. Run on the caller's own
objects, the recompute would write a second time. So a call always works on a fresh copy of the *structure* (tensors
are not copied), as it was before the call; what the first run changed in it is then written back to the caller's
objects, once. Tensors inside objects thereby take part in autograd like any other argument.
"""

import types
from collections import OrderedDict, UserDict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

_MAX_NODES = 100_000
_MADE_BY_CLASS_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_LEAF_TYPES = (
    Tensor, nn.Module, str, bytes, int, float, complex, type(None), type, torch.Size, torch.dtype, torch.device, slice,
    range, Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
)  # fmt: skip


_PLAIN_TYPES = {tuple, list, dict}
_TENSOR_TYPES = {Tensor, nn.Parameter}
_ATOMS = {bool, int, float, str, type(None)}


class _Node:
    """A container. Its children are nodes, or the numbers of leaves."""

    __slots__ = ("children", "index", "keys", "original")

    def __init__(self, index: int, original: Any, keys: list[Any] | None, children: "list[_Node | int]") -> None:
        self.index = index
        self.original = original
        self.keys = keys
        self.children = children


class Structure:
    """A tree of lists, tuples, mappings and objects, taken apart.

    Attributes:
        leaves: Everything that is no container, in order: tensors, numbers, strings, None, modules...
    """

    def __init__(self, tree: Any, known: dict[int, Any] | None = None) -> None:
        """Takes a tree apart.

        Args:
            tree: Any object. A tuple stands for its items, which is what calls have: it needs no node.
            known: Containers (by id) that are not taken apart but stand for the object given here.
        """
        self.leaves: list[Any] = []
        self._nodes: list[_Node] = []
        self._seen: dict[int, _Node] = {}
        self._tensors: dict[int, int] = {}
        self._known = known or {}
        self._root: _Node | int | list[_Node | int]
        self._root = [self._take(item) for item in tree] if type(tree) is tuple else self._take(tree)

    def _take(self, item: Any) -> _Node | int:
        kind = type(item)
        if kind in _TENSOR_TYPES or (kind not in _PLAIN_TYPES and isinstance(item, Tensor)):
            return self._tensor(item)
        if kind in _ATOMS or (kind not in _PLAIN_TYPES and isinstance(item, _LEAF_TYPES)):
            return self._leaf(item)
        if self._known and id(item) in self._known:
            item = self._known[id(item)]
            return self._tensor(item) if isinstance(item, Tensor) else self._leaf(item)
        if (node := self._seen.get(id(item))) is not None:
            return node
        contents = _contents(item)
        if contents is None:
            return self._leaf(item)
        keys, values = contents
        node = _Node(len(self._nodes), item, keys, [])
        if node.index > _MAX_NODES:
            raise ValueError(
                f"An argument or output of a layer refers to more than {_MAX_NODES} objects, starting with a"
                f" {type(self._nodes[0].original).__name__}. Pass the tensors that the layer needs instead."
            )
        self._nodes.append(node)
        self._seen[id(item)] = node
        node.children = [self._take(value) for value in values]
        return node

    def _tensor(self, item: Tensor) -> int:
        """One tensor in several places stays one tensor."""
        number = self._tensors.get(id(item))
        if number is None:
            number = self._tensors[id(item)] = self._leaf(item)
        return number

    def _leaf(self, item: Any) -> int:
        self.leaves.append(item)
        return len(self.leaves) - 1

    def build(self, leaves: Sequence[Any]) -> tuple[Any, "Built"]:
        """Puts the tree together with other leaves. Returns it and the containers that were made for it."""
        made: dict[int, Any] = {}
        return self._tree(leaves, made), Built(self._nodes, made)

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The tree alone."""
        return self._tree(leaves, {})

    def _tree(self, leaves: Sequence[Any], made: dict[int, Any]) -> Any:
        if isinstance(self._root, list):
            return tuple([_build(part, leaves, made) for part in self._root])
        return _build(self._root, leaves, made)

    def forget(self) -> None:
        """Lets go of the containers that were taken apart, and so of what they hold. Others of their kind can still be
        built."""
        for node in self._nodes:
            node.original = _empty_like(node.original)
            for name in getattr(node.original, "__dataclass_fields__", ()):
                getattr(node.original, "__dict__", {}).pop(name, None)


class Built:
    """The containers of one :meth:`Structure.build`, able to tell what was changed in them since."""

    def __init__(self, nodes: list[_Node], made: dict[int, Any]) -> None:
        mutable = [node for node in nodes if not isinstance(node.original, tuple)]
        self._pairs = [(node.original, made[node.index]) for node in mutable]
        self._before = [_values(new) for _, new in self._pairs]

    def originals(self) -> dict[int, Any]:
        """For each container made, by id, the original that it stands for."""
        return {id(new): original for original, new in self._pairs}

    def changes(self) -> list[tuple[int, Any]]:
        """The changed containers: their number and their contents now."""
        found = []
        for number, ((_, new), before) in enumerate(zip(self._pairs, self._before, strict=True)):
            now = _values(new)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                found.append((number, _shallow(new)))
        return found

    def write_back(self, changes: list[tuple[int, Any]]) -> None:
        """Makes the original containers what the changes say."""
        for number, contents in changes:
            original = self._pairs[number][0]
            if isinstance(original, list):
                original[:] = contents
            elif isinstance(original, Mapping):
                for key in [key for key in original if key not in contents]:
                    del original[key]  # type: ignore[attr-defined]
                for key, value in contents.items():
                    original[key] = value  # type: ignore[index]
            else:
                for name in _slots(type(original)):
                    if hasattr(original, name):
                        object.__delattr__(original, name)
                getattr(original, "__dict__", {}).clear()
                _set_attributes(original, contents)


def _contents(item: Any) -> tuple[list[Any] | None, Sequence[Any]] | None:
    """Keys (None for sequences) and values of a container; None for what is no container."""
    if isinstance(item, (list, tuple)):
        return None, item
    if isinstance(item, (dict, Mapping)):
        return list(item), list(item.values())
    if callable(item) or not _is_written_in_python(type(item)):
        return None
    if type(getattr(item, "__dict__", None)) is dict or _slots(type(item)):
        attributes = _attributes(item)
        return list(attributes), list(attributes.values())
    return None


def _is_written_in_python(kind: type) -> bool:
    """Whether its objects hold nothing but attributes. A deque or an array holds more, and is made in its own way."""
    plain = (object, types.SimpleNamespace)
    return all(base in plain or base.__flags__ & _MADE_BY_CLASS_STATEMENT for base in kind.__mro__)


_known_slots: dict[type, tuple[str, ...]] = {}


def _slots(kind: type) -> tuple[str, ...]:
    """The names of the attributes that a class's objects hold in slots, those of its bases included."""
    if kind not in _known_slots:
        _known_slots[kind] = tuple(
            name
            for base in kind.__mro__
            if "__slots__" in vars(base)
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        )
    return _known_slots[kind]


def _attributes(item: Any) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and its slots."""
    in_slots = {name: getattr(item, name) for name in _slots(type(item)) if hasattr(item, name)}
    return {**in_slots, **getattr(item, "__dict__", {})}


def _set_attributes(item: Any, attributes: Mapping[str, Any]) -> None:
    """Also those of frozen objects, and past whatever a class does when an attribute is set."""
    slots = _slots(type(item))
    for name, value in attributes.items():
        if name in slots:
            object.__setattr__(item, name, value)
        else:
            vars(item)[name] = value


def _build(node: _Node | int, leaves: Sequence[Any], made: dict[int, Any]) -> Any:
    if isinstance(node, int):
        return leaves[node]
    if node.index in made:
        return made[node.index]
    original = node.original
    if isinstance(original, tuple):
        items = [leaves[child] if isinstance(child, int) else _build(child, leaves, made) for child in node.children]
        new = type(original)(*items) if hasattr(original, "_fields") else type(original)(items)
        made[node.index] = new
        return new
    if isinstance(original, list):
        new = _empty_like(original)
        made[node.index] = new
        new.extend(_build(child, leaves, made) for child in node.children)
        return new
    new = _empty_like(original)
    made[node.index] = new
    values = {k: _build(child, leaves, made) for k, child in zip(node.keys or (), node.children, strict=True)}
    if type(original) is dict:
        new.update(values)
    elif isinstance(original, OrderedDict) and hasattr(original, "__dataclass_fields__"):
        # transformers' ModelOutput: attributes and keys are two views of the same values.
        for key, value in values.items():
            OrderedDict.__setitem__(new, key, value)
            object.__setattr__(new, key, value)
        for name in original.__dataclass_fields__:
            if name not in values:
                object.__setattr__(new, name, None)
    elif isinstance(original, Mapping):
        if isinstance(new, dict):
            set_item = OrderedDict.__setitem__ if isinstance(new, OrderedDict) else dict.__setitem__
            for key, value in values.items():
                set_item(new, key, value)
        else:
            for key, value in values.items():
                new[key] = value
    else:
        _set_attributes(new, values)
    return new


def _empty_like(original: Any) -> Any:
    new: Any
    if type(original) in (list, dict):
        return type(original)()
    if isinstance(original, tuple):
        try:
            return tuple.__new__(type(original))
        except TypeError:  # torch's own results
            return original
    if isinstance(original, UserDict):
        new = object.__new__(type(original))
        vars(new).update(vars(original))
        new.data = {}
        return new
    if isinstance(original, (list, dict)):
        kind: Any = type(original)
        new = kind.__new__(kind)
        if getattr(original, "__dict__", None):
            vars(new).update(vars(original))
        if hasattr(original, "default_factory"):
            new.default_factory = original.default_factory
        return new
    if isinstance(original, Mapping):
        return {}
    if isinstance(original, types.SimpleNamespace):
        return type(original)()
    return object.__new__(type(original))


def _values(item: Any) -> list[Any]:
    if isinstance(item, list):
        return list(item)
    contents: Mapping[Any, Any] = item if isinstance(item, (dict, Mapping)) else _attributes(item)
    return [part for pair in contents.items() for part in pair]


def _shallow(item: Any) -> Any:
    """The contents in a plain container, so that they can be taken apart in their turn."""
    if isinstance(item, list):
        return list(item)
    return dict(item) if isinstance(item, Mapping) else _attributes(item)
