"""Can this step's batch be split? The first batch tells: its loss against those of its microbatches.

Where the step needs the whole batch, calls within it may still be split: those whose outputs are the same in parts.

The extra runs leave no trace: they draw no random numbers, and what they do to metrics, logs, buffers, attributes and
parameters is undone. They have no gradients, unless the step itself differentiates.
"""

import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_roundpipe.iterators import StandIn
from lightning_roundpipe.microbatch import IGNORED_LABEL, LABEL_FIELDS, LossWeight, loss_weights
from lightning_roundpipe.pipeline.call_split import CallSplit, close, find_split, signature
from lightning_roundpipe.pipeline.replica import same_items
from lightning_roundpipe.probes import changed_batches, moved_parameters
from lightning_roundpipe.repeatable import comparable
from lightning_roundpipe.trees import map_tree
from lightning_roundpipe.undoing import undone

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2  # half precision
_ROUNDING = 2e-6  # of a loss in single precision that is put together from parts
_NUMBER = 0.37
"""A random number that all samples share, where zero shows nothing: the share of a sample in a mixture of two, say."""
Cut = Callable[[Any], tuple[list[Any], list[int]]]
"""Cuts a batch: the microbatches, and how many samples each has."""

LossOf = Callable[[Any], Tensor | None]
"""The loss of the user's step for a batch, without side effects on the trainer."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A batch's loss, whole and put together from its microbatches with each weighting."""

    whole: float
    parts: dict[str, float]
    fits: dict[str, LossWeight]
    """The weightings that give the whole batch's loss, by name."""
    errors: dict[str, float]
    """How far off each was at most, as a share of the loss, by name."""
    accumulates: tuple[str, ...] = ()
    """What each run of the step changes anew, so that several microbatches do not leave what one batch does."""
    unusable: dict[str, Exception] = field(default_factory=dict)
    """The weightings that cannot be computed for this batch, by name."""
    draws: bool = False
    """Whether the step draws random numbers that are others in the microbatches than in the whole batch."""

    def describe(self) -> str:
        if self.accumulates:
            return f"each run of the step changes {', '.join(self.accumulates)} anew"
        alike = [name for name, value in self.parts.items() if f"{value:.6g}" == f"{self.whole:.6g}"]
        digits = 6 if self.fits.keys() >= set(alike) else 10  # a difference that matters is to be seen
        parts = ", ".join(f"{value:.{digits}g} by {name!r}" for name, value in self.parts.items())
        return f"the batch's loss is {self.whole:.{digits}g}; from its microbatches it is {parts}"

    def best(self, *preferred: str) -> str:
        """The name of the weighting that fits best: of those that rounding may have kept from it, the first one.

        While all labels are as likely to a model that has not learned anything, its losses hardly tell weightings
        apart, but what is off by more than rounding then will be off by more later.
        """
        bound = max(_ROUNDING, 10 * min(self.errors[name] for name in self.fits))
        return next(name for name in (*preferred, *self.fits) if name in self.fits and self.errors[name] <= bound)

    def misfit(self) -> str:
        """Why no weighting fits."""
        if self.accumulates:
            return self.describe()
        why = "the loss couples samples"
        if self.draws:
            why = (
                "the step draws random numbers that a batch and its microbatches do not share (from a seed or generator"
                " of its own, Python's or NumPy's, or by torch.randperm and the like), so that their losses cannot be"
                " compared, or the loss couples samples"
            )
        return f"{why}: {self.describe()}"


