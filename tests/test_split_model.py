"""split="model": a step that needs the whole batch, and what `auto` makes of it, against plain autograd in float64."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from helpers import fit
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.pipeline import turnstile
from lightning_roundpipe.pipeline.call_split import CallSplit, find_split
from lightning_roundpipe.splitting import find_split_calls

LossOf = Callable[["Model", Any], Tensor]


def blocks(width: int = 4, count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


class Model(L.LightningModule):
    def __init__(self, net: nn.Module, loss: LossOf, optimizer: str = "SGD") -> None:
        super().__init__()
        self.net = net
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.loss = loss
        self.optimizer = optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self, batch)
        if loss is not None:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


def info_nce(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    a, b = (F.normalize(model(x), dim=-1) for x in batch)
    return F.cross_entropy(a @ b.T / model.temperature, torch.arange(len(a)))


def variance(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).var(0).mean() * model.temperature


def ranking(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores, target = model.net(batch[0]).sum(-1), batch[1].sum(-1)
    sign = (target[:, None] - target[None, :]).sign()
    return F.softplus(-sign * (scores[:, None] - scores[None, :])).mean() + 0 * model.temperature


def triplet(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    a, b = model(batch[0]), model(batch[1])
    distance = torch.cdist(a, b)
    negatives = distance + 1e3 * torch.eye(len(a), dtype=a.dtype)
    return F.relu(distance.diagonal() - negatives.min(1).values + model.temperature).mean()


def masked_mean(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    mask = batch[1] > 0.3
    return (model(batch[0]) * mask).square().sum() / mask.sum() * model.temperature


def per_sample_mean(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean() * model.temperature


def total(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum() * model.temperature


def token_mean(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    labels = torch.where(batch[1] > 0.5, -100, (batch[1].abs() * 3).long().clamp(max=3)).clone()
    labels[0] = 1
    logits = model(batch[0]).unsqueeze(-2) * torch.arange(1.0, 5.0, dtype=batch[0].dtype)[:, None]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, :4], ignore_index=-100) * model.temperature


LOSSES: list[LossOf] = [info_nce, variance, ranking, triplet, masked_mean, per_sample_mean, total, token_mean]
COUPLED = {"info_nce", "variance", "ranking", "triplet", "masked_mean", "token_mean"}


def batches(samples: tuple[int, ...] = (8, 8, 7)) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=draw).double(), torch.randn(n, 4, generator=draw).double()) for n in samples]


def assert_as_plain(model: L.LightningModule, data: list[Any], m: int, devices: int, split: str, **options: Any) -> Any:
    plain = copy.deepcopy(model)
    strategy = RoundPipeStrategy(microbatches=m, split=split)  # type: ignore[arg-type]
    trainer = fit(model, data, strategy, devices=devices, **options)
    reference = fit(plain, data, **options)
    for (name, value), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    for name, value in reference.logged_metrics.items():
        torch.testing.assert_close(trainer.logged_metrics[name], value, rtol=1e-10, atol=1e-12)
    return trainer.strategy


def way(strategy: RoundPipeStrategy) -> str | None:
    return strategy._splitter.decided[0] if strategy._splitter.decided is not None else None


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["model", "auto"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_any_loss(loss: LossOf, split: str, m: int, devices: int) -> None:
    strategy = assert_as_plain(Model(blocks(), loss).double(), batches(), m, devices, split)
    if m > 1:
        assert way(strategy) == ("model" if split == "model" or loss.__name__ in COUPLED else "step")


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRU(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x)[0]
        return x


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["model", "auto"])
def test_time_first(split: str, m: int, devices: int) -> None:
    """The batch lies on dimension 1; the last one is smaller."""
    draw = torch.Generator().manual_seed(1)
    data = [torch.randn(5, n, 4, generator=draw).double() for n in (6, 6, 4)]
    model = Model(TimeFirst(), lambda model, x: model(x)[-1].square().mean() * model.temperature).double()
    strategy = assert_as_plain(model, data, m, devices, split)
    assert m == 1 or way(strategy) == "model"


class Blocks(nn.Module):
    """Layers called one by one by the step, a shared one, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor, *, twice: bool) -> dict[str, Any]:
        skips = []
        for block in self.blocks:
            x = x + scale * torch.tanh(block(x))
            skips.append(x)
        if twice:
            x = self.blocks[0](x)
        return {"x": self.head(x), "skips": tuple(skips), "twice": twice, "nothing": None}


def many_outputs(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].clone().requires_grad_()
    first = model.net(x, model.temperature, twice=True)
    second = model.net(first["x"].sin(), model.temperature.exp(), twice=False)
    assert first["twice"] and second["nothing"] is None
    mixed = first["skips"][1] @ second["x"].T
    return mixed.var() + second["skips"][0].std() + first["skips"][2].mean(0).norm()


