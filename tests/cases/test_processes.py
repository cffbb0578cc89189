"""Two processes: each trains its share, and both have the same model after every step."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from .common import STALE, Net, Way, adam, col, half_square, lin, loader, near, sgd, weights
from .processes import Together, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each process has to import everything

DDP = Way(microbatches=1, devices=2, plain=True)
# With the split given, for a loss of zero would leave the batch whole.
WAYS = [*(Way(*setting, split="step") for setting in product((1, 2), (1, 2), (False, True))), Way(2, 2)]


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[Together]]:
    started: list[Together] = []
    yield started
    for processes in started:
        processes.end()


@pytest.fixture
def pair(pairs: list[Together]) -> Together:
    """Two processes that torchrun might have started: those of the test before, unless that has failed."""
    if not pairs or not pairs[-1].alive:
        pairs.append(Together(2, elastic=True))
    return pairs[-1]


def trainer_of(way: Way, strategy: dict[str, Any] | None = None, **options: Any) -> L.Trainer:
    """The reference is plain Lightning's DDP, with the same processes."""
    own_batches = {"use_distributed_sampler": False}
    if not way.plain:
        return way.trainer(strategy, **(own_batches | options))
    defaults = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    ddp = "ddp_find_unused_parameters_true"
    return L.Trainer(accelerator="cpu", devices=2, strategy=ddp, **(defaults | own_batches | options))


def fit(module: L.LightningModule, batches: list[Any], way: Way, val: Any = None, **options: Any) -> L.Trainer:
    trainer = trainer_of(way, **options)
    trainer.fit(module, loader(batches), None if val is None else loader(val))
    return trainer


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- D33


class OneLayerEach(L.LightningModule):
    """A shared layer, one that only the first process calls, one that only the second calls, and one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.a, self.b, self.nobody = lin(0), lin(0), lin(0), lin(0)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        other = self.a if self.global_rank == 0 else self.b
        self.log("x", x.mean(), sync_dist=True)
        return self.net(x).mean() + other(x).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


MINE = (col(1, 3), col(5, 7))


def each_calls_another_layer(rank: int, way: Way, accumulate: int) -> tuple[list[float], float, Any]:
    module = OneLayerEach()
    trainer = fit(module, [MINE[rank]] * accumulate, way, accumulate_grad_batches=accumulate)
    return weights(module), trainer.callback_metrics["x"].item(), module.nobody.weight.grad


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", [DDP, *WAYS], ids=str)
def test_one_average_the_same_on_both(pair: Together, way: Way, accumulate: int) -> None:
    """Ranks drift apart, a sum in place of the mean, or a hang."""
    for result in pair.run(each_calls_another_layer, way, accumulate):
        assert result == ([-4.0, -1.0, -3.0, 0.0], 4.0, None)


class FrozenOnFile(L.LightningModule):
    """The weights of a frozen layer are mapped from a file; `changed` of them are not what the file says."""

    def __init__(self, path: str, changed: bool) -> None:
        super().__init__()
        self.net, self.base = lin(0), nn.Linear(256, 256, bias=False)
        state = torch.load(path, mmap=True)
        if changed:
            state["weight"][128, 0] = 5.0
        self.base.load_state_dict(state, assign=True)
        self.base.requires_grad_(False)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.net(x).mean() + self.base.weight[128, 0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=1.0)


def own_pages(rank: int, path: str, changes: int | None) -> tuple[int, float]:
    """How many pages of the frozen weights are the process's own after training, and the one in question."""
    module = FrozenOnFile(path, rank == changes)
    fit(module, [MINE[rank]] * 2, Way(2, 2, split="step"))
    weight = module.base.weight
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(weight.data_ptr() // 4096 * 8)
        entries = struct.unpack("<64Q", pages.read(64 * 8))
    return sum(entry >> 63 == 1 and entry >> 61 & 1 == 0 for entry in entries), float(weight[128, 0])


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="Linux tells of a process's pages")
def test_frozen_weights_on_file_are_not_copied(pair: Together, tmp_path: Path) -> None:
    """All processes have those of the first, and who has them already keeps them on the file."""
    path = str(tmp_path / "weights.pt")
    torch.save({"weight": torch.ones(256, 256)}, path)
    assert pair.run(own_pages, path, None) == [(0, 1.0), (0, 1.0)]
    (_, first), (_, second) = pair.run(own_pages, path, 0)
    assert first == second == 5.0
    (own, first), (_, second) = pair.run(own_pages, path, 1)
    assert own == 0 and first == second == 1.0


