"""Splitting keeps every sample once and every type; weights and merged values are those of the batch."""

import math
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightning_roundpipe.microbatch import (
    UnsplittableBatchError,
    batch_size,
    loss_weights,
    merge_losses,
    merge_outputs,
    split,
    split_sizes,
)
from lightning_roundpipe.trees import CyclicTreeError, tensors

Pair = namedtuple("Pair", "x y")


@dataclass
class Labelled:
    x: Any
    id: Any
    note: Any = field(init=False, default=None)


@dataclass(frozen=True)
class Box:
    corners: Any


def rows(samples: int, *shape: int) -> Tensor:
    """A tensor whose rows differ."""
    return torch.arange(samples * math.prod(shape), dtype=torch.float32).view(samples, *shape)


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    """What object detection gives per image: as many rows as there are objects in it."""
    return [{"boxes": rows(count, 4), "labels": torch.ones(count, dtype=torch.long)} for count in counts]


def cut(batch: Any, *sizes: int) -> list[Any]:
    return split(batch, list(sizes))


# Number of samples


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (rows(4, 2), 4),
        ((rows(4, 2), rows(4)), 4),
        ([rows(2, 2), rows(2)], 2),
        ({"x": rows(4, 3), "pos": rows(1, 3), "y": rows(4)}, 4),
        ({"pos": rows(1, 3), "x": rows(4, 3), "y": rows(4)}, 4),
        ({"a": rows(3), "b": rows(5)}, 3),  # a tie: the first
        ({"b": rows(5), "a": rows(3)}, 5),
        ((rows(1, 3), rows(4, 3), rows(4, 1)), 4),
        ({"x": rows(4), "classes": ["cat"] * 10, "names": ["dog"] * 10}, 4),  # tensors before strings
        ({"ids": ["a", "b", "c"], "n": 5}, 3),
        ({"sets": [rows(1), rows(2), rows(1)], "x": rows(4)}, 4),  # a tie: tensors before lists of them
        (((rows(7), rows(9)), ("a", "b")), 2),  # a tie that the strings settle
        (["a", "b", "c"], 3),
        (("a", "b", "c"), 3),
        ([object(), object()], 2),
        ([rows(1, 1), rows(2, 1), rows(3, 1)], 3),  # a ragged list
        ([rows(2, 1), rows(2, 1), rows(3, 1)], 3),
        ({"x": {"y": [{"z": rows(6)}]}}, 6),
        (Pair(rows(4, 2), rows(4)), 4),
        (Labelled(rows(4), ["a"] * 4), 4),
        (UserDict({"x": rows(4)}), 4),
        (BatchEncoding({"input_ids": rows(4, 7)}), 4),
        ({"x": numpy.zeros((4, 2))}, 4),
        ({"x": rows(4), "loss_scale": torch.tensor(1.0), "lr": 0.1, "none": None}, 4),
        ([[rows(4, 2), torch.zeros(4).long()], [rows(4, 2), torch.zeros(4).long()]], 4),  # two loaders
        ([rows(1, 1)], 1),
        # Object detection, from the majority of tensors it would be three channels or the number of boxes.
        (tuple(zip(*[(rows(3, 8, 8), target) for target in boxes(1, 2, 2, 5)], strict=True)), 4),
        (tuple(zip(*[(rows(3, 8, 8), target) for target in boxes(5)], strict=True)), 1),
        ({"boxes": [rows(2, 4), rows(5, 4), rows(2, 4)], "x": rows(3, 2)}, 3),
        ({"labels": [{"size": rows(2), **target} for target in boxes(1, 4, 4)], "pixel_values": rows(3, 1)}, 3),
        ([(rows(5), 1), (rows(6), 0), (rows(6), 1)], 3),  # samples as they are, not collated
    ],
)
def test_batch_size(batch: Any, samples: int) -> None:
    assert batch_size(batch) == samples


@pytest.mark.parametrize("batch", [None, 3, "text", {}, [], torch.tensor(1.0), {"size": (224, 224)}, torch.zeros(0, 3)])
def test_no_samples(batch: Any) -> None:
    with pytest.raises(UnsplittableBatchError, match=r'split="whole"'):
        batch_size(batch)


