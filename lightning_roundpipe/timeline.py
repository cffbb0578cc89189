"""Timelines of chosen batches: as a trace for ui.perfetto.dev or chrome://tracing, and as a picture beside it."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_roundpipe.devices.accelerator import STREAMS, AcceleratorDevice
from lightning_roundpipe.devices.recorded import Add, RecordedHardware
from lightning_roundpipe.pipeline.batch import present
from lightning_roundpipe.pipeline.recording import FOR_STEP, CallSpan, Recording, StreamSpan
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.pipeline.threads import WorkThread
from lightning_roundpipe.pipeline.turnstile import Cancelled
from lightning_roundpipe.schedules.draw import Bar, Chart, draw_charts
from lightning_roundpipe.schedules.simulate import Span
from lightning_roundpipe.state.optimizer import OptimizerWorker


@dataclass(frozen=True)
class Timeline:
    """Which batches are recorded, and where to.

    Args:
        path: Of the trace, a JSON file. The picture is beside it, with the ending ``.png``.
        batches: Numbers of the batches, counted from 0 where ``fit`` begins, and anew where modules were replaced
            between epochs, by pruning, say. By default three in a row, as soon as the
            pipeline has found its stages.

    Raises:
        ValueError: There are no such batches, or the path is that of a picture.
    """

    path: str | Path
    batches: Sequence[int] | None = None

    def __post_init__(self) -> None:
        path = Path(self.path)
        if path.suffix == self.picture.suffix:
            raise ValueError(f"`path` is that of the trace, such as {path.with_suffix('.json')}; got {path}.")
        object.__setattr__(self, "path", path if path.suffix else path.with_suffix(".json"))
        if self.batches is not None:
            object.__setattr__(self, "batches", tuple(self.batches))
            if not self.batches or not all(isinstance(batch, int) and batch >= 0 for batch in self.batches):
                raise ValueError(f"`batches` must be numbers of batches, such as range(3, 6); got {self.batches!r}.")

    def of_process(self, rank: int) -> "Timeline":
        """Where several processes train, each but the first has files of its own."""
        path = Path(self.path)
        return Timeline(path.with_stem(f"{path.stem}-{rank}"), self.batches) if rank else self

    @property
    def picture(self) -> Path:
        """Where the picture is."""
        return Path(self.path).with_suffix(".png")


class TimelineWriter:
    """Has a pipeline record the chosen batches, and writes them when they are over.

    Args:
        timeline: Which, and where to.
        pipeline: What is recorded.
        worker: Whose steps are.
        say: Told what was written.
        warn: Told why nothing was.
    """

    def __init__(
        self,
        timeline: Timeline,
        pipeline: Pipeline,
        worker: OptimizerWorker,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.recording: Recording = Recording(timeline.batches)
        self._timeline = timeline
        self._pipeline = pipeline
        self._worker = worker
        self._say, self._warn = say, warn
        self._steps: int | None = None
        """How many optimizer steps were handed in with the last of the batches."""
        self._thread: WorkThread | None = None
        self._recorded: list[tuple[AcceleratorDevice, RecordedHardware]] = []
        for index, device in enumerate(pipeline.devices):
            if isinstance(device, AcceleratorDevice):
                hardware: Any = RecordedHardware(device, partial(_wants, index))
                self._recorded.append((device, hardware))
                device.hardware = hardware
        pipeline.recording = self.recording

    def follow(self) -> None:
        """On the main thread, before each batch. As soon as all is recorded, a thread of its own writes it."""
        pipeline = self._pipeline
        if pipeline.recording is None or not self.recording.is_over(pipeline.batches):
            return
        if self._steps is None:
            self._steps = pipeline.store.enqueued
        if self.recording.is_complete() and self._worker.has_made(self._steps):
            self._end()
            self._thread = WorkThread("roundpipe-timeline")
            self._thread.submit(self._write, lambda: None)

    def close(self) -> None:
        """When all threads have ended: writes what was recorded, if that was not done before."""
        if self._thread is not None:
            self._thread.close()
            return
        self._end()
        self.recording.close()
        if self.recording.actions or self.recording.calls:
            self._write()
        elif isinstance(self._pipeline.monitor.failure, Cancelled):  # nothing failed before all was closed
            self._warn(
                f"roundpipe: no timeline was written to {self._timeline.path}: of the {self._pipeline.batches} batches"
                " none was recorded. Say which with RoundPipeStrategy(timeline=Timeline(path, batches=...))."
            )

    def _end(self) -> None:
        self._pipeline.recording = None
        for device, hardware in self._recorded:
            hardware.put_back(device)
        self._recorded = []

    def _write(self) -> None:
        """Does not raise: training goes on without it."""
        path, pipeline = Path(self._timeline.path), self._pipeline
        devices, layers = [d.name for d in pipeline.devices], [layer.name for layer in pipeline.layers]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(trace(self.recording, devices, layers), ensure_ascii=False), encoding="utf-8")
            try:
                draw_charts(charts(self.recording, devices), self._timeline.picture)
                picture = f"as a picture in {self._timeline.picture}"
            except ImportError as error:
                picture = f"without a picture: {error}"
        except Exception as error:
            self._warn(f"roundpipe: the timeline could not be written to {path}: {error!r}")
            return
        batches = ", ".join(map(_named, _rows(_numbers(self.recording))))
        self._say(f"roundpipe: {batches} as a trace for ui.perfetto.dev in {path}, {picture}")


def _wants(device: int, stream: str) -> Add | None:
    """Who is told of a stream's work that begins in this thread: work for a layer, in a batch that is recorded."""
    microbatch = present()
    if microbatch is None or microbatch.batch.recording is None or not microbatch.where:
        return None
    name = microbatch.where.partition(";")[0]
    add = microbatch.batch.recording.add_stream
    return partial(add, device, stream, name, microbatch.batch.number, microbatch.number)


