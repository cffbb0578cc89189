"""Trains a character GPT of about one million parameters on English text that ships with Python.

    python examples/char_gpt.py                          # two minutes, two virtual devices
    python examples/char_gpt.py --seconds 30 --devices 3

The model, the data and the training step are written as for one device. Only the import of `lightning_roundpipe` and
the two arguments `strategy="roundpipe"` and `devices` are there for the pipeline.
"""

import argparse
import csv
import logging
import textwrap
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean

import lightning as L
import rich
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_roundpipe  # noqa: F401  (registers the strategy's name)

CONTEXT = 128
BATCH_SIZE = 12
WARMUP_STEPS = 50


class Windows(Dataset):
    """Pairs of (characters, the same moved on by one), one starting at every `stride`-th character of the text."""

    def __init__(self, text: Tensor, stride: int) -> None:
        self.text, self.stride = text, stride

    def __len__(self) -> int:
        return (len(self.text) - CONTEXT - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.stride : index * self.stride + CONTEXT + 1]
        return window[:-1], window[1:]


class PythonDocs(L.LightningDataModule):
    """The language reference that `help()` prints, as characters; its last tenth is for validation."""

    def __init__(self) -> None:
        super().__init__()
        text = "\n\n".join(topics.values())
        self.characters = sorted(set(text))
        self.encoded = self.encode(text)
        self.train_text, self.val_text = self.encoded.split([9 * len(text) // 10, len(text) - 9 * len(text) // 10])

    def encode(self, text: str) -> Tensor:
        index = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([index[character] for character in text])

    def decode(self, indices: Tensor) -> str:
        return "".join(self.characters[i] for i in indices.tolist())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.train_text, stride=1), BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.val_text, stride=CONTEXT), BATCH_SIZE)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # B, heads, 3, T, d
        query, key, value = heads.unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def sinusoids(length: int, width: int) -> Tensor:
    """Where the learnable position embedding starts: from here, attention finds the characters just before sooner."""
    angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return 0.1 * torch.cat([angle.sin(), angle.cos()], dim=1)


class CharGPT(L.LightningModule):
    def __init__(self, vocabulary: int, width: int = 96, depth: int = 9, heads: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Parameter(sinusoids(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tok.weight, std=0.1)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.tok(characters) + self.pos[: characters.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tok.weight)  # the head shares the embedding's weight

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        characters, targets = batch
        return F.cross_entropy(self(characters).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, characters: Tensor, length: int, temperature: float = 0.7) -> Tensor:
        for _ in range(length):
            logits = self(characters[None, -CONTEXT:])[0, -1] / temperature
            characters = torch.cat([characters, logits.softmax(-1).multinomial(1)])
        return characters


def learning_rate_factor(step: int) -> float:
    """Linear warm-up, then inverse square root decay, which needs no planned end: the run ends by the clock."""
    return min((step + 1) / WARMUP_STEPS, (WARMUP_STEPS / (step + 1)) ** 0.5)


class Progress(L.Callback):
    """Prints a line now and then. (In a hook before the backward: after it, the callback could look at the weights, so
    that the pipeline would wait for the optimizer.)
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = self.printed = time.monotonic()

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        now = time.monotonic()
        if now - self.printed >= self.seconds:
            self.printed = now
            tokens = trainer.global_step * BATCH_SIZE * CONTEXT
            speed = f", {tokens / (now - self.started):,.0f} tokens per second" if tokens else ""
            print(
                f"{now - self.started:5.0f} s: batch {trainer.global_step}, loss {loss.item():.3f}{speed}", flush=True
            )


def logged_train_losses(log_dir: str) -> list[float]:
    with open(Path(log_dir) / "metrics.csv") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=120, help="how long to train (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="number of virtual devices (default: %(default)s)")
    arguments = parser.parse_args()
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
        warnings.filterwarnings("ignore", message)  # the data lies in memory; Lightning's own use of PyTorch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # our lines say it all

    L.seed_everything(0, verbose=False)
    data = PythonDocs()
    model = CharGPT(len(data.characters))
    trainer = L.Trainer(
        strategy="roundpipe",
        accelerator="cpu",
        devices=arguments.devices,
        gradient_clip_val=1.0,
        max_time={"seconds": arguments.seconds},
        callbacks=[Progress(seconds=arguments.seconds / 12)],
        logger=CSVLogger("demo_logs", name="char_gpt"),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
    )

    print(f"text: {len(data.encoded):,} characters, {len(data.characters)} different ones")
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters in {len(model.blocks)} blocks")
    val_loss_before = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    print(f"training for {arguments.seconds} s on {arguments.devices} virtual devices ...", flush=True)
    trainer.fit(model, data)
    report = trainer.strategy.report()
    val_loss_after = trainer.callback_metrics["val_loss"].item()  # the fit ended with a validation

    train_losses = logged_train_losses(trainer.logger.log_dir)
    rich.print(report.table())
    print(f"training loss:   {train_losses[0]:.3f} before, {mean(train_losses[-20:]):.3f} after (last 20 batches)")
    print(f"validation loss: {val_loss_before:.3f} before, {val_loss_after:.3f} after")
    tokens = trainer.global_step * BATCH_SIZE * CONTEXT
    print(f"speed:           {tokens / report.training_seconds:,.0f} tokens per second ({trainer.global_step} batches)")
    print(f"checkpoint:      {Path(trainer.checkpoint_callback.best_model_path).resolve()}")
    print(f"logs:            {(Path(trainer.logger.log_dir) / 'metrics.csv').resolve()}")
    prompt = "The statement "
    text = data.decode(model.eval().generate(data.encode(prompt), length=400))
    print("generated text:", *(textwrap.fill(line, width=80) for line in text.splitlines()), sep="\n")


if __name__ == "__main__":
    main()
