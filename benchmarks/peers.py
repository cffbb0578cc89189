"""Ways to train one GPT with two cores, each in processes of its own that stay and run batches when they are asked to.

So rounds can alternate between warm contestants. Whatever a contestant is, its batches come out of `Turns`, which takes
the time from one batch's asking to the next one's. Each process computes with one thread per device.
"""

import copy
import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import GPT, all_recomputed, quiet, some_tokens, train
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import RoundPipeStrategy

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000"}
"""Of the processes. OpenMP's default spinning collapses as soon as a neighbour is busy."""
PRELOADED = ["lightning_roundpipe", "torch.distributed.fsdp", "torch.distributed.pipelining"]
"""Imported once for all processes."""


@dataclass(frozen=True)
class Setting:
    """The model and the batch of all processes together."""

    layers: int = 8
    width: int = 512
    tokens: int = 128
    samples: int = 8

    def module(self, *, checkpoint: bool = False) -> GPT:
        """The same numbers each time."""
        torch.manual_seed(0)
        return GPT(self.layers, self.width, self.tokens, checkpoint=checkpoint)

    def batch(self) -> Tensor:
        return some_tokens(self.samples, self.tokens)


@dataclass
class Lap:
    """What a process says of some batches."""

    seconds: float
    """Per batch."""
    losses: list[float]
    """Of each batch, as far as this process has it. Empty: it has none."""
    remark: str = ""


class Turns:
    """Gives a process as many batches as it is asked for, and answers how long they took.

    One more comes first and does not count, for pipelines fill, and steps are tried out in the very first batch.
    """

    def __init__(self, connection: Connection, parts: Sequence[Tensor]) -> None:
        self.connection, self.parts = connection, parts
        self.remark: Callable[[], str] = str
        """What else there is to say of a lap."""
        self._losses: list[tuple[Tensor, float]] = []

    def note(self, loss: Tensor, share: float) -> None:
        """Part of a batch's loss. `share`: of the samples that this process has."""
        self._losses.append((loss.detach(), share))

    def _wanted(self) -> int:
        try:
            return self.connection.recv()
        except EOFError:  # whoever asked is gone
            return 0

    def __len__(self) -> int:
        return 10**9 * len(self.parts)  # known, so Lightning does not fetch a batch ahead; the end comes by itself

    def __iter__(self) -> Iterator[Tensor]:
        while count := self._wanted():
            yield from self.parts
            start = time.perf_counter()
            losses: list[float] = []
            for _ in range(count):
                self._losses.clear()
                yield from self.parts
                if self._losses:
                    losses.append(sum(loss.item() * share for loss, share in self._losses))
            self.connection.send(Lap((time.perf_counter() - start) / count, losses, self.remark()))


class NotingGPT(GPT):
    """Notes the losses. (Logging would do too, but costs time.)"""

    note: Callable[[Tensor, int], None]

    def training_step(self, tokens: Tensor, index: int = 0) -> Tensor:
        loss = super().training_step(tokens)
        self.note(loss, len(tokens))
        return loss


def ours(
    setting: Setting,
    microbatches: int,
    rank: int,
    connection: Connection,
    *,
    every: bool = False,
    **options: Any,
) -> None:
    """
    Args:
        every: Whether every layer is recomputed, as peers do it; by default those of the fused stage are not.
        options: Of the strategy.
    """
    turns = Turns(connection, [setting.batch()])
    torch.manual_seed(0)
    module = NotingGPT(setting.layers, setting.width, setting.tokens)
    module.note = lambda loss, samples: turns.note(loss, samples / setting.samples)
    if every:
        options["schedule"] = all_recomputed(microbatches, 2)
    strategy = RoundPipeStrategy(microbatches=microbatches, split="step", **options)

    def recomputed() -> str:
        layers = strategy.report().layers
        again = sum(layer.forward_stage != layer.backward_stage for layer in layers)
        count = 0 if strategy.recompute == "none" else again
        return f"{count} of {len(layers)} layers recomputed"

    turns.remark = recomputed
    train(module, turns, strategy, devices=2)


