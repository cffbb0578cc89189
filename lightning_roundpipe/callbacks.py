"""When the main thread must wait for the pipeline, because somebody looks at weights or gradients."""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging

if TYPE_CHECKING:
    from lightning_roundpipe.strategy import RoundPipeStrategy

# Lightning's own callbacks that look at neither between batches. (Saving a checkpoint waits by itself.)
_HARMLESS_MODULES = {
    f"lightning.pytorch.callbacks.{name}"
    for name in (
        "callback", "checkpoint", "device_stats_monitor", "early_stopping", "gradient_accumulation_scheduler",
        "lr_monitor", "model_checkpoint", "model_summary", "on_exception_checkpoint", "progress.progress_bar",
        "progress.rich_progress", "progress.tqdm_progress", "rich_model_summary", "spike", "throughput_monitor",
        "timer",
    )
} | {"lightning_roundpipe.monitor"}  # fmt: skip

_HOOKS_BETWEEN_BATCHES = (
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step",
)  # fmt: skip
_DATA_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MODULE_HOOKS = (*_HOOKS_BETWEEN_BATCHES, "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")


def hooks_that_look(trainer: "pl.Trainer") -> list[str]:
    """The overridden hooks that run between a batch's backward and the next batch, and may use weights or gradients."""
    module = trainer.lightning_module
    found = [
        f"{type(module).__name__}.{hook}"
        for hook in (*_MODULE_HOOKS, *_DATA_HOOKS)
        if getattr(type(module), hook) is not getattr(pl.LightningModule, hook) or hook in vars(module)
    ]
    for callback in callbacks_of(trainer):
        found += [
            f"{type(callback).__name__}.{hook}"
            for hook in _HOOKS_BETWEEN_BATCHES
            if getattr(callback, hook).__module__ not in _HARMLESS_MODULES
        ]
        # Its last epoch has no backward, but Lightning steps in it once more, with the gradients of the last batch.
        if isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            found.append(f"{type(callback).__name__} with BatchNorm")
    return found


def looks_before_backward(trainer: "pl.Trainer") -> bool:
    """Whether a hook runs between a batch's forward and backward, which may change the gradients of those before it."""
    return any(name.endswith(".on_before_backward") for name in hooks_that_look(trainer))


def callbacks_of(trainer: "pl.Trainer") -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside of its __init__
    return callbacks


class WaitForPipeline(Callback):
    """Comes first among the callbacks: the hooks after it see parameters with all steps made."""

    def __init__(self, strategy: "RoundPipeStrategy") -> None:
        self._strategy = strategy

    def on_train_epoch_start(self, *_: Any) -> None:
        self._strategy.settle()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._strategy.settle()

    def on_validation_start(self, *_: Any) -> None:
        self._strategy.settle()

    def on_train_end(self, *_: Any) -> None:
        self._strategy.settle()