def test_processes_started_by_hand() -> None:
    """Each trains by itself, since no launcher is recognized, or since DDP has taken WORLD_SIZE away when it ended."""
    with together(elastic=False) as processes:
        for way in (Way(2, 2), DDP, Way(1, 1, False)):
            for result in processes.run(each_calls_another_layer, way, 1):
                assert result == ([-4.0, -1.0, -3.0, 0.0], 4.0, None)


def test_the_environment_is_left_to_the_next_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Trainer takes WORLD_SIZE away, and the next trains by itself."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    Way(1, 1).trainer().fit(Net(lin(0)), loader([col(1)]))
    assert os.environ["WORLD_SIZE"] == "1"


class Looks(Callback):
    """Keeps the gradients that hooks see."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append([parameter.grad.item() for parameter in list(pl_module.parameters())[:3]])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.on_after_backward(trainer, pl_module)


def one_looks_at_gradients(rank: int, way: Way) -> tuple[list[float], list[list[float]]]:
    module, looks = OneLayerEach(), Looks()
    fit(module, [MINE[rank]], way, callbacks=[looks] if rank == 0 else [])
    return weights(module), looks.seen


def test_in_line_on_one_and_in_the_background_on_the_other(pair: Together) -> None:
    """A hang, because only one process has a callback that looks at gradients."""
    first, second = pair.run(one_looks_at_gradients, Way(2, 2))
    assert first == ([-4.0, -1.0, -3.0, 0.0], [[4.0, 1.0, 3.0]] * 2)
    assert second == ([-4.0, -1.0, -3.0, 0.0], [])


# -- whatever changes gradients, parameters or buffers, as with DDP


class Small(L.LightningModule):
    """Clipped, accumulated, with a scheduler, with layers and rows that not every batch reaches."""

    def __init__(self, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8, sparse=sparse, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.head = nn.Linear(8, 1, dtype=dtype)
        self.head.bias.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, y = batch
        x = self.embed(rows)
        for number, block in enumerate(self.blocks):
            if number != batch_idx % 2 + self.global_rank:
                x = x + block(x)
        loss = (self.head(self.norm(x)) - y).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.0 if self.embed.sparse else 0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def small_batches(rank: int, number: int, dtype: torch.dtype) -> list[Any]:
    random = torch.Generator().manual_seed(rank)
    return [
        (torch.randint(7 - 2 * rank, (4,), generator=random), torch.randn(4, 1, generator=random, dtype=dtype))
        for _ in range(number)
    ]


def trains_small(rank: int, way: Way, sparse: bool, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    torch.manual_seed(rank)  # the second process has to take over the first one's values
    module = Small(sparse, dtype)
    trainer = fit(module, small_batches(rank, 5, dtype), way, accumulate_grad_batches=2, **options)
    assert trainer.global_step == 3
    return bits(module), trainer.callback_metrics["loss"]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_same_bits_as_ddp(pair: Together, sparse: bool, dtype: torch.dtype) -> None:
    """Clipping by the norm of one's own gradients, running statistics of one's own, a row that one process lacks."""
    options = {} if sparse else {"gradient_clip_val": 0.5}
    (right, right_loss), (_, _) = pair.run(trains_small, DDP, sparse, dtype, options)
    for way in (Way(1, 1), Way(1, 2, False), Way(1, 3)):
        for result, loss in pair.run(trains_small, way, sparse, dtype, options):
            assert same(result, right) and torch.equal(loss, right_loss)
    (first, _), (second, _) = pair.run(trains_small, Way(2, 2), sparse, dtype, options)
    assert same(first, second)  # to other values: each microbatch is normalized by itself


class Codebook(nn.Module):
    """A layer that computes with a buffer, and moves it by what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.register_buffer("center", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1, 1, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.center += x.detach().mean()
        return (x * self.weight * self.mask + self.center).pow(2)


def moves_a_buffer(rank: int, way: Way) -> dict[str, Tensor]:
    module = Net(Codebook(), lin(1), optimizer=sgd(0.1))
    fit(module, [MINE[rank] / 8] * 3, way, val=None)
    return bits(module)


def test_buffers_follow_the_first_process(pair: Together) -> None:
    """Each process computes with buffers of its own."""
    right, _ = pair.run(moves_a_buffer, DDP)
    for way in (Way(1, 2), Way(1, 1, False)):
        for result in pair.run(moves_a_buffer, way):
            assert same(result, right)


class Scaled(Net):
    """The first batch has an infinite loss, in the second process only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 0 and self.global_rank == 1 else loss


def overflows(rank: int, way: Way) -> tuple[list[float], float]:
    module = Scaled(lin(0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batch = col(2, 2) if rank == 0 else col(6, 6)
    fit(module, [batch] * 3, way, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], gradient_clip_val=3)
    return weights(module), scaler.get_scale()


def test_an_infinite_gradient_in_one_process_skips_the_step_in_both(pair: Together) -> None:
    """NaN, or two different weights and scales: one of them has skipped a step."""
    for way in (DDP, *WAYS):
        first, second = pair.run(overflows, way)
        assert first == second == (near([-6.0]), 512.0), way


def trains_stale(rank: int, way: Way) -> list[float]:
    module = Net(lin(1), loss=half_square, optimizer=sgd(1.0))
    fit(module, [col(1, 1) if rank == 0 else col(0, 0)] * 3, way)
    return weights(module)


@pytest.mark.parametrize("way", STALE, ids=str)
def test_one_step_behind_in_both(pair: Together, way: Way) -> None:
    """Averages of one step and another: each process one step behind its own count."""
    assert pair.run(trains_stale, way) == [[-0.25], [-0.25]]


class ByHand(Net):
    """Steps at every second batch, after clipping."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.net(batch).mean() / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


def trains_by_hand(rank: int, way: Way) -> list[float]:
    module = ByHand(lin(0))
    fit(module, [MINE[rank], MINE[rank], col(1, 1), col(1, 1)], way)
    return weights(module)


def test_manual_optimization(pair: Together) -> None:
    """Gradients that are clipped, or used, before they are averaged."""
    for way in (DDP, Way(2, 2)):
        assert pair.run(trains_by_hand, way) == [near([-4.0])] * 2, way


# -- what the processes have for themselves: data, random numbers


class Sees(Net):
    def __init__(self) -> None:
        super().__init__(lin(0), nn.Dropout(0.5))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.flatten().tolist()
        return super().training_step(batch, batch_idx)


def gets_a_share(rank: int) -> tuple[list[float], int]:
    module = Sees()
    trainer = Way(2, 2).trainer(use_distributed_sampler=True)
    trainer.fit(module, DataLoader(torch.arange(8.0).unsqueeze(1), batch_size=2, shuffle=True))
    return sorted(module.seen), trainer.world_size


def test_each_process_gets_its_share_of_the_data(pair: Together) -> None:
    """Both train on everything."""
    (first, size), (second, _) = pair.run(gets_a_share)
    assert size == 2 and len(first) == len(second) == 4
    assert sorted(first + second) == list(range(8))


class Drops(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self.net(batch)
        self.seen = y.detach()
        return y.mean()


def drops_out(rank: int) -> Tensor:
    L.seed_everything(0)
    module = Drops(lin(1), nn.Dropout(0.5))
    fit(module, [torch.ones(200, 1)], Way(2, 2))
    return module.seen


def test_masks_are_not_the_same_in_both(pair: Together) -> None:
    """Twice the same random numbers."""
    first, second = pair.run(drops_out)
    assert not torch.equal(first, second)


# -- checkpoints


class Resumed(Net):
    def __init__(self) -> None:
        super().__init__(lin(1), nn.Dropout(0.5), lin(1), optimizer=adam(0.1))


def trains_in_two_parts(rank: int, way: Way, path: Path) -> tuple[Any, Any]:
    L.seed_everything(0)
    batches = [torch.ones(8, 1) * (number + rank) for number in range(3)]
    straight = Resumed()
    fit(straight, batches, way, max_epochs=2)
    L.seed_everything(0)
    trainer = fit(Resumed(), batches, way)
    trainer.save_checkpoint(path)
    L.seed_everything(1)
    resumed = Resumed()
    trainer_of(way, max_epochs=2).fit(resumed, loader(batches), ckpt_path=path, weights_only=False)
    return bits(straight), bits(resumed)


def test_one_file_from_which_both_go_on(pair: Together, tmp_path: Path) -> None:
    """Two files, or one process that goes on with the other's random numbers."""
    for way in (Way(2, 2), Way(2, 2, staleness=1)):
        path = tmp_path / str(way) / "checkpoint.ckpt"
        results = pair.run(trains_in_two_parts, way, path)
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        right = results[0][0]
        for straight, resumed in results:
            assert same(straight, right) and same(resumed, right)


class Validated(Net):
    """Validates with running statistics, which grow where the batches are large."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(1, affine=False), lin(1), optimizer=sgd(0.0))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).mean(), sync_dist=True)


def validates(rank: int, way: Way, path: Path) -> tuple[float, int, str]:
    stopping = EarlyStopping("loss", patience=2, mode="max")
    saving = ModelCheckpoint(path, monitor="loss", mode="max", filename="{epoch}")
    trainer = trainer_of(way, callbacks=[stopping, saving], max_epochs=8, enable_checkpointing=True)
    trainer.fit(Validated(), loader([MINE[rank].repeat(4, 1)]), loader([col(1, 3)]))
    return trainer.callback_metrics["loss"].item(), trainer.current_epoch, Path(saving.best_model_path).name


def test_validation_stops_and_saves_in_both_at_once(pair: Together, tmp_path: Path) -> None:
    """One process stops, and the other waits for it."""
    for way in (DDP, Way(2, 2)):
        first, second = pair.run(validates, way, tmp_path / str(way))
        assert first == second and first[1] < 8, way
        assert [file.name for file in (tmp_path / str(way)).iterdir()] == [first[2]]


# -- what cannot be done


class Gathers(Net):
    """A loss over what all processes have."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.all_gather(self.net(batch), sync_grads=True).pow(2).mean()


def gathers(rank: int, way: Way, split: str) -> Any:
    module = Gathers(lin(1), lin(1), optimizer=sgd(0.001))
    try:
        fit(module, [MINE[rank]] * 3, way, strategy={"split": split})
    except RuntimeError as error:
        return str(error)
    return weights(module)


def test_a_step_that_gathers_is_not_split(pair: Together) -> None:
    """A microbatch of one process is put together with another microbatch of the other."""
    right, _ = pair.run(gathers, DDP, "step")
    for way, split in ((Way(1, 2), "step"), (Way(2, 2), "whole"), (Way(2, 2), "model")):
        assert pair.run(gathers, way, split) == [near(right)] * 2, split
    for error in pair.run(gathers, Way(2, 2), "step"):
        assert "split='model'" in error


class Measures(Net):
    """Logs a metric, of the batch or of all batches so far."""

    def __init__(self, so_far: bool) -> None:
        super().__init__(lin(1))
        self.metric = MeanMetric()
        self.so_far = so_far

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.metric(batch)
        self.log("seen", self.metric.compute() if self.so_far else self.metric, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def measures(rank: int, way: Way, so_far: bool) -> Any:
    try:
        trainer = fit(Measures(so_far), [col(0, 0), MINE[rank]], way)
    except RuntimeError as error:
        return str(error)
    return {name: trainer.callback_metrics[name].item() for name in ("seen_step", "seen_epoch")}


def test_metrics(pair: Together) -> None:
    """A step value over all processes, or metrics of different microbatches put together."""
    for way in (DDP, Way(1, 2), Way(2, 2)):
        first, second = pair.run(measures, way, False)
        assert first == {"seen_step": 2.0, "seen_epoch": 2.0} and second == {"seen_step": 6.0, "seen_epoch": 2.0}
    for way in (DDP, Way(1, 2)):
        assert pair.run(measures, way, True) == [{"seen_step": 2.0, "seen_epoch": 1.0}] * 2
    for error in pair.run(measures, Way(2, 2), True):
        assert "split='model'" in error


def differs(rank: int) -> str:
    with pytest.raises(MisconfigurationException) as error:
        fit(Net(lin(0), *([lin(1)] if rank else [])), [col(1)], Way(1, 1))
    return str(error.value)


def test_another_model_in_each_process_is_refused(pair: Together) -> None:
    """A hang, or gradients added to those of another layer."""
    for error in pair.run(differs):
        assert "net.1.weight" in error


def evaluates_again(rank: int) -> str:
    with pytest.raises(MisconfigurationException) as error:
        fit(Net(lin(0), optimizer=torch.optim.LBFGS), [col(1)], Way(1, 1))
    return str(error.value)


def test_an_optimizer_that_decides_by_the_loss_is_refused(pair: Together) -> None:
    """A hang: one process evaluates once more than the other."""
    for error in pair.run(evaluates_again):
        assert "LBFGS" in error


def refuse(_: Tensor) -> None:
    raise ValueError("bad row")


class Fails(nn.Linear):
    """Refuses a bad row: in the forward, or in the backward."""

    def __init__(self, phase: str) -> None:
        super().__init__(1, 1)
        self.phase = phase

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x.max() > 10 and self.phase == "forward":
            refuse(y)
        if x.max() > 10:
            y.register_hook(refuse)
        return y


def fails(rank: int, way: Way, phase: str) -> None:
    batches = [col(1, 2)] * 2 + [col(1, 20 if rank else 2)] + [col(1, 2)] * 20
    fit(Net(Fails(phase), lin(1), lin(1)), batches, way)


@pytest.mark.parametrize(("phase", "background"), [("backward", True), ("forward", False)])
def test_an_error_in_one_process_ends_the_other(phase: str, background: bool) -> None:
    """The other process waits for gradients that never come."""
    with together() as processes:
        processes.run(each_calls_another_layer, Way(1, 1), 1)
        processes.start(fails, Way(2, 2, background), phase)
        codes, texts = processes.wait(seconds=60)
    assert codes == [1, 1]
    assert "ValueError: bad row" in texts[1]
    assert "bad row" not in texts[0] and "If one of them has failed, its own error is the cause" in texts[0]
