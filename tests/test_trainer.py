"""Lightning's own features, each compared with `strategy="auto"` on the same batches.

The losses are means over samples, so in fp64 the microbatches change nothing but the rounding.
"""

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import (
    Batches,
    RoundPipeStrategy,
    Validations,
    Watch,
    assert_alike,
    assert_equal,
    differs,
    fit,
    fit_pipeline,
    optimizer_states,
    result,
    trainer_for,
    weights,
)
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import GPT, MLP, SGD, Lit, batches_of, vectors
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

TRAIN = batches_of(vectors, 6, 8)
VAL = batches_of(vectors, 3, 8, seed=2)


def mlp(**options: Any) -> MLP:
    torch.manual_seed(7)
    return MLP(**options).double()


def both(
    make: Callable[[], Lit] = mlp,
    batches: Sequence[Any] = TRAIN,
    *,
    m: int = 2,
    devices: int = 2,
    callbacks: Callable[[], list[L.Callback]] = list,
    **run: Any,
) -> tuple[L.Trainer, L.Trainer]:
    """Train with ours and with plain Lightning; what training made must agree."""
    ours = fit(make(), batches, RoundPipeStrategy(microbatches=m), devices=devices, callbacks=callbacks(), **run)
    plain = fit(make(), batches, callbacks=callbacks(), **run)
    assert_same(ours, plain)
    assert differs(weights(plain.lightning_module), weights(make()))
    return ours, plain


def assert_same(ours: L.Trainer, plain: L.Trainer) -> None:
    made, expected = result(ours), result(plain)
    del made["losses"], expected["losses"]  # of microbatches here, of batches there
    assert_alike(made, expected)
    assert ours.current_epoch == plain.current_epoch
    assert_alike(metrics(ours), metrics(plain))


def metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def noted(trainer: L.Trainer, kind: type[L.Callback]) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


# --- the loops


def test_fit_with_validation_and_sanity_check() -> None:
    """Validation always sees the weights after the last finished step."""
    for every in (
        {},
        {"val_check_interval": 1},
        {"val_check_interval": 4, "max_epochs": 3},
        {"check_val_every_n_epoch": 2, "max_epochs": 4},
    ):
        ours, plain = both(val_batches=VAL, num_sanity_val_steps=2, callbacks=lambda: [Validations()], **every)
        seen, expected = noted(ours, Validations).metrics, noted(plain, Validations).metrics
        assert_alike(seen, expected)
        assert len(expected) >= 2 and differs(expected[-1], expected[0])


@pytest.mark.parametrize("strategy", ["roundpipe", "roundpipe_async"])
@pytest.mark.parametrize("trained", [False, True])
def test_validate_test_predict(trained: bool, strategy: str) -> None:
    found = []
    for name, devices in ((strategy, 3), ("auto", 1)):
        model, trainer = mlp(), trainer_for(name, devices=devices)
        if trained:
            # one step only: then staleness makes no difference to the weights
            trainer.fit(model, Batches(TRAIN[:1]))
        found.append(
            {
                "validate": trainer.validate(model, Batches(VAL), verbose=False),
                "test": trainer.test(model, Batches(VAL), verbose=False),
                "predict": trainer.predict(model, Batches(VAL)),
            }
        )
        assert not any(p.requires_grad for p in found[-1]["predict"])
        trainer.fit(model, Batches(TRAIN[:1]))  # and training goes on after it (max_epochs is reached if trained)
    assert len(found[1]["predict"]) == 3 and found[1]["predict"][0].shape == (8, 3)
    assert_alike(*found)


@pytest.mark.parametrize(
    "run",
    [
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.5},
        {"limit_train_batches": 4, "limit_val_batches": 1, "val_batches": VAL},
        {"limit_val_batches": 0, "val_batches": VAL},
        {"fast_dev_run": True, "val_batches": VAL},
        {"fast_dev_run": 3, "val_batches": VAL},
        {"overfit_batches": 2, "max_epochs": 3},
        {"max_steps": 4},
        {"max_steps": 9, "max_epochs": -1},
        {"max_epochs": 3},
        {"min_epochs": 2, "max_epochs": 5, "max_steps": 7},
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 4},
        {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
        {"detect_anomaly": True},
        {"deterministic": True},
        {"inference_mode": False, "val_batches": VAL},
    ],
    ids=str,
)
def test_options_of_the_trainer(run: dict) -> None:
    _, plain = both(**run)
    assert plain.global_step > 0


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


