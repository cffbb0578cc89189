"""How the call of a module that treats samples independently is cut into microbatches, and its outputs joined again.

For steps that need the whole batch at once: the step runs once, and only such calls within it are split.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.microbatch import split_sizes
from lightning_roundpipe.trees import child_names, flatten, open_container

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2  # half precision


class CannotSplitError(ValueError):
    """A call is not like the one that the split was found by."""


@dataclass(frozen=True, slots=True)
class CallSplit:
    """Where the arguments of one kind of call are cut, and how what the parts return is joined.

    Attributes:
        inputs: For each leaf of the arguments the dimension that holds the samples; None: every part gets the leaf.
        outputs: For each leaf of the output the dimension that holds the samples; None: it is the same in every part.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    def sizes(self, leaves: Sequence[Any], microbatches: int, least: int = 1) -> list[int]:
        """Samples of each part, not less than `least`; see :func:`split_sizes`.

        Raises:
            CannotSplitError: When the leaves do not hold the same number of samples.
        """
        counts = {leaf.size(dim) for leaf, dim in zip(leaves, self.inputs, strict=True) if dim is not None}
        if len(counts) != 1:
            raise CannotSplitError(f"its arguments hold {sorted(counts)} samples, not all the same number")
        (samples,) = counts
        return split_sizes(samples, microbatches, least) if samples else [0]

    def cut(self, leaves: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
        """The leaves of each part's arguments. Parts are views."""
        columns = [
            [leaf] * len(sizes) if dim is None else list(leaf.split(list(sizes), dim))
            for leaf, dim in zip(leaves, self.inputs, strict=True)
        ]
        return [list(part) for part in zip(*columns, strict=True)]

    def join(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """One output's leaves from those of the parts.

        Raises:
            CannotSplitError: When the parts returned something else than they did before.
        """
        if any(len(part) != len(self.outputs) for part in parts):
            raise CannotSplitError(
                f"it returned {[len(part) for part in parts]} values, where it was {len(self.outputs)} before"
            )
        joined = []
        for column, dim in zip(zip(*parts, strict=True), self.outputs, strict=True):
            if dim is None:
                if not all(same(column[0], other) for other in column[1:]):
                    raise CannotSplitError(
                        "a value that was the same for all samples before now differs between microbatches"
                    )
                joined.append(column[0])
            elif all(isinstance(leaf, Tensor) and leaf.ndim > dim for leaf in column):
                shapes = [tuple(leaf.shape) for leaf in column]
                if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
                    raise CannotSplitError(
                        f"its microbatches returned tensors of shapes {shapes}, which do not fit together"
                    )
                joined.append(torch.cat([leaf.detach() for leaf in column], dim))
            else:
                raise CannotSplitError("it returned something else than a tensor where it returned one before")
        return joined


def signature(tree: Any) -> Hashable:
    """What kind of arguments these are: calls of one kind are split in the same way."""
    opened = open_container(tree)
    if opened is not None:
        return type(tree), tuple(child_names(tree)), tuple(signature(child) for child in opened[0])
    if isinstance(tree, Tensor):
        return "tensor", tree.ndim
    kind: Any = tree if tree is None or isinstance(tree, (bool, str)) else type(tree)
    return kind


def find_split(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], microbatches: int
) -> tuple[CallSplit, Any] | None:
    """Finds out, by trying, whether and along which dimension a call can be split.

    Args:
        run: The call. It must be repeatable; it runs once with the whole arguments, and for each dimension that may be
            the one of the samples once for each part.
        args: Its positional arguments; they are left as they are.
        kwargs: Its keyword arguments.
        microbatches: Into how many parts, at most.

    Returns:
        The split, and the output as joined from the parts; or None where no dimension gives the whole call's output.
    """
    leaves, rebuild = flatten((args, dict(kwargs)))
    if not all(_is_plain(leaf) for leaf in leaves):
        return None
    columns = {length for argument in (*args, *kwargs.values()) for length in _lengths_of_columns(argument)}

    def outcome(part: Sequence[Any]) -> tuple[list[Any], Any]:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in part]
        versions = [leaf._version for leaf in own if isinstance(leaf, Tensor)]
        part_args, part_kwargs = rebuild(own)
        result = flatten(run(*part_args, **part_kwargs))
        if [leaf._version for leaf in own if isinstance(leaf, Tensor)] != versions:
            raise _ChangesItsArguments
        return result

    try:
        whole, rebuild_output = outcome(leaves)
        if not any(isinstance(leaf, Tensor) for leaf in whole):
            return None
        for inputs in _candidates(leaves):
            split = CallSplit(inputs, ())
            sizes = split.sizes(leaves, microbatches)
            if sum(sizes) in columns:  # of which each part would get all, and take the first ones for its own
                continue
            try:
                parts = [outcome(part)[0] for part in split.cut(leaves, sizes)]
            except _ChangesItsArguments:
                raise
            except Exception:  # the samples lie in another dimension
                continue
            outputs = _joining_dimensions(whole, parts, sizes)
            if outputs is not None:
                split = CallSplit(inputs, outputs)
                return split, rebuild_output(split.join(parts))
    except _ChangesItsArguments:
        return None
    return None


