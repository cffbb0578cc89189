"""What a run of a layer keeps, and what comes out of it."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_roundpipe.pipeline.arguments import Built, Structure
from lightning_roundpipe.pipeline.replica import Layer, NormStatistics, Replica


class Mode:
    """What a run of a layer keeps for autograd."""

    PLAIN = "plain"
    """Nothing: gradients are disabled, or nothing requires one."""
    DROP = "drop"
    """Grad mode is on, so that the code takes the very same way as in the recompute, but nothing is saved."""
    KEEP = "keep"
    """The whole graph of the call."""
    LEND = "lend"
    """The same on a device with memory of its own, beyond the stage: without the parameters, which come back later."""


class Run:
    """The outcome of running a layer once: everything that came out of it, by return or otherwise, as flat leaves."""

    __slots__ = (
        "built",
        "changed",
        "edges",
        "held",
        "hook_calls",
        "is_plain",
        "norm_statistics",
        "parameters",
        "returned",
        "structure",
        "used",
    )

    def __init__(
        self,
        structure: Structure,
        built: Built,
        edges: list[GradientEdge],
        replica: Replica,
        inputs: Sequence[Any],
        changed: Collection[int],
        held: list[Tensor],
        parameters: Sequence[Tensor],
        is_plain: bool,
    ) -> None:
        self.structure = structure
        self.built = built
        self.edges = edges
        self.changed = changed
        """The arguments' leaves that the layer changed in place."""
        numbers = {id(leaf): i for i, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
        self.returned = {i: numbers[id(leaf)] for i, leaf in enumerate(structure.leaves) if id(leaf) in numbers}
        """What came out that is itself one of the arguments' leaves."""
        self.hook_calls = replica.hook_calls
        self.held = held
        """What the run has put into lists or objects of the layer's, for which linked tensors are to be put."""
        self.norm_statistics: list[NormStatistics] = replica.norm_statistics
        self.parameters = parameters
        """The tensors that it has computed with, on its device."""
        self.is_plain = is_plain
        """Whether nothing has come out of it but what it returned, and nothing in its graph holds the replica."""
        self.used: set[int] = set()
        """The inputs with gradients, by number, that the outputs depend on."""

    def let_go(self, differentiable: Sequence[int]) -> None:
        """Lets go of all but the values: what is on a device must not outlast its stage there."""
        self.structure.forget()
        for i in differentiable:
            self.leaves[i] = self.leaves[i].detach()
        self.edges = []
        self.parameters = ()

    @property
    def leaves(self) -> list[Any]:
        return self.structure.leaves


class Escaped:
    """What came out of a call, as the caller sees it."""

    __slots__ = ("argument_changes", "attribute_changes", "held", "hook_calls", "output")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.output, *others = parts
        self.hook_calls, self.attribute_changes, self.argument_changes, _, self.held = others or [()] * 5

    def ways(self, layer: Layer) -> set[str]:
        """How tensors came out of the layer besides being returned."""
        hooked = {type(layer.modules[index]).__name__ for index, *_ in self.hook_calls}
        attributes = {name for _, name, value in self.attribute_changes if has_gradient(value)}
        ways = {f"a forward hook on {kind} inside the layer" for kind in hooked}
        ways.update(f"the attribute {name!r}, set in its forward" for name in attributes)
        ways |= {"lists or objects of its own, into which it puts tensors"} if self.held else set()
        return ways | ({"objects handed to it, into which it writes"} if self.argument_changes else set())


def has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
