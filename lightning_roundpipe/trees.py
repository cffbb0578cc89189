"""Nested containers of tensors: take them apart into leaves and put them together again.

Batches, layer arguments and layer outputs are trees: lists, tuples, mappings, dataclasses, and whatever is built of
them. Everything that is no such container is a leaf: tensors, numbers, strings, ``None``, modules, opaque objects.

Two properties matter here and are not common to all libraries of this kind. A tree comes back with its own *types*
(named tuples, ``defaultdict``, ``UserDict`` and dataclass subclasses, with whatever attributes they carry besides),
because user code is written against them. And a :class:`Rebuild` holds *no leaf*: it may be kept for long, on a tape,
without keeping activations alive.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

Close = Callable[[Sequence[Any]], Any]
"""Makes a fresh container of its children."""

Open = Callable[[Any], tuple[list[Any], Close]]
"""Takes a container apart: its children in order, and what makes such a container of others."""


class CyclicTreeError(ValueError):
    """A container contains itself, so it has no finite list of leaves."""


class Rebuild:
    """Makes a tree of the flattened one's types out of new leaves; see :func:`flatten`."""

    __slots__ = ("_count", "_node")

    def __init__(self, node: _Node | None, count: int) -> None:
        self._node = node
        self._count = count

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if len(leaves) != self._count:
            raise ValueError(f"the tree has {self._count} leaves, got {len(leaves)}")
        return leaves[0] if self._node is None else self._node.build(iter(leaves))


class _Node:
    """One container of a flattened tree; `parts` has a node per child container and None per leaf."""

    __slots__ = ("_close", "_flat", "_parts")

    def __init__(self, close: Close, parts: list[_Node | None]) -> None:
        self._close = close
        self._parts = parts
        self._flat = not any(parts)

    def build(self, leaves: Iterator[Any]) -> Any:
        if self._flat:
            return self._close(list(islice(leaves, len(self._parts))))
        return self._close([next(leaves) if part is None else part.build(leaves) for part in self._parts])