def test_should_stop() -> None:
    assert both(callbacks=lambda: [Stops()])[1].global_step == 3


def test_early_stopping() -> None:
    """A rate that is too large makes the validation loss rise."""
    make = partial(mlp, optimizer=partial(torch.optim.SGD, lr=3.0))
    ours, plain = both(make, val_batches=VAL, max_epochs=12, callbacks=lambda: [EarlyStopping("val_loss", patience=2)])
    assert plain.current_epoch < 12
    assert noted(ours, EarlyStopping).stopped_epoch == noted(plain, EarlyStopping).stopped_epoch


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bar(bar: type[L.Callback], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # tqdm's own thread never ends
    run = {"enable_progress_bar": True, "val_batches": VAL, "max_epochs": 2, "num_sanity_val_steps": 1}
    both(callbacks=lambda: [bar()], **run)
    assert "6/6" in capsys.readouterr().out


# --- schedulers


def step_lr(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}


def every_second_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "step", "frequency": 2}


def plateau(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    return {"scheduler": scheduler, "monitor": "val_loss"}


def momentum_too(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=2), "interval": "step"}


@pytest.mark.parametrize("scheduler", [step_lr, every_second_step, plateau, momentum_too])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedulers(scheduler: Callable, accumulate: int) -> None:
    make = partial(mlp, scheduler=scheduler, optimizer=partial(SGD, lr=2.0))
    run = {"val_batches": VAL, "max_epochs": 4, "accumulate_grad_batches": accumulate}
    ours, plain = both(make, callbacks=lambda: [Watch()], **run)
    rates = noted(plain, Watch).rates
    assert_alike(noted(ours, Watch).rates, rates)
    assert len({tuple(rate) for rate in rates}) > 1


# --- checkpoints


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_model_checkpoint(tmp_path: Path, monitor: str | None) -> None:
    """The same files with the same contents; `test(ckpt_path="best")` and `load_from_checkpoint` use them."""
    found = []
    for name, strategy, devices in (("ours", RoundPipeStrategy(microbatches=2), 2), ("plain", "auto", 1)):
        saver = ModelCheckpoint(tmp_path / name, "{epoch}-{step}", monitor=monitor, save_top_k=-1, save_last=True)
        trainer = fit(
            mlp(),
            TRAIN,
            strategy,
            devices=devices,
            val_batches=VAL,
            max_epochs=3,
            callbacks=[saver],
            enable_checkpointing=True,
        )
        files = {path.name: torch.load(path, weights_only=False) for path in sorted((tmp_path / name).glob("*.ckpt"))}
        tested = trainer.test(dataloaders=Batches(VAL), ckpt_path="best", weights_only=False, verbose=False)
        loaded = MLP.load_from_checkpoint(saver.best_model_path, map_location="cpu", weights_only=False).double()
        found.append(
            {
                "weights": {file: content["state_dict"] for file, content in files.items()},
                "optimizers": {file: content["optimizer_states"] for file, content in files.items()},
                "steps": {file: content["global_step"] for file, content in files.items()},
                "best": Path(saver.best_model_path).name,
                "tested": tested,
                "loaded": weights(loaded),
            }
        )
    assert len(found[1]["steps"]) == 4
    assert_alike(*found, tolerance=1e-6 if monitor else 1e-10)


def test_checkpoint_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """A checkpoint written right after a step holds the stepped weights."""
    found = []
    for name, strategy, devices in (("ours", RoundPipeStrategy(microbatches=2), 3), ("plain", "auto", 1)):
        saver = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=2, save_top_k=-1)
        fit(mlp(), TRAIN, strategy, devices=devices, callbacks=[saver], enable_checkpointing=True)
        files = sorted((tmp_path / name).glob("*.ckpt"))
        contents = [torch.load(path, weights_only=False) for path in files]
        found.append(
            {path.name: (c["state_dict"], c["optimizer_states"]) for path, c in zip(files, contents, strict=True)}
        )
    assert list(found[1]) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert_alike(*found)


