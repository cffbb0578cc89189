"""split="auto": losses and batches that cannot be cut per sample find the right way by themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from .common import PLAIN, Net, Way, X, col, fit, in_every_way, in_few_pipelines, lin, near, sgd, weights

AUTO = {"split": "auto"}
EIGHT = col(1, 2, 3, 4, 5, 6, 7, 8)


@in_every_way
def test_a_sum_loss_is_found_to_be_one(way: Way) -> None:
    """A sum over samples treated as a mean: an update a quarter of what it should be."""
    module = Net(lin(2), lin(3), lin(5), loss=lambda module, batch: module.net(batch).sum(), optimizer=sgd(0.001))
    fit(module, [X], way, strategy=AUTO)
    assert weights(module) == near([2 - 0.18, 3 - 0.12, 5 - 0.072])


def variance(module: Net, batch: Tensor) -> Tensor:
    return module.net(batch).var(unbiased=False)


def contrast(module: Net, batch: Tensor) -> Tensor:
    logits = module.net(batch) @ batch.T
    return cross_entropy(logits, torch.arange(len(batch)))


@in_every_way
def test_the_variance_over_a_batch(way: Way) -> None:
    """Microbatches of equal rows have no variance, so no gradient at all."""
    module = Net(lin(1), loss=variance, optimizer=sgd(0.1))
    fit(module, [col(0, 0, 2, 2)], way, strategy=AUTO)
    assert weights(module) == near([0.8])


@in_every_way
def test_a_contrastive_loss_over_a_batch(way: Way) -> None:
    """Each sample contrasted with its own microbatch only."""
    module = Net(lin(1), loss=contrast, optimizer=sgd(0.1))
    fit(module, [col(0, 1, 2, 3)], way, strategy=AUTO)
    assert weights(module) == near([0.9243703])


@in_every_way
def test_tensors_of_different_length_run_whole(way: Way) -> None:
    """A ragged batch cut into its tensors: a mean of means. The first loss, zero, tells nothing."""
    module = Net(lin(0), loss=lambda module, batch: module.net(torch.cat(batch)).mean(), optimizer=sgd(1.0))
    fit(module, [[col(1), col(2, 2), col(3, 3, 3)]] * 3, way, strategy=AUTO)
    assert weights(module) == near([-7.0])


@in_every_way
def test_a_batch_that_cannot_be_cut_runs_whole(way: Way) -> None:
    """An error, where the batch could have been run as it is."""
    module = Net(lin(0), loss=lambda module, batch: module.net(batch["x"].reshape(1, 1)).mean())
    fit(module, [{"x": torch.tensor(3.0), "name": "a"}], way, strategy=AUTO)
    assert weights(module) == near([-3.0])


def token_mean(module: Net, batch: dict[str, Tensor]) -> Tensor:
    logits = module.net(batch["x"]).squeeze(-1)
    counted = batch["labels"] != -100
    return (logits - batch["labels"])[counted].square().mean()


@in_few_pipelines
def test_a_mean_over_tokens_of_padded_batches(way: Way) -> None:
    """The first batch is not padded, so a mean over samples fits it as well; the second one is."""
    labels = torch.arange(12).reshape(4, 3)
    padded = labels.clone()
    padded[0, 1:] = padded[3, 2:] = -100
    x = torch.linspace(-1, 1, 12).reshape(4, 3, 1)
    batches = [{"x": x, "labels": labels}, {"x": x, "labels": padded}]
    module, plain = (Net(lin(1), loss=token_mean, optimizer=sgd(0.1)) for _ in range(2))
    fit(module, batches, way, strategy=AUTO)
    fit(plain, batches, PLAIN)
    assert weights(module) == near(weights(plain))


class LeavesTraces(Net):
    """Does everything in a step that an extra run could spoil."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(1), lin(1), nn.Dropout(0.5), lin(2), optimizer=sgd(0.1))
        self.teacher = lin(1).requires_grad_(False)
        self.metric = MeanMetric()
        self.seen: list[int] = []
        self.steps = 0
        self.noise = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(len(batch))
        self.steps += 1
        self.noise = float(torch.rand(()))
        self.metric.update(batch)
        self.teacher.weight.data.mul_(2)
        with torch.no_grad():
            self.teacher.weight.add_(1)
        loss = self.net(batch).mean()
        self.log("loss", loss)
        return loss


@in_few_pipelines
def test_the_extra_run_leaves_no_trace(way: Way) -> None:
    """Counters, lists, metrics, buffers, parameters or random numbers of the first batch that were touched twice."""
    results = []
    for strategy in ({"split": "step"}, AUTO):
        torch.manual_seed(7)
        module = LeavesTraces()
        fit(module, [EIGHT, EIGHT], way, strategy=strategy)
        state = {name: value.clone() for name, value in module.state_dict().items()}
        results.append((state, module.seen, module.steps, module.noise, module.metric.compute(), torch.rand(3)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Net(lin(1), optimizer=sgd(0.1)), "split='step', loss_weight='samples'"),
        (lambda: Net(lin(1), loss=lambda m, b: m.net(b).sum(), optimizer=sgd(0.1)), "loss_weight='sum'"),
        (lambda: Net(lin(1), loss=variance, optimizer=sgd(0.1)), "couples samples"),
        (LeavesTraces, "split='step', loss_weight='samples'"),
    ],
    ids=["mean", "sum", "coupled", "noisy"],
)
def test_one_line_says_what_was_chosen(make: Callable[[], Net], words: str, caplog: Any) -> None:
    """A choice that nobody hears of, or the slow one for a net with dropout and BatchNorm."""
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    caplog.set_level(logging.INFO)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit(make(), [X, X], Way(2, 2), strategy=AUTO)
    said = [record.getMessage() for record in caplog.records if "roundpipe: split=" in record.getMessage()]
    assert len(said) == 1 and words in said[0]


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda module, batch: module.net(batch).sum(), r"loss_weight='sum'"),
        (variance, "couples samples"),
        (contrast, "couples samples"),
    ],
    ids=["sum", "variance", "contrast"],
)
def test_a_fixed_split_that_does_not_fit_warns(loss: Callable[..., Tensor], words: str, m: int) -> None:
    """Silently another loss than the one that was written."""
    batch = col(0, 0, 2, 3)
    with pytest.warns(UserWarning, match=words):
        fit(Net(lin(1), loss=loss, optimizer=sgd(0.01)), [batch, batch], Way(m, 2), strategy={"split": "step"})


@in_few_pipelines
@pytest.mark.parametrize(("loss", "right"), [("mean", (45, 30, 18)), ("sum", (180, 120, 72))])
def test_the_update_does_not_depend_on_the_number_of_microbatches(way: Way, loss: str, right: tuple[int, ...]) -> None:
    """With nothing set: a factor of M, or a sum taken for a mean."""
    module = Net(lin(2), lin(3), lin(5), loss=lambda m, b: getattr(m.net(b), loss)(), optimizer=sgd(0.001))
    fit(module, [X], way)
    assert weights(module) == near([2 - 0.001 * right[0], 3 - 0.001 * right[1], 5 - 0.001 * right[2]])
