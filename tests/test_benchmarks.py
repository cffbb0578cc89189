"""The benchmarks run, in small; what they measure is not judged here, where others may be using the machine."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
    row = benchmark("schedules").run(name, options)
    assert row["schedule"] == name
    assert 0 < row["measured_busy"] < 1 and 0 < row["simulated_busy"] <= 1
    assert row["measured_seconds"] > row["simulated_seconds"] > 0


def test_scheduling(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("scheduling")
    monkeypatch.setattr(module, "BLOCKS", {2: 3})
    monkeypatch.setattr(module, "SETTLING", 1)
    rows = module.measure(batches=2, only=(2,))
    assert [row.what.split(",")[0] for row in rows] == ["busy", "of the ceiling", "busy"]
    assert all(0 < row.measured < 1 for row in rows[::2]) and rows[1].measured > 0


def test_growth(benchmark: Any) -> None:
    rows = benchmark("growth").measure(rounds=1, batches=2, shapes=((2, 2), (3, 2), (3, 3)), layers=4, searched=4)
    assert len(rows) == 12 and all(row.measured > 0 for row in rows)


def test_overhead(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("overhead")
    monkeypatch.setattr(module, "MODELS", ((2, 64, 8, 0.0),))
    rows = module.measure(rounds=1, steps=2)
    assert len(rows) == 4 and all(row.holds and row.measured > 0 for row in rows)


def test_optimizer(benchmark: Any) -> None:
    rows = benchmark("optimizer").measure(rounds=1, layers=2, width=8, steps=2)
    assert len(rows) == 3 and all(row.measured > 0 for row in rows[:2])


def test_steady(benchmark: Any) -> None:
    rows = benchmark("steady").measure(steps=10, width=8, layers=2, rounds=1)
    assert [row.measured for row in rows if row.what.startswith("new threads")] == [0]


def test_memory(benchmark: Any) -> None:
    found = benchmark("memory").run(layers=2, width=8, batches=10)
    assert found["parameters"] == 2 * found["layer"] == 2 * (2 * 8 * 32 + 32 + 8)
    assert len(found["resident"]) == 10 and len(found["objects"]) == 2


def test_device_memory(benchmark: Any) -> None:
    """Nothing of it is timed: that a device holds no more than it was given room for is judged here, too."""
    module = benchmark("device_memory")
    rows = module.measure(batches=4, width=64, tokens=8, depths=(2, 5), microbatches=2, rounds=1)
    assert len(rows) == 7
    assert all(0 < row.measured * 1e6 <= module.room(torch.randn(1, 8, 64), 2) for row in rows[:2])


def test_gpu(benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What of it needs no GPU: the models, counting, and the table."""
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "VOCABULARY", 128)
    options = argparse.Namespace(layers=2, width=64, tokens=8, samples=4, accelerator="cpu")
    model = gpu.make(options, options.tokens)
    linear = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    linear -= model.position.weight.numel()
    assert gpu.flops_per_token(2, 64, 8, 128) == 6 * linear + 6 * 2 * 64 * 8
    for contestant in (gpu.by_pipeline, gpu.on_the_gpu):
        found = gpu.speed(contestant, options)
        assert found["tokens_per_second"] > 0 and found["memory"] == 0
        assert next(gpu.longest(contestant, argparse.Namespace(**(vars(options) | {"layers": 1})))) == 1024
    assert gpu.peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and gpu.peak_flops("a new one") is None
    found = {"speed": [{"tokens_per_second": 2e3, "memory": 2**30}], "larger": None, "longest": [{"tokens": 4096}]}
    shown = [row.shown for row in gpu.rows_of("ours", found, options, "NVIDIA H100")]
    assert shown == ["2 k tokens/s", "1 GiB", "0 k tokens/s", "0 GiB", "4.1e+03 tokens"]
    assert sum(gpu.SECONDS.values()) < 600
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main()
    assert "There is no GPU on this machine" in capsys.readouterr().out


def test_tables(benchmark: Any) -> None:
    row = benchmark("common").Row
    run = benchmark("run")
    rows = [row("speed", 0.5, target=0.9, peer="a loop"), row("growth", 3, "MiB", target=4, at_most=True), row("x", 1)]
    assert [each.holds for each in rows] == [False, True, True]
    assert run.markdown(rows).splitlines()[2:] == [
        "| speed | at least 0.9 | 0.5 | a loop | MISSED |",
        "| growth | at most 4 | 3 MiB |  | holds |",
        "| x |  | 1 |  |  |",
    ]
    assert "torch" in run.machine()
