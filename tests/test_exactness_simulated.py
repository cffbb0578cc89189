"""On simulated accelerators the pipeline gives, to the last bit, what it gives on the CPU.

A choice: each option of the exactness suite on 1, 2 and 4 devices, and what is particular to devices. The whole suite,
and every other test that uses `fit_pipeline`, trains on simulated accelerators with

    ROUNDPIPE_DEVICES=simulated pytest tests/test_exactness.py tests/test_schedule_execution.py tests/test_precision.py
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from typing import Any

import helpers
import pytest
import test_habits as habits
import test_parameters_outside as outside
import torch
from helpers import Watch, assert_equal, fit, fit_microbatches, fit_pipeline, one_layer_a_stage, result
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import CNN, MLP, batches_of, pictures, vectors
from test_exactness import MODELS, NOISY, OPTIMIZERS, data, make
from test_precision import scaled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import SimulatedDevice
from lightning_roundpipe.schedules import NAMES


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU has a kernel of its own for attention, which rounds otherwise."""
    monkeypatch.setattr(helpers, "SIMULATED", True)
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(flash)


# --- every option with every number of devices

AXES: dict[str, Sequence[Any]] = {
    "devices": (1, 2, 4),
    "schedule": NAMES,
    "precision": ("64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"),
    "model": tuple(MODELS),
    "staleness": (0, 1),
    "microbatches": (8, 3, 1),
    "accumulation": (1, 2),
    "clipping": (None, "norm", "value"),
    "optimizer": ("sgd", "adamw", "adamw fused"),
}


def can_be(row: Mapping[str, Any]) -> bool:
    """DualPipe needs two devices and twice as many microbatches; a fused optimizer's own unscaling no clipping; and the
    others divide by what is zero in fp16."""
    dualpipe = row.get("schedule") == "dualpipe"
    if dualpipe and (row.get("devices", 2) == 1 or row.get("microbatches", 8) != 8):
        return False
    precision, optimizer = row.get("precision"), row.get("optimizer", "sgd")
    if precision in ("bf16-mixed", "16-mixed") and optimizer == "adamw fused" and row.get("clipping") is not None:
        return False
    return precision != "16-true" or optimizer == "sgd"


