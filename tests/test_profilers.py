"""Lightning's profilers: blocks of the user's own in training_step are recorded as without us."""

import pstats
import re
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, fit_microbatches, fit_pipeline, result
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from torch import Tensor, nn

BATCHES, M = 5, 3


class Profiled(L.LightningModule):
    """A block around all layers, with another one in it, and one that is started and stopped by hand."""

    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step < self.first:
            return self.net(batch).square().mean()
        profiler = self.trainer.profiler
        with profiler.profile("outer"):
            hidden = self.net[1](self.net[0](batch))
            with profiler.profile("inner"):
                hidden = self.net[2](hidden)
        profiler.start("by hand")
        loss = self.net[3](hidden).square().mean()
        profiler.stop("by hand")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


NAMES = ["outer", "inner", "by hand"]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 16, generator=generator) for _ in range(BATCHES)]


def trained(profiler: Profiler, m: int = M, devices: int = 2, model: L.LightningModule | None = None) -> L.Trainer:
    torch.manual_seed(0)
    return fit_pipeline(model or Profiled(), batches(), m, devices, run={"profiler": profiler})


@pytest.mark.parametrize("m", [1, M])
@pytest.mark.parametrize("devices", [1, 2])
def test_simple(m: int, devices: int) -> None:
    profiler = SimpleProfiler()
    trained(profiler, m, devices)
    times = profiler.recorded_durations
    assert [len(times[name]) for name in NAMES] == [BATCHES * m] * 3
    assert all(time > 0 for name in NAMES for time in times[name])
    assert sum(times["inner"]) < sum(times["outer"])
    assert not profiler.current_actions
    assert "start" not in vars(profiler) and "stop" not in vars(profiler)


class ProfiledForward(Profiled):
    def forward(self, x: Tensor) -> Tensor:
        with self.trainer.profiler.profile("inner"):
            return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.trainer.profiler.profile("outer"):
            made = F.normalize(self(batch), dim=-1)
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))


def test_in_calls_that_are_split() -> None:
    profiler = SimpleProfiler()
    torch.manual_seed(0)
    fit_pipeline(ProfiledForward(), batches(), M, 2, split="model", run={"profiler": profiler})
    assert len(profiler.recorded_durations["inner"]) == BATCHES * M
    assert len(profiler.recorded_durations["outer"]) == BATCHES


@pytest.mark.parametrize("devices", [1, 2])
def test_pytorch(devices: int, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, schedule=None, export_to_chrome=False)
    counts: dict[str, int] = {}

    class Counts(L.Callback):
        def on_train_end(self, *_: Any) -> None:
            profiler.summary()
            counts.update({event.key: event.count for event in profiler.function_events.key_averages()})

    torch.manual_seed(0)
    run = {"profiler": profiler, "callbacks": [Counts()]}
    fit_pipeline(Profiled(), batches(), M, devices, run=run)
    assert [counts[f"[pl][profile]{name}"] for name in NAMES] == [BATCHES * M] * 3


def linear_calls(profiler: AdvancedProfiler) -> dict[str, int]:
    """How many calls of `linear` each action has seen."""
    profiles = {name: pstats.Stats(profiler.profiled_actions[name]).stats for name in NAMES}
    return {
        name: sum(calls for (_, _, function), (calls, *_) in stats.items() if "_nn.linear" in function)
        for name, stats in profiles.items()
    }


