"""Several processes, started from outside (by torchrun, say): each trains its share of the data, all the same model.

Each process has a pipeline of its own over its own devices. What they share is one average of the gradients for each
optimizer step, taken over a process group of its own: the optimizer worker takes it in the background, whatever the
main threads tell each other meanwhile (logs, checkpoints).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
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

    def follow_first(self, module: nn.Module) -> None:
        """Gives parameters and buffers the values of process 0.

        Raises:
            MisconfigurationException: When the processes do not have the same parameters and buffers.
        """
        self._broadcast({name: p for name, p in module.named_parameters() if not is_lazy(p)})
        self.follow_buffers(module)

    def follow_buffers(self, module: nn.Module) -> None:
        """Gives buffers the values of process 0. Nothing may compute with them meanwhile."""
        self._broadcast({name: b for name, b in module.named_buffers() if not is_lazy(b)})
        self._known = [(buffer, buffer._version) for buffer in _buffers_in_use(module).values()]

    def follow_changed_buffers(self, module: nn.Module, wait: Callable[[], None]) -> None:
        """Between batches: buffers that the forward computes with become those of process 0, where any has changed.

        Args:
            module: The module.
            wait: Waits until nothing computes with the buffers.
        """
        buffers = _buffers_in_use(module)
        if not buffers and not self._known:
            return
        same = len(buffers) == len(self._known) and all(
            buffer is known and buffer._version == version
            for buffer, (known, version) in zip(buffers.values(), self._known, strict=True)
        )
        changed = torch.tensor(not same, dtype=torch.uint8)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX)
        if changed:
            wait()
            self._broadcast(buffers)
            self._known = [(buffer, buffer._version) for buffer in buffers.values()]

    def _broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        self._check_same([f"{name} ({tensor.dtype}, {tuple(tensor.shape)})" for name, tensor in tensors.items()])
        with torch.no_grad():
            for tensor in tensors.values():
                own = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # gloo does not know every type
                first = own if dist.get_rank() == 0 else torch.empty_like(own)
                dist.broadcast(first, src=0)
                if not torch.equal(own, first):  # what is mapped from a file is not to be copied where nothing changes
                    tensor.copy_(first.view(tensor.dtype).view(tensor.shape))

    def _check_same(self, mine: list[str]) -> None:
        everyone: list[list[str]] = [[]] * self.number
        dist.all_gather_object(everyone, mine)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                differing = sorted(set(theirs) ^ set(everyone[0])) or ["in another order"]
                raise MisconfigurationException(
                    f"Process {rank} has other parameters or buffers than process 0: {', '.join(differing[:4])}. Build"
                    " the same model in every process."
                )

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
        with torch.no_grad():
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


def _buffers_in_use(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a forward in training may compute with: not the running statistics of norms."""
    statistics = {
        id(buffer) for norm in module.modules() if isinstance(norm, _NormBase) for buffer in norm.buffers(recurse=False)
    }
    return {name: b for name, b in module.named_buffers() if id(b) not in statistics and not is_lazy(b)}


class MultiProcessStrategy(SingleDeviceStrategy, ParallelStrategy):
    """The part of a strategy that Lightning asks about processes. It starts none, and in a single one does nothing.

    Attributes:
        processes: The processes together, from :meth:`setup_environment` on; None if this one is alone.
    """

    # Set by the first of the base classes; the second has them as properties.
    global_rank = 0
    local_rank = 0
    world_size = 1
    processes: Processes | None = None

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != 1:
            raise MisconfigurationException(
                f"strategy='{self.strategy_name}' trains on one machine, but `num_nodes={number}` was asked for."
                " Use strategy='fsdp' across machines."
            )

    def set_world_ranks(self) -> None:
        """Called by Lightning when it has found out who started the processes."""
        assert self.cluster_environment is not None
        self.global_rank, self.world_size = number_processes(self.cluster_environment)
        if not self.is_distributed:
            return
        self.local_rank = self.cluster_environment.local_rank()
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        if self._layer_sync is not None:
            raise MisconfigurationException(
                f"`sync_batchnorm=True` is not supported by strategy='{self.strategy_name}' in several processes,"
                " because each microbatch is normalized by itself. Leave it out, or use strategy='ddp'."
            )

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed and self.processes is None:
            assert self.cluster_environment is not None
            reset_seed()  # as with DDP: what is made from the seed is the same in all processes
            rank_zero_info(f"{self.strategy_name}: one of {self.world_size} processes; waiting for the others")
            self.processes = Processes(self.cluster_environment)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.processes is not None:
            self.processes.follow_first(model)
        return super()._setup_model(model)

    def before_collective(self) -> None:
        """Called before the main thread, or a step, communicates. All processes have to do it in the same order."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.processes is None or not isinstance(tensor, Tensor):
            return tensor
        self.before_collective()
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.processes is None:
            return tensor
        self.before_collective()
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.processes is not None:
            self.before_collective()
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.processes is None:
            return obj
        self.before_collective()
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def on_validation_start(self) -> None:
        self._share_buffers()
        super().on_validation_start()

    def on_train_end(self) -> None:
        self._share_buffers()
        super().on_train_end()

    def _share_buffers(self) -> None:
        """All processes validate with, and are left with, the running statistics of process 0."""
        if self.processes is not None and self._lightning_module is not None:
            self.processes.follow_buffers(self._lightning_module)

    def teardown(self) -> None:
        super(ParallelStrategy, self).teardown()  # whose own takes WORLD_SIZE away, which the next Trainer needs

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.processes is not None:
            _explain(exception)


def _explain(error: BaseException) -> None:
    """Adds to what a collective has raised, here or elsewhere in the process, what has probably caused it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    if isinstance(error, RuntimeError) and (where == __name__ or where.startswith("torch.distributed")):
        error.add_note(
            "roundpipe: raised while communicating with the other processes. If one of them has failed, its own error"
            " is the cause."
        )