def _lengths_of_columns(tree: Any) -> Iterator[int]:
    """The lengths of lists and tuples that hold something else than tensors, maybe for each sample."""
    opened = open_container(tree)
    if opened is None:
        return
    items = opened[0]
    if isinstance(tree, (list, tuple)) and items and not any(isinstance(item, Tensor) for item in items):
        yield len(items)
    for item in items:
        yield from _lengths_of_columns(item)


class _ChangesItsArguments(Exception):
    pass


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf may be given to several parts: tensors, numbers, names; no object that a part might write to."""
    return leaf is None or isinstance(leaf, (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size))


def _candidates(leaves: Sequence[Any]) -> Iterator[tuple[int | None, ...]]:
    """Ways to cut the leaves, the likeliest first: by dimension, then by how many tensors have that length in it."""
    for dim in (0, 1):
        lengths = Counter(leaf.size(dim) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > dim)
        for length, _ in lengths.most_common():
            if length > 1:
                yield tuple(
                    dim if isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.size(dim) == length else None
                    for leaf in leaves
                )


def _joining_dimensions(
    whole: Sequence[Any], parts: Sequence[Sequence[Any]], sizes: Sequence[int]
) -> tuple[int | None, ...] | None:
    """For each output the dimension along which the parts make up the whole; None if there is an output without."""
    if any(len(part) != len(whole) for part in parts):
        return None
    found: list[int | None] = []
    for expected, *column in zip(whole, *parts, strict=True):
        if not isinstance(expected, Tensor):
            if not all(same(expected, leaf) for leaf in column):
                return None
            found.append(None)
            continue
        if not all(isinstance(leaf, Tensor) and leaf.ndim == expected.ndim for leaf in column):
            return None
        dims = [dim for dim in range(expected.ndim) if _makes_up(expected, column, dim, sizes)]
        if dims:
            found.append(dims[0])
        elif all(same(expected, leaf) for leaf in column):
            found.append(None)
        else:
            return None
    return tuple(found)


def _makes_up(whole: Tensor, parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> bool:
    samples = sum(sizes)
    if whole.size(dim) == 0 or whole.size(dim) % samples:
        return False
    each = whole.size(dim) // samples  # rows of a sample
    if any(part.size(dim) != size * each for part, size in zip(parts, sizes, strict=True)):
        return False
    if any(part.shape[:dim] != whole.shape[:dim] or part.shape[dim + 1 :] != whole.shape[dim + 1 :] for part in parts):
        return False
    return close(torch.cat(list(parts), dim), whole)


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same up to rounding, as differently batched kernels leave it."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    tolerance = _TOLERANCE.get(a.dtype, _COARSE)
    finite = b.detach()[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and close(a.detach(), b.detach())
    return a is b or (type(a) is type(b) and bool(a == b))


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins."""
    return [0, *accumulate(sizes)][:-1]