def gather_evidence(module: nn.Module, batch: Any, cut: Cut, loss_of: LossOf, wanted: LossWeight) -> Evidence | None:
    """Compares the whole batch's loss, and what the step leaves on the module, with its microbatches'.

    Weightings that agree in this batch need not do so in later ones. They are tried again on what those may be like:
    parameters no longer zero, masks and labels that leave something out.

    Args:
        module: The user's module; left as it was.
        batch: The first batch; left as it was.
        cut: How batches are split; it leaves no trace on the module.
        loss_of: The user's step.
        wanted: The weighting that was asked for; it is tried first.

    Returns:
        None where the loss says nothing: there is none, or it is zero or not finite.
    """
    tried: tuple[LossWeight, ...] = (wanted, "samples", "tokens", count_labels, "sum")
    candidates = {weight_name(weight): weight for weight in tried} | {weight_name(wanted): wanted}
    ignored = {IGNORED_LABEL}
    evidence = compare(module, batch, cut, loss_of, candidates, ignored)
    if evidence is None or not evidence.fits:
        return evidence
    fits, errors = evidence.fits, dict(evidence.errors)

    def narrowed(found: Evidence | None) -> dict[str, LossWeight]:
        if found is None:
            return fits
        errors.update({name: max(error, errors.get(name, 0.0)) for name, error in found.errors.items()})
        return found.fits

    samples = sum(cut(batch)[1])
    with ExitStack() as stack:
        with suppress(Exception):  # a step that bears no other values
            with moved_parameters(module):
                moved = compare(module, batch, cut, loss_of, fits)
            if moved is not None:
                fits = narrowed(moved)
                stack.enter_context(moved_parameters(module))
        for changed, counting in changed_batches(batch, samples, ignored):
            with suppress(Exception):
                fits = narrowed(compare(module, changed, cut, loss_of, {**fits, weight_name(counting): counting}))
        if not fits.keys() <= evidence.fits.keys():  # one that was found last must suit all that came before
            fits = narrowed(compare(module, batch, cut, loss_of, fits))
    return replace(evidence, fits=fits, errors=errors)


def compare(
    module: nn.Module,
    batch: Any,
    cut: Cut,
    loss_of: LossOf,
    candidates: dict[str, LossWeight],
    ignored: set[int] | None = None,
    number: float = 0.0,
) -> Evidence | None:
    """The losses of the whole batch and of its microbatches, and what they leave on the module.

    Where the step draws single random numbers, they are zero, for many a step does what it rarely does below a small
    one; and if some weighting fits then, another number.

    Args:
        module, batch, cut, loss_of: As for :func:`gather_evidence`.
        candidates: The weightings to try, by name.
        ignored: Gets the labels that the step's losses do not count.
        number: What a single random number is.

    Returns:
        None where the loss says nothing: there is none, or it is zero or not finite.
    """
    pieces, sizes = cut(batch)
    at_once = _run(module, [batch], [sum(sizes)], loss_of, number, ignored)
    whole = at_once.losses[0]
    if not _is_usable(whole):
        return None
    in_parts = _run(module, pieces, sizes, loss_of, number)
    accumulates: tuple[str, ...] = ()
    if changed := [name for name, value in in_parts.left.items() if not _alike(at_once.left.get(name), value)]:
        last = _run(module, pieces[-1:], sizes[-1:], loss_of, number)  # what is only set anew is no matter
        accumulates = tuple(name for name in changed if not _alike(last.left.get(name), in_parts.left[name]))
    if any(loss is None for loss in in_parts.losses):
        return None
    tolerance = _TOLERANCE.get(whole.dtype, _COARSE)
    parts: dict[str, float] = {}
    fits: dict[str, LossWeight] = {}
    errors: dict[str, float] = {}
    unusable: dict[str, Exception] = {}
    for name, weight in candidates.items():
        try:
            weights = loss_weights(pieces, sizes, weight)
        except Exception as error:  # no labels or samples to count, or whatever a function of the user's raises
            unusable[name] = error
            continue
        terms = [w * float(loss) for w, loss in zip(weights, in_parts.losses, strict=True) if loss is not None]
        parts[name] = sum(terms)
        scale = max(abs(float(whole)), sum(map(abs, terms)))
        if scale == 0:  # every weighting fits a loss of zero
            return None
        errors[name] = abs(parts[name] - float(whole)) / scale
        if errors[name] <= tolerance and not accumulates:
            fits[name] = weight
    evidence = Evidence(float(whole), parts, fits, errors, accumulates, unusable, at_once.draws)
    if fits and at_once.draws_number and not number:
        other = compare(module, batch, cut, loss_of, fits, number=_NUMBER)
        if other is not None:
            return replace(evidence, fits=other.fits) if other.fits else other
    return evidence


