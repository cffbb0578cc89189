"""A `split` method of the module or the data module: batches that only their author can cut."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import Batches, RoundPipeStrategy, assert_alike, fit, fit_pipeline, trainer_for, weights
from torch import Tensor, nn

WAYS = [(m, devices) for m in (1, 2, 3, 4) for devices in (1, 2, 3)]


@pytest.fixture(autouse=True)
def in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)


class Packed(L.LightningModule):
    """Sentences packed into one row, as for attention kernels of variable length: dimension 0 is 1, not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.head = nn.Linear(6, 20)
        self.pieces: list[int] = []

    def split(self, batch: dict[str, Tensor], microbatches: int) -> list[dict[str, Tensor]]:
        """Between sentences."""
        bounds = batch["starts"].tolist()
        pieces = []
        for group in torch.arange(len(bounds) - 1).tensor_split(min(microbatches, len(bounds) - 1)):
            start, end = bounds[group[0]], bounds[group[-1] + 1]
            starts = batch["starts"][group[0] : group[-1] + 2] - start
            pieces.append({"ids": batch["ids"][:, start:end], "starts": starts})
        return pieces

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.pieces.append(len(batch["starts"]) - 1)
        x = self.embed(batch["ids"])
        lengths = batch["starts"].diff()
        sentence = torch.arange(len(lengths)).repeat_interleave(lengths)
        for block in self.blocks:
            mean = torch.zeros(len(lengths), 6).index_add(0, sentence, x[0]) / lengths[:, None]
            x = torch.tanh(block(x)) + mean[sentence]
        return F.cross_entropy(self.head(x)[0], batch["ids"][0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def packed_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for lengths in ([3, 5, 2, 4, 6], [7, 1, 3], [4, 4]):
        ids = torch.randint(20, (1, sum(lengths)), generator=generator)
        batches.append({"ids": ids, "starts": torch.tensor([0, *lengths]).cumsum(0)})
    return batches


def count_tokens(batch: dict[str, Tensor]) -> int:
    return batch["ids"].numel()


def made(kind: Callable[[], L.LightningModule]) -> L.LightningModule:
    torch.manual_seed(7)
    return kind()


@pytest.mark.parametrize("split", ["step", "auto"])
@pytest.mark.parametrize(("m", "devices"), WAYS)
def test_packed_sequences(m: int, devices: int, split: str) -> None:
    """Equal to the whole batch, in unequal pieces; fewer sentences than microbatches included."""
    ours, plain = made(Packed), made(Packed)
    fit_pipeline(ours, packed_batches(), m, devices, loss_weight=count_tokens, split=split)
    fit(plain, packed_batches())
    assert_alike(weights(ours), weights(plain))
    assert sorted(ours.pieces, reverse=True) != [5, 3, 2] or m == 1
    assert sum(ours.pieces) == 10


def test_samples_that_cannot_be_counted_are_not_guessed() -> None:
    ours, plain = made(Packed), made(Packed)
    with pytest.raises(ValueError, match=r"do not tell how many samples each has\. .*loss_weight=.* a function of the"):
        fit_pipeline(ours, packed_batches(), 2, split="step")
    assert_alike(weights(ours), weights(plain), 0.0)
    fit_pipeline(ours, packed_batches(), 2, split="auto")  # finds that no weighting fits
    fit(plain, packed_batches())
    assert_alike(weights(ours), weights(plain))


class Documents(Packed):
    """The same batch as one text."""

    split = None  # an attribute of that name and another meaning

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embed(batch["ids"])))[0], batch["ids"][0])


def test_without_it_a_packed_batch_is_one_sample() -> None:
    """Never cut in the middle of a sentence."""
    ours, plain = made(Documents), made(Documents)
    batches = [{"ids": batch["ids"]} for batch in packed_batches()]
    trainer = fit_pipeline(ours, batches, 4, 2)
    fit(plain, batches)
    assert trainer.strategy.report().microbatches == 1
    assert_alike(weights(ours), weights(plain))


