"""Split a batch into microbatches, weigh their losses, merge what they returned: pure functions.

Where a batch is cut. Tensors (and NumPy arrays) are cut along dim 0. Lists and tuples with one item per sample are
*columns* and are cut like tensors. Everything else that holds something (mappings, dataclasses, named tuples, and the
lists and tuples that hold one field each) is *structure*: its type is kept and its fields are cut. A list or a tuple
does not say which of the two it is, so what it holds decides:

- no tensors (strings, numbers, objects): a column. As a tuple too, for PyTorch's default collation makes tuples of a
  batch's strings; but a tuple of numbers is a size or a stride, and structure.
- tensors or records alike whose first dimensions differ (sentences, sets of boxes): a column.
- tensors or records alike with one common first dimension: structure if that is the number of samples, as in
  ``[x, y]``, else a column. So is a tuple of tensors even where they differ: tuples are mostly structure. Beside a
  column of tensors or records both are columns: three images of three channels beside their boxes.
- sequences: structure if anything in them has the number of samples, as in ``zip(*samples)``, else a column. Samples
  ``(x_i, y_i)`` of several kinds and differing lengths are a column in any case.
- tensors among other things: a column if no tensor in it has the length of the batch; structure if containers are
  among them.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import accumulate
from numbers import Integral, Number, Real
from typing import Any, Literal, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_roundpipe.trees import child_names, flatten, open_container, tensors

LossWeight = Literal["samples", "tokens", "sum"] | Callable[[Any], float | Tensor]

SplitMethod = Callable[[Any, int], Sequence[Any]]
"""Cuts a batch into at most so many microbatches."""

LABEL_FIELDS = ("labels", "label_ids", "targets", "target")
IGNORED_LABEL = -100  # PyTorch's cross_entropy ignores it, transformers pads with it

REMEDY = (
    "Use a batch layout of tensors with the samples in dim 0 or lists with one item per sample, "
    "give the module or the data module a method `split(self, batch, microbatches)`, with just these names of "
    "arguments, that returns the microbatches, "
    'or keep the batch whole with RoundPipeStrategy(split="whole").'
)


class UnsplittableBatchError(ValueError):
    """Nothing in the batch tells its samples apart, so it cannot be split into microbatches."""


# Splitting


def batch_size(batch: Any) -> int:
    """Return the number of samples in `batch`: the length that most of its fields can be cut at.

    A tensor with at least one dimension counts for the length of dim 0, a column that holds tensors for the number of
    its items. Columns of other things (strings, numbers) count only if there is nothing else or to settle a tie; what
    is still tied goes to the length of a tensor, then to the field met first.

    Raises:
        UnsplittableBatchError: nothing in the batch can be cut.
        CyclicTreeError: a container of the batch contains itself.
    """
    flatten(batch)  # raises where a container holds itself
    votes = Counter(_votes(batch, top=True))
    if not votes:
        raise UnsplittableBatchError(f"The batch cannot be split. It holds {_describe(batch)}. {REMEDY}")

    def support(length: int) -> tuple[int, int, bool]:
        by_tensors, by_columns = votes[length, "tensor"], votes[length, "column"]
        return by_tensors + by_columns, votes[length, "opaque"], by_tensors > 0

    return max(dict.fromkeys(length for length, _ in votes), key=support)  # of equals the first


def can_be_split(batch: Any) -> bool:
    """Whether :func:`batch_size` finds a number of samples."""
    try:
        batch_size(batch)
    except UnsplittableBatchError:
        return False
    return True


def split_sizes(samples: int, microbatches: int, least: int = 1) -> list[int]:
    """Return how many samples each microbatch gets, the sizes of ``torch.tensor_split``.

    Sizes differ by at most one, larger ones come first, and none is less than `least` if there are as many samples: if
    need be, there are fewer microbatches.

    Raises:
        ValueError: `samples` or `microbatches` is less than one.
    """
    if samples < 1 or microbatches < 1:
        raise ValueError(f"cannot split {samples} samples into {microbatches} microbatches: both must be at least one")
    count = min(max(1, samples // least), microbatches)
    size, larger = divmod(samples, count)
    return [size + 1] * larger + [size] * (count - larger)


def least_samples(modules: Iterable[nn.Module]) -> int:
    """Return how many samples a microbatch must have at least: two where BatchNorm normalizes over them, for which one
    value per channel is an error.
    """
    norms = (module for module in modules if isinstance(module, _BatchNorm))
    return 2 if any(norm.training or norm.running_mean is None for norm in norms) else 1


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split `batch` into microbatches of `sizes` samples.

    Tensors and columns of ``sum(sizes)`` samples are cut; everything else goes to each microbatch as it is, in
    containers of its own. With a single size the result is ``[batch]``, the same object.

    Pieces of a tensor share its memory but not its version counter, so that a microbatch may change its piece in place
    while another one's piece is saved for backward. Tensors that require grad are cut by a differentiable operation.

    Raises:
        UnsplittableBatchError: nothing in the batch has ``sum(sizes)`` samples.
    """
    if len(sizes) == 1:
        return [batch]
    pieces = _split(batch, list(sizes))
    if pieces is None:
        raise UnsplittableBatchError(
            f"The batch cannot be split into microbatches of {list(sizes)} samples: nothing in it has length "
            f"{sum(sizes)}. It holds {_describe(batch)}. {REMEDY}"
        )
    return pieces


