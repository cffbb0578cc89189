"""Every `precision` flag: what plain Lightning gives with the same flag on the same microbatches, within that
precision.
"""

import copy
import importlib
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from helpers import (
    RoundPipeStrategy,
    assert_equal,
    differs,
    fit,
    fit_microbatches,
    fit_pipeline,
    result,
    split,
    weights,
)
from lightning.pytorch.plugins import MixedPrecision
from models import GPT, MLP, SGD, Lit, batches_of, tokens, vectors
from torch import Tensor, nn

from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.strategy import RoundPipeStrategy as Strategy

M = 2
MODELS = {"mlp": (MLP, vectors), "gpt": (GPT, tokens)}
DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = ["bf16-mixed", "16-mixed"]


def make(name: str = "mlp", **options: Any) -> Lit:
    torch.manual_seed(7)
    return MODELS[name][0](**options)


def data(name: str = "mlp", count: int = 5, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    return batches_of(MODELS[name][1], count, 8, dtype)


def moved(model: Lit, start: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.double() - start[name].double()
        for name, value in weights(model).items()
        if value.is_floating_point()
    }


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of two sets of weights, relative to the second: in the root mean square over all numbers."""
    difference = torch.cat([(a[name] - b[name]).flatten() for name in b])
    return float(difference.norm() / torch.cat([value.flatten() for value in b.values()]).norm())


@pytest.fixture(autouse=True)
def fp16_falls_back() -> Any:
    """Lightning says that it takes bf16 where the CPU has no fp16 autocast."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*AMP with fp16 is not supported on CPU.*")
        yield


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("name", MODELS)
def test_full_precision_is_exact(name: str, precision: str, devices: int) -> None:
    batches = data(name, dtype=DTYPES[precision])
    ours, plain = make(name), make(name)
    made = result(fit_pipeline(ours, batches, M, devices, run={"precision": precision}))
    expected = result(fit_microbatches(plain, batches, M, precision=precision))
    assert next(iter(expected["weights"].values())).dtype == DTYPES[precision]
    assert_equal(made, expected)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_half_precision(precision: str, devices: int) -> None:
    """One microbatch: bit for bit. Several: within the rounding of their sum, which plain Lightning adds up in half
    precision.
    """
    dtype = DTYPES[precision]
    optimizer = partial(torch.optim.SGD, lr=0.5)
    start = {name: value.to(dtype) for name, value in weights(make(optimizer=optimizer)).items()}
    runs = {}
    for m in (1, M):
        ours, plain = make(optimizer=optimizer), make(optimizer=optimizer)
        trainer = fit_pipeline(ours, data(), m, devices, run={"precision": precision})
        reference = fit_microbatches(plain, data(), m, precision=precision)
        assert all(p.dtype == dtype for p in ours.parameters())
        runs[m] = (result(trainer), result(reference), moved(ours, start), moved(plain, start))
    assert_equal(runs[1][0], runs[1][1])
    _, _, ours_moved, plain_moved = runs[M]
    assert distance(ours_moved, plain_moved) < 8 * torch.finfo(dtype).eps
    assert torch.cat([v.flatten() for v in plain_moved.values()]).norm() > 0.3, "far more than rounding"


class Kinds(L.Callback):
    """The dtypes of what the user can look at between steps."""

    def __init__(self) -> None:
        self.parameters: set[torch.dtype] = set()
        self.states: set[torch.dtype] = set()
        self.gradients: set[torch.dtype] = set()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.parameters |= {p.dtype for p in module.parameters()}
        state = trainer.optimizers[0].state
        self.states |= {
            value.dtype for values in state.values() for value in values.values() if isinstance(value, Tensor)
        }

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.gradients |= {p.grad.dtype for p in module.parameters() if p.grad is not None}


