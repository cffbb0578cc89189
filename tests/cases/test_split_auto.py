"""split="auto": losses and batches that cannot be cut per sample find the right way by themselves."""

from __future__ import annotations

import io
import itertools
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from .common import FEW, PLAIN, Net, Way, X, col, fit, half_square, lin, near, sgd, weights
from .common import in_every_default_way as in_every_way

AUTO = {"split": "auto"}
in_few_pipelines = pytest.mark.parametrize("way", FEW, ids=str)
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


by_itself_or_at_calls = pytest.mark.parametrize("split", ["auto", "model"])


@by_itself_or_at_calls
@in_every_way
def test_the_variance_over_a_batch(way: Way, split: str) -> None:
    """Microbatches of equal rows have no variance, so no gradient at all."""
    module = Net(lin(1), loss=variance, optimizer=sgd(0.1))
    fit(module, [col(0, 0, 2, 2)], way, strategy={"split": split})
    assert weights(module) == near([0.8])


@by_itself_or_at_calls
@in_every_way
def test_a_contrastive_loss_over_a_batch(way: Way, split: str) -> None:
    """Each sample contrasted with its own microbatch only."""
    module = Net(lin(1), loss=contrast, optimizer=sgd(0.1))
    fit(module, [col(0, 1, 2, 3)], way, strategy={"split": split})
    assert weights(module) == near([0.9243703])


@pytest.mark.parametrize("batches", [1, 3])
@in_every_way
def test_tensors_of_different_length_run_whole(way: Way, batches: int) -> None:
    """A ragged batch cut into its tensors: a mean of means. The first loss, zero, tells nothing."""
    module = Net(lin(0), loss=lambda module, batch: module.net(torch.cat(batch)).mean(), optimizer=sgd(1.0))
    fit(module, [[col(1), col(2, 2), col(3, 3, 3)]] * batches, way, strategy=AUTO)
    assert weights(module) == near([batches * -14 / 6])


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
        self.teacher = lin(5).requires_grad_(False)
        self.metric = MeanMetric()
        self.seen: list[int] = []
        self.steps = 0
        self.noise = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(len(batch))
        self.steps += 1
        self.noise = float(torch.rand(()))
        self.metric.update(batch)
        self.teacher.weight.data.zero_()
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
    ("values", "loss", "batch", "words"),
    [
        ((2, 3, 5), lambda module, batch: module.net(batch).sum(), X, r"loss_weight='sum'"),
        ((1,), variance, col(0, 0, 2, 2), "couples samples"),
        ((1,), contrast, col(0, 1, 2, 3), "couples samples"),
    ],
    ids=["sum", "variance", "contrast"],
)
def test_a_fixed_split_that_does_not_fit_warns(
    values: tuple[float, ...], loss: Callable[..., Tensor], batch: Tensor, words: str, m: int
) -> None:
    """Silently another loss than the one that was written; or a warning only after the first batch."""
    module = Net(*map(lin, values), loss=loss, optimizer=sgd(0.0))
    with pytest.warns(UserWarning, match=words):
        fit(module, [batch], Way(m, 2), strategy={"split": "step", "loss_weight": "samples"})


def of_a_field_that_is_not_there(batch: Tensor) -> Tensor:
    return batch["mask"].sum()  # type: ignore[call-overload]


def of_infinitely_many(batch: Tensor) -> float:
    return float("inf")


def tokens_of_the_user(batch: Tensor) -> Tensor:
    return batch.sum()


tokens_of_the_user.__name__ = "tokens"


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        ("tokens", r"loss_weight='tokens' cannot be computed \(ValueError.*: 'samples' is used"),
        (of_infinitely_many, "loss_weight='of_infinitely_many' cannot be computed .*gave inf for microbatch 0"),
        (of_a_field_that_is_not_there, r"of_a_field_that_is_not_there' cannot be computed \(.*: 'samples'"),
        ("sum", "loss_weight='sum' does not give the loss of the whole batch: 'samples' is used"),
        (tokens_of_the_user, "loss_weight='tokens' does not give the loss of the whole batch: 'samples' is used"),
    ],
)
def test_a_weighting_of_the_user_s_that_is_not_used_is_named(weight: Any, words: str) -> None:
    """It was replaced without a word by one that fits."""
    module, plain = (Net(lin(2), loss=half_square, optimizer=sgd(0.1)) for _ in range(2))
    with pytest.warns(UserWarning, match=words):
        fit(module, [X, X], Way(3, 2), strategy={**AUTO, "loss_weight": weight})
    fit(plain, [X, X], PLAIN)
    assert weights(module) == near(weights(plain))