# --- one process, many fits


def test_fit_twice_with_one_trainer() -> None:
    trainers = [trainer_for(RoundPipeStrategy(microbatches=2), devices=2), trainer_for()]
    for trainer in trainers:
        model = mlp()
        trainer.fit(model, Batches(TRAIN))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, Batches(TRAIN))
    assert trainers[1].global_step == 18
    assert_same(*trainers)


def test_one_trainer_fits_another_model() -> None:
    trainers = [trainer_for(RoundPipeStrategy(microbatches=2), devices=2), trainer_for()]
    firsts = []
    for trainer in trainers:
        first, second = mlp(), MLP(width=5, depth=1).double()
        second.load_state_dict({name: torch.full_like(p, 0.1) for name, p in second.state_dict().items()})
        trainer.fit(first, Batches(TRAIN))
        trainer.fit_loop.max_epochs = 2
        firsts.append(weights(first))
        trainer.fit(second, Batches(VAL))
        assert_equal(weights(first), firsts[-1])
    assert_alike(*firsts)
    assert_same(*trainers)


def test_several_trainers_take_turns() -> None:
    """Two models, two trainers each with its own pipeline, epochs in turn; then one model handed from trainer to
    trainer.
    """
    results = []
    for strategies in ([RoundPipeStrategy(microbatches=2), "roundpipe"], ["auto", "auto"]):
        models = [mlp(), mlp(width=5)]
        trainers = [trainer_for(strategy, devices=1 if strategy == "auto" else 2) for strategy in strategies]
        for epochs in (1, 2):
            for model, trainer in zip(models, trainers, strict=True):
                trainer.fit_loop.max_epochs = epochs
                trainer.fit(model, Batches(TRAIN))
        third = trainer_for(RoundPipeStrategy(microbatches=4) if strategies[0] != "auto" else "auto", devices=1)
        third.fit(models[0], Batches(VAL))
        results.append([weights(model) for model in models])
    assert_alike(*results)