def own_split(*owners: object) -> SplitMethod | None:
    """Return the first owner's own method ``split(self, batch, microbatches)``, if one has it.

    The names of its arguments tell it from other attributes that are called ``split``.
    """
    for owner in owners:
        method = getattr(owner, "split", None)
        if not callable(method):
            continue
        with suppress(ValueError, TypeError):  # built-in functions may have no signature
            parameters = list(inspect.signature(method).parameters.values())
            if [p.name for p in parameters[:2]] == ["batch", "microbatches"] and all(
                p.default is not p.empty for p in parameters[2:]
            ):
                return method
    return None


def split_by(method: SplitMethod, batch: Any, microbatches: int) -> tuple[list[Any], list[int]]:
    """Split `batch` by the user's own method.

    Returns:
        The microbatches, and how many samples each has. Where that cannot be told (their first dimensions do not add
        up to the batch's), all sizes are 0.

    Raises:
        ValueError: `method` returned no list, an empty one, or more than `microbatches`.
    """
    name = getattr(method, "__qualname__", "split")
    pieces = method(batch, microbatches)
    if not isinstance(pieces, (list, tuple)) or not 1 <= len(pieces) <= microbatches:
        what = f"{len(pieces)} of them" if isinstance(pieces, (list, tuple)) else type(pieces).__name__
        raise ValueError(f"{name} must return a list of 1 to {microbatches} microbatches, it returned {what}.")
    try:
        sizes = [batch_size(piece) for piece in pieces]
        told = len(pieces) == 1 or sum(sizes) == batch_size(batch)
    except UnsplittableBatchError:
        told = False
    return list(pieces), sizes if told else [0] * len(pieces)


class _Role(Enum):
    """What a list or tuple is: see the top of this file."""

    STRUCTURE = auto()
    COLUMN = auto()
    OPAQUE_COLUMN = auto()
    DEPENDS = auto()  # on the number of samples
    MIXED = auto()  # likewise, and holds tensors among other things
    NESTED = auto()  # likewise, and holds sequences


