"""What a run of the user's step has changed outside of parameters, put back."""

import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_roundpipe.iterators import StandIn, stand_in
from lightning_roundpipe.pipeline.rng import RandomState
from lightning_roundpipe.pipeline.watching import ATOMS, is_iterator, is_plain_object, named_by_code


@contextmanager
def undone(module: nn.Module) -> Iterator[list[Any]]:
    """Afterwards the module's attributes, buffers and the random generators are what they were.

    So are lists, dicts, sets and plain objects, also within one another, generators of its own, and iterators, for
    which copies stand meanwhile; one that cannot be copied refuses to give anything. Other objects are not looked into.
    Parameters are not copied; see :class:`Repeatable`.

    Yields:
        The module's own generators, of PyTorch, Python and NumPy.
    """
    generators = RandomState.capture()
    before = [(submodule, dict(submodule.__dict__)) for submodule in module.modules()]
    buffers = [(submodule._buffers, dict(submodule._buffers)) for submodule in module.modules()]
    contents = _Contents()
    for value in named_by_code(module.modules()):
        contents.note(value)
    for _, items in (*before, *buffers):
        for value in items.values():
            contents.note(value)
    contents.replace_iterators([submodule.__dict__ for submodule, _ in before])
    try:
        yield contents.generators
    finally:
        for submodule, attributes in before:
            submodule.__dict__.clear()
            submodule.__dict__.update(attributes)
        for items, values in buffers:
            items.clear()
            items.update(values)
        contents.put_back()
        generators.restore()


class _Contents:
    """What was in tensors, containers and generators."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._states: dict[int, tuple[Callable[[Any], Any], Any]] = {}
        self.generators: list[Any] = []

    def note(self, value: Any) -> None:
        kind = type(value)  # not `isinstance`: it fails for a weak proxy of a trainer that is no more
        if kind in ATOMS:  # quickly: most are
            return
        if issubclass(kind, Tensor):
            if not issubclass(kind, nn.Parameter):
                self._tensors.setdefault(id(value), (value, value.detach().clone()))
        elif is_plain_object(value):
            self.note(vars(value))
        elif issubclass(kind, (list, dict, set, deque)) and id(value) not in self._containers:
            plain = dict if issubclass(kind, dict) else list
            self._containers[id(value)] = (value, plain(value))
            for item in value.values() if plain is dict else value:
                self.note(item)
        elif issubclass(kind, tuple):
            for item in value:
                self.note(item)
        elif issubclass(kind, (torch.Generator, numpy.random.RandomState)):
            self._note_generator(value, value.set_state, value.get_state())
        elif issubclass(kind, random.Random):
            self._note_generator(value, value.setstate, value.getstate())
        elif issubclass(kind, numpy.random.Generator):
            bits = value.bit_generator
            self._note_generator(value, partial(setattr, bits, "state"), bits.state)
        elif issubclass(kind, numpy.ndarray):
            self._states[id(value)] = (partial(numpy.copyto, value), value.copy())

    def _note_generator(self, generator: Any, set_state: Callable[[Any], Any], state: Any) -> None:
        if id(generator) not in self._states:
            self._states[id(generator)] = (set_state, state)
            self.generators.append(generator)

    def replace_iterators(self, namespaces: Sequence[dict[str, Any]]) -> None:
        """Puts stand-ins for iterators into modules' attributes, and into the containers that were noted."""
        made: dict[int, StandIn] = {}
        containers = [container for container, _ in self._containers.values()]
        for container in (*namespaces, *containers):
            if isinstance(container, (dict, list, deque)):
                items = container.items() if isinstance(container, dict) else enumerate(container)
                for key, value in [(key, value) for key, value in items if is_iterator(value)]:
                    other = stand_in(f"an iterator ({key!r})", value, made)
                    if other is not None:
                        container[key] = other

    def put_back(self) -> None:
        for container, contents in self._containers.values():
            if _holds(container, contents):
                continue
            container.clear()
            container.update(contents) if isinstance(container, (dict, set)) else container.extend(contents)
        with torch.no_grad():
            for tensor, value in self._tensors.values():
                if not torch.equal(tensor, value):
                    tensor.data.copy_(value)
        for set_state, state in self._states.values():
            set_state(state)


def _holds(container: Any, contents: Any) -> bool:
    """Whether a container holds the very objects that it held."""
    if isinstance(container, dict):
        return list(container) == list(contents) and all(container[key] is contents[key] for key in contents)
    return len(container) == len(contents) and all(map(operator.is_, container, contents))
