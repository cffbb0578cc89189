"""What the host needs, counted before anything is allocated, and what there is of it."""

import copy
import mmap
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Batches, fit_pipeline
from models import MLP, batches_of, vectors
from torch import nn, optim

from lightning_roundpipe import verify
from lightning_roundpipe.host_need import (
    HostBytes,
    HostNeed,
    available_memory,
    bytes_of_trained,
    check_fits,
    host_need,
    most_to_pin,
    resident_memory,
    states_of,
)
from lightning_roundpipe.layer_groups import alike, name_of, sizes_of

OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    *((kind, {}) for kind in (optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD)),
    *((kind, {}) for kind in (optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD)),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.SGD, {"momentum": 0.9}),
]


# --- what is needed


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_states_are_what_an_optimizer_really_keeps(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.randn(40, 50))
    optimizer = kind([parameter], lr=0.1, **options)
    counted = states_of(optimizer, optimizer.param_groups[0])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[parameter].values() if value.dim() > 0)
    assert counted == kept / parameter.numel()


def test_a_sparse_optimizer_keeps_dense_state() -> None:
    embedding = nn.Embedding(40, 50, sparse=True)
    optimizer = optim.SparseAdam(embedding.parameters())
    need = host_need(embedding, [optimizer], mixed=False, staleness=0)
    assert need.all == HostBytes(8000, 0, 16000, 0), "a sparse gradient may be of any size"
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert sum(value.numel() for value in optimizer.state[embedding.weight].values() if torch.is_tensor(value)) == 4000


def test_unknown_optimizers_count_as_nothing() -> None:
    class Own(optim.Adam):
        """May keep its state in other ways."""

    net = nn.Linear(10, 10, bias=False)
    need = host_need(net, [Own(net.parameters())], mixed=False, staleness=0)
    assert need == HostNeed(HostBytes(400, 400, 0, 0), 400, "Own", True)


def test_a_module() -> None:
    net = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 20, bias=False)).requires_grad_(False)
    net[1].requires_grad_(True)
    adam = optim.AdamW(net[1].parameters())
    assert host_need(net, [adam], mixed=False, staleness=0).all == HostBytes(400 + 800, 800, 1600, 0)
    assert host_need(net, [adam], mixed=False, staleness=1).all == HostBytes(400 + 800, 800, 1600, 1600)
    assert host_need(net, [adam], mixed=True, staleness=0).all == HostBytes(400 + 800, 400, 1600, 400)
    need = host_need(net, [adam], mixed=True, staleness=1)
    assert need.all == HostBytes(400 + 800, 400, 1600, 800) and need.missing == need.all.total - 1200
    assert not need.unknown and need.optimizer == "AdamW"


def test_state_that_is_there_is_not_missing() -> None:
    """A second fit with the same optimizer, or after a checkpoint was loaded."""
    net = nn.Linear(100, 100, bias=False)
    adam = optim.Adam(net.parameters())
    before = host_need(net, [adam], mixed=False, staleness=0)
    net(torch.randn(2, 100)).sum().backward()
    adam.step()
    after = host_need(net, [adam], mixed=False, staleness=0)
    assert before.missing == 3 * 40_000 and after.missing == 40_000
    assert after.all.optimizer == before.all.optimizer + 4, "with the number of steps"


def test_what_is_mapped_from_files_counts_as_soon_as_it_is_trained(tmp_path: Path) -> None:
    net = nn.Linear(100, 1000, bias=False)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    net.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    frozen = copy.copy(net).requires_grad_(False)
    assert host_need(frozen, [], mixed=False, staleness=0) == HostNeed(HostBytes(), 0, "", False)
    net.requires_grad_(True)
    assert host_need(net, [], mixed=False, staleness=0) == HostNeed(HostBytes(400_000, 400_000), 800_000, "", False)


def test_half_and_double_precision() -> None:
    assert bytes_of_trained(2, mixed=False, staleness=1) == HostBytes(2, 2, 4, 4)
    assert bytes_of_trained(4, mixed=True, staleness=0, rounds_gradients=False) == HostBytes(4, 4, 8, 2)
    net = nn.Linear(10, 10, bias=False).double()
    assert host_need(net, [], mixed=True, staleness=0).all == HostBytes(800, 800), "autocast leaves it as it is"


