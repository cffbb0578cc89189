"""Staleness 1: every batch computes with parameters that are exactly one optimizer step old, compared with a loop
written out here.
"""

import copy
import time
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Validations,
    Watch,
    assert_alike,
    assert_equal,
    differs,
    fit,
    fit_microbatches,
    fit_pipeline,
    split,
    weights,
)
from models import GPT, MLP, SGD, Lit, batches_of, tokens, vectors
from torch import Tensor, nn

MODELS = {"mlp": (MLP, vectors), "gpt": (GPT, tokens)}


class Own(torch.optim.SGD):
    """Not one of torch's, so it steps all parameters at once."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CountsSlowly(torch.optim.SGD):
    """Counts in its groups, and takes longer than a batch to hand the count over."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["steps"])
        time.sleep(0.02)
        return loss


OPTIMIZERS = {
    "sgd": SGD,
    "own": partial(Own, lr=0.1, momentum=0.9),
    "counts slowly": partial(CountsSlowly, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
}


def make(name: str, **options: Any) -> Lit:
    torch.manual_seed(7)
    return MODELS[name][0](**options).double()


def one_step_behind(
    model: Lit, batches: list[Any], m: int, optimizer: Any, accumulate: int = 1, clip: float | None = None
) -> dict:
    """The reference. `model` holds the newest parameters; `used` those that the gradients are computed with. What is
    frozen has no age: both hold the same.
    """
    frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    used = copy.deepcopy(model, frozen).train()
    stepper = optimizer(model.parameters())
    for index, batch in enumerate(batches):
        for part in split(batch, m):
            loss = used.loss(part)
            used.note("train", part, loss)
            (loss / (m * accumulate)).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(batches):
            before_step = copy.deepcopy(model.state_dict())
            for newest, old in zip(model.parameters(), used.parameters(), strict=True):
                newest.grad, old.grad = old.grad, None
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepper.step()
            used.load_state_dict(before_step)  # so the next batch doesn't see the step just made
    return {"weights": weights(model), "optimizer": copy.deepcopy(stepper.state_dict()["state"]), "losses": used.seen}


def ours(model: Lit, batches: list[Any], m: int, devices: int, **run: Any) -> dict:
    trainer = fit_pipeline(model, batches, m, devices, staleness=1, run=run)
    return {
        "weights": weights(model),
        "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()["state"]),
        "losses": model.seen,
    }


@cache
def of_the_loop(name: str, optimizer: str, m: int) -> dict:
    batches = batches_of(MODELS[name][1], 6, 12)
    reference = one_step_behind(make(name), batches, m, OPTIMIZERS[optimizer])
    plain = make(name, optimizer=OPTIMIZERS[optimizer])
    fit_microbatches(plain, batches, m)
    assert len(reference["losses"]) == 6 * m and differs(reference["weights"], weights(plain)), "staleness must matter"
    return reference


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 5)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop(name: str, optimizer: str, m: int, devices: int) -> None:
    model = make(name, optimizer=OPTIMIZERS[optimizer])
    assert_equal(ours(model, batches_of(MODELS[name][1], 6, 12), m, devices), of_the_loop(name, optimizer, m))


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    "run",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ],
    ids=str,
)
def test_accumulation_and_clipping(run: dict, devices: int) -> None:
    """One step behind, not one batch: all batches of an accumulation use the same parameters. Seven batches: the last
    window is short.
    """
    batches = batches_of(tokens, 7, 12)
    reference = one_step_behind(
        make("gpt"), batches, 2, SGD, run.get("accumulate_grad_batches", 1), run.get("gradient_clip_val")
    )
    # 1/2 * 1/3 is 1/6 up to rounding only
    check = assert_equal if run.get("accumulate_grad_batches") != 3 else assert_alike
    check(ours(make("gpt"), batches, 2, devices, **run), reference)


def test_several_epochs_with_validation_between() -> None:
    """An epoch's end changes nothing: the next batch is still one step behind. The validation is not."""
    batches, val_batches = batches_of(vectors, 3, 8), batches_of(vectors, 2, 8, seed=2)
    model = make("mlp")
    callback = Validations()
    made = ours(
        model, batches, 2, 2, max_epochs=3, val_batches=val_batches, num_sanity_val_steps=1, callbacks=[callback]
    )
    expected = one_step_behind(make("mlp"), batches * 3, 2, SGD)
    assert_equal(made["weights"], expected["weights"])
    assert_equal(made["optimizer"], expected["optimizer"])

    validations = []
    for epochs in (0, 1, 2, 3):
        newest = make("mlp")
        one_step_behind(newest, batches * epochs, 2, SGD)
        newest.eval()
        chosen = val_batches if epochs else val_batches[:1]
        losses = torch.stack([newest.loss(batch) for batch in chosen]).detach()
        validations.append({"val_loss": float(losses.mean())})
    assert_alike(callback.metrics, validations[1:] if len(callback.metrics) == 3 else validations)