def layer_by_layer(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0]
    for block in model.net.blocks:
        x = torch.tanh(block(x)) - x.mean(0)
    with torch.no_grad():
        target = model.net.head(batch[1])
    return (model.net.head(x) @ target.T).var() * model.temperature


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("loss", [many_outputs, layer_by_layer], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_calls_in_many_ways(loss: LossOf, optimizer: str, m: int) -> None:
    model = Model(Blocks(), loss, optimizer).double()
    assert way(assert_as_plain(model, batches(), m, 2, "auto")) == "model"


class WithAuxiliaryLoss(nn.Module):
    """Leaves something for the step on itself: only the calls within can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(x)
        self.spread = y.var()
        return y


class CountsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) / len(x)


def mixed_up(model: Model, batch: tuple[Tensor, Tensor], share: Tensor) -> Tensor:
    """Mixup: each sample is mixed with one drawn from the whole batch."""
    x, y = batch
    other = torch.randperm(len(x))
    return (model(share * x + (1 - share) * x[other]) - share * y - (1 - share) * y[other]).square().mean()


def sometimes_coupled(model: Model, batch: tuple[Tensor, Tensor], share: Tensor) -> Tensor:
    return variance(model, batch) if share < 0.1 else per_sample_mean(model, batch)


def mostly_coupled(model: Model, batch: tuple[Tensor, Tensor], share: Tensor) -> Tensor:
    return variance(model, batch) if share > 0.1 else per_sample_mean(model, batch)


def mostly_of_many(model: Model, batch: tuple[Tensor, Tensor], share: Tensor) -> Tensor:
    if share > 0.1 and len(batch[0]) < 7:
        raise ValueError("too few samples")
    return per_sample_mean(model, batch)


def scaled(model: Model, batch: tuple[Tensor, Tensor], share: Tensor) -> Tensor:
    return share * per_sample_mean(model, batch) + per_sample_mean(model, batch)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (mixed_up, "model"),
        (sometimes_coupled, "model"),
        (mostly_coupled, "model"),
        (mostly_of_many, "model"),
        (scaled, "step"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_random_number_of_the_whole_batch(loss: Callable[..., Tensor], expected: str, shape: tuple[int, ...]) -> None:
    """What a step does with one number that all samples share may show with small ones only, or only with others."""
    model = Model(blocks(), lambda model, batch: loss(model, batch, torch.rand(shape).double()).sum()).double()
    strategy = RoundPipeStrategy(microbatches=3)
    fit(model, batches(), strategy, devices=2)
    assert way(strategy) == expected


class DropsLayers(nn.Module):
    """Skips its layers, and what then couples samples, with a probability of a fifth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.2 else self.blocks(x) / len(x)


def test_calls_that_draw_a_number_are_opened() -> None:
    model = Model(DropsLayers(), variance).double()
    found = find_split_calls(model, list(model.net.blocks), batches()[0], 3, lambda part: variance(model, part))
    assert found is not None
    assert {module for module, _ in found} == {model.net.blocks}


def test_what_leaves_traces_is_opened() -> None:
    model = Model(WithAuxiliaryLoss(), lambda model, batch: model(batch[0]).var() + model.net.spread).double()
    assert way(assert_as_plain(model, batches(), 3, 2, "auto")) == "model"


def test_what_couples_samples_is_opened() -> None:
    model = Model(CountsRows(), variance).double()
    assert way(assert_as_plain(model, batches(), 3, 2, "auto")) == "model"


def test_a_log_from_within_forward() -> None:
    class Logs(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            self.log("mean", y.mean())
            return y

    assert way(assert_as_plain(Logs(blocks(), variance).double(), batches(), 3, 2, "auto")) == "model"


def test_a_hook_of_the_users() -> None:
    seen: list[int] = []
    model = Model(blocks(), variance).double()
    model.net[1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    assert_as_plain(model, batches(), 3, 2, "model")
    assert seen[-3:] == [8, 8, 7]


def test_only_the_first_batch_is_serial() -> None:
    class Watched(RoundPipeStrategy):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            output = super().training_step(*args, **kwargs)
            assert self._pipeline is not None and self._pipeline.batch is not None
            recorded.append(self._pipeline.batch.records)
            return output

    recorded: list[bool] = []
    fit(Model(blocks(), info_nce).double(), batches(), Watched(microbatches=2, split="model"), devices=2)
    assert recorded == [True, False, False]


def test_nothing_can_be_split() -> None:
    """One layer that looks at the whole batch: it runs whole."""

    class Centers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    model = Model(nn.Sequential(Centers(4, 4), nn.Tanh(), Centers(4, 4)), variance).double()
    assert way(assert_as_plain(model, batches(), 3, 2, "auto")) in ("model", "whole")


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.01}], ids=str)
def test_options(options: dict[str, Any]) -> None:
    assert_as_plain(Model(blocks(), info_nce, "AdamW").double(), batches((8, 8, 7, 8)), 3, 2, "auto", **options)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_precisions(precision: str) -> None:
    model = Model(blocks(), info_nce)
    model = model.double() if precision == "64-true" else model
    data = [tuple(x.to(torch.float64 if precision == "64-true" else torch.float32) for x in b) for b in batches()]
    plain = copy.deepcopy(model)
    trainer = fit(model, data, RoundPipeStrategy(microbatches=3, split="model"), devices=2, precision=precision)
    fit(plain, data, precision=precision)
    assert way(trainer.strategy) == "model"
    bound = 1e-10 if precision == "64-true" else 2e-2
    for value, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("devices", [1, 3])
