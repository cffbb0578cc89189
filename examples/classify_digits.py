"""Classifies scikit-learn's pictures of digits with a convolutional network that has BatchNorm.

    python examples/classify_digits.py --devices 2 --epochs 8

A microbatch is normalized by its own mean and variance, as with gradient accumulation; running statistics are those of
whole batches. So batches should be large enough to be split, the last one of an epoch, too: `drop_last=True`.
Prints, among Lightning's own lines:

    1,437 pictures to train with, 360 to validate with; 49,066 parameters
    accuracy on the validation set: 0.9680
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_roundpipe  # noqa: F401  (registers the strategy's name)


class Digits(L.LightningDataModule):
    """Pictures of 8 x 8 pixels, a fifth of them for validation."""

    def __init__(self, batch_size: int = 60) -> None:
        super().__init__()
        self.batch_size = batch_size
        pixels, labels = load_digits(return_X_y=True)
        pictures = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        data = TensorDataset(pictures, torch.tensor(labels))
        self.train, self.val = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.convolution(x)))


class Classifier(L.LightningModule):
    def __init__(self, width: int = 32, depth: int = 5, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem, self.blocks = nn.Conv2d(1, width, 3, padding=1), nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width * 4, 10)
        self.train_accuracy, self.val_accuracy = MulticlassAccuracy(10), MulticlassAccuracy(10)

    def forward(self, pictures: Tensor) -> Tensor:
        features = self.blocks(self.stem(pictures))
        return self.head(nn.functional.adaptive_avg_pool2d(features, 2).flatten(1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        logits = self(pictures)
        loss = nn.functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("loss", loss)
        self.log("train_accuracy", self.train_accuracy, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        pictures, labels = batch
        self.val_accuracy(self(pictures), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    data, model = Digits(), Classifier()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(data.train):,} pictures to train with, {len(data.val)} to validate with; {parameters:,} parameters")
    trainer = L.Trainer(strategy="roundpipe", accelerator="cpu", devices=options.devices, max_epochs=options.epochs)
    trainer.fit(model, data)
    print(f"accuracy on the validation set: {trainer.callback_metrics['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
