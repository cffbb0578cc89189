"""Random steps on random devices equal plain autograd: losses, gradients, parameters, and what the layers leave behind.

`tests/random_models.py` says what a step may do. More than three hundred examples run with every test run, always the
same ones. For more, and others each time::

    ROUNDPIPE_EXAMPLES=5000 pytest tests/test_properties.py --timeout 0
"""

import copy
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_close, fit_pipeline, weights
from hypothesis import HealthCheck, Phase, currently_in_test_context, event, given, reject, settings
from hypothesis import strategies as st
from random_models import (
    PARTS,
    WIDTH,
    Borrows,
    Call,
    Counts,
    Glue,
    Holds,
    Hooked,
    If,
    Layer,
    Moving,
    Plain,
    Program,
    RandomModel,
    Reorder,
    Residual,
    Routes,
    TakesRecord,
    Test,
    Waits,
    programs,
)
from torch import Tensor, nn

from lightning_roundpipe.devices import CpuDevice
from lightning_roundpipe.microbatch import split_sizes
from lightning_roundpipe.pipeline import turnstile
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.schedules import NAMES, ScheduleName, Scheduler
from lightning_roundpipe.state.optimizer import OptimizerWorker, StepJob

TOLERANCE = 1e-9
"""Of the largest value of a tensor. Sums of a few hundred terms in another order differ by 1e-14 of their largest; some
optimizer steps and a loss of precision where terms cancel take that to 1e-11. A term that is missing, doubled or
stale is of the order of one.
"""

MANY = int(os.environ.get("ROUNDPIPE_EXAMPLES", 0))
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-2),  # a smaller eps makes steps out of rounding errors
}


