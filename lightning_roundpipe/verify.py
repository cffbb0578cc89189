"""Checks a module before a long run: one batch through the pipeline and through plain autograd.

The reference is a loop over the same microbatches with nothing of the pipeline in it, but for where random numbers are
drawn: there each microbatch and layer call is given the seed that it has in the pipeline.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_roundpipe import microbatch as mb
from lightning_roundpipe.gradient_errors import dense, gradient_error, norm
from lightning_roundpipe.module_state import ModuleState
from lightning_roundpipe.pipeline.escapes import RecomputeError
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.rng import RandomState, derive_seed, seed_all
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.refusals import check_module
from lightning_roundpipe.repeatable import comparable
from lightning_roundpipe.splitting import count_labels
from lightning_roundpipe.strategy import RoundPipeStrategy, loss_in
from lightning_roundpipe.undoing import undone
from lightning_roundpipe.verification import Comparison, Finding, Kind, LayerCheck, Verification
from lightning_roundpipe.without_trace import attach, copied, gradients_aside, parameters_kept, quiet

_SAME_SUMS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""What counts as rounding between runs that add up the same terms, by precision."""
_OTHER_SUMS = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Between a batch and its microbatches, whose terms are added up in another order."""
_COARSE = 2e-2  # half precision

_REMEDY = "Keep the layer out of the pipeline with RoundPipeStrategy(layers=...), or train with strategy='auto'."


def verify(
    module: pl.LightningModule,
    batch: Any,
    *,
    devices: int = 2,
    precision: Any | None = None,
    batch_idx: int = 0,
    **options: Any,
) -> Verification:
    """Runs one batch through the pipeline and through plain autograd, and tells how far they agree and what was found.

    It takes about as long as five training steps, and the memory of training with Adam. The optimizer does not step.
    Afterwards the module is what it was: parameters, gradients, buffers, attributes (lists, dicts and sets included),
    metrics, logs, its Trainer and the random generators; so is the batch. What the step does to objects of other kinds,
    or to files, is not undone.

    Args:
        module: The module, with all its layers in place. It needs no Trainer, and of its hooks only those for the batch
            and ``configure_optimizers`` are called.
        batch: A batch as the data loader gives it. The module's own batch transfer hooks are called on it.
        devices: How many devices to run on.
        precision: As for the Trainer. By default the module computes in the type that it has; ``"64-true"`` leaves the
            least doubt about what is rounding.
        batch_idx: What ``training_step`` is told.
        options: Those of :class:`RoundPipeStrategy` that training will have, such as ``microbatches``, ``layers``,
            ``split`` and ``loss_weight``.

    Returns:
        The report. ``report.ok`` tells whether the module can be trained like this. An error that the pipeline raises
        is among its findings.

    Raises:
        MisconfigurationException: When there is nothing to verify: with manual optimization, or parameters that have no
            shape yet.
        TypeError: When `module` is no LightningModule, or `batch` a data loader.
        Exception: What the step raises in plain autograd, too.
    """
    if isinstance(module, type) or not hasattr(module, "automatic_optimization"):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise TypeError(f"verify takes a LightningModule, got {what}.")
    if isinstance(batch, DataLoader):
        raise TypeError("verify takes one batch, got a DataLoader. Pass next(iter(loader)).")
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "With automatic_optimization=False, steps are run as they are, not through the pipeline: there is nothing"
            " to verify."
        )
    check_module(module, simulated=False)
    started = time.perf_counter()
    strategy = _Strategy(**{**options, "background_step": False})
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(gradients_aside(module))
        restore = stack.enter_context(parameters_kept(module))
        stack.enter_context(undone(module))
        trainer = pl.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, precision=precision, logger=DummyLogger(),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        attach(module, trainer, strategy)
        stack.callback(strategy.teardown)
        plugin = strategy.precision_plugin
        types = [parameter.dtype for parameter in module.parameters()]
        plugin.convert_module(module)
        if types != [parameter.dtype for parameter in module.parameters()]:
            restore = stack.enter_context(parameters_kept(module))
        prepared = module.on_before_batch_transfer(copied(batch), 0)
        prepared = module.transfer_batch_to_device(prepared, module.device, 0)
        prepared = plugin.convert_input(module.on_after_batch_transfer(prepared, 0))
        check = _Check(module, strategy, prepared, batch_idx, restore)
        check.run()
        return check.report(devices, time.perf_counter() - started)


class _Strategy(RoundPipeStrategy):
    """The strategy, with a view of what it has built and decided."""

    def begin_anew(self) -> None:
        """The next batch draws the same random numbers, and the sums of this one are left to whoever holds them."""
        pipeline = self._pipeline
        assert pipeline is not None
        pipeline.step = 0
        for unit in pipeline.store.units:
            pipeline.gradients.hand_over(unit)

    def pieces(self, batch: Any) -> tuple[list[Any], list[int], list[float]]:
        """The microbatches that ``training_step`` sees, their sizes and weights."""
        assert self._splitter is not None
        pieces, sizes, weights = self._splitter.split(batch)
        return (pieces, sizes, weights) if len(pieces) > 1 else ([batch], [1], [1.0])


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a run of the batch gave, and what it left on the module."""

    loss: Tensor | None
    gradients: dict[str, Tensor | None]
    state: ModuleState
    drew: bool = False
    """Whether the code between layers drew random numbers. Known of plain runs only."""