def test_a_weighting_of_the_user_s_is_not_mistaken_for_ours_of_that_name() -> None:
    def loss(module: Net, batch: Tensor) -> Tensor:
        return (module.net(batch) * batch).sum() / batch.sum()

    module, plain = (Net(lin(2), loss=loss, optimizer=sgd(0.1)) for _ in range(2))
    trainer = fit(module, [X, X], Way(3, 2), strategy={**AUTO, "loss_weight": tokens_of_the_user})
    fit(plain, [X, X], PLAIN)
    assert weights(module) == near(weights(plain))
    assert trainer.strategy._splitter.decided == ("step", tokens_of_the_user)  # type: ignore[attr-defined]


@in_few_pipelines
@pytest.mark.parametrize(("loss", "right"), [("mean", (45, 30, 18)), ("sum", (180, 120, 72))])
def test_the_update_does_not_depend_on_the_number_of_microbatches(way: Way, loss: str, right: tuple[int, ...]) -> None:
    """With nothing set: a factor of M, or a sum taken for a mean."""
    module = Net(lin(2), lin(3), lin(5), loss=lambda m, b: getattr(m.net(b), loss)(), optimizer=sgd(0.001))
    fit(module, [X], way)
    assert weights(module) == near([2 - 0.001 * right[0], 3 - 0.001 * right[1], 5 - 0.001 * right[2]])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def hidden() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5)]


