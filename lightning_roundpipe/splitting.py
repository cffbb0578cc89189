"""Can this step's batch be split? The first batch tells: its loss against those of its microbatches.

Where the step needs the whole batch, calls within it may still be split: those whose outputs are the same in parts.

The extra runs leave no trace: they see no gradients and draw no random numbers, and what they do to metrics, logs,
buffers, attributes and parameters is undone.
"""

import copy
import operator
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.microbatch import IGNORED_LABEL, LABEL_FIELDS, LossWeight, loss_weights
from lightning_roundpipe.pipeline.call_split import CallSplit, close, find_split, signature
from lightning_roundpipe.pipeline.interception import any_parameter, is_about_the_object
from lightning_roundpipe.pipeline.replica import same_items
from lightning_roundpipe.pipeline.rng import RandomState
from lightning_roundpipe.pipeline.watching import is_plain_object, named_by_code
from lightning_roundpipe.trees import map_tree

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2  # half precision

Cut = Callable[[Any], tuple[list[Any], list[int]]]
"""Cuts a batch: the microbatches, and how many samples each has."""

LossOf = Callable[[Any], Tensor | None]
"""The loss of the user's step for a batch, without side effects on the trainer."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first batch's loss, whole and put together from its microbatches with each weighting."""

    whole: float
    parts: dict[str, float]
    fits: tuple[str, ...]
    """The weightings that give the whole batch's loss."""

    def describe(self) -> str:
        parts = ", ".join(f"{value:.6g} by {name!r}" for name, value in self.parts.items())
        return f"the first batch's loss is {self.whole:.6g}; from its microbatches it is {parts}"


def gather_evidence(module: nn.Module, batch: Any, cut: Cut, loss_of: LossOf, wanted: LossWeight) -> Evidence | None:
    """Compares the whole batch's loss with its microbatches'.

    Args:
        module: The user's module; left as it was.
        batch: The first batch; left as it was.
        cut: How batches are split.
        loss_of: The user's step.
        wanted: The weighting that was asked for; it is tried first.

    Returns:
        None where the loss says nothing: there is none, or it is zero or not finite.
    """
    candidates = {weight_name(weight): weight for weight in (wanted, "samples", "tokens", count_labels, "sum")}
    evidence = _compare(module, batch, cut, loss_of, candidates)
    masked = _with_labels_masked(batch)
    if evidence is None or masked is None or len(evidence.fits) < 2:
        return evidence
    try:  # tells means over tokens from means over samples, although no label may be ignored yet
        closer = _compare(module, masked, cut, loss_of, {name: candidates[name] for name in evidence.fits})
    except Exception:  # a step that knows no ignored labels
        return evidence
    return evidence if closer is None else Evidence(evidence.whole, evidence.parts, closer.fits)


def _compare(
    module: nn.Module, batch: Any, cut: Cut, loss_of: LossOf, candidates: dict[str, LossWeight]
) -> Evidence | None:
    whole = _loss(module, batch, loss_of)
    with undone(module):
        pieces, sizes = cut(batch)
    losses = [_loss(module, piece, loss_of) for piece in pieces]
    if whole is None or any(loss is None or not loss.isfinite() for loss in (whole, *losses)):
        return None
    tolerance = _TOLERANCE.get(whole.dtype, _COARSE)
    parts: dict[str, float] = {}
    fits = []
    for name, weight in candidates.items():
        try:
            weights = loss_weights(pieces, sizes, weight)
        except ValueError:  # no labels or samples to count
            continue
        terms = [w * float(loss) for w, loss in zip(weights, losses, strict=True) if loss is not None]
        parts[name] = sum(terms)
        scale = max(abs(float(whole)), sum(map(abs, terms)))
        if scale == 0:  # every weighting fits a loss of zero
            return None
        if abs(parts[name] - float(whole)) <= tolerance * scale:
            fits.append(name)
    return Evidence(float(whole), parts, tuple(fits))


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
    whole = _loss(module, batch, loss_of)
    if whole is None or not whole.isfinite():
        return None
    trial = _Trial(module, layers, microbatches)
    with trial.intercepting():
        joined = _loss(module, batch, loss_of)
    return trial.splits if joined is not None and close(joined, whole) else {}


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


def _loss(module: nn.Module, batch: Any, loss_of: LossOf) -> Tensor | None:
    batch = map_tree(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)
    with comparable(module), torch.no_grad():
        loss = loss_of(batch)
        return None if loss is None else loss.detach().clone()


