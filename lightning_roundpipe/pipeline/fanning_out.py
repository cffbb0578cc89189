"""Split calls: a step that sees the whole batch runs once, and calls within it run in microbatches."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.microbatch import least_samples
from lightning_roundpipe.pipeline.attributes import ModuleAttributes
from lightning_roundpipe.pipeline.batch import Microbatch, present
from lightning_roundpipe.pipeline.call_split import CallSplit, CannotSplitError, signature
from lightning_roundpipe.pipeline.fan_out import FanOut
from lightning_roundpipe.pipeline.handover import Handover
from lightning_roundpipe.pipeline.interception import in_checkpoint
from lightning_roundpipe.pipeline.lines import LineUp
from lightning_roundpipe.pipeline.plan import Plan, merged_calls
from lightning_roundpipe.pipeline.planning import Planning
from lightning_roundpipe.pipeline.replica import Layer, commit_norm_statistics
from lightning_roundpipe.pipeline.steps import Steps
from lightning_roundpipe.pipeline.threads import Threads
from lightning_roundpipe.pipeline.turnstile import Turnstiles
from lightning_roundpipe.trees import flatten


class FanningOut:
    """Splits calls. The thread of the step waits meanwhile; thread 0 is its own, the parts have those after it.

    Args:
        layers: All layers.
        steps: Runs the parts.
        threads: Where they run.
        line_up: Makes their turns.
        turnstiles: Where these are waited for.
        planning: Makes their plans.
        handover: The baton.
        attributes: What the parts set on modules.
        runs_serially: Whether microbatches run one after the other from now on.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        steps: Steps,
        threads: Threads,
        line_up: LineUp,
        turnstiles: Turnstiles,
        planning: Planning,
        handover: Handover,
        attributes: ModuleAttributes,
        runs_serially: Callable[[], bool],
    ) -> None:
        self.microbatches = 1
        """Into how many a call is split, at most."""
        self.plans: dict[tuple[int, Hashable], Plan] = {}
        """The plan of each kind of call: by module and kind of arguments."""
        self._splits: dict[tuple[int, Hashable], CallSplit] = {}
        self._layers = layers
        self._steps = steps
        self._threads = threads
        self._line_up = line_up
        self._turnstiles = turnstiles
        self._planning = planning
        self._handover = handover
        self._attributes = attributes
        self._runs_serially = runs_serially

    def set_up(self, splits: Mapping[tuple[nn.Module, Hashable], CallSplit], microbatches: int) -> None:
        """Says how calls are split; see :meth:`Pipeline.split_calls`."""
        self._splits = {(id(module), kind): split for (module, kind), split in splits.items()}
        self.microbatches = microbatches

    def plan_again(self) -> None:
        """After the first batch, whose backward has shown what calls need of a device's memory."""
        self.plans = {
            kind: self._planning.make(plan.calls, fused=False, alone=False) for kind, plan in self.plans.items()
        }

    @property
    def active(self) -> bool:
        """Whether steps see the whole batch."""
        return bool(self._splits)

    def call(self, microbatch: Microbatch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within a step that sees the whole batch: in microbatches, if it is known how to split it.

        Returns:
            The output, or NotImplemented.
        """
        kind = signature((args, kwargs))
        split = self._splits.get((id(module), kind))
        if split is None or torch.is_inference_mode_enabled() or in_checkpoint():
            return NotImplemented  # a checkpoint's recompute could not see what threads of their own have saved
        inside = set(module.modules())
        if not all(layer.has_own_parameters() for layer in self._layers if layer.module in inside):
            return NotImplemented  # others stand there for a moment (functional_call)
        leaves, rebuild = flatten((args, kwargs))
        with microbatch.outside.paused(), _naming(module):
            leaves = [microbatch.outside.replace(leaf) for leaf in leaves]
            sizes = split.sizes(leaves, self.microbatches, least_samples(inside))
            if len(sizes) == 1:
                return NotImplemented
            batch = microbatch.batch
            plan = None if batch.records or self._runs_serially() else self.plans.get((id(module), kind))
            fan_out = FanOut(batch, module, split, leaves, rebuild, sizes, microbatch.parts, plan)
            microbatch.parts += len(sizes)
            self._forward(microbatch, fan_out)
            if batch.records or plan is None:
                calls = merged_calls(plan, [tuple(run.sequence) for run in fan_out.runs if run is not None])
                self.plans[id(module), kind] = self._planning.make(calls, fused=False, alone=False)
            return fan_out.join(self, microbatch.token, leaves)

    def fan_out_backward(self, fan_out: FanOut, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The backward of a split call; runs when autograd comes to its node."""
        microbatch = present()
        if microbatch is None or not microbatch.in_backward or fan_out.done:
            raise RuntimeError(
                "Gradients through a call that the pipeline has split are asked for within training_step"
                " (torch.autograd.grad or backward), after it, or a second time. Train with"
                " RoundPipeStrategy(split='whole') and keep the layers out of the pipeline with `layers`, or use manual"
                " optimization."
            )
        fan_out.done = True
        fan_out.give(gradients)
        self._handover.release(microbatch)
        self._turnstiles.extend(fan_out.backward_lines)
        for index, part in enumerate(fan_out.runs):
            assert part is not None
            part.frozen |= microbatch.frozen
            work = partial(self._steps.run_backward, part, partial(fan_out.roots, index))
            self._threads.submit(1 + index, work, then=fan_out.thread_done)
        fan_out.wait_all()
        fan_out.forget_runs()
        self._handover.take(microbatch)
        return fan_out.input_gradients()

    def _forward(self, microbatch: Microbatch, fan_out: FanOut) -> None:
        forward, fan_out.backward_lines = self._line_up.lines(fan_out)
        self._handover.release(microbatch)
        with self._handover.lending_generators(fan_out):
            self._attributes.begin_batch(fan_out)
            self._turnstiles.extend(forward)
            for index in range(fan_out.microbatches):
                work = partial(self._steps.run_forward, fan_out, index, fan_out.step)
                self._threads.submit(1 + index, work, then=fan_out.forward_done)
            fan_out.wait_forward()
        self._attributes.end_batch(fan_out)
        microbatch.batch.recomputes |= fan_out.recomputes
        commit_norm_statistics([run.norm_statistics for run in fan_out.runs if run is not None])
        self._handover.take(microbatch)


@contextmanager
def _naming(module: nn.Module) -> Iterator[None]:
    """What goes wrong with the split of a module's call, in full."""
    try:
        yield
    except CannotSplitError as error:
        raise RuntimeError(
            f"The call of {type(module).__name__} cannot be split as in the first batch: {error}. Train with"
            " RoundPipeStrategy(split='whole')."
        ) from error
