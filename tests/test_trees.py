"""Trees come back with their own types and attributes, fresh, and whatever rebuilds them holds no leaf."""

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightning_roundpipe.trees import CyclicTreeError, child_names, flatten, map_tree, open_container, tensors

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    first: Any
    second: Any = 2


@dataclass
class Sample:
    image: Any
    label: Any = None
    extra: Any = field(init=False)

    def __post_init__(self) -> None:
        self.extra = "made in __post_init__"


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = ()


@dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = ()


@dataclass
class Asking:
    """Its constructor does not take its own fields."""

    doubled: Any = field(init=False)

    def __init__(self, single: Any) -> None:
        self.doubled = single * 2


class Words(UserDict[str, Any]):
    def __init__(self, language: str, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.language = language


class AttributeDict(dict[str, Any]):
    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note


class NamedList(list[Any]):
    name = ""


class NamedPair(tuple[Any, ...]):
    name: str


class ReadOnly(Mapping[str, Any]):
    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def numbered(tree: Any) -> tuple[Any, int]:
    """The tree with its leaves replaced by 0, 1, 2 ..., and their number."""
    leaves, rebuild = flatten(tree)
    return rebuild(range(len(leaves))), len(leaves)


@pytest.mark.parametrize(
    "leaf", [None, "text", b"bytes", 1, 2.5, True, {1, 2}, torch.ones(3), torch.Size([1, 2]), Sample]
)
def test_leaves(leaf: Any) -> None:
    leaves, rebuild = flatten(leaf)
    assert len(leaves) == 1
    assert leaves[0] is leaf
    assert rebuild(["other"]) == "other"
    assert open_container(leaf) is None


def test_modules_are_leaves() -> None:
    module = nn.ParameterDict({"a": torch.ones(1)})
    assert flatten((module, nn.ModuleList([nn.Linear(1, 1)])))[0][0] is module


def test_order_and_nesting() -> None:
    tree = {"b": [1, (2, None)], "a": Point({"z": 4}, [])}
    leaves, rebuild = flatten(tree)
    assert leaves == [1, 2, None, 4]
    assert rebuild([5, 6, 7, 8]) == {"b": [5, (6, 7)], "a": Point({"z": 8}, [])}
    assert list(rebuild(leaves)) == ["b", "a"]
    assert tree == {"b": [1, (2, None)], "a": Point({"z": 4}, [])}


@pytest.mark.parametrize("leaves", [[], [1], [1, 2, 3]])
@pytest.mark.parametrize("tree", [(1, 2), {"a": [1, 2]}])
def test_wrong_number_of_leaves(tree: Any, leaves: list[int]) -> None:
    with pytest.raises(ValueError, match=f"has 2 leaves, got {len(leaves)}"):
        flatten(tree)[1](leaves)


def test_lone_leaf_takes_one() -> None:
    with pytest.raises(ValueError, match="has 1 leaves, got 2"):
        flatten(torch.ones(1))[1]([1, 2])


@pytest.mark.parametrize("empty", [[], (), {}, OrderedDict(), UserDict()])
def test_empty_containers_are_fresh(empty: Any) -> None:
    leaves, rebuild = flatten(empty)
    assert leaves == []
    made = rebuild([])
    assert made == empty
    assert type(made) is type(empty)
    if type(empty) is not tuple:
        assert made is not empty


def test_named_tuples() -> None:
    made, count = numbered((Point(7, [8]), Typed("a")))
    assert count == 4
    assert made == (Point(0, [1]), Typed(2, 3))
    assert type(made[0]) is Point
    assert type(made[1]) is Typed


def test_return_types() -> None:
    made, _ = numbered(torch.max(torch.ones(2, 2), dim=0))
    assert isinstance(made, torch.return_types.max)
    assert (made.values, made.indices) == (0, 1)


def test_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    made = map_tree(lambda leaf: leaf + 1, packed)
    assert isinstance(made, PackedSequence)
    assert torch.equal(made.data, packed.data + 1)
    assert torch.equal(made.unsorted_indices, packed.unsorted_indices + 1)


def test_default_dict_keeps_its_factory() -> None:
    made, _ = numbered(defaultdict(list, {"a": 5}))
    assert type(made) is defaultdict
    assert made == {"a": 0}
    assert made["new"] == []


def test_ordered_dict_keeps_its_order() -> None:
    made, _ = numbered(OrderedDict([("z", 5), ("a", 6)]))
    assert type(made) is OrderedDict
    assert list(made.items()) == [("z", 0), ("a", 1)]


def test_user_dict_keeps_its_attributes() -> None:
    words = Words("en", {"a": [1, 2]})
    made, _ = numbered(words)
    assert type(made) is Words
    assert made.language == "en"
    assert made.data == {"a": [0, 1]}
    made["b"] = 1
    assert words.data == {"a": [1, 2]}


def test_batch_encoding() -> None:
    encoding = BatchEncoding({"input_ids": torch.ones(2, 3), "length": [3, 3]}, n_sequences=2)
    made, _ = numbered(encoding)
    assert type(made) is BatchEncoding
    assert dict(made) == {"input_ids": 0, "length": [1, 2]}
    assert made.input_ids == 0
    assert made.n_sequences == 2
    assert encoding["length"] == [3, 3]


@pytest.mark.parametrize("mapping", [MappingProxyType({"a": 5, "b": [6]}), ReadOnly({"a": 5, "b": [6]})])
def test_read_only_mappings(mapping: Mapping[str, Any]) -> None:
    made, _ = numbered(mapping)
    assert type(made) is type(mapping)
    assert dict(made) == {"a": 0, "b": [1]}
    assert mapping["b"] == [6]


def test_subclasses_keep_attributes_and_skip_their_constructor() -> None:
    attributed = AttributeDict("kept")
    attributed["a"] = 5
    named = NamedList([6, 7])
    named.name = "numbers"
    pair = NamedPair((8, 9))
    pair.name = "pair"
    made, _ = numbered([attributed, named, pair])
    assert [type(each) for each in made] == [AttributeDict, NamedList, NamedPair]
    assert (made[0], made[0].note) == ({"a": 0}, "kept")
    assert (made[1], made[1].name) == ([1, 2], "numbers")
    assert (made[2], made[2].name) == ((3, 4), "pair")


def test_dataclass_keeps_fields_outside_its_constructor() -> None:
    sample = Sample([1, 2])
    sample.note = "an attribute that is no field"
    made, count = numbered(sample)
    assert count == 4
    assert (made.image, made.label, made.extra) == ([0, 1], 2, 3)
    assert made.note == sample.note
    assert (sample.image, sample.label, sample.extra) == ([1, 2], None, "made in __post_init__")


def test_dataclass_with_an_unset_field() -> None:
    sample = Sample(1)
    del sample.extra
    made, count = numbered(sample)
    assert count == 2
    assert not hasattr(made, "extra")


@pytest.mark.parametrize("cls", [Frozen, Slotted])
def test_frozen_dataclasses(cls: Any) -> None:
    original = cls([1], {"k": 2})
    made, _ = numbered(original)
    assert type(made) is cls
    assert made == cls([0], {"k": 1})
    assert original == cls([1], {"k": 2})


def test_dataclass_with_its_own_constructor() -> None:
    made = map_tree(lambda leaf: leaf + 1, Asking(5))
    assert made.doubled == 11


def test_cached_properties_are_computed_anew() -> None:
    @dataclass
    class Masked:
        x: Any

        @cached_property
        def mask(self) -> Any:
            return self.x > 0

    batch = Masked(torch.tensor([1, -1]))
    assert batch.mask.tolist() == [True, False]
    assert map_tree(lambda x: x[1:], batch).mask.tolist() == [False]


def test_model_output_attributes_and_keys_agree() -> None:
    output = BaseModelOutputWithPast(last_hidden_state=torch.ones(2), hidden_states=(torch.ones(1), torch.zeros(1)))
    leaves, rebuild = flatten(output)
    assert len(leaves) == 3
    made = rebuild([leaf + 1 for leaf in leaves])
    assert type(made) is BaseModelOutputWithPast
    assert list(made.keys()) == ["last_hidden_state", "hidden_states"]
    assert made.last_hidden_state is made["last_hidden_state"]
    assert made.hidden_states is made["hidden_states"]
    assert made.past_key_values is None
    assert made.last_hidden_state.tolist() == [2, 2]
    assert made[0] is made.last_hidden_state
    assert len(made.to_tuple()) == 2
    assert output.last_hidden_state.tolist() == [1, 1]


def test_shared_leaves_and_containers() -> None:
    tensor, shared = torch.ones(1), [1, 2]
    leaves, rebuild = flatten([tensor, tensor, shared, shared])
    assert leaves[0] is leaves[1]
    made = rebuild(leaves)
    assert made[2] == made[3] == [1, 2]
    assert made[2] is not shared


def test_cycles_are_an_error() -> None:
    cyclic: dict[str, Any] = {"a": [1]}
    cyclic["a"].append((cyclic,))
    with pytest.raises(CyclicTreeError, match="dict contains itself"):
        flatten(cyclic)


class _Referable:
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: leaf,
        lambda leaf: [leaf, (leaf,)],
        lambda leaf: {"a": leaf},
        lambda leaf: defaultdict(list, a=leaf),
        lambda leaf: Words("en", {"a": leaf}),
        lambda leaf: ReadOnly({"a": leaf}),
        lambda leaf: NamedList([leaf]),
        lambda leaf: Point(leaf, leaf),
        lambda leaf: Sample(leaf),
        lambda leaf: Slotted(leaf),
        lambda leaf: BaseModelOutputWithPast(last_hidden_state=leaf),
    ],
)
def test_rebuild_holds_no_leaf(make: Any) -> None:
    leaf = _Referable()
    reference = weakref.ref(leaf)
    leaves, rebuild = flatten(make(leaf))
    count = len(leaves)
    del leaf, leaves
    gc.collect()
    assert reference() is None
    assert len(flatten(rebuild([None] * count))[0]) == count