def _with_labels_masked(batch: Any) -> Any | None:
    """The batch with half of the first sample's labels ignored, where it has labels for tokens."""
    if not hasattr(batch, "keys"):
        return None
    for name in LABEL_FIELDS:
        labels = batch[name] if name in batch else None  # noqa: SIM401  (BatchEncoding.get knows no default)
        if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim >= 2 and labels.shape[1] > 2:
            masked = copy.copy(batch)
            masked[name] = labels.clone()
            masked[name][0, labels.shape[1] // 2 :] = IGNORED_LABEL
            return masked
    return None


@contextmanager
def comparable(module: nn.Module) -> Iterator[None]:
    """A batch and its parts compute the same in it, if the loss allows: without randomness, and with the running
    statistics of BatchNorm, for that it normalizes per microbatch is known and no coupling of the loss. See also
    :func:`undone`.
    """
    with undone(module), _Repeatable():
        for submodule in module.modules():
            if isinstance(submodule, _BatchNorm) and submodule.track_running_stats:
                submodule.training = False
        yield


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Afterwards the module's attributes, buffers and the random generators are what they were.

    So are lists, dicts, sets and plain objects, also within one another, and generators of its own. Other objects are
    not looked into.
    Parameters are not copied; see :class:`_Repeatable`.
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
    try:
        yield
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
        self._generators: dict[int, tuple[Any, Any]] = {}

    def note(self, value: Any) -> None:
        kind = type(value)  # not `isinstance`: it fails for a weak proxy of a trainer that is no more
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
        elif issubclass(kind, torch.Generator):
            self._generators[id(value)] = (value.set_state, value.get_state())
        elif issubclass(kind, random.Random):
            self._generators[id(value)] = (value.setstate, value.getstate())
        elif issubclass(kind, numpy.random.Generator):
            bits = value.bit_generator
            self._generators[id(value)] = (partial(setattr, bits, "state"), bits.state)
        elif issubclass(kind, numpy.random.RandomState):
            self._generators[id(value)] = (value.set_state, value.get_state())
        elif issubclass(kind, numpy.ndarray):
            self._generators[id(value)] = (partial(numpy.copyto, value), value.copy())

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
        for set_state, state in self._generators.values():
            set_state(state)


def _holds(container: Any, contents: Any) -> bool:
    """Whether a container holds the very objects that it held."""
    if isinstance(container, dict):
        return list(container) == list(contents) and all(container[key] is contents[key] for key in contents)
    return len(container) == len(contents) and all(map(operator.is_, container, contents))


class _Repeatable(TorchFunctionMode):
    """No randomness, so that a batch and its parts can be compared; and parameters that cannot be changed."""

    _IDENTITIES = {
        functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
        functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout,
        torch.feature_dropout, torch.feature_alpha_dropout,
    }  # fmt: skip
    _ZEROS: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        torch.randn: torch.zeros, torch.randn_like: torch.zeros_like,
        torch.rand: torch.zeros, torch.rand_like: torch.zeros_like,
    }  # fmt: skip

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in self._IDENTITIES:
            return args[0] if args else kwargs["input"]
        if (constant := self._ZEROS.get(func)) is not None:
            kwargs.pop("generator", None)
            return constant(*args, **kwargs)
        if name in ("normal_", "uniform_", "exponential_", "bernoulli_", "random_"):
            return args[0].zero_()
        if func is functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *args[5:]) if len(args) > 4 else args, {**kwargs, "dropout_p": 0.0}
            if len(args) > 4:
                kwargs["is_causal"] = args[4]
                args = args[:4]
        elif func is functional.multi_head_attention_forward:
            args, kwargs = _without_training(args, kwargs)
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) > 5:
            position = 5 if isinstance(args[4], int) and not isinstance(args[4], bool) else 6
            args = (*args[:position], 0.0, *args[position + 1 :])
        elif any_parameter((*args, *kwargs.values()), _is_parameter):
            if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
                return args[0].detach().clone()
            if name in ("__set__", "requires_grad_"):
                args = (args[0].detach().clone(), *args[1:])
            elif not is_about_the_object(func):
                # Whatever it is, and whatever views of it are handed on: what changes is a copy.
                args = tuple(map(_copied, args))
                kwargs = {key: _copied(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_parameter(value: object) -> bool:
    return isinstance(value, nn.Parameter)


def _copied(value: Any) -> Any:
    """The value with a copy of each parameter, in lists and tuples, too. Gradients lead to the parameters."""
    if isinstance(value, nn.Parameter):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


def _without_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``training`` is the 14th argument of ``multi_head_attention_forward``; here it means dropout only."""
    if len(args) > 13:
        return (*args[:13], False, *args[14:]), kwargs
    return args, {**kwargs, "training": False}
