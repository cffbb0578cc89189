"""Seeds from counters, and the state of the process's generators."""

import random
from itertools import product

import numpy as np
import pytest
import torch

from lightning_roundpipe.pipeline.rng import RandomState, derive_seed, program_seed, seed_all


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_seeds_differ_and_are_repeatable() -> None:
    counters = list(product(range(-1, 6), repeat=4))
    seeds = [derive_seed(*each) for each in counters]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [derive_seed(*each) for each in counters]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_number_of_counters_counts() -> None:
    assert len({derive_seed(*[0] * count) for count in range(1, 6)}) == 5


def test_restored_generators_draw_the_same() -> None:
    state = RandomState.capture()
    first = draw()
    state.restore()
    assert draw() == first


def test_torch_alone() -> None:
    state = RandomState.capture(everything=False)
    first = draw()
    state.restore()
    second = draw()
    assert second[0] == first[0]
    assert second[1:] != first[1:]


@pytest.mark.parametrize(
    ("drawn", "same", "same_outside_torch"),
    [
        (lambda: None, True, True),
        (lambda: torch.rand(()), False, True),
        (random.random, False, False),
        (np.random.rand, False, False),
        (np.random.randn, False, False),
    ],
    ids=["nothing", "torch", "python", "numpy", "numpy's normal"],
)
def test_what_was_drawn_is_seen(drawn: object, same: bool, same_outside_torch: bool) -> None:
    state = RandomState.capture()
    drawn()
    assert RandomState.capture().same(state) == same
    assert RandomState.capture().same_outside_torch(state) == same_outside_torch


def test_seed_all() -> None:
    seed_all(11)
    first = draw()
    seed_all(11)
    assert draw() == first
    seed_all(12)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_seed_torch_alone() -> None:
    state = RandomState.capture()
    seed_all(11, everything=False)
    assert RandomState.capture().same_outside_torch(state)
    assert not RandomState.capture().same(state)


def test_large_seeds() -> None:
    seed_all(derive_seed(2**62, -1))
    assert all(0 <= value < 1 for value in draw())


def test_the_program_s_seed_follows_its_draws_and_draws_none() -> None:
    torch.manual_seed(3)
    state = RandomState.capture()
    seed = program_seed()
    assert RandomState.capture().same(state)
    assert program_seed() == seed
    torch.rand(())
    assert program_seed() != seed
    torch.manual_seed(3)
    assert program_seed() == seed