class Late(MLP):
    """Makes its layers in configure_model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(11)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_configure_model() -> None:
    ours = fit(Late(), TRAIN, RoundPipeStrategy(microbatches=2), devices=2)
    plain = fit(Late(), TRAIN)
    assert_same(ours, plain)
    fresh = Late()
    fresh.configure_model()
    assert differs(weights(plain.lightning_module), weights(fresh))


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(3)
        return DataLoader(
            TensorDataset(torch.randn(22, 6).double(), torch.randn(22, 3).double()), batch_size=8, shuffle=True
        )

    def val_dataloader(self) -> list[DataLoader]:
        return [Batches(VAL), Batches(TRAIN[:2])]


class OfPairs(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.order.append(x)
        return nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), batch_size=8)


def test_datamodule_with_shuffled_loader_and_two_validation_loaders() -> None:
    """No distributed sampler, every sample once an epoch, and the global random state (which shuffles) as in plain
    Lightning.
    """
    trainers, orders = [], []
    for strategy, devices in ((RoundPipeStrategy(microbatches=2), 3), ("auto", 1)):
        torch.manual_seed(7)
        model = OfPairs().double()
        model.order = []
        trainer = trainer_for(strategy, devices=devices, max_epochs=3)
        L.seed_everything(4, verbose=False)
        trainer.fit(model, datamodule=Data())
        assert trainer.world_size == 1
        trainers.append(trainer)
        orders.append(model.order)
    assert sum(len(x) for x in orders[0]) == sum(len(x) for x in orders[1]) == 66
    first, second = (x[torch.argsort(x[:, 0])] for x in (torch.cat(orders[1])[:22], torch.cat(orders[1])[22:44]))
    assert torch.equal(first, second) and not torch.equal(orders[1][0], orders[1][3])
    assert_same(*trainers)
    assert set(metrics(trainers[0])) == {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}


# --- hooks


HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "setup",
    "teardown",
    "on_exception",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
]
MODULE_HOOKS = [
    "configure_optimizers",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_validation_model_eval",
    "on_validation_model_train",
]


def noting(base: type, names: Sequence[str]) -> type:
    """A subclass that writes down every call of these hooks, and does what the base does."""

    def hook(name: str) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(f"{base.__name__}.{name}")
            return getattr(base, name)(self, *args, **kwargs)

        return noted

    return type(base.__name__, (base,), {name: hook(name) for name in names if hasattr(base, name)})


@pytest.mark.parametrize("background_step", [True, False])
def test_hooks_run_once_per_batch_in_lightning_s_order(background_step: bool) -> None:
    calls: list[list[str]] = []
    for strategy, devices in ((RoundPipeStrategy(microbatches=2, background_step=background_step), 2), ("auto", 1)):
        torch.manual_seed(7)
        model = noting(MLP, HOOKS + MODULE_HOOKS)(scheduler=every_second_step).double()
        callback = noting(L.Callback, HOOKS)()
        model.calls = callback.calls = []
        run = {"val_batches": VAL, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2}
        fit(model, TRAIN[:5], strategy, devices=devices, callbacks=[callback], **run)
        calls.append(model.calls)
    assert calls[1].count("MLP.on_after_backward") == 10 and calls[1].count("Callback.on_before_optimizer_step") == 6
    assert calls[0] == calls[1]


class Gradients(L.Callback):
    """Reads the gradients wherever Lightning lets one look at them."""

    def __init__(self) -> None:
        self.after_backward: list[dict] = []
        self.before_step: list[dict] = []

    @staticmethod
    def read(module: nn.Module) -> dict[str, Tensor]:
        assert all(
            p.grad is not None and p.grad.dtype == p.dtype and p.grad.device == p.device for p in module.parameters()
        )
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.after_backward.append(self.read(module))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.before_step.append(self.read(module))


@pytest.mark.parametrize("run", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}], ids=str)
def test_hooks_see_the_gradients(run: dict) -> None:
    """Of the whole batch, as accumulated so far, before clipping."""
    ours, plain = both(callbacks=lambda: [Gradients()], **run)
    expected = noted(plain, Gradients)
    assert len(expected.after_backward) == 6 and len(expected.before_step) == 6 // run.get("accumulate_grad_batches", 1)
    assert_alike(noted(ours, Gradients).after_backward, expected.after_backward)
    assert_alike(noted(ours, Gradients).before_step, expected.before_step)


class Doubles(MLP):
    """Changes its gradients in a hook."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            assert p.grad is not None
            p.grad.mul_(2)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.net[0].weight.grad is not None
        self.net[0].weight.grad.zero_()


class ClipsItself(MLP):
    """Clips its first layer only, and by its own rule."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        assert gradient_clip_val == 0.01 and self.net[0].weight.grad is not None
        nn.utils.clip_grad_value_(self.net[0].parameters(), 0.001)
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")


class WarmsUp(MLP):
    """The recipe of Lightning's documentation: sets the learning rate in optimizer_step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (self.trainer.global_step + 1)


class Alternates(MLP):
    """Steps only at every second batch, from its own optimizer_step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Scales(MLP):
    """Does its own `backward`."""

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


@pytest.mark.parametrize("background_step", [True, False])
@pytest.mark.parametrize("kind", [Doubles, ClipsItself, WarmsUp, Alternates, Scales])
def test_overridden_hooks_have_their_effect(kind: type[MLP], background_step: bool) -> None:
    run = {"gradient_clip_val": 0.01} if kind is ClipsItself else {}
    trained = []
    for strategy in (RoundPipeStrategy(microbatches=2, background_step=background_step), "auto"):
        torch.manual_seed(7)
        trained.append(fit(kind().double(), TRAIN, strategy, devices=1 if strategy == "auto" else 2, **run))
    assert_same(*trained)
    assert differs(weights(trained[1].lightning_module), weights(fit(mlp(), TRAIN).lightning_module)), (
        "the hook must matter"
    )


class Clamps(L.Callback):
    """Changes weights between steps: in place, and by giving a parameter other data."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.clamp_(-0.1, 0.1)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            module.net[2][0].weight.data = torch.full((8, 8), 0.2, dtype=torch.float64)