def threads(setting: Setting, microbatches: int, rank: int, connection: Connection, *, count: int) -> None:
    """No pipeline: each thread runs its share of the microbatches on a module of its own, whose parameters are those of
    the first. Then the gradients are added and stepped, each half of the parameters by one thread.
    """
    turns = Turns(connection, [setting.batch()])
    module = setting.module(checkpoint=True)
    modules = [module, *(copy.deepcopy(module) for _ in range(count - 1))]
    parameters = [list(each.parameters()) for each in modules]
    for other in parameters[1:]:
        for mine, master in zip(other, parameters[0], strict=True):
            mine.data = master.data
    optimizers = [torch.optim.AdamW(parameters[0][i::count], lr=1e-4, fused=True) for i in range(count)]

    def compute(number: int, parts: Sequence[Tensor]) -> None:
        for part in parts:
            loss = modules[number].training_step(part) * (share := len(part) / setting.samples)
            loss.backward()
            turns.note(loss / share, share)

    def step(number: int) -> None:
        own = parameters[0][number::count]
        for other in parameters[1:]:
            theirs = other[number::count]
            torch._foreach_add_([p.grad for p in own], [p.grad for p in theirs])
            for parameter in theirs:
                parameter.grad = None
        optimizers[number].step()
        optimizers[number].zero_grad()

    with ThreadPoolExecutor(count) as pool:
        for batch in turns:
            parts = batch.tensor_split(microbatches)
            list(pool.map(compute, range(count), [parts[i::count] for i in range(count)]))
            list(pool.map(step, range(count)))


