"""Bytes moved between host memory and devices: as the stages of the schedule move them, and no more."""

from io import StringIO
from typing import Any

import lightning as L
import pytest
import torch
from helpers import fit_pipeline
from rich.console import Console
from torch import Tensor, nn

from lightning_roundpipe.devices import Traffic

WIDTH, SIZE, LAYERS = 8, 12, 6
INPUT = 4 * WIDTH * SIZE
"""Bytes of one layer's inputs, over all microbatches."""
WEIGHT = 4 * WIDTH * WIDTH


class Chain(L.LightningModule):
    """Keeps, for each batch, its plan and what all devices together have moved by its end."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.net[:frozen].requires_grad_(False)
        self.moved: list[Traffic] = []
        self.plans: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        self.moved.append(added(*(row.traffic for row in strategy.report().devices)))
        self.plans.append(strategy._pipeline.batch.plan)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


FIELDS = ("parameters_up", "activations_up", "gradients_down", "activations_down", "across")


def added(*parts: Traffic) -> Traffic:
    return Traffic(*(sum(getattr(part, name) for part in parts) for name in FIELDS))


def between(before: Traffic, after: Traffic) -> Traffic:
    return Traffic(*(getattr(after, name) - getattr(before, name) for name in FIELDS))


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_once_a_stage(m: int, devices: int, frozen: int) -> None:
    """Parameters and gradients travel once for all microbatches. The fused stage uploads once for both of its ways and
    keeps no input; frozen layers at the beginning have nothing to recompute, and no gradient comes down.
    """
    module = Chain(frozen)
    fit_pipeline(module, [torch.randn(SIZE, WIDTH)] * 4, m, devices)
    trained = range(frozen, LAYERS)
    for before, after, plan in zip(module.moved, module.moved[1:], module.plans[1:], strict=False):
        stages = len(plan.partition.forward)
        fused = plan.partition.backward[0]
        recomputed = [layer for layer in trained if layer not in fused]
        assert between(before, after) == Traffic(
            parameters_up=WEIGHT * (LAYERS + len(recomputed)),
            activations_up=INPUT * (stages + 1 + len(recomputed)),
            gradients_down=WEIGHT * len(trained),
            activations_down=INPUT * (len(recomputed) + len(set(stage_beginnings(plan)) - set(recomputed))),
        )


def stage_beginnings(plan: Any) -> list[int]:
    return [range_.start for range_ in (*plan.partition.forward, plan.partition.backward[0])]


@pytest.mark.parametrize("m", [1, 3])
def test_the_first_batch_moves_everything_for_each_microbatch(m: int) -> None:
    module = Chain()
    fit_pipeline(module, [torch.randn(SIZE, WIDTH)], m)
    assert module.moved == [
        Traffic(
            parameters_up=2 * m * LAYERS * WEIGHT,
            activations_up=INPUT * (1 + LAYERS),
            gradients_down=m * LAYERS * WEIGHT,
            activations_down=INPUT * LAYERS,
        )
    ]


def test_the_report_shows_it() -> None:
    trainer = fit_pipeline(Chain(), [torch.randn(SIZE, WIDTH)] * 2, 2, 2)
    report = trainer.strategy.report()
    text = StringIO()
    Console(file=text, width=200).print(report.table())
    assert "MB up" in text.getvalue() and "MB down" in text.getvalue()
    moved = added(*(row.traffic for row in report.devices))
    assert moved.up == moved.parameters_up + moved.activations_up > 0
    assert moved.down == moved.gradients_down + moved.activations_down > 0