def test_scheduler() -> None:
    """The rates of steps 0, 1, 2, ... are those of plain Lightning: the step of batch t uses the rate that was set when
    it was asked for.
    """

    def halve(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}

    class Halving(torch.optim.SGD):
        """The same rule within the reference loop."""

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.5

    batches = batches_of(vectors, 6, 8)
    model, watch = make("mlp", scheduler=halve), Watch()
    made = ours(model, batches, 2, 2, callbacks=[watch])
    expected = one_step_behind(make("mlp"), batches, 2, partial(Halving, lr=0.1, momentum=0.9, weight_decay=0.01))
    assert_equal(made["weights"], expected["weights"])
    assert_alike(watch.rates, [[0.1 * 0.5 ** (step + 1)] for step in range(6)])


def test_twenty_runs_are_identical() -> None:
    batches = batches_of(vectors, 5, 12)
    expected = one_step_behind(make("mlp"), batches, 3, SGD)
    for _ in range(20):
        assert_equal(ours(make("mlp"), batches, 3, 3), expected)


class Square(Lit):
    def __init__(self) -> None:
        super().__init__(optimizer=partial(torch.optim.SGD, lr=0.5))
        self.net = nn.Sequential(nn.Linear(1, 1, bias=False))
        nn.init.ones_(self.net[0].weight)

    def loss(self, batch: Any) -> Tensor:
        return 0.5 * self.net(batch["x"]).pow(2).mean()


@pytest.mark.parametrize(
    ("options", "losses", "weight"),
    [
        ({"background_step": False}, [0.5, 0.125, 0.03125], 0.125),
        ({}, [0.5, 0.125, 0.03125], 0.125),
        ({"staleness": 1}, [0.5, 0.5, 0.125], -0.25),
    ],
    ids=["in line", "background", "stale"],
)
def test_by_hand(options: dict, losses: list[float], weight: float) -> None:
    """w -> w - w/2, with w or its predecessor: numbers to be checked in one's head. No step is left pending."""
    model, watch = Square(), Watch()
    fit_pipeline(model, [{"x": torch.ones(2, 1)}] * 3, 2, devices=2, run={"callbacks": [watch]}, **options)
    assert [float(loss) for loss in watch.losses] == losses
    assert float(model.net[0].weight.detach()) == weight


def test_the_loop_without_delay_is_plain_lightning() -> None:
    """The reference's own check: for one batch, and in its split, losses and steps, it agrees with plain Lightning."""
    batches = batches_of(vectors, 1, 8)
    expected = one_step_behind(make("mlp"), batches, 1, SGD)
    plain = make("mlp")
    fit(plain, batches)
    assert_equal(expected["weights"], weights(plain))
    assert_equal(expected["losses"], plain.seen)


# --- all that the step reads is one step behind, however it reads it


