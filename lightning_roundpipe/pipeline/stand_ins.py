"""What stands for parameters in the code between layers, and what that code may do to them.

Each microbatch gets leaves of its own, so that gradients are its own, of the version that its batch computes with, and
not before the optimizer steps that they need.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from lightning_roundpipe.pipeline.batch import Batch, Microbatch, present
from lightning_roundpipe.pipeline.handover import Handover
from lightning_roundpipe.pipeline.interception import OutsideParameters
from lightning_roundpipe.state.parameters import ParameterStore, Unit


class StandIns:
    """Answers :class:`OutsideParameters` for each microbatch.

    Args:
        store: The parameters.
        handover: The baton, which is not held while waiting for a parameter.
        run_serially: Called with the reason where only a serial order of the microbatches can be right.
    """

    def __init__(self, store: ParameterStore, handover: Handover, run_serially: Callable[[str], None]) -> None:
        self.units: dict[Unit, None] = {}
        """Units that the code between layers has used."""
        self._store = store
        self._handover = handover
        self._run_serially = run_serially

    def mode(self, microbatch: Microbatch) -> OutsideParameters:
        """What is in force in a microbatch's code between layers."""
        return OutsideParameters(
            self._store.owns,
            stand_in=partial(self._stand_in, microbatch),
            value=partial(self._value, microbatch),
            memory=partial(self._memory, microbatch),
            touched=partial(self.touched, microbatch),
            flagged=partial(self._flagged, microbatch),
        )

    def end_step(self, microbatch: Microbatch) -> None:
        """After the forward: finds what the code between layers has done to memory and flags that it was given."""
        for parameter, tensor, version in microbatch.lent:
            if tensor._version != version:
                self.touched(microbatch, parameter, tensor, True)
        microbatch.frozen = {id(parameter) for parameter in microbatch.flagged if not parameter.requires_grad}

    def touched(self, microbatch: Microbatch, parameter: nn.Parameter, memory: Tensor, written: bool) -> None:
        """The code between layers got hold of a parameter's memory, and may change it at this point of the step.

        Args:
            microbatch: The microbatch.
            parameter: The parameter.
            memory: What it got hold of.
            written: Whether it certainly changes it.

        Raises:
            RuntimeError: When the change cannot be in force where it should be.
        """
        if self._store.keeps_versions(parameter):
            if written:
                raise RuntimeError(
                    f"The step changes the parameter {self._store.name(parameter)!r} itself. With staleness 1 it has"
                    " two values, the one that the step computes with and that after the optimizer's next step, and the"
                    " change belongs to both. Change it in a hook after the step (on_train_batch_end), freeze it with"
                    " requires_grad_(False) if the optimizer does not train it, or use strategy='roundpipe' (staleness"
                    " 0)."
                )
            microbatch.lent.append((parameter, memory, memory._version))
            return
        self._store.follow(parameter)
        microbatch.batch.used_outside.add(id(parameter))
        what = "changes the parameter {!r} itself" if written else None
        self._concerns_all(microbatch.batch, parameter, "the step changes parameters or takes their data", what)

    def _stand_in(self, microbatch: Microbatch, parameter: nn.Parameter) -> Tensor:
        """The microbatch's own leaf."""
        if id(parameter) in microbatch.stand_ins:
            return microbatch.stand_ins[id(parameter)][1]
        version = microbatch.batch.version
        self._settle(microbatch, parameter, version)
        leaf = self._store.full_precision_leaf(parameter, version).detach().requires_grad_(parameter.requires_grad)
        microbatch.lent.append((parameter, leaf, leaf._version))
        if leaf.requires_grad:
            name = self._store.name(parameter)
            leaf.register_hook(partial(_refuse_elsewhere, microbatch.identity, microbatch.label, name))
        leaf.is_stand_in = True  # type: ignore[attr-defined]  # so that a layer's graph shows where it leads
        microbatch.stand_ins[id(parameter)] = (parameter, leaf)
        microbatch.batch.used_outside.add(id(parameter))
        self.units[self._store.unit_of(parameter)] = None
        return leaf

    def _value(self, microbatch: Microbatch, parameter: nn.Parameter) -> Tensor:
        """What the code between layers computes with, and may change, where gradients are disabled."""
        if self._store.keeps_versions(parameter):
            return self._stand_in(microbatch, parameter)
        self._settle(microbatch, parameter, self._store.enqueued)
        self._store.wait_uploads(self._store.unit_of(parameter))
        return parameter

    def _memory(self, microbatch: Microbatch, parameter: nn.Parameter) -> Tensor:
        """The memory that the code between layers gets when it asks for a parameter's own."""
        value = self._value(microbatch, parameter)
        if value is parameter:
            return parameter
        return self._store.full_precision_leaf(parameter, microbatch.batch.version)

    def _settle(self, microbatch: Microbatch, parameter: nn.Parameter, version: int) -> None:
        """Waits for a parameter that the code between layers uses. Not with the baton: the step may depend on it."""
        unit = self._store.unit_of(parameter)
        microbatch.units_awaited.add(unit)
        if unit.done < version:
            self._handover.release(microbatch)
            self._store.wait((unit,), version, microbatch.batch.number)
            self._handover.take(microbatch)

    def _flagged(self, microbatch: Microbatch, parameter: nn.Parameter) -> None:
        """The code between layers sets a parameter's ``requires_grad``, which all microbatches see."""
        microbatch.flagged[parameter] = None
        what = "freezes or unfreezes the parameter {!r}"
        self._concerns_all(microbatch.batch, parameter, "the step freezes or unfreezes parameters", what)

    def _concerns_all(self, batch: Batch, parameter: nn.Parameter, reason: str, what: str | None) -> None:
        """A microbatch does to a parameter what all others see: right only where they run one after the other.

        Args:
            batch: The microbatch's batch.
            parameter: The parameter.
            reason: Why they have to.
            what: What the step certainly does, else None.
        """
        if batch.microbatches == 1:
            return
        self._run_serially(reason)
        if what is not None and not batch.serial:
            raise RuntimeError(
                f"The step {what.format(self._store.name(parameter))}, which it did not do in the first batch, while"
                " other microbatches compute with it. Do it from the first batch on, outside of training_step, or"
                " train with RoundPipeStrategy(microbatches=1)."
            )


def _refuse_elsewhere(owner: tuple[int, int], label: str, parameter: str, gradient: Tensor) -> None:
    """A leaf that stands for a parameter gets a gradient: in its own microbatch's backward, or nobody collects it."""
    microbatch = present()
    if microbatch is None or microbatch.identity != owner:
        raise RuntimeError(
            f"A tensor that was made of the parameter {parameter!r} in {label} gets a gradient elsewhere, which would"
            " be lost. Make such tensors anew in each training_step, or keep them detached."
        )