class _Check:
    """The runs of one batch, and what they show.

    Args:
        module: The module.
        strategy: The strategy, connected with it.
        batch: The batch, as ``training_step`` expects it.
        batch_idx: Its number.
        restore: Puts the parameters back to what they were.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        strategy: _Strategy,
        batch: Any,
        batch_idx: int,
        restore: Callable[[], None],
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.batch = batch
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.arguments = (batch_idx,) if takes_index else ()
        self.restore = restore
        self.findings: list[Finding] = []
        self.comparisons: list[Comparison] = []
        self.whole: Comparison | None = None
        self.pieces: list[Any] = [batch]
        self.sizes: list[int] = [1]
        self.weights: list[float] = [1.0]
        self.layers: list[Layer] = []
        self.calls: list[int] = []
        self.seeds: _Seeds | None = None
        self.random = False
        self.expected: _Outcome | None = None
        self.same_parts = True
        """Whether pipeline and plain autograd can be compared at all."""
        self.before = ModuleState(module)
        self.left: dict[tuple[str, str], None] = {}
        """What pipeline and plain autograd leave differently."""
        self.kept: list[tuple[str, str]] = []
        """What a microbatch leaves for the next one to find."""
        types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        half = isinstance(strategy.precision_plugin, (MixedPrecision, HalfPrecision))
        self.dtype = torch.half if half else max(types, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)

    def run(self) -> None:
        """Runs the batch in all ways, and notes what is found.

        No more than two sets of gradients are held at a time.
        """
        for name in ("pipeline, first batch", "pipeline, later batches"):
            if not self._run_pipeline_as(name):
                break
        expected = self.expected
        assert expected is not None
        if (pipeline := self.strategy.pipeline) is not None:
            self.calls = [cost.calls for cost in pipeline.measured.forward]  # since the first batch
            self._note_layers(pipeline)
        self._note_side_effects(expected.state)
        self._note_missing(expected)
        self._judge(expected)
        if len(self.pieces) > 1 and not any(finding.serious for finding in self.findings):
            self._compare_with_whole(expected)

    # -- the runs --------------------------------------------------------------------------------------------------

    def _run_pipeline_as(self, name: str) -> bool:
        """The first time the batch runs serially, which records what layers are like; then as all later batches do."""
        outcome = None
        try:
            outcome = self._run(self._step_of_pipeline)
        except Exception as error:
            self._note_error(error)
        if self.expected is None:  # random numbers of layers are seeded as the first batch has shown
            self.expected = self._run_reference()
        if outcome is None or not self.same_parts:
            return outcome is not None
        tolerance = self._tolerance(_SAME_SUMS, self.expected)
        reference = "plain autograd, same microbatches" if len(self.pieces) > 1 else "plain autograd, whole batch"
        self.comparisons.append(self._comparison(name, reference, outcome, self.expected, _SAME_SUMS))
        self.left.update(dict.fromkeys(outcome.state.differing(self.expected.state, tolerance, norms=False)))
        return True

    def _run_reference(self) -> _Outcome:
        """Plain autograd on the same microbatches."""
        pipeline = self.strategy.pipeline
        with suppress(ValueError):  # what cannot be split has been found already
            self.pieces, self.sizes, self.weights = self.strategy.pieces(self.batch)
        many = len(self.pieces) > 1
        if pipeline is not None:
            self.layers = pipeline.layers
        self.random = any(layer.draws() for layer in self.layers)
        if many and pipeline is not None:
            self.seeds = _Seeds(pipeline.seed, self.layers if self.random else [])
        try:
            expected = self._run_plain(self.pieces, self.weights, self.seeds)
        except Exception as error:
            error.add_note("verify: raised by plain autograd, which runs the step without the pipeline")
            for finding in self.findings:
                error.add_note(f"verify: found before: {finding.text}")
            raise
        self.random |= expected.drew
        norms = any(isinstance(m, _BatchNorm) and m.training for m in self.module.modules())
        if not many and pipeline is not None and pipeline.last_microbatches > 1 and (self.random or norms):
            self.same_parts = False
            text = (
                "Microbatches draw random numbers, or normalize by statistics, of their own, so that they cannot be"
                " compared with the whole batch. Verify module.eval(), in which layers do not; where the step itself"
                " draws, it cannot be told."
            )
            self._found("split", None, text)
        return expected

    def _step_of_pipeline(self) -> tuple[Tensor | None, bool]:
        loss = loss_in(self.strategy.training_step(copied(self.batch), *self.arguments))
        if loss is not None:
            self.module.backward(loss)
        self.strategy.after_backward()
        self.strategy.begin_anew()
        return loss, False

    def _run_plain(
        self, pieces: Sequence[Any], weights: Sequence[float], seeds: "_Seeds | None" = None, repeatable: bool = False
    ) -> _Outcome:
        """A loop of plain autograd.

        Args:
            pieces: The microbatches.
            weights: The weights of their losses.
            seeds: What seeds them as the pipeline does.
            repeatable: Whether to take out what makes a batch and its parts differ in any case.
        """

        def step() -> tuple[Tensor | None, bool]:
            losses, drew = [], False
            with (
                comparable(self.module) if repeatable else nullcontext(),
                seeds.installed() if seeds is not None else nullcontext(),
            ):
                for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
                    if seeds is not None:
                        seeds.begin(index)
                    before = RandomState.capture()
                    with self.strategy.precision_plugin.train_step_context():
                        loss = loss_in(self.module.training_step(copied(piece), *self.arguments))
                    drew |= not RandomState.capture().same(before)
                    if loss is not None:
                        self.module.backward(weight * loss)
                    losses.append(loss)
            return mb.merge_losses(losses, weights), drew

        return self._run(step)

    def _run(self, step: Callable[[], tuple[Tensor | None, bool]]) -> _Outcome:
        """Runs a step that leaves its gradients in ``.grad``, and undoes everything."""
        parameters = list(self.module.named_parameters())
        with undone(self.module):
            try:
                loss, drew = step()
                gradients = {name: parameter.grad for name, parameter in parameters if parameter.requires_grad}
                state = ModuleState(self.module)
            finally:
                for _, parameter in parameters:
                    parameter.grad = None
                self.restore()
        return _Outcome(None if loss is None else loss.detach(), gradients, state, drew)

    # -- comparing -------------------------------------------------------------------------------------------------

    def _judge(self, expected: _Outcome) -> None:
        """If the pipeline and plain autograd differ, so may two runs of plain autograd."""
        wrong = [comparison for comparison in self.comparisons if not comparison.ok]
        if not wrong and not self.left:
            return
        again = self._run_plain(self.pieces, self.weights, self.seeds)
        if not self._comparison("", "", again, expected, _SAME_SUMS).ok:
            text = (
                "Two runs of the step by plain autograd differ, from the same state and with the same seeds of PyTorch,"
                " Python and NumPy. So whether the pipeline is right cannot be told. The step depends on something"
                " else, such as random numbers of another generator, a counter, the clock or a global: make it depend"
                " on its batch and the module only."
            )
            self._found("difference", None, text, serious=True)
            return
        for comparison in wrong:
            self._explain(comparison)
        for layer, names in self._by_layer(self.left).items():
            text = f"After a batch, {names} is not what plain autograd on the same microbatches leaves. {_REMEDY}"
            self._found("side effect", layer, text, serious=True)

    def _tolerance(self, table: dict[torch.dtype, float], outcome: _Outcome) -> float:
        """What counts as rounding. Some models compute the loss in another precision than all else."""
        types = [self.dtype] if outcome.loss is None else [self.dtype, outcome.loss.dtype]
        return max(table.get(kind, _COARSE) for kind in types)

    def _comparison(
        self, name: str, reference: str, found: _Outcome, expected: _Outcome, table: dict[torch.dtype, float]
    ) -> Comparison:
        norms = {name: None if g is None else norm(g) for name, g in expected.gradients.items()}
        floor = 1e-4 * max((norm for norm in norms.values() if norm is not None), default=0.0)
        layer_of = self._layers_of_parameters()
        errors = [
            gradient_error(parameter, layer_of.get(parameter), found.gradients.get(parameter), gradient, floor)
            for parameter, gradient in expected.gradients.items()
        ]
        losses = _number(found.loss), _number(expected.loss)
        return Comparison(name, reference, *losses, errors, self._tolerance(table, expected))

    def _explain(self, comparison: Comparison) -> None:
        """Says that there is a difference, and where."""
        plan = self.strategy.pipeline.plan if self.strategy.pipeline is not None else None
        order = {layer.name: layer.index for layer in self.layers}
        if plan is not None:
            order.update((self.layers[index].name, position) for position, index in enumerate(plan.calls))
        text = f"{comparison.name}: loss and gradients are not those of plain autograd on the same microbatches."
        if not comparison.loss_error <= comparison.tolerance:
            text += f" The loss is {comparison.loss} instead of {comparison.expected_loss}."
        layer = None
        if wrong := comparison.wrong:
            # They are wrong from where the fault is back to the first layer.
            layer = max(wrong, key=lambda gradient: order.get(gradient.layer or "", -1)).layer
            worst = comparison.worst
            assert worst is not None
            text += (
                f" {len(wrong)} of {len(comparison.gradients)} gradients differ, most that of {worst.parameter!r};"
                f" the last layer with such a gradient is {layer!r}."
            )
        self._found("difference", layer, f"{text} {_REMEDY}", serious=True)

    def _compare_with_whole(self, expected: _Outcome) -> None:
        """Whether the microbatches add up to the whole batch: a question of the loss, not of the pipeline."""
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
        repeatable = self.random or bool(norms)
        parts = self._run_plain(self.pieces, self.weights, repeatable=True) if repeatable else expected
        whole = self._run_plain([self.batch], [1.0], repeatable=repeatable)
        if norms:
            text = f"BatchNorm normalizes over a microbatch of {min(self.sizes)} samples, not over the whole batch."
            self._found("split", None, text)
        if whole.drew or not (_is_finite(whole) and _is_finite(parts)):
            why = "it draws random numbers" if whole.drew else "there are numbers that are not finite"
            self._found("split", None, f"Whether the microbatches add up to the whole batch cannot be told, as {why}.")
            return
        reference = "plain autograd, whole batch"
        self.whole = self._comparison("microbatches, plain autograd", reference, parts, whole, _OTHER_SUMS)
        if not self.whole.ok:
            self._found("split", None, self._misfit(self.whole, whole, repeatable), serious=True)

    def _misfit(self, comparison: Comparison, whole: _Outcome, repeatable: bool) -> str:
        text = (
            "The microbatches do not add up to the whole batch: by plain autograd their loss is"
            f" {comparison.loss} instead of {comparison.expected_loss}"
        )
        if (worst := comparison.worst) is not None:
            text += f", and the gradient of {worst.parameter!r} is off by {worst.relative:.1e} of its norm"
        if (fitting := self._fitting_option(whole, repeatable)) is not None:
            return f"{text}. With {fitting} they do."
        kept = "; ".join(self._by_layer(self.kept).values())
        state = f", or depends on what the microbatches before have left ({kept})" if kept else ""
        return f"{text}. The loss couples samples, or weighs them in its own way{state}. Use split='model'."

    def _fitting_option(self, whole: _Outcome, repeatable: bool) -> str | None:
        """A weighting with which the microbatches do add up."""
        options: dict[str, mb.LossWeight] = {f"loss_weight={name!r}": name for name in ("samples", "tokens", "sum")}
        for option, weight in {**options, "split='auto', which counts labels,": count_labels}.items():
            try:
                weights = mb.loss_weights(self.pieces, self.sizes, weight)
            except ValueError:  # no labels to count
                continue
            if weights != self.weights:
                parts = self._run_plain(self.pieces, weights, repeatable=repeatable)
                if self._comparison("", "", parts, whole, _OTHER_SUMS).ok:
                    return option
        return None

    # -- findings --------------------------------------------------------------------------------------------------

    def _found(self, kind: Kind, layer: str | None, text: str, *, serious: bool = False) -> None:
        self.findings.append(Finding(kind, layer, text, serious))

    def _note_error(self, error: Exception) -> None:
        notes = [note.removeprefix("roundpipe: ") for note in getattr(error, "__notes__", ())]
        text = " ".join([f"{type(error).__name__}: {error}", *(f"({note})" for note in notes)])
        named = re.search(r"layer '([^']*)'", text)
        kind: Kind = "error"
        if isinstance(error, RecomputeError):
            kind = "recompute"
        elif isinstance(error, mb.UnsplittableBatchError):
            kind = "split"
        self._found(kind, None if named is None else named[1], text, serious=True)

    def _note_layers(self, pipeline: Pipeline) -> None:
        """What the first batch has shown of each layer."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for layer in pipeline.layers:
            traits = layer.traits
            if layer.draws() and self.calls[layer.index]:
                self._found("random", layer.name, "Draws random numbers; the recompute draws the same ones.")
            if traits.changed_inputs:
                text = "Its arguments are changed in place, by itself or later; the recompute gets copies."
                self._found("mutated input", layer.name, text)
            if traits.writes_state:
                text = "Writes tensors, lists or dicts of its own; the recompute does not write them again."
                self._found("side effect", layer.name, text)
            for way in sorted(traits.escapes):
                text = f"A tensor leaves it by {way}; it is taken for a further output."
                self._found("escape", layer.name, text)
            if foreign := [names.get(id(parameter), "one of no module") for parameter in traits.foreign]:
                text = f"Uses parameters of other modules: {_listed(foreign)}."
                self._found("parameters", layer.name, text)
        if pipeline.serial_reason is not None:
            text = f"The microbatches run one after the other, because {pipeline.serial_reason}."
            self._found("serial", None, f"{text} Results are right, but devices do not work at the same time.")

    def _note_side_effects(self, after: ModuleState) -> None:
        self.kept = after.differing(self.before, norms=False)
        for layer, names in self._by_layer(after.differing(self.before)).items():
            self._found("side effect", layer, f"A step changes {names}.")

    def _note_missing(self, expected: _Outcome) -> None:
        if names := [name for name, gradient in expected.gradients.items() if gradient is None]:
            self._found("no gradient", None, f"No gradient comes from this batch to {_listed(names)}.")

    def _by_layer(self, keys: Iterable[tuple[str, str]]) -> dict[str | None, str]:
        """The attributes, named, for each layer that they belong to."""
        found: dict[str | None, list[str]] = {}
        for path, name in keys:
            inside = (layer.name for layer in self.layers if path == layer.name or path.startswith(f"{layer.name}."))
            found.setdefault(next(inside, None), []).append(f"{path}.{name}" if path else name)
        return {layer: _listed(names) for layer, names in found.items()}

    def _layers_of_parameters(self) -> dict[str, str]:
        layer_of = {id(parameter): layer.name for layer in reversed(self.layers) for parameter in layer.parameters}
        return {name: layer_of[id(p)] for name, p in self.module.named_parameters() if id(p) in layer_of}

    # -- the report ------------------------------------------------------------------------------------------------

    def report(self, devices: int, seconds: float) -> Verification:
        errors: dict[str | None, float] = {}
        for gradient in (gradient for comparison in self.comparisons for gradient in comparison.gradients):
            errors[gradient.layer] = max(errors.get(gradient.layer, 0.0), gradient.relative)
        layers = [
            LayerCheck(
                layer.name,
                type(layer.module).__name__,
                sum(parameter.numel() for parameter in layer.parameters),
                self.calls[layer.index],
                errors.get(layer.name),
            )
            for layer in self.layers
        ]
        split, weight = self.strategy.way
        return Verification(
            type(self.module).__name__,
            devices,
            self.strategy.pipeline.last_microbatches if self.strategy.pipeline is not None else len(self.pieces),
            split,
            weight if isinstance(weight, str) else getattr(weight, "__name__", "function"),
            self.comparisons,
            self.whole,
            layers,
            self.findings,
            seconds,
        )