def _role(node: Sequence[Any]) -> _Role:
    items = [item for item in node if item is not None]
    if not items or not _is_plain_sequence(node):
        return _Role.STRUCTURE
    lengths = [tuple(_lengths(item)) for item in items]
    kinds = set(map(_kind, items))
    if not any(lengths):
        sizes = isinstance(node, tuple) and all(isinstance(item, Number) for item in items)
        return _Role.STRUCTURE if sizes else _Role.OPAQUE_COLUMN
    if len(kinds) > 1:
        return _Role.STRUCTURE if any(map(open_container, items)) else _Role.MIXED
    if kinds == {"sequence"}:
        several = any(len(set(map(_kind, item))) > 1 for item in items)
        samples = len(set(lengths)) > 1 and several and _have_same_fields(items)
        return _Role.COLUMN if samples else _Role.NESTED
    common = len({length for item in lengths for length in item}) == 1
    tensor_tuple = isinstance(node, tuple) and all(map(_is_cuttable, items))
    return _Role.DEPENDS if common or tensor_tuple else _Role.COLUMN


def _have_same_fields(items: Sequence[Sequence[Any]]) -> bool:
    """Whether sequences hold the same kinds of things at the same places, or None."""
    if len(set(map(len, items))) > 1:
        return False
    return all(len({_kind(item) for item in field if item is not None}) < 2 for field in zip(*items, strict=True))


def _is_column(node: Any, samples: int, beside_column: bool = False) -> bool:
    if not isinstance(node, (list, tuple)) or len(node) != samples:
        return False
    role = _role(node)
    if role is _Role.NESTED and any(len(item) == samples for item in node if item is not None):
        return False
    if role in (_Role.DEPENDS, _Role.MIXED, _Role.NESTED):
        return samples not in _lengths(node) or (beside_column and role is _Role.DEPENDS)
    return role is not _Role.STRUCTURE


def _votes(node: Any, top: bool = False) -> Iterator[tuple[int, str]]:
    """Yield, field by field, the lengths that a field can be cut at and what says so."""
    if _is_cuttable(node):
        if length := _length(node):
            yield length, "tensor"
        return
    role = _role(node) if isinstance(node, (list, tuple)) else _Role.STRUCTURE
    if role is _Role.DEPENDS and top and isinstance(node, tuple):
        role = _Role.STRUCTURE  # a tuple of tensors which is the batch itself has fields of equal right
    if role is _Role.COLUMN:
        yield len(node), "column"
    elif role is _Role.OPAQUE_COLUMN:
        yield len(node), "opaque"
    elif role is _Role.DEPENDS:
        lengths = dict.fromkeys(length for length in _lengths(node) if length)
        yield from ((length, "tensor") for length in lengths)
        if len(node) not in lengths:
            yield len(node), "column"
    elif (opened := open_container(node)) is not None:
        for child in opened[0]:
            yield from _votes(child)


