"""Arguments taken apart and put together again, and what a layer changed in them."""

import re
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_roundpipe.pipeline import arguments
from lightning_roundpipe.pipeline.arguments import Structure

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Fields:
    main: Tensor
    label: str = "label"


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(slots=True)
class Slots:
    a: Tensor
    b: str = "label"


@dataclass(slots=True, frozen=True)
class FrozenSlots:
    a: Tensor
    b: list = field(default_factory=list)


class SlotsAndAttributes(Plain):
    """Slots besides a ``__dict__``, one of them without a value."""

    __slots__ = ("__hidden", "never")

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.__hidden = Y


class Table(Mapping):
    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Names(list):
    pass


class Called:
    """Has attributes, but is a function to its users."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor


X, Y = torch.zeros(2), torch.ones(3)


def rebuilt(tree: Any) -> Any:
    structure = Structure(tree)
    return structure.build(structure.leaves)[0]


@pytest.mark.parametrize(
    ("tree", "leaves"),
    [
        (X, [X]),
        (None, [None]),
        ("text", ["text"]),
        ((X, [Y, 3], {"key": None}), [X, Y, 3, None]),
        ([], []),
        (Pair(X, (Y,)), [X, Y]),
        (Fields(X), [X, "label"]),
        (Slots(X), [X, "label"]),
        (FrozenSlots(X, [Slots(Y)]), [X, Y, "label"]),
        (SlotsAndAttributes(X), [Y, X]),
        (Plain(Plain(X)), [X]),
        (defaultdict(list, a=[X]), [X]),
        (UserDict(a=X), [X]),
        (Table(a=X), [X]),
        (Names([X, Y]), [X, Y]),
        (BaseModelOutput(last_hidden_state=X, attentions=(Y,)), [X, Y]),
        (torch.Size([2, 3]), [torch.Size([2, 3])]),
        (torch.float32, [torch.float32]),
        (slice(1, 2), [slice(1, 2)]),
    ],
    ids=lambda item: type(item).__name__,
)
def test_leaves_in_order_and_types_kept(tree: Any, leaves: list[Any]) -> None:
    structure = Structure(tree)
    assert len(structure.leaves) == len(leaves)
    assert all(a is b or a == b for a, b in zip(structure.leaves, leaves, strict=True))
    built, _ = structure.build(structure.leaves)
    assert type(built) is (dict if isinstance(tree, Table) else type(tree))
    again = Structure(built).leaves
    assert all(a is b or a == b for a, b in zip(again, leaves, strict=True))


class Queue(deque):
    """Has attributes, but most of what it holds lies elsewhere."""


LEAVES = [
    nn.Linear(1, 1),
    len,
    lambda: X,
    types.SimpleNamespace,
    torch,
    Called(X),
    Queue([X]),
    datetime.now(),
    re.compile(""),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_opaque_leaves(leaf: Any) -> None:
    structure = Structure([leaf])
    assert structure.leaves == [leaf]
    assert structure.build(structure.leaves)[0][0] is leaf


def test_other_leaves_take_the_places() -> None:
    structure = Structure({"a": [X, 1], "b": Fields(Y)})
    built, _ = structure.build(["p", "q", "r", "s"])
    assert built == {"a": ["p", "q"], "b": Fields("r", "s")}


def test_containers_are_new_and_tensors_the_same() -> None:
    inner = [X]
    tree = {"inner": inner}
    built = rebuilt(tree)
    assert built is not tree
    assert built["inner"] is not inner
    assert built["inner"][0] is X


def test_one_tensor_in_several_places_is_one_leaf() -> None:
    structure = Structure([X, {"again": X}, Y])
    assert len(structure.leaves) == 2
    built, _ = structure.build([Y, X])
    assert built[0] is Y
    assert built[1]["again"] is Y
    assert built[2] is X


def test_one_container_in_several_places_stays_one() -> None:
    shared = [X]
    built = rebuilt({"a": shared, "b": (shared, 1)})
    assert built["a"] is built["b"][0]


def test_cycles() -> None:
    tree = Plain(None)
    tree.value = [tree, X]
    built = rebuilt(tree)
    assert built.value[0] is built
    assert built.value[1] is X


def test_attributes_of_containers_are_kept() -> None:
    names = Names([X])
    names.title = "title"
    assert rebuilt(names).title == "title"
    assert rebuilt(defaultdict(list, a=X))["missing"] == []


def test_a_model_output_has_attributes_and_keys() -> None:
    built = rebuilt(BaseModelOutput(last_hidden_state=X))
    assert built.last_hidden_state is built["last_hidden_state"] is built[0] is X
    assert built.attentions is None


def test_known_containers_are_not_taken_apart() -> None:
    inner, original = [X], [Y]
    structure = Structure({"inner": inner}, {id(inner): original})
    assert structure.leaves == [original]
    assert structure.build(structure.leaves)[0]["inner"] is original


def test_too_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_MAX_NODES", 10)
    with pytest.raises(ValueError, match=r"more than 10 objects, starting with a Plain\. Pass the tensors"):
        Structure(Plain([[] for _ in range(11)]))


# --- changes


def changed(tree: Any, change: Any) -> tuple[Any, list]:
    """Changes a copy and writes that back to the tree."""
    structure = Structure(tree)
    built, containers = structure.build(structure.leaves)
    change(built)
    changes = containers.changes()
    containers.write_back(changes)
    return tree, changes


def test_nothing_changed() -> None:
    tree = {"list": [X], "plain": Plain(Y)}
    _, changes = changed(tree, lambda built: None)
    assert changes == []


@pytest.mark.parametrize(
    ("tree", "change", "expected"),
    [
        ([X], lambda built: built.append(Y), [X, Y]),
        ([X, Y], list.reverse, [Y, X]),
        ([X, Y], list.clear, []),
        ({"a": X}, lambda built: built.update(b=Y), {"a": X, "b": Y}),
        ({"a": X, "b": Y}, lambda built: built.pop("a"), {"b": Y}),
        ({"a": [X]}, lambda built: built["a"].append(Y), {"a": [X, Y]}),
        (([X],), lambda built: built[0].append(Y), ([X, Y],)),
        (UserDict(a=X), lambda built: built.update(a=Y), UserDict(a=Y)),
    ],
)
def test_changes_are_written_back(tree: Any, change: Any, expected: Any) -> None:
    result, changes = changed(tree, change)
    assert result is tree
    assert len(changes) == 1
    assert type(result) is type(expected)
    assert str(result) == str(expected)


def test_attributes_are_written_back() -> None:
    plain = Plain(X)
    plain.gone = 1

    def change(built: Plain) -> None:
        built.value, built.new = Y, 2
        del built.gone

    changed(plain, change)
    assert vars(plain) == {"value": Y, "new": 2}


def test_slots_are_written_back() -> None:
    slots = SlotsAndAttributes(X)

    def change(built: SlotsAndAttributes) -> None:
        built.value, built.never = Y, X
        del built._SlotsAndAttributes__hidden

    changed(slots, change)
    assert vars(slots) == {"value": Y}
    assert slots.never is X and not hasattr(slots, "_SlotsAndAttributes__hidden")
    tree, _ = changed(FrozenSlots(X, []), lambda built: built.b.append(Y))
    assert tree.b == [Y]


def test_the_original_is_untouched_until_then() -> None:
    tree = [X]
    structure = Structure(tree)
    built, containers = structure.build(structure.leaves)
    built.append(Y)
    assert tree == [X]
    containers.write_back(containers.changes())
    assert tree[1] is Y


def test_originals_are_known_by_their_copies() -> None:
    inner = [X]
    structure = Structure({"inner": inner})
    built, containers = structure.build(structure.leaves)
    assert containers.originals()[id(built["inner"])] is inner


def test_an_ordered_dict_keeps_its_items() -> None:
    """Items that can be looked up but not iterated over."""
    original = OrderedDict(a=torch.ones(1), b=torch.zeros(1))
    structure = Structure(original)
    built, _ = structure.build(structure.leaves)
    assert type(built) is OrderedDict and list(built) == ["a", "b"] and list(built.values()) == list(original.values())
