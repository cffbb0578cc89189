"""Several processes, started from outside (by torchrun, say): each trains its share of the data, all the same model.

Each process has a pipeline of its own over its own devices. What they share is one average of the gradients for each
optimizer step, taken over a process group of its own: the optimizer worker takes it in the background, whatever the
main threads tell each other meanwhile (logs, checkpoints).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy


def number_processes(environment: ClusterEnvironment) -> tuple[int, int]:
    """Rank of this process and number of processes, (0, 1) unless somebody else has started several.

    Raises:
        MisconfigurationException: When the environment's variables do not say where the processes meet.
    """
    if not isinstance(environment, LightningEnvironment):
        if not environment.creates_processes_externally:
            return 0, 1
        return environment.global_rank(), environment.world_size()
    # Lightning counts the processes that it starts itself, by devices. Ours are counted by whoever has started them.
    started = "RANK" in os.environ or "LOCAL_RANK" in os.environ
    if started and dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    elif started and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if "MASTER_PORT" not in os.environ:
            raise MisconfigurationException(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but MASTER_PORT is not, so the processes cannot find"
                " each other. Start them with torchrun, or set MASTER_ADDR and MASTER_PORT."
            )
        if "RANK" not in os.environ and environment.node_rank() > 0:
            raise MisconfigurationException("NODE_RANK is set, but RANK is not. Start the processes with torchrun.")
        rank, size = int(os.environ.get("RANK", environment.local_rank())), int(os.environ["WORLD_SIZE"])
    else:
        return 0, 1
    environment.set_global_rank(rank)
    environment.set_world_size(size)
    return rank, size


@cache
def _group_for_gradients(_world: object) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


class Processes:
    """What the processes do together, each the same in the same order.

    Args:
        environment: Who started the processes. Without a process group, one is made.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        _init_dist_connection(environment, "gloo")
        self.number = dist.get_world_size()
        self._group = _group_for_gradients(dist.group.WORLD)
        self._known: list[tuple[Tensor, int]] = []
        """The buffers as they were when all processes had the same, and their version counters."""

    def check_same(self, module: nn.Module) -> None:
        """
        Raises:
            RuntimeError: When the processes do not train the same parameters.
        """
        mine = [
            f"{name} ({parameter.dtype}, {'no shape yet' if is_lazy(parameter) else tuple(parameter.shape)})"
            for name, parameter in module.named_parameters()
        ]
        everyone: list[list[str]] = [[]] * self.number
        with _blaming_others("comparing parameters"):
            dist.all_gather_object(everyone, mine)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                differing = sorted(set(theirs) ^ set(everyone[0])) or ["in another order"]
                raise RuntimeError(
                    f"Process {rank} has other parameters than process 0: {', '.join(differing[:4])}. Build the same"
                    " model in every process."
                )

    def follow_first(self, module: nn.Module) -> None:
        """Gives parameters and buffers the values of process 0."""
        self._broadcast([p for p in module.parameters() if not is_lazy(p)])
        self.follow_buffers(module)

    def follow_buffers(self, module: nn.Module) -> None:
        """Gives buffers the values of process 0. Nothing may compute with them meanwhile."""
        self._broadcast([b for b in module.buffers() if not is_lazy(b)])
        self._known = [(buffer, buffer._version) for buffer in _buffers_in_use(module)]

    def follow_changed_buffers(self, module: nn.Module, wait: Callable[[], None]) -> None:
        """Between batches: buffers that the forward computes with become those of process 0, where any has changed.

        Args:
            module: The module.
            wait: Waits until nothing computes with the buffers.
        """
        buffers = _buffers_in_use(module)
        if not buffers:
            return
        same = len(buffers) == len(self._known) and all(
            buffer is known and buffer._version == version
            for buffer, (known, version) in zip(buffers, self._known, strict=True)
        )
        changed = torch.tensor(not same, dtype=torch.uint8)
        with _blaming_others("sharing buffers"):
            dist.all_reduce(changed, op=dist.ReduceOp.MAX)
        if changed:
            wait()
            self._broadcast(buffers)
            self._known = [(buffer, buffer._version) for buffer in buffers]

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad(), _blaming_others("taking over the values of process 0"):
            for tensor in tensors:
                values = tensor.detach().contiguous()
                dist.broadcast(values.reshape(-1).view(torch.uint8), src=0)  # gloo does not know every type
                if values.data_ptr() != tensor.data_ptr():
                    tensor.copy_(values)

    def average(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        get: Callable[[nn.Parameter], Tensor | None],
        put: Callable[[nn.Parameter, Tensor], None],
    ) -> None:
        """Averages gradients over the processes, with the same bits in each.

        Where some have no gradient, theirs counts as zero. Where none has one, there is none.

        Args:
            groups: The parameters. A group's gradients travel together; the next begins when they are through.
            get: The gradient of a parameter in this process. It is written to.
            put: Takes the average.
        """
        parameters = [parameter for group in groups for parameter in group]
        present = torch.zeros(2, len(parameters), dtype=torch.uint8)  # dense, sparse
        for index, parameter in enumerate(parameters):
            if (gradient := get(parameter)) is not None:
                present[int(gradient.is_sparse), index] = 1
        with torch.no_grad(), _blaming_others("averaging gradients"):
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self._group)
            dense, sparse = present.bool().tolist()
            kind = {id(p): (dense[i], sparse[i]) for i, p in enumerate(parameters)}
            for group in groups:
                under_way = []
                for parameter in group:
                    is_dense, is_sparse = kind[id(parameter)]
                    if is_dense or is_sparse:
                        gradient = _as(get(parameter), parameter, sparse=not is_dense).mul_(1 / self.number)
                        work = dist.all_reduce(gradient, group=self._group, async_op=True)
                        under_way.append((parameter, gradient, work))
                for parameter, gradient, work in under_way:
                    work.wait()
                    put(parameter, gradient)


def _as(gradient: Tensor | None, parameter: nn.Parameter, *, sparse: bool) -> Tensor:
    """A gradient of the layout in which it travels; zero if there is none."""
    if gradient is None and sparse:  # as an embedding's: whole rows
        rows = parameter.new_zeros((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(rows.new_zeros((1, 0), dtype=torch.long), rows, parameter.shape)
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return gradient if sparse else gradient.to_dense().contiguous()


def _buffers_in_use(module: nn.Module) -> list[Tensor]:
    """The buffers that a forward in training may compute with: not the running statistics of norms."""
    statistics = {
        id(buffer) for norm in module.modules() if isinstance(norm, _NormBase) for buffer in norm.buffers(recurse=False)
    }
    return [buffer for buffer in module.buffers() if id(buffer) not in statistics and not is_lazy(buffer)]


@contextmanager
def _blaming_others(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all that gloo raises
        error.add_note(
            f"roundpipe: raised while {what} with the other processes (this is process {dist.get_rank()} of"
            f" {dist.get_world_size()}). If one of them has failed, its own error is the cause."
        )
        raise