def test_staleness(devices: int) -> None:
    results = []
    for split, m in (("whole", 1), ("model", 3)):
        torch.manual_seed(0)
        model = Model(blocks(), info_nce, "AdamW").double()
        fit(model, batches((8, 8, 7, 8)), RoundPipeStrategy(m, staleness=1, split=split), devices=devices)  # type: ignore[arg-type]
        results.append(list(model.parameters()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_an_overridden_backward() -> None:
    class Halves(Model):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (0.5 * loss).backward()

    assert way(assert_as_plain(Halves(blocks(), info_nce).double(), batches(), 3, 2, "auto")) == "model"


def test_a_batch_whose_split_outputs_are_not_used() -> None:
    """Sometimes a split call gets no gradient, or there is no loss at all."""

    def sometimes(model: Model, batch: tuple[Tensor, Tensor]) -> Any:
        y = model(batch[0])
        if len(batch[0]) == 7:
            return None
        return y.var() if batch[0][0, 0] < 5 else model.temperature.square()

    data = batches((8, 8, 7, 8))
    data[1][0][0, 0] = 9
    assert way(assert_as_plain(Model(blocks(), sometimes).double(), data, 3, 2, "auto")) == "model"


def test_the_report_shows_stages() -> None:
    strategy = RoundPipeStrategy(microbatches=3, split="model")
    fit(Model(blocks(), info_nce).double(), batches(), strategy, devices=2)
    report = strategy.report()
    assert report.microbatches == 3
    assert all(row.forward_stage and row.backward_stage for row in report.layers)


def test_random_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the threads' timing, the numbers are the same."""
    results = []
    draw = random.Random(0)
    monkeypatch.setattr(turnstile, "handover_hook", lambda: time.sleep(draw.random() * 1e-3))
    for _ in range(10):
        torch.manual_seed(0)
        model = Model(Blocks(), many_outputs).double()
        fit(model, batches(), RoundPipeStrategy(microbatches=4, split="model"), devices=3)
        results.append([value.detach().clone() for value in model.parameters()])
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_dropout_is_repeatable_and_independent_of_devices() -> None:
    results = []
    for devices in (1, 2, 2, 3):
        torch.manual_seed(3)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)))
        model = Model(net, info_nce).double()
        fit(model, batches(), RoundPipeStrategy(microbatches=3, split="model"), devices=devices)
        results.append([value.detach().clone() for value in model.parameters()])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert torch.equal(a, b)


def mixtral(model: Model, batch: Tensor) -> Tensor:
    return model.net(input_ids=batch, labels=batch, output_router_logits=True).loss + 0 * model.temperature


def test_mixtral_with_its_balancing_loss() -> None:
    """The router's loss is a product of means over the whole batch."""
    config = MixtralConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, router_aux_loss_coef=0.5, use_cache=False,
        experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model(MixtralForCausalLM(config), mixtral).double()
    data = [torch.randint(0, 17, (6, 5)) for _ in range(3)]
    assert way(assert_as_plain(model, data, 3, 2, "auto")) == "model"


def test_an_error_within_a_split_call() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if (x > 50).any():
                raise ValueError("bad row")
            return super().forward(x)

    model = Model(nn.Sequential(*(Fails(4, 4) for _ in range(3))), variance).double()
    good, bad = batches((8, 8))
    bad[0][5] = 100.0
    with pytest.raises(ValueError, match="bad row") as caught:
        fit(model, [good, bad], RoundPipeStrategy(microbatches=3, split="model"), devices=2)
    assert any("layer 'net.0'" in note for note in caught.value.__notes__)
    assert_as_plain(Model(model.net, variance).double(), [good], 3, 2, "model")