@pytest.mark.parametrize("devices", [1, 2])
def test_advanced(devices: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It follows one thread at a time, so the microbatches run one after the other."""
    monkeypatch.setattr(AdvancedProfiler, "teardown", lambda self, stage: None)  # it would forget what it has recorded
    expected = {"outer": 2 * BATCHES * M, "inner": BATCHES * M, "by hand": BATCHES * M}
    plain, ours = AdvancedProfiler(), AdvancedProfiler()
    torch.manual_seed(0)
    fit_microbatches(Profiled(), batches(), M, profiler=plain)
    with caplog.at_level("INFO", "lightning.pytorch"):
        trained(ours, devices=devices)
    assert "because training_step uses the AdvancedProfiler" in caplog.text
    assert linear_calls(ours) == linear_calls(plain) == expected


def test_used_late() -> None:
    late = Profiled()
    late.first = 2
    profiler = SimpleProfiler()
    trained(profiler, model=late)
    assert [len(profiler.recorded_durations[name]) for name in NAMES] == [(BATCHES - 2) * M] * 3


def test_used_late_where_threads_cannot_be_told_apart() -> None:
    late = Profiled()
    late.first = 2
    with pytest.raises(RuntimeError, match=r"uses the AdvancedProfiler.* from the first batch on") as caught:
        trained(AdvancedProfiler(), model=late)
    assert f"of {M} in batch 2" in caught.value.__notes__[0]


class Own(Profiler):
    """A profiler of the user's own, of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def start(self, action_name: str) -> None:
        assert action_name not in self.open
        self.open.append(action_name)

    def stop(self, action_name: str) -> None:
        self.open.remove(action_name)
        self.seen.append(action_name)


def test_of_the_users_own() -> None:
    profiler = Own()
    trained(profiler)
    assert [name for name in profiler.seen if name in NAMES] == ["inner", "outer", "by hand"] * (BATCHES * M)


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler, AdvancedProfiler])
def test_numbers_are_the_same(kind: type[Profiler]) -> None:
    torch.manual_seed(0)
    expected = result(fit_microbatches(Profiled(), batches(), M))
    assert_equal(result(trained(kind())), expected)


def test_phases() -> None:
    """What the main thread waits for in the pipeline."""
    profiler = SimpleProfiler()
    trained(profiler)
    times = {
        name.partition(".")[2]: times for name, times in profiler.recorded_durations.items() if "RoundPipe" in name
    }
    assert len(times["forward"]) == len(times["training_step"]) == BATCHES
    assert all(part < whole for part, whole in zip(times["forward"], times["training_step"], strict=True))
    assert times["backward_wait"] and times["optimizer_wait"]


@pytest.mark.parametrize("split", ["step", "model"])
def test_actions_in_pytorchs_profiler(split: str, tmp_path: Path) -> None:
    """Each action of a batch is a range in the thread that runs it, with its operations in it."""
    quiet = {"export_to_chrome": False, "record_module_names": False}  # by hooks, and a call with hooks is not split
    profiler = PyTorchProfiler(dirpath=tmp_path, schedule=None, **quiet)
    found: list[Any] = []

    class Looks(L.Callback):
        def on_train_end(self, *_: Any) -> None:
            profiler.summary()
            found.extend(profiler.function_events)

    torch.manual_seed(0)
    model = Profiled() if split == "step" else ProfiledForward()
    trainer = fit_pipeline(
        model, batches(), M, 2, split=split, run={"profiler": profiler, "callbacks": [Looks()]}, schedule="gpipe"
    )
    assert trainer.global_step == BATCHES
    actions = [event for event in found if re.fullmatch(r"(F|B|FB|W)\d+·mb\d+", event.name)]
    names = Counter(event.name for event in actions)
    first = int(split == "model")  # there, 0 is the step itself, which runs once
    expected = {f"{action}·mb{i}" for i in range(first, first + M) for action in ("F0", "F1", "B1", "B2", "B3")}
    assert set(names) == expected
    assert {name: names[name] for name in expected} == {
        name: {"F0": BATCHES, "B1": 1}.get(name[:2], BATCHES - 1) for name in expected
    }
    assert sum("linear" in event.name and _inside(event, actions) for event in found) >= 4 * BATCHES * M


def _inside(event: Any, ranges: list[Any]) -> bool:
    return any(
        around.thread == event.thread
        and around.time_range.start <= event.time_range.start
        and event.time_range.end <= around.time_range.end
        for around in ranges
    )