def test_rebuild_twice_gives_separate_trees() -> None:
    leaves, rebuild = flatten({"a": [1], "b": Words("en", {"c": 2})})
    one, two = rebuild(leaves), rebuild(leaves)
    one["a"].append(3)
    one["b"]["d"] = 4
    assert two == {"a": [1], "b": Words("en", {"c": 2})}


def test_map_tree_and_tensors() -> None:
    a, b = torch.ones(2), torch.zeros(1)
    tree = {"a": a, "rest": [b, "text", Sample(a)]}
    assert [id(tensor) for tensor in tensors(tree)] == [id(a), id(b), id(a)]
    made = map_tree(lambda leaf: leaf.dtype if isinstance(leaf, torch.Tensor) else leaf, tree)
    assert made["a"] == torch.float32
    assert made["rest"][1] == "text"


def test_child_names_belong_to_the_children() -> None:
    sample = Sample(1)
    del sample.extra
    output = BaseModelOutputWithPast(last_hidden_state=5)
    for node, names in [
        ({"b": 1, "a": 2}, ["b", "a"]),
        (Words("en", {"a": 1}), ["a"]),
        (Point(1, 2), ["x", "y"]),
        (sample, ["image", "label"]),
        ([1, 2], [0, 1]),
        ((1,), [0]),
        (output, ["last_hidden_state"]),
    ]:
        opened = open_container(node)
        assert opened is not None
        assert child_names(node) == names
        assert len(opened[0]) == len(names)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keyed = st.dictionaries(st.text(max_size=3), children, max_size=3)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        keyed,
        keyed.map(OrderedDict),
        keyed.map(lambda content: Words("en", content)),
        keyed.map(ReadOnly),
        st.builds(Point, children, children),
        st.builds(Sample, children),
        st.builds(Frozen, children, children),
    )


trees = st.recursive(st.none() | st.integers() | st.text(max_size=3), containers, max_leaves=12)


def alike(a: Any, b: Any) -> bool:
    """Equal, with equal types at every level; written without the functions under test."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, (Sample, Frozen)):
        return alike(vars(a), vars(b))
    return bool(a == b)


@settings(deadline=None, database=None)
@given(trees)
def test_round_trip(tree: Any) -> None:
    leaves, rebuild = flatten(tree)
    assert alike(rebuild(leaves), tree)
    again, _ = flatten(rebuild(list(range(len(leaves)))))
    assert again == list(range(len(leaves)))
