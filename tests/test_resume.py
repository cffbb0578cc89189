"""Four batches, stop, four more equal eight in one go: weights, optimizer, scheduler, scaler, and random numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import RoundPipeStrategy, Watch, assert_alike, assert_equal, differs, fit, result, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from models import MLP, Lit, batches_of, vectors
from torch import Tensor

BATCHES = batches_of(vectors, 8, 6)
MID_EPOCH = [(BATCHES, 1)]  # one epoch of eight
TWO_EPOCHS = [(BATCHES[:4], 2)]  # two epochs of four


class Noisy(MLP):
    """Dropout in layers and between them, and noise drawn in training_step."""

    def loss(self, batch: Any) -> Tensor:
        noise = 0.1 * torch.randn_like(batch["x"])
        return super().loss({"x": batch["x"] + noise, "y": batch["y"]})


def one_cycle(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9), "interval": "step"}


def make(kind: type[Lit] = Noisy, dropout: float = 0.3) -> Lit:
    torch.manual_seed(7)
    return kind(dropout=dropout, optimizer=partial(torch.optim.AdamW, lr=0.05), scheduler=one_cycle).double()


def scaler_plugin() -> list[MixedPrecision]:
    """A scale that grows at every second step, so that it differs between the start and the stop."""
    return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2))]


def checkpoint_after_four(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1, save_on_train_epoch_end=False)


def run(
    model: Lit,
    batches: list,
    folder: Path,
    strategy: Any,
    devices: int,
    resume: bool,
    seed: int,
    plugins: Any = None,
    **options: Any,
) -> L.Trainer:
    return fit(
        model,
        batches,
        strategy(),
        devices=devices,
        seed=seed,
        plugins=plugins() if plugins else None,
        callbacks=[checkpoint_after_four(folder), Watch()],
        enable_checkpointing=True,
        ckpt_path=str(folder / "step=4.ckpt") if resume else None,
        **options,
    )


def made(trainer: L.Trainer) -> dict[str, Any]:
    precision = trainer.precision_plugin.state_dict()
    return {key: value for key, value in result(trainer).items() if key != "losses"} | {"precision": precision}


def later_losses(trainer: L.Trainer) -> list[Tensor]:
    watch = next(callback for callback in trainer.callbacks if isinstance(callback, Watch))
    return watch.losses[-4:]


def stop_and_resume(
    folder: Path, strategy: Any, devices: int, batches: list, epochs: int, **options: Any
) -> tuple[dict, dict]:
    """The results of the first four batches and of all eight. Checks that the last four, alone, end where all eight
    end.

    They start in a new trainer with other weights and another seed, once from a checkpoint written while the run went
    on, once from that of a run which really stopped there.
    """
    straight = run(make(), batches, folder, strategy, devices, False, seed=3, max_epochs=epochs, **options)
    expected = made(straight) | {"later losses": later_losses(straight)}
    stopped = run(
        make(), batches, folder / "stopped", strategy, devices, False, seed=3, max_epochs=epochs, max_steps=4, **options
    )
    if epochs > 1:  # where an epoch has ended, what the user saves after `fit` does as well
        stopped.save_checkpoint(folder / "stopped" / "step=4.ckpt")
    for place in (folder, folder / "stopped"):
        fresh = make()
        with torch.no_grad():
            for p in fresh.parameters():
                p.add_(1)
        resumed = run(fresh, batches, place, strategy, devices, True, seed=99, max_epochs=epochs, **options)
        watch = next(callback for callback in resumed.callbacks if isinstance(callback, Watch))
        assert len(watch.losses) == 4
        assert_equal(made(resumed) | {"later losses": watch.losses}, expected, f"resumed from {place.name}")
    return made(stopped), expected


@pytest.mark.parametrize(("batches", "epochs"), MID_EPOCH + TWO_EPOCHS, ids=["mid-epoch", "end of epoch"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [1, 2])
def test_resume(tmp_path: Path, batches: list, epochs: int, staleness: int, devices: int) -> None:
    strategy = partial(RoundPipeStrategy, microbatches=2, staleness=staleness)
    stopped, straight = stop_and_resume(tmp_path, strategy, devices, batches, epochs)
    assert straight["step"] == 8 and stopped["step"] == 4 and differs(stopped["weights"], straight["weights"])


@pytest.mark.parametrize(("batches", "epochs"), MID_EPOCH + TWO_EPOCHS, ids=["mid-epoch", "end of epoch"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_resume_with_scaler(tmp_path: Path, batches: list, epochs: int, staleness: int) -> None:
    strategy = partial(RoundPipeStrategy, microbatches=2, staleness=staleness)
    stopped, straight = stop_and_resume(tmp_path, strategy, 2, batches, epochs, plugins=scaler_plugin)
    assert straight["precision"]["scale"] > stopped["precision"]["scale"] > 256


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_with_other_devices(tmp_path: Path, accumulate: int) -> None:
    """What a run computes does not depend on the number of devices, before or after the stop."""
    strategy = partial(RoundPipeStrategy, microbatches=2)
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    batches = BATCHES[:4] if accumulate == 1 else BATCHES
    straight = run(make(), batches, tmp_path, strategy, 1, False, seed=3, **options)
    resumed = run(make(), batches, tmp_path, strategy, 3, True, seed=99, **options)
    assert straight.global_step == 8
    assert_equal(made(resumed), made(straight))


@pytest.mark.parametrize(("batches", "epochs"), MID_EPOCH + TWO_EPOCHS, ids=["mid-epoch", "end of epoch"])
@pytest.mark.parametrize("first", ["ours", "plain"])
@pytest.mark.parametrize("second", ["ours", "plain"])
def test_every_pairing_with_plain_lightning(
    tmp_path: Path, first: str, second: str, batches: list, epochs: int
) -> None:
    """A checkpoint of ours goes on in plain Lightning and the other way round. Without noise, which plain Lightning
    does not save.
    """
    kinds = {"ours": (partial(RoundPipeStrategy, microbatches=2), 2), "plain": (lambda: "auto", 1)}
    still = partial(make, MLP, 0.0)
    straight = run(still(), batches, tmp_path / "all", *kinds["plain"], False, seed=3, max_epochs=epochs)
    run(still(), batches, tmp_path, *kinds[first], False, seed=3, max_epochs=epochs, max_steps=4)
    fresh = still()
    with torch.no_grad():
        for p in fresh.parameters():
            p.add_(1)
    resumed = run(fresh, batches, tmp_path, *kinds[second], True, seed=3, max_epochs=epochs)
    assert straight.global_step == 8 and len(later_losses(resumed)) == 4
    assert_alike(made(resumed), made(straight))
    if first == second == "plain":
        assert_equal(made(resumed), made(straight))


def test_a_checkpoint_of_a_stale_run_goes_on_without_staleness(tmp_path: Path) -> None:
    """Its weights are the newest ones: everything that plain Lightning needs to go on."""
    still = partial(make, MLP, 0.0)
    stale = run(
        still(), BATCHES, tmp_path, partial(RoundPipeStrategy, microbatches=2, staleness=1), 2, False, 3, max_steps=4
    )
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=False)
    assert_equal(saved["state_dict"], weights(stale.lightning_module))
    plain = run(still(), BATCHES, tmp_path, lambda: "auto", 1, True, 3)
    ours = run(still(), BATCHES, tmp_path, partial(RoundPipeStrategy, microbatches=2), 2, True, 3)
    assert_alike(made(ours), made(plain))