def test_the_error_names_the_fields() -> None:
    with pytest.raises(UnsplittableBatchError) as error:
        batch_size({"a": torch.tensor(1.0), "b": {0: Pair(3, None)}})
    for part in ("batch['a'] (Tensor of shape [])", "batch['b'][0].x (int)", "batch['b'][0].y (NoneType)"):
        assert part in str(error.value)


def test_cyclic_batch() -> None:
    batch: dict[str, Any] = {"x": rows(4)}
    batch["self"] = batch
    with pytest.raises(CyclicTreeError):
        batch_size(batch)


# Sizes


@pytest.mark.parametrize(
    ("samples", "microbatches", "sizes"),
    [(4, 2, [2, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (2, 5, [1, 1]), (1, 3, [1]), (5, 1, [5])],
)
def test_split_sizes(samples: int, microbatches: int, sizes: list[int]) -> None:
    assert split_sizes(samples, microbatches) == sizes


@pytest.mark.parametrize(
    ("samples", "microbatches", "sizes"),
    [(4, 4, [2, 2]), (7, 3, [3, 2, 2]), (5, 3, [3, 2]), (3, 3, [3]), (2, 5, [2]), (1, 3, [1])],
)
def test_split_sizes_of_at_least_two(samples: int, microbatches: int, sizes: list[int]) -> None:
    assert split_sizes(samples, microbatches, 2) == sizes


@given(st.integers(1, 60), st.integers(1, 60))
@settings(deadline=None, database=None)
def test_split_sizes_are_those_of_tensor_split(samples: int, microbatches: int) -> None:
    pieces = torch.arange(samples).tensor_split(microbatches)
    assert split_sizes(samples, microbatches) == [len(piece) for piece in pieces if len(piece)]


@pytest.mark.parametrize(("samples", "microbatches"), [(0, 2), (4, 0)])
def test_split_sizes_refuses_nothing(samples: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        split_sizes(samples, microbatches)


# Splitting


def test_a_single_microbatch_is_the_batch() -> None:
    for batch in ({"x": rows(4)}, "anything", None):
        assert cut(batch, 4)[0] is batch


def test_uneven_pieces_of_fields_of_all_kinds() -> None:
    scale, helper = torch.tensor(10.0), object()
    batch = {
        "x": rows(5, 2),
        "ids": ["a", "b", "c", "d", "e"],
        "names": ("a", "b", "c", "d", "e"),
        "pos": rows(1, 2),
        "size": (224, 224),
        "scale": scale,
        "helper": helper,
        "none": None,
        "text": "abcde",
        "array": numpy.arange(5),
    }
    first, second = cut(batch, 3, 2)
    assert torch.equal(first["x"], batch["x"][:3])
    assert torch.equal(second["x"], batch["x"][3:])
    assert (first["ids"], second["ids"]) == (["a", "b", "c"], ["d", "e"])
    assert (first["names"], second["names"]) == (("a", "b", "c"), ("d", "e"))
    assert (first["array"].tolist(), second["array"].tolist()) == ([0, 1, 2], [3, 4])
    for piece in (first, second):
        assert list(piece) == list(batch)
        for name in ("pos", "scale", "helper", "none", "text"):
            assert piece[name] is batch[name]
        assert piece["size"] == (224, 224)
    assert len(batch["ids"]) == 5


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_x_and_y_are_fields_even_if_there_are_as_many_samples_as_fields(samples: int) -> None:
    """Default collation makes a list of what the data set gives as a tuple."""
    batches = [
        [rows(samples, 3), rows(samples, 1)],
        (rows(samples, 3), rows(samples, 1)),
        [rows(samples, 3), torch.zeros(samples, dtype=torch.long), rows(samples, 3)],
        [[rows(samples, 3), rows(samples)], [rows(samples, 3), rows(samples)]],
        {"pair": [rows(samples, 1), rows(samples, 1)]},
        {"pair": [rows(samples, 1), rows(samples, 1)], "ids": ["name"] * samples},
        (rows(samples, 1), rows(1, 1)),
        [rows(samples), ["name"] * samples],
    ]
    for batch in batches:
        pieces = cut(batch, samples - 1, 1)
        for piece, size in zip(pieces, (samples - 1, 1), strict=True):
            assert type(piece) is type(batch)
            assert len(piece) == len(batch)
            assert tensors(piece)[0].shape[0] == size


def test_default_collation() -> None:
    data = [(torch.full((2,), float(i)), i, f"name {i}", {"size": (8, 9), "id": [str(i), "c"]}) for i in range(3)]
    batch = default_collate(data)
    assert batch_size(batch) == 3
    for piece, part in zip(cut(batch, 2, 1), (data[:2], data[2:]), strict=True):
        expected = default_collate(part)
        assert torch.equal(piece[0], expected[0])
        assert torch.equal(piece[1], expected[1])
        assert piece[2] == expected[2]
        assert [size.tolist() for size in piece[3]["size"]] == [size.tolist() for size in expected[3]["size"]]
        assert piece[3]["id"] == expected[3]["id"]


def test_types_are_kept() -> None:
    note = object()
    labelled = Labelled(rows(4), ["a", "bb", "ccc", "dddd"])
    labelled.note = note
    batch = OrderedDict(
        labelled=labelled,
        pair=Pair(rows(4), Box(rows(4))),
        words=UserDict({"x": rows(4)}),
        encoding=BatchEncoding({"input_ids": rows(4, 3)}),
        output=BaseModelOutputWithPast(last_hidden_state=rows(4, 1)),
    )
    pieces = cut(batch, 1, 3)
    for piece, size in zip(pieces, (1, 3), strict=True):
        assert type(piece) is OrderedDict
        assert type(piece["labelled"]) is Labelled
        assert piece["labelled"].note is note
        assert len(piece["labelled"].x) == len(piece["labelled"].id) == size
        assert type(piece["pair"]) is Pair
        assert type(piece["pair"].y) is Box
        assert len(piece["pair"].y.corners) == size
        assert type(piece["words"]) is UserDict
        assert len(piece["words"]["x"]) == size
        assert type(piece["encoding"]) is BatchEncoding
        assert piece["encoding"].input_ids.shape == (size, 3)
        assert piece["output"].last_hidden_state is piece["output"]["last_hidden_state"]
        assert len(piece["output"][0]) == size
    assert pieces[1]["labelled"].id == ["bb", "ccc", "dddd"]
    assert len(labelled.x) == 4


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_records_are_columns(kind: Callable[..., Any]) -> None:
    for items in (boxes(4, 1, 2, 4), [Box(rows(k, 4)) for k in (1, 4, 2, 3)], [Box(k) for k in range(4)]):
        pieces = cut({"x": rows(4), "targets": kind(items)}, 2, 2)
        assert [type(piece["targets"]) for piece in pieces] == [kind, kind]
        assert [item for piece in pieces for item in piece["targets"]] == items
        assert all(
            a is b
            for piece, part in zip(pieces, (items[:2], items[2:]), strict=True)
            for a, b in zip(piece["targets"], part, strict=True)
        )


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_detection_batches(samples: int) -> None:
    data = [(rows(3, 8, 8 + i), target) for i, target in enumerate(boxes(*range(2, 2 + samples)))]
    batch = tuple(zip(*data, strict=True))
    assert batch_size(batch) == samples
    for piece, part in zip(cut(batch, samples - 1, 1), (data[:-1], data[-1:]), strict=True):
        images, targets = piece
        assert all(a is b for a, (b, _) in zip(images, part, strict=True))
        assert all(a is b for a, (_, b) in zip(targets, part, strict=True))
    first, second = cut({"images": list(batch[0]), "targets": list(batch[1])}, samples - 1, 1)
    assert first["images"] == list(batch[0][:-1])
    assert second["targets"] == list(batch[1][-1:])


def test_nested_lists_of_fields_are_no_samples() -> None:
    """Samples are alike; fields of different kinds, of which some hold no tensors, are not."""
    x, words = torch.arange(8.0).view(4, 2), ["a", "b", "c", "d"]
    batch = [[x, [x + 1]], [[words]]]
    assert batch_size(batch) == 4
    first, second = split(batch, [3, 1])
    assert torch.equal(first[0][1][0], x[:3] + 1) and torch.equal(second[0][0], x[3:])
    assert first[1] == [[words[:3]]] and second[1] == [[words[3:]]]


def test_lists_of_samples_that_are_tuples_are_columns() -> None:
    pairs = [(rows(5), rows(6)), (rows(7), rows(7)), (rows(5), rows(9))]
    mixed = [(rows(5), 0), (rows(7), 1), (rows(3), 0)]
    for items in (pairs, mixed):
        assert cut({"x": rows(3), "items": items}, 2, 1)[0]["items"] == items[:2]
    assert cut(mixed, 2, 1) == [mixed[:2], mixed[2:]]


def test_images_beside_a_dict() -> None:
    images = [rows(3, 2), rows(3, 2)]
    batch = (images, {"names": ["a", "b"]})
    assert batch_size(batch) == 2
    assert cut(batch, 1, 1) == [(images[:1], {"names": ["a"]}), (images[1:], {"names": ["b"]})]


def test_ragged_lists() -> None:
    batch = [rows(1, 1), rows(2, 1), rows(3, 1)]
    first, second = cut(batch, 2, 1)
    assert first[0] is batch[0]
    assert first[1] is batch[1]
    assert second == [batch[2]]
    first, second = cut({"x": rows(3), "sets": [rows(3, 4), rows(2, 4), rows(3, 4)]}, 1, 2)
    assert [len(item) for item in first["sets"]] == [3]
    assert [len(item) for item in second["sets"]] == [2, 3]


def test_lists_with_missing_items_are_columns() -> None:
    first, second = cut({"x": rows(4), "mask": [None, rows(3), None, rows(2)], "any": [1, "a", None, rows(7)]}, 3, 1)
    assert first["mask"][0] is None
    assert (len(first["mask"]), len(second["mask"])) == (3, 1)
    assert first["any"] == [1, "a", None]
    assert len(second["any"]) == 1


def test_lists_of_another_length_are_looked_into() -> None:
    first, second = cut({"features": [rows(4, 2), rows(4, 3), "level"], "classes": ["cat"] * 3}, 1, 3)
    assert [len(level) for level in first["features"][:2]] == [1, 1]
    assert [len(level) for level in second["features"][:2]] == [3, 3]
    assert first["features"][2] == "level"
    assert second["classes"] == ["cat"] * 3


def test_a_tuple_of_numbers_is_a_size() -> None:
    pieces = cut({"x": rows(2), "size": (224, 224), "shape": torch.Size([2, 3]), "none": (None, None)}, 1, 1)
    assert all(piece["size"] == (224, 224) and piece["shape"] == (2, 3) for piece in pieces)
    assert all(piece["none"] == (None, None) for piece in pieces)


def test_replicated_containers_are_separate_and_their_leaves_the_same() -> None:
    pos = rows(1, 2)
    batch = {"x": rows(4), "meta": {"pos": pos, "tags": ["only one"]}}
    first, second = cut(batch, 2, 2)
    assert first["meta"].pop("pos") is second["meta"]["pos"] is pos
    first["meta"]["tags"].append("mine")
    assert second["meta"]["tags"] == batch["meta"]["tags"] == ["only one"]


def test_pieces_share_memory_but_no_version_counter() -> None:
    batch = {"x": rows(4, 2), "y": rows(4, 2)}
    weight = torch.ones(2, requires_grad=True)
    first, second = cut(batch, 2, 2)
    loss = (second["x"] * weight).sum()
    first["x"].add_(1)
    assert second["x"]._version == 0
    assert batch["x"]._version == 0
    loss.backward()  # raises if the change counted as one of what was saved
    assert weight.grad is not None
    assert weight.grad.tolist() == [10, 12]
    assert batch["x"][0].tolist() == [1, 2]
    second["x"].mul_(0)
    assert second["x"]._version == 1


def test_tensors_that_require_grad_are_cut_differentiably() -> None:
    x = rows(4, 2).requires_grad_()
    first, second = cut(x, 1, 3)
    (first.sum() + 2 * second.sum()).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 2, 2, 2]


def test_subclasses_of_tensor_are_kept() -> None:
    class Marked(Tensor):
        pass

    assert [type(piece) for piece in cut(rows(4).as_subclass(Marked), 2, 2)] == [Marked, Marked]


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.ones(4)
        assert [len(piece) for piece in cut(x, 3, 1)] == [3, 1]
    assert [len(piece) for piece in cut(x, 3, 1)] == [3, 1]


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(enforce_sorted: bool) -> None:
    sequences = [rows(length, 2) + length for length in ((4, 3, 1) if enforce_sorted else (1, 4, 3))]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    assert batch_size(packed) == 3
    pieces = [piece["x"] for piece in cut({"x": packed, "y": rows(3)}, 2, 1)]
    assert all(isinstance(piece, PackedSequence) for piece in pieces)
    assert [piece.sorted_indices is None for piece in pieces] == [enforce_sorted] * 2
    for got, expected in zip([row for piece in pieces for row in unpack_sequence(piece)], sequences, strict=True):
        assert torch.equal(got, expected)


def test_nested_and_sparse_tensors() -> None:
    parts = [rows(k, 2) for k in (1, 3, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = [torch.nested.nested_tensor(parts, layout=layout) for layout in (torch.jagged, torch.strided)]
        sparse = [rows(3, 2).to_sparse_coo(), rows(3, 2).to_sparse_csr()]
        for x in nested:
            assert batch_size(x) == 3
            pieces = cut(x, 2, 1)
            assert [piece.layout for piece in pieces] == [x.layout] * 2
            for got, expected in zip([row for piece in pieces for row in piece.unbind()], parts, strict=True):
                assert torch.equal(got, expected)
        for x in sparse:
            pieces = cut(x, 2, 1)
            assert [piece.layout for piece in pieces] == [x.layout] * 2
            assert torch.equal(torch.cat([piece.to_dense() for piece in pieces]), rows(3, 2))


def test_nothing_to_split() -> None:
    with pytest.raises(UnsplittableBatchError) as error:
        cut({"x": [rows(4, 3), "text"], "ids": ["a", "b"], "box": Box(rows(3))}, 3, 3)
    for part in (
        "length 6",
        "batch['x'][0] (Tensor of shape [4, 3])",
        "batch['ids'] (list of length 2)",
        "batch['box'].corners (Tensor of shape [3])",
        'RoundPipeStrategy(split="whole")',
    ):
        assert part in str(error.value)


fields = st.sampled_from(["tensor", "matrix", "strings", "objects", "tuple", "records", "nested", "shared", "number"])


def make_field(kind: str, samples: int) -> Any:
    return {
        "tensor": lambda: torch.randn(samples),
        "matrix": lambda: torch.randn(samples, 3),
        "strings": lambda: [f"sample {i}" for i in range(samples)],
        "objects": lambda: [object() for _ in range(samples)],
        "tuple": lambda: tuple(f"sample {i}" for i in range(samples)),
        "records": lambda: [{"name": i} for i in range(samples)],
        "nested": lambda: Pair(torch.randn(samples), {"ids": list(range(samples))}),
        "shared": lambda: torch.tensor(3.0),
        "number": lambda: 0.5,
    }[kind]()


def joined(values: list[Any]) -> Any:
    """The batch that pieces come from; written without the functions under test."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values) if first.ndim else first
    if isinstance(first, Pair):
        return Pair(joined([value.x for value in values]), joined([value.y for value in values]))
    if isinstance(first, dict):
        return {key: joined([value[key] for value in values]) for key in first}
    return sum(values[1:], first) if isinstance(first, (list, tuple)) else first


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return all(map(equal, a, b)) and len(a) == len(b) if isinstance(a, (list, tuple)) else bool(a == b)


@settings(deadline=None, database=None)
@given(st.integers(2, 12), st.integers(2, 6), st.lists(fields, max_size=6))
def test_pieces_joined_are_the_batch(samples: int, microbatches: int, kinds: list[str]) -> None:
    batch = {"x": torch.randn(samples, 2), **{f"{kind}{i}": make_field(kind, samples) for i, kind in enumerate(kinds)}}
    assert batch_size(batch) == samples
    sizes = split_sizes(samples, microbatches)
    pieces = split(batch, sizes)
    assert [len(piece["x"]) for piece in pieces] == sizes
    assert equal(joined(pieces), batch)
    assert equal(merge_outputs(pieces, sizes, loss_weights(pieces, sizes, "samples")), batch)


# Weights


def test_weights_by_samples_and_sum() -> None:
    pieces = cut(rows(4), 3, 1)
    assert loss_weights(pieces, [3, 1], "samples") == [0.75, 0.25]
    assert loss_weights(pieces, [3, 1], "sum") == [1.0, 1.0]
    assert loss_weights([rows(4)], [4], "samples") == [1.0]


@pytest.mark.parametrize("name", ["labels", "label_ids", "targets", "target"])
def test_weights_by_tokens(name: str) -> None:
    labels = torch.tensor([[1, 2, -100], [-100, -100, 3]])
    assert loss_weights(cut({"x": rows(2), name: labels}, 1, 1), [1, 1], "tokens") == [2 / 3, 1 / 3]


def test_causal_language_models_do_not_predict_the_first_label() -> None:
    labels = torch.tensor([[1, 2, -100], [4, 5, 3], [4, -100, -100]])
    same, other = {"input_ids": rows(3, 3), "labels": labels}, {"input_ids": rows(3, 5), "labels": labels}
    assert loss_weights(cut(same, 2, 1), [2, 1], "tokens") == [1.0, 0.0]
    assert loss_weights(cut(same, 1, 2), [1, 2], "tokens") == [1 / 3, 2 / 3]
    assert loss_weights(cut(other, 2, 1), [2, 1], "tokens") == [5 / 6, 1 / 6]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda labels: BatchEncoding({"labels": labels}),
        lambda labels: UserDict({"deep": [{"labels": labels}]}),
        lambda labels: {"labels": None, "target": labels},
        lambda labels: {"target": None, "inner": {"labels": labels}, "targets": torch.zeros(2, 9)},
        lambda labels: namedtuple("Named", "x labels")(rows(2), labels),
    ],
)
def test_labels_are_found(wrap: Any) -> None:
    labels = torch.tensor([[1, 2, -100], [-100, -100, 3]])
    assert loss_weights(cut(wrap(labels), 1, 1), [1, 1], "tokens") == [2 / 3, 1 / 3]


def test_labels_of_different_lengths() -> None:
    labels = [torch.tensor([1, 2]), torch.tensor([-100, 2, 3, 4])]
    batch = {"input_ids": [rows(2), rows(4)], "labels": labels}
    assert loss_weights(cut(batch, 1, 1), [1, 1], "tokens") == [0.25, 0.75]
    assert loss_weights(cut({"labels": labels}, 1, 1), [1, 1], "tokens") == [0.4, 0.6]


def test_no_label_counts() -> None:
    pieces = cut({"labels": torch.full((4, 2), -100)}, 3, 1)
    assert loss_weights(pieces, [3, 1], "tokens") == [0.75, 0.25]


def test_no_labels() -> None:
    with pytest.raises(ValueError, match=r"'labels'.*batch\['x'\].*loss_weight=lambda"):
        loss_weights([{"x": rows(2)}, {"x": rows(2)}], [2, 2], "tokens")
    with pytest.raises(ValueError, match="needs labels that are tensors, got list"):
        loss_weights([{"labels": ["a"]}, {"labels": ["b"]}], [1, 1], "tokens")


def test_weights_by_a_function() -> None:
    pieces = cut({"w": torch.tensor([1.0, 2.0, 5.0])}, 2, 1)
    assert loss_weights(pieces, [2, 1], lambda piece: piece["w"].sum()) == [3 / 8, 5 / 8]
    assert loss_weights(pieces, [2, 1], lambda piece: len(piece["w"]) - 1) == [1.0, 0.0]
    assert loss_weights(pieces, [2, 1], lambda piece: 0) == [2 / 3, 1 / 3]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_weights(value: float) -> None:
    with pytest.raises(ValueError, match="microbatch 1: it must be finite"):
        loss_weights([1.0, value], [1, 1], lambda piece: piece)


def test_unknown_weight() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        loss_weights([rows(1), rows(1)], [1, 1], "mean")  # type: ignore[arg-type]


def test_weighted_means_are_those_of_the_batch() -> None:
    """What the weights are for: the weighted losses add up to the loss of the whole batch."""
    logits, labels = torch.randn(7, 5, 4, dtype=torch.float64), torch.randint(4, (7, 5))
    labels[torch.rand(7, 5) < 0.4] = -100
    batch, sizes = {"logits": logits, "labels": labels}, [3, 2, 2]

    def loss(part: dict[str, Tensor], reduction: str) -> Tensor:
        return torch.nn.functional.cross_entropy(
            part["logits"].flatten(0, 1), part["labels"].flatten(), reduction=reduction
        )

    for weight, reduction in (("tokens", "mean"), ("sum", "sum")):
        pieces = split(batch, sizes)
        weights = loss_weights(pieces, sizes, weight)  # type: ignore[arg-type]
        merged = merge_losses([loss(piece, reduction) for piece in pieces], weights)
        torch.testing.assert_close(merged, loss(batch, reduction))


# Losses


def test_merged_losses() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), None, torch.tensor(3.0)]
    merged = merge_losses(losses, [0.5, 0.25, 0.25])
    assert merged is not None
    assert merged.item() == 1.25
    assert not merged.requires_grad
    assert merge_losses([None, None], [0.5, 0.5]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_single_loss_is_unchanged(dtype: torch.dtype) -> None:
    loss = torch.tensor(1 / 3, dtype=dtype, requires_grad=True)
    merged = merge_losses([loss], [1.0])
    assert merged is not None
    assert torch.equal(merged, loss)
    assert merged.dtype == dtype
    assert not merged.requires_grad
    half = merge_losses([loss, loss], [0.5, 0.5])
    assert half is not None
    assert half.dtype == dtype
    assert half.item() == loss.item()


def test_a_single_loss_among_others_keeps_its_weight() -> None:
    merged = merge_losses([None, torch.tensor(4.0)], [0.5, 0.5])
    assert merged is not None
    assert merged.item() == 2.0


def test_half_precision_losses_are_summed_in_single() -> None:
    losses = [torch.tensor(256.0, dtype=torch.bfloat16)] + [torch.tensor(1.0, dtype=torch.bfloat16)] * 4
    merged = merge_losses(losses, [1.0] * 5)
    assert merged is not None
    assert merged.item() == 260.0  # one by one in bfloat16: 256


# Outputs

SIZES, WEIGHTS = [3, 1], [0.75, 0.25]


def merge(*outputs: Any) -> Any:
    return merge_outputs(outputs, SIZES, WEIGHTS)


def test_a_single_output_is_returned() -> None:
    output = {"loss": torch.tensor(1.0)}
    assert merge_outputs([output], [4], [1.0]) is output
    assert merge_outputs([None], [4], [1.0]) is None


def test_tensors_of_samples_are_concatenated() -> None:
    assert torch.equal(merge(rows(3, 2), rows(1, 2)), torch.cat([rows(3, 2), rows(1, 2)]))
    equal_halves = merge_outputs([rows(2), rows(2)], [2, 2], [0.5, 0.5])
    assert equal_halves.tolist() == [0, 1, 0, 1]


def test_tensors_of_no_samples() -> None:
    assert torch.equal(merge(rows(5), rows(5)), rows(5))
    assert merge(rows(5), rows(5) + 1).shape == (10,)
    assert merge(rows(5), rows(2)).shape == (7,)


def test_tensors_that_do_not_fit_are_listed() -> None:
    merged = merge(rows(3, 7), rows(1, 9))
    assert [value.shape for value in merged] == [(3, 7), (1, 9)]


def test_arrays() -> None:
    assert merge(numpy.arange(3), numpy.arange(1)).tolist() == [0, 1, 2, 0]
    assert merge(numpy.arange(2), numpy.arange(2)).tolist() == [0, 1]


def test_floats_are_averaged() -> None:
    assert merge(torch.tensor(1.0), torch.tensor(3.0)).item() == 1.5
    assert merge(1.0, 3.0) == 1.5
    assert merge(1, 3.0) == 2.5 - 1.0
    assert merge_outputs([1.0, 2.0, 6.0], [1, 1, 2], [1.0, 1.0, 1.0]) == pytest.approx(3.0)  # weights are normalized
    assert merge_outputs([1.0, 3.0], [3, 1], [0.0, 0.0]) == 1.5


def test_equal_floats_are_that_very_value() -> None:
    assert merge_outputs([0.1] * 3, [1, 1, 1], [1 / 3] * 3) == 0.1
    assert merge_outputs([torch.tensor(0.1)] * 3, [1, 1, 1], [1 / 3] * 3).item() == torch.tensor(0.1).item()
    assert math.isnan(merge(math.nan, math.nan))


def test_only_contributing_microbatches_count() -> None:
    merged = merge_outputs([{"a": 1.0}, {"a": None}, {"a": 4.0}], [1, 1, 2], [0.25, 0.25, 0.5])
    assert merged == {"a": pytest.approx(3.0)}
    assert merge_outputs([None, {"a": 1.0, "x": rows(1)}, None], [1, 1, 2], [0.25, 0.25, 0.5])["a"] == 1.0
    assert merge_outputs([rows(1), None, rows(2)], [1, 1, 2], [0.25, 0.25, 0.5]).shape == (3,)
    assert merge(None, None) is None
    assert merge({"a": None}, {"a": None}) == {"a": None}


def test_integers() -> None:
    assert merge(3, 1) == 4  # the number of samples
    assert merge_outputs([2, 2], [2, 2], [0.5, 0.5]) == 4
    assert merge(7, 7) == 7
    assert merge(7, 8) == 15
    assert merge(torch.tensor(3), torch.tensor(1)).item() == 4
    assert merge(torch.tensor(7), torch.tensor(7)).item() == 7
    assert merge(torch.tensor(7), torch.tensor(8)).item() == 15


def test_other_values() -> None:
    assert merge("a", "a") == "a"
    assert merge("a", "b") == ["a", "b"]
    assert merge(True, True) is True
    assert merge(True, False) == [True, False]
    assert [value.item() for value in merge(torch.tensor(True), torch.tensor(False))] == [True, False]
    assert merge({1}, {1}) == {1}


def test_lists_of_samples_are_concatenated() -> None:
    assert merge(["a", "b", "c"], ["d"]) == ["a", "b", "c", "d"]
    assert merge(("a", "b", "c"), ("d",)) == ("a", "b", "c", "d")
    assert [len(item) for item in merge([rows(2), rows(3), rows(2)], [rows(5)])] == [2, 3, 2, 5]


def test_lists_of_fields_are_merged_field_by_field() -> None:
    merged = merge([rows(3, 2), rows(3)], [rows(1, 2), rows(1)])
    assert [value.shape for value in merged] == [(4, 2), (4,)]
    losses = merge([torch.tensor(1.0), 1.0], [torch.tensor(3.0), 1.0])
    assert losses[0].item() == 1.5
    assert losses[1] == 1.0


def test_structures_keep_their_type() -> None:
    def output(size: int, loss: float) -> Any:
        hidden = BaseModelOutputWithPast(last_hidden_state=rows(size, 2))
        return {"loss": torch.tensor(loss), "out": Pair(hidden, Box(rows(size))), "n": size, "name": "step"}

    first, second = output(3, 1.0), output(1, 3.0)
    merged = merge(first, second)
    assert merged["loss"].item() == 1.5
    assert type(merged["out"]) is Pair
    assert type(merged["out"].x) is BaseModelOutputWithPast
    assert merged["out"].x.last_hidden_state.shape == (4, 2)
    assert type(merged["out"].y) is Box
    assert (merged["n"], merged["name"]) == (4, "step")
    assert first["n"] == 3


def test_keys_in_another_order() -> None:
    assert merge({"a": 1.0, "b": "x"}, {"b": "x", "a": 3.0}) == {"a": 1.5, "b": "x"}


@pytest.mark.parametrize(
    "outputs",
    [({"a": 1.0}, {"b": 1.0}), ({"a": 1.0}, 1.0), ([1.0, 2.0], (1.0, 2.0)), ([1.0, 2.0], [1.0] * 4), ("a", 1)],
)
def test_different_structures_are_listed(outputs: tuple[Any, Any]) -> None:
    assert merge(*outputs) == list(outputs)
