"""Every schedule runs the same computation: the numbers are those of plain Lightning, whoever runs what when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import PATIENCE, assert_close, assert_equal, fit_microbatches, fit_pipeline, result
from models import CNN, GPT, Lit, batches_of, pictures, sequences, tokens
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_roundpipe.devices import CpuDevice
from lightning_roundpipe.pipeline import turnstile
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.pipeline.weight_gradients import DeferredWeights
from lightning_roundpipe.schedules import NAMES, Action, Schedule, Scheduler, gpipe
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.simulate import simulate

MODELS: dict[str, tuple[Callable[..., Lit], Any]] = {"gpt": (GPT, tokens), "cnn": (CNN, pictures)}


def make(name: str, **options: Any) -> Lit:
    torch.manual_seed(7)
    return MODELS[name][0](**options).double()


def data(name: str, sizes: tuple[int, ...] = (8, 8, 8, 8)) -> list[dict[str, Tensor]]:
    return [batches_of(MODELS[name][1], 1, size, torch.float64, seed=i)[0] for i, size in enumerate(sizes)]


def trained(name: str, m: int, devices: int, run: dict | None = None, **options: Any) -> dict:
    return result(fit_pipeline(make(name), data(name), m, devices, run=run, **options))


@cache
def expected(name: str, m: int, **options: Any) -> dict:
    return result(fit_microbatches(make(name), data(name), m, **options))


@cache
def alone(name: str, m: int, **options: Any) -> dict:
    """What one device makes of it."""
    return trained(name, m, 1, **options)


DEFERS_WEIGHTS = ("zb1p", "dualpipe")


@pytest.mark.parametrize(("m", "devices"), [(4, 1), (2, 2), (4, 2), (8, 2), (2, 4), (8, 4)])
@pytest.mark.parametrize("schedule", NAMES)
def test_equal_to_plain_lightning(schedule: str, m: int, devices: int) -> None:
    """With fewer microbatches than devices, as many, and two and four times as many."""
    if schedule == "dualpipe" and (devices % 2 or m < 2 * devices):
        with pytest.raises(ValueError, match="DualPipe needs an even number of devices"):
            trained("gpt", m, devices, schedule=schedule)
        return
    assert_equal(trained("gpt", m, devices, schedule=schedule), expected("gpt", m))


@pytest.mark.parametrize("schedule", NAMES)
def test_convolutions_and_batch_norm(schedule: str) -> None:
    ours = trained("cnn", 4, 2, schedule=schedule)
    assert_close(ours["weights"], alone("cnn", 4)["weights"], 1e-12)


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("m", [4, 5, 8])
def test_lanes_change_nothing(lanes: int, m: int) -> None:
    assert_equal(trained("gpt", m, 4, lanes=lanes), alone("gpt", m))


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"max_epochs": 2}], ids=str
)
def test_options(schedule: str, options: dict[str, Any]) -> None:
    assert_equal(trained("gpt", 4, 2, run=options, schedule=schedule), expected("gpt", 4, **options))


@pytest.mark.parametrize("schedule", NAMES)
def test_staleness(schedule: str) -> None:
    assert_equal(trained("gpt", 4, 2, schedule=schedule, staleness=1), alone("gpt", 4, staleness=1))


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("devices", [2, 4])
def test_uneven_batches(schedule: str, devices: int) -> None:
    """The last batch has fewer samples than there are microbatches, or too few for the schedule."""
    assert_equal(on_uneven_batches(devices, schedule=schedule), expected_on_uneven_batches(devices))


def on_uneven_batches(devices: int, **options: Any) -> dict:
    return result(fit_pipeline(make("gpt"), data("gpt", (8, 5, 8, 3, 1)), 8, devices, **options))


expected_on_uneven_batches = cache(on_uneven_batches)


@pytest.mark.parametrize("schedule", NAMES)
def test_a_split_call_and_a_deferred_backward(schedule: str) -> None:
    assert_equal(split_and_deferred(schedule=schedule), expected_split_and_deferred())


class Halves(GPT):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (0.5 * loss).backward()


def split_and_deferred(**options: Any) -> list[dict]:
    torch.manual_seed(7)
    deferred = result(fit_pipeline(Halves().double(), data("gpt"), 4, 2, **options))
    return [deferred, result(fit_pipeline(make("gpt"), data("gpt"), 4, 2, split="model", **options))]


expected_split_and_deferred = cache(split_and_deferred)


def test_dropout_is_the_same() -> None:
    reference = None
    for schedule in NAMES:
        torch.manual_seed(7)
        ours = result(fit_pipeline(GPT(dropout=0.3).double(), data("gpt"), 4, 2, schedule=schedule))
        reference = reference or ours
        assert_equal(ours, reference)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "dualpipe", "interleaved"])
def test_random_delays(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = trained("gpt", 4, 2, schedule=schedule)
    for repetition in range(5 * PATIENCE):
        draw = random.Random(repetition)
        monkeypatch.setattr(turnstile, "handover_hook", lambda draw=draw: time.sleep(draw.random() * 1e-3))
        assert_equal(trained("gpt", 4, 2, schedule=schedule), reference)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("schedule", DEFERS_WEIGHTS)
def test_deferred_weights_in_other_precisions(schedule: str, precision: str) -> None:
    results = []
    for name in (schedule, "gpipe"):
        torch.manual_seed(7)
        batches = batches_of(tokens, 4, 8)
        results.append(result(fit_pipeline(GPT(), batches, 4, 2, run={"precision": precision}, schedule=name)))
    assert_equal(*results)


# --- a schedule as data


OWN = {
    "a fused stage, microbatches in an order of their own": """
        0 | F0.1 F0.0 F0.3 F0.2 B2.1 B2.0 B2.3 B2.2
        1 | FB1.1 FB1.0 FB1.3 FB1.2
    """,
    "all fused, dealt by microbatch": """
        0 | FB0.0 FB0.2
        1 | FB0.3 FB0.1
    """,
    "all on one device, W for some": """
        0 | F0.1 F0.0 F0.3 F0.2 F1.3 F1.2 F1.1 F1.0 B2.3 B2.2 W2.3 B2.1 B2.0 B3.1 B3.0 B3.3 W3.3 W2.1 B3.2 W3.2
        1 |
    """,
    "forward here, backward there, more stages than calls": f"""
        0 | {" ".join(f"F{stage}.{m}" for stage in range(9) for m in range(4))}
        1 | {" ".join(f"{kind}{stage}.{m}" for stage in range(9, 16) for m in (3, 1, 0, 2) for kind in "BW")}
    """,
}


@pytest.mark.parametrize("name", OWN)
def test_a_schedule_of_one_s_own(name: str) -> None:
    """Read from text."""
    ours = trained("gpt", 4, 2, schedule=Schedule.from_text(OWN[name]))
    assert_equal(ours, expected("gpt", 4))


@pytest.mark.parametrize(
    ("schedule", "devices", "m", "words"),
    [
        (gpipe(2, 4), 3, 4, "for 2 devices, but there are 3"),
        (gpipe(2, 4), 2, 3, "for 4 microbatches, but `microbatches` is 3"),
        (Schedule(((Action("B", 0, 0),), ()), 0), 2, 1, "B0"),
        (Schedule.from_text("0 | F0.0 F0.1"), 1, 2, "ends with F0·mb0: it has no backward"),
        (Schedule.from_text("0 | FB0.0 B1.0"), 1, 1, "has B1·mb0, but the forward of its layers is in no stage"),
        ("pipedream", 2, 2, "must be one of .*gpipe.* got .pipedream"),
        ("0 | FB0.0", 1, 1, "or a Schedule; got '0 . FB0.0'"),
        (None, 2, 2, "or a Schedule; got None"),
        (gpipe, 2, 2, "or a Schedule; got <function gpipe"),
    ],
)
def test_schedules_that_do_not_suit(schedule: Any, devices: int, m: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_pipeline(make("gpt"), data("gpt"), m, devices, schedule=schedule)


def test_lanes_that_do_not_suit() -> None:
    with pytest.raises(ValueError, match="3 devices cannot be divided into 2 lanes"):
        trained("gpt", 4, 3, lanes=2)
    with pytest.raises(ValueError, match="`lanes` are for schedule='roundpipe' only"):
        trained("gpt", 4, 2, lanes=2, schedule="gpipe")


# --- deferred weight gradients


class CountsProducts(TorchDispatchMode):
    """The matrix products and convolutions that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += name in ("mm", "addmm", "bmm", "convolution")
        if name == "convolution_backward":
            self.count += sum(args[-1][:2])  # of the input's gradient, of the weight's
        return func(*args, **(kwargs or {}))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear, sequences": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "linear, no bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), (2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "several": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4), nn.PReLU()),
        (5, 4),
    ),
}


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_no_product_is_computed_twice(name: str, needs_input: bool) -> None:
    kind, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = kind().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=needs_input)
    parameters = list(layer.parameters())
    targets = [x, *parameters] if needs_input else parameters

    with CountsProducts() as plain:
        y = layer(x)
        seed = torch.randn_like(y)
        wanted = torch.autograd.grad(y, targets, seed)
    with CountsProducts() as first:
        deferred = DeferredWeights(parameters)
        with deferred:
            y = layer(x)
        found = deferred.differentiate([y], targets, [seed])
    with CountsProducts() as later:
        assert deferred.waiting
        rest = deferred.gradients()
    assert first.count + later.count == plain.count
    linear = sum(p.ndim > 1 for p in parameters)
    assert later.count == linear, "the products of the weights, and no other"
    sums = {id(target): gradient for target, gradient in zip(targets, found, strict=False) if gradient is not None}
    for parameter, gradient in rest:
        sums[id(parameter)] = sums[id(parameter)] + gradient if id(parameter) in sums else gradient
    for target, gradient in zip(targets, wanted, strict=True):
        torch.testing.assert_close(sums[id(target)], gradient, rtol=1e-12, atol=1e-12)