def test_weights_changed_between_steps() -> None:
    _, plain = both(callbacks=lambda: [Clamps()])
    assert float(plain.lightning_module.net[0].weight.detach().abs().max()) == 0.1


class WithExtras(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        out = self(batch["x"])
        loss = nn.functional.mse_loss(out, batch["y"])
        return {
            "loss": loss,
            "out": out.detach(),
            "name": "same for all",
            "error": (out - batch["y"]).abs().mean().detach(),
        }


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.outputs: list[dict] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        assert not outputs["loss"].requires_grad
        self.outputs.append(dict(outputs))


def test_outputs_are_those_of_the_batch() -> None:
    """Tensors along dimension 0, scalars like the loss, other values as they are."""
    trained = []
    for strategy, devices in ((RoundPipeStrategy(microbatches=3), 2), ("auto", 1)):
        torch.manual_seed(7)
        trained.append(
            fit(WithExtras().double(), batches_of(vectors, 4, 7), strategy, devices=devices, callbacks=[Outputs()])
        )
    expected = noted(trained[1], Outputs).outputs
    assert len(expected) == 4 and expected[0]["out"].shape == (7, 3)
    assert_alike(noted(trained[0], Outputs).outputs, expected)


def test_the_optimizer_is_the_user_s_own() -> None:
    ours, _ = both()
    (optimizer,) = ours.optimizers
    assert type(optimizer) is torch.optim.SGD
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in ours.lightning_module.parameters()]


# --- manual optimization


