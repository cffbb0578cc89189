"""split="auto": what the first batch does not show, and what a part of it cannot show."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, log_softmax

from lightning_roundpipe.deciding import _is_fibonacci
from lightning_roundpipe.splitting import Evidence

from .common import PLAIN, Net, Way, fit, sgd
from .test_split_auto import assert_as_plain, draw, hidden

THREE = Way(3, 2)
BATCHES = [draw(12, 4, seed=i) for i in range(6)]


def detached(state: Any) -> Any:
    return state.detach() if isinstance(state, Tensor) else tuple(map(detached, state))


class KeepsState(L.LightningModule):
    """Truncated backpropagation through time: each batch goes on from the one before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn: nn.Module = nn.GRUCell(4, 5) if kind == "GRUCell" else getattr(nn, kind)(4, 5, 2, batch_first=True)
        self.head = nn.Linear(5, 1)
        self.state: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.state = None
        if isinstance(self.rnn, nn.GRUCell):
            output = state = self.rnn(batch[:, 0], self.state)
        else:
            output, state = self.rnn(batch, self.state)
        self.state = detached(state)
        return self.head(output).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SEQUENCES = [draw(12, 3, 4, seed=i) for i in range(4)]
of_every_kind = pytest.mark.parametrize("kind", ["LSTM", "GRU", "GRUCell"])


@of_every_kind
def test_a_hidden_state_of_a_microbatch_s_size(kind: str) -> None:
    """Training went on with microbatches that each went on from another one's state."""
    module = KeepsState(kind).double()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?s)now fails with a whole batch \(.*4.*Set split='model'") as caught:
            fit(module, SEQUENCES, THREE)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert module.trainer.fit_loop.epoch_loop.batch_idx == 1


@of_every_kind
def test_a_hidden_state_with_the_calls_split(kind: str) -> None:
    modules = [KeepsState(kind).double() for _ in range(2)]
    fit(modules[0], SEQUENCES, PLAIN)
    fit(modules[1], SEQUENCES, THREE, strategy={"split": "model"})
    for value, expected in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


class Fails(Net):
    """With batches of so many samples, from the second one on."""

    def __init__(self, error: Exception, samples: tuple[int, ...]) -> None:
        super().__init__(*hidden(), optimizer=sgd(0.1))
        self.error, self.samples = error, samples

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx and len(batch) in self.samples:
            raise self.error
        return self.net(batch).square().mean()


def test_a_step_that_fails_in_any_case_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match=r"^of the step"):
        fit(Fails(ValueError("of the step"), (4, 12)).double(), BATCHES, THREE)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("of a device"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
    ids=repr,
)
def test_a_whole_batch_for_which_there_is_no_memory_shows_nothing(error: Exception) -> None:
    trainer = fit(Fails(error, (12,)).double(), BATCHES, THREE)
    assert trainer.global_step == len(BATCHES)
    assert trainer.strategy._splitter.decided[0] == "step"  # type: ignore[attr-defined]


def test_which_batches_are_looked_at() -> None:
    """Powers of two have few remainders: what comes every fourth batch, but not with the first, was never seen."""
    looked_at = [number for number in range(1, 400) if _is_fibonacci(number)]
    assert looked_at == [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377]
    for period in range(2, 8):
        assert {number % period for number in looked_at} == set(range(period))


class Regularizes(Net):
    """A term that couples samples, every so many batches."""

    def __init__(self, period: int, remainder: int) -> None:
        super().__init__(*hidden(), optimizer=sgd(0.1))
        self.period, self.remainder = period, remainder

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self.net(batch)
        return y.square().mean() + (y.var(0).mean() if batch_idx % self.period == self.remainder else 0)


@pytest.mark.parametrize(("period", "remainder"), [(4, 3), (10, 5)])
def test_a_term_of_every_few_batches_is_found(period: int, remainder: int) -> None:
    """At its first batch, so that all of them are right."""
    batches = [draw(8, 4, seed=i) for i in range(remainder + period + 1)]
    modules = [Regularizes(period, remainder).double() for _ in range(2)]
    fit(modules[0], batches, PLAIN)
    with pytest.warns(UserWarning, match="no longer right"):
        trainer = fit(modules[1], batches, THREE)
    assert trainer.strategy._splitter.decided[0] == "model"  # type: ignore[attr-defined]
    for value, expected in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_a_difference_is_seen_in_the_numbers() -> None:
    """1 and 1, said to be other losses."""
    assert "1.00000001;" in Evidence(1.00000001, {"samples": 1.00000002}, {}, {}).describe()
    assert "is 1 by" in Evidence(1.00000001, {"samples": 1.00000001}, {"samples": "samples"}, {}).describe()