# --- the trace

_HOST, _FIRST_DEVICE = 1, 2
_MAIN, _WORKER, _ACTIONS, _STREAMS, _OUT_OF_TURN = 1, 2, 1, 2, 100
"""Tracks, in the trace's words processes and threads. Calls without a turn have some of their own."""
_THREADS = 1000
"""Threads of different processes have different numbers, none of which is 0: so no viewer takes two for the same."""


def trace(recording: Recording, devices: Sequence[str], layers: Sequence[str]) -> dict[str, Any]:
    """The recording in Chrome's trace event format.

    Args:
        recording: Of some batches.
        devices: Names of the devices.
        layers: Names of the layers.

    Returns:
        An object for JSON. Each device is a process: its actions are a thread, with the layers' calls within them. The
        host is a process with the main thread and the optimizer worker. Times are in microseconds.
    """
    events = list(_events(recording, devices, layers))
    return {"traceEvents": [*_names(events, devices), *sorted(events, key=lambda event: (event["ts"], -event["dur"]))],
            "displayTimeUnit": "ms"}  # fmt: skip


def _events(recording: Recording, devices: Sequence[str], layers: Sequence[str]) -> Iterator[dict[str, Any]]:
    streams = _one_at_a_time(recording.streams)
    event = partial(_event, min(_starts(recording, streams)))
    inside = _calls_by_action(recording.calls)
    for span in recording.actions:
        calls = inside.get((span.batch, span.action), [])
        yield event(
            _FIRST_DEVICE + span.device, _ACTIONS, str(span.action), "action", float(span.start), float(span.end),
            kind=span.action.kind, stage=span.action.stage, microbatch=span.action.microbatch, batch=span.batch,
            device=devices[span.device], layers=list(dict.fromkeys(layers[call.layer] for call in calls)),
            busy_us=_microseconds(0.0, sum(call.end - call.start for call in calls)),
        )  # fmt: skip
    tracks = _tracks_out_of_turn(recording.calls)
    for call in recording.calls:
        yield event(
            _FIRST_DEVICE + call.device, _ACTIONS if call.action is not None else tracks[call],
            layers[call.layer], "layer", call.start, call.end,
            phase=call.phase, microbatch=call.microbatch, batch=call.batch,
        )  # fmt: skip
    for wait in recording.waits:
        yield event(
            _FIRST_DEVICE + wait.device, _ACTIONS, wait.name, "wait", wait.start, wait.end,
            microbatch=wait.microbatch, batch=wait.batch,
        )  # fmt: skip
    for thread, category, spans in (
        (_MAIN, "main", recording.main),
        (_MAIN, "step", recording.steps_in_line),
        (_WORKER, "step", recording.steps),
        (_WORKER, "unit", recording.units),
    ):
        for work in spans:
            yield event(_HOST, thread, work.name, category, work.start, work.end, batch=work.batch)
    for (device, stream), works in streams.items():
        for start, end, of in works:
            yield event(
                _FIRST_DEVICE + device, _STREAMS + STREAMS.index(stream), of.name, "stream", start, end,
                microbatch=of.microbatch, batch=of.batch,
            )  # fmt: skip


