"""Precision plugins that hand the optimizer step to the background worker.

Whatever plugin Lightning (or the user) chose keeps its class, state and contexts; it is extended by the mixin.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from lightning_roundpipe.state.optimizer import BeforeStep

if TYPE_CHECKING:
    from lightning_roundpipe.strategy import RoundPipeStrategy


class RoundPipePrecision(Precision):
    """Mixin for Lightning's precision plugins; see :func:`with_background_step`."""

    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        if getattr(self, "scaler", None) is not None:
            _strategy(module).settle_steps()  # the step before may still change the scale
        return super().pre_backward(tensor, module)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().backward(tensor, model, optimizer, *args, **kwargs)
        _strategy(model).after_backward()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        strategy = _strategy(model)
        if not strategy.will_step_in_background():
            strategy.average_by_hand()
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            strategy.after_step_in_line()
            return result
        loss = closure()
        scaler = getattr(self, "scaler", None)
        if scaler is None:
            strategy.submit_step(optimizer, self.before_step(model))
        elif loss is not None:  # a skipped step must not count for the scale
            strategy.submit_step(optimizer, self.before_step(model), scaler.update)
        return loss

    def loss_scale(self) -> float:
        """What the loss is multiplied with before the backward."""
        scaler = getattr(self, "scaler", None)
        return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())

    def handles_in_background(self, optimizer: Optimizer) -> bool:
        """Whether the step consists of nothing but what :meth:`before_step` does, and the optimizer's own step."""
        kind: Any = next(base for base in type(self).__mro__[1:] if not issubclass(base, RoundPipePrecision))
        known = (
            kind.optimizer_step in (Precision.optimizer_step, MixedPrecision.optimizer_step)
            and kind.clip_gradients in (Precision.clip_gradients, MixedPrecision.clip_gradients)
            and kind.backward is Precision.backward
        )
        scaler = getattr(self, "scaler", None)
        return known and not (scaler is not None and _optimizer_handles_unscaling(optimizer))

    def before_step(self, model: "pl.LightningModule") -> BeforeStep | None:
        """What is to be done with all gradients before they are used, if anything is."""
        trainer = model.trainer
        clip_value = float(trainer.gradient_clip_val or 0.0)
        algorithm = GradClipAlgorithmType(trainer.gradient_clip_algorithm or "norm")
        scaler = getattr(self, "scaler", None)
        if scaler is None and clip_value <= 0:
            return None

        def before_step(snapshot: Optimizer) -> bool:
            if scaler is not None:
                scaler.unscale_(snapshot)
            self.clip_gradients(snapshot, clip_value, algorithm)
            if scaler is None:
                return True
            return not any(bool(found) for found in scaler._found_inf_per_device(snapshot).values())

        return before_step


def with_background_step(plugin: Precision) -> Precision:
    """The plugin, extended by :class:`RoundPipePrecision`. The object given is left as it is; its state is shared."""
    if isinstance(plugin, RoundPipePrecision):
        return plugin
    kind = type(plugin)
    # Checkpoints store the plugin's state under its class's qualified name: kept, they load with any strategy.
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__, "__doc__": kind.__doc__}
    extended = type(kind.__name__, (RoundPipePrecision, kind), names)
    new: Any = object.__new__(extended)
    new.__dict__ = plugin.__dict__
    return new


def _strategy(model: "pl.LightningModule") -> "RoundPipeStrategy":
    strategy: Any = model.trainer.strategy
    return strategy
