"""LoRA with peft: only the adapters have gradients, optimizer state, and memory for them."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Batches, RoundPipeStrategy, default_dtype, fit_pipeline, split, trainer_for
from models import SGD, HuggingFace, Lit, batches_of, causal
from torch import Tensor, nn

from zoo.entry import network
from zoo.handwritten import LLAMA
from zoo.test_zoo import DEVICES, MICROBATCHES, TOLERANCE, largest_error, optimizer_state

KINDS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all linear layers": {"target_modules": "all-linear"},
    "a head trained in full": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
BATCHES = [batches_of(causal, 1, 8, seed=seed)[0] for seed in range(3)]


def adapted(kind: str, only_trainable: bool = False) -> Lit:
    """As `peft` makes it, but for adapters that start at random: at zero, half of them would have no gradient."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, task_type="CAUSAL_LM", **KINDS[kind])
    net = peft.get_peft_model(network("LlamaForCausalLM", **LLAMA), config)
    groups = (lambda model: list(trained(model).values())) if only_trainable else None
    return HuggingFace(net, optimizer=SGD, groups=groups).double()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def gradients_of_plain_autograd(model: Lit) -> Iterator[dict[str, Tensor]]:
    """One step after the other."""
    optimizer = model.configure_optimizers()
    model.train()
    for batch in BATCHES:
        optimizer.zero_grad()
        for part in split(batch, MICROBATCHES):
            with default_dtype(torch.float64):
                loss = model.loss(part)
            (loss / MICROBATCHES).backward()
        yield {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()


class ReadGradients(L.Callback):
    """Notes `.grad` before each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})


class ReadGradientStore(L.Callback):
    """Notes at the end the memory for gradients that the pipeline keeps from step to step."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, RoundPipeStrategy) and strategy.steps_in_background
        strategy.settle()
        free = strategy._pipeline.gradients.memory._free
        self.shapes = [shape for (shape, _, _), tensors in free.items() for _ in tensors]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_plain_autograd(kind: str) -> None:
    plain, ours = adapted(kind), adapted(kind)
    expected = list(gradients_of_plain_autograd(plain))
    assert all(gradients.keys() == trained(plain).keys() for gradients in expected)
    assert all(float(gradient.abs().max()) > 0 for gradients in expected for gradient in gradients.values())

    read = ReadGradients()
    fit_pipeline(ours, BATCHES, MICROBATCHES, DEVICES, run={"precision": "64-true", "callbacks": [read]})
    assert len(read.gradients) == len(expected)
    for found, gradients in zip(read.gradients, expected, strict=True):
        assert largest_error(found, gradients) <= TOLERANCE
    assert largest_error(dict(ours.named_parameters()), dict(plain.named_parameters())) <= TOLERANCE


@pytest.mark.parametrize("only_trainable", [False, True], ids=["all parameters", "adapters only"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_cost_nothing(kind: str, only_trainable: bool) -> None:
    """Neither gradient nor optimizer state, and no memory for gradients, whether the optimizer knows of them or not."""
    start, ours = adapted(kind), adapted(kind, only_trainable)
    store = ReadGradientStore()
    trainer = fit_pipeline(ours, BATCHES, MICROBATCHES, DEVICES, run={"precision": "64-true", "callbacks": [store]})

    adapters = trained(ours).keys()
    assert len(adapters) > 0 and len(frozen(ours)) > 0
    assert all(torch.equal(p, frozen(start)[name]) for name, p in frozen(ours).items())
    assert all(not torch.equal(p, trained(start)[name]) for name, p in trained(ours).items())
    assert all(p.grad is None for p in frozen(ours).values())
    states = optimizer_state(ours, trainer.optimizers[0])
    assert {name.partition(": ")[0] for name in states} == set(adapters)
    assert sorted(store.shapes) == sorted(p.shape for p in trained(ours).values())


class Traffics(L.Callback):
    """Notes after each batch what all devices together have moved so far, and the stages of its layers."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, int]] = []
        self.stages: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, RoundPipeStrategy)
        report = trainer.strategy.report()
        traffics = [row.traffic for row in report.devices]
        self.moved.append((sum(t.gradients_down for t in traffics), sum(t.parameters_up for t in traffics)))
        self.stages.append({row.name: len(row.backward_stage) for row in report.layers})


@pytest.mark.parametrize("kind", KINDS)
def test_only_gradients_of_adapters_come_down(kind: str) -> None:
    """Once a stage, for all microbatches together; the frozen weights go up, and nothing of them comes back."""
    ours, traffics = adapted(kind), Traffics()
    fit_pipeline(ours, BATCHES, MICROBATCHES, DEVICES, run={"precision": "64-true", "callbacks": [traffics]})
    adapters = sum(p.nbytes for p in trained(ours).values())
    weights = adapters + sum(p.nbytes for p in frozen(ours).values())
    assert adapters < weights / 2
    assert all(count == 1 for stages in traffics.stages for count in stages.values())
    for (down, up), (down_after, up_after) in zip(traffics.moved, traffics.moved[1:], strict=False):
        assert down_after - down == adapters
        assert weights <= up_after - up <= 2 * weights
    assert traffics.moved[0][0] == MICROBATCHES * adapters  # one after the other: each of them brings its own


def test_a_checkpoint_of_adapters_loads_with_peft() -> None:
    """The module is as it was: peft saves what was trained, and a fresh model with it computes the same."""
    import peft

    ours, fresh = adapted("attention"), adapted("attention")
    fit_pipeline(ours, BATCHES, MICROBATCHES, DEVICES, run={"precision": "64-true"})
    state = peft.get_peft_model_state_dict(ours.net)
    assert len(state) == len(trained(ours))
    peft.set_peft_model_state_dict(fresh.net, state)
    losses = [
        trainer_for(precision="64-true").test(model, Batches(BATCHES), verbose=False)[0]["test_loss"]
        for model in (ours, fresh)
    ]
    assert losses[0] == losses[1]
