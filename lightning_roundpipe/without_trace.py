"""Running a step of the user's on its own, after which the module is as it was."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_roundpipe.strategy import RoundPipeStrategy
from lightning_roundpipe.trees import map_tree


def attach(module: pl.LightningModule, trainer: pl.Trainer, strategy: RoundPipeStrategy) -> None:
    """Gives the module a Trainer as in fit, and takes its logs away from it."""
    module.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    trainer.training = True
    module.__dict__["log"] = lambda *args, **kwargs: None
    strategy.connect(module)
    with suppress(Exception):  # a schedule may ask for what only a fit knows; few steps look at their optimizer
        strategy.setup_optimizers(trainer)


def copied(batch: Any) -> Any:
    """The batch in containers and tensors of its own: a step may write into it."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf

    return map_tree(copy_of, batch)


@contextmanager
def gradients_aside(module: nn.Module) -> Iterator[None]:
    """Takes the gradients away, and what runs whenever one has come: it may step an optimizer."""
    kept = [(p, p.grad, p._post_accumulate_grad_hooks) for p in module.parameters()]
    hooks = [(hooks, dict(hooks)) for _, _, hooks in kept if hooks]
    for parameter, _, _ in kept:
        parameter.grad = None
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for parameter, gradient, _ in kept:
            parameter.grad = gradient
        for table, entries in hooks:
            table.update(entries)


@contextmanager
def parameters_kept(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Yields what puts the parameters back to what they are now, and does so in the end."""
    kept = [(p, p.data, p.detach().clone(), p.requires_grad) for p in module.parameters()]

    def restore() -> None:
        for parameter, data, values, requires_grad in kept:
            if parameter.data_ptr() != data.data_ptr() or parameter.dtype != data.dtype:
                parameter.data = data
            if not torch.equal(data, values):
                data.copy_(values)
            parameter.requires_grad_(requires_grad)

    try:
        yield restore
    finally:
        restore()


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning and the strategy say nothing: the report does."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
