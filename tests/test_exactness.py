"""Staleness 0 gives, to the last bit, what plain Lightning gives when it is fed the microbatches and accumulates over
them.

On one device equal to plain Lightning, on several equal to one: with every optimizer, clipping, accumulation,
schedulers, groups.
"""

from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers import (
    RoundPipeStrategy,
    Watch,
    assert_close,
    assert_equal,
    differs,
    fit,
    fit_microbatches,
    fit_pipeline,
    plain_loop,
    result,
    split,
    weights,
)
from models import GPT, MLP, SGD, Lit, TiedByHand, batches_of, tokens, vectors
from torch import nn

MODELS = {"mlp": (MLP, vectors), "gpt": (GPT, tokens), "tied by hand": (TiedByHand, tokens)}
DTYPES = [torch.float32, torch.float64]
OPTIMIZERS = {
    "sgd": SGD,
    "adamw": partial(torch.optim.AdamW, lr=0.02, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.005, momentum=0.5, centered=True),
}
SIZE = 12  # divides into 1, 2, 3, 4 and 6 equal parts


def make(name: str, dtype: torch.dtype, **options: Any) -> Lit:
    torch.manual_seed(7)
    return MODELS[name][0](**options).to(dtype)


def data(name: str, dtype: torch.dtype, count: int = 5, size: int = SIZE) -> list[dict[str, torch.Tensor]]:
    return batches_of(MODELS[name][1], count, size, dtype)


def trained(
    name: str, dtype: torch.dtype, m: int | None, devices: int = 1, run: dict | None = None, **options: Any
) -> dict:
    """What ours makes of five batches."""
    strategy = {key: options.pop(key) for key in ("background_step", "layers", "split") if key in options}
    return result(fit_pipeline(make(name, dtype, **options), data(name, dtype), m, devices, run=run, **strategy))


def expected(name: str, dtype: torch.dtype, m: int, run: dict | None = None, **options: Any) -> dict:
    """What plain Lightning makes of their microbatches."""
    kernels = torch.backends.cuda.flash_sdp_enabled()  # of attention: they round differently
    return _expected(name, dtype, m, tuple((run or {}).items()), tuple(options.items()), kernels)


@cache
def _expected(name: str, dtype: torch.dtype, m: int, run: tuple, given: tuple, kernels: bool) -> dict:
    options = dict(given)
    model = make(name, dtype, **options)
    reference = result(fit_microbatches(model, data(name, dtype), m, **dict(run)))
    assert differs(reference["weights"], weights(make(name, dtype, **options)))
    assert len(reference["losses"]) == 5 * m
    return reference


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_one_device_equals_plain_lightning(name: str, dtype: torch.dtype, m: int) -> None:
    assert_equal(trained(name, dtype, m), expected(name, dtype, m))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str, dtype: torch.dtype) -> None:
    reference = expected("gpt", dtype, 3, optimizer=OPTIMIZERS[optimizer])
    assert all(state for state in reference["optimizers"][0]["state"].values())
    assert_equal(trained("gpt", dtype, 3, optimizer=OPTIMIZERS[optimizer]), reference)
    assert_equal(trained("gpt", dtype, 3, devices=2, optimizer=OPTIMIZERS[optimizer]), reference)


@pytest.mark.parametrize("devices", [2, 3, 4, 5])
@pytest.mark.parametrize("m", [2, 6])
@pytest.mark.parametrize("name", MODELS)
def test_device_count_changes_nothing(name: str, m: int, devices: int) -> None:
    for dtype in DTYPES:
        assert_equal(trained(name, dtype, m, devices), expected(name, dtype, m))


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("background_step", [True, False])
@pytest.mark.parametrize(
    "run",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    ],
    ids=str,
)
def test_clipping_and_accumulation(run: dict, background_step: bool, devices: int) -> None:
    optimizer = OPTIMIZERS["adamw foreach"] if devices == 1 else SGD
    reference = expected("gpt", torch.float64, 2, run, optimizer=optimizer)
    assert differs(reference, expected("gpt", torch.float64, 2, optimizer=optimizer)), "the option must matter here"
    ours = trained("gpt", torch.float64, 2, devices, run, optimizer=optimizer, background_step=background_step)
    assert_equal(ours, reference)


def one_cycle(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8), "interval": "step"}


