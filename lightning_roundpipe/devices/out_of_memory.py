"""What memory of a device was asked for when none was left, and what helps."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Purpose = Literal["parameters", "gradients", "activations"]


@contextmanager
def asking_for(purpose: Purpose) -> Iterator[None]:
    """Notes with an out-of-memory error what the memory was for, unless that has been noted already."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not hasattr(error, "asked_for"):
            error.asked_for = purpose  # type: ignore[attr-defined]
        raise


def remedies(purpose: Purpose, microbatches: int) -> str:
    """The three arguments that help, the best first."""
    smaller = f"RoundPipeStrategy(microbatches={2 * microbatches}), at most one for each sample: smaller activations"
    finer = "RoundPipeStrategy(layers=...) with modules inside of the present layers: smaller stages"
    half = "Trainer(precision='bf16-mixed') or 'bf16-true': half the bytes of what is cast"
    order = (smaller, finer, half) if purpose == "activations" else (finer, half, smaller)
    return "What helps, the best first: " + "; ".join(f"({i}) {remedy}" for i, remedy in enumerate(order, 1)) + "."


def release_frames(error: BaseException | None) -> None:
    """Lets go of what the functions that an error has passed through held: whoever holds the error, to print it, say,
    would hold the device's memory with it, and a graph of autograd that leads back to the error would do so for ever.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