def _event(
    origin: float, process: int, thread: int, name: str, category: str, start: float, end: float, **args: Any
) -> dict[str, Any]:
    begun, ended = _microseconds(origin, start), _microseconds(origin, end)
    return {
        "ph": "X", "pid": process, "tid": _THREADS * process + thread, "name": name, "cat": category,
        "ts": begun, "dur": round(ended - begun, 3), "args": args,
    }  # fmt: skip


def _microseconds(origin: float, seconds: float) -> float:
    """In whole nanoseconds, so that what lies within something else, or after it, still does."""
    return round((seconds - origin) * 1e9) / 1e3


def _names(events: Iterable[dict[str, Any]], devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the tracks are called, and in which order they are shown."""
    processes = {_HOST: "host", **{_FIRST_DEVICE + i: f"device {i} ({name})" for i, name in enumerate(devices)}}
    threads = {(_HOST, _MAIN): "main thread", (_HOST, _WORKER): "optimizer worker"}
    threads |= {(_FIRST_DEVICE + i, _ACTIONS): "actions" for i in range(len(devices))}
    for process, thread in sorted({(event["pid"], event["tid"] % _THREADS) for event in events}):
        if process != _HOST and _STREAMS <= thread < _OUT_OF_TURN:
            threads[process, thread] = f"stream: {STREAMS[thread - _STREAMS]}"
        if thread >= _OUT_OF_TURN:
            threads[process, thread] = "calls without a turn"

    def said(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": process, "tid": _THREADS * process + thread, "name": what, "args": args}

    for process, name in processes.items():
        yield said("process_name", process, 1, name=name)
        yield said("process_sort_index", process, 1, sort_index=process)
    for (process, thread), name in sorted(threads.items()):
        yield said("thread_name", process, thread, name=name)
        yield said("thread_sort_index", process, thread, sort_index=thread)


def _calls_by_action(calls: Iterable[CallSpan]) -> dict[tuple[int, Any], list[CallSpan]]:
    found: dict[tuple[int, Any], list[CallSpan]] = {}
    for call in calls:
        if call.action is not None:
            found.setdefault((call.batch, call.action), []).append(call)
    return found


def _tracks_out_of_turn(calls: Iterable[CallSpan]) -> dict[CallSpan, int]:
    """For each call without a turn a track of its device's on which there is no other one at the time."""
    ends: dict[int, list[float]] = {}
    tracks: dict[CallSpan, int] = {}
    for call in sorted((call for call in calls if call.action is None), key=lambda call: call.start):
        of_device = ends.setdefault(call.device, [])
        track = next((i for i, end in enumerate(of_device) if end <= call.start), len(of_device))
        of_device[track : track + 1] = [call.end]
        tracks[call] = _OUT_OF_TURN + track
    return tracks


def _one_at_a_time(spans: Iterable[StreamSpan]) -> dict[tuple[int, str], list[tuple[float, float, StreamSpan]]]:
    """The start and end of each stream's work, in order. A stream does one after the other, so what several threads
    have given it at the same time begins when what was given before is done."""
    found: dict[tuple[int, str], list[tuple[float, float, StreamSpan]]] = {}
    for span in spans:
        found.setdefault((span.device, span.stream), []).append((span.start(), span.end(), span))
    for works in found.values():
        works.sort(key=lambda work: work[:2])
        done = works[0][0]
        for i, (start, end, span) in enumerate(works):
            works[i] = max(start, done), max(end, done), span
            done = works[i][1]
    return found


def _starts(recording: Recording, streams: Mapping[Any, Sequence[tuple[float, float, StreamSpan]]]) -> Iterator[float]:
    yield from (float(span.start) for span in recording.actions)
    yield from (call.start for call in recording.calls)
    yield from (wait.start for wait in recording.waits)
    for works in (recording.steps, recording.units, recording.steps_in_line, recording.main):
        yield from (work.start for work in works)
    yield from (done[0][0] for done in streams.values())


# --- the picture

_KINDS = {"forward": "F", "backward": "B", "weight gradients": "W"}
_BETWEEN = "code between layers, or waits for its turn to run"
"""What an action is at when it neither computes a layer nor waits for what the recording names."""


def charts(recording: Recording, devices: Sequence[str]) -> dict[str, Chart]:
    """The recording as charts by title, in milliseconds: one for each row of batches that follow each other. Each
    device is a line, and the optimizer's steps are another one."""
    return dict(_chart(recording, devices, batches) for batches in _rows(_numbers(recording)))


def _chart(recording: Recording, devices: Sequence[str], batches: Sequence[int]) -> tuple[str, Chart]:
    actions = [span for span in recording.actions if span.batch in batches]
    calls = [call for call in recording.calls if call.batch in batches]
    steps = [step for step in (*recording.steps, *recording.steps_in_line) if step.batch in batches]
    devices_at_work: list[Span | CallSpan] = [*actions, *calls]
    start = float(min(span.start for span in devices_at_work))

    def since_start(span: Any) -> dict[str, Any]:
        return {"start": 1e3 * (span.start - start), "end": 1e3 * (span.end - start)}

    bars = [Bar.of_action(span, **since_start(span), waits=_BETWEEN) for span in actions]
    for wait in recording.waits:
        if wait.batch in batches:
            kind = "step" if wait.name == FOR_STEP else "W"
            bars.append(Bar(wait.device, kind=kind, batch=wait.batch, **since_start(wait), waits=wait.name))
    for call in calls:
        kind = call.action.kind if call.action is not None else _KINDS[call.phase]
        bars.append(Bar(call.device, kind=kind, batch=call.batch, **since_start(call)))
    bars += [Bar(len(devices), kind="step", batch=step.batch, **since_start(step)) for step in steps]
    seconds = float(max(span.end for span in devices_at_work)) - start
    busy = sum(call.end - call.start for call in calls) / (seconds * len(devices)) if seconds else 0.0
    did = "were given work in" if recording.streams else "computed"  # and did it at their own time
    title = f"{_named(batches)}: devices {did} {100 * busy:.1f} % of {1e3 * seconds:.0f} ms"
    return title, Chart((*devices, "optimizer"), bars, max(bar.end for bar in bars), "milliseconds")


# --- which batches


def _numbers(recording: Recording) -> list[int]:
    spans: list[Span | CallSpan] = [*recording.actions, *recording.calls]
    return sorted({span.batch for span in spans})


def _rows(numbers: Sequence[int]) -> list[list[int]]:
    """The numbers, as those that follow each other."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return rows


def _named(row: Sequence[int]) -> str:
    return f"batch {row[0]}" if len(row) == 1 else f"batches {row[0]} to {row[-1]}"