def ddp(setting: Setting, microbatches: int, rank: int, connection: Connection, *, recompute: bool = True) -> None:
    """Lightning's, which communicates once per batch."""
    parts = setting.batch().chunk(2)[rank].tensor_split(microbatches // 2)
    turns = Turns(connection, parts)
    torch.manual_seed(0)
    module = NotingGPT(setting.layers, setting.width, setting.tokens, checkpoint=recompute)
    module.note = lambda loss, samples: turns.note(loss, 2 * samples / setting.samples)
    train(module, turns, DDPStrategy(process_group_backend="gloo"), devices=2, accumulate_grad_batches=len(parts))


def fsdp2(setting: Setting, microbatches: int, rank: int, connection: Connection) -> None:
    """Blocks are gathered one by one; the shards' home is the CPU, as `CPUOffloadPolicy` has it."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    module = setting.module(checkpoint=True)
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = module.configure_optimizers()
    turns = Turns(connection, [setting.batch().chunk(2)[rank]])
    for batch in turns:
        parts = batch.tensor_split(microbatches // 2)
        for number, part in enumerate(parts, 1):
            module.set_requires_gradient_sync(number == len(parts))
            loss = module.training_step(part) * (share := len(part) / len(batch))
            loss.backward()
            turns.note(loss / share, share)
        optimizer.step()
        optimizer.zero_grad()


class Stage(nn.Module):
    """Some of the blocks, and what comes before the first or after the last."""

    def __init__(self, module: GPT, number: int, stages: int) -> None:
        super().__init__()
        first, last = (len(module.blocks) * i // stages for i in (number, number + 1))
        self.start = nn.ModuleList([module.embed, module.position]) if number == 0 else None
        self.blocks = module.blocks[first:last]
        self.head = module.head if number == stages - 1 else None
        self.checkpoint = module.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        if self.start is not None:
            embed, position = self.start
            x = embed(x) + position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return x if self.head is None else self.head(x)


def pipelining(
    setting: Setting,
    microbatches: int,
    rank: int,
    connection: Connection,
    *,
    schedule: str,
    stages: Sequence[Sequence[int]],
    recompute: bool = True,
) -> None:
    """torch.distributed.pipelining. `stages`: those of each process."""
    dist.init_process_group("gloo")
    module = setting.module(checkpoint=recompute)
    count = sum(map(len, stages))
    own = [Stage(module, number, count) for number in stages[rank]]
    optimizer = torch.optim.AdamW(itertools.chain(*(stage.parameters() for stage in own)), lr=1e-4, fused=True)
    placed = [
        PipelineStage(stage, number, count, torch.device("cpu"))
        for stage, number in zip(own, stages[rank], strict=True)
    ]
    kind = schedules.get_schedule_class(schedule)
    runner = kind(placed if count > 2 else placed[0], microbatches, loss_fn=next_token_loss)
    turns = Turns(connection, [setting.batch()])
    for batch in turns:
        losses: list[Tensor] | None = [] if count - 1 in stages[rank] else None
        inputs = [batch[:, :-1]] if 0 in stages[rank] else []
        runner.step(*inputs, target=batch[:, 1:], losses=losses, return_outputs=False)
        for loss in losses or ():
            turns.note(loss, 1 / microbatches)
        optimizer.step()
        optimizer.zero_grad()


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Entry:
    """How to run a contestant."""

    run: Callable[[Setting, int, int, Connection], None]
    """Trains with so many microbatches, in the process of this rank, till no more batches come."""
    processes: int
    microbatches: Sequence[int]
    """Which numbers are tried."""
    warm_up: int = 1
    """Batches before any that counts."""


class Contestant:
    """One or two processes, as seen from outside."""

    def __init__(self, entry: Entry, setting: Setting, microbatches: int) -> None:
        os.environ |= ENVIRONMENT
        context = multiprocessing.get_context("forkserver")  # which imports once, for all
        context.set_forkserver_preload(
            ["lightning_roundpipe", "torch.distributed.fsdp", "torch.distributed.pipelining"]
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.connections, self.processes = [], []
        for rank in range(entry.processes):
            here, there = context.Pipe()
            arguments = (entry, setting, microbatches, rank, port, there)
            process = context.Process(target=_race, args=arguments, daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def lap(self, batches: int) -> Lap:
        """Runs so many batches, after one that does not count.

        Raises:
            EOFError: When a process has failed; it has printed why.
        """
        for connection in self.connections:
            connection.send(batches)
        laps = [connection.recv() for connection in self.connections]
        parts = [lap.losses for lap in laps if lap.losses]
        losses = [sum(each) / len(each) for each in zip(*parts, strict=True)]
        return Lap(max(lap.seconds for lap in laps), losses, laps[0].remark)

    def close(self) -> None:
        for connection in self.connections:
            connection.send(0)
        for process in self.processes:
            process.join()


def _race(entry: Entry, setting: Setting, microbatches: int, rank: int, port: int, connection: Connection) -> None:
    if entry.processes > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": entry.processes, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in world.items()}
    quiet()
    torch.set_num_threads(1)
    entry.run(setting, microbatches, rank, connection)


LOOPED, V = ((0, 2), (1, 3)), ((0, 3), (1, 2))

OURS = {  # which search their stages by the costs that the first batches measure
    "staleness 0": Entry(ours, 1, (2, 4, 8), warm_up=8),
    "staleness 0, lanes='auto'": Entry(partial(ours, lanes="auto"), 1, (2, 4), warm_up=8),
    "staleness 1, lanes='auto'": Entry(partial(ours, lanes="auto", staleness=1), 1, (2, 4), warm_up=8),
    "staleness 0, recompute='none'": Entry(partial(ours, recompute="none"), 1, (2, 4), warm_up=8),
    "staleness 0, all layers recomputed": Entry(partial(ours, every=True), 1, (2, 4)),
}
CEILING = Entry(partial(threads, count=2), 1, (2, 4))
ONE_THREAD = Entry(partial(threads, count=1), 1, (2,))
PEERS = {
    "Lightning DDP": Entry(ddp, 2, (2, 4)),
    "FSDP2 with CPU offload": Entry(fsdp2, 2, (2, 4)),
    "torch 1F1B": Entry(partial(pipelining, schedule="1F1B", stages=((0,), (1,))), 2, (4, 8)),
    "torch interleaved 1F1B": Entry(partial(pipelining, schedule="Interleaved1F1B", stages=LOOPED), 2, (4, 8)),
    "torch zero bubble": Entry(partial(pipelining, schedule="InterleavedZeroBubble", stages=LOOPED), 2, (4, 8)),
    "torch zero bubble V": Entry(partial(pipelining, schedule="ZBVZeroBubble", stages=V), 2, (4, 8)),
}
KEEPING = {
    "Lightning DDP, activations kept": Entry(partial(ddp, recompute=False), 2, (2,)),
    "torch zero bubble, activations kept": Entry(
        partial(pipelining, schedule="InterleavedZeroBubble", stages=LOOPED, recompute=False), 2, (4, 8)
    ),
}
"""Without recomputation, so with all activations in memory at a time."""
