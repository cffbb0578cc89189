"""What training needs of the host's memory at least, and what there is of it."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_roundpipe.devices.file_pages import is_on_file
from lightning_roundpipe.units import size_text


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes in host memory: of one parameter, or of all together.

    Attributes:
        parameters: The masters.
        gradients: Their sums.
        optimizer: The optimizer's state.
        copies: What layers compute with, where that is not the master itself.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.copies

    def __add__(self, other: "HostBytes") -> "HostBytes":
        return HostBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.copies + other.copies,
        )


def bytes_of_trained(
    size: int, *, mixed: bool, staleness: int, states: int = 2, rounds_gradients: bool = True
) -> HostBytes:
    """What a trained parameter takes.

    Args:
        size: Its bytes.
        mixed: Whether layers compute with a copy in half the precision.
        staleness: Of the run.
        states: How many numbers the optimizer keeps for each of the parameter's; two with Adam.
        rounds_gradients: Whether, if `mixed`, its gradient waits for the step in that precision, too.
    """
    computed_with = size // 2 if mixed else size
    copies = 2 * computed_with if staleness else computed_with if mixed else 0
    return HostBytes(size, computed_with if rounds_gradients else size, states * size, copies)


_STATES: Mapping[type[Optimizer], Callable[[dict[str, Any]], int]] = MappingProxyType(
    {
        optim.Adadelta: lambda group: 2,
        optim.Adagrad: lambda group: 1,
        optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
        optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
        optim.Adamax: lambda group: 2,
        optim.ASGD: lambda group: 1,
        optim.NAdam: lambda group: 2,
        optim.RAdam: lambda group: 2,
        optim.RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
        optim.Rprop: lambda group: 2,
        optim.SGD: lambda group: int(bool(group["momentum"])),
        optim.SparseAdam: lambda group: 2,
    }
)


def states_of(optimizer: Optimizer, group: dict[str, Any]) -> int | None:
    """How many numbers the optimizer keeps for each of a group's parameters, or None where that is not known."""
    count = _STATES.get(type(optimizer))
    return None if count is None else count(group)


@dataclass(frozen=True, slots=True)
class HostNeed:
    """What a run needs at least: inputs that are kept for recomputing, and batches, come on top.

    Attributes:
        all: By what it is for. Frozen parameters that are mapped from files are not counted.
        missing: How much of it is still to be allocated.
        optimizer: The optimizers' classes.
        unknown: Whether the state of one of them is of unknown size. It then counts as nothing.
    """

    all: HostBytes
    missing: int
    optimizer: str
    unknown: bool