@pytest.mark.parametrize("looks", [False, True], ids=["background", "hook"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("name", MODELS)
def test_mixed_precision(name: str, precision: str, devices: int, looks: bool) -> None:
    """Close to plain Lightning, closer than to fp32; masters, gradients and optimizer state stay fp32."""
    adam = partial(torch.optim.Adam, lr=0.01)
    start = weights(make(name))
    kinds, losses, movements = [], [], []
    for kind in ("ours", "plain", "fp32"):
        callbacks: list[L.Callback] = [Kinds()] if looks else []
        model = make(name, optimizer=adam)
        run = {"precision": "32-true" if kind == "fp32" else precision, "callbacks": callbacks}
        if kind == "ours":
            fit_pipeline(model, data(name), M, devices, run=run)
        else:
            fit_microbatches(model, data(name), M, **run)
        kinds += callbacks
        movements.append(moved(model, start))
        losses.append(torch.stack(list(model.seen[key].double() for key in sorted(model.seen))))
    assert not torch.equal(losses[1], losses[2]), "the precision must matter"
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-3)
    to_plain, to_fp32 = distance(movements[0], movements[1]), distance(movements[2], movements[1])
    assert to_plain <= max(0.5 * to_fp32, 1e-6), (to_plain, to_fp32)
    if looks:
        ours, plain, _ = kinds
        assert ours.parameters == plain.parameters == {torch.float32}
        assert ours.states == plain.states == {torch.float32}
        assert ours.gradients == plain.gradients == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_device_count_changes_nothing_in_half_precision(precision: str) -> None:
    runs = [
        result(fit_pipeline(make("gpt"), data("gpt"), 3, devices, run={"precision": precision}))
        for devices in (1, 2, 3)
    ]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[2], runs[0])


class Probe(nn.Module):
    """Notes the dtypes and the autocast state that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.notes: list[tuple] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = self.norm(y)
        s = y.softmax(-1)
        loss = nn.functional.mse_loss(y, x.to(y))
        with torch.autocast("cpu", enabled=False):
            w = torch.nn.functional.linear(x.float(), self.linear.weight.float())
        state = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_inference_mode_enabled(),
            self.training,
        )
        self.notes.append((x.dtype, y.dtype, z.dtype, s.dtype, loss.dtype, w.dtype, *state))
        return z + s + w.tanh().to(z)


class Probed(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Probe() for _ in range(3)))

    def loss(self, batch: Any) -> Tensor:
        return self.blocks(batch["x"]).pow(2).mean()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", *MIXED])
def test_layers_meet_the_same_dtypes_as_in_plain_lightning(precision: str) -> None:
    """In every pass, the recomputation included: what autocast keeps in fp32 is fp32, and validation runs as
    validation.
    """
    notes = []
    for strategy, devices in ((RoundPipeStrategy(microbatches=M), 2), ("auto", 1)):
        model = Probed()
        batches = data()
        fit(model, batches, strategy, devices=devices, val_batches=batches[:1], precision=precision)
        notes.append([set(block.notes) for block in model.blocks])
    assert notes[0] == notes[1]
    assert len(notes[1][0]) == 2, "training and validation"
    if precision == "bf16-mixed":
        assert {note[1] for note in notes[1][0]} == {torch.bfloat16} and {note[4] for note in notes[1][0]} == {
            torch.float32
        }


# --- loss scaling


def scaled(scale: float = 1024.0, growth_interval: int = 2000) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


class Overflows(Lit):
    """A weight of one number, whose loss is infinite at the first batch."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=1.0), halving)
        self.net = nn.Sequential(nn.Linear(1, 1, bias=False))
        nn.init.zeros_(self.net[0].weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch["x"]).mean()
        return loss * torch.inf if batch_idx == 0 else loss


def halving(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k), "interval": "step"}


