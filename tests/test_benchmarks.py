"""The benchmarks run, in small; what they measure is not judged here, where others may be using the machine."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.schedules import NAMES


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(sys.path[0]):
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_schedules(name: str, benchmark: Any) -> None:
    options = argparse.Namespace(devices=2, layers=4, microbatches=4, milliseconds=1, batches=1)
    row = benchmark("schedules").measure(name, options)
    assert row["schedule"] == name
    assert 0 < row["measured_busy"] < 1 and 0 < row["simulated_busy"] <= 1
    assert row["measured_seconds"] > row["simulated_seconds"] > 0


def test_overhead(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("overhead")
    monkeypatch.setattr(module, "MODELS", ((2, 64, 8, 0.0),))
    (row,) = module.measure(rounds=1, steps=2)
    assert row.holds and row.measured > 0