def _stopped(x: Tensor) -> Tensor:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    return Stop.apply(x)


def _force(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An energy and its gradient, which the loss depends on."""
    energy = functional.linear(x, weight, bias).pow(3).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + force.pow(2).sum()


USES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[tuple[int, ...], ...], int]] = {
    "changed in place": (lambda x, w, b: functional.relu_(functional.linear(x, w, b)), ((2, 5, 4), (3, 4), (3,)), 2),
    "a view changed in place": (
        lambda x, w, b: functional.linear(x, w, b).view(-1)[:4].mul_(2), ((2, 5, 4), (3, 4), (3,)), 2
    ),
    "one sample": (functional.linear, ((4,), (3, 4), (3,)), 2),
    "no samples": (functional.linear, ((0, 4), (3, 4), (3,)), 2),
    "no inputs": (functional.linear, ((2, 0), (3, 0), (3,)), 2),
    "no outputs": (functional.linear, ((2, 4), (0, 4), (0,)), 2),
    "a bias for all outputs": (functional.linear, ((5, 4), (3, 4), (1,)), 0),
    "a bias per sample": (functional.linear, ((5, 4), (3, 4), (5, 3)), 0),
    "expanded": (lambda x, w, b: functional.linear(x.expand(5, 2, 4), w, b).sum(0), ((1, 2, 4), (3, 4), (3,)), 2),
    "no gradient": (lambda x, w, b: _stopped(functional.linear(x, w, b)) + x[:, :3], ((5, 4), (3, 4), (3,)), 0),
    "vmap": (
        lambda x, w, b: torch.func.vmap(lambda row: functional.linear(row, w, b))(x), ((5, 4), (3, 4), (3,)), 0
    ),
    "checkpoint": (
        lambda x, w, b: checkpoint(lambda y: functional.linear(y, w, b).sin(), x, use_reentrant=False),
        ((5, 4), (3, 4), (3,)),
        2,
    ),
    "gradients in the forward": (_force, ((5, 4), (3, 4), (3,)), 2),
    "unbatched convolution": (functional.conv1d, ((2, 9), (4, 2, 3), (4,)), 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in USES), ("expanded", torch.complex128), ("one sample", torch.complex128)],
)
def test_uses_of_weights(name: str, dtype: torch.dtype) -> None:
    """The gradients of plain autograd, None included; the last number: how many are left for later."""
    use, shapes, left = USES[name]
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    targets = [x, weight, bias]
    y = use(*targets)
    seed = torch.randn_like(y)
    wanted = torch.autograd.grad(y, targets, seed, allow_unused=True)
    deferred = DeferredWeights(targets[1:])
    with deferred:
        y = use(*targets)
    found = deferred.differentiate([y], targets, [seed])
    rest = deferred.gradients()
    assert len(rest) == (0 if dtype.is_complex else left)
    sums = {id(target): gradient for target, gradient in zip(targets, found, strict=True) if gradient is not None}
    for parameter, gradient in rest:
        sums[id(parameter)] = sums[id(parameter)] + gradient if id(parameter) in sums else gradient
    for target, gradient in zip(targets, wanted, strict=True):
        torch.testing.assert_close(sums.get(id(target)), gradient, rtol=1e-12, atol=1e-12)


class InPlaceBlock(nn.Module):
    """Changes outputs of linear maps in place, in and out of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: functional.relu_(self.up(x)).sin(), x, use_reentrant=False)
        return x + self.down(y).mul_(2)