def examples(count: int, share: float) -> Callable[..., Any]:
    """How many examples a test runs: `count`, or its share of what the environment asks for."""
    return settings(
        max_examples=round(MANY * share) if MANY else count,
        derandomize=not MANY,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Way:
    """How a program is trained."""

    devices: int
    sizes: tuple[tuple[int, ...], ...]
    """For each batch the samples of each microbatch."""
    seed: int
    optimizer: str = "sgd"
    accumulate: int = 1
    staleness: int = 0
    background: bool = True
    deferred: bool = False
    fine: bool = False
    """Whether the innermost modules are the layers, and the forward of what holds them is code between layers."""
    thaws: tuple[int, int] | None = None
    """Before which batch the parameters of which layer change between frozen and not."""
    schedule: ScheduleName = "roundpipe"
    lanes: bool = False
    """Whether each device is a lane of its own."""


def batches_of(way: Way) -> list[list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(way.seed)

    def piece(size: int) -> dict[str, Any]:
        return {
            "x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64),
            "y": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64),
            "key": torch.randint(6, (size,), generator=generator),
            "name": [f"sample {i}" for i in range(size)],
        }

    return [[piece(size) for size in sizes] for sizes in way.sizes]


@dataclass
class Result:
    losses: list[list[Tensor | None]]
    gradients: list[dict[str, Tensor | None]]
    weights: dict[str, Tensor]


REFUSED = (
    "microbatches (come|call) .* in another order than one after the other, which they did not in the first batch",
    "it cannot be the value one step behind",
    "so (its|that parameter's) optimizer step was not waited for",
)
"""What only later batches show can come too late to be right. Then it must be said."""


class NoGradient(Exception):
    """A microbatch's loss has no gradient at all, which plain autograd refuses, too."""


def loss_weights(pieces: list[dict[str, Any]]) -> list[float]:
    total = sum(len(piece["x"]) for piece in pieces)
    return [len(piece["x"]) / total for piece in pieces]


def thaw(model: RandomModel, way: Way, number: int) -> None:
    if way.thaws is not None and way.thaws[0] == number:
        for parameter in model.parts[way.thaws[1] % len(model.parts)].parameters():
            parameter.requires_grad_(not parameter.requires_grad)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def counters(model: RandomModel) -> dict[str, Tensor]:
    parts = {f"parts.{i}.calls": part.calls for i, part in enumerate(model.parts) if hasattr(part, "calls")}
    return {name: torch.tensor(value) for name, value in (parts | {"count": model.count}).items()}


def plainly(model: RandomModel, way: Way) -> Result:
    """The reference. With staleness, `used` holds the parameters that the gradients are computed with."""
    used = copy.deepcopy(model) if way.staleness else model
    optimizer = OPTIMIZERS[way.optimizer](model.parameters())
    result = Result([], [], {})
    for number, pieces in enumerate(batches_of(way)):
        thaw(model, way, number)
        if used is not model:
            thaw(used, way, number)
        losses: list[Tensor | None] = []
        for piece, weight in zip(pieces, loss_weights(pieces), strict=True):
            loss = used.loss(piece)
            if loss is not None:
                if not loss.requires_grad:
                    raise NoGradient
                (loss * (weight / way.accumulate)).backward()
            losses.append(None if loss is None else loss.detach())
        result.losses.append(losses)
        if (number + 1) % way.accumulate == 0:
            before_step = [parameter.detach().clone() for parameter in model.parameters()]
            for newest, old in zip(model.parameters(), used.parameters(), strict=True):
                if newest is not old:
                    newest.grad, old.grad = old.grad, None
            result.gradients.append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
            if used is not model:
                with torch.no_grad():
                    for old, value in zip(used.parameters(), before_step, strict=True):
                        old.copy_(value)
    buffers = {name: buffer.clone() for name, buffer in used.named_buffers()}
    result.weights = weights(model) | buffers | counters(used)
    return result


def pipelined(model: RandomModel, way: Way) -> Result:
    """The same with the pipeline, as the strategy uses it."""
    optimizer = OPTIMIZERS[way.optimizer](model.parameters())
    layers = (lambda module: not any(module.children())) if way.fine else None
    devices = [CpuDevice(index, 1) for index in range(way.devices)]
    scheduler = Scheduler(way.schedule, way.devices, way.devices if way.schedule == "roundpipe" and way.lanes else 1)
    pipeline = Pipeline(model, devices, layers=layers, staleness=way.staleness, scheduler=scheduler)
    worker = OptimizerWorker(pipeline.store, pipeline.gradients, pipeline.monitor, pipeline.unit_order(), 1)
    names = [name for name, _ in model.named_parameters()]
    result = Result([], [], {})

    def note(snapshot: torch.optim.Optimizer) -> bool:
        found = snapshot.param_groups[0]["params"]
        result.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in zip(names, found, strict=True)}
        )
        return True

    def step_in_line() -> None:
        pipeline.wait_backward()
        for parameter in model.parameters():
            parameter.grad = pipeline.gradients.get(parameter)
        result.gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
        pipeline.store.enqueued += 1
        for unit in pipeline.store.units:
            pipeline.gradients.hand_over(unit)
            pipeline.store.publish(unit)
        worker.skip_to(pipeline.store.enqueued)

    scale = 1 / way.accumulate
    try:
        for number, pieces in enumerate(batches_of(way)):
            if way.thaws is not None and way.thaws[0] == number:
                pipeline.wait_backward()  # as the strategy does where a hook may do such things
                pipeline.until(worker.wait_idle)
                thaw(model, way, number)
            batch = pipeline.start_batch(
                [partial(model.loss, piece) for piece in pieces],
                loss_weights(pieces),
                lambda: scale,
                deferred=way.deferred,
                values_changed=not way.background,
            )
            result.losses.append(batch.losses)
            if way.deferred:
                batch.release(scale)
                if batch.records or pipeline.draws_on_the_host():
                    pipeline.wait_backward()
            if (number + 1) % way.accumulate == 0:
                if way.background:
                    worker.order = pipeline.unit_order()
                    worker.submit(StepJob(optimizer, batch.gradients, note, None))
                else:
                    step_in_line()
        pipeline.wait_backward()
        pipeline.until(worker.wait_idle)
    finally:
        pipeline.close()
        worker.close()
    result.weights = weights(model) | counters(model)
    return result