class Reads(L.Callback):
    def __init__(self) -> None:
        self.after: list[tuple[float, float, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        scale = trainer.precision_plugin.scaler.get_scale()
        self.after.append(
            (float(module.net[0].weight.detach()), scale, trainer.lr_scheduler_configs[0].scheduler._step_count - 1)
        )


class ReadsGradients(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.gradients.append(abs(float(module.net[0].weight.grad)))


@pytest.mark.parametrize("reads", [Reads, ReadsGradients])
@pytest.mark.parametrize("background_step", [True, False])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_skips_the_step(clip: float | None, background_step: bool, reads: type[Reads]) -> None:
    """Weights, scales and scheduler as plain Lightning has them after each batch: unscaled before clipping, by the
    scale it was made with.
    """
    callbacks = []
    for strategy in (RoundPipeStrategy(microbatches=2, background_step=background_step), "auto"):
        callbacks.append(reads())
        run: dict[str, Any] = {"plugins": [scaled()], "gradient_clip_val": clip, "callbacks": [callbacks[-1]]}
        fit(Overflows(), [{"x": torch.full((2, 1), 4.0)}] * 3, strategy, devices=1 if strategy == "auto" else 2, **run)
    expected = (
        [(0.0, 512.0, 1), (-2.0, 512.0, 2), (-3.0, 512.0, 3)]
        if clip is None
        else [(0.0, 512.0, 1), (-0.5, 512.0, 2), (-0.75, 512.0, 3)]
    )
    for found in callbacks:
        for seen, right in zip(found.after, expected, strict=True):
            assert seen == pytest.approx(right, rel=1e-5)
    if isinstance(callbacks[0], ReadsGradients):
        assert callbacks[0].gradients[1:] == callbacks[1].gradients[1:] == [4.0, 4.0]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("devices", [1, 2])
def test_scaler_equals_plain_lightning(devices: int, clip: float | None) -> None:
    """The scale doubles at every step: a gradient unscaled by another scale than its own would be off by a factor of
    two.
    """
    start = weights(make())
    states, movements = [], []
    for kind in ("ours", "plain"):
        plugin, model = scaled(64.0, growth_interval=1), make(optimizer=SGD)
        run = {"plugins": [plugin], "gradient_clip_val": clip}
        if kind == "ours":
            fit_pipeline(model, data(), M, devices, run=run)
        else:
            fit_microbatches(model, data(), M, **run)
        states.append(plugin.state_dict())
        movements.append(moved(model, start))
    assert states[0] == states[1] and states[1]["scale"] == 64.0 * 2**5
    assert distance(*movements) < 5e-3


def one_step_behind_in_fp16(model: Lit, batches: list[Any], m: int, optimizer: Callable) -> None:
    """The loop of staleness 1 with a constant scale: a power of two changes nothing but what underflows."""
    used = copy.deepcopy(model).train()
    stepper = optimizer(model.parameters())
    for batch in batches:
        for part in split(batch, m):
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = used.loss(part)
            (loss * (1024.0 / m)).backward()
        before_step = copy.deepcopy(model.state_dict())
        for newest, old in zip(model.parameters(), used.parameters(), strict=True):
            newest.grad, old.grad = old.grad / 1024.0, None
        stepper.step()
        used.load_state_dict(before_step)


def test_scaler_with_staleness() -> None:
    start = weights(make())
    plugin, ours, expected, fresh = scaled(64.0, growth_interval=1), make(), make(), make()
    fit_pipeline(ours, data(), M, devices=2, staleness=1, run={"plugins": [plugin]})
    one_step_behind_in_fp16(expected, data(), M, SGD)
    fit_pipeline(fresh, data(), M, devices=2, run={"plugins": [scaled()]})
    assert plugin.state_dict()["scale"] == 64.0 * 2**5
    assert (
        distance(moved(ours, start), moved(expected, start))
        < 5e-3
        < distance(moved(fresh, start), moved(expected, start))
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_does_not_wait_for_its_own_step(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    """Its scale is asked for when a backward begins. That may be late, after the batch's step has been handed in."""
    handed_in = defaultdict[int, threading.Event](threading.Event)
    submit, seeds = Strategy.submit_step, Batch.seeds

    def noted(strategy: Strategy, *args: Any) -> None:
        number = strategy._batch.number
        submit(strategy, *args)
        handed_in[number].set()

    def late(batch: Batch, index: int, roots: Any) -> list[Tensor]:
        if not batch.records and index == M - 1:  # the main thread waits for the first batch's backward, and all losses
            assert handed_in[batch.number].wait(10)
        return seeds(batch, index, roots)

    monkeypatch.setattr(Strategy, "submit_step", noted)
    monkeypatch.setattr(Batch, "seeds", late)
    strategy, model = RoundPipeStrategy(M, split="step"), make(optimizer=SGD)
    gives_up = threading.Timer(
        20, lambda: strategy.pipeline.monitor.fail(TimeoutError("the batch waits for its own step"))
    )
    gives_up.start()
    plugins = [scaled(64.0, growth_interval=1), scaled(64.0, growth_interval=1)]
    try:
        fit(model, data(), strategy, devices=devices, plugins=plugins[:1])
    finally:
        gives_up.cancel()
    expected = make(optimizer=SGD)
    monkeypatch.undo()
    fit_pipeline(expected, data(), M, devices, run={"plugins": plugins[1:]})
    assert_equal(weights(model), weights(expected))
    assert plugins[0].state_dict() == plugins[1].state_dict()


def test_lightning_s_fallback_where_the_cpu_has_no_fp16() -> None:
    """`16-mixed` gives what `bf16-mixed` gives."""
    trained = [fit_pipeline(make(), data(), M, 2, run={"precision": precision}) for precision in MIXED]
    assert_equal(result(trained[0]), result(trained[1]))
    assert differs(result(trained[0]), result(fit_pipeline(make(), data(), M, 2)))


class CountsFused:
    """How many parameters torch's fused Adam has stepped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parameters = 0
        module = importlib.import_module("torch.optim.adam")  # the name `torch.optim.adam` is taken away
        fused = module._fused_adam

        def counting(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
            self.parameters += len(params)
            fused(params, *args, **kwargs)

        monkeypatch.setattr(module, "_fused_adam", counting)


@pytest.mark.parametrize(
    "optimizer, precision, fused",
    [
        (partial(torch.optim.AdamW, lr=0.01), "bf16-mixed", True),
        (partial(torch.optim.Adam, lr=0.01), "bf16-mixed", True),
        (partial(torch.optim.AdamW, lr=0.01), "32-true", False),  # bit for bit what torch gives
        (partial(torch.optim.AdamW, lr=0.01, fused=False), "bf16-mixed", False),
        (partial(torch.optim.AdamW, lr=0.01, foreach=True), "bf16-mixed", False),
        (partial(torch.optim.AdamW, lr=0.01, fused=True), "32-true", True),
    ],
)
def test_the_step_is_fused_where_that_is_left_to_torch(
    optimizer: Any, precision: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = CountsFused(monkeypatch)
    model = make(optimizer=optimizer)
    trainer = fit_pipeline(model, data(), M, 2, run={"precision": precision})
    assert counts.parameters == (5 * len(list(model.parameters())) if fused else 0)
    made = optimizer(make().parameters())
    group = trainer.optimizers[0].param_groups[0]
    assert {**group, "params": None} == {**made.param_groups[0], "params": None}
    trainer.optimizers[0].load_state_dict(copy.deepcopy(trainer.optimizers[0].state_dict()))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_in_half_precision_lose_nothing_of_a_whole_batch(devices: int, staleness: int) -> None:
    """Kept in half precision between backward and step, unless the step needs them all before (to clip them)."""
    for m in (1, M):
        found = []
        for clip in (None, 1e9):
            model = make()
            run = {"precision": "bf16-mixed", "gradient_clip_val": clip}
            fit_pipeline(model, data(), m, devices, run=run, staleness=staleness)
            found.append(moved(model, weights(make())))
        if m == 1:
            assert_equal(*found)
        else:
            assert 0 < distance(*found) < 2**-8
