"""How the batches of a fit are split: as was asked for, or as its first batch shows to be right."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import isqrt
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_roundpipe import microbatch as mb
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.splitting import (
    Evidence,
    LossOf,
    compare,
    error_in,
    find_split_calls,
    gather_evidence,
    weight_name,
)
from lightning_roundpipe.undoing import undone

_FASTER = "split='step' would be faster, but is right only for losses that are means over samples."
_OWN_SPLIT = (
    "With a method `split(self, batch, microbatches)` of the module, with just these names of arguments, the step may"
    " be split."
)


class BatchSplitter:
    """Cuts batches into microbatches and weighs these; see the arguments of the strategy.

    Args:
        module: The user's module.
        split: ``"step"``, ``"model"``, ``"whole"`` or ``"auto"``.
        loss_weight: How a microbatch's loss counts.
        microbatches: Into how many microbatches a batch is split, at most.
        own_split: The user's own way to cut a batch.
        step_context: Makes what training_step runs in, such as autocast.
        settle: Waits until parameters are those after all steps.

    Attributes:
        decided: The split and weighting that are right, once that is known.
    """

    def __init__(
        self,
        module: "pl.LightningModule",
        split: str,
        loss_weight: mb.LossWeight,
        microbatches: int,
        own_split: mb.SplitMethod | None,
        step_context: Callable[[], AbstractContextManager[Any]],
        settle: Callable[[], None],
    ) -> None:
        self._module = module
        self._asked = split
        self._loss_weight = loss_weight
        self._microbatches = microbatches
        self._own_split = own_split
        self._step_context = step_context
        self._settle = settle
        self.decided: tuple[str, Any] | None = None

    @property
    def way(self) -> str:
        """The split: what has been decided, or else what was asked for."""
        return self.decided[0] if self.decided is not None else self._asked

    @property
    def loss_weight(self) -> mb.LossWeight:
        """Likewise the weighting."""
        return self.decided[1] if self.decided is not None else self._loss_weight

    def announce(self) -> None:
        """Tells of the user's own way to cut a batch."""
        if self._own_split is not None:
            name = getattr(self._own_split, "__qualname__", "split")
            rank_zero_info(f"roundpipe: batches are split into microbatches by {name}.")

    # -- cutting ---------------------------------------------------------------------------------------------------

    def split(self, batch: Any) -> tuple[list[Any], list[int], list[float]]:
        """The microbatches that run the step, how many samples each has (zeros where that cannot be told), and their
        weights.

        Until the first batch has decided, the batch stays whole.
        """
        pieces, sizes = self._cut(batch) if self.way == "step" else ([batch], [1])
        return pieces, sizes, mb.loss_weights(pieces, sizes, self.loss_weight) if len(pieces) > 1 else [1.0]

    def _cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        if self._microbatches == 1:
            return [batch], [1]
        if self._own_split is not None:
            return mb.split_by(self._own_split, batch, self._microbatches)
        try:
            samples = mb.batch_size(batch)
        except mb.UnsplittableBatchError:
            if self._asked == "step":
                raise
            return [batch], [1]
        least = mb.least_samples(self._module.modules()) if samples < 2 * self._microbatches else 1
        sizes = mb.split_sizes(samples, self._microbatches, least)
        return mb.split(batch, sizes), sizes

    def _try_to_cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Leaves no trace on the module, as the user's own way may."""
        if self._own_split is None:
            return self._cut(batch)
        with undone(self._module):
            return self._cut(batch)

    # -- deciding --------------------------------------------------------------------------------------------------

    def is_to_look(self, batches: int, *, begins_epoch: bool) -> bool:
        """Whether the next batch is to show what is right: the first one, and then ever more rarely, for steps may
        change (an auxiliary loss sets in, say), mostly early or with an epoch.

        Args:
            batches: The number of batches so far.
            begins_epoch: Whether an epoch begins.
        """
        if self._asked == "whole" or self._microbatches == 1:
            return False
        if self.decided is None:
            return True
        return self._asked == "auto" and self.way == "step" and (begins_epoch or _is_fibonacci(batches))

    def look(self, pipeline: Pipeline, batch: Any, step: LossOf) -> None:
        """Decides by a batch, or looks whether what was decided is still right.

        Args:
            pipeline: Where calls are split if the step is not.
            batch: The batch.
            step: Gives the step's loss for a part of it.
        """
        loss_of = self._without_traces(step)
        if self.decided is None or not self._still_right(batch, loss_of):
            self._decide(pipeline, batch, loss_of)

    def _without_traces(self, step: LossOf) -> LossOf:
        def loss_of(part: Any) -> Tensor | None:
            for name in ("log", "print"):  # undone with the other attributes
                self._module.__dict__[name] = lambda *args, **kwargs: None
            with self._step_context():
                with torch.compiler.set_stance("force_eager"):  # not compiled for the sake of one batch
                    return step(part)

        return loss_of

    def _still_right(self, batch: Any, loss_of: LossOf) -> bool:
        """Whether the microbatches still give what the whole batch gives."""
        weight = self.loss_weight
        self._settle()
        try:
            if len(self._try_to_cut(batch)[0]) == 1:
                return True
            evidence = compare(self._module, batch, self._try_to_cut, loss_of, {weight_name(weight): weight})
        except Exception:  # the step itself will raise it, if it is the step's
            self._check_whole(batch, loss_of)
            return True
        if evidence is None or evidence.fits or evidence.unusable:  # what cannot be weighed, the step raises
            return True
        rank_zero_warn(
            f"roundpipe: split='step' with loss_weight={weight_name(weight)!r}, found by the first batch, is no longer"
            f" right: {evidence.describe()}. That is corrected now, but batches before this one may have had gradients"
            " other than the whole batch's: those since the epoch began, or two fifths of all so far at most; and"
            " earlier ones, too, if the loss is such a one only now and then. To have none, set split='model'."
        )
        self.decided = None
        return False

    def _check_whole(self, batch: Any, loss_of: LossOf) -> None:
        """
        Raises:
            RuntimeError: When the step fails with the whole batch, but not with its microbatches. With those the fit
                would go on, from what they have kept.
        """
        try:
            pieces, sizes = self._try_to_cut(batch)
        except Exception:  # a split of the user's, which raises it again
            return
        if error_in(self._module, pieces, sizes, loss_of) is not None:
            return
        error = error_in(self._module, [batch], [sum(sizes)], loss_of)
        if error is None or _is_lack_of_memory(error):
            return
        raise RuntimeError(
            f"training_step now fails with a whole batch ({error!r}), and not with its microbatches, which it did not"
            " in the first batch: it has kept something of a microbatch's size from earlier batches (a hidden state,"
            " say), where in plain training it would have the whole batch's. So gradients would be others than the"
            " whole batch's. Set split='model', with which training_step sees the whole batch (or split='step', if that"
            " is meant)."
        ) from error

    def _decide(self, pipeline: Pipeline, batch: Any, loss_of: LossOf) -> None:
        """By the evidence of a batch."""
        module = self._module
        if isinstance(batch, Iterator):
            self.decided = ("whole", self._loss_weight)
            rank_zero_info("roundpipe: split='whole', because training_step fetches its batches by itself.")
            return
        if self._asked != "model" and self._own_split is not None:
            self._try_to_cut(batch)  # what it raises is for the user to see
        self._settle()
        why, otherwise = "that was asked for", _FASTER
        try:
            if self._asked != "model":
                against = self._try_step(batch, loss_of)
                if against is None:
                    return
                why, otherwise = against
            layers = [layer.module for layer in pipeline.layers]
            splits = find_split_calls(module, layers, batch, self._microbatches, loss_of)
        except mb.UnsplittableBatchError:
            raise
        except Exception as error:  # the step itself will raise it, if it is the step's
            way = "step" if self._asked == "step" else "whole"
            self.decided = (way, self._loss_weight)
            rank_zero_info(
                f"roundpipe: whether the batch may be split could not be checked ({error!r}), so split={way!r}."
                + (" One device works at a time." if way == "whole" else "")
            )
            return
        if splits is None:
            return
        if not splits:
            self.decided = ("whole", self._loss_weight)
            rank_zero_info(
                f"roundpipe: split='whole', because {why}; and no call of a module with layers gives the same when it"
                " is split. Every result is right, but one device works at a time."
            )
            return
        self.decided = ("model", self._loss_weight)
        pipeline.split_calls(splits, self._microbatches)
        names = {module: name for name, module in module.named_modules()}
        called = ", ".join(dict.fromkeys(names[module] or type(module).__name__ for module, _ in splits))
        rank_zero_info(
            f"roundpipe: split='model', because {why}. The step runs once, and the calls of {called} in microbatches."
            f" {otherwise}"
        )

    def _try_step(self, batch: Any, loss_of: LossOf) -> tuple[str, str] | None:
        """Decides for the step, if that is right or asked for.

        Returns:
            Why it is not, and what else could be done; None where it is, or a later batch will tell.
        """
        if len(self._try_to_cut(batch)[0]) == 1:
            if self._own_split is not None or mb.can_be_split(batch):
                return None  # a single sample
            return "the batch has no dimension of samples that all of it shares", _OWN_SPLIT
        try:
            evidence = gather_evidence(self._module, batch, self._try_to_cut, loss_of, self._loss_weight)
        except Exception as error:
            if self._asked == "step" or isinstance(error, mb.UnsplittableBatchError):
                raise
            return f"the step fails with a part of the batch ({error!r})", _OWN_SPLIT  # with all of it: tried next
        if evidence is None:
            return None
        if self._asked == "step":
            self.decided = ("step", self._loss_weight)
            _warn_unless_fitting(evidence, self._loss_weight)
            return None
        if evidence.fits:
            self._decide_for_step(evidence)
            return None
        return evidence.misfit(), _FASTER

    def _decide_for_step(self, evidence: Evidence) -> None:
        # Where means over tokens and over samples agree in this batch, tokens do in later ones, too, whose samples may
        # have different numbers of them.
        asked = self._loss_weight != "samples"
        best = next(iter(evidence.fits)) if asked else evidence.best("tokens", "count_labels")
        self.decided = ("step", evidence.fits[best])
        wanted = weight_name(self._loss_weight)
        if asked and best != wanted:
            error = evidence.unusable.get(wanted)
            why = "does not give the loss of the whole batch" if error is None else f"cannot be computed ({error!r})"
            rank_zero_warn(f"roundpipe: loss_weight={wanted!r} {why}: {best!r} is used in its place.")
        rank_zero_info(f"roundpipe: split='step', loss_weight={best!r}: {evidence.describe()}.")


def _is_fibonacci(number: int) -> bool:
    """These numbers come ever more rarely, and meet every remainder of most periods: what only every fourth batch does
    is seen, too."""
    return any(isqrt(square) ** 2 == square for square in (5 * number**2 - 4, 5 * number**2 + 4) if square >= 0)


def _is_lack_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("not enough memory", "can't allocate memory")  # of PyTorch's allocator on the host, by system
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)


def _warn_unless_fitting(evidence: Evidence, loss_weight: mb.LossWeight) -> None:
    """Where the user has fixed the split, and it does not give the whole batch's loss."""
    name = weight_name(loss_weight)
    if name in evidence.fits:
        return
    if evidence.fits:
        why = f" It does with loss_weight={next(iter(evidence.fits))!r}. ({evidence.describe()})"
    else:
        why = (
            f" Use split='auto' or split='model', unless the loss of each part is meant. (Because {evidence.misfit()})"
        )
    rank_zero_warn(f"roundpipe: split='step' with loss_weight={name!r} does not give the loss of the whole batch.{why}")
