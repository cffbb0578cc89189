"""Can this step's batch be split? The first batch tells: its loss against those of its microbatches.

The extra runs leave no trace: they see no gradients and draw no random numbers, and what they do to metrics, logs,
buffers, attributes and parameters is undone.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.microbatch import IGNORED_LABEL, LABEL_FIELDS, LossWeight, loss_weights, split
from lightning_roundpipe.pipeline.rng import RandomState
from lightning_roundpipe.trees import map_tree

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2  # half precision

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


def gather_evidence(
    module: nn.Module, batch: Any, sizes: Sequence[int], loss_of: LossOf, wanted: LossWeight
) -> Evidence | None:
    """Compares the whole batch's loss with its microbatches'.

    Args:
        module: The user's module; left as it was.
        batch: The first batch; left as it was.
        sizes: Samples per microbatch.
        loss_of: The user's step.
        wanted: The weighting that was asked for; it is tried first.

    Returns:
        None where the loss says nothing: there is none, or it is zero or not finite.
    """
    candidates = {_name(weight): weight for weight in (wanted, "samples", "tokens", count_labels, "sum")}
    evidence = _compare(module, batch, sizes, loss_of, candidates)
    masked = _with_labels_masked(batch)
    if evidence is None or masked is None or len(evidence.fits) < 2:
        return evidence
    try:  # tells means over tokens from means over samples, although no label may be ignored yet
        closer = _compare(module, masked, sizes, loss_of, {name: candidates[name] for name in evidence.fits})
    except Exception:  # a step that knows no ignored labels
        return evidence
    return evidence if closer is None else Evidence(evidence.whole, evidence.parts, closer.fits)


def _compare(
    module: nn.Module, batch: Any, sizes: Sequence[int], loss_of: LossOf, candidates: dict[str, LossWeight]
) -> Evidence | None:
    whole = _loss(module, batch, loss_of)
    pieces = split(batch, list(sizes))
    losses = [_loss(module, piece, loss_of) for piece in pieces]
    if whole is None or any(loss is None or not loss.isfinite() for loss in (whole, *losses)):
        return None
    tolerance = _TOLERANCE.get(whole.dtype, _COARSE)
    parts: dict[str, float] = {}
    fits = []
    for name, weight in candidates.items():
        try:
            weights = loss_weights(pieces, list(sizes), weight)
        except ValueError:  # no labels to count
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


def _name(weight: LossWeight) -> str:
    return weight if isinstance(weight, str) else getattr(weight, "__name__", "function")


def _loss(module: nn.Module, batch: Any, loss_of: LossOf) -> Tensor | None:
    batch = map_tree(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)
    with undone(module), torch.no_grad(), _Repeatable():
        for submodule in module.modules():
            if isinstance(submodule, _BatchNorm) and submodule.track_running_stats:
                submodule.training = False  # that it normalizes per microbatch is known and no coupling of the loss
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
def undone(module: nn.Module) -> Iterator[None]:
    """Afterwards the module's attributes, buffers and the random generators are what they were.

    Parameters are not copied; see :class:`_Repeatable`.
    """
    random = RandomState.capture()
    before = [(submodule, dict(submodule.__dict__)) for submodule in module.modules()]
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    containers: list[tuple[Any, Any]] = []
    buffers = [(submodule._buffers, dict(submodule._buffers)) for submodule in module.modules()]
    values = [value for _, items in (*before, *buffers) for value in items.values()]
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            tensors[id(value)] = (value, value.detach().clone())
        elif type(value) in (list, dict, set):
            containers.append((value, value.copy()))
    try:
        yield
    finally:
        for container, contents in containers:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        for submodule, attributes in before:
            submodule.__dict__.clear()
            submodule.__dict__.update(attributes)
        for items, contents in buffers:
            items.clear()
            items.update(contents)
        with torch.no_grad():
            for tensor, value in tensors.values():
                if tensor._version or not torch.equal(tensor, value):
                    tensor.data.copy_(value)
        random.restore()


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
        elif args and isinstance(args[0], nn.Parameter):
            if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
                return args[0].detach().clone()
            if name == "__set__" or (name.endswith("_") and not name.endswith("__")):
                args = (args[0].detach().clone(), *args[1:])
        return func(*args, **kwargs)


def _without_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``training`` is the 14th argument of ``multi_head_attention_forward``; here it means dropout only."""
    if len(args) > 13:
        return (*args[:13], False, *args[14:]), kwargs
    return args, {**kwargs, "training": False}
