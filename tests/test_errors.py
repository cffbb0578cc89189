"""Whatever fails surfaces as itself in the main thread, says where it was, leaves no thread behind, and the next fit is
right.
"""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from helpers import (
    PATIENCE,
    Batches,
    RoundPipeStrategy,
    assert_alike,
    assert_equal,
    differs,
    fit_microbatches,
    in_backward,
    new_threads,
    result,
    trainer_for,
    weights,
)
from models import GPT as SmallGPT
from models import MLP, SGD, Lit, batches_of, tokens, vectors
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(60)

BATCHES = batches_of(vectors, 5, 6)
M = 3
BATCH, MICROBATCH = 2, 1  # where it goes wrong: past the warm-up, in the middle


def is_microbatch(x: Tensor, batch: int = BATCH, microbatch: int = MICROBATCH) -> bool:
    return torch.equal(x, BATCHES[batch]["x"].tensor_split(M)[microbatch])


class Broken(ValueError):
    """Raised by the user's own code."""


class NotesExceptions(L.Callback):
    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        module.exceptions.append(exception)


class Breaks(MLP):
    """Trains like an MLP until `broken` is set; then something raises at one microbatch of one batch."""

    def __init__(self, error: type[BaseException] = Broken, **options: Any) -> None:
        super().__init__(**options)
        self.error = error
        self.broken = True
        self.now = False  # whether the microbatch at hand is the one
        self.exceptions: list[BaseException] = []

    def configure_callbacks(self) -> list[L.Callback]:
        return [NotesExceptions()]

    def fail(self) -> None:
        raise self.error("bad row")


