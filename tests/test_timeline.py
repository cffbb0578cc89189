"""Timelines: everything is in them once, where and in the order in which it was, and the files are what they say."""

import json
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import assert_equal, fit, fit_pipeline, one_layer_a_stage, result
from lightning.pytorch.profilers import AdvancedProfiler
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy, Timeline
from lightning_roundpipe import strategy as strategies
from lightning_roundpipe import timeline as timelines
from lightning_roundpipe.devices import SimulatedDevice
from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.pipeline.lines import LineUp
from lightning_roundpipe.pipeline.recording import FOR_STEP, CallSpan, Recording, WaitSpan
from lightning_roundpipe.schedules import Action
from lightning_roundpipe.schedules.draw import draw_charts
from lightning_roundpipe.schedules.simulate import Span

BATCHES, M = 5, 4


class Net(L.LightningModule):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Contrast(Net):
    """Two calls, and a loss over the whole batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        a, b = self(batch), self(batch + 1)
        return (a @ b.T).var()


class Profiled(Net):
    """Uses a profiler that follows one thread at a time, so the microbatches run one after the other."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.trainer.profiler.profile("step"):
            return super().training_step(batch, batch_idx)


def batches(number: int = BATCHES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 8, generator=generator) for _ in range(number)]


class Seen:
    """What a fit has recorded, and the turns that its batches were to have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recordings: list[Recording] = []
        self.devices: list[Any] = []
        self.turns: list[tuple[Batch, list[list[tuple[int, Action]]]]] = []
        seen, lines = self, LineUp.lines

        class Kept(Recording):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                seen.recordings.append(self)

        class KeptWriter(timelines.TimelineWriter):
            def close(self) -> None:
                super().close()
                seen.devices = self._pipeline.devices

        def kept_lines(self: LineUp, batch: Batch) -> Any:
            forward, backward = lines(self, batch)
            seen.turns.append((batch, [a + b for a, b in zip(forward[:-1], backward[:-1], strict=True)]))
            return forward, backward

        monkeypatch.setattr(timelines, "Recording", Kept)
        monkeypatch.setattr(strategies, "TimelineWriter", KeptWriter)
        monkeypatch.setattr(LineUp, "lines", kept_lines)

    @property
    def recording(self) -> Recording:
        (recording,) = self.recordings
        return recording


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def record(
    path: Path, model: L.LightningModule | None = None, chosen: Sequence[int] | None = range(BATCHES), **options: Any
) -> L.Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"m": M, "devices": 2, "timeline": Timeline(path, chosen)}
    return fit_pipeline(model or Net(), batches(), **(defaults | options))


def events_in(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, after a look at whether it is one by Chrome's trace event format."""
    read = json.loads(path.read_text(encoding="utf-8"))
    assert set(read) == {"traceEvents", "displayTimeUnit"} and read["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for event in read["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str
        assert type(event["args"]) is dict
        if event["ph"] == "M":
            assert set(event) == {"ph", "pid", "tid", "name", "args"}
            what, _, kind = event["name"].partition("_")
            ((key, value),) = event["args"].items()
            assert (key, type(value)) == {"name": ("name", str), "sort_index": ("sort_index", int)}[kind]
            named[kind + what].add((event["pid"], event["tid"]) if what == "thread" else (event["pid"],))
            continue
        assert event["ph"] == "X" and set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
        assert type(event["cat"]) is str and event["name"]
        assert type(event["ts"]) is float and type(event["dur"]) is float and event["ts"] >= 0 and event["dur"] >= 0
    spans = [event for event in read["traceEvents"] if event["ph"] == "X"]
    tracks = {(event["pid"], event["tid"]) for event in spans}
    assert 0 not in {number for track in tracks for number in track} and len({thread for _, thread in tracks}) == len(
        tracks
    )
    assert min(event["ts"] for event in spans) == 0
    assert tracks <= named["namethread"] and {(process,) for process, _ in tracks} <= named["nameprocess"]
    for track in tracks:
        check_nesting([event for event in spans if (event["pid"], event["tid"]) == track])
    return spans


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    start = round(1000 * event["ts"])
    return start, start + round(1000 * event["dur"])


def check_nesting(events: Sequence[dict[str, Any]]) -> None:
    """What is on one track lies within what is around it, or after it."""
    around: list[tuple[int, int]] = []
    for start, end in sorted(map(nanoseconds, events), key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= start:
            around.pop()
        assert not around or end <= around[-1][1]
        around.append((start, end))


def of(events: Sequence[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["cat"] == category]


def check(trainer: L.Trainer, seen: Seen, path: Path, chosen: Sequence[int] = range(BATCHES)) -> None:
    """That the recording of all batches, and the trace of it, is complete and right."""
    events, recording, report = events_in(path), seen.recording, trainer.strategy.report()
    actions = of(events, "action")
    for device in range(len(report.devices)):
        mine = sorted((span for span in recording.actions if span.device == device), key=lambda span: span.start)
        assert all(a.end <= b.start for a, b in pairwise(mine))
        for batch, lines in seen.turns:
            expected = [action for _, action in lines[device]]
            numbers = range(batch.first, batch.first + batch.microbatches)
            found = [s.action for s in mine if s.batch == batch.number and s.action.microbatch in numbers]
            assert found == (expected if batch.number in chosen else [])
        in_trace = [e for e in actions if e["pid"] == 2 + device]
        assert [(str(span.action), span.batch) for span in mine] == [(e["name"], e["args"]["batch"]) for e in in_trace]
        busy, told = 0.0, 0.0
        for call in recording.calls:
            if call.device == device:
                busy += call.end - call.start
        for event in of(events, "layer"):
            told += event["dur"] / 1e6 if event["pid"] == 2 + device else 0.0
        if len(chosen) == BATCHES:
            assert busy == report.devices[device].busy_seconds
        assert told == pytest.approx(busy, abs=1e-9 * len(recording.calls))
    assert len(actions) == sum(len(line) for batch, lines in seen.turns for line in lines if batch.number in chosen)
    within = {(span.batch, span.action): span for span in recording.actions}
    for call in recording.calls:
        if call.action is not None:
            around = within[call.batch, call.action]
            assert around.start <= call.start <= call.end <= around.end
    for wait in recording.waits:
        assert any(
            span.device == wait.device and span.start <= wait.start <= wait.end <= span.end
            and (span.batch, span.action.microbatch) == (wait.batch, wait.microbatch)
            for span in recording.actions
        )  # fmt: skip
    assert [step.batch for step in (*recording.steps, *recording.steps_in_line)] == list(chosen)


SCHEDULES = ["roundpipe", "gpipe", "1f1b", "interleaved", "zb1p", "dualpipe", "model_parallel", "sequential"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_all_schedules(schedule: str, seen: Seen, tmp_path: Path) -> None:
    trainer = record(tmp_path / "t.json", schedule=schedule)
    check(trainer, seen, tmp_path / "t.json")
    assert (tmp_path / "t.png").stat().st_size > 10_000
    kinds = {event["args"]["kind"] for event in of(events_in(tmp_path / "t.json"), "action")}
    assert ("W" in kinds) == (schedule in ("zb1p", "dualpipe")) and {"F", "B"} <= kinds


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [1, 4])
def test_of_a_layer_in_each_stage(
    staleness: int, devices: int, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches on four devices: each action has its layer, and its places in schedule and model."""
    one_layer_a_stage(monkeypatch)
    trainer = record(tmp_path / "t.json", staleness=staleness, devices=devices, chosen=range(2, 5))
    check(trainer, seen, tmp_path / "t.json", range(2, 5))
    events = events_in(tmp_path / "t.json")
    for event in of(events, "action"):
        args = event["args"]
        layer = args["stage"] if args["stage"] < 6 else 10 - args["stage"]
        assert event["name"] == f"{args['kind']}{args['stage']}·mb{args['microbatch']}"
        assert args["kind"] == ("F" if args["stage"] < 5 else "FB" if args["stage"] == 5 else "B")
        assert args["layers"] == [f"layers.{layer}"]
        assert args["device"] == trainer.strategy.report().devices[event["pid"] - 2].name and args["batch"] in range(
            2, 5
        )
        assert 0 < args["busy_us"] <= event["dur"]
    layers = of(events, "layer")
    assert {event["args"]["phase"] for event in layers} == {"forward", "backward"}
    assert len(layers) == 3 * M * 12
    steps, units = of(events, "step"), of(events, "unit")
    assert [event["args"]["batch"] for event in steps] == [2, 3, 4]
    for step in steps:
        (start, end), names = nanoseconds(step), []
        for unit in units:
            if start <= nanoseconds(unit)[0] and nanoseconds(unit)[1] <= end:
                names.append(unit["name"])
        assert sorted(names) == [f"layers.{layer}" for layer in range(6)]
    main = [event["name"] for event in of(events, "main") if event["name"] in ("training_step", "forward")]
    assert main == ["training_step", "forward"] * 3


class SlowAdam(torch.optim.Adam):
    """Takes its time for each layer."""

    def _init_group(self, *args: Any) -> Any:
        time.sleep(0.01)
        return super()._init_group(*args)


class SlowNet(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowAdam(self.parameters(), lr=0.01)


def test_of_waits_for_the_optimizer(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's first forward waits until its parameters are stepped."""
    one_layer_a_stage(monkeypatch)
    check(record(tmp_path / "t.json", SlowNet()), seen, tmp_path / "t.json")
    names = Counter(e["name"] for e in of(events_in(tmp_path / "t.json"), "wait") if e["args"]["microbatch"] == 0)
    assert names["waits for the optimizer's step"] >= BATCHES - 1
    for batch in range(2, BATCHES):
        units = {unit.name: unit for unit in seen.recording.units if unit.batch == batch - 1}
        first = [call for call in seen.recording.calls if (call.batch, call.microbatch) == (batch, 0)][:6]
        assert [call.phase for call in first] == ["forward"] * 6
        assert all(units[f"layers.{call.layer}"].end <= call.start for call in first)


def test_of_lanes(seen: Seen, tmp_path: Path) -> None:
    check(record(tmp_path / "t.json", devices=4, lanes=2), seen, tmp_path / "t.json")


def test_of_calls_that_are_split(seen: Seen, tmp_path: Path) -> None:
    trainer = record(tmp_path / "t.json", Contrast(), split="model")
    check(trainer, seen, tmp_path / "t.json")
    names = [event["name"] for event in of(events_in(tmp_path / "t.json"), "action") if event["args"]["batch"] == 4]
    assert len(names) == len(set(names)) and any(name.endswith(f"mb{2 * M - 1}") for name in names)


def test_of_microbatches_one_after_the_other(seen: Seen, tmp_path: Path) -> None:
    trainer = record(tmp_path / "t.json", Profiled(), run={"profiler": AdvancedProfiler()})
    assert trainer.strategy._report is not None
    check(trainer, seen, tmp_path / "t.json")
    events = events_in(tmp_path / "t.json")
    assert [event["name"] for event in of(events, "action")] == [
        f"{kind}·mb{i}" for _ in range(BATCHES) for i in range(M) for kind in ("F0", "B1")
    ]
    assert all(len(event["args"]["layers"]) == 6 for event in of(events, "action"))


@pytest.mark.parametrize("staleness", [0, 1])
def test_of_simulated_devices(staleness: int, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their streams have tracks of their own."""
    one_layer_a_stage(monkeypatch)
    strategy = RoundPipeStrategy(
        M, staleness, split="step", devices=[SimulatedDevice(index) for index in range(2)],
        timeline=Timeline(tmp_path / "t.json", range(BATCHES)),
    )  # fmt: skip
    check(fit(Net(), batches(), strategy, devices=2), seen, tmp_path / "t.json")
    assert all(type(device.hardware) is SimulatedDevice for device in seen.devices)
    spans = of(events_in(tmp_path / "t.json"), "stream")
    for device in (2, 3):
        tracks = {event["tid"] - 1000 * device for event in spans if event["pid"] == device}
        assert tracks == {2, 3, 4, 5}  # computes, brings parameters up, inputs up, things down
    assert {event["name"] for event in spans} == {f"layer 'layers.{layer}'" for layer in range(6)}


def test_of_steps_in_line(seen: Seen, tmp_path: Path) -> None:
    check(record(tmp_path / "t.json", background_step=False), seen, tmp_path / "t.json")
    (track,) = {(event["pid"], event["tid"]) for event in of(events_in(tmp_path / "t.json"), "step")}
    assert track == (1, 1001) and len(seen.recording.steps_in_line) == BATCHES


class Conditional(Net):
    """In the third batch there is a call that no plan has foreseen, after a stage that has been left."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for i, layer in enumerate(self.layers):
            batch = layer(batch).relu()
            if batch_idx == 2 and i == 2:
                batch = self.layers[0](batch)
        return batch.square().mean()


def test_of_a_call_that_was_not_foreseen(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no turn, and a track of its own: the device may be at something else. (One with memory of its own is not:
    there, the turn before lasts until the next one.)"""
    one_layer_a_stage(monkeypatch)
    strategy = RoundPipeStrategy(M, split="step", timeline=Timeline(tmp_path / "t.json", range(BATCHES)))
    fit(Conditional(), batches(), strategy, devices=2)
    alone = [event for event in of(events_in(tmp_path / "t.json"), "layer") if event["tid"] != 1000 * event["pid"] + 1]
    assert {(event["name"], event["args"]["batch"]) for event in alone} == {("layers.0", 2)}
    assert all(event["tid"] % 1000 >= 100 for event in alone)
    assert sorted(event["args"]["microbatch"] for event in alone if event["args"]["phase"] == "forward") == [*range(M)]
    assert sum(call.batch == 2 for call in seen.recording.calls) == M * 14


def test_numbers_are_the_same(tmp_path: Path) -> None:
    assert_equal(result(record(tmp_path / "t.json")), result(record(tmp_path / "t.json", timeline=None)))


def test_which_are_chosen() -> None:
    """Without a choice, three in a row: not the first ones, and not while there may be another plan at any moment."""
    recording = Recording()
    settled = [True, True, True, False, False, True, False, True, True]
    recorded = [recording.begin_batch(i, lambda: True, settled=ready) is recording for i, ready in enumerate(settled)]
    assert [i for i, is_recorded in enumerate(recorded) if is_recorded] == [5, 6, 7]
    assert [recording.is_over(i) for i in (5, 7, 8)] == [False, False, True]
    done: list[bool] = []
    recording = Recording([1, 4])
    recorded = [recording.begin_batch(i, lambda: bool(done), settled=False) is recording for i in range(6)]
    assert recorded == [False, True, False, False, True, False]
    assert not recording.is_complete()
    done.append(True)
    assert recording.is_complete()


def test_chosen_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written while training goes on."""
    one_layer_a_stage(monkeypatch)  # so that no plans are searched
    written: list[bool] = []

    class Looks(L.Callback):
        def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
            writer = trainer.strategy._timeline_writer
            written.append(writer._thread is not None and trainer.strategy._pipeline.recording is None)

    path = tmp_path / "runs" / "t"
    torch.manual_seed(0)
    fit_pipeline(Net(), batches(), M, 2, timeline=str(path), run={"callbacks": [Looks()], "max_epochs": 5})
    numbers = sorted({event["args"]["batch"] for event in of(events_in(path.with_suffix(".json")), "action")})
    assert numbers == [3, 4, 5]
    assert written == [True]
    assert path.with_suffix(".png").exists()


class Fails(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


class FailsInBackward(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            hidden = self.layers[0](batch)
            hidden.register_hook(self._fail)
            loss = loss + self.layers[1](hidden).mean()
        return loss

    def _fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("model", [Fails, FailsInBackward])
def test_after_an_error(model: Callable[[], L.LightningModule], tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="on purpose"):
        record(tmp_path / "t.json", model())
    events = events_in(tmp_path / "t.json")
    assert {0, 1, 2} <= {event["args"]["batch"] for event in of(events, "action")} <= {0, 1, 2, 3}
    assert (tmp_path / "t.png").exists()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        record(tmp_path / "t.json")
    assert events_in(tmp_path / "t.json") and not (tmp_path / "t.png").exists()
    (line,) = [line for line in caplog.messages if "ui.perfetto.dev" in line]
    assert line.startswith("roundpipe: batches 0 to 4 as a trace") and "pip install 'lightning_roundpipe[plot]'" in line


@pytest.mark.parametrize("below", [False, True])
def test_that_cannot_be_written(below: bool, tmp_path: Path) -> None:
    """A folder has the file's name, or a file the folder's."""
    path = tmp_path / "t.json"
    path.write_text("") if below else path.mkdir()
    before = threading.active_count()
    with pytest.warns(UserWarning, match="the timeline could not be written"):
        trainer = record(path / "t.json" if below else path)
    assert trainer.global_step == BATCHES and threading.active_count() == before


def test_of_no_batch(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="of the 5 batches none was recorded"):
        record(tmp_path / "t.json", chosen=[7])
    assert not (tmp_path / "t.json").exists()


def test_arguments() -> None:
    assert RoundPipeStrategy(timeline="runs/a").timeline == Timeline("runs/a.json")
    assert Timeline("a.b.json", range(3, 6)).of_process(2) == Timeline("a.b-2.json", [3, 4, 5])
    assert Timeline("a.json").of_process(0) == Timeline("a.json")
    with pytest.raises(ValueError, match=r"such as a\.json"):
        Timeline("a.png")
    for wrong in ([], [-1], ["3"]):
        with pytest.raises(ValueError, match="`batches` must be numbers of batches"):
            Timeline("a.json", wrong)
    with pytest.raises(ValueError, match="`timeline` must be"):
        RoundPipeStrategy(timeline=3)


def test_picture_of_batches_apart(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of batches is a chart of its own, of a line for each device and one for the optimizer."""
    one_layer_a_stage(monkeypatch)
    record(tmp_path / "t.json", chosen=[1, 3, 4])
    drawn = timelines.charts(seen.recording, ["a", "b"])
    (first, alone), (second, row) = drawn.items()
    assert first.startswith("batch 1: devices computed ") and second.startswith("batches 3 to 4: ")
    for chart, numbers in ((alone, {1}), (row, {3, 4})):
        assert chart.lines == ("a", "b", "optimizer") and {bar.batch for bar in chart.bars} == numbers
        assert min(bar.start for bar in chart.bars) == 0 and max(bar.end for bar in chart.bars) == chart.end
        assert sum(bool(bar.label) for bar in chart.bars) == 11 * M * len(
            numbers
        )  # six forward stages, the last one fused
        assert [bar.batch for bar in chart.bars if bar.line == 2 and bar.kind == "step"] == sorted(numbers)
        assert all(bar.label == "" or bar.waits for bar in chart.bars)


def test_picture_says_what_an_action_waits_for(tmp_path: Path) -> None:
    """In its bars, and in the legend."""
    recording = Recording()
    action = Action("F", 0, 0)
    recording.actions.append(Span(0, 3, action, 10.0, 11.0))
    recording.calls.append(CallSpan(0, 3, 0, action, "forward", 0, 10.5, 10.75))
    recording.waits.append(WaitSpan(0, FOR_STEP, 3, 0, 10.0, 10.5))
    recording.waits.append(WaitSpan(0, "adds gradients", 3, 0, 10.75, 11.0))
    drawn = timelines.charts(recording, ["a"])
    (chart,) = drawn.values()
    assert sorted((bar.start, bar.end, bar.waits.split(",")[0], bar.kind) for bar in chart.bars) == [
        (0, 500, "waits for the optimizer's step", "step"),
        (0, 1000, "code between layers", "F"),
        (500, 750, "", "F"),
        (750, 1000, "adds gradients", "W"),
    ]
    draw_charts(drawn, tmp_path / "t.svg")
    written = re.findall("<!-- (.*) -->", (tmp_path / "t.svg").read_text())
    for words in ("code between layers, or waits for its turn to run", "adds gradients"):
        assert words in written
    assert any(text.startswith("waits for the optimizer") for text in written)