class InPlaceBlocks(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceBlock() for _ in range(4))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = functional.linear(batch["x"], self.blocks[0].up.weight, self.blocks[3].up.bias)
        for block in [*self.blocks, self.blocks[1]]:
            x = block(x)
        return functional.linear(x, self.blocks[0].up.weight)[:, 0, :3].sub(batch["y"]).square().mean()


def test_blocks_that_work_in_place_and_share_weights() -> None:
    """With weights used between layers, too. Their uses add up in another order than plain autograd's."""
    batches = batches_of(sequences, 3, 8, torch.float64)

    def run(train: Callable[..., Any], **options: Any) -> dict:
        torch.manual_seed(7)
        return result(train(InPlaceBlocks().double(), batches, 4, **options))

    reference = run(fit_pipeline, devices=1)
    assert_close(reference["weights"], run(fit_microbatches)["weights"], 1e-12)
    for schedule in NAMES:
        assert_equal(run(fit_pipeline, devices=2, schedule=schedule), reference)


@pytest.mark.parametrize("schedule", ["roundpipe", "zb1p"])
def test_a_checkpoint_in_a_layer_beside_one_that_draws(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint sets the process's generator while it runs again."""

    class Draws(InPlaceBlocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1] = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))

    def run(devices: int, **options: Any) -> dict:
        torch.manual_seed(7)
        batches = batches_of(sequences, 4, 8, torch.float64)
        return result(fit_pipeline(Draws().double(), batches, 8, devices, **options))

    reference = run(1)
    for repetition in range(3 * PATIENCE):
        draw = random.Random(repetition)
        monkeypatch.setattr(turnstile, "handover_hook", lambda draw=draw: time.sleep(draw.random() * 3e-4))
        assert_equal(run(3, schedule=schedule), reference)


