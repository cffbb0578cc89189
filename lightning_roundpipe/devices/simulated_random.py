"""Random states of simulated devices in torch's checkpoints and ``fork_rng``, which keep those of real devices and none
of ``meta``: without this, a checkpoint's recompute on a simulated device would draw other numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves


@cache
def keep_random_states(generators: Callable[[], Mapping[int, torch.Generator]]) -> None:
    """From now on they keep those of simulated devices, too. Who has none keeps torch's own functions.

    Args:
        generators: The devices' generators by index, or none at all in a thread that simulates no devices.
    """
    module_of, get_states, set_states = (
        checkpoint._get_device_module,
        checkpoint.get_device_states,
        checkpoint.set_device_states,
    )
    fork = torch.random.fork_rng

    def get_device_module(device: str = "cuda") -> Any:
        return SimpleNamespace(_initialized=True) if device == "meta" and generators() else module_of(device)

    def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
        known = generators()
        indices = [leaf.device.index for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_meta]
        if not any(index in known for index in indices):
            return get_states(*args)
        return indices, [known[index].get_state() for index in indices]

    def set_device_states(devices: Sequence[int], states: Sequence[Tensor], *, device_type: str | None = None) -> None:
        if device_type != "meta":
            set_states(devices, states, device_type=device_type)
            return
        known = generators()
        for index, state in zip(devices, states, strict=True):
            known[index].set_state(state)

    @contextmanager
    def forked(known: Mapping[int, torch.Generator]) -> Iterator[None]:
        on_host, states = torch.get_rng_state(), {index: known[index].get_state() for index in known}
        try:
            yield
        finally:
            torch.set_rng_state(on_host)
            for index, state in states.items():
                known[index].set_state(state)

    def fork_rng(
        devices: Any = None, enabled: bool = True, *names: Any, device_type: Any = None, **names_by_name: Any
    ) -> AbstractContextManager[Any]:
        known = generators()
        if known and enabled and device_type in (None, "meta"):
            return forked({index: known[index] for index in (known if devices is None else devices)})
        return fork(devices, enabled, *names, **{"device_type": device_type, **names_by_name})

    checkpoint._get_device_module = get_device_module
    checkpoint.get_device_states = get_device_states
    checkpoint.set_device_states = set_device_states
    torch.random.fork_rng = fork_rng  # type: ignore[assignment]
