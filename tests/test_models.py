"""Every kind of model: losses, gradients and weights against a plain loop of autograd over the same microbatches, in
fp64.

Gradients are read where nothing has to wait for them: SGD's momentum is a sum of gradients, free of cancellation.
"""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from helpers import (
    Batches,
    RoundPipeStrategy,
    assert_close,
    assert_equal,
    default_dtype,
    differs,
    fit,
    fit_pipeline,
    plain_loop,
    split,
    weights,
)
from models import (
    CNN,
    SGD,
    VAE,
    ZOO,
    Bare,
    HuggingFace,
    Lit,
    batches_of,
    labelled_pictures,
    pictures,
    triplets,
    vectors,
    vit,
)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

TOLERANCE = 1e-10
DOUBLE = {"precision": "64-true"}


def build(name: str) -> tuple[Lit, Lit, list[dict[str, Tensor]]]:
    """The same model twice, and three batches: the first is the pipeline's warm-up, the others run pipelined."""
    make, data = ZOO[name]
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(make().double())
    return *models, batches_of(data, 3, 8)


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By name, for the parameters that ever had a gradient."""
    found = {name: optimizer.state.get(p, {}).get("momentum_buffer") for name, p in model.named_parameters()}
    return {name: buffer.clone() for name, buffer in found.items() if buffer is not None}


def of_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("name", ZOO)
def test_gradients_equal_plain_autograd(name: str, m: int) -> None:
    ours, plain, batches = build(name)
    before = of_parameters(plain)
    with default_dtype(torch.float64):
        losses: list[Tensor] = []

        def loss(model: Any, part: Any) -> Tensor:
            losses.append(value := model.loss(part))
            model.note("train", part, value)
            return value

        optimizer = plain_loop(plain, loss, batches, m, SGD)
    trainer = fit_pipeline(ours, batches, m, devices=2, run=DOUBLE)

    expected = momenta(plain, optimizer)
    assert expected and all(float(value.abs().max()) > 0 for value in expected.values()), (
        "every gradient must be put to the test"
    )
    assert_close(momenta(ours, trainer.optimizers[0]), expected, TOLERANCE)
    moved = {name: value - before[name] for name, value in of_parameters(plain).items() if name in expected}
    assert_close({name: p - before[name] for name, p in of_parameters(ours).items() if name in moved}, moved, TOLERANCE)
    still = {name: value for name, value in before.items() if name not in expected}
    assert_equal({name: of_parameters(ours)[name] for name in still}, still)
    assert len(losses) == len(plain.seen) == 3 * m
    assert_close({str(k): v for k, v in ours.seen.items()}, {str(k): v for k, v in plain.seen.items()}, TOLERANCE)


def test_the_zoo_covers_what_it_claims() -> None:
    """The oracle's own check: unused and frozen parameters have no gradient in plain autograd, all the others do."""
    without = {}
    for name in ("unused", "frozen", "mlp"):
        _, plain, batches = build(name)
        optimizer = plain_loop(plain, lambda model, part: model.loss(part), batches, 2, SGD)
        without[name] = sorted(set(of_parameters(plain)) - set(momenta(plain, optimizer)))
    assert without["unused"] == ["blocks.2.bias", "blocks.2.weight", "spare"]
    assert without["frozen"] == sorted(
        [
            "first.weight",
            "first.bias",
            "blocks.0.weight",
            "blocks.0.bias",
            "blocks.1.weight",
            "blocks.3.weight",
            "blocks.3.bias",
        ]
    )
    assert without["mlp"] == []


