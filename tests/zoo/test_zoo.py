"""Every entry of the zoo, trained through the pipeline and by plain autograd, in fp64. Writes docs/compatibility.md."""

import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import RoundPipeStrategy, default_dtype, fit, split
from lightning.pytorch.utilities.model_helpers import is_overridden
from models import Lit, batches_of
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_roundpipe.pipeline.batch import Batch
from zoo.entries import ZOO
from zoo.entry import Entry
from zoo.table import PATH, Row, page

TOLERANCE = 1e-9
DEVICES, MICROBATCHES = 2, 4
SIZES = (5, 8, 6)
"""Samples per batch: microbatches of different sizes, and of other sizes in the next batch."""


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Row]]:
    """Takes a row from each entry. If all have one, the page is written."""
    rows: dict[str, Row] = {}
    yield rows
    if rows.keys() == ZOO.keys():
        facts = {
            "steps": len(SIZES),
            "devices": DEVICES,
            "microbatches": MICROBATCHES,
            "tolerance": f"{TOLERANCE:.0e}".replace("e-0", "e-"),
        }
        sizes = f"{', '.join(map(str, SIZES[:-1]))} and {SIZES[-1]}"
        PATH.write_text(page([rows[name] for name in ZOO], sizes=sizes, **facts), encoding="utf-8")


@pytest.mark.parametrize("name", ZOO)
def test_equals_plain_autograd(name: str, table: dict[str, Row]) -> None:
    family, entry = ZOO[name]
    start, plain, ours = (build(entry) for _ in range(3))
    batches = [batches_of(entry.data, 1, size, seed=seed)[0] for seed, size in enumerate(sizes_for(start))]
    plain_losses, plain_optimizer = train_plain(plain, batches)
    strategy = Watched(microbatches=MICROBATCHES, layers=entry.layers, split="step")
    trainer = fit(ours, batches, strategy, devices=DEVICES, precision="64-true")

    states = optimizer_state(plain, plain_optimizer)
    assert states and any(moved(start, plain).values()), "nothing was trained"
    error = largest_error(dict(ours.named_parameters()), dict(plain.named_parameters()))
    assert error <= TOLERANCE
    assert largest_error(optimizer_state(ours, trainer.optimizers[0]), states) <= TOLERANCE
    assert largest_error(dict(ours.named_buffers()), dict(plain.named_buffers())) <= TOLERANCE
    assert largest_error(by_text(ours.seen), by_text(plain.seen)) <= TOLERANCE
    assert largest_error(dict(enumerate(strategy.losses)), dict(enumerate(plain_losses))) <= TOLERANCE

    assert strategy.report().microbatches == MICROBATCHES
    assert strategy.in_background is not is_overridden("on_train_batch_end", ours), "as the README says"
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    layers = len(strategy.report().layers)
    notes = [*filter(None, [entry.notes]), *found_notes(plain, states, batches[0])]
    table[name] = Row(name, family, parameters, layers, strategy.calls, error, notes)


# Those whose loss is no mean over samples, whose control flow depends on the batch, or that keep state; and some more.
WHOLE = [
    "GPT-2", "Llama", "T5", "ViT", "BERT", "ELECTRA", "BigBird", "MPNet", "Mixtral", "Qwen2-MoE", "OLMoE", "GPT-OSS",
    "Jamba", "GraniteMoE", "Mixture of experts", "LayerDrop", "Reordered blocks", "Adaptive computation", "Early exit",
    "Hypernetwork", "Spectral norm", "Teacher and student", "Domain-adversarial network", "Gemma 3",
]  # fmt: skip
WHOLE_TOLERANCE = 1e-6  # some compute their norms in float32, where it matters with how many others a sample is


@pytest.mark.parametrize("name", WHOLE)
def test_default_split_trains_as_on_one_device(name: str) -> None:
    """With nothing set but the number of microbatches: the whole batch's gradients, whatever the loss."""
    _, entry = ZOO[name]
    plain, ours = build(entry), build(entry)
    batches = [batches_of(entry.data, 1, size, seed=seed)[0] for seed, size in enumerate(sizes_for(plain))]
    train_plain(plain, batches, parts=1)
    fit(ours, batches, Watched(microbatches=MICROBATCHES, layers=entry.layers), devices=DEVICES, precision="64-true")
    assert largest_error(dict(ours.named_parameters()), dict(plain.named_parameters())) <= WHOLE_TOLERANCE


# --- training


def sizes_for(model: nn.Module) -> list[int]:
    """Of the batches: BatchNorm has at least two samples in each microbatch."""
    norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    return [max(size, 2 * MICROBATCHES) + size % 2 if norms else size for size in SIZES]


def build(entry: Entry) -> Lit:
    torch.manual_seed(3)
    return entry.make().double()