def assert_same_tensors(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Also which parameters have no gradient at all: an optimizer leaves those alone, but not those with zeros."""
    assert {k for k, v in actual.items() if v is None} == {k for k, v in expected.items() if v is None}
    present = {name: value.double() for name, value in expected.items() if value is not None}
    assert_close({name: actual[name] for name in present}, present, TOLERANCE)


def assert_same_losses(actual: list[list[Tensor | None]], expected: list[list[Tensor | None]]) -> None:
    assert_same_tensors(
        {f"loss {i}, {j}": loss for i, losses in enumerate(actual) for j, loss in enumerate(losses)},
        {f"loss {i}, {j}": loss for i, losses in enumerate(expected) for j, loss in enumerate(losses)},
    )


def through_trainer(model: RandomModel, way: Way) -> Result:
    """The same with Lightning's Trainer, which is given whole batches. It shows neither gradients nor all losses."""
    if way.deferred:
        model.__class__ = Waits
    model.make_optimizer = OPTIMIZERS[way.optimizer]
    batches = []
    for pieces in batches_of(way):
        batch = {name: torch.cat([piece[name] for piece in pieces]) for name in ("x", "y", "key")}
        batches.append(batch | {"name": [name for piece in pieces for name in piece["name"]]})
    fit_pipeline(
        model,
        batches,
        len(way.sizes[0]),
        way.devices,
        staleness=way.staleness,
        background_step=way.background,
        run={"accumulate_grad_batches": way.accumulate},
    )
    return Result([], [], weights(model) | counters(model))


def compare(
    program: Program, way: Way, train: Callable[[RandomModel, Way], Result] = pipelined, refuses: bool = True
) -> None:
    """Trains in both ways. The pipeline may refuse, if it ``refuses``, what it can be right about no more."""
    torch.manual_seed(way.seed)
    model = RandomModel(program)
    reference = copy.deepcopy(model)
    try:
        expected = plainly(reference, way)
    except NoGradient:
        reject()
    if not all(value.isfinite().all() for value in expected.weights.values()):
        reject()
    try:
        actual = train(model, way)
    except RuntimeError as error:
        if refuses and any(re.search(text, str(error)) for text in REFUSED):
            if currently_in_test_context():
                event("refused")
            return
        raise
    if train is pipelined:
        assert_same_losses(actual.losses, expected.losses)
        for made, right in zip(actual.gradients, expected.gradients, strict=True):
            assert_same_tensors(made, right)
    assert_same_tensors(actual.weights, expected.weights)


# --- ways


def sizes(batches: int, most: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Uneven microbatches, and sometimes fewer of them."""
    one = st.integers(1, most).flatmap(lambda m: st.tuples(*[st.integers(1, 3)] * m))
    return st.integers(3, batches).flatmap(lambda count: st.tuples(*[one] * count))


def ways(**fixed: Any) -> st.SearchStrategy[Way]:
    drawn = {
        "devices": st.integers(1, 4),
        "sizes": sizes(4, 6),
        "seed": st.integers(0, 1000),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "accumulate": st.integers(1, 2),
        "background": st.booleans(),
        "schedule": st.sampled_from(("roundpipe", *NAMES)),  # one of them twice
        "lanes": st.booleans(),
    }
    return st.builds(Way, **(drawn | fixed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(programs(), ways())
@examples(100, 0.4)
def test_equals_plain_autograd(program: Program, way: Way) -> None:
    compare(program, way)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(programs(), ways(deferred=st.booleans(), thaws=st.tuples(st.integers(1, 3), st.integers(0, 5))))
@examples(50, 0.2)
def test_deferred_backward_and_layers_frozen_later(program: Program, way: Way) -> None:
    compare(program, way)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(programs(), ways(fine=st.just(True)))
@examples(60, 0.2)
def test_fine_layers(program: Program, way: Way) -> None:
    compare(program, way)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(programs([part for part in PARTS if part is not Borrows]), ways(staleness=st.just(1)))
@examples(60, 0.2)
def test_one_step_behind(program: Program, way: Way) -> None:
    compare(program, way)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(programs(), ways(), st.integers(0, 1000))
@examples(30, 0.1)
def test_with_delays(program: Program, way: Way, seed: int) -> None:
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turnstile, "handover_hook", lambda: time.sleep(chance.choice([0, 0, 0, 0.001])))
        compare(program, way)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(
    programs().filter(lambda program: not program.skips),
    st.tuples(st.integers(1, 4), st.integers(1, 8)).flatmap(
        lambda numbers: ways(sizes=st.just((tuple(split_sizes(max(numbers), numbers[0])),) * 4), deferred=st.booleans())
    ),
)
@examples(20, 0.02)
def test_through_the_trainer(program: Program, way: Way) -> None:
    compare(program, way, through_trainer)


# --- what random programs have found, each in its smallest form

ONE, TWO, THREE = ((1,),) * 4, ((1, 1),) * 4, ((1, 1, 1),) * 4
FOUND: dict[str, tuple[Program, Way]] = {
    "a hook leaves a tensor with a graph on its layer": (
        Program((Layer(Hooked),), (Call(0, 0, 0),)),
        Way(1, ONE, 0),
    ),
    "a layer does not read what its earlier call left on it": (
        Program((Layer(Hooked),), (Glue("function", 0, 0), Call(0, 1, 0), Call(0, 0, 0))),
        Way(2, TWO, 0, background=False),
    ),
    "the first batch is one microbatch": (
        Program((Layer(Counts),), (Call(0, 0, 0), Call(0, 1, 0))),
        Way(2, ((1,), (1, 1, 1), (1, 1, 1)), 0),
    ),
    "a layer that writes its state is not called in the first batch": (
        Program((Layer(Plain), Layer(Moving)), (If(Test("data", 0), (Call(1, 0, 0),), ()), Call(0, 1, 0))),
        Way(2, ONE, 0),
    ),
    "a custom function takes a parameter, not in the first batch": (
        Program((Layer(Plain),), (Call(0, 0, 0), If(Test("data", 0), (Glue("function", 1, 1),), ()))),
        Way(2, ONE, 0, background=False),
    ),
    "a layer uses a parameter of another, not in the first batch": (
        Program((Layer(Plain), Layer(Borrows)), (Call(0, 0, 0), If(Test("data", 0), (Call(1, 1, 0),), ()))),
        Way(2, ONE, 0, background=False),
    ),
    "a frozen layer uses a parameter of another": (
        Program((Layer(Plain), Layer(Borrows, "all")), (Call(1, 0, 0),)),
        Way(2, TWO, 0),
    ),
    "a parameter that another layer uses is frozen later": (
        Program((Layer(Plain), Layer(Borrows)), (Call(1, 0, 0),)),
        Way(2, TWO, 0, thaws=(1, 0)),
    ),
    "a layer counts in a number": (
        Program((Layer(Plain), Layer(Counts)), (Call(0, 0, 0), Call(1, 1, 0))),
        Way(2, THREE, 0),
    ),
    "a layer keeps a state and is called at several places": (
        Program(
            (Layer(Plain), Layer(Moving)),
            (Reorder(Test("data", 0), (Call(0, 0, 0), Call(1, 0, 0))), Glue("add", 1, 2)),
        ),
        Way(2, ((1, 1, 1, 1),) * 4, 0),
    ),
    "the step counts in a buffer at two places": (
        Program((Layer(Plain),), (Glue("sum", 0, 0), Call(0, 1, 0), Glue("sum", 2, 0))),
        Way(2, THREE, 0),
    ),
    "a checkpoint around a layer and code": (
        Program((Layer(Residual),), (Call(0, 0, 0, "checkpoint"),)),
        Way(2, THREE, 0, fine=True),
    ),
    "a checkpoint around a layer and code, and a backward that waits": (
        Program((Layer(Residual),), (Call(0, 0, 0, "checkpoint"),)),
        Way(2, THREE, 0, fine=True, deferred=True),
    ),
    "gradients are disabled between layers, one step behind": (
        Program((Layer(Plain), Layer(Holds)), (Call(1, 0, 0), Call(1, 1, 0, "no_grad"), Glue("add", 1, 2))),
        Way(2, TWO, 0, staleness=1),
    ),
    "gradients are disabled, and a layer returns its argument": (
        Program((Layer(Plain), Layer(TakesRecord)), (Call(0, 0, 0), Call(1, 1, 0, "no_grad"), Glue("add", 1, 2))),
        Way(2, TWO, 0),
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, seed: int) -> None:
    program, way = FOUND[name]
    compare(program, replace(way, seed=seed), refuses=False)


LATE: dict[str, tuple[Program, Way]] = {
    "microbatches count in another order, not in the first batch": (
        Program((Layer(Routes),), (Call(0, 0, 0), Glue("count", 0, 0), Call(0, 0, 0))),
        Way(2, ((1,), (1, 1), (1, 2, 1)), 0, fine=True),
    ),
    "microbatches come to a count, or not": (
        Program(
            (Layer(Residual),),
            (Call(0, 0, 0), Call(0, 0, 0), If(Test("data", 0), (), (Glue("count", 0, 0),)), Call(0, 0, 0)),
        ),
        Way(2, ((1,), (1,) * 5, (1,) * 5), 0),
    ),
    "microbatches call a layer with a state in another order, not in the first batch": (
        Program(
            (Layer(Plain), Layer(Moving)),
            (If(Test("data", 0), (Call(0, 0, 0), Call(1, 0, 0)), (Call(1, 0, 0), Call(0, 0, 0))),),
        ),
        Way(2, ((1,), (1, 1), (1,) * 4, (1,) * 4), 0),
    ),
}
"""What may be right or be refused, as timing has it."""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", LATE)
def test_found_late(name: str, seed: int) -> None:
    program, way = LATE[name]
    compare(program, replace(way, seed=seed))