def pairwise(axes: Mapping[str, Sequence[Any]], can_be: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
    """Few combinations of values, in which each value comes with each of the first axis, if it can be, and as many
    others as possible with each other.
    """
    first = next(iter(axes))
    missing = {
        ((a, x), (b, y)): None for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]
        if can_be({a: x, b: y})
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    while missing and (start := next(iter(missing)))[0][0] == first:
        row = dict(start)
        for axis in axes:
            if axis not in row:
                row[axis] = max(
                    (value for value in axes[axis] if can_be({**row, axis: value})),
                    key=lambda value: sum(pair in missing for pair in pairs({**row, axis: value})),
                )
        for pair in pairs(row):
            missing.pop(pair, None)
        rows.append({axis: row[axis] for axis in axes})
    return rows


def pairs(row: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return list(combinations([(axis, row[axis]) for axis in AXES if axis in row], 2))


SIZE = 24  # divides into 1, 3 and 8 equal parts
DTYPES = {"64-true": torch.float64}
CLIPPING = {
    None: {},
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def run_of(precision: str, accumulation: int, clipping: str | None) -> dict[str, Any]:
    """The Trainer's options."""
    numbers = {"plugins": [scaled(64.0, growth_interval=1)]} if precision == "16-mixed" else {"precision": precision}
    return {**numbers, "accumulate_grad_batches": accumulation, **CLIPPING[clipping]}


def model_and_data(model: str, precision: str, optimizer: str) -> tuple[Any, list[dict[str, Tensor]]]:
    dtype = DTYPES.get(precision, torch.float32)
    return make(model, dtype, optimizer=OPTIMIZERS[optimizer]), data(model, dtype, 3, SIZE)


@cache
def expected(
    model: str, optimizer: str, precision: str, staleness: int, microbatches: int, accumulation: int,
    clipping: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Of plain Lightning, or, where it has no equal to the last bit, of one virtual CPU device."""
    module, batches = model_and_data(model, precision, optimizer)
    run = run_of(precision, accumulation, clipping)
    if staleness == 0 and precision in ("32-true", "64-true"):
        return result(fit_microbatches(module, batches, microbatches, **run))
    strategy = RoundPipeStrategy(microbatches=microbatches, split="step", staleness=staleness)
    return result(fit(module, batches, strategy, **run))


ROWS = pairwise(AXES, can_be)


def test_the_choice_has_every_option_with_every_number_of_devices() -> None:
    for axis, values in list(AXES.items())[1:]:
        for value in values:
            found = {row["devices"] for row in ROWS if row[axis] == value}
            assert found == ({2, 4} if value == "dualpipe" else {1, 2, 4}), (axis, value)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_every_option_with_every_number_of_devices(row: dict[str, Any]) -> None:
    others = {axis: value for axis, value in row.items() if axis not in ("devices", "schedule")}
    module, batches = model_and_data(row["model"], row["precision"], row["optimizer"])
    trainer = fit_pipeline(
        module,
        batches,
        row["microbatches"],
        row["devices"],
        run=run_of(row["precision"], row["accumulation"], row["clipping"]),
        schedule=row["schedule"],
        staleness=row["staleness"],
    )
    assert_equal(result(trainer), expected(**others))


# --- half precision, and compiled layers


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_autocast_lets_weights_travel_in_half_precision(devices: int) -> None:
    """As on the CPU, where autocast would cast them anyway."""
    copied = []
    for precision in ("32-true", "bf16-mixed"):
        hardware = [SimulatedDevice(index) for index in range(devices)]
        # The stages are the same in each run: none is fused.
        strategy = RoundPipeStrategy(microbatches=2, split="step", devices=hardware, schedule="gpipe")
        fit(MLP(width=256), batches_of(vectors, 5, 2, torch.float32), strategy, precision=precision)
        copied.append(sum(device.up.nbytes for device in hardware))
    assert copied[1] < 0.9 * copied[0]  # not those of the first batch


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_layers_run_uncompiled(devices: int) -> None:
    """Dynamo leaves alone what runs under a dispatch mode. One line says so; the numbers are those of plain code."""
    plain = result(fit_microbatches(make("mlp", torch.float64), data("mlp", torch.float64), 3))
    compiled = make("mlp", torch.float64)
    compiled.net.compile(backend="eager", fullgraph=True)
    for model, options in ((make("mlp", torch.float64), {"compile": {"backend": "eager"}}), (compiled, {})):
        with pytest.warns(UserWarning, match="on simulated devices layers run uncompiled") as caught:
            assert_equal(result(fit_pipeline(model, data("mlp", torch.float64), 3, devices, **options)), plain)
        assert len([warning for warning in caught if "uncompiled" in str(warning.message)]) == 1


# --- what is particular to devices


@pytest.mark.parametrize("staleness", [0, 1])
def test_device_count_changes_nothing_with_dropout(staleness: int) -> None:
    results = []
    for devices in (1, 2, 4):
        model = make("gpt", torch.float64, **NOISY["gpt"])
        results.append(result(fit_pipeline(model, data("gpt", torch.float64, 3, 6), 3, devices, staleness=staleness)))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_norm_statistics() -> None:
    """Those of the whole batch, as on virtual CPU devices."""
    results = []
    for simulated in (True, False):
        torch.manual_seed(7)
        model = CNN().double()
        devices = [SimulatedDevice(index) for index in range(2)] if simulated else None
        strategy = RoundPipeStrategy(microbatches=3, split="step", devices=devices)
        results.append(result(fit(model, batches_of(pictures, 4, 12, torch.float64), strategy, devices=2)))
    assert_equal(*results)


def test_what_the_user_sees_is_on_the_host() -> None:
    """As with any accelerator it is where the trainer's tensors are."""
    results = []
    for train in (fit_pipeline, fit_microbatches):
        watch = Watch()
        options = {"run": {"callbacks": [watch]}} if train is fit_pipeline else {"callbacks": [watch]}
        trainer = train(make("mlp", torch.float64), data("mlp", torch.float64), 2, **options)
        assert all(type(loss) is torch.Tensor and loss.device.type == "cpu" for loss in watch.losses)
        assert all(value.device.type == "cpu" for value in trainer.lightning_module.seen.values())
        results.append(watch.losses)
    assert len(results[0]) * 2 == len(results[1])


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(
    "kind",
    [
        outside.CustomFunctionWithHooks, outside.ReentrantAroundLayers, outside.ReentrantWithinAnother,
        habits.FunctionOfActivations, habits.CheckpointAroundLayersAndCode,
    ],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_functions_and_checkpoints_between_layers(kind: type, devices: int) -> None:
    """Each gradient is where its tensor is, and a checkpoint runs layers again where they ran."""
    torch.set_default_dtype(torch.float64)  # as in those suites, which keep what they expect
    suite = outside if issubclass(kind, outside.Outside) else habits
    assert_equal(suite.trained(kind, 3, devices), suite.expected(kind, 3))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        habits.InPlaceFirst, habits.ReturnsNothing, habits.ReturnsItsArgument, habits.ResidualStreamInPlace,
        habits.LastLayerChangesItsArgumentLate,
    ],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_inputs_that_are_changed_in_place(kind: type, devices: int) -> None:
    """On their way to host memory, or to another device, they are still what they were."""
    torch.set_default_dtype(torch.float64)
    assert_equal(habits.trained(kind, 3, devices), habits.expected(kind, 3))


def test_a_layer_that_a_checkpoint_cannot_find_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer_a_stage(monkeypatch)

    class Twice(habits.Weighted):
        def output(self, x: Tensor) -> Tensor:
            run = partial(checkpoint, lambda x: torch.sin(self.net[0](torch.sin(x))), use_reentrant=False)
            return run(self.net[2](self.net[1](run(x))))

    with pytest.raises(RuntimeError, match=r"layer 'net\.0': a checkpoint runs it again .* on several devices"):
        habits.trained(Twice, 3, 2)
    assert_equal(habits.trained(Twice, 3, 1), habits.expected(Twice, 3))


def test_scripts_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"'script': a script .* Use the module that it was made of"):
        fit_pipeline(outside.make(outside.ScriptBetweenLayers), outside.data(), 2)


class Borrows(nn.Module):
    """Uses a parameter of a module that is none of its own."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.__dict__["lender"] = lender

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.lender.weight[0])


class Borrowed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(8, 1)
        self.net[3] = Borrows(self.lender)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_parameter_of_another_module(devices: int) -> None:
    """It stays in host memory, and so does its gradient."""
    results = []
    for train in (fit_microbatches, partial(fit_pipeline, devices=devices)):
        torch.manual_seed(0)
        results.append(result(train(Borrowed().double(), batches_of(vectors, 3, 6), 3)))
    assert_equal(*results)
