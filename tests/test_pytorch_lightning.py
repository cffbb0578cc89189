"""The same training with `lightning.pytorch` and `pytorch_lightning`: two packages with classes of their own."""

import csv
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from helpers import Batches, assert_equal, result, weights
from lightning_fabric.utilities import registry
from torch import Tensor, nn
from torchmetrics import MeanMetric

import lightning_roundpipe
import lightning_roundpipe.pytorch_lightning

registry.entry_points = cache(registry.entry_points)  # as in conftest.py for the other package
PACKAGES = {lightning.pytorch: lightning_roundpipe, pytorch_lightning: lightning_roundpipe.pytorch_lightning}


def module_of(pl: ModuleType, **options: Any) -> Any:
    class Net(pl.LightningModule):
        def __init__(self, manual: bool = False) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)))
            self.mean = MeanMetric()
            self.validated: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = F.mse_loss(self.net(batch), batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.mean(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return {"loss": loss}

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            loss = F.mse_loss(self.net(batch), batch)
            self.validated.append(loss)
            self.log("val_loss", loss)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    torch.manual_seed(0)
    return Net(**options)


def data(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 6) for _ in range(count)]


def trained(
    pl: ModuleType,
    strategy: Any,
    *,
    folder: Path | None = None,
    devices: int = 2,
    ckpt_path: str | None = None,
    module: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 1}
    kept = {
        "logger": pl.loggers.CSVLogger(folder, name="", version="") if folder else False,
        "enable_checkpointing": folder is not None,
        "callbacks": [pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else None,
    }
    defaults: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1, "gradient_clip_val": 0.5}
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, **{**defaults, **quiet, **kept, **options}
    )
    pl.seed_everything(5, verbose=False)
    trainer.fit(module_of(pl, **(module or {})), Batches(data()), Batches(data(2)), ckpt_path=ckpt_path)
    return trainer


def both(**options: Any) -> tuple[Any, Any]:
    arguments = options.pop("arguments", {})
    found = [trained(pl, ours.RoundPipeStrategy(**arguments), **options) for pl, ours in PACKAGES.items()]
    for trainer, (pl, ours) in zip(found, PACKAGES.items(), strict=True):
        assert isinstance(trainer.strategy, pl.strategies.Strategy) and isinstance(
            trainer.lightning_module, pl.LightningModule
        )
        assert isinstance(trainer.strategy, ours.RoundPipeStrategy)
    assert_equal(result(found[1]), result(found[0]))
    assert_equal(found[1].lightning_module.validated, found[0].lightning_module.validated)
    assert_equal(found[1].callback_metrics, found[0].callback_metrics)
    return found[0], found[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arguments": {"staleness": 1}},
        {"arguments": {"split": "model"}},
        {"arguments": {"background_step": False}},
        {"precision": "bf16-mixed"},
        {"precision": "64-true", "devices": 3},
        {"accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_the_same_training(options: dict[str, Any]) -> None:
    ours, theirs = both(**options)
    assert ours.strategy.report().microbatches == theirs.strategy.report().microbatches > 1
    assert len(ours.lightning_module.validated) == 5


@pytest.mark.parametrize("pl", PACKAGES, ids=lambda pl: pl.__name__)
def test_equals_no_pipeline(pl: ModuleType) -> None:
    """Both packages' own strategy, on the same whole batches."""
    ours = trained(pl, PACKAGES[pl].RoundPipeStrategy(microbatches=1))
    assert_equal(result(ours), result(trained(pl, "auto", devices=1)))


def test_names_are_registered_with_both() -> None:
    for name, staleness in {"roundpipe": 0, "roundpipe_async": 1}.items():
        first, second = (trained(pl, name) for pl in PACKAGES)
        assert_equal(weights(second.lightning_module), weights(first.lightning_module))
        assert first.strategy.staleness == second.strategy.staleness == staleness
        assert second.strategy.report().batches == 6


def test_manual_optimization() -> None:
    both(module={"manual": True}, gradient_clip_val=None)


def logged(file: Path) -> list[dict[str, str]]:
    """What the module has logged, without the measurements of the pipeline's monitor, which are there, too."""
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert any(row["roundpipe/bubble"] for row in rows)
    return [
        {name: text for name, text in row.items() if not name.startswith("roundpipe/")}
        for row in rows
        if not row["roundpipe/bubble"]
    ]


def test_logs_and_checkpoints(tmp_path: Path) -> None:
    """What is logged and saved is the same, and a run that is resumed from either's checkpoint ends as the other's."""
    folders = {pl: tmp_path / pl.__name__ for pl in PACKAGES}
    whole = [trained(pl, "roundpipe_async", folder=folders[pl]) for pl in PACKAGES]
    first, second = (logged(folder / "metrics.csv") for folder in folders.values())
    assert first == second and {"loss_step", "loss_epoch", "mean", "val_loss"} <= first[0].keys()
    for pl, other in (PACKAGES, reversed(PACKAGES)):
        path = str(folders[other] / "epoch=0.ckpt")
        resumed = trained(pl, "roundpipe_async", ckpt_path=path)
        assert_equal(weights(resumed.lightning_module), weights(whole[0].lightning_module))
    assert_equal(result(whole[1]), result(whole[0]))


def test_callbacks_that_look() -> None:
    for pl, ours in PACKAGES.items():
        for make, looks in ((pl.callbacks.LearningRateMonitor, False), (pl.callbacks.EMAWeightAveraging, True)):
            strategy = ours.RoundPipeStrategy()
            noting = noting_of(pl)
            trained(pl, strategy, callbacks=[make(), noting], logger=pl.loggers.logger.DummyLogger())
            assert noting.in_background is not looks


def noting_of(pl: ModuleType) -> Any:
    class Noting(pl.callbacks.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.in_background = trainer.strategy.steps_in_background

    return Noting()


def test_verify() -> None:
    for pl, ours in PACKAGES.items():
        report = ours.verify(module_of(pl), data()[0], microbatches=3)
        assert report.ok, str(report)


def test_what_knows_no_lightning_is_shared() -> None:
    ours, theirs = PACKAGES.values()
    assert set(theirs.__all__) == set(ours.__all__)
    for name in ("RecomputeError", "UnsplittableBatchError", "Verification"):
        assert getattr(ours, name) is getattr(theirs, name)
    assert ours.RoundPipeStrategy is not theirs.RoundPipeStrategy


def test_only_who_asks_imports_it() -> None:
    """Which takes its time; and one package's classes are nowhere in the other's modules."""
    code = """
import sys
import lightning_roundpipe
assert not any(name.startswith(("pytorch_lightning", "lightning_fabric")) for name in sys.modules)
import lightning_roundpipe.pytorch_lightning
for name, module in list(sys.modules.items()):
    twin = name.startswith("lightning_roundpipe.pytorch_lightning.")
    wrong = ("lightning.pytorch", "lightning.fabric") if twin else ("pytorch_lightning", "lightning_fabric")
    if name.startswith("lightning_roundpipe") and name != "lightning_roundpipe.pytorch_lightning":
        for value in vars(module).values():
            assert not str(getattr(value, "__module__", "")).startswith(wrong), (name, value)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