def _split(node: Any, sizes: list[int], beside_column: bool = False) -> list[Any] | None:
    """The pieces of `node`, or None if nothing in it can be cut."""
    samples = sum(sizes)
    if _is_cuttable(node):
        return _cut(node, sizes) if _length(node) == samples else None
    opened = open_container(node)
    if opened is None:
        return None
    children, close = opened
    if _is_column(node, samples, beside_column):
        return [close(children[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    beside_column = any(_is_column(child, samples) and _lengths(child) for child in children)
    parts = [_split(child, sizes, beside_column) for child in children]
    if all(part is None for part in parts):
        return None
    replicas = [
        [_copy_containers(child) for _ in sizes] if part is None else part
        for child, part in zip(children, parts, strict=True)
    ]
    return [close(list(fields)) for fields in zip(*replicas, strict=True)]


def _copy_containers(node: Any) -> Any:
    """`node` in fresh containers: one microbatch may take a key out of a dict that all of them were given."""
    opened = open_container(node)
    return node if opened is None else opened[1]([_copy_containers(child) for child in opened[0]])


def _is_cuttable(leaf: Any) -> bool:
    return (isinstance(leaf, (Tensor, numpy.ndarray)) and leaf.ndim > 0) or isinstance(leaf, PackedSequence)


def _length(leaf: Tensor | numpy.ndarray | PackedSequence) -> int:
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return leaf.size(0) if isinstance(leaf, Tensor) else leaf.shape[0]  # nested tensors may have no shape


def _lengths(node: Any) -> list[int]:
    """The lengths of all that can be cut at dim 0 in `node`."""
    if _is_cuttable(node):
        return [_length(node)]
    opened = open_container(node)
    return [] if opened is None else [length for child in opened[0] for length in _lengths(child)]


def _is_plain_sequence(node: Any) -> bool:
    return isinstance(node, list) or type(node) is tuple


def _kind(item: Any) -> Any:
    """Equal for items that may be samples of one column."""
    if isinstance(item, Tensor):
        return item.dtype, item.ndim
    return "sequence" if _is_plain_sequence(item) else type(item)


def _cut(leaf: Any, sizes: list[int]) -> list[Any]:
    bounds = [(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        in_order = leaf.sorted_indices is None
        return [
            pack_padded_sequence(padded[start:end], lengths[start:end], batch_first=True, enforce_sorted=in_order)
            for start, end in bounds
        ]
    if isinstance(leaf, Tensor) and leaf.is_nested:
        rows = leaf.unbind()
        return [torch.nested.as_nested_tensor(list(rows[start:end]), layout=leaf.layout) for start, end in bounds]
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        rows = leaf.to_sparse_coo()
        return [
            rows.index_select(0, torch.arange(*each, device=leaf.device)).to_sparse(layout=leaf.layout)
            for each in bounds
        ]
    pieces = [leaf[start:end] for start, end in bounds]
    if isinstance(leaf, Tensor) and not leaf.requires_grad:
        pieces = [piece.data for piece in pieces]  # a version counter of its own
    return pieces


def _describe(batch: Any) -> str:
    fields = list(_fields(batch, "batch"))
    shown = ", ".join(fields[:12]) or "an empty container"
    return f"{shown} and {len(fields) - 12} more" if len(fields) > 12 else shown


def _fields(node: Any, path: str) -> Iterator[str]:
    """Yield a line on each field, such as ``batch['x'][0] (Tensor of shape [4, 3])``."""
    if isinstance(node, PackedSequence) or (isinstance(node, Tensor) and node.is_nested):
        yield f"{path} ({type(node).__name__} of length {_length(node)})"
    elif isinstance(node, (Tensor, numpy.ndarray)):
        yield f"{path} ({type(node).__name__} of shape {list(node.shape)})"
    elif (opened := open_container(node)) is None:
        yield f"{path} ({type(node).__name__})"
    elif isinstance(node, (list, tuple)) and _role(node) in (_Role.COLUMN, _Role.OPAQUE_COLUMN):
        yield f"{path} ({type(node).__name__} of length {len(node)})"
    else:
        for name, child in zip(child_names(node), opened[0], strict=True):
            attribute = isinstance(name, str) and not isinstance(node, Mapping)
            yield from _fields(child, f"{path}.{name}" if attribute else f"{path}[{name!r}]")


# Weighing


def loss_weights(pieces: Sequence[Any], sizes: Sequence[int], loss_weight: LossWeight) -> list[float]:
    """Return the weight of each microbatch's loss in the loss of the batch.

    - ``"samples"``: its share of the samples, right for means over samples.
    - ``"sum"``: one, right for sums.
    - ``"tokens"``: its share of the labels that count, right for means over tokens: entries other than -100 of the
      field ``labels`` (or ``label_ids``, ``targets``, ``target``). Beside an ``input_ids`` of the same shape the first
      label of each row is left out: it has no position that could predict it in a causal language model.
    - a function: its share of ``loss_weight(microbatch)``, a finite number (or tensor of one) of at least zero.

    Shares of nothing (no label counts at all) are shares of the samples. `sizes` of zeros: not known.

    Raises:
        ValueError: shares of samples are asked for and not known; no labels field for ``"tokens"``; a negative or
            infinite count; an unknown `loss_weight`.
    """
    if loss_weight == "sum":
        return [1.0] * len(sizes)
    if loss_weight == "samples":
        return _sample_shares(sizes)
    if loss_weight == "tokens":
        counts = [_count_labels(piece) for piece in pieces]
    elif callable(loss_weight):
        counts = [float(loss_weight(piece)) for piece in pieces]
        for index, count in enumerate(counts):
            if not (math.isfinite(count) and count >= 0):
                raise ValueError(f"loss_weight gave {count} for microbatch {index}: it must be finite and at least 0")
    else:
        raise ValueError(f'loss_weight must be "samples", "tokens", "sum" or a function, got {loss_weight!r}')
    return _shares(counts) if sum(counts) > 0 else _sample_shares(sizes)


def _sample_shares(sizes: Sequence[int]) -> list[float]:
    if not any(sizes):
        raise ValueError(
            "The first dimensions of the microbatches that `split` returned do not add up to the batch's, so they do"
            ' not tell how many samples each has. Say how their losses count: RoundPipeStrategy(loss_weight="tokens"),'
            ' "sum", or a function of the microbatch.'
        )
    return _shares(sizes)


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts]


def _count_labels(piece: Any) -> float:
    labels, inputs = _find_labels(piece)
    shapes = [tensor.shape for tensor in tensors(inputs)]
    found = tensors(labels)
    if not found:
        raise ValueError(f'loss_weight="tokens" needs labels that are tensors, got {type(labels).__name__}')
    shifted = shapes == [tensor.shape for tensor in found]
    return float(sum(int(((t[..., 1:] if shifted else t) != IGNORED_LABEL).sum()) for t in found))


def count_tokens(batch: Any) -> int | None:
    """Return how many labels of `batch` count, as with ``"tokens"``, or None where it names no labels, or none but one
    for each sample.
    """
    try:
        labels, _ = _find_labels(batch)
    except ValueError:
        return None
    found = tensors(labels)
    if not found or any(t.dim() < 2 or t.is_floating_point() or t.layout != torch.strided for t in found):
        return None
    return int(_count_labels(batch))


def _find_labels(piece: Any) -> tuple[Any, Any]:
    """The labels of a microbatch, and the ``input_ids`` beside them."""
    records = list(_records(piece))
    for name in LABEL_FIELDS:
        for record in records:
            if record.get(name) is not None:
                return record[name], record.get("input_ids")
    names = ", ".join(map(repr, LABEL_FIELDS))
    raise ValueError(
        f'loss_weight="tokens" counts the labels in a field named {names}; the batch holds {_describe(piece)}. '
        "Give such a field, or a function that counts: RoundPipeStrategy(loss_weight=lambda batch: ...)."
    )


def _records(node: Any) -> Iterator[dict[Any, Any]]:
    """Yield every container that names its fields, outer ones first."""
    opened = open_container(node)
    if opened is None:
        return
    if not _is_plain_sequence(node):
        yield dict(zip(child_names(node), opened[0], strict=True))
    for child in opened[0]:
        yield from _records(child)


# Merging


def merge_losses(losses: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    """Return the detached sum of ``weights[i] * losses[i]``, in this order, over the losses that are not None.

    None if all are None. The dtype and device are those of the first loss; a single loss of weight one is returned bit
    for bit. Half precision is summed in single precision.
    """
    terms = [(loss.detach(), weight) for loss, weight in zip(losses, weights, strict=True) if loss is not None]
    if not terms:
        return None
    first, weight = terms[0]
    return first if len(terms) == 1 and weight == 1 else _weighted_sum(*zip(*terms, strict=True))


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """Merge what ``training_step`` returned for each microbatch into what it would return for the batch.

    Outputs of the same structure are merged leaf by leaf; a None, whole or in a leaf, contributes nothing. With ``n``
    the number of samples of a leaf's microbatch:

    - tensors and arrays ``[n, ...]``, lists and tuples of n items: concatenated.
    - other tensors of at least one dimension: the value if all are equal, else concatenated.
    - floating point numbers, and tensors without dimensions: the value if all are equal, else the mean with `weights`.
    - integers likewise: their sum, but for values that are all equal and not n, which are kept.
    - all else (bools, strings, objects): the value if all are equal, else the list of the values.

    What cannot be merged (outputs of different structure, tensors that do not fit together) becomes a list with one
    item per microbatch. A single output is returned as it is.
    """
    return _merge([_Part(*part) for part in zip(outputs, sizes, weights, strict=True)])


class _Part(NamedTuple):
    """A microbatch's share in a value to be merged."""

    value: Any
    size: int
    weight: float


def _merge(parts: list[_Part]) -> Any:
    parts = [part for part in parts if part.value is not None]
    values = [part.value for part in parts]
    if len(values) < 2:
        return values[0] if values else None
    if any(isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested) for value in values):
        return values
    if all(isinstance(value, Tensor) and value.ndim > 0 for value in values):
        return _merge_arrays(parts, lambda: torch.cat([value.to(values[0].device) for value in values]))
    if all(isinstance(value, numpy.ndarray) and value.ndim > 0 for value in values):
        return _merge_arrays(parts, lambda: numpy.concatenate(values))
    if any(open_container(value) is not None for value in values):
        return _merge_containers(parts)
    return _merge_scalars(parts)


def _merge_arrays(parts: list[_Part], concatenate: Callable[[], Any]) -> Any:
    values = [part.value for part in parts]
    if any(part.value.shape[0] != part.size for part in parts) and _all_same(values):
        return values[0]
    return concatenate() if len({value.shape[1:] for value in values}) == 1 else values


def _merge_containers(parts: list[_Part]) -> Any:
    values = [part.value for part in parts]
    opened = [each for each in map(open_container, values) if each is not None]
    first = values[0]
    if len(set(map(type, values))) > 1:
        return values
    close = opened[0][1]
    if all(_is_column(part.value, part.size) for part in parts):
        return close([item for items, _ in opened for item in items])
    names = child_names(first)
    fields = [
        dict(zip(child_names(value), items, strict=True)) for value, (items, _) in zip(values, opened, strict=True)
    ]
    if any(field.keys() != fields[0].keys() for field in fields):
        return values

    def merged(name: Any) -> Any:
        return _merge([part._replace(value=field[name]) for part, field in zip(parts, fields, strict=True)])

    return close([merged(name) for name in names])


def _merge_scalars(parts: list[_Part]) -> Any:
    values = [part.value for part in parts]
    integers = all(map(_is_integer, values))
    if integers and all(part.value == part.size for part in parts):
        return sum(values)
    if _all_same(values):
        return values[0]
    if integers:
        return sum(values)
    if all(map(_is_number, values)):
        return _mean(parts)
    return values


def _mean(parts: list[_Part]) -> Any:
    parts = [part for part in parts if part.weight] or parts  # what does not count need not be a number
    weights = [part.weight for part in parts]
    shares = _shares(weights if sum(weights) > 0 else [part.size for part in parts])
    values = [part.value for part in parts]
    if all(isinstance(value, Tensor) for value in values):
        return _weighted_sum(values, shares)
    return sum(share * value for share, value in zip(shares, values, strict=True))


def _weighted_sum(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = terms[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    scaled = [weight * term.to(first.device, dtype) for term, weight in zip(terms, weights, strict=True)]
    return sum(scaled[1:], scaled[0]).to(first.dtype)


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is not torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def _all_same(values: Sequence[Any]) -> bool:
    return all(_same(values[0], value) for value in values[1:])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b.to(a.device))
    if isinstance(a, numpy.ndarray) or isinstance(b, numpy.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and numpy.array_equal(a, b)
    return a is b or (type(a) is type(b) and bool(a == b))