def host_need(root: nn.Module, optimizers: Sequence[Optimizer], *, mixed: bool, staleness: int) -> HostNeed:
    """What training a module needs.

    Args:
        root: The module.
        optimizers: Its optimizers.
        mixed: Whether it is trained in mixed precision. That all of its parameters travel in half precision is not
            known before the first batch, but otherwise it would be more.
        staleness: Of the run.
    """
    groups = {
        id(parameter): (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    embeddings = (module for module in root.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {id(module.weight) for module in embeddings if module.sparse}
    total, present = HostBytes(), 0
    for parameter in root.parameters():
        on_file = is_on_file(parameter)
        present += 0 if on_file else parameter.nbytes
        if not parameter.requires_grad:
            total += HostBytes(0 if on_file else parameter.nbytes)
            continue
        states, state = 0, 0
        if (found := groups.get(id(parameter))) is not None:
            state = sum(tensor.nbytes for tensor in _tensors(found[0].state.get(parameter, {})))
            states = states_of(*found) or 0
        half = mixed and parameter.dtype == torch.float32
        need = bytes_of_trained(parameter.nbytes, mixed=half, staleness=staleness, states=states)
        gradients = 0 if id(parameter) in sparse else need.gradients
        total += HostBytes(need.parameters, gradients, state or need.optimizer, need.copies)
        present += state
    return HostNeed(
        total,
        total.total - present,
        ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)),
        any(type(optimizer) not in _STATES for optimizer in optimizers),
    )


def _tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    return (value for value in state.values() if isinstance(value, Tensor))


def check_fits(need: HostNeed, available: int | None, *, staleness: int, halves: bool) -> None:
    """Before anything is allocated.

    Args:
        need: What is needed.
        available: What there is; see :func:`available_memory`.
        staleness: Of the run.
        halves: Whether there are parameters in full precision.

    Raises:
        MemoryError: When it surely does not fit. It says what helps.
    """
    if available is None or need.missing <= available:
        return
    remedies = {
        "strategy='roundpipe' (staleness 0), which needs fewer copies": staleness > 0,
        "freezing what is not to be trained (requires_grad_(False)), which then has no gradients and no state": True,
        "an optimizer with less state, such as SGD or Adafactor": need.all.optimizer > 0,
        "Trainer(precision='bf16-true'), where everything takes half": halves,
        "adapters on frozen weights that are mapped from their files (torch.load(..., mmap=True), and"
        " load_state_dict(..., assign=True)), which take no memory": True,
    }
    helps = [remedy for remedy, applies in remedies.items() if applies]
    raise MemoryError(
        f"Training needs at least {size_text(need.missing)} of host memory besides what it has, and"
        f" {size_text(available)} are available: {describe(need)}. What helps, in this order: "
        + "; ".join(f"({number}) {remedy}" for number, remedy in enumerate(helps, 1))
        + "."
    )


def describe(need: HostNeed) -> str:
    """What it consists of, in words."""
    parts = [
        f"{size_text(size)} for {what}"
        for what, size in (
            ("parameters", need.all.parameters),
            ("gradients", need.all.gradients),
            (f"the state of {need.optimizer}", need.all.optimizer),
            ("copies that layers compute with", need.all.copies),
        )
        if size
    ]
    unknown = f"; how large the state of {need.optimizer} is, is not known" if need.unknown else ""
    return f"{size_text(need.all.total)} in all, {', '.join(parts)}{unknown}"


def available_memory(root: Path = Path("/"), *, swap: bool = True) -> int | None:
    """How many more bytes this process can have: the least of what the system and its control groups leave, and swap.
    None where the system does not tell (only Linux does).

    Args:
        root: Where ``proc`` and ``sys`` are.
        swap: Whether swap counts.
    """
    system = _numbers(root / "proc/meminfo")
    if "MemAvailable" not in system:
        return None
    rooms = [room for group in _control_groups(root) if (room := _room(group)) is not None]
    return max(0, min([system["MemAvailable"], *rooms])) + (system.get("SwapFree", 0) if swap else 0)


def most_to_pin(root: Path = Path("/")) -> int | None:
    """How many bytes ``pin_memory="auto"`` may pin: half of what this process can have without swap, for the system can
    move none of it. The optimizer's state and the parameters, most of what training needs, are not pinned.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    available = available_memory(root, swap=False)
    return None if available is None else available // 2


def _control_groups(root: Path) -> Iterator[Path]:
    """The directories of the control groups of memory that this process is in, and of those above."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):  # within a container they may be mounted as if they were the root
            yield mount.joinpath(*parts[:depth])


def _room(group: Path) -> int | None:
    """What a control group leaves, or None without a limit. Pages of files are given back when memory is wanted."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        most, used = (next(iter(_lines(group / name)), "") for name in (limit, usage))
        if most.isdecimal() and used.isdecimal():
            pages = _numbers(group / "memory.stat")
            return int(most) - int(used) + sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return None


def _numbers(file: Path) -> dict[str, int]:
    """Lines such as ``MemFree: 12 kB`` or ``anon 4096``, in bytes."""
    found = {}
    for line in _lines(file):
        name, *values = line.split()
        if values and values[0].isdecimal():
            found[name.rstrip(":")] = int(values[0]) * (1024 if values[1:] == ["kB"] else 1)
    return found


def resident_memory(root: Path = Path("/")) -> int | None:
    """Bytes of this process that are in memory. None where the system does not tell (only Linux does)."""
    # Not by ``status``, which takes several times as long to write and to read: this is asked for at each logged step.
    pages = next(iter(_lines(root / "proc/self/statm")), "").split()
    return int(pages[1]) * mmap.PAGESIZE if len(pages) > 1 else None


def _lines(file: Path) -> Iterable[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