def assert_as_plain(make: Callable[[], L.LightningModule], batches: list[Any], m: int = 3) -> None:
    """Everything that training leaves in the module's state is what one device leaves there."""
    modules = [make().double(), make().double()]
    fit(modules[0], batches, PLAIN)
    with warnings.catch_warnings():  # the first batch has to know
        warnings.filterwarnings("error", message=".*no longer right")
        fit(modules[1], batches, Way(m, 2))
    for (name, expected), value in zip(modules[0].state_dict().items(), modules[1].state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def tokens(masks: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    labels = [torch.randint(0, 5, (8, 6), generator=torch.Generator().manual_seed(i)) for i in range(len(masks))]
    return [(draw(8, 6, 4, seed=i), y, mask) for i, (y, mask) in enumerate(zip(labels, masks, strict=True))]


ALL = torch.ones(8, 6, dtype=torch.bool)
SOME = draw(8, 6, seed=5) > 0.3


def per_token(module: Net, batch: Any) -> Tensor:
    return cross_entropy(module.net(batch[0]).transpose(1, 2), batch[1], reduction="none")


def masked_mean(module: Net, batch: Any) -> Tensor:
    return (per_token(module, batch) * batch[2]).sum() / batch[2].sum()


def of_kind(kind: torch.dtype) -> Callable[[Net, Any], Tensor]:
    return lambda module, batch: masked_mean(module, (*batch[:2], batch[2].to(kind)))


def ignoring(value: int) -> Callable[[Net, Any], Tensor]:
    def loss(module: Net, batch: Any) -> Tensor:
        labels = torch.where(batch[2], batch[1].clamp(min=1), value)
        return cross_entropy(module.net(batch[0]).transpose(1, 2), labels, ignore_index=value)

    return loss


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("loss", [of_kind(torch.bool), of_kind(torch.float64), ignoring(-100), ignoring(0)])
def test_masks_that_hide_nothing_in_the_first_batch(loss: Callable[[Net, Any], Tensor], m: int) -> None:
    """A mean over tokens taken for one over samples, since the first batch has no padding."""
    assert_as_plain(lambda: Net(*hidden(), loss=loss, optimizer=sgd(0.1)), tokens([ALL, SOME, SOME, ALL, SOME]), m)


@pytest.mark.parametrize("value", [0, -100])
@pytest.mark.parametrize("name", ["labels", "y"])
def test_ignored_labels_that_the_first_batch_has_none_of(name: str, value: int) -> None:
    """Padding labels have another value than -100, or no name that tells."""

    def loss(module: Net, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(module.net(batch["x"]).transpose(1, 2), batch[name], ignore_index=value)

    batches = [
        {"x": x, name: torch.where(mask, labels.clamp(min=1), value)} for x, labels, mask in tokens([ALL, SOME, SOME])
    ]
    assert_as_plain(lambda: Net(*hidden(), loss=loss, optimizer=sgd(0.1)), batches)


def test_weights_of_samples_that_are_ones_in_the_first_batch() -> None:
    def loss(module: Net, batch: Any) -> Tensor:
        x, weight = batch
        return (module.net(x).square().mean(-1) * weight).sum() / weight.sum()

    weight = torch.tensor([1.0, 2, 3, 4, 0, 1, 1, 0.5]).double()
    batches = [(draw(8, 4), torch.ones(8).double()), (draw(8, 4, seed=1), weight), (draw(8, 4, seed=2), weight)]
    assert_as_plain(lambda: Net(*hidden(), loss=loss, optimizer=sgd(0.1)), batches)


def test_a_head_of_zeros() -> None:
    """All losses are the same at first, so that any weighting fits them."""

    def make() -> Net:
        net = Net(*hidden(), loss=masked_mean, optimizer=sgd(0.1))
        nn.init.zeros_(net.net[-1].weight)
        nn.init.zeros_(net.net[-1].bias)
        return net

    assert_as_plain(make, tokens([SOME, SOME, ALL]))


class BatchNorm(nn.Module):
    """Couples samples, but for its gain of zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + self.gain * (y - y.mean(0)) / y.std(0)


@pytest.mark.parametrize("loss", [lambda m, b: m.net(b).square().mean(), lambda m, b: m.net(b).var()])
def test_a_gain_of_zero(loss: Callable[[Net, Any], Tensor]) -> None:
    def make() -> Net:
        torch.manual_seed(0)
        return Net(BatchNorm(), BatchNorm(), loss=loss, optimizer=sgd(0.1))

    assert_as_plain(make, [draw(8, 4, seed=i) for i in range(3)])


def by_data(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.data = 0.9 * teacher.data + 0.1 * student.data


def by_data_in_place(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def in_place(teacher: nn.Parameter, student: Tensor) -> None:
    with torch.no_grad():
        teacher.lerp_(student, 0.1)


def by_item(teacher: nn.Parameter, student: Tensor) -> None:
    with torch.no_grad():
        teacher[:] = 0.9 * teacher + 0.1 * student


def by_view(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.detach().view(-1).mul_(0.9).add_(student.detach().view(-1), alpha=0.1)


def by_foreach(teacher: nn.Parameter, student: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([teacher], [student], 0.1)


def by_out(teacher: nn.Parameter, student: Tensor) -> None:
    with torch.no_grad():
        torch.add(0.9 * teacher, student, alpha=0.1, out=teacher)


@pytest.mark.parametrize("update", [by_data, by_data_in_place, in_place, by_item, by_view, by_foreach, by_out])
def test_a_teacher_and_a_queue_that_the_step_updates(update: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Momentum contrast. The loss fits samples; but the teacher moves once per microbatch, or in the extra runs."""

    class Contrast(Net):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(*hidden(), optimizer=sgd(0.1))
            self.teacher = nn.Sequential(*hidden()).requires_grad_(False)
            self.register_buffer("queue", draw(5, 16))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            query = self.net(batch)
            for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                update(teacher, student)
            with torch.no_grad():
                key = self.teacher(batch)
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
            self.queue = torch.cat([key.T, self.queue], 1)[:, :16]
            return cross_entropy(logits, torch.zeros(len(batch), dtype=torch.long))

    assert_as_plain(Contrast, [draw(8, 4, seed=i) for i in range(3)])


def test_a_number_that_decays_with_every_step() -> None:
    """A temperature that is annealed once per microbatch."""

    class Anneals(Net):
        tau = 1.0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.tau *= 0.999999
            return (self.net(batch) / self.tau).square().mean()

    taus = []
    for way in (PLAIN, Way(3, 2)):
        module = Anneals(*hidden(), optimizer=sgd(0.1)).double()
        fit(module, [draw(8, 4, seed=i) for i in range(3)], way)
        taus.append(module.tau)
    assert taus[0] == taus[1]


def test_a_loss_that_sets_in_later() -> None:
    """The first batch's step is a mean over samples; later ones couple them."""

    def loss(module: Net, batch: Tensor) -> Tensor:
        y = module.net(batch)
        return y.square().mean() + (y.var(0).mean() if module.current_epoch > 0 else 0)

    module, plain = (Net(*hidden(), loss=loss, optimizer=sgd(0.1)).double() for _ in range(2))
    batches = [draw(8, 4, seed=i) for i in range(5)]
    fit(plain, batches, PLAIN, max_epochs=3)
    with pytest.warns(UserWarning, match="no longer right"):
        fit(module, batches, Way(3, 2), max_epochs=3)
    for value, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_a_random_mask_is_none_that_hides_nothing() -> None:
    """Numbers that the extra runs draw are those of a sample, not zeros: `rand() < p` is not always true."""

    def loss(module: Net, batch: Tensor) -> Tensor:
        mask = torch.rand(len(batch), 6) < 0.4
        return (module.net(batch).square().mean(-1) * mask).sum() / mask.sum()

    def noisy(module: Net, batch: Tensor) -> Tensor:
        return (module.net(batch + torch.randn_like(batch)) - torch.rand(len(batch), 6, 1)).square().mean()

    for step, expected in ((loss, "model"), (noisy, "step")):
        trainer = fit(Net(*hidden(), loss=step, optimizer=sgd(0.1)), [draw(8, 6, 4).float()] * 2, Way(3, 2))
        assert trainer.strategy._splitter.decided[0] == expected  # type: ignore[attr-defined]


def mean_square(module: Net, batch: Tensor) -> Tensor:
    return module.net(batch).square().mean()


def by_a_generator_of_the_step(batch: Tensor) -> Tensor:
    return torch.randn(batch.shape, generator=torch.Generator().manual_seed(4), dtype=batch.dtype)


def by_a_seed_of_the_step(batch: Tensor) -> Tensor:
    torch.manual_seed(4)
    return torch.rand_like(batch)


class AddsNoise(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.draw(x)


@pytest.mark.parametrize("draw", [by_a_generator_of_the_step, by_a_seed_of_the_step])
def test_numbers_that_each_run_would_draw_again(draw: Callable[[Tensor], Tensor]) -> None:
    """Microbatches that all draw what the first one draws, since the step itself seeds what it draws from."""
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]

    def loss(module: Net, batch: Tensor) -> Tensor:
        return module.net(batch + draw(batch)).square().mean()

    def with_noise_in_a_layer() -> Net:
        torch.manual_seed(1)
        return Net(AddsNoise(draw), *hidden(), loss=mean_square, optimizer=sgd(0.1))

    assert_as_plain(lambda: Net(*hidden(), loss=loss, optimizer=sgd(0.1)), batches)
    assert_as_plain(with_noise_in_a_layer, batches)


def by_a_permutation(batch: Tensor) -> Tensor:
    return torch.randperm(batch.numel()).view_as(batch).to(batch.dtype)


def by_python(batch: Tensor) -> Tensor:
    return torch.full_like(batch, random.random())


def by_numpy(batch: Tensor) -> Tensor:
    return torch.full_like(batch, numpy.random.rand())


OF_NUMPY = numpy.random.default_rng(3)


def by_a_generator_of_numpy(batch: Tensor) -> Tensor:
    return torch.full_like(batch, OF_NUMPY.random())


@pytest.mark.parametrize(
    ("draws", "split"),
    [(each, split) for split in ("auto", "step") for each in (
        by_a_generator_of_the_step, by_a_seed_of_the_step, by_a_permutation, by_python, by_numpy,
        by_a_generator_of_numpy,
    )],
)  # fmt: skip
def test_random_numbers_of_the_step_are_not_taken_for_samples_that_are_coupled(
    draws: Callable[[Tensor], Tensor], split: str, caplog: Any, recwarn: Any
) -> None:
    """A loss that is a mean over samples, of which the message said that it couples them."""

    class Draws(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch + draws(batch)).square().mean()

    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        module = Draws(*hidden(), optimizer=sgd(0.1))
        module.generator = OF_NUMPY
        fit(module, [draw(8, 4).float()], Way(3, 2), strategy={"split": split})
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    (line,) = (line for line in said if line.startswith("roundpipe: split="))
    assert "because the step draws random numbers" in line.lower()


def by_its_slope(module: Net, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(x.pow(3).sum(), x)
    return (module.net(batch)[:, :4] * slope).square().mean()


def by_a_network_s_slope(module: Net, batch: Tensor) -> Tensor:
    """The second derivative is that of code between layers."""
    x = module.net(batch)
    (slope,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return slope.square().mean()


def by_its_slope_and_over_the_batch(module: Net, batch: Tensor) -> Tensor:
    return by_its_slope(module, batch) + module.net(batch).var()


@pytest.mark.parametrize(
    ("loss", "split"),
    [(by_its_slope, "step"), (by_a_network_s_slope, "step"), (by_its_slope_and_over_the_batch, "model")],
)
def test_a_step_that_differentiates_code_of_its_own(loss: Callable[[Net, Any], Tensor], split: str) -> None:
    """The extra runs of the first batch have no gradients: it failed there, and its batches stayed whole."""
    assert_as_plain(lambda: Net(*hidden(), loss=loss, optimizer=sgd(0.1)), [draw(8, 4, seed=i) for i in range(3)])
    trainer = fit(Net(*hidden(), loss=loss, optimizer=sgd(0.1)), [draw(8, 4).float()], Way(3, 2))
    assert trainer.strategy._splitter.decided[0] == split  # type: ignore[attr-defined]


FACTORS = [1.0, 3.0, 2.0, 5.0, 4.0, 7.0, 6.0, 9.0, 8.0, 11.0]


class Takes(Net):
    """A factor of each batch, from an iterator."""

    def __init__(self, factors: Any, take: Callable[[Any], float] = next, loss: Any = mean_square) -> None:
        super().__init__(*hidden(), optimizer=sgd(0.01), loss=loss)
        self.factors = factors
        self.take = take

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self, batch) * self.take(self.factors)


class Countdown:
    """An iterator of the user's, with one inside."""

    def __init__(self) -> None:
        self.left = 10
        self.inner = iter(FACTORS)

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> float:
        self.left -= 1
        return self.left * next(self.inner)


def advanced_cycle() -> Any:
    """In its second round, it gives what it has kept of the first."""
    cycle = itertools.cycle(iter(FACTORS[:3]))
    for _ in range(4):
        next(cycle)
    return cycle


TAKEN = {
    "list": lambda: iter(FACTORS),
    "dict": lambda: iter(dict.fromkeys(FACTORS)),
    "reversed": lambda: reversed(FACTORS),
    "tensor": lambda: iter(torch.tensor(FACTORS)),
    "count": lambda: itertools.count(1, 0.5),
    "cycle": lambda: itertools.cycle(iter(FACTORS[:3])),
    "second round of a cycle": advanced_cycle,
    "islice": lambda: itertools.islice(iter(FACTORS), 1, None, 2),
    "chain": lambda: itertools.chain(iter(FACTORS[:1]), iter(FACTORS)),
    "iterators from a list": lambda: itertools.chain.from_iterable([iter(FACTORS[:1]), iter(FACTORS)]),
    "map": lambda: map(lambda a, b: a * b, itertools.count(1), iter(FACTORS)),
    "tee": lambda: itertools.tee(iter(FACTORS))[1],
    "of the user's": Countdown,
}
HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], float]]] = {
    "attribute": (lambda it: it, next),
    "in a list": (lambda it: [it], lambda held: next(held[0])),
    "in a dict of lists": (lambda it: {"a": [0, it]}, lambda held: next(held["a"][1])),
    "in an object": (lambda it: types.SimpleNamespace(a=it), lambda held: next(held.a)),
    "twice": (lambda it: [it, it], lambda held: next(held[0]) + next(held[1])),
}