def ctc(module: Net, batch: dict[str, Tensor]) -> Tensor:
    """Targets one after the other: no part of the batch has the right ones."""
    logits = log_softmax(module.net(batch["x"]), -1).transpose(0, 1)
    lengths = torch.full((len(batch["x"]),), logits.shape[0])
    if batch["lengths"].sum() != len(batch["targets"]):
        raise ValueError("other targets than lengths")
    return ctc_loss(logits, batch["targets"], lengths, batch["lengths"])


def speech(seed: int) -> dict[str, Tensor]:
    lengths = torch.tensor([2, 3, 1, 2, 2, 3])
    targets = torch.randint(1, 5, (int(lengths.sum()),), generator=torch.Generator().manual_seed(seed))
    return {"x": draw(6, 9, 4, seed=seed), "targets": targets, "lengths": lengths}


def test_a_step_that_fails_with_a_part_of_the_batch(caplog: Any) -> None:
    """The batch stayed whole, though calls can be split."""
    batches = [speech(seed) for seed in range(3)]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        assert_as_plain(lambda: Net(*hidden(), loss=ctc, optimizer=sgd(0.1)), batches)
    (line,) = (record.getMessage() for record in caplog.records if "split=" in record.getMessage())
    assert line.startswith("roundpipe: split='model', because the step fails with a part of the batch (ValueError(")


def test_a_step_that_fails_with_a_part_though_it_shall_be_split() -> None:
    with pytest.raises(ValueError, match="other targets than lengths"):
        fit(Net(*hidden(), loss=ctc).double(), [speech(0)], THREE, strategy={"split": "step"})


class SkipsSome(Net):
    """Returns None where the first number of the part is below a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__(*hidden(), optimizer=sgd(0.1))
        self.bound = bound

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx and batch[0, 0] < self.bound else self.net(batch).square().mean()


def told_of_none(fits: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fits()
    return [str(each.message) for each in caught if "returned None" in str(each.message)]


def beginning_with(*firsts: float) -> Tensor:
    """A batch for three microbatches, with their first numbers."""
    return torch.cat([torch.full((4, 4), first) for first in firsts])


def test_none_from_some_microbatches_is_told_of_once() -> None:
    """Others than plain Lightning leaves out, without a word."""
    some = beginning_with(1.0, -1.0, 1.0)
    module = SkipsSome(0.0)
    told = told_of_none(lambda: fit(module, [some] * 4, THREE))
    assert len(told) == 1 and "None for 1 of 3 microbatches" in told[0] and "plain Lightning" in told[0]
    assert len(told_of_none(lambda: fit(module, [some] * 4, THREE))) == 1  # of each fit


def test_none_from_all_microbatches_or_from_none_is_no_matter() -> None:
    batches = [beginning_with(1.0, 1.0, 1.0), beginning_with(-1.0, -1.0, -1.0), beginning_with(1.0, 1.0, 1.0)]
    assert not told_of_none(lambda: fit(SkipsSome(0.0), batches, THREE))


@pytest.mark.parametrize("returns_none", [False, True])
def test_a_microbatch_that_does_not_count_is_no_matter(returns_none: bool) -> None:
    """Without labels, and so of weight zero: whatever its loss is, the whole batch's is the others'."""

    class OfLabels(Net):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
            counts = batch["labels"] != -100
            if returns_none and not counts.any():
                return None
            return (self.net(batch["x"]).mean(-1) - batch["labels"])[counts].square().mean()

    labels = torch.arange(12.0)
    labels[4:8] = -100
    batches = [{"x": draw(12, 4, seed=i).float(), "labels": labels} for i in range(3)]
    options = {"split": "step", "loss_weight": "tokens"}
    assert not told_of_none(lambda: fit(OfLabels(*hidden(), optimizer=sgd(0.1)), batches, THREE, strategy=options))