# --- does it fit


NEED = HostNeed(HostBytes(10**9, 10**9, 2 * 10**9, 0), 3 * 10**9, "AdamW", False)


@pytest.mark.parametrize("available", [None, 3 * 10**9, 10**12])
def test_what_may_fit_is_let_pass(available: int | None) -> None:
    check_fits(NEED, available, staleness=0, halves=True)


def test_what_surely_does_not_fit_is_refused_with_what_helps_in_order() -> None:
    with pytest.raises(MemoryError) as caught:
        check_fits(NEED, 3 * 10**9 - 1, staleness=1, halves=True)
    message = str(caught.value)
    assert message.startswith(
        "Training needs at least 3 GB of host memory besides what it has, and 3 GB are available:"
    )
    assert "4 GB in all, 1 GB for parameters, 1 GB for gradients, 2 GB for the state of AdamW." in message
    order = ["(1) strategy='roundpipe'", "(2) freezing", "(3) an optimizer", "bf16-true", "(5) adapters", "mmap=True"]
    assert [message.find(word) for word in order] == sorted(message.index(word) for word in order)
    with pytest.raises(MemoryError, match=r"order: \(1\) freezing .*\(2\) adapters") as caught:
        check_fits(HostNeed(HostBytes(2, 2), 2, "SGD", True), 1, staleness=0, halves=False)
    assert "; how large the state of SGD is, is not known." in str(caught.value)


def test_a_run_that_cannot_fit_ends_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_roundpipe.strategy.available_memory", lambda: 1000)
    monkeypatch.setattr("lightning_roundpipe.strategy.Pipeline", None)  # is not made
    model = MLP(optimizer=optim.AdamW)
    with pytest.raises(MemoryError, match=r"Training needs at least .* and 1 kB are available"):
        fit_pipeline(model, batches_of(vectors, 2, 6, torch.float32), 2, staleness=1)
    assert not model.seen