class TimeFirst(L.LightningModule):
    """Sequences whose dimension 1 is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5), nn.Linear(5, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(self.rnn(batch)[0][-1]).square().mean()
        self.log("loss", loss, on_step=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batches = [torch.randn(4, n, 3, generator=torch.Generator().manual_seed(n)) for n in (7, 5, 3)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None)

    def split(self, batch: Tensor, microbatches: int, dim: int = 1) -> tuple[Tensor, ...]:
        return batch.tensor_split(min(microbatches, batch.shape[dim]), dim)


@pytest.mark.parametrize(("m", "devices"), WAYS)
def test_of_the_data_module(m: int, devices: int) -> None:
    ours, plain = made(TimeFirst), made(TimeFirst)
    strategy = RoundPipeStrategy(microbatches=m, loss_weight=lambda batch: batch.shape[1])
    trainer_for(strategy, devices=devices).fit(ours, datamodule=Data())
    trainer_for().fit(plain, datamodule=Data())
    assert_alike(weights(ours), weights(plain))


class Rows(TimeFirst):
    """Cuts along dimension 0 by hand, into unequal pieces: samples are counted."""

    def split(self, batch: Tensor, microbatches: int) -> list[Tensor]:
        return [batch[:1], batch[1:]] if microbatches > 1 else [batch]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.transpose(0, 1), batch_idx)


@pytest.mark.parametrize("split", ["step", "auto"])
@pytest.mark.parametrize(("m", "devices"), WAYS)
def test_samples_of_the_pieces_are_counted(m: int, devices: int, split: str) -> None:
    ours, plain = made(Rows), made(Rows)
    batches = [batch.transpose(0, 1) for batch in Data().batches]
    trainer = fit_pipeline(ours, batches, m, devices, split=split)
    fit(plain, batches)
    assert trainer.strategy.report().microbatches == min(m, 2)
    assert_alike(weights(ours), weights(plain))


@pytest.mark.parametrize(
    ("returned", "what"),
    [([], "0 of them"), ([torch.ones(1, 3)] * 5, "5 of them"), (torch.ones(4, 3), "Tensor"), (None, "NoneType")],
    ids=["empty", "too many", "no list", "None"],
)
@pytest.mark.parametrize("split", ["step", "auto"])
def test_what_it_may_return(returned: Any, what: str, split: str) -> None:
    class Wrong(Rows):
        def split(self, batch: Tensor, microbatches: int) -> Any:
            return returned

    with pytest.raises(ValueError, match=rf"Wrong\.split must return a list of 1 to 4 microbatches, .* {what}"):
        fit_pipeline(made(Wrong), [torch.ones(4, 5, 3)], 4, split=split)


class OtherMeaning(TimeFirst):
    """`split` as another method, with other arguments."""

    def split(self, text: str, separator: str) -> list[str]:
        raise AssertionError("not meant for batches")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.transpose(0, 1), batch_idx)


@pytest.mark.parametrize("attribute", [None, "train", nn.Linear(1, 1), int, len], ids=str)
def test_other_attributes_of_that_name(attribute: Any) -> None:
    ours, plain = made(OtherMeaning), made(OtherMeaning)
    if attribute is not None:
        ours.__dict__["split"] = attribute
    fit_pipeline(ours, [torch.ones(4, 5, 3)], 2, 2)
    fit(plain, [torch.ones(4, 5, 3)])
    assert_alike(weights(ours), weights(plain))


@pytest.mark.parametrize("split", ["step", "auto"])
def test_of_the_data_module_that_the_batches_come_from(split: str) -> None:
    """A Trainer that is used again keeps the data module of the fit before, also where it is given other data."""

    class Counted(Data):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def split(self, batch: Tensor, microbatches: int, dim: int = 1) -> tuple[Tensor, ...]:
            self.calls += 1
            return super().split(batch, microbatches, dim)

    class EitherWay(TimeFirst):
        first = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch.transpose(0, 1) if self.first else batch, batch_idx)

    ours, plain = made(EitherWay), made(EitherWay)
    strategy = RoundPipeStrategy(
        microbatches=3, split=split, loss_weight=lambda batch: batch.shape[0 if ours.first else 1]
    )
    trainers = [(ours, trainer_for(strategy, devices=2)), (plain, trainer_for())]
    others = Batches([torch.randn(5, 4, 3), torch.randn(3, 4, 3)])
    for epoch, data in enumerate((Counted(), others, Counted(), Counted())):
        for model, trainer in trainers:
            model.first = data is others
            trainer.fit_loop.max_epochs = epoch + 1
            trainer.fit(model, data)
            if model is ours:
                assert trainer.strategy.report().microbatches == 3 and strategy.way[0] == "step"
                assert data is others or data.calls > 0
        assert_alike(weights(ours), weights(plain))
