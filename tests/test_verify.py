"""`verify` says of a batch what is so: exact or not, and what layers do; it leaves nothing behind."""

import json
import os
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, fit, fit_pipeline, split, weights
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import CNN, GPT, MLP, SGD, Lit, batches_of, pictures, tokens, vectors
from rich.console import Console
from test_untouched import anatomy, process_state
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_roundpipe
from lightning_roundpipe import RoundPipeStrategy, Verification
from lightning_roundpipe.state.gradients import BatchGradients
from lightning_roundpipe.verification import Finding

verify = partial(lightning_roundpipe.verify, split="step")

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Net(L.LightningModule):
    """Three layers, the one in the middle as given."""

    def __init__(self, layer: nn.Module | None = None, loss: Callable[[Any], Tensor] = lambda y: y.square().mean()):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), layer or nn.Linear(4, 4), nn.Linear(4, 4)).double()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def serious(report: Verification) -> list[Finding]:
    return [finding for finding in report.findings if finding.serious]


def kinds(report: Verification, layer: str | None = "net.1") -> set[str]:
    return {finding.kind for finding in report.findings if finding.layer == layer}


# --- what is right is called right


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (1, 3), (2, None), (3, 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_correct_module(dropout: float, devices: int, microbatches: int | None) -> None:
    """Equal to the last bit, also where numbers are drawn within layers and between them."""
    model = MLP(dropout=dropout).double()
    (batch,) = batches_of(vectors, 1, 7)
    report = verify(model, batch, devices=devices, microbatches=microbatches)
    assert report.ok and report.exact and not serious(report)
    assert [comparison.equal for comparison in report.pipeline] == [True, True]
    count = microbatches or devices + 1
    assert (report.devices, report.microbatches) == (devices, count)
    assert report.fits is (None if count == 1 else True)
    assert [(layer.name, layer.calls, layer.error) for layer in report.layers] == [
        (f"net.{index}", count, 0.0) for index in (0, 2, 3, 4, 5)
    ]
    drawing = {finding.layer for finding in report.findings if finding.kind == "random"}
    assert drawing == ({"net.2", "net.3", "net.4"} if dropout else set())


def test_the_numbers_are_those_of_autograd() -> None:
    model, plain = GPT().double(), GPT().double()
    plain.load_state_dict(model.state_dict())
    (batch,) = batches_of(tokens, 1, 7)
    report = verify(model, batch, microbatches=3)
    loss = torch.zeros(())
    for part in split(batch, 3, even=False):
        term = plain.loss(part) * len(part["ids"]) / 7
        term.backward()
        loss = loss + term.detach()
    for comparison in report.pipeline:
        assert comparison.loss == comparison.expected_loss == pytest.approx(float(loss), rel=1e-12)
        found = {gradient.parameter: gradient.norm for gradient in comparison.gradients}
        assert found == {name: pytest.approx(float(p.grad.norm())) for name, p in plain.named_parameters()}


def test_numbers_drawn_with_every_generator_between_layers() -> None:
    class Draws(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            noise = torch.rand(()) + random.random() + numpy.random.rand()
            return super().training_step(batch * noise, batch_idx)

    report = verify(Draws(nn.Dropout(0.5)), X, microbatches=3)
    assert all(comparison.equal for comparison in report.pipeline) and len(report.pipeline) == 2
    assert report.fits is None and "draws random numbers" in str(report), "NumPy's cannot be switched off"


def test_the_report_as_text_and_data() -> None:
    report = verify(MLP(dropout=0.1), batches_of(vectors, 1, 6, torch.float32)[0])
    text = str(report)
    verdict = "OK. Loss and gradients through the pipeline equal those of plain autograd to the last bit."
    assert " ".join(text.split()).startswith(verdict)
    for part in ("MLP: 3 microbatches on 2 devices", "net.5", "Sequential", "Draws random numbers"):
        assert part in text
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(report)
    assert captured.get().rstrip() == text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is True and data["exact"] is True and data["fits"] is True
    assert data["pipeline"][1]["equal"] is True and data["whole"]["ok"] is True
    assert data["layers"][0]["name"] == "net.0" and data["findings"][0]["kind"] == "random"
    assert {g["parameter"] for g in data["pipeline"][0]["gradients"]} == set(dict(MLP().named_parameters()))


class WithLongNames(L.LightningModule):
    """As deep, and with as long names, as the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = nn.ModuleDict({"decoder": Net(ChangesItsArgument(), lambda y: y.var())})
        self.configure_optimizers = self.language_model["decoder"].configure_optimizers  # type: ignore[method-assign]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.language_model["decoder"].training_step(batch, batch_idx)


def test_reports_are_eighty_columns_wide() -> None:
    """Nothing is left out of them, and no word but a name is broken."""
    report = verify(WithLongNames(), X, microbatches=3)
    first = report.pipeline[0]
    missing = [replace(gradient, missing="found", norm=None) for gradient in first.gradients]
    extreme = replace(first, loss=-1.23456789e-5, expected_loss=-1.23456789e15, gradients=missing)
    text = str(replace(report, pipeline=[extreme, first]))
    lines = text.splitlines()
    assert "…" not in text and max(map(len, lines)) <= 80
    assert any("-1.23457e-05  -1.23457e+15     1e-09  no gradient" in line for line in lines)
    words = set(text.split())
    assert words >= {"microbatches,", "microbatches", "autograd,", "WithLongNames:", "mutated", "input", "gradient"}
    assert words >= {"language_model.", "decoder.net.1", "ChangesIts", "Argument"}, "names go on in the next line"


def test_what_is_found_several_times_is_said_once() -> None:
    report = verify(MLP(), batches_of(vectors, 1, 6, torch.float32)[0])
    draws = [Finding("random", f"blocks.{index}", "Draws random numbers.") for index in range(12)]
    changes = [Finding("mutated input", "head", "Its arguments are changed in place.")] * 3
    once = [Finding("serial", None, "The microbatches run one after the other.")]
    text = str(replace(report, findings=[*draws, *changes, *once, changes[0], draws[0]]))
    found = " ".join(text.partition("Found")[2].split())
    assert [found.count(finding.text) for finding in (draws[0], changes[0], once[0])] == [1, 1, 1]
    assert "blocks.0 and 11 more, 13 times" in " ".join(found.replace("Draws random numbers. ", "").split())
    assert "head, 4 times Its" in found and "the step The" in found


@pytest.mark.parametrize(
    ("precision", "dtype"), [(None, torch.float32), ("64-true", torch.float32), ("bf16-mixed", torch.float32),
                             ("bf16-true", torch.float32), (None, torch.float64)], ids=str,
)  # fmt: skip
def test_precision(precision: str | None, dtype: torch.dtype) -> None:
    model = MLP().to(dtype)
    before = weights(model)
    report = verify(model, batches_of(vectors, 1, 6, dtype)[0], precision=precision)
    assert report.ok
    double = precision == "64-true" or dtype == torch.float64
    assert (report.pipeline[0].tolerance < 1e-8) is double and torch.get_default_dtype() == torch.float32
    assert_equal(weights(model), before)


def test_layers_are_those_asked_for() -> None:
    report = verify(MLP().double(), batches_of(vectors, 1, 6)[0], layers=["Linear"])
    assert report.ok and [layer.kind for layer in report.layers] == ["Linear"] * 5


def test_options_are_the_strategy_s() -> None:
    (batch,) = batches_of(vectors, 1, 6)
    assert lightning_roundpipe.verify(MLP().double(), batch).ok
    options = {"microbatches": 2, "staleness": 1, "background_step": True, "split": "whole"}
    report = verify(MLP().double(), batch, **options)
    assert report.ok and report.split == "whole" and RoundPipeStrategy(**options)
    with pytest.raises(ValueError, match="`split` must be"):
        verify(MLP(), batch, split="sideways")


def test_what_is_no_module_or_no_batch() -> None:
    with pytest.raises(TypeError, match="got the class MLP"):
        verify(MLP, X)
    with pytest.raises(TypeError, match="got a Linear"):
        verify(nn.Linear(4, 4), X)
    with pytest.raises(TypeError, match=r"Pass next\(iter\(loader\)\)"):
        verify(Net(), DataLoader(X, batch_size=3))


def test_parameters_without_gradient() -> None:
    model = Net()
    model.unused = nn.Linear(4, 4).double()
    report = verify(model, X)
    assert report.ok and not any(gradient.missing for gradient in report.pipeline[1].gradients)
    (finding,) = (finding for finding in report.findings if finding.kind == "no gradient")
    assert "unused.weight, unused.bias" in finding.text


# --- broken layers are found and named


class DrawsFromTheSystem(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * int.from_bytes(os.urandom(3), "big")


class DrawsFromItsOwnGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.generator.random()


class DrawsFromItsOwnTorchGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(4, generator=self.generator, dtype=x.dtype)


class ReturnsOtherValuesTheSecondTime(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.linear(x) * type(self).calls


class DependsOnACacheOfAll(Layer):
    cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(x.detach())
        return self.linear(x) + len(self.cache)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "layer", [DrawsFromTheSystem, ReturnsOtherValuesTheSecondTime, DependsOnACacheOfAll],
)  # fmt: skip
def test_a_recompute_that_differs(layer: type[Layer], microbatches: int) -> None:
    report = verify(Net(layer()), X, microbatches=microbatches)
    assert not report.ok and not report.exact
    assert [(finding.kind, finding.layer) for finding in serious(report)] == [("recompute", "net.1")]
    text = str(report)
    assert text.startswith("NOT OK. RecomputeError: layer 'net.1'") and "RoundPipeStrategy(layers=...)" in text
    assert [layer.calls for layer in report.layers] != [0, 0, 0]


@pytest.mark.parametrize("layer", [DrawsFromItsOwnGenerator, DrawsFromItsOwnTorchGenerator])
def test_a_recompute_that_draws_the_same_again(layer: type[Layer]) -> None:
    report = verify(Net(layer()), X, microbatches=1)
    assert report.ok and serious(report) == []


class AppendsToACache(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(x.detach())
        return self.linear(x) + len(self.cache)


def test_a_cache_that_grows() -> None:
    """The pipeline computes it right, but a batch is not its microbatches, and that is said."""
    layer = AppendsToACache()
    report = verify(Net(layer), X)
    assert kinds(report) >= {"side effect"} and "net.1.cache" in str(report)
    assert report.exact and report.fits is False and not report.ok
    assert "depends on what the microbatches before have left (net.1.cache)" in report.verdict()
    assert layer.cache == []
    assert verify(Net(AppendsToACache()), X, split="whole").ok


class Escapes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return self.linear(x)


class ChangesItsArgument(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.tanh_())


class WritesABuffer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        return self.linear(x)


@pytest.mark.parametrize(
    ("layer", "kind", "text"),
    [
        (Escapes, "escape", "the attribute 'penalty'"),
        (ChangesItsArgument, "mutated input", "changed in place"),
        (WritesABuffer, "side effect", "net.1.count"),
    ],
)
def test_what_is_found_and_dealt_with(layer: type[Layer], kind: Any, text: str) -> None:
    report = verify(Net(layer()), X)
    assert report.ok and all(comparison.equal for comparison in report.pipeline)
    assert any(finding.kind == kind and text in finding.text for finding in report.findings if finding.layer == "net.1")


def test_hooks_inside_a_layer_and_objects_handed_to_it() -> None:
    class Writes(Layer):
        def forward(self, x: Tensor, found: dict[str, Tensor]) -> Tensor:
            found["x"] = self.linear(x)
            return found["x"] * 2

    class Hands(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            found: dict[str, Tensor] = {}
            y = self.net[2](self.net[1](self.net[0](batch), found))
            return y.mean() + found["x"].square().mean() + self.seen

    model = Hands(Writes())
    model.net[1].linear.register_forward_hook(lambda module, args, output: setattr(model, "seen", output.mean()))
    report = verify(model, X, layers=["net.0", "net.1", "net.2"])
    assert report.ok
    ways = {finding.text for finding in report.findings if finding.kind == "escape" and finding.layer == "net.1"}
    assert [any(part in way for way in ways) for part in ("hook on Linear", "handed to it")] == [True, True]


def test_why_it_runs_serially() -> None:
    class Counts(Net):
        total = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.total += 1
            y = self.net[0](batch)
            self.total += 1
            return self.net[2](self.net[1](y)).square().mean()

    report = verify(Counts(), X)
    (finding,) = (finding for finding in report.findings if finding.kind == "serial")
    assert report.ok and "Counts.total" in finding.text


# --- differences are said plainly


@pytest.mark.parametrize("first", [0, 1])
def test_a_wrong_gradient(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every batch, or in the pipelined ones only."""
    add = BatchGradients.add

    def wrong(self: BatchGradients, microbatch: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter is model.net[1].weight and self.number >= first:
            gradient = gradient * 1.01
        add(self, microbatch, parameter, gradient)

    model = Net()
    monkeypatch.setattr(BatchGradients, "add", wrong)
    report = verify(model, X)
    assert not report.ok and not report.exact
    assert [comparison.ok for comparison in report.pipeline] == [False, False] if first == 0 else [True, False]
    assert {(finding.kind, finding.layer) for finding in serious(report)} == {("difference", "net.1")}
    (gradient,) = report.pipeline[1].wrong
    assert (gradient.parameter, gradient.layer) == ("net.1.weight", "net.1")
    assert gradient.relative == pytest.approx(0.01) and gradient.error > 0
    assert report.verdict().startswith("NOT OK.") and "'net.1.weight'" in report.verdict()


@pytest.mark.parametrize("missing", ["expected", "found"])
def test_a_gradient_that_is_missing_on_one_side(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add = BatchGradients.add

    def wrong(self: BatchGradients, microbatch: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter is not model.net[1].bias or missing == "expected":
            add(self, microbatch, parameter, gradient)
        if parameter is model.net[1].bias and missing == "expected":
            add(self, microbatch, model.unused, torch.zeros_like(model.unused))  # zero is not none: weight decay

    model = Net()
    model.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    monkeypatch.setattr(BatchGradients, "add", wrong)
    (gradient,) = verify(model, X).pipeline[0].wrong
    assert gradient.missing == missing
    assert gradient.parameter == ("unused" if missing == "expected" else "net.1.bias")


def test_a_side_effect_that_the_recompute_repeats() -> None:
    """Hidden in a closure, so that the pipeline cannot know of it."""

    class Noting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.notes = notes = []
            self.net[1].register_forward_pre_hook(lambda module, args: None)
            linear = self.net[1]
            linear.forward = lambda x: notes.append(0) or F.linear(x, linear.weight, linear.bias)

    model = Noting()
    report = verify(model, X, layers=["net.0", "net.1", "net.2"])
    assert not report.exact
    (finding,) = serious(report)
    assert finding.kind == "side effect" and "notes is not what plain autograd" in finding.text
    assert model.notes == []


def test_a_step_that_cannot_be_repeated() -> None:
    class Draws(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch * int.from_bytes(os.urandom(3), "big"), batch_idx)

    report = verify(Draws(), X)
    (finding,) = serious(report)
    assert not report.ok and "Two runs of the step by plain autograd differ" in finding.text


def test_an_error_of_the_pipeline() -> None:
    """What it refuses becomes a finding; nothing of the message is lost."""

    class Penalized(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            y = self.net(batch.requires_grad_())
            (gradient,) = torch.autograd.grad(y.sum(), batch, retain_graph=True)
            return y.square().mean() + gradient.detach().mean()

    report = verify(Penalized(), X)
    (finding,) = serious(report)
    assert (finding.kind, finding.layer) == ("error", "net.2")
    assert "asked for within training_step" in finding.text and "microbatch 1 of 3" in finding.text
    assert report.pipeline == [] and not report.ok


def test_a_batch_that_cannot_be_split() -> None:
    class Sums(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(X * batch["scale"], batch_idx)

    report = verify(Sums(), {"scale": torch.tensor(2.0)})
    (finding,) = serious(report)
    assert finding.kind == "split" and "batch['scale']" in finding.text and "split=" in finding.text


# --- whether the split fits the loss


@pytest.mark.parametrize(
    ("loss", "option"),
    [(lambda y: y.square().sum(), "loss_weight='sum'"), (lambda y: y.var(), "split='model'")],
    ids=["sum", "variance"],
)
def test_a_loss_that_does_not_fit(loss: Callable[[Tensor], Tensor], option: str) -> None:
    """The remedy is named, and is one."""
    report = verify(Net(loss=loss), X)
    assert report.exact and report.fits is False and not report.ok
    assert option in report.verdict()
    name, value = option.split("=")
    assert verify(Net(loss=loss), X, **{name: value.strip("'")}).ok
    assert verify(Net(loss=loss), X, split="auto").ok


def test_token_means() -> None:
    class Tokens(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9)

        def loss(self, batch: Any) -> Tensor:
            logits = self.head(self.embed(batch["input_ids"]))[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    torch.manual_seed(0)
    ids = torch.randint(9, (6, 5))
    labels = ids.masked_fill(torch.rand(6, 5) < 0.4, -100)
    batch = {"input_ids": ids, "labels": labels}
    report = verify(Tokens().double(), batch)
    assert report.exact and report.fits is False and "With loss_weight='tokens' they do." in report.verdict()
    assert verify(Tokens().double(), batch, loss_weight="tokens").ok
    chosen = verify(Tokens().double(), batch, split="auto")
    assert chosen.ok and (chosen.split, chosen.loss_weight) == ("step", "tokens")


def test_calls_that_are_split_within_the_step() -> None:
    """With a loss over the whole batch, compared with just that; as far as microbatches compute the same."""
    report = verify(Net(loss=lambda y: y.var()), X, split="model", microbatches=3)
    assert report.ok and report.fits is None
    assert (report.split, report.microbatches) == ("model", 3)
    assert [layer.calls for layer in report.layers] == [3, 3, 3]
    random = verify(Net(nn.Dropout(0.5), loss=lambda y: y.var()), X, split="model")
    assert not random.ok and not serious(random) and random.verdict().startswith("NOT VERIFIED.")
    assert verify(Net(nn.Dropout(0.5), loss=lambda y: y.var()).eval(), X, split="model").ok
    assert verify(Net(loss=lambda y: y.var()), X, split="whole").ok


def test_batch_norm_is_named_and_no_misfit() -> None:
    report = verify(CNN().double(), batches_of(pictures, 1, 8)[0])
    assert report.ok and report.fits
    assert "BatchNorm normalizes over a microbatch of 2 samples" in str(report)


# --- nothing is left behind


class Everything(Lit):
    """Whatever a step can leave on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), WritesEverything(), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.average = nn.Linear(6, 8).requires_grad_(False)
        self.metric = MeanMetric()
        self.count = 0
        self.losses: list[float] = []
        self.nested: dict[str, Any] = {"a": [torch.zeros(2)], "b": deque([1]), "c": OrderedDict(x={1, 2})}
        self.generator = torch.Generator()
        self.numbers = random.Random(0)
        self.rows = numpy.random.default_rng(0)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + 1} if self.trainer.training else batch

    def loss(self, batch: Any) -> Tensor:
        self.count += 1
        self.losses.append(0.0)
        self.nested["a"][0] += 1
        self.nested["a"].append(torch.ones(1))
        self.nested["b"].append(2)
        self.nested["c"]["x"].add(len(self.losses))
        self.nested["d"] = 1
        self.new = torch.rand(1)
        self.generator.manual_seed(self.count)
        self.numbers.random()
        self.rows.random()
        loss = F.mse_loss(self.net(batch["x"].clone()), batch["y"])
        batch["x"].zero_()
        with torch.no_grad():
            self.average.weight.data.mul_(0.9).add_(self.net[0].weight.data, alpha=0.1)
        self.metric(loss.detach())
        self.log("loss", loss)
        self.log("metric", self.metric)
        self.log_dict({"rate": self.optimizers().param_groups[0]["lr"], "epoch": float(self.current_epoch)})
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return loss + 0 * torch.rand(()) + 0 * numpy.random.rand() + 0 * random.random()


class WritesEverything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(()))
        self.plain = torch.zeros(3)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        self.plain = self.plain + 1
        self.last = x.detach()
        self.cache.append(self.last)
        return self.linear(x)


def contents(module: Everything) -> dict[str, Any]:
    layer = module.net[1]
    return {
        "weights": weights(module),
        "metric": (module.metric.mean_value.clone(), module.metric.weight.clone(), module.metric.update_count),
        "plain": (module.count, list(module.losses), layer.plain.clone(), list(layer.cache)),
        "nested": ([t.clone() for t in module.nested["a"]], list(module.nested["b"]), sorted(module.nested["c"]["x"])),
        "keys": list(module.nested),
        "generators": (module.generator.get_state(), module.numbers.getstate(), str(module.rows.bit_generator.state)),
        "gradients": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "flags": [p.requires_grad for p in module.parameters()],
        "identities": [id(p.grad) for p in module.parameters()],
        "trainer": module._trainer,
    }


@pytest.fixture
def everything() -> Iterator[Everything]:
    torch.manual_seed(7)
    module = Everything()
    for index, parameter in enumerate(module.parameters()):
        if parameter.requires_grad and index % 2:
            parameter.grad = torch.full_like(parameter, index)
    yield module


@pytest.mark.parametrize("options", [{}, {"microbatches": 1}, {"split": "auto"}, {"precision": "64-true"}], ids=str)
def test_nothing_is_left(everything: Everything, options: dict[str, Any]) -> None:
    (batch,) = batches_of(vectors, 1, 8, torch.float32)
    original = {name: value.clone() for name, value in batch.items()}
    numpy.random.seed(3)
    random.seed(3)
    before, state, process = anatomy(everything), contents(everything), process_state()
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    verify(everything, batch, **options)
    assert anatomy(everything) == before and process_state() == process
    assert_equal(contents(everything), state)
    assert_equal(batch, original)
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert (numpy.random.get_state()[1] == generators[2]).all()


def test_the_training_after_it_is_the_same() -> None:
    batches = batches_of(vectors, 3, 6)
    found = []
    for first in (False, True):
        torch.manual_seed(7)
        model = MLP(dropout=0.2).double()
        if first:
            assert verify(model, batches[0]).ok
        fit_pipeline(model, batches, 3, devices=2)
        found.append(weights(model))
    assert_equal(*found)


def test_a_module_between_two_fits_keeps_its_trainer() -> None:
    batches = batches_of(vectors, 2, 6)
    model = MLP().double()
    trainer = fit(model, batches)
    before = anatomy(model)
    assert verify(model, batches[0]).ok
    assert model.trainer is trainer and anatomy(model) == before


def test_hooks_on_gradients_run_but_nothing_steps() -> None:
    """A hook that steps an optimizer as soon as a gradient is there waits for training."""
    model = Net()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: pytest.fail("an optimizer would step here"))
    model.net[1].weight.register_hook(lambda gradient: 3 * gradient)
    report, plain = verify(model, X), verify(Net(), X)
    assert report.ok and plain.ok
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())


class Fails(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        raise ValueError("bad row")


def test_an_error_of_the_step_itself_is_raised() -> None:
    model = Fails()
    before, threads = anatomy(model), set(threading.enumerate())
    with pytest.raises(ValueError, match="bad row") as caught:
        verify(model, X)
    assert any("raised by plain autograd" in note for note in caught.value.__notes__)
    assert anatomy(model) == before and set(threading.enumerate()) == threads


def test_what_cannot_be_verified() -> None:
    model = Net()
    model.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="nothing to verify"):
        verify(model, X)
    with pytest.raises(MisconfigurationException, match="no shape yet"):
        verify(Net(nn.LazyLinear(4)), X)


def test_steps_of_every_kind() -> None:
    """Without a batch index, with a dict, with no loss for some microbatch, and where gradients are disabled."""

    class Returns(Net):
        def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
            if float(batch[0, 0]) == float(X[0, 0]) and len(batch) == 2:
                return None
            return {"loss": self.net(batch).square().mean(), "output": batch}

    with torch.no_grad():
        report = verify(Returns(), X)
    assert report.exact and report.pipeline[1].equal and report.fits is False