@pytest.mark.parametrize(
    ("kind", "held"), [*((kind, "attribute") for kind in TAKEN), *(("list", held) for held in HELD)]
)
def test_iterators_are_where_they_were_after_the_extra_runs(kind: str, held: str) -> None:
    """Items that the extra runs took, so that the batches got those after them."""
    batches = [draw(8, 4, seed=i) for i in range(3)]
    hold, take = HELD[held]
    made: list[Takes] = []

    def make() -> Takes:
        made.append(Takes(hold(TAKEN[kind]()), take))
        return made[-1]

    assert_as_plain(make, batches)
    plain, ours = (float(take(module.factors)) for module in made)
    assert ours == plain


def generator() -> Iterator[float]:
    yield from FACTORS


def lines() -> Any:
    return io.StringIO("\n".join(map(str, FACTORS)))


UNCOPYABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "generator": (generator, next),
    "generator in a chain": (lambda: itertools.chain(generator()), next),
    "lines of a file": (lines, lambda file: float(next(file))),
    "reads of a file": (lines, lambda file: float(file.readline())),
    "calls of a function": (lambda: iter(generator().__next__, None), next),
    "data loader": (lambda: iter(DataLoader(FACTORS, batch_size=None)), next),
    "for loop": (generator, lambda factors: next(factor for factor in factors)),
}


