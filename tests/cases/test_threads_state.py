"""Autocast, grad mode, train mode and the loss scale are the user's own in every pass."""

from __future__ import annotations

from typing import NamedTuple

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from .common import FEW, PLAIN, STALE, AtBatchEnd, Net, SlowSGD, Way, X, col, fit, in_every_way, lin, near, sgd, weights


class Pass(NamedTuple):
    """What a layer sees around it in one forward pass."""

    autocast: bool
    dtype: torch.dtype
    inside: torch.dtype
    outside: torch.dtype
    grad: bool
    inference: bool
    training: bool


class Mixed(nn.Module):
    """Computes once under autocast and once without, and notes what it saw."""

    def __init__(self, passes: list[Pass]) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.note = passes.append

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        with torch.autocast("cpu", enabled=False):
            z = self.f(x.float())
        self.note(
            Pass(
                autocast=torch.is_autocast_enabled("cpu"),
                dtype=torch.get_autocast_dtype("cpu"),
                inside=y.dtype,
                outside=z.dtype,
                grad=torch.is_grad_enabled(),
                inference=torch.is_inference_mode_enabled(),
                training=self.training,
            )
        )
        return z.square()  # which has the recompute come as far as here


class Validates(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)


@pytest.mark.parametrize("schedule", ["roundpipe", "gpipe"])  # the latter computes every call again
@in_every_way
def test_autocast_grad_mode_and_train_mode_in_every_pass(way: Way, schedule: str) -> None:
    """A pass in a thread that does not know of autocast, or a recompute that sees other modes than the first pass."""
    noted: list[list[Pass]] = [[], [], []]
    module = Validates(*map(Mixed, noted))
    module.first, module.second, module.third = noted  # what an extra run notes is undone
    batch = torch.ones(4, 4)
    strategy = {"schedule": schedule}
    fit(module, [batch] * 3, way, val=[batch], strategy=strategy, num_sanity_val_steps=0, precision="bf16-mixed")
    mixed = {"autocast": True, "dtype": torch.bfloat16, "inside": torch.bfloat16, "outside": torch.float32}
    for passes in noted:
        training = [seen for seen in passes if seen.training]
        validating = [seen for seen in passes if not seen.training]
        assert set(training) == {Pass(**mixed, grad=True, inference=False, training=True)}
        calls = 3 * way.microbatches
        assert len(training) == 2 * calls if schedule == "gpipe" and not way.plain else len(training) >= calls
        assert validating
        assert {seen._replace(inference=True) for seen in validating} == {
            Pass(**mixed, grad=False, inference=True, training=False)
        }


class Overflows(Net):
    """The first batch's loss is infinite; the learning rate halves with every step."""

    make_optimizer: type[torch.optim.SGD] = torch.optim.SGD

    def __init__(self) -> None:
        super().__init__(lin(0))
        self.gradients: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).mean()
        return loss * torch.inf if batch_idx == 0 else loss

    def configure_optimizers(self) -> dict:
        optimizer = self.make_optimizer(self.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(self.net[0].weight.grad.item())


class OverflowsUnseen(Overflows):
    """The same, with no hook that looks at the gradients."""

    on_before_optimizer_step = L.LightningModule.on_before_optimizer_step


class OverflowsSlowly(OverflowsUnseen):
    """The same, with slow steps."""

    make_optimizer = SlowSGD


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unseen"])
@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (None, [(0.0, 512.0, 1), (-2.0, 512.0, 2), (-3.0, 512.0, 3)]),
        (1.0, [(0.0, 512.0, 1), (-0.5, 512.0, 2), (-0.75, 512.0, 3)]),
    ],
    ids=["unclipped", "clipped"],
)
@in_every_way
def test_a_step_skipped_by_loss_scaling(way: Way, clip: float | None, expected: list, watched: bool) -> None:
    """Unscaled with another batch's scale, clipped while still scaled, or stepped with infinite gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module = Overflows() if watched else OverflowsUnseen()
    seen = AtBatchEnd(lambda module, _: (*weights(module), scaler.get_scale(), module.scheduler.last_epoch))
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    callbacks = [seen] if watched else []
    fit(module, [col(4, 4)] * 3, way, callbacks=callbacks, plugins=[plugin], gradient_clip_val=clip)
    assert seen.seen == ([near(row) for row in expected] if watched else [])
    assert module.gradients == (near([torch.inf, 4.0, 4.0]) if watched else [])
    assert (*weights(module), scaler.get_scale(), module.scheduler.last_epoch) == near(expected[-1])


@pytest.mark.parametrize("way", [PLAIN, *FEW, *STALE], ids=str)
def test_the_scale_waits_for_a_slow_step(way: Way) -> None:
    """The next batch's loss scaled before the step in the background has changed the scale, as each step does here."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    module = OverflowsSlowly()
    fit(module, [col(4, 4)] * 3, way, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert (*weights(module), scaler.get_scale(), module.scheduler.last_epoch) == near((-3.0, 2048.0, 3))


class Mixes(Net):
    """Mixes rows by NumPy's generator before the first layer, as mixup does."""

    def __init__(self) -> None:
        super().__init__(lin(1), lin(2), optimizer=sgd(0.01))
        self.shares: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        share = float(numpy.random.beta(2, 2))
        self.shares.append(share)
        return super().training_step(share * batch + (1 - share) * batch.flip(0), batch_idx)


def test_numbers_drawn_by_numpy_before_the_first_layer() -> None:
    """Refused, drawn again in every batch, or dependent on the devices."""
    runs = []
    for devices in (1, 2, 3):
        torch.manual_seed(3)
        numpy.random.seed(3)
        module = Mixes()
        fit(module, [X] * 4, Way(2, devices))
        runs.append((module.shares, weights(module)))
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0][0])) == 8
