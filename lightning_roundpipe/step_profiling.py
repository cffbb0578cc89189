"""Blocks of the user's own in a split step, ``with self.trainer.profiler.profile("..."):``: one for each microbatch.

Profilers know an action by its name and take it for open once. But microbatches take turns between layers, so that the
same action is open in several of them.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from lightning_roundpipe.step_logging import put_back

_OPEN_ACTIONS = {SimpleProfiler: "current_actions", PyTorchProfiler: "_recording_map"}
"""Where profilers that can tell several threads apart keep what is open, by name."""


@contextmanager
def recording_nothing(profiler: Profiler) -> Iterator[None]:
    """For runs of the step that the user did not ask for."""
    with _standing_in(profiler, lambda action_name: None, lambda action_name: None):
        yield


@contextmanager
def _standing_in(profiler: Profiler, start: Callable[[str], None], stop: Callable[[str], None]) -> Iterator[None]:
    attributes = vars(profiler)
    own = {name: attributes.get(name) for name in ("start", "stop")}
    attributes.update(start=start, stop=stop)
    try:
        yield
    finally:
        for name, method in own.items():
            put_back(attributes, name, method)


class StepProfiling:
    """Stands in for a profiler's ``start`` and ``stop`` while the microbatches run.

    What they record adds up: each microbatch counts as a call of its own, and the time of a block includes the waits
    for devices in it.

    Args:
        profiler: The trainer's profiler.
        interleaved: Whether microbatches take turns in this batch.
        run_serially: Called with the reason where only a serial order of the microbatches can be right.
    """

    def __init__(self, profiler: Profiler, interleaved: bool, run_serially: Callable[[str], None]) -> None:
        self._profiler = profiler
        self._interleaved = interleaved
        self._run_serially = run_serially
        self._open_actions = next((name for kind, name in _OPEN_ACTIONS.items() if isinstance(profiler, kind)), None)
        self._open: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        """By thread, of which each microbatch has one."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        profiler = self._profiler
        if isinstance(profiler, PassThroughProfiler):
            yield
            return
        start, stop = (partial(self._in_microbatch, method) for method in (profiler.start, profiler.stop))
        with _standing_in(profiler, start, stop):
            yield

    def _in_microbatch(self, method: Callable[[str], None], action_name: str) -> None:
        profiler, name = self._profiler, self._open_actions
        if name is None:
            self._one_at_a_time()
            method(action_name)
            return
        outside = getattr(profiler, name)
        setattr(profiler, name, self._open[threading.get_ident()])
        try:
            method(action_name)
        finally:
            setattr(profiler, name, outside)

    def _one_at_a_time(self) -> None:
        kind = type(self._profiler).__name__
        self._run_serially(f"training_step uses the {kind}, which follows one thread at a time")
        if self._interleaved:
            raise RuntimeError(
                f"training_step uses the {kind}, which it did not in the first batch, while several microbatches are in"
                " it: what it records would be mixed up. Use it from the first batch on, take the SimpleProfiler or the"
                " PyTorchProfiler, or train with RoundPipeStrategy(microbatches=1)."
            )