def grouped(module: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, and a rate of its own for the embedding."""
    named = dict(module.named_parameters())
    embeddings = [p for name, p in named.items() if "embed" in name]
    matrices = [p for name, p in named.items() if p.ndim > 1 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim <= 1 and "embed" not in name]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": others}, {"params": embeddings, "lr": 0.3}]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw fused"])
@pytest.mark.parametrize(
    "options",
    [{"scheduler": one_cycle}, {"groups": grouped}, {"scheduler": one_cycle, "groups": grouped}],
    ids=["lr", "groups", "both"],
)
def test_schedulers_and_parameter_groups(options: dict, optimizer: str, devices: int) -> None:
    options = options | {"optimizer": OPTIMIZERS[optimizer]}
    rates = []
    for fit_it in (fit_pipeline, fit_microbatches):
        run = {"callbacks": [watch := Watch()], "gradient_clip_val": 0.5}
        model, batches = make("gpt", torch.float64, **options), data("gpt", torch.float64)
        if fit_it is fit_pipeline:
            ours = result(fit_pipeline(model, batches, 2, devices, run=run))
        else:
            reference = result(fit_microbatches(model, batches, 2, **run))
        rates.append(watch.rates)
    assert_equal(ours, reference)
    assert rates[0] == rates[1][1::2], "learning rates as the user sees them after each batch"


@pytest.mark.parametrize("m", [1, 2])
def test_data_at_any_address(m: int) -> None:
    """Matrix products round differently where their input starts elsewhere in memory: the recompute must see it where
    the forward did.
    """
    for offset in range(16):
        batches = data("mlp", torch.float32, 3)
        for batch in batches:
            room = torch.empty(batch["x"].numel() + 16)
            batch["x"] = room[offset : offset + batch["x"].numel()].view_as(batch["x"]).copy_(batch["x"])
        ours = result(fit_pipeline(make("mlp", torch.float32), batches, m))
        assert_equal(ours, result(fit_microbatches(make("mlp", torch.float32), batches, m)), f"offset {offset}")


@pytest.mark.parametrize("devices", [1, 2])
def test_one_tensor_as_several_arguments(devices: int) -> None:
    """`attention(h, h, h)` takes another way than with three equal tensors: the layer must see that they are one."""
    layers = [nn.MultiheadAttention, nn.LayerNorm, nn.Linear, nn.Embedding]
    assert_equal(trained("gpt", torch.float64, 2, devices, layers=layers), expected("gpt", torch.float64, 2))


def test_everything_at_once_over_two_epochs() -> None:
    options = {"optimizer": OPTIMIZERS["adamw"], "scheduler": one_cycle, "groups": grouped}
    run = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
    reference = result(fit_microbatches(make("gpt", torch.float32, **options), data("gpt", torch.float32, 4), 3, **run))
    ours = fit_pipeline(make("gpt", torch.float32, **options), data("gpt", torch.float32, 4), 3, devices=2, run=run)
    assert_equal(result(ours), reference)


@pytest.mark.parametrize("devices", [1, 2])
def test_returned_loss_is_the_weighted_mean(devices: int) -> None:
    """Seven samples in three parts of 3, 2, 2: weights 3/7, 2/7, 2/7, so the gradient is that of the whole batch's
    mean.
    """
    batches = data("mlp", torch.float64, size=7)
    ours, watch = make("mlp", torch.float64), Watch()
    fit_pipeline(ours, batches, 3, devices, run={"callbacks": [watch]})
    plain, plain_watch = make("mlp", torch.float64), Watch()
    fit(plain, batches, callbacks=[plain_watch])
    torch.testing.assert_close(torch.stack(watch.losses), torch.stack(plain_watch.losses), rtol=1e-13, atol=0)
    assert_close(weights(ours), weights(plain), 1e-12)
    assert len(ours.seen) == 3 * len(batches)


def test_losses_of_several_devices_equal_those_of_one() -> None:
    watched = []
    for devices in (1, 2, 4):
        fit_pipeline(
            make("gpt", torch.float32), data("gpt", torch.float32), 3, devices, run={"callbacks": [watch := Watch()]}
        )
        watched.append(watch.losses)
    assert_equal(watched[1], watched[0])
    assert_equal(watched[2], watched[0])


@pytest.mark.parametrize(
    ("devices", "size", "microbatches"), [(1, 12, 2), (2, 12, 3), (3, 12, 4), (5, 12, 6), (3, 2, 2), (2, 1, 1)]
)
def test_default_number_of_microbatches(devices: int, size: int, microbatches: int) -> None:
    """One more than devices, at most the batch size."""
    ours = make("mlp", torch.float64)
    fit_pipeline(ours, data("mlp", torch.float64, size=size), None, devices)
    assert len(ours.seen) == 5 * microbatches
    plain = make("mlp", torch.float64)
    fit(plain, data("mlp", torch.float64, size=size))
    assert_close(weights(ours), weights(plain), 1e-12)


def test_split_whole_runs_the_batch_as_it_is() -> None:
    assert_equal(trained("gpt", torch.float64, None, devices=2, split="whole"), expected("gpt", torch.float64, 1))


@pytest.mark.parametrize(
    "layers",
    [
        ["Block"],
        ["blocks.0", "blocks.2", "head"],
        [nn.Linear, nn.Embedding, nn.LayerNorm],
        lambda module: isinstance(module, nn.LayerNorm),
    ],
    ids=["class names", "paths", "classes", "function"],
)
def test_choice_of_layers_changes_nothing(layers: Any) -> None:
    assert_equal(trained("gpt", torch.float64, 2, devices=2, layers=layers), expected("gpt", torch.float64, 2))


class Summed(MLP):
    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch["x"]), batch["y"], reduction="sum")


class Padded(MLP):
    """The mean over those entries of y that are labelled."""

    def loss(self, batch: Any) -> torch.Tensor:
        return (self(batch["x"]) - batch["y"]).pow(2)[batch["labelled"]].mean()


def count_labelled(batch: dict[str, torch.Tensor]) -> int:
    return int(batch["labelled"].sum())


@pytest.mark.parametrize(("kind", "loss_weight"), [(Summed, "sum"), (Padded, count_labelled)])
def test_other_weights_of_the_losses(kind: type[Lit], loss_weight: Any) -> None:
    batches = data("mlp", torch.float64, size=8)
    for batch in batches:
        batch["labelled"] = torch.arange(24).view(8, 3) % 5 < torch.arange(8)[:, None] + 1
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)

    def build() -> Lit:
        torch.manual_seed(7)
        return kind(optimizer=optimizer).double()

    ours, plain = build(), build()
    fit_pipeline(ours, batches, 3, devices=2, loss_weight=loss_weight)
    plain_loop(plain, lambda model, batch: model.loss(batch), batches, 1, optimizer)
    assert_close(weights(ours), weights(plain), 1e-12)


# --- dropout

NOISY = {"mlp": {"dropout": 0.3}, "gpt": {"dropout": 0.3}}


@pytest.mark.parametrize("name", NOISY)
def test_dropout_depends_on_the_seed_only(name: str) -> None:
    """Masks are the same for any number of devices and in every run; another seed draws others."""

    def run(devices: int, seed: int = 0) -> dict:
        return trained(name, torch.float64, 3, devices, run={"seed": seed}, **NOISY[name])

    first = run(1)
    for devices in (1, 2, 4, 5, 2):
        assert_equal(run(devices), first)
    assert differs(run(2, seed=1)["weights"], first["weights"])


class Probe(Lit):
    """Keeps what its dropout layer lets through, and a gradient that shows the mask that the backward used."""

    def __init__(self) -> None:
        super().__init__(optimizer=partial(torch.optim.SGD, lr=0.0))
        self.scale = nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 1, bias=False))
        nn.init.ones_(self.scale[1].weight)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.scale(batch["x"]).sum()


@pytest.mark.parametrize("devices", [1, 2])
def test_backward_uses_the_forward_s_mask(devices: int) -> None:
    """The loss is linear in the weight, so weight times gradient gives the loss back if both saw one mask."""
    model, watch = Probe(), Watch()
    gradients = []

    class Read(Watch):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradients.append(module.scale[1].weight.grad.clone())

    x = torch.ones(6, 200)
    fit_pipeline(model, [{"x": x}] * 3, 3, devices, loss_weight="sum", run={"callbacks": [watch, Read()]})
    assert len(gradients) == 3
    for loss, gradient in zip(watch.losses, gradients, strict=True):
        torch.testing.assert_close(loss, gradient.sum(), rtol=1e-5, atol=0)
    assert len({float(loss) for loss in watch.losses}) == 3, "a batch must not repeat the masks of another"
    # Each of the three microbatches adds 2 for each of its 2 rows that was kept: 6 or 12 each time if all had the same
    # masks.
    assert (gradients[0] % 6).any(), "microbatches must not repeat each other's masks"


def test_split_covers_every_sample() -> None:
    """The oracle's own splitting."""
    batch = {"x": torch.arange(12), "name": "kept"}
    parts = split(batch, 3)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"]) and all(
        part["name"] == "kept" for part in parts
    )


def test_strategy_names() -> None:
    for name, reference in (("roundpipe", 0), ("roundpipe_async", 1)):
        model = make("mlp", torch.float64)
        trainer = fit(model, data("mlp", torch.float64, count=1), name, devices=2)
        assert isinstance(trainer.strategy, RoundPipeStrategy) and trainer.strategy.staleness == reference
        assert len(model.seen) == 3