class InTrainingStep(Breaks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.broken and is_microbatch(batch["x"]):
            self.fail()
        return loss


class BeforeTheFirstLayer(Breaks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.broken and is_microbatch(batch["x"]):
            self.fail()
        return super().training_step(batch, batch_idx)


class InTheFirstBatch(Breaks):
    """The warm-up runs the microbatches in another way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.broken and is_microbatch(batch["x"], batch=0, microbatch=2):
            self.fail()
        return loss


class FragileLayer(nn.Module):
    """Fails on rows that the batch marks with a large number in the first column, in forward or in backward."""

    def __init__(self, width: int, phase: str) -> None:
        super().__init__()
        self.linear, self.phase = nn.Linear(width, width), phase
        self.fail: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        mark = float(x.detach().abs().max()) > 1e4
        if mark and self.phase == "forward" and self.fail:
            self.fail()
        if mark and self.phase == "recompute" and self.fail and in_backward():
            self.fail()
        x = self.linear(x)
        return FailsInBackward.apply(x, self.fail) if mark and self.phase == "backward" else x


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None] | None) -> Tensor:
        ctx.fail = fail
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fail:
            ctx.fail()
        return gradient, None


class InLayer(Breaks):
    """The third of ten layers fails at one microbatch: the marking number goes in by hand, where no weight can hide
    it.
    """

    def __init__(self, phase: str, **options: Any) -> None:
        super().__init__(**options)
        after = [FragileLayer(8, phase) for _ in range(6)]  # as slow as the layer, so that only these run fused
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), FragileLayer(8, phase), *after, nn.Linear(8, 3))
        self.net[2].fail = self.fail

    def forward(self, x: Tensor) -> Tensor:
        now = is_microbatch(x)
        for index, layer in enumerate(self.net):
            if index == 2 and now:
                x = x + 1e5
            x = layer(x)
            if index == 2 and now:
                x = x * 1e-5
        return x

    def mend(self) -> None:
        self.net[2].fail = None


class InGlueBackward(Breaks):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return FailsInBackward.apply(loss, self.fail) if self.broken and is_microbatch(batch["x"]) else loss


class FailingSGD(torch.optim.SGD):
    """The third step fails."""

    def __init__(self, params: Any, fail_at: int = BATCH) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.fail_at = fail_at
        self.steps = [0]  # a list, for shallow copies of the optimizer share it

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        self.steps[0] += 1
        if self.steps[0] == self.fail_at + 1:
            raise Broken("bad row")
        return super().step()


def build(kind: Callable[..., Breaks]) -> Breaks:
    torch.manual_seed(7)
    return kind().double()


def mend(model: Breaks) -> None:
    model.broken = False
    if isinstance(model, InLayer):
        model.mend()


def strategy(**options: Any) -> RoundPipeStrategy:
    return RoundPipeStrategy(microbatches=M, **{"split": "step", **options})


def raised(
    model: Lit,
    error: type[BaseException],
    devices: int,
    batches: Any = BATCHES,
    match: str | None = None,
    **options: Any,
) -> BaseException:
    """Train until it fails: the exception, once no thread is left."""
    before = set(threading.enumerate())
    trainer = trainer_for(strategy(**options), devices=devices)
    with pytest.raises(error, match=match) as caught:
        trainer.fit(model, Batches(batches))
    assert not new_threads(before)
    return caught.value


def assert_trains_right(model: Breaks, devices: int, **options: Any) -> None:
    """The same module, mended, and the same weights as at the start: trains as if nothing had happened."""
    kind = type(model)
    plain = build(partial(kind, **({"phase": model.net[2].phase} if isinstance(model, InLayer) else {})))
    mend(model), mend(plain)
    model.load_state_dict(plain.state_dict())
    model.seen.clear()
    expected = result(fit_microbatches(plain, BATCHES, M))
    trainer = trainer_for(strategy(**options), devices=devices)
    trainer.fit(model, Batches(BATCHES))
    assert_equal(result(trainer), expected)


def note_of(exception: BaseException) -> str:
    notes = "\n".join(getattr(exception, "__notes__", []))
    assert notes, "the exception carries no note"
    return notes


FAILURES = {
    "training_step": (InTrainingStep, ["forward"]),
    "before the first layer": (BeforeTheFirstLayer, ["forward"]),
    "first batch": (InTheFirstBatch, ["forward"]),
    "layer forward": (partial(InLayer, "forward"), ["forward"]),
    "layer recompute": (partial(InLayer, "recompute"), ["backward"]),
    "layer backward": (partial(InLayer, "backward"), ["backward"]),
    "glue backward": (InGlueBackward, ["backward"]),
}


def schedule_for(failure: str) -> dict[str, Any]:
    """What is to fail in a recompute must not run fused, as it may where stages are chosen by measured times."""
    return {"schedule": "gpipe"} if failure == "layer recompute" else {}


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", FAILURES)
def test_user_s_exception_surfaces_with_a_note(name: str, devices: int) -> None:
    kind, phases = FAILURES[name]
    options = schedule_for(name)
    model = build(kind)
    error = raised(model, Broken, devices, match="bad row", **options)
    assert type(error) is Broken and str(error) == "bad row"
    note = note_of(error)
    microbatch = 2 if name == "first batch" else MICROBATCH
    assert f"microbatch {microbatch + 1} of {M}" in note, note
    assert any(phase in note for phase in phases), note
    if name.startswith("layer"):
        assert "net.2" in note and re.search(r"device\D{0,10}\d", note), note
    files = [frame.path.name for frame in traceback_of(error)]
    assert os.path.basename(__file__) in files, "the traceback leads to the user's own line"
    assert model.exceptions == [error], "Lightning's on_exception ran once"
    assert_trains_right(model, devices, **options)


@pytest.mark.parametrize("name", ["training_step", "first batch", "layer forward", "layer backward", "glue backward"])
def test_stop_iteration_is_an_error(name: str) -> None:
    """Plain Lightning takes it for the end of the data, and ends the epoch without a word."""
    kind, phases = FAILURES[name]
    model = build(partial(kind, error=StopIteration))
    error = raised(model, RuntimeError, 2, match="StopIteration was raised in a training step")
    assert isinstance(error.__cause__, StopIteration) and str(error.__cause__) == "bad row"
    assert f"of {M} in batch" in note_of(error) and any(phase in note_of(error) for phase in phases)
    assert_trains_right(model, 2)


def traceback_of(error: BaseException) -> Any:
    return pytest.ExceptionInfo.from_exception(error).traceback


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("fail_at", [0, BATCH, 4])
@pytest.mark.parametrize("devices", [1, 2])
def test_exception_in_the_optimizer(fail_at: int, staleness: int, devices: int) -> None:
    """In the first step, in the middle, and in the very last, after which no other batch comes."""
    model = build(partial(Breaks, optimizer=partial(FailingSGD, fail_at=fail_at)))
    error = raised(model, Broken, devices, match="bad row", staleness=staleness)
    assert "step" in note_of(error) and "FailingSGD" in note_of(error)
    assert model.exceptions == [error]
    model.make_optimizer = SGD
    assert_trains_right(model, devices)


def test_weights_are_those_of_the_last_finished_step() -> None:
    model = build(InTrainingStep)
    raised(model, Broken, 2)
    plain = build(InTrainingStep)
    mend(plain)
    fit_microbatches(plain, BATCHES[:BATCH], M)
    assert_equal(weights(model), weights(plain))


class Gone(Exception):
    pass


class InLoader(Batches):
    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            if index == BATCH:
                raise Gone("no more data")
            yield batch


class InHook(L.Callback):
    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == BATCH:
            raise Gone("a callback fails")


class InValidation(Breaks):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise Gone("validation fails")


@pytest.mark.parametrize("where", ["loader", "callback", "validation"])
def test_exception_on_the_main_thread_while_the_pipeline_is_alive(where: str) -> None:
    model = build(InValidation)
    before = set(threading.enumerate())
    trainer = trainer_for(strategy(), devices=2, callbacks=[InHook()] if where == "callback" else [])
    with pytest.raises(Gone):
        loader = InLoader(BATCHES) if where == "loader" else Batches(BATCHES)
        trainer.fit(model, loader, Batches(BATCHES[:1]) if where == "validation" else None)
    assert not new_threads(before)
    assert_trains_right(model, 2)


# --- a loss that is None


class NoLoss(Breaks):
    """Runs its layers, and returns None at batch BATCH: from all microbatches, or from one."""

    def __init__(self, microbatches: tuple[int, ...] = (0, 1, 2), **options: Any) -> None:
        super().__init__(**options)
        self.microbatches = microbatches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        skip = any(is_microbatch(batch["x"], BATCH, k) for k in self.microbatches) or (
            len(batch["x"]) == 6 and batch_idx == BATCH
        )
        return None if self.broken and skip else loss


def test_no_loss_from_any_microbatch_skips_the_batch() -> None:
    """As plain Lightning does: no gradient, so a step that moves nothing, counted nevertheless."""
    results = []
    for chosen, batches in ((strategy(), BATCHES), ("auto", BATCHES)):
        torch.manual_seed(7)
        model = NoLoss(optimizer=partial(torch.optim.Adam, lr=0.1)).double()
        trainer = trainer_for(chosen, devices=1 if chosen == "auto" else 2)
        trainer.fit(model, Batches(batches))
        steps = {int(state["step"]) for state in trainer.optimizers[0].state_dict()["state"].values()}
        results.append((trainer.global_step, steps, weights(model)))
    assert results[0][:2] == results[1][:2] == (5, {4})
    for name, value in results[1][2].items():
        torch.testing.assert_close(results[0][2][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("microbatches", [(0,), (1,), (2,), (0, 2)])
def test_no_loss_from_some_microbatches(microbatches: tuple[int, ...], devices: int) -> None:
    """Those contribute nothing, and the others count as ever: what plain Lightning does when it is fed the
    microbatches.
    """
    ours, plain = build(partial(NoLoss, microbatches)), build(partial(NoLoss, microbatches))
    trainer = trainer_for(strategy(), devices=devices)
    trainer.fit(ours, Batches(BATCHES))
    reference = fit_microbatches(plain, BATCHES, M)
    assert_equal(result(trainer), result(reference))
    mended = build(NoLoss)
    mend(mended)
    assert differs(weights(plain), weights(fit_microbatches(mended, BATCHES, M).lightning_module))


# --- Ctrl-C


class SendsSignal(Breaks):
    """What the terminal does: the signal reaches the main thread, wherever that is, while a microbatch is at work."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.broken and is_microbatch(batch["x"]):
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "kind", [partial(InTrainingStep, error=KeyboardInterrupt), SendsSignal], ids=["raised", "signal"]
)
def test_ctrl_c(kind: Callable[..., Breaks], devices: int) -> None:
    """As with plain Lightning: SystemExit, after on_exception has seen the KeyboardInterrupt once."""
    handler = signal.getsignal(signal.SIGINT)
    model = build(kind)
    raised(model, SystemExit, devices)
    assert [type(exception) for exception in model.exceptions] == [KeyboardInterrupt]
    signal.signal(signal.SIGINT, handler)
    assert_trains_right(model, devices)


def test_ctrl_c_in_plain_lightning() -> None:
    """The reference's own check."""
    model = build(partial(InTrainingStep, error=KeyboardInterrupt))
    with pytest.raises(SystemExit):
        trainer_for().fit(model, Batches([part for batch in BATCHES for part in splits(batch)]))
    assert [type(exception) for exception in model.exceptions] == [KeyboardInterrupt]


def splits(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: x.tensor_split(M)[k] for name, x in batch.items()} for k in range(M)]


