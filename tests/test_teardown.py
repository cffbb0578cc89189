"""After a fit nothing of it is in devices' memory, whatever the user's program goes on to hold: the trainer, the
module, and what the step has left on it.
"""

import gc
from typing import Any

import helpers
import lightning as L
import pytest
import test_attributes as attributes
import test_habits as habits
import torch
from helpers import RoundPipeStrategy, fit
from test_exactness import MODELS, data, make
from test_habits import WIDTH, Habit, in_double_precision, linear
from torch import Tensor, nn

from lightning_roundpipe.devices import SimulatedDevice
from lightning_roundpipe.pipeline.tape import Call

__all__ = ["in_double_precision"]


class Leaves(nn.Module):
    """Leaves tensors with gradients on itself, of which the loss does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        self.auxiliary = x.square().mean()
        self.pair = x, [x * 2]
        return x


class LeavesGraphs(Habit):
    """And so does the code between layers."""

    def __init__(self) -> None:
        super().__init__(Leaves)
        self.register_buffer("weight", torch.ones(WIDTH))

    def output(self, x: Tensor) -> Tensor:
        h = self.net(x)
        self.last = h * h
        self.state = h, h.detach() * 2
        self.notes = {"deep": [(h * self.weight,)]}
        self.plain = h.detach() + 1
        return h


class LeavesWhatWasUsed(LeavesGraphs):
    def output(self, x: Tensor) -> Tensor:
        h = super().output(x)
        return h + self.last + sum(layer.auxiliary for layer in self.net)


def train(module: L.LightningModule, batches: Any, m: int = 3, **options: Any) -> tuple[L.Trainer, list[int]]:
    """Returns the trainer, and what the devices hold at the end, after one garbage collection."""
    hardware = [SimulatedDevice(index) for index in range(2)]
    trainer = fit(module, batches, RoundPipeStrategy(microbatches=m, split="step", devices=hardware), **options)
    gc.collect()
    return trainer, [device.memory.live for device in hardware]


@pytest.fixture(autouse=True)
def same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "SIMULATED", True)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    trainer, live = train(make(name, torch.float64), data(name, torch.float64))
    assert live == [0, 0] and trainer.lightning_module is not None


KINDS = [
    LeavesGraphs, LeavesWhatWasUsed, attributes.HistoryOfLosses, attributes.HookKeepsOutputs,
    attributes.OneListForAllLayers, attributes.QueueInABuffer, habits.MaskOnTheModule, habits.ListOfOutputs,
]  # fmt: skip


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_steps_leave_on_modules(kind: type[Habit], m: int) -> None:
    module = habits.make(kind)
    trainer, live = train(module, habits.data(), m)
    assert live == [0, 0]
    assert trainer.lightning_module is module


def test_their_values_stay_in_host_memory() -> None:
    module = habits.make(LeavesGraphs)
    train(module, habits.data())
    left = [module.last, *module.state, module.notes["deep"][0][0], module.plain]
    left += [tensor for layer in module.net for tensor in (layer.auxiliary, layer.pair[0], layer.pair[1][0])]
    assert all(type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.grad_fn is None for tensor in left)
    assert torch.equal(module.last, module.state[0] ** 2) and torch.equal(module.state[1], 2 * module.state[0])
    assert torch.equal(module.net[-1].auxiliary, module.state[0].square().mean())


class Counts(L.Callback):
    """How many more layer calls there are at the end of each batch than at first."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        gc.collect()
        self._before = calls_alive()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy._pipeline.wait_backward()
        gc.collect()
        self.calls.append(calls_alive() - self._before)


def calls_alive() -> int:
    return sum(type(item) is Call for item in gc.get_objects())


@pytest.mark.parametrize("kind", [LeavesGraphs, LeavesWhatWasUsed], ids=lambda kind: kind.__name__)
def test_a_step_leads_to_none_before_it(kind: type[Habit]) -> None:
    """A layer's attribute leads to its call, which knew the attributes before it, and so the call of the last step."""
    counts = Counts()
    fit(habits.make(kind), habits.data(12), RoundPipeStrategy(microbatches=2, split="step"), callbacks=[counts])
    of_a_step = 2 * 3
    assert len(counts.calls) == 12 and max(counts.calls) <= 3 * of_a_step, counts.calls
