"""Modules and optimizers that a pipeline cannot train: refused when it is built, with what helps."""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_roundpipe.pipeline.layers import names_of_scripts
from lightning_roundpipe.state.optimizer import needs_closure


def check_module(module: "pl.LightningModule", *, simulated: bool) -> None:
    """
    Args:
        module: The user's.
        simulated: Whether devices are simulated ones.

    Raises:
        MisconfigurationException: Its parameters are not to be had.
    """
    if simulated and (scripts := names_of_scripts(module)):
        raise MisconfigurationException(
            f"{scripts[0]!r}: a script (torch.jit) reads its parameters and buffers where they are,"
            " in host memory, and not where its inputs are. Use the module that it was made of, or virtual CPU"
            " devices."
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise MisconfigurationException(
            f"{type(module).__name__} has lazy layers whose parameters have no shape yet. Call the model once on an"
            " example before fit."
        )


def check_optimizers(
    module: "pl.LightningModule", optimizers: Sequence[Optimizer], *, staleness: int, processes: int
) -> None:
    """
    Args:
        module: The user's.
        optimizers: Its optimizers.
        staleness: Of the run.
        processes: How many there are.

    Raises:
        MisconfigurationException: One of them cannot step as it wants to, or steps what the pipeline does not know.
    """
    inside = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if staleness and needs_closure(optimizer):
            raise MisconfigurationException(
                f"{type(optimizer).__name__} evaluates the loss again at new parameters within one step, which"
                " cannot be done with parameters one step old. Use RoundPipeStrategy(staleness=0)"
                " (strategy='roundpipe')."
            )
        if processes > 1 and needs_closure(optimizer):
            raise MisconfigurationException(
                f"{type(optimizer).__name__} decides by the loss how often it evaluates it, and the loss is not the"
                f" same in each of the {processes} processes. Train in one process."
            )
        if len(optimizers) > 1 or not module.automatic_optimization or type(optimizer).__name__ == "_MockOptimizer":
            continue
        strays = sum(id(parameter) not in inside for group in optimizer.param_groups for parameter in group["params"])
        if strays:
            raise MisconfigurationException(
                f"{strays} parameters of the optimizer are not parameters of {type(module).__name__}. Register"
                " them on the module (as nn.Parameter or in a submodule), so that the pipeline can compute"
                " their gradients."
            )