def test_parameters_without_gradient_have_none() -> None:
    """None, never zeros: neither `.grad` nor optimizer state nor weight decay touches them."""

    class Read(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            missing.append([name for name, p in module.named_parameters() if p.grad is None])

    for name in ("unused", "frozen"):
        ours, plain, batches = build(name)
        missing: list[list[str]] = []
        trainer = fit_pipeline(ours, batches, 2, devices=2, run=DOUBLE | {"callbacks": [Read()]})
        optimizer = plain_loop(plain, lambda model, part: model.loss(part), batches, 2, SGD)
        expected = [name for name, p in plain.named_parameters() if p.grad is None]
        assert missing == [expected] * 3
        assert set(momenta(ours, trainer.optimizers[0])) == set(momenta(plain, optimizer))
        assert all(
            len(trainer.optimizers[0].state.get(p, {})) == 0 for name, p in ours.named_parameters() if name in expected
        )


# --- BatchNorm: gradients as normalized per microbatch; running statistics of the whole mini-batch, one update per
# batch


class Averaged(CNN):
    """One norm averages over all batches (momentum=None), one keeps no running statistics."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[0][1] = nn.BatchNorm2d(4, momentum=None)
        self.blocks[1][1] = nn.BatchNorm2d(4, track_running_stats=False)


class Sometimes(CNN):
    """A frozen norm, in eval mode: uses its running statistics and leaves them alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        nn.init.constant_(self.blocks[1][1].running_mean, 0.3)

    def on_train_epoch_start(self) -> None:
        self.blocks[1][1].eval()

    def train(self, mode: bool = True) -> "Sometimes":
        super().train(mode)
        self.blocks[1][1].eval()
        return self


def train_batch_norm(model: Lit, batches: list[Any], m: int) -> dict[str, Tensor]:
    """The plain loop; running statistics computed here from the inputs of each norm over the whole batch, as torch
    documents them.
    """
    norms = {
        name: norm
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None
    }
    statistics = {
        f"{name}.{key}": buffer.clone()
        for name, norm in norms.items()
        for key, buffer in norm.named_buffers(recurse=False)
    }
    inputs: dict[str, list[Tensor]] = {name: [] for name in norms}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(
            lambda norm, args, name=name: inputs[name].append(args[0].detach()) if norm.training else None
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        for part in split(batch, m, even=False):
            (model.loss(part) * len(part["x"]) / len(batch["x"])).backward()
        optimizer.step()
        for name, norm in norms.items():
            if not inputs[name]:
                continue
            x = torch.cat(inputs[name]).transpose(0, 1).flatten(1)
            inputs[name].clear()
            statistics[f"{name}.num_batches_tracked"] += 1
            count = int(statistics[f"{name}.num_batches_tracked"])
            momentum = 1 / count if norm.momentum is None else norm.momentum
            for key, value in (("running_mean", x.mean(1)), ("running_var", x.var(1, unbiased=True))):
                statistics[f"{name}.{key}"].lerp_(value, momentum)
    return statistics


@pytest.mark.parametrize(("m", "devices", "size"), [(1, 1, 8), (2, 1, 8), (2, 2, 8), (4, 3, 8), (3, 2, 7)])
@pytest.mark.parametrize("kind", [CNN, Averaged, Sometimes])
def test_batch_norm(kind: type[CNN], m: int, devices: int, size: int) -> None:
    batches = batches_of(pictures, 4, size)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(kind(optimizer=partial(torch.optim.SGD, lr=0.1)).double().train())
    ours, plain = models
    expected = train_batch_norm(plain, batches, m)
    assert any(float(value.abs().max()) > 0.01 for name, value in expected.items() if "mean" in name)
    fit_pipeline(ours, batches, m, devices)
    assert_close(of_parameters(ours), of_parameters(plain), TOLERANCE)
    buffers = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    assert_close(buffers, expected, TOLERANCE)
    assert all(buffer.dtype == expected[name].dtype for name, buffer in buffers.items())


def test_batch_norm_of_one_microbatch_equals_plain_lightning() -> None:
    """The statistics computed by the test above are those that torch itself computes."""
    batches = batches_of(pictures, 4, 8)
    for kind in (CNN, Averaged, Sometimes):
        models = []
        for _ in range(3):
            torch.manual_seed(3)
            models.append(kind(optimizer=partial(torch.optim.SGD, lr=0.1)).double().train())
        statistics = train_batch_norm(models[0], batches, 1)
        fit(models[1], batches)
        assert_close({name: buffer.clone() for name, buffer in models[1].named_buffers()}, statistics, 1e-12)
        fit_pipeline(models[2], batches, 1, devices=2)
        assert_close(weights(models[2]), weights(models[1]), 1e-12)


def test_validation_leaves_batch_norm_alone() -> None:
    batches = batches_of(pictures, 2, 8)
    model = CNN().double()
    trainer = fit_pipeline(model, batches, 2, devices=2)
    before = weights(model)
    trainer.validate(model, Batches(batches), verbose=False)
    assert_equal(weights(model), before)


# --- noise in the training_step


def noisy(m: int | None, devices: int, seed: int = 5) -> tuple[dict, dict]:
    torch.manual_seed(3)
    model, batches = VAE().double(), [{"x": batch["x"]} for batch in batches_of(vectors, 4, 8)]
    if m is None:
        fit(model, batches, seed=seed)
    else:
        fit_pipeline(model, batches, m, devices, run={"seed": seed})
    return weights(model), model.seen


def test_noise_of_one_microbatch_is_plain_lightning_s() -> None:
    plain = noisy(None, 1)
    assert differs(plain, noisy(None, 1, seed=6))
    for devices in (1, 2):
        assert_equal(noisy(1, devices), plain)


def test_noise_does_not_depend_on_devices() -> None:
    first = noisy(3, 1)
    for devices in (1, 2, 3, 2):
        assert_equal(noisy(3, devices), first)
    assert differs(noisy(3, 2, seed=6)[0], first[0])


class Drawing(Lit):
    """The loss is nothing but the noise drawn, in training_step and in a layer."""

    def __init__(self) -> None:
        super().__init__(optimizer=partial(torch.optim.SGD, lr=0.0))
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        self.noise: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        noise = torch.rand(())
        self.noise.append(float(noise))
        return self.net(batch["x"]).mean() + noise


def test_no_two_microbatches_draw_the_same_noise() -> None:
    model = Drawing()
    fit_pipeline(model, batches_of(vectors, 5, 8, torch.float32), 4, devices=2)
    drawn = set(model.noise)
    assert len(drawn) >= 20 and len({loss.item() for loss in model.seen.values()}) == 20


# --- what a batch and an output may look like


@pytest.mark.parametrize("name", ZOO)
def test_one_microbatch_equals_plain_lightning(name: str) -> None:
    """M = 1 changes nothing at all: bit for bit what `strategy="auto"` gives, BatchNorm included."""
    make, data = ZOO[name]
    results = []
    for strategy in ("auto", RoundPipeStrategy(microbatches=1)):
        torch.manual_seed(3)
        model = make()
        fit(model, batches_of(data, 3, 4, torch.float32), strategy, devices=1 if strategy == "auto" else 2)
        results.append((weights(model), {str(key): loss for key, loss in model.seen.items()}))
    if name == "t5":
        # The encoder's output enters every decoder layer twice. Autograd adds its four gradients one by one, the
        # pipeline first those
        # of each layer: the same sum in another order.
        assert_close(results[1][0], results[0][0], 1e-5)
        assert_close(results[1][1], results[0][1], 1e-5)
    else:
        assert_equal(results[1], results[0])


def test_a_model_that_has_no_layers_says_nothing_wrong() -> None:
    ours, plain = Bare(), Bare()
    plain.load_state_dict(ours.state_dict())
    fit_pipeline(ours, batches_of(vectors, 3, 8, torch.float32), None, devices=3)
    fit(plain, batches_of(vectors, 3, 8, torch.float32))
    assert_close(weights(ours), weights(plain), 1e-5)


def test_vit_takes_its_own_arguments() -> None:
    """`HuggingFace` hands the batch on by keyword; a tuple batch and positional arguments must do as well."""

    class Tuple(HuggingFace):
        def loss(self, batch: Any) -> Tensor:
            pixels, labels = batch
            return self.net(pixels, labels=labels).loss

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    results = []
    for strategy, options in (("auto", {}), (RoundPipeStrategy(microbatches=2), {"devices": 2})):
        torch.manual_seed(3)
        model = Tuple(vit().net).double()
        batches = [tuple(batch.values()) for batch in batches_of(labelled_pictures, 3, 8)]
        fit(model, batches, strategy, **DOUBLE, **options)
        results.append(weights(model))
    # ViT normalizes per sample, so microbatches change nothing but the order of sums
    assert_close(results[1], results[0], 1e-9)


def test_siamese_triplets_have_three_different_inputs() -> None:
    batch = batches_of(triplets, 1, 8)[0]["x"]
    assert batch.shape == (8, 3, 6) and not torch.equal(batch[:, 0], batch[:, 1])