class GAN(L.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.seen: dict[Any, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for_generator, for_discriminator = self.optimizers()
        real = batch["x"]
        ones, zeros = torch.ones(len(real), 1).to(real), torch.zeros(len(real), 1).to(real)
        criterion = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(for_generator)
        fake = self.generator(torch.randn(len(real), 4).to(real))
        loss = criterion(self.discriminator(fake), ones)
        for_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        judged = criterion(self.discriminator(real), ones) + criterion(
            self.discriminator(self.generator(fake.detach()[:, :4]).detach()), zeros
        )
        for_discriminator.zero_grad()
        self.manual_backward(judged)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        self.log_dict({"generator": loss, "discriminator": judged}, prog_bar=True)
        self.seen[batch_idx] = loss.detach().clone()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        ]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("background_step", [True, False])
def test_gan_by_hand_equals_plain_lightning(background_step: bool, devices: int) -> None:
    results = []
    for strategy in (RoundPipeStrategy(background_step=background_step), "auto"):
        torch.manual_seed(7)
        trainer = fit(GAN().double(), TRAIN, strategy, devices=1 if strategy == "auto" else devices)
        results.append((result(trainer), metrics(trainer)))
    assert results[1][0]["step"] == 12
    assert_equal(*results)


class ByHand(MLP):
    """Accumulates two batches by hand, and steps its own scheduler."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.note("norm", batch, self.net[0].weight.grad.norm())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


@pytest.mark.parametrize("devices", [1, 2])
def test_manual_accumulation_equals_plain_lightning(devices: int) -> None:
    results = []
    for strategy in (RoundPipeStrategy(), "auto"):
        torch.manual_seed(7)
        model = ByHand(scheduler=every_second_step).double()
        results.append(result(fit(model, TRAIN, strategy, devices=1 if strategy == "auto" else devices)))
    assert results[1]["step"] == 3 and len(results[1]["losses"]) == 3
    assert_equal(*results)


# --- optimizers that evaluate the loss themselves

LBFGS = partial(torch.optim.LBFGS, lr=0.5, max_iter=5)


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (1, 2), (2, 2)])
def test_lbfgs_is_exact(m: int, devices: int) -> None:
    make = partial(mlp, optimizer=LBFGS)
    ours = fit_pipeline(make(), TRAIN[:3], m, devices)
    plain = fit(make(), TRAIN[:3])
    if m == 1:
        assert_equal(result(ours)["weights"], result(plain)["weights"])
        assert_equal(optimizer_states(ours), optimizer_states(plain))
    else:
        assert_alike(result(ours)["weights"], result(plain)["weights"], 1e-6)
    assert plain.optimizers[0].state_dict()["state"][0]["n_iter"] > 3, "more than one evaluation a step"


def test_lbfgs_with_staleness_is_refused() -> None:
    model = mlp(optimizer=LBFGS)
    before = weights(model)
    with pytest.raises(Exception, match=r"LBFGS.*staleness|staleness.*LBFGS") as caught:
        fit_pipeline(model, TRAIN, 2, 2, staleness=1)
    assert "staleness=0" in str(caught.value), "the error says which argument to change"
    assert_equal(weights(model), before)


# --- the step runs in the background


class Waits(torch.optim.SGD):
    """One step ends only when the event is set: if the main thread waited for the step, neither would ever go on."""

    def __init__(self, params: Any, event: threading.Event, waiting_step: int) -> None:
        super().__init__(params, lr=0.1)
        self.event, self.waiting_step, self.steps = event, waiting_step, 0
        self.threads: list[threading.Thread] = []

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        self.threads.append(threading.current_thread())
        if len(self.threads) == self.waiting_step and not self.event.wait(timeout=5):
            raise TimeoutError("nothing went on while the optimizer stepped")
        return super().step()


class Signals(list):
    """Batches that set an event when one of them is fetched."""

    def __init__(self, batches: Sequence[Any], event: threading.Event, at: int) -> None:
        super().__init__(batches)
        self.event, self.at = event, at

    def __getitem__(self, index: Any) -> Any:
        if index == self.at:
            self.event.set()
        return super().__getitem__(index)


class SetsInStep(MLP):
    event: threading.Event
    at: int

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.at:
            self.event.set()  # after the forward of all layers
        return loss


def test_next_batch_is_fetched_while_the_optimizer_steps() -> None:
    event = threading.Event()
    model = mlp(optimizer=partial(Waits, event=event, waiting_step=3))
    fit_pipeline(model, Signals(TRAIN, event, at=3), 2, devices=2)
    assert event.is_set()
    assert_alike(weights(model), weights(fit(mlp(optimizer=partial(torch.optim.SGD, lr=0.1)), TRAIN).lightning_module))


def test_stale_batch_computes_while_the_optimizer_steps() -> None:
    torch.manual_seed(7)
    event = threading.Event()
    model = SetsInStep(optimizer=partial(Waits, event=event, waiting_step=3)).double()
    model.event, model.at = event, 3
    fit_pipeline(model, TRAIN, 2, devices=2, staleness=1)
    assert event.is_set()


@pytest.mark.parametrize("background_step", [True, False])
def test_which_thread_steps(background_step: bool) -> None:
    event = threading.Event()
    model = mlp(optimizer=partial(Waits, event=event, waiting_step=0))
    trainer = fit_pipeline(model, TRAIN, 2, devices=2, background_step=background_step)
    # the pipeline may step with shallow copies of the optimizer, which share this list
    threads = trainer.optimizers[0].threads
    assert len(threads) >= 6
    main = [thread is threading.main_thread() for thread in threads]
    assert all(main) if not background_step else not any(main[-3:])


# --- command line


CONFIG = """
seed_everything: 3
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_roundpipe.RoundPipeStrategy
    init_args:
      microbatches: 3
      staleness: 1
      layers: [Block]
      split: step
      loss_weight: samples
      background_step: true
model:
  width: 8
  depth: 2
"""


class SmallGPT(GPT):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__(width=width, depth=depth)


def command_line(*args: str) -> LightningCLI:
    return LightningCLI(SmallGPT, run=False, args=list(args), save_config_callback=None)


def test_command_line_builds_the_strategy_from_yaml(tmp_path: Path) -> None:
    from models import tokens

    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    cli = command_line("--config", str(path))
    assert isinstance(cli.trainer.strategy, RoundPipeStrategy)
    start = {name: value.clone() for name, value in cli.model.state_dict().items()}
    batches = batches_of(tokens, 5, 6)
    cli.trainer.fit(cli.model, Batches(batches))

    direct = SmallGPT(width=8, depth=2)
    direct.load_state_dict(start)
    fit_pipeline(direct, batches, 3, devices=2, staleness=1, layers=["Block"])
    assert_equal(weights(cli.model), weights(direct))

    saved = tmp_path / "saved.yaml"
    saved.write_text(cli.parser.dump(cli.config, skip_none=False))
    again = command_line("--config", str(saved))
    assert again.config["trainer"]["strategy"] == cli.config["trainer"]["strategy"]


def test_command_line_knows_the_names() -> None:
    for name, staleness in (("roundpipe", 0), ("roundpipe_async", 1)):
        cli = command_line(
            "--trainer.strategy",
            name,
            "--trainer.accelerator",
            "cpu",
            "--trainer.devices",
            "2",
            "--trainer.logger",
            "false",
        )
        assert isinstance(cli.trainer.strategy, RoundPipeStrategy) and cli.trainer.strategy.staleness == staleness


@pytest.mark.parametrize(
    "wrong",
    [("staleness: 1", "staleness: 2"), ("split: step", "split: halves"), ("microbatches: 3", "microbatches: many")],
)
def test_command_line_refuses_wrong_values(
    tmp_path: Path, wrong: tuple[str, str], capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace(*wrong))
    with pytest.raises(SystemExit):
        command_line("--config", str(path))
    assert wrong[1].split(": ")[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"staleness": 2},
        {"staleness": -1},
        {"staleness": 1.0},
        {"microbatches": 0},
        {"microbatches": 2.0},
        {"microbatches": "4"},
        {"lanes": "all"},
        {"split": "halves"},
        {"loss_weight": "votes"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_once(wrong: dict) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        RoundPipeStrategy(**wrong)


def test_several_machines_are_refused() -> None:
    """Each would train for itself without a word."""
    with pytest.raises(MisconfigurationException, match="num_nodes=2"):
        L.Trainer(strategy="roundpipe", accelerator="cpu", devices=2, num_nodes=2, logger=False)


def test_one_class_is_a_list_of_one() -> None:
    trainer = fit(mlp(), TRAIN[:1], RoundPipeStrategy(layers=nn.Linear))
    assert {row.kind for row in trainer.strategy.report().layers} == {"Linear"}


def test_batch_norm_over_one_sample_names_the_remedy() -> None:
    class Normalized(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(nn.BatchNorm1d(self.net[-1].out_features))

        def split(self, batch: dict[str, Tensor], microbatches: int) -> list[dict[str, Tensor]]:
            return [{name: value[i : i + 1] for name, value in batch.items()} for i in range(microbatches)]

    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        fit_pipeline(Normalized().double(), batches_of(vectors, 1, 2), 2, 2)
    assert "fewer `microbatches`" in caught.value.__notes__[-1]


def test_manual_optimization_is_said_to_be_run_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(ByHand().double(), TRAIN[:1], RoundPipeStrategy())
    assert "roundpipe: automatic_optimization=False: training_step runs as in plain Lightning" in caplog.text


# --- what is said and reported


@pytest.mark.parametrize(("devices", "cores", "warned"), [(3, 2, True), (2, 2, False), (2, 1, True)])
def test_more_devices_than_cores(devices: int, cores: int, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_roundpipe.strategy._cores", lambda: cores)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_pipeline(mlp(), TRAIN[:2], 2, devices)
    said = [str(warning.message) for warning in caught if "virtual devices" in str(warning.message)]
    assert len(said) == warned
    if warned:
        plural = "s" if cores > 1 else ""
        assert said[0].startswith(f"roundpipe: {devices} virtual devices share {cores} core{plural}, ")
        assert said[0].endswith(f"no faster than with devices={cores}.")


def test_the_report_tells_training_from_validation() -> None:
    class ValidatesSlowly(MLP):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            before = time.perf_counter()
            while time.perf_counter() < before + 0.1:
                pass

    trainer = fit(ValidatesSlowly().double(), TRAIN, RoundPipeStrategy(microbatches=2), val_batches=VAL, max_epochs=2)
    report = trainer.strategy.report()
    assert report.batches == 2 * len(TRAIN)
    assert 0 < report.training_seconds <= report.wall_seconds - 2 * len(VAL) * 0.1
    assert sum(device.busy_seconds for device in report.devices) <= report.training_seconds