def train_plain(
    model: Lit, batches: Sequence[dict[str, Tensor]], parts: int = MICROBATCHES
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """A loop as one would write it, with the weights of microbatches and the statistics of BatchNorm made explicit."""
    optimizer = model.configure_optimizers()
    statistics = WholeBatchStatistics(model, parts)
    losses: list[Tensor] = []
    model.train()
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        statistics.begin()
        size, total = samples(batch), 0.0
        for part in split(batch, parts, even=False):
            weight = samples(part) / size
            with default_dtype(torch.float64):  # as precision="64-true" has it
                loss = model.training_step(part, index)
            (weight * loss).backward()
            total = total + weight * loss.detach()
        statistics.commit()
        optimizer.step()
        losses.append(total)
        model.on_train_batch_end(total, batch, index)
    return losses, optimizer


def samples(batch: dict[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


class WholeBatchStatistics:
    """Gives each BatchNorm, after each batch, the running statistics that the whole batch's inputs have, as PyTorch
    documents them.
    """

    def __init__(self, model: nn.Module, parts: int) -> None:
        self.parts = parts
        self.norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self.inputs: dict[nn.Module, list[Tensor]] = {}
        self.before: dict[nn.Module, dict[str, Tensor]] = {}
        for norm in self.norms:
            norm.register_forward_pre_hook(lambda norm, args: self.inputs[norm].append(args[0].detach().clone()))

    def begin(self) -> None:
        self.inputs = {norm: [] for norm in self.norms}
        self.before = {norm: {name: b.clone() for name, b in norm.named_buffers()} for norm in self.norms}

    def commit(self) -> None:
        for norm in self.norms:
            assert len(self.inputs[norm]) == self.parts
            inputs = torch.cat(self.inputs[norm]).transpose(0, 1).flatten(1)
            before = self.before[norm]
            count = int(before["num_batches_tracked"]) + 1
            momentum = 1 / count if norm.momentum is None else norm.momentum
            norm.num_batches_tracked.fill_(count)
            norm.running_mean.copy_(before["running_mean"].lerp(inputs.mean(1), momentum))
            norm.running_var.copy_(before["running_var"].lerp(inputs.var(1, unbiased=True), momentum))


class Watched(RoundPipeStrategy):
    """Notes the batches' losses and how many calls of layers each microbatch made. A callback that did would keep the
    optimizer from stepping in the background.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[Tensor] = []
        self.calls: list[int] = []
        self.in_background = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        forget = Batch.forget_runs

        def note(batch: Batch) -> None:
            self.calls += [len(run.sequence) for run in batch.runs if run is not None]
            forget(batch)

        with patch.object(Batch, "forget_runs", note):
            loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.detach().clone())
        self.in_background = self.steps_in_background
        return loss


# --- comparing


def largest_error(actual: dict[Any, Tensor], expected: dict[Any, Tensor]) -> float:
    """The largest difference, as a share of the largest value of its tensor.

    Where a tensor is as good as zero (the gradient of a key's bias in attention is, but for rounding), its own size
    says nothing: of a ten thousandth of the largest value of all.
    """
    assert actual.keys() == expected.keys()
    floor = 1e-4 * max((size(value) for value in expected.values()), default=0.0)
    worst = 0.0
    for name, value in expected.items():
        found = actual[name]
        assert found.shape == value.shape and found.dtype == value.dtype, name
        if not value.is_floating_point():
            assert torch.equal(found, value), name
        elif difference := size(found.detach() - value.detach()):
            worst = max(worst, difference / max(size(value), floor))
        assert math.isfinite(worst) and math.isfinite(size(value)), f"{name} is not finite"
    return worst


def size(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() and value.is_floating_point() else 0.0


def moved(before: nn.Module, after: nn.Module) -> dict[str, bool]:
    return {
        name: not torch.equal(a, b) for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
    }


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of the optimizer's state by parameter: where there is none, there never was a gradient."""
    return {
        f"{name}: {key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def by_text(notes: dict[Any, Tensor]) -> dict[str, Tensor]:
    return {str(key): value for key, value in notes.items()}


# --- what the table says about a model


def found_notes(model: Lit, states: dict[str, Tensor], batch: dict[str, Tensor]) -> list[str]:
    notes = []
    config = getattr(getattr(model, "net", None), "config", None)
    if config is not None and fills_cache(model, batch):
        notes.append("use_cache")
    if getattr(config, "output_router_logits", False):
        notes.append("router loss")
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        notes.append("tied parameters")
    if WholeBatchStatistics(model, 1).norms:
        notes.append("BatchNorm")
    parameters = dict(model.named_parameters())
    if frozen := sum(not parameter.requires_grad for parameter in parameters.values()):
        notes.append(several(frozen, "frozen parameter"))
    updated = {name.partition(": ")[0] for name in states}
    if unused := sum(p.requires_grad and name not in updated for name, p in parameters.items()):
        notes.append(several(unused, "parameter") + " without gradient")
    return notes


def several(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count > 1)


def fills_cache(model: Lit, batch: dict[str, Tensor]) -> bool:
    with default_dtype(torch.float64), torch.no_grad():
        output = model.net(**batch)
    return any(output.get(name) is not None for name in ("past_key_values", "cache_params"))