def flatten(tree: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of `tree` in order, and a callable that makes a tree of the same types out of as many leaves.

    Containers are lists, tuples and named tuples, every mapping (in its own order of keys), and dataclass instances
    (fields that are not set are left out). The original is neither changed nor, as far as leaves go, kept alive.

    Raises:
        CyclicTreeError: a container contains itself.
    """
    leaves: list[Any] = []
    return leaves, Rebuild(_flatten(tree, leaves, ()), len(leaves))


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same types, with `function(leaf)` in place of each leaf."""
    leaves, rebuild = flatten(tree)
    return rebuild([function(leaf) for leaf in leaves])


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of `tree`, in order; one that occurs twice is listed twice."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def open_container(node: Any) -> tuple[list[Any], Close] | None:
    """Return the children of a container and what makes such a container of others, or None for a leaf."""
    opener = _opener(type(node))
    return None if opener is None else opener(node)


def child_names(node: Any) -> list[Any]:
    """Return the names of a container's children, in their order: keys, field names, or positions."""
    if isinstance(node, Mapping):
        return list(node)
    if dataclasses.is_dataclass(node):
        return _set_fields(node)
    return list(getattr(node, "_fields", range(len(node))))


def _flatten(node: Any, leaves: list[Any], above: tuple[int, ...]) -> _Node | None:
    opener = _opener(type(node))
    if opener is None:
        leaves.append(node)
        return None
    if id(node) in above:
        raise CyclicTreeError(f"a {type(node).__name__} contains itself and cannot be flattened")
    children, close = opener(node)
    above = (*above, id(node))
    return _Node(close, [_flatten(child, leaves, above) for child in children])


# How each type is opened. Types are looked up once and remembered: this is on the path of every layer call.

_openers: dict[type, Open | None] = {}


def _opener(cls: type) -> Open | None:
    try:
        return _openers[cls]
    except KeyError:
        return _openers.setdefault(cls, _find_opener(cls))


def _find_opener(cls: type) -> Open | None:
    if issubclass(cls, (Tensor, nn.Module, torch.Size, str, bytes, type)):
        return None
    if cls is list:
        return _open_list
    if cls is tuple:
        return _open_tuple
    if cls is dict:
        return _open_dict
    if issubclass(cls, tuple):
        return _open_tuple_subclass
    if issubclass(cls, list):
        return _open_list_subclass
    if issubclass(cls, dict):  # before dataclasses: transformers' ModelOutput is both, and its keys decide
        return _open_dict_subclass
    if issubclass(cls, UserDict):
        return _open_user_dict
    if issubclass(cls, Mapping):
        return _open_mapping
    if dataclasses.is_dataclass(cls):
        return _open_dataclass
    return None


def _open_list(node: list[Any]) -> tuple[list[Any], Close]:
    return list(node), list


def _open_tuple(node: tuple[Any, ...]) -> tuple[list[Any], Close]:
    return list(node), tuple


def _open_dict(node: dict[Any, Any]) -> tuple[list[Any], Close]:
    keys = tuple(node)
    return list(node.values()), lambda children: dict(zip(keys, children, strict=True))


# The types below may carry attributes besides their children. They are made blank, without a constructor that might ask
# for arguments, then given the attributes, then the children.


def _blank(cls: Any, attributes: Mapping[str, Any]) -> Any:
    made: Any = cls.__new__(cls)
    if attributes:
        made.__dict__.update(attributes)
    return made


def _attributes(node: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The instance's attributes but for `without`, and for cached properties: they were computed from the children."""
    cls = type(node)
    return {
        name: value
        for name, value in getattr(node, "__dict__", {}).items()
        if name not in without and not isinstance(getattr(cls, name, None), cached_property)
    }


def _open_list_subclass(node: list[Any]) -> tuple[list[Any], Close]:
    cls, attributes = type(node), _attributes(node)

    def close(children: Sequence[Any]) -> Any:
        made = _blank(cls, attributes)
        list.extend(made, children)
        return made

    return list(node), close


def _open_tuple_subclass(node: tuple[Any, ...]) -> tuple[list[Any], Close]:
    cls = type(node)
    if hasattr(cls, "_make"):  # a named tuple, PackedSequence included, whose own constructor would check anew
        return list(node), cls._make
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types
        return list(node), cls
    attributes = _attributes(node)

    def close(children: Sequence[Any]) -> Any:
        made = tuple.__new__(cls, children)
        if attributes:
            made.__dict__.update(attributes)
        return made

    return list(node), close


def _open_dict_subclass(node: dict[Any, Any]) -> tuple[list[Any], Close]:
    cls, keys = type(node), list(node)
    # In transformers' ModelOutput, which is a dataclass too, an item is also an attribute; its __setitem__ sets both.
    attributes = _attributes(node, without=node)
    factory = node.default_factory if isinstance(node, defaultdict) else None

    def close(children: Sequence[Any]) -> Any:
        made = _blank(cls, attributes)
        if factory is not None:
            made.default_factory = factory
        for key, child in zip(keys, children, strict=True):
            made[key] = child
        return made

    return list(node.values()), close


def _open_user_dict(node: UserDict[Any, Any]) -> tuple[list[Any], Close]:
    cls, keys, attributes = type(node), list(node.data), _attributes(node, without=("data",))

    def close(children: Sequence[Any]) -> Any:
        made = _blank(cls, attributes)
        made.data = dict(zip(keys, children, strict=True))
        return made

    return list(node.data.values()), close


def _open_mapping(node: Mapping[Any, Any]) -> tuple[list[Any], Close]:
    keys = list(node)
    cls: Any = MappingProxyType if isinstance(node, MappingProxyType) else type(node)
    return [node[key] for key in keys], lambda children: cls(dict(zip(keys, children, strict=True)))


def _open_dataclass(node: Any) -> tuple[list[Any], Close]:
    cls, names = type(node), _set_fields(node)
    attributes = _attributes(node, without=names)

    def close(children: Sequence[Any]) -> Any:
        made = _blank(cls, attributes)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)  # frozen ones too
        return made

    return [getattr(node, name) for name in names], close


def _set_fields(node: Any) -> list[str]:
    """The fields that have a value: one with ``init=False`` may have none yet."""
    return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
