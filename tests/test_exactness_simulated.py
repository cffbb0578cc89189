"""On simulated accelerators the pipeline gives, to the last bit, what plain Lightning gives on the CPU.

A choice of what holds for virtual CPU devices. `ROUNDPIPE_DEVICES=simulated` lets every test that uses `fit_pipeline`
train on simulated accelerators.
"""

from collections.abc import Iterator
from functools import partial

import helpers
import pytest
import test_habits as habits
import test_parameters_outside as outside
import torch
from helpers import Watch, assert_equal, fit, fit_microbatches, fit_pipeline, one_layer_a_stage, result
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import CNN, batches_of, pictures
from test_exactness import MODELS, NOISY, OPTIMIZERS, data, expected, make, trained
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import SimulatedDevice


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU has a kernel of its own for attention, which rounds otherwise."""
    monkeypatch.setattr(helpers, "SIMULATED", True)
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(flash)


@pytest.mark.parametrize(("devices", "m"), [(1, 1), (1, 3), (2, 3), (4, 6)])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_lightning(name: str, devices: int, m: int) -> None:
    assert_equal(trained(name, torch.float64, m, devices), expected(name, torch.float64, m))


@pytest.mark.parametrize("run", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}], ids=str)
def test_adamw_clipping_and_accumulation(run: dict) -> None:
    reference = expected("gpt", torch.float32, 2, run, optimizer=OPTIMIZERS["adamw"])
    assert_equal(trained("gpt", torch.float32, 2, 2, run, optimizer=OPTIMIZERS["adamw"]), reference)


@pytest.mark.parametrize("staleness", [0, 1])
def test_device_count_changes_nothing_with_dropout(staleness: int) -> None:
    results = []
    for devices in (1, 2, 4):
        model = make("gpt", torch.float64, **NOISY["gpt"])
        results.append(result(fit_pipeline(model, data("gpt", torch.float64), 3, devices, staleness=staleness)))
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


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"'script': a script .* Use the module that it was made of"):
        fit_pipeline(outside.make(outside.ScriptBetweenLayers), outside.data(), 2)
    with pytest.raises(MisconfigurationException, match="Autocast is not simulated"):
        fit_pipeline(make("mlp", torch.float32), data("mlp", torch.float32), 2, run={"precision": "bf16-mixed"})
    with pytest.raises(ValueError, match="`compile` is not possible"):
        RoundPipeStrategy(devices=[SimulatedDevice(0)], compile=True)