class Reads(Lit):
    """Blocks, and a weight that is used between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, 6))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def target(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        hidden = self.net(x) * self.scale
        return F.mse_loss(self.head(hidden - self.target(x)), batch["y"])


class LayersWithoutGradients(Reads):
    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return self.net(x)


class ParametersWithoutGradients(Reads):
    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale, self.net[1][0].weight, self.net[0][0].bias)


class Data(Reads):
    def target(self, x: Tensor) -> Tensor:
        return x * self.scale.data + self.net[2][0].weight.data.norm() + self.net[0][0].bias.detach()


class Copies(Reads):
    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return copy.deepcopy(self.net)(x) * copy.deepcopy(self.scale)


class Numbers(Reads):
    def target(self, x: Tensor) -> Tensor:
        return x * float(self.scale.detach().numpy().sum()) + self.head.bias.tolist()[0]


class Followed(Reads):
    """A teacher follows the student that the step computes with, and is used at once."""

    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        raise NotImplementedError

    def target(self, x: Tensor) -> Tensor:
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            self.follow(teacher, student)
        return self.teacher(x)


class FollowedInPlace(Followed):
    @torch.no_grad()
    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.mul_(0.5).add_(student, alpha=0.5)


class FollowedByData(Followed):
    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


class FollowedByNewData(Followed):
    def follow(self, teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.data = teacher.data * 0.5 + student.data * 0.5


class FollowedForEach(Followed):
    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.net.parameters()), 0.5)
        return self.teacher(x)


READS = [
    LayersWithoutGradients, ParametersWithoutGradients, Data, Copies, Numbers, FollowedInPlace, FollowedByData,
    FollowedByNewData, FollowedForEach,
]  # fmt: skip


@pytest.mark.parametrize(("m", "devices"), [(1, 1), (1, 2), (2, 2), (4, 3)])
@pytest.mark.parametrize("kind", READS)
def test_every_read_is_one_step_behind(kind: type[Reads], m: int, devices: int) -> None:
    def build() -> Reads:
        torch.manual_seed(7)
        return kind().double()

    batches = batches_of(vectors, 6, 12)
    reference = one_step_behind(build(), batches, m, SGD)
    plain = build()
    fit_pipeline(plain, batches, m, devices)
    assert differs(reference["weights"], weights(plain)), "staleness must matter"
    assert_alike(ours(build(), batches, m, devices), reference, 1e-13)


class ClampsInTheStep(Reads):
    def clamp(self) -> None:
        raise NotImplementedError

    def target(self, x: Tensor) -> Tensor:
        self.clamp()
        return torch.zeros_like(x)


class Clamps(ClampsInTheStep):
    @torch.no_grad()
    def clamp(self) -> None:
        self.scale.clamp_(0.95, 1.05)


class ClampsData(ClampsInTheStep):
    def clamp(self) -> None:
        self.net[1][0].weight.data.clamp_(-0.1, 0.1)


class ClampsByNewData(ClampsInTheStep):
    def clamp(self) -> None:
        self.net[1][0].weight.data = self.net[1][0].weight.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", [Clamps, ClampsData, ClampsByNewData])
def test_a_step_that_changes_trained_parameters_is_refused(kind: type[Reads], m: int) -> None:
    with pytest.raises(RuntimeError, match=r"The step changes the parameter .* itself.*two values.*staleness 0"):
        ours(kind().double(), batches_of(vectors, 3, 12), m, 2)


class ReadsInBackward(MLP):
    """A penalty on the newest parameters, after the batch's own backward."""

    def __init__(self) -> None:
        super().__init__(optimizer=partial(CountsSlowly, lr=0.1))

    def penalty(self) -> Tensor:
        return 0.01 * sum(parameter.square().sum() for parameter in self.parameters())

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.penalty().backward()


@pytest.mark.parametrize("background_step", [True, False])
@pytest.mark.parametrize(("m", "devices"), [(1, 1), (2, 2), (3, 2)])
def test_a_backward_that_reads_parameters(m: int, devices: int, background_step: bool) -> None:
    """The step before is made by then, and the next one is not pending yet."""
    batches = batches_of(vectors, 5, 12)
    model, expected = (copy.deepcopy(ReadsInBackward().double()) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    fit_pipeline(model, batches, m, devices, staleness=1, background_step=background_step)

    used, stepper = copy.deepcopy(expected).train(), CountsSlowly(expected.parameters(), lr=0.1)
    for batch in batches:
        for part in split(batch, m):
            (used.loss(part) / m).backward()
        of_penalty = torch.autograd.grad(expected.penalty(), list(expected.parameters()))
        before_step = copy.deepcopy(expected.state_dict())
        for newest, old, more in zip(expected.parameters(), used.parameters(), of_penalty, strict=True):
            newest.grad, old.grad = old.grad + more, None
        stepper.step()
        used.load_state_dict(before_step)
    assert_alike(weights(model), weights(expected), 1e-13)


def test_unfreezing() -> None:
    """From the batch on in which it is unfrozen, a parameter is one step behind, too."""

    class Unfreezes(LayersWithoutGradients):
        def on_train_epoch_start(self) -> None:
            self.net[1].requires_grad_(self.current_epoch > 0)

    batches = batches_of(vectors, 3, 12)
    model, expected = (copy.deepcopy(Unfreezes().double()) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    made = ours(model, batches, 2, 2, max_epochs=3)

    used, stepper = copy.deepcopy(expected).train(), SGD(expected.parameters())
    for number, batch in enumerate(batches * 3):
        for part in split(batch, 2):
            (used.loss(part) / 2).backward()
        before_step = copy.deepcopy(expected.state_dict())
        for (name, newest), old in zip(expected.named_parameters(), used.parameters(), strict=True):
            newest.grad, old.grad = None if number < 3 and name.startswith("net.1") else old.grad, None
        stepper.step()
        used.load_state_dict(before_step)
    assert_alike(made["weights"], weights(expected), 1e-13)