def test_what_is_counted_is_what_training_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one byte less it is refused, with all of it not."""
    needs: list[HostNeed] = []

    def note(need: HostNeed, available: int | None, **options: Any) -> None:
        needs.append(need)

    monkeypatch.setattr("lightning_roundpipe.strategy.check_fits", note)
    model = MLP(optimizer=optim.AdamW)
    trainer = fit_pipeline(model, batches_of(vectors, 2, 6, torch.float32), 2, run={"accumulate_grad_batches": 1})
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert needs == [HostNeed(HostBytes(4 * numbers, 4 * numbers, 8 * numbers), 12 * numbers, "AdamW", False)]
    state = trainer.optimizers[0].state.values()
    assert sum(value.nbytes for of_one in state for value in of_one.values() if value.dim()) == 8 * numbers


class Held(L.Callback):
    """Bytes that are there for gradients, optimizer state, and copies that layers compute with."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy.settle()
        store = trainer.strategy.pipeline.store
        free = trainer.strategy.pipeline.gradients.memory._free
        states = (
            value
            for optimizer in trainer.optimizers
            for of_one in optimizer.state.values()
            for value in of_one.values()
        )
        masters = {parameter.data_ptr() for parameter in module.parameters()}
        leaves = {leaf.data_ptr(): leaf for leaves in store._leaves for leaf in leaves.values()}
        self.bytes = (
            sum(tensor.nbytes for tensors in free.values() for tensor in tensors),
            sum(value.nbytes for value in states if value.dim()),
            sum(leaf.nbytes for address, leaf in leaves.items() if address not in masters),
        )


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_gets_no_gradient_or_is_in_no_optimizer(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parameters take nothing besides themselves, whether an optimizer knows of them or not. Others that none
    knows of have no state; their gradients come all the same.
    """

    def groups(module: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in module.named_parameters() if not name.startswith(("net.3", "net.4"))]

    needs: list[HostNeed] = []
    monkeypatch.setattr("lightning_roundpipe.strategy.check_fits", lambda need, *args, **options: needs.append(need))
    model, held = MLP(optimizer=optim.AdamW, groups=groups), Held()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("net.2", "net.3")))  # of an optimizer, and of none
    run = {"callbacks": [held]}
    fit_pipeline(model, batches_of(vectors, 3, 6, torch.float32), 2, staleness=staleness, run=run)
    (need,) = needs
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    stepped = sum(parameter.nbytes for parameter in groups(model) if parameter.requires_grad)
    assert 0 < stepped < trained < need.all.parameters
    assert held.bytes == (trained, 2 * stepped, 2 * trained * staleness)
    assert held.bytes == (need.all.gradients, need.all.optimizer, need.all.copies)


# --- what there is


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMORY = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    50 kB\nSwapFree: 0 kB\nHugePages_Total:       0\n"}
GROUP = {
    "memory.max": "40960\n",
    "memory.current": "30720\n",
    "memory.stat": "anon 1\nactive_file 5\ninactive_file 7\n",
}


def in_group(directory: str, files: dict[str, str]) -> dict[str, str]:
    return {f"sys/fs/cgroup/{directory}/{name}": text for name, text in files.items()}


def test_the_system_s_memory(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None and most_to_pin(tmp_path) is None, "another system"
    assert available_memory(system(tmp_path, MEMORY)) == 50 * 1024
    swap = {"proc/meminfo": MEMORY["proc/meminfo"].replace("SwapFree: 0", "SwapFree: 7")}
    assert available_memory(system(tmp_path, swap)) == 57 * 1024
    assert most_to_pin(system(tmp_path, swap)) == 25 * 1024, "swap is no place for it"


@pytest.mark.parametrize("directory", ["", "a", "a/b"], ids=["of a container", "above", "own"])
def test_control_groups(directory: str, tmp_path: Path) -> None:
    files = MEMORY | {"proc/self/cgroup": "0::/a/b\n"} | in_group(directory, GROUP)
    assert available_memory(system(tmp_path, files)) == 10240 + 12
    unlimited = in_group(directory, {"memory.max": "max\n"})
    assert available_memory(system(tmp_path, unlimited)) == 50 * 1024


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    group = {
        "memory.limit_in_bytes": "40960\n",
        "memory.usage_in_bytes": "30720\n",
        "memory.stat": "cache 9\ntotal_active_file 5\ntotal_inactive_file 7\n",
    }
    files = MEMORY | {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/x\n3:cpuset:/\n"}
    assert available_memory(system(tmp_path, files | in_group("memory/x", group))) == 10240 + 12
    more = {"memory.usage_in_bytes": "99999999\n"}
    assert available_memory(system(tmp_path, in_group("memory/x", more))) == 0, "never less"


def test_this_system() -> None:
    """Where it tells."""
    here = Path("/proc/meminfo").exists()
    assert (available_memory() is not None) == (resident_memory() is not None) == here
    assert not here or (resident_memory() or 0) > 0


def test_resident_memory(tmp_path: Path) -> None:
    assert (
        resident_memory(system(tmp_path / "linux", {"proc/self/statm": "900 70 30 1 0 200 0\n"})) == 70 * mmap.PAGESIZE
    )
    assert resident_memory(system(tmp_path / "other", {})) is None


# --- tables of layers


def test_groups_of_layers() -> None:
    assert alike("abacab") == [[0, 2, 4], [1, 5], [3]]
    assert name_of(["embed"]) == "embed"
    assert name_of(["blocks.0", "blocks.1", "blocks.47"]) == "blocks.0 .. 47"
    assert name_of(["encoder.0", "decoder.5"]) == "encoder.0 .. decoder.5"
    assert name_of(["first", "second"]) == "first .. second"
    assert sizes_of([range(1), range(1, 4), range(4, 7)]) == "1, 2 x 3" and sizes_of([]) == "none"


def test_verify_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains as a Trainer does, and is refused as one is."""
    monkeypatch.setattr("lightning_roundpipe.strategy.available_memory", lambda: 0)

    class Small(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> optim.Optimizer:
            return optim.SGD(self.parameters(), lr=0.1)

    report = verify(Small(), next(iter(Batches([torch.randn(4, 4)]))), microbatches=2)
    assert not report.ok and "MemoryError" in str(report)
