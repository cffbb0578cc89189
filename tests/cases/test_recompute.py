"""The forward runs twice; what it writes, draws and changes must look as if it had run once."""

from __future__ import annotations

import random
from collections.abc import Callable

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.functional import dropout

from .common import (
    PLAIN,
    AtBatchEnd,
    Net,
    Way,
    X,
    col,
    fit,
    in_every_pipeline,
    in_every_way,
    in_few_pipelines,
    in_few_ways,
    lin,
    loader,
    near,
    sgd,
    weights,
)


def mean_square(module: Net, batch: Tensor) -> Tensor:
    return module.net(batch).pow(2).mean()


class Validates(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)


@in_every_way
def test_batch_norm_counts_each_batch_once(way: Way) -> None:
    """Running statistics updated again by the recompute, once per microbatch, or on a copy that is thrown away."""
    norm = nn.BatchNorm1d(1)
    module = Validates(norm, lin(1), loss=mean_square, optimizer=sgd(0.0))
    trainer = fit(module, [col(0, 4, 0, 4)], way)
    statistics = [0.2, 1.4333333, 1]
    assert [buffer.item() for buffer in norm.buffers()] == near(statistics)
    trainer.validate(module, loader([col(0, 4, 0, 4)]), verbose=False)
    assert [buffer.item() for buffer in norm.buffers()] == near(statistics)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: dropout(x, 0.5, training=True),
    "noise": lambda x: x * (1 + torch.randn_like(x)),
    "noise in place": lambda x: x * torch.empty_like(x).uniform_(),
    "a permutation": lambda x: x * torch.stack([torch.randperm(x.shape[1]) for _ in x]),
    "Python's numbers": lambda x: x * torch.tensor([[random.random()] for _ in x]),
    "NumPy's numbers": lambda x: x * torch.from_numpy(numpy.random.rand(*x.shape)).float(),
}


class Draws(nn.Module):
    """A layer whose output is linear in its weight, with random factors."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1000))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x * self.w)


class KeepsOutputs(Net):
    """A random layer under a loss linear in its weight; keeps the layer's outputs and gradients."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(Draws(draw), optimizer=sgd(0.0))
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.net(batch)
        self.outputs.append(output.detach().clone())
        return output.sum()

    def on_after_backward(self) -> None:
        self.gradients.append(self.net[0].w.grad.clone())


def run_draws(way: Way, draw: Callable[[Tensor], Tensor]) -> tuple[KeepsOutputs, list[float]]:
    L.seed_everything(1, verbose=False)
    module, losses = KeepsOutputs(draw), AtBatchEnd()
    fit(module, [torch.ones(4, 1000)] * 3, way, callbacks=[losses], strategy={"loss_weight": "sum"})
    return module, losses.seen


@pytest.mark.parametrize("draw", DRAWS)
@in_few_ways
def test_the_recompute_draws_the_same_numbers(way: Way, draw: str) -> None:
    """Gradients of other masks than those of the loss; masks repeated from one microbatch or batch to the next."""
    module, losses = run_draws(way, DRAWS[draw])
    assert losses == pytest.approx([gradient.sum().item() for gradient in module.gradients], rel=1e-4)
    assert len(torch.cat(module.outputs).unique(dim=0)) == 12
    _, again = run_draws(way, DRAWS[draw])
    assert again == losses


class CountsRowsInBuffers(nn.Module):
    """Sums up its inputs in two buffers: one changed in place, one assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("a", torch.tensor(0.0))
        self.register_buffer("b", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.a += x.sum()
        self.b = self.b + x.sum()
        return self.w * x


@pytest.mark.parametrize("layers_after", [0, 2])
@in_every_way
def test_buffers_written_in_forward_are_written_once(way: Way, layers_after: int) -> None:
    """Buffers lost with a device's copy, or written again by the recompute."""
    layer = CountsRowsInBuffers()
    module = Net(layer, *(lin(1) for _ in range(layers_after)), optimizer=sgd(0.0))
    fit(module, [col(1, 1, 1, 1)] * 3, way)
    assert [layer.a.item(), layer.b.item()] == near([12.0, 12.0])
    state = module.state_dict()
    assert [state["net.0.a"].item(), state["net.0.b"].item()] == near([12.0, 12.0])


def run_spectral_norm(way: Way) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Net(
        nn.utils.spectral_norm(nn.Linear(4, 4)),
        nn.Linear(4, 1),
        loss=mean_square,
        optimizer=sgd(0.1),
    )
    before = module.state_dict()["net.0.weight_u"].clone()
    fit(module, [torch.randn(4, 4) for _ in range(3)], way)
    after = module.state_dict()
    assert not torch.equal(after["net.0.weight_u"], before)
    return after


