"""One call of a module within a step that sees the whole batch: run in microbatches, joined into one node."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_roundpipe.pipeline.autocast import AutocastState
from lightning_roundpipe.pipeline.batch import Batch, Microbatch
from lightning_roundpipe.pipeline.call_split import CallSplit, offsets
from lightning_roundpipe.pipeline.nodes import Enter
from lightning_roundpipe.pipeline.turns import Lines
from lightning_roundpipe.state.gradients import BatchGradients, PartGradients
from lightning_roundpipe.trees import Rebuild, flatten


class FanOut(Batch):
    """The microbatches of one call. Their backward begins when autograd comes to the joined outputs.

    Args:
        outer: The batch whose step makes the call.
        module: What is called.
        split: How.
        leaves: The leaves of the arguments.
        rebuild: Puts arguments together.
        sizes: Samples of each microbatch.
        first: Number of the first microbatch.
        plan: As for :class:`Batch`.
    """

    def __init__(
        self,
        outer: Batch,
        module: nn.Module,
        split: CallSplit,
        leaves: Sequence[Any],
        rebuild: Rebuild,
        sizes: Sequence[int],
        first: int,
        plan: Any,
    ) -> None:
        assert isinstance(outer.gradients, BatchGradients)
        super().__init__(
            outer._monitor,
            outer.number,
            outer.seed_step,
            [1.0] * len(sizes),
            outer.scale,
            True,
            plan,
            outer.records,
            PartGradients(outer.gradients, 0, len(sizes)),
            outer.version,
        )
        self.first = first
        self.settled = outer.settled
        self.recording = outer.recording
        self.pending_units = outer.pending_units
        self.used_outside = outer.used_outside
        self.backward_lines: Lines = []
        self.done = False
        self._module = module
        self._split = split
        self._sizes = sizes
        self._rebuild = rebuild
        self._grad = torch.is_grad_enabled()
        self._autocast = [AutocastState() for _ in sizes]  # each is entered by a thread of its own
        self.gradient_inputs = [
            i for i, leaf in enumerate(leaves) if self._grad and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self._arguments = split.cut(leaves, sizes)
        self._inputs: list[list[Tensor]] = []
        for part in self._arguments:
            own = [part[i].detach().requires_grad_() for i in self.gradient_inputs]
            self._inputs.append(own)
            for i, leaf in zip(self.gradient_inputs, own, strict=True):
                part[i] = leaf
        self._outputs: list[list[Any]] = [[] for _ in sizes]
        self._rebuild_output: Rebuild | None = None
        self._differentiable: list[int] = []
        self._seeds: list[dict[int, Tensor]] = [{} for _ in sizes]

    # -- forward ---------------------------------------------------------------------------------------------------

    def step(self, microbatch: Microbatch) -> Any:
        """What a microbatch does: the call, with its part of the arguments."""
        index = microbatch.index
        leaves, self._arguments[index] = self._arguments[index], []
        if self._inputs[index]:
            for i, leaf in zip(self.gradient_inputs, Enter.apply(microbatch.token, *self._inputs[index]), strict=True):
                leaves[i] = leaf
        args, kwargs = self._rebuild(leaves)
        with self._autocast[index].again(), _grad_mode(self._grad):
            return self._module.forward(*args, **kwargs)

    def take(self, index: int, result: Any, bring_down: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves, rebuild = flatten(result)
        if index == 0:
            self._rebuild_output = rebuild
        self._outputs[index] = leaves
        return []

    def join(self, owner: "FanOutOwner", token: Tensor, leaves: Sequence[Any]) -> Any:
        """The call's output, as part of the caller's graph.

        Raises:
            ValueError: When the microbatches did not return what can be joined.
        """
        joined = self._split.join(self._outputs)
        self._differentiable = [
            i
            for i, column in enumerate(zip(*self._outputs, strict=True))
            if not isinstance(column[0], nn.Parameter)  # which is the caller's as it is
            and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in column)
        ]
        if self._differentiable:
            inputs = [leaves[i] for i in self.gradient_inputs]
            outputs = _Join.apply(self, owner, [joined[i] for i in self._differentiable], token, *inputs)
            for i, output in zip(self._differentiable, outputs, strict=True):
                joined[i] = output
        # Only what the backward begins with is kept.
        self._outputs = [[part[i] for i in self._differentiable] for part in self._outputs]
        assert self._rebuild_output is not None
        return self._rebuild_output(joined)

    # -- backward --------------------------------------------------------------------------------------------------

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        """Deals the gradients of the joined outputs to the microbatches."""
        for number, (i, gradient) in enumerate(zip(self._differentiable, gradients, strict=True)):
            dim = self._split.outputs[i]
            if gradient is None:
                continue
            if dim is None:  # the same in every microbatch, as a constant or as a mean over samples
                for seeds, size in zip(self._seeds, self._sizes, strict=True):
                    seeds[number] = gradient * (size / sum(self._sizes))
                continue
            lengths = [part[number].size(dim) for part in self._outputs]
            for seeds, start, length in zip(self._seeds, offsets(lengths), lengths, strict=True):
                seeds[number] = gradient.narrow(dim, start, length)

    def roots(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """What a microbatch's backward begins with, and the gradients of that."""
        outputs, self._outputs[index] = self._outputs[index], []
        seeds, self._seeds[index] = self._seeds[index], {}
        numbers = [number for number in seeds if outputs[number].requires_grad]
        return [outputs[number] for number in numbers], [seeds[number] for number in numbers]

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the call's arguments that require one."""
        found = []
        for number, i in enumerate(self.gradient_inputs):
            parts = [own[number] for own in self._inputs]
            found.append(_joined_gradient(parts, self._split.inputs[i]))
        self._inputs = []
        return found


def _joined_gradient(parts: Sequence[Tensor], dim: int | None) -> Tensor | None:
    gradients = [part.grad for part in parts]
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if dim is None:
        total = present[0]
        for gradient in present[1:]:
            total = total + gradient
        return total
    return torch.cat([torch.zeros_like(p) if g is None else g for p, g in zip(parts, gradients, strict=True)], dim)


def _grad_mode(enabled: bool) -> AbstractContextManager[Any]:
    return torch.enable_grad() if enabled else torch.no_grad()


class FanOutOwner(Protocol):
    """What the joined outputs' node asks in the backward pass. Implemented by the runtime."""

    def fan_out_backward(self, fan_out: FanOut, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward of all microbatches. Returns the gradients of the call's inputs."""


class _Join(torch.autograd.Function):
    """The joined outputs as one node of the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any, fan_out: FanOut, owner: FanOutOwner, outputs: list[Tensor], token: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.fan_out, ctx.owner = fan_out, owner
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True (second derivatives) is not supported through calls that the pipeline splits. Train"
                " with RoundPipeStrategy(split='whole') and keep the layers out of it with `layers`, or with"
                " strategy='auto'."
            )
        return (None, None, None, None, *ctx.owner.fan_out_backward(ctx.fan_out, gradients))