# --- batches that can't be split


class FromSeed(MLP):
    """Makes its data itself: nothing in the batch tells samples apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(batch["number"])).double()
        return self(x).pow(2).mean()


class BesideATable(MLP):
    """A field without samples, which every microbatch needs as a whole."""

    def loss(self, batch: Any) -> Tensor:
        return (self(batch["x"]) @ batch["table"].T).pow(2).mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_batch_that_cannot_be_split(devices: int) -> None:
    """The error says what the batch holds and which argument to use; with that argument it trains."""
    batches = [{"number": number, "name": "made up"} for number in range(3)]
    model, plain = build(FromSeed), build(FromSeed)
    error = raised(model, ValueError, devices, batches)
    assert "split='whole'" in str(error).replace('"', "'") and "number" in str(error), error
    assert_equal(weights(model), weights(plain))
    trainer_for(strategy(split="whole"), devices=devices).fit(model, Batches(batches))
    trainer_for().fit(plain, Batches(batches))
    assert_equal(weights(model), weights(plain))


def test_a_field_of_another_length_goes_to_every_microbatch() -> None:
    batches = [batch | {"table": torch.arange(15.0).view(5, 3).double() / 10} for batch in BATCHES]
    model, plain = build(BesideATable), build(BesideATable)
    trainer_for(strategy(), devices=2).fit(model, Batches(batches))
    trainer_for().fit(plain, Batches(batches))
    assert_alike(weights(model), weights(plain))


# --- a layer that does not compute the same again


class Unrepeatable(nn.Linear):
    """Counts its calls where no one can see it."""

    calls = iter(range(10**9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(Unrepeatable.calls) % 7)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_batch_finds_a_layer_that_cannot_be_recomputed(devices: int) -> None:
    """Never silently wrong: the error names the layer and a remedy, before any weight has changed."""
    model = build(InTrainingStep)
    mend(model)
    model.net = nn.Sequential(nn.Linear(6, 8), Unrepeatable(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    start = weights(model)
    error = raised(model, RuntimeError, devices)
    assert "net.1" in str(error) and "layers=" in str(error)
    assert_equal(weights(model), start)


# --- timing


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "data", "devices", "staleness"), [(MLP, vectors, 2, 0), (MLP, vectors, 3, 1), (SmallGPT, tokens, 3, 0)]
)
def test_random_delays_change_nothing(
    kind: Any, data: Any, devices: int, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty runs in all, each delayed in its own way at every hand-over: no deadlock, and the same numbers."""
    from lightning_roundpipe.pipeline import turnstile

    batches = batches_of(data, 3, 6)

    def run() -> dict[str, Any]:
        torch.manual_seed(7)
        model = kind(depth=2, width=4, dropout=0.2).double()
        trainer = trainer_for(RoundPipeStrategy(microbatches=3, staleness=staleness), devices=devices)
        L.seed_everything(1, verbose=False)
        trainer.fit(model, Batches(batches))
        return result(trainer)

    expected = run()
    calls = [0]
    repetitions = 20 * PATIENCE
    for repetition in range(repetitions):
        chance = random.Random(repetition)

        def delay(chance: random.Random = chance) -> None:
            calls[0] += 1
            time.sleep(chance.random() * 1e-3)

        monkeypatch.setattr(turnstile, "handover_hook", delay)
        assert_equal(run(), expected, f"repetition {repetition}")
    assert calls[0] >= repetitions * len(batches) * 3, "the delays were injected"


@pytest.mark.timeout(120)
def test_random_delays_and_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing leaves no thread and no lock behind, whatever the order of events."""
    from lightning_roundpipe.pipeline import turnstile

    names = list(FAILURES)
    for repetition in range(21):
        chance = random.Random(repetition)
        monkeypatch.setattr(turnstile, "handover_hook", lambda chance=chance: time.sleep(chance.random() * 1e-3))
        name = names[repetition % len(names)]
        options = {"staleness": repetition % 2} | schedule_for(name)
        raised(build(FAILURES[name][0]), Broken, 1 + repetition % 3, match="bad row", **options)
    monkeypatch.setattr(turnstile, "handover_hook", None)
    assert_trains_right(build(InTrainingStep), 2)
