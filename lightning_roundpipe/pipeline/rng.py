"""Random numbers: counter-like seeds for layer calls, and the state of the generators that a CPU program shares.

PyTorch's CPU generator, Python's and NumPy's belong to the whole process. Who holds the baton owns them: a microbatch's
own state is put in place when it takes the baton, and a layer that draws on the CPU keeps the baton while it runs.
"""

import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def derive_seed(*counters: int) -> int:
    """A 63-bit seed from counters such as (seed, step, microbatch, call): equal counters, equal seed, and no others."""
    digest = hashlib.blake2b(struct.pack(f"<{len(counters)}q", *counters), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the shared generators.

    Python's and NumPy's are None where they were not asked for (or NumPy has not been imported).
    """

    torch_cpu: Tensor
    python: Any = None
    numpy: Any = None

    @classmethod
    def capture(cls, *, everything: bool = True) -> "RandomState":
        state = torch.default_generator.get_state()
        if not everything:
            return cls(state)
        numpy = sys.modules.get("numpy")
        return cls(state, random.getstate(), None if numpy is None else numpy.random.get_state())

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch_cpu)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def same(self, other: "RandomState") -> bool:
        """Whether nothing was drawn between the two."""
        return same_state(self.torch_cpu, other.torch_cpu) and self.same_outside_torch(other)

    def same_outside_torch(self, other: "RandomState") -> bool:
        if self.python != other.python:
            return False
        if self.numpy is None or other.numpy is None:
            return self.numpy is other.numpy
        return self.numpy[2:] == other.numpy[2:] and bool((self.numpy[1] == other.numpy[1]).all())


def same_state(a: Tensor, b: Tensor) -> bool:
    """Whether two states of PyTorch's generator are alike. Compared at every hand-over of the baton."""
    return a.numpy().tobytes() == b.numpy().tobytes()  # twice as fast as torch.equal, and keeps the interpreter


def seed_all(seed: int, *, everything: bool = True) -> None:
    """Seeds every shared generator, or PyTorch's alone."""
    torch.default_generator.manual_seed(seed)
    if not everything:
        return
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def noting_sets(note: Callable[[], None]) -> Iterator[None]:
    """Tells whether PyTorch's generator is set for a while, as a checkpoint and ``fork_rng`` do: what is drawn then
    leaves no trace in its state. Only while nothing else runs.
    """
    set_state = torch.set_rng_state

    def noted(new_state: Tensor) -> None:
        note()
        set_state(new_state)

    torch.set_rng_state = noted
    try:
        yield
    finally:
        torch.set_rng_state = set_state


def program_seed() -> int:
    """A seed that follows from the program's own seeding and draws so far, without drawing itself."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 2


# --- generators of the user's own


def is_generator(value: Any) -> bool:
    """Whether it is a random number generator: torch's, NumPy's or Python's."""
    return isinstance(value, (torch.Generator, random.Random, *_numpy_generators()))


def generator_state(generator: Any) -> Any:
    """The state of a generator, in a form that can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return repr(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def _numpy_generators() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