@in_every_pipeline
def test_spectral_norm_iterates_once_a_batch(way: Way) -> None:
    """The power iteration of a spectral norm lost, or run again by the recompute."""
    state = run_spectral_norm(way)
    assert all(value.isfinite().all() for value in state.values())
    if way.microbatches == 1:
        torch.testing.assert_close(state, run_spectral_norm(PLAIN), rtol=1e-5, atol=1e-6)


@in_every_way
def test_an_activation_in_place_after_a_layer(way: Way) -> None:
    """A layer's saved output overwritten by the next layer."""
    module = Net(lin(1), nn.ReLU(inplace=True))
    fit(module, [X], way)
    assert weights(module) == near([-2.0])


def run_conv(way: Way) -> list[Tensor]:
    gradients: list[Tensor] = []

    class Conv(Net):
        def on_after_backward(self) -> None:
            gradients.extend(parameter.grad.clone() for parameter in self.parameters())

    torch.manual_seed(0)
    block = nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.ReLU(inplace=True))
    ramp = torch.tensor([1.0, 2.0, 3.0])
    module = Conv(nn.Conv1d(1, 2, 1), block, loss=lambda module, batch: (module.net(batch) * ramp).pow(2).mean())
    fit(module, [torch.tensor([[[1.0, 2.0, 4.0]], [[0.0, 1.0, 5.0]]])], way)
    return gradients


@in_few_pipelines
def test_an_activation_in_place_inside_a_layer(way: Way) -> None:
    """Gradients silently missing behind a layer that changes its own values in place."""
    gradients = run_conv(way)
    assert len(gradients) == 4
    torch.testing.assert_close(gradients, run_conv(PLAIN), rtol=1e-5, atol=1e-5)


def changes_its_input(module: Net, batch: Tensor) -> Tensor:
    x = batch.clone()
    h = module.net(x)
    x.add_(1)
    return h.mean()


@pytest.mark.parametrize("batches", [1, 3])
@in_every_way
def test_an_input_changed_after_the_layer_ran(way: Way, batches: int) -> None:
    """The recompute runs on the changed input: a wrong gradient instead of autograd's error or the right one."""
    module = Net(lin(1), loss=changes_its_input)
    try:
        fit(module, [X] * batches, way)
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error) or "in place" in str(error)
        assert weights(module) == [1.0]
    else:
        assert not way.plain
        assert weights(module) == near([1.0 - 3.0 * batches])


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.a = nn.Parameter(torch.tensor(1.0))
        self.b = nn.Parameter(torch.tensor(0.0))

    def forward(self, h: Tensor) -> Tensor:
        return self.w * h + self.b * (self.a * h)


class TrainsSome(Net):
    """Optimizes the parameters that are not frozen."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@in_every_way
def test_an_adapter_on_frozen_layers_is_trained(way: Way, momentum: float) -> None:
    """The recompute skipped because no input of the layer needs a gradient; gradients made for frozen weights."""
    module = TrainsSome(lin(2).requires_grad_(False), Adapter())
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    trainer = fit(module, [X], way)
    (frozen, adapter) = module.net
    assert [adapter.a.item(), adapter.b.item()] == near([1.0, -0.6])
    assert [frozen.weight.item(), adapter.w.item()] == [2.0, 3.0]
    assert frozen.weight.grad is None
    assert adapter.w.grad is None
    assert set(trainer.optimizers[0].state) <= {adapter.a, adapter.b}


class UnfreezesFirstLayer(BaseFinetuning):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(weights(pl_module))


@in_every_way
def test_a_layer_unfrozen_during_the_training(way: Way) -> None:
    """A layer that was frozen at the start stays so, whatever is added to the optimizer later."""
    module, finetuning = TrainsSome(lin(2), lin(1), optimizer=sgd(0.1)), UnfreezesFirstLayer()
    fit(module, [X], way, max_epochs=3, callbacks=[finetuning])
    assert finetuning.seen == [near([2.0, 0.4]), near([1.88, -0.2]), near([1.94, -0.764])]


@in_few_ways
def test_a_layer_frozen_from_the_start_keeps_no_gradient(way: Way) -> None:
    """A gradient of zeros, and with it weight decay, for a layer that is frozen."""
    module = TrainsSome(lin(2).requires_grad_(False), lin(1))
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)
    fit(module, [X], way)
    assert weights(module) == near([2.0, 0.35])
    assert module.net[0].weight.grad is None