def test_a_gradient_that_a_hook_changes_in_place() -> None:
    """The linear map's gradient is that of the layer's argument, too, which a hook changes before the W."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + self.map(y)

    class Hooked(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Adds() for _ in range(4))

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            x = batch["x"]
            for block in self.blocks:
                x = x * 1.0
                if x.requires_grad:
                    x.register_hook(lambda gradient: gradient.clamp_(-1e-3, 1e-3))
                x = block(x, batch["x"])
            return x.square().mean()

    batches = batches_of(sequences, 3, 8, torch.float64)
    with pytest.raises(RuntimeError, match="changed in place after its backward"):
        fit_pipeline(Hooked().double(), batches, 4, 2, schedule="zb1p", recompute="layer")


def test_frozen_and_foreign_weights_are_left_alone() -> None:
    x, frozen, other = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    deferred = DeferredWeights([frozen])
    with deferred:
        y = functional.linear(functional.linear(x, frozen), other)
    y.sum().backward()
    assert not deferred.waiting and other.grad is not None and x.grad is not None


def test_an_error_in_a_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It surfaces with its place, and nothing is left behind."""

    def fail(self: DeferredWeights) -> Any:
        raise ValueError("no product")

    with monkeypatch.context() as patch:
        patch.setattr(DeferredWeights, "gradients", fail)
        with pytest.raises(ValueError, match="no product") as caught:
            trained("gpt", 4, 2, schedule="zb1p", recompute="layer")
    assert any("phase weight gradients" in note and "layer" in note for note in caught.value.__notes__)
    assert_equal(trained("gpt", 4, 2, schedule="zb1p"), expected("gpt", 4))


# --- what devices hold