def test_gradients_within_the_step_are_refused() -> None:
    def penalty(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model.net(x).sum(), x, create_graph=True)
        return gradient.var()

    with pytest.raises(RuntimeError, match=r"(?s)second derivatives|within training_step"):
        fit(Model(blocks(), penalty).double(), batches(), RoundPipeStrategy(microbatches=3, split="model"), devices=2)


def test_gradients_after_the_step_are_refused() -> None:
    class Keeps(Model):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.kept = self(batch[0])
            return self.kept.var()

        def on_train_batch_end(self, *args: Any) -> None:
            self.kept.sum().backward()

    with pytest.raises(RuntimeError, match=r"(?s)within training_step.*after it.*split='whole'"):
        fit(Keeps(blocks(), info_nce).double(), batches(), RoundPipeStrategy(microbatches=3, split="model"), devices=2)


def test_a_split_is_found_or_not() -> None:
    layer = nn.Linear(4, 4).double()
    x, mask = batches((8,))[0][0], torch.ones(4, dtype=torch.float64)
    found = find_split(lambda x, mask: (layer(x) * mask, mask), (x, mask), {}, 3)
    assert found is not None and found[0] == CallSplit((0, None), (0, None))
    assert find_split(lambda x: x - x.mean(), (x,), {}, 3) is None
    assert find_split(lambda x: x.sum(), (x,), {}, 3) is None
    assert find_split(lambda x: x.add_(1), (x,), {}, 3) is None
    found = find_split(lambda x: x.cumsum(0), (x,), {}, 3)
    assert found is not None and found[0] == CallSplit((1,), (1,))


class Cuts(nn.Module):
    """Takes lengths as numbers, one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        y = self.blocks(x)
        return torch.stack([y[i, : lengths[i]].sum(0) for i in range(len(y))])


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_with_a_number_for_each_sample(kind: Callable[..., Any]) -> None:
    """All lengths are the same at first. Later each microbatch would take those of the first samples."""
    draw = torch.Generator().manual_seed(1)
    lengths = ([5] * 6, [1, 2, 3, 4, 5, 1], [3, 1, 4, 1, 5, 2])
    data = [(torch.randn(6, 5, 4, generator=draw).double(), kind(each)) for each in lengths]
    model = Model(Cuts(), lambda model, batch: model(*batch).var(0).mean()).double()
    assert way(assert_as_plain(model, data, 3, 2, "model")) == "model"


class StraightThrough(nn.Module):
    """Returns a mean over samples that has the same value for all of them, but not the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.blocks(x)
        return y, y.mean() - y.mean().detach() + 1


def test_a_constant_value_with_a_gradient() -> None:
    def loss(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
        y, one = model(batch[0])
        return y.var() * one

    assert way(assert_as_plain(Model(StraightThrough(), loss).double(), batches(), 3, 2, "auto")) == "model"


def test_outputs_that_do_not_fit_together() -> None:
    """Each microbatch is padded to a length of its own, in later batches only."""

    class Pads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.blocks(x)[:, : int(lengths.max())]

    x = torch.randn(6, 5, 4).double()
    data = [(x, torch.tensor([5] * 6)), (x, torch.tensor([1, 2, 5, 4, 3, 1]))]
    model = Model(Pads(), lambda model, batch: model(*batch).var()).double()
    with pytest.raises(RuntimeError, match=r"(?s)call of Model.*do not fit together.*split='whole'"):
        fit(model, data, RoundPipeStrategy(microbatches=3, split="model"), devices=2)


class GivesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.blocks(x), x, x[:, :2], self.blocks[0][0].weight


@pytest.mark.parametrize("split", ["model", "auto"])
def test_outputs_that_are_arguments_or_parameters(split: str) -> None:
    def loss(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
        y, x, part, weight = model((batch[0] * model.temperature).sin())
        return y.var() + (x * y).std() + part.var() + weight.norm()

    assert way(assert_as_plain(Model(GivesItsWeight(), loss).double(), batches(), 3, 2, split)) == "model"


def test_layers_are_split_after_a_batch_that_ran_whole() -> None:
    """A first batch of one sample shows what layers are like, but not how to split their calls."""

    def loss(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        for block in model.net.blocks:
            x = torch.tanh(block(x)) + x.mean(0)
        return (model.net.head(x) @ model.net.head(batch[1]).T).square().mean() * model.temperature

    model = Model(Blocks(), loss).double()
    assert way(assert_as_plain(model, batches((1, 8, 7, 8)), 3, 2, "auto")) == "model"