@pytest.mark.parametrize("kind", UNCOPYABLE)
def test_iterators_that_cannot_be_copied_are_not_taken_from(kind: str, caplog: Any) -> None:
    """Nothing can put them back: the step is not tried, and stays whole."""
    make, take = UNCOPYABLE[kind]
    batches = [draw(8, 4, seed=i) for i in range(3)]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        assert_as_plain(lambda: Takes(make(), take), batches)
    said = [r.getMessage() for r in caplog.records if "cannot be copied and put back where it was" in r.getMessage()]
    assert len(said) == 1 and "an iterator ('factors')" in said[0] and "so split='whole'" in said[0]


@pytest.mark.parametrize("make", [generator, lines, lambda: iter(DataLoader(FACTORS)), lambda: sys.stdout])
def test_iterators_that_the_step_does_not_use_are_no_matter(make: Callable[[], Any]) -> None:
    module = Takes(make(), lambda factors: 1.0)
    trainer = fit(module, [draw(8, 4).float()], Way(3, 2))
    assert trainer.strategy._splitter.decided[0] == "step"  # type: ignore[attr-defined]
    assert type(module.factors) is type(make())


def test_a_step_that_takes_an_item_of_each_batch_is_named(caplog: Any) -> None:
    """Microbatches would take an item each, whatever the loss."""
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit(Takes(iter(FACTORS)), [draw(8, 4).float()], Way(3, 2))
    (line,) = (r.getMessage() for r in caplog.records if "split='model'" in r.getMessage())
    assert "because each run of the step changes factors anew" in line


def test_loggers_are_told_once() -> None:
    class Counts(DummyLogger):
        told = 0

        def log_metrics(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
            self.told += "x" in metrics

    class Tells(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.logger.log_metrics({"x": 1.0})
            return self.net(batch).var()

    logger = Counts()
    fit(Tells(*hidden(), optimizer=sgd(0.1)), [draw(8, 4).float()] * 3, Way(3, 2), logger=logger)
    assert logger.told == 3


def test_a_step_that_fetches_its_batches() -> None:
    """Extra runs would take batches away."""

    class Fetches(Net):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.net(batch).square().mean()

    assert_as_plain(lambda: Fetches(*hidden(), optimizer=sgd(0.1)), [draw(8, 4, seed=i) for i in range(3)])