@pytest.mark.parametrize(("schedule", "lanes"), [*((name, 1) for name in NAMES), ("roundpipe", 2)])
@pytest.mark.parametrize(("devices", "m"), [(2, 4), (4, 8), (4, 9)])
def test_peaks_are_those_of_the_simulation(schedule: str, lanes: int, devices: int, m: int) -> None:
    """Live microbatches and parameters per device: counted while it ran, and computed before."""
    if schedule == "dualpipe" and m % 2:
        m += 1
    model = Row()
    pipeline = Pipeline(model, [CpuDevice(i, 1) for i in range(devices)], scheduler=Scheduler(schedule, devices, lanes))
    steps = [partial(model.loss, torch.full((1, 2), float(i))) for i in range(m)]
    pipeline.start_batch(steps, [1 / m] * m, lambda: 1.0)
    assert pipeline.plan is not None
    partition, calls = pipeline.plan.partition, pipeline.plan.calls
    pipeline.start_batch(steps, [1 / m] * m, lambda: 1.0)
    pipeline.wait_backward()
    pipeline.close()
    sizes = [model.net[index].weight.numel() for index in calls]
    made = Scheduler(schedule, devices, lanes).schedule(partition, m, lanes=lanes)
    simulation = simulate(made, partition, Costs((1,) * len(calls), (2,) * len(calls), parameters=sizes))
    assert tuple(peaks.live for peaks in pipeline.peaks) == simulation.peak_live
    assert tuple(peaks.parameters for peaks in pipeline.peaks) == simulation.peak_parameters


class Row(nn.Module):
    """Layers of different size."""

    def __init__(self) -> None:
        super().__init__()
        widths = [2, 3, 5, 4, 7, 2, 3, 6, 2]
        self.net = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        return x.mean()


# --- planning in the background


def test_better_stages_are_found_while_training() -> None:
    """A head that costs several blocks, and lanes as they are best: other stages than at first, the same numbers."""
    model = Row()
    pipeline = Pipeline(model, [CpuDevice(i, 1) for i in range(4)], scheduler=Scheduler("roundpipe", 4, "auto"))
    steps = [partial(model.loss, torch.full((1, 2), float(i))) for i in range(8)]
    scheduler = pipeline.scheduler
    searched: list[int] = []
    found = threading.Event()

    def plan(*args: Any) -> Any:
        searched.append(args[2])
        try:
            return Scheduler.plan(scheduler, [1.0] * 7 + [4.0], [3.0] * 7 + [12.0], *args[2:])
        finally:
            found.set()

    scheduler.plan = plan  # type: ignore[method-assign]
    losses = []
    for batch in range(6):
        losses.append(pipeline.start_batch(steps, [1 / 8] * 8, lambda: 1.0).losses)
        pipeline.wait_backward()
        if batch == 2:
            assert found.wait(30)
    assert pipeline.plan is not None and pipeline.plan.lanes == 4
    assert searched[0] == 8
    pipeline.close()
    assert all(torch.equal(a, b) for each in losses for a, b in zip(each, losses[0], strict=True))


def test_an_error_while_planning() -> None:
    model = Row()
    pipeline = Pipeline(model, [CpuDevice(0, 1)], scheduler=Scheduler("roundpipe", 1))

    def fail(*args: Any) -> Any:
        raise ValueError("no plan")

    pipeline.scheduler.plan = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no plan") as caught:
        for _ in range(100):
            pipeline.start_batch([partial(model.loss, torch.ones(1, 2))], [1.0], lambda: 1.0)
            pipeline.wait_backward()
    assert "roundpipe: while planning stages" in caught.value.__notes__
    pipeline.close()


# --- the order of microbatches


class Counted(GPT):
    """Goes on, in the middle and at the end of a step, from what the microbatch before left."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.number = 0
        self.total = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.number += 1
        self.total.update(loss.detach() * self.number)
        return loss * (1 + 0.1 * (self.number % 3))


@pytest.mark.parametrize(
    "options", [*({"schedule": name} for name in NAMES), {"lanes": 2}, {"lanes": "auto"}, {"lanes": 4}], ids=str
)
def test_state_that_goes_on_from_microbatch_to_microbatch(options: dict[str, Any]) -> None:
    """Schedules with several directions or lanes take microbatches in another order."""
    reference = expected_counts()
    assert_equal(counted(4, **options), reference)
    assert reference["number"] == 32


def counted(devices: int, **options: Any) -> dict:
    torch.manual_seed(7)
    model = Counted().double()
    fitted = result(fit_pipeline(model, data("gpt"), 8, devices, **options))
    return fitted | {"number": model.number, "total": model.total.compute()}


@cache
def expected_counts() -> dict:
    return counted(1)
