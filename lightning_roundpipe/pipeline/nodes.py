"""The nodes that layer calls have in autograd's graph, and walks through it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from lightning_roundpipe.pipeline.escapes import escape_text

if TYPE_CHECKING:
    from lightning_roundpipe.pipeline.tape import Call


class CallOwner(ABC):
    """What a call's node asks in the backward pass. Implemented by the runtime."""

    @abstractmethod
    def call_backward(
        self, call: "Call", gradients: Sequence[Tensor | None], *, parameters: bool
    ) -> list[Tensor | None]:
        """Runs the backward of a call. Returns the gradients of its inputs."""


class _CallNode(torch.autograd.Function):
    """A call as one node of the caller's graph.

    The token is a leaf that stands for the layer's parameters: it makes the outputs require gradients when no input
    does, and whether its gradient is wanted tells whether those of the parameters are.
    """

    @staticmethod
    def forward(
        ctx: Any, call: "Call", owner: CallOwner, outputs: list[Tensor], token: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.owner = owner
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.call.label}: create_graph=True (second derivatives) is not supported through layers of the"
                " pipeline. Keep this layer out of it with RoundPipeStrategy(layers=...), or train with"
                " strategy='auto'."
            )
        token_node, _ = ctx.next_functions[0]
        wanted = torch._C._will_engine_execute_node(token_node)
        inputs = ctx.owner.call_backward(ctx.call, gradients, parameters=wanted)
        return (None, None, None, None, *inputs)


class Enter(torch.autograd.Function):
    """Inputs as they would come from the code before the layer: no leaves, so that they may be changed in place."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients)


LEAF = torch.empty(0, requires_grad=True)
"""Makes what a call begins with require gradients. It gets none itself."""


class _EnterCall(torch.autograd.Function):
    """The same for a layer call, whose backward ends there: what comes further has left the layer unnoticed."""

    @staticmethod
    def forward(ctx: Any, label: str, inputs: list[Tensor], token: Tensor) -> tuple[Tensor, ...]:
        ctx.label = label
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(escape_text(ctx.label))


# Past Function.apply, which asks at every call whether a functorch transform is at work: layers are called in none.
enter_call = super(torch.autograd.Function, _EnterCall).apply
call_node = super(torch.autograd.Function, _CallNode).apply


def edges_of(entered: Sequence[Tensor], *, lasting: bool) -> list[GradientEdge]:
    """The edges of the tensors that a node written in Python has returned; if lasting, whatever becomes of them."""
    node = entered[0].grad_fn
    assert node is not None
    alive = entered[0].view_as(entered[0]).grad_fn if lasting else None  # in C++, a node keeps alive what it leads to
    return [GradientEdge(node, tensor.output_nr, alive) for tensor in entered]


_OF_CALL: Any = _CallNode._backward_cls
_OF_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def has_graph(value: Any) -> bool:
    """Whether a value leads to anything: a view made without gradients may require one all the same."""
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and (value.grad_fn is not None or isinstance(value, nn.Parameter))
    )


class Reached(NamedTuple):
    """What some tensors' graph leads to."""

    leaves: list[Tensor]
    """The tensors that it accumulates gradients into."""
    calls: list[Any]
    """The nodes of calls."""
    entry: set[int]
    """Which of the entry's outputs, by number, it ends at."""
    has_python: bool
    """Whether there are functions written in Python, besides calls."""


def reached_by(
    outputs: Sequence[Tensor], entry: Sequence[GradientEdge] = (), *, through_calls: bool = False
) -> Reached:
    """Walks through the graph of some tensors, up to an entry."""
    start = entry[0].node if entry else None
    leaves: list[Tensor] = []
    calls: list[Any] = []
    used: set[int] = set()
    kinds: set[type] = set()
    seen: set[Node] = set()
    leaves += [output for output in outputs if output.grad_fn is None]
    stack: list[tuple[Node | None, int]] = [(output.grad_fn, output.output_nr) for output in outputs]
    while stack:
        node, number = stack.pop()
        if node is start:
            used.add(number)
            continue
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node)
        kinds.add(kind)
        if kind is _OF_CALL:
            calls.append(node)
            if not through_calls:
                continue
        elif kind is _OF_LEAF:
            leaves.append(node.variable)  # type: ignore[attr-defined]
        stack += node.next_functions
    return Reached(leaves, calls, used, any(issubclass(kind, BackwardCFunction) for kind in kinds))