class _Seeds:
    """Seeds microbatches and their layer calls as the pipeline does.

    Args:
        seed: The pipeline's.
        layers: The layers, if any of them draws.
    """

    def __init__(self, seed: int, layers: Sequence[Layer]) -> None:
        self._seed = seed
        self._layers = layers
        self._microbatch = 0
        self._calls = 0
        self._inside = False

    def begin(self, microbatch: int) -> None:
        self._microbatch, self._calls = microbatch, 0
        seed_all(derive_seed(self._seed, 0, microbatch, -1))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every call of a layer is seeded."""
        own = [layer.module.__dict__.get("forward") for layer in self._layers]
        for layer, forward in zip(self._layers, own, strict=True):
            plain = forward or MethodType(type(layer.module).forward, layer.module)
            layer.module.__dict__["forward"] = partial(self._forward, layer, plain)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, own, strict=True):
                if forward is None:
                    del layer.module.__dict__["forward"]
                else:
                    layer.module.__dict__["forward"] = forward

    def _forward(self, layer: Layer, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not layer.has_own_parameters():
            return plain(*args, **kwargs)
        before = RandomState.capture()
        seed_all(derive_seed(self._seed, 0, self._microbatch, self._calls))
        self._calls += 1
        self._inside = True
        try:
            return plain(*args, **kwargs)
        finally:
            self._inside = False
            before.restore()


def _is_finite(outcome: _Outcome) -> bool:
    values = [outcome.loss, *outcome.gradients.values()]
    return all(bool(dense(value).isfinite().all()) for value in values if value is not None)


def _number(loss: Tensor | None) -> float | None:
    return None if loss is None else float(loss)


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
