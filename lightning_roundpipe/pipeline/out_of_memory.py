"""What is to be known of a stage whose device has no memory left."""

from collections.abc import Sequence

from lightning_roundpipe.devices.out_of_memory import Purpose, remedies
from lightning_roundpipe.pipeline.batch import Microbatch
from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.traffic import nbytes
from lightning_roundpipe.state.parameters import ParameterStore
from lightning_roundpipe.units import size_text


def describe(error: BaseException, microbatch: Microbatch, layers: Sequence[Layer], store: ParameterStore) -> str:
    """What the stage needs, what has been asked for last, and the arguments that help, the best first.

    Args:
        error: The out-of-memory error.
        microbatch: The one whose thread it was raised in, where it was.
        layers: All layers.
        store: The parameters.
    """
    purpose: Purpose = getattr(error, "asked_for", "activations")
    stage = [layer for layer in layers if microbatch.where.startswith(layer.label)]
    plan = microbatch.batch.plan
    if plan is not None and stage:
        of_stage = plan.backward_stage if microbatch.in_backward else plan.forward_stage
        together = {plan.calls[i] for i, number in enumerate(of_stage) if number == microbatch.stage}
        stage = [layers[index] for index in sorted(together)] or stage
    return (
        f"roundpipe: the device has no memory left for {purpose}. {_needs(stage, microbatch, store)}"
        f" {remedies(purpose, microbatch.batch.microbatches)}{_stays(plan)}"
    )


def _stays(plan: Plan | None) -> str:
    """What need not be on the device."""
    if plan is None or not (plan.staying.graphs or plan.staying.inputs):
        return ""
    if plan.staying.graphs:
        what, remedy = "graphs", "RoundPipeStrategy(recompute='layer')"
    else:
        what, remedy = "inputs", "RoundPipeStrategy(device_memory=...) with a lower limit"
    return f" Besides, {what} of calls stay there until the backward: {remedy} leaves more room."


def _needs(stage: Sequence[Layer], microbatch: Microbatch, store: ParameterStore) -> str:
    if not stage:
        return "It was asked for by code between layers."
    number = "" if microbatch.batch.plan is None else f" {microbatch.stage}"
    parameters = sum(nbytes(store.layer_leaves(layer, microbatch.batch.version)) for layer in stage)
    gradients = sum(nbytes(p for p in layer.parameters if p.requires_grad) for layer in stage)
    inputs = max((nbytes(call.saved_inputs) for call in microbatch.calls if call.layer in stage), default=0)
    return (
        f"Stage{number} (layers: {', '.join(layer.name for layer in stage)}) needs {size_text(parameters)} for"
        f" parameters, up to {size_text(gradients)} for gradients, and activations of calls with up to"
        f" {size_text(inputs)} of inputs each; parameters of the stage before it, and of the one after it, may be"
        " there, too."
    )