def error_in(module: nn.Module, batches: Sequence[Any], sizes: Sequence[int], loss_of: LossOf) -> Exception | None:
    """What the step raises with one of the batches, one after the other, if anything; it leaves no trace."""
    try:
        _run(module, batches, sizes, loss_of)
    except Exception as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class _Run:
    """What came of the step with batches one after the other."""

    losses: list[Tensor | None]
    left: dict[str, Tensor]
    """The numbers that they left on the module."""
    draws: bool
    """Whether random numbers were drawn all the same."""
    draws_number: bool
    """Whether a single number was drawn, that all samples share."""


def _run(
    module: nn.Module,
    batches: Sequence[Any],
    sizes: Sequence[int],
    loss_of: LossOf,
    number: float = 0.0,
    ignored: set[int] | None = None,
) -> _Run:
    try:
        with torch.no_grad():
            return _run_as_told(module, batches, sizes, loss_of, number, ignored)
    except RuntimeError:  # a step that differentiates code of its own needs gradients
        with torch.enable_grad():
            return _run_as_told(module, batches, sizes, loss_of, number, ignored)


def _run_as_told(
    module: nn.Module,
    batches: Sequence[Any],
    sizes: Sequence[int],
    loss_of: LossOf,
    number: float,
    ignored: set[int] | None,
) -> _Run:
    """Runs them with or without gradients, as the thread has them at the moment."""
    losses: list[Tensor | None] = []
    with comparable(module, number) as repeatable:
        for batch, size in zip(batches, sizes, strict=True):
            repeatable.begin(size)
            loss = loss_of(_own(batch))
            losses.append(None if loss is None else loss.detach().clone())
        if ignored is not None:
            ignored |= repeatable.ignored_labels
        left = _numbers_left(module, repeatable.written_parameters())
        return _Run(losses, left, repeatable.drew(), repeatable.drew_number)


