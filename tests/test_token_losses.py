"""Losses averaged over tokens, on padded batches: the whole batch's, however it is split."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import RoundPipeStrategy, assert_alike, assert_close, default_dtype, fit, weights
from models import SGD, HuggingFace, Lit, bert, gpt2, llama
from torch import Tensor, nn

from lightning_roundpipe.splitting import count_labels

WAYS = [(m, devices) for m in (1, 2, 3, 4) for devices in (1, 2, 3)]


def padded(lengths: list[int], seed: int) -> dict[str, Tensor]:
    """Sentences of these lengths; a length of 0 is a sentence without any label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (len(lengths), 9), generator=generator)
    mask = torch.arange(9) < torch.tensor(lengths).clamp(min=2)[:, None]
    counts = torch.arange(9) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~counts, -100)}


BATCHES = [padded([9, 2, 3, 9, 4], 1), padded([2, 9, 5], 2), padded([0, 0, 9, 0, 6, 3, 2, 0], 3)]
"""The last one has microbatches in which no token counts."""


class Logs(HuggingFace):
    """Logs and returns its loss. The model's own is taken in single precision; `exact` is the same in double."""

    exact = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(**batch)
        loss = out.loss
        if self.exact:
            shift = 0 if "Bert" in type(self.net).__name__ else 1
            logits, labels = out.logits[:, : 9 - shift], batch["labels"][:, shift:]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log("loss", loss, batch_size=len(batch["labels"]))
        return {"loss": loss, "guess": out.logits.detach().argmax(-1)}


class Sees(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        loss = trainer.callback_metrics["loss"]
        self.seen.append((outputs["loss"].double(), loss.double(), outputs["guess"]))


def made(kind: Callable[..., Lit], exact: bool = True) -> Lit:
    torch.manual_seed(3)
    with default_dtype(torch.float64):
        model = Logs(kind().net, optimizer=SGD).double()
    model.exact = exact
    return model


def seen_and_weights(
    kind: Callable[..., Lit], strategy: Any, devices: int, batches: list[Any] = BATCHES, exact: bool = True
) -> Any:
    model, sees = made(kind, exact), Sees()
    fit(model, batches, strategy, devices=devices, precision="64-true", callbacks=[sees])
    return sees.seen, weights(model)


def count_masked(batch: dict[str, Tensor]) -> Tensor:
    """BERT predicts every label where it stands."""
    return (batch["labels"] != -100).sum()


@pytest.mark.parametrize(("m", "devices"), WAYS)
@pytest.mark.parametrize(
    ("kind", "loss_weight"), [(gpt2, "tokens"), (llama, "tokens"), (bert, count_masked)], ids=["gpt2", "llama", "bert"]
)
def test_equals_the_whole_batch(kind: Callable[..., Lit], loss_weight: Any, m: int, devices: int) -> None:
    """Loss, logged loss, outputs and weights of plain Lightning on unsplit batches."""
    expected = seen_and_weights(kind, "auto", 1)
    found = seen_and_weights(kind, RoundPipeStrategy(microbatches=m, loss_weight=loss_weight, split="step"), devices)
    assert_alike(found[0], expected[0], 1e-11)
    assert_close(found[1], expected[1], 1e-11)


@pytest.mark.parametrize("kind", [gpt2, llama])
def test_equals_the_whole_batch_with_the_model_s_own_loss(kind: Callable[..., Lit]) -> None:
    """Up to the rounding of single precision."""
    expected = seen_and_weights(kind, "auto", 1, exact=False)
    found = seen_and_weights(
        kind, RoundPipeStrategy(microbatches=3, loss_weight="tokens", split="step"), 2, exact=False
    )
    assert_alike(found, expected, 1e-5)


@pytest.mark.parametrize("kind", [gpt2, llama])
def test_the_weights_matter(kind: Callable[..., Lit]) -> None:
    """By samples, the loss of padded batches is another one."""
    expected = seen_and_weights(kind, "auto", 1, BATCHES[:2])
    found = seen_and_weights(kind, RoundPipeStrategy(microbatches=2, split="step"), 1, BATCHES[:2])
    assert abs(found[0][0][0] - expected[0][0][0]) > 1e-3


class Summed(Lit):
    """The sum of the errors, and logged as such."""

    def __init__(self) -> None:
        super().__init__(optimizer=partial(torch.optim.SGD, lr=0.001))
        self.net = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.net(batch).square().sum()
        self.log("loss", loss)
        return {"loss": loss, "guess": batch.argmax(-1)}


@pytest.mark.parametrize(("m", "devices"), WAYS)
def test_sums(m: int, devices: int) -> None:
    results = []
    for strategy, count in ((RoundPipeStrategy(microbatches=m, loss_weight="sum", split="step"), devices), ("auto", 1)):
        torch.manual_seed(3)
        model, sees = Summed().double(), Sees()
        batches = [torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (5, 8)]
        fit(model, batches, strategy, devices=count, callbacks=[sees])
        results.append((sees.seen, weights(model)))
    assert_alike(*results)


def test_a_batch_in_which_no_token_counts() -> None:
    """The loss is not a number, as on one device."""
    batches = [padded([0, 0, 0, 0], 1)]
    seen, found = seen_and_weights(
        gpt2, RoundPipeStrategy(microbatches=2, loss_weight="tokens", split="step"), 2, batches
    )
    expected_seen, expected = seen_and_weights(gpt2, "auto", 1, batches)
    assert seen[0][0].isnan() and seen[0][1].isnan() and expected_seen[0][0].isnan()
    assert_alike(found, expected)


class Tagger(L.LightningModule):
    """Labels each letter where it stands, and has not learned anything: to it all labels are about as likely."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(29, 16), nn.Linear(16, 29, bias=False)
        for layer in (self.embed, self.head):
            nn.init.normal_(layer.weight, std=0.05)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.embed(batch["input_ids"])).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_labels_that_stand_beside_their_inputs() -> None:
    """A label for each input, as in a causal model, but not shifted: while the model has learned nothing, a count of
    shifted labels gives nearly the same loss."""
    batches = [padded(lengths, seed) for seed, lengths in enumerate([[9, 2, 3, 9, 4, 6], [2, 9, 5, 9, 9, 3]] * 6)]
    for batch in batches:
        batch["input_ids"], batch["labels"] = batch["input_ids"] % 29, batch["labels"].clamp(max=28)
    plain, ours = Tagger(), Tagger()
    fit(plain, batches)
    trainer = fit(ours, batches, RoundPipeStrategy(microbatches=3), devices=2)
    assert trainer.strategy._splitter.decided == ("step", count_labels)
    assert_close(weights(ours), weights(plain), 1e-5)