def _numbers_left(module: nn.Module, written: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    """Buffers, attributes that are floating point numbers, how many items were taken from those that are iterators, and
    parameters that the step has written to.

    Metrics are left out: they are told of every sample once, in any case.
    """
    left: dict[str, Tensor] = {}
    for path, submodule in module.named_modules():
        if isinstance(submodule, Metric):
            continue
        for name, value in (*submodule.__dict__.items(), *submodule._buffers.items()):
            value = float(value.taken) if type(value) is StandIn else value
            number = torch.tensor(value, dtype=torch.float64) if type(value) is float else value
            if type(number) is Tensor and number.layout is torch.strided and not number.is_complex():
                left[f"{path}.{name}".lstrip(".")] = number.detach().clone()
    ids = set(map(id, written))
    left.update((name, p.detach().clone()) for name, p in module.named_parameters() if id(p) in ids)
    return left


def _alike(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and close(a, b)


def count_labels(piece: Any) -> int:
    """Labels that are not ignored, not shifted (as of masked language models)."""
    for name in LABEL_FIELDS:
        if hasattr(piece, "keys") and name in piece and isinstance(piece[name], Tensor):
            return int((piece[name] != IGNORED_LABEL).sum())
    raise ValueError("The batch has no labels to count.")


def weight_name(weight: LossWeight) -> str:
    """How a weighting is called in messages."""
    return weight if isinstance(weight, str) else getattr(weight, "__name__", "function")


def find_split_calls(
    module: nn.Module, layers: Sequence[nn.Module], batch: Any, microbatches: int, loss_of: LossOf
) -> dict[tuple[nn.Module, Hashable], CallSplit] | None:
    """The outermost calls of modules that hold layers, or are some, that give the same when they are split.

    Args:
        module: The user's module; left as it was.
        layers: Its layers.
        batch: The first batch; left as it was.
        microbatches: Into how many parts to split.
        loss_of: The user's step.

    Returns:
        How each is split, by module and :func:`signature` of its arguments. None where the loss says nothing: there is
        none, or it is not finite.
    """
    run = partial(_run, module, [batch], [0], loss_of)
    at_zero = run()
    if not _is_usable(at_zero.losses[0]):
        return None
    with ExitStack() as stack:
        with suppress(Exception):  # a step that bears no other values
            with moved_parameters(module):
                moved = run()
            if _is_usable(moved.losses[0]):
                at_zero = moved
                stack.enter_context(moved_parameters(module))
        trial = _Trial(module, layers, microbatches)
        for number in (0.0, _NUMBER) if at_zero.draws_number else (0.0,):
            whole = (run(number) if number else at_zero).losses[0]
            if not _is_usable(whole):
                continue
            with trial.intercepting():
                joined = run(number).losses[0]
            if joined is None or not close(joined, whole):
                return {}
        return trial.splits


def _is_usable(loss: Tensor | None) -> TypeGuard[Tensor]:
    return loss is not None and bool(loss.isfinite())


class _Trial:
    """Tries to split calls while the user's step runs, from the outermost ones inwards."""

    def __init__(self, root: nn.Module, layers: Sequence[nn.Module], microbatches: int) -> None:
        self.splits: dict[tuple[nn.Module, Hashable], CallSplit] = {}
        self._root = root
        self._microbatches = microbatches
        inside = set(layers)
        self._modules = [module for module in root.modules() if not inside.isdisjoint(module.modules())]
        self._unfit: set[tuple[nn.Module, Hashable]] = set()
        self._parameters = {module: list(module.parameters()) for module in self._modules}
        self._trying = False
        self._escaped = False

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        own = [(module.__dict__, module.__dict__.get("forward")) for module in self._modules]
        for module in self._modules:
            module.__dict__["forward"] = partial(self._call, module, module.forward)
        try:
            yield
        finally:
            for attributes, forward in own:
                if forward is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward

    def _call(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._trying:
            return forward(*args, **kwargs)
        key = module, signature((args, kwargs))
        found = None if key in self._unfit else self._try(module, forward, args, kwargs)
        if found is None or self.splits.setdefault(key, found[0]) != found[0]:
            self.splits.pop(key, None)
            self._unfit.add(key)
            return forward(*args, **kwargs)  # the calls within are tried
        return found[1]

    def _try(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallSplit, Any] | None:
        """Nothing but the output may come out of a call that is split."""
        self._trying, self._escaped = True, _is_looked_into(module) or self._has_others_parameters(module)
        log = self._root.__dict__.get("log")
        traces: list[list[_Traces]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            traces.append([_traces(submodule) for submodule in module.modules()])
            return output

        try:
            with undone(module):
                self._root.__dict__["log"] = self._note_escape
                found = find_split(run, args, kwargs, self._microbatches) if not self._escaped else None
                # What is set up at the first call is no trace.
                self._escaped |= not all(all(map(_same_traces, traces[0], later)) for later in traces[1:])
        finally:
            self._trying = False
            if log is None:
                self._root.__dict__.pop("log", None)
            else:
                self._root.__dict__["log"] = log
        return None if self._escaped else found

    def _has_others_parameters(self, module: nn.Module) -> bool:
        """Whether the step has put other tensors in the place of parameters (``functional_call``)."""
        now, own = list(module.parameters()), self._parameters[module]
        return len(now) != len(own) or not all(map(operator.is_, now, own))

    def _note_escape(self, *args: Any, **kwargs: Any) -> None:
        self._escaped = True


_Traces = tuple[dict[str, Any], list[int], dict[str, Any], list[int]]


def _traces(module: nn.Module) -> _Traces:
    """The attributes, the sizes of those that are containers, and the buffers with their versions."""
    attributes = dict(module.__dict__)
    sizes = [len(value) for value in attributes.values() if isinstance(value, (list, dict, set, deque))]
    buffers = dict(module._buffers)
    return attributes, sizes, buffers, [buffer._version for buffer in buffers.values() if buffer is not None]


def _same_traces(a: _Traces, b: _Traces) -> bool:
    return same_items(a[0], b[0]) and same_items(a[2], b[2]) and a[1] == b[1] and a[3] == b[3]


def _is_looked_into(module: nn.Module) -> bool:
    """Whether hooks within the module may bring something out of it.

    transformers' models collect what they return by hooks of their own; they bring nothing out of the model itself.
    """
    hooks = [
        hook
        for submodule in module.modules()
        for hook in (*submodule._forward_hooks.values(), *submodule._forward_pre_hooks.values())
    ]
    is_model = hasattr(type(module), "base_model_prefix")
    return any(not (is_model and (getattr(h, "__module__", None) or "").startswith("transformers.")) for h in hooks)


def _own(batch: Any) -> Any:
    return map_tree(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)
