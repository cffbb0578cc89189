"""The LightningModules that the tests train, written as people write them: none knows of the pipeline."""

from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class Notes(dict[tuple[int, str, float], Tensor]):
    """Of no order. For that of a plain dict the pipeline would run microbatches serially whose calls differ."""


class Lit(L.LightningModule):
    """A loss over a batch (a dict of tensors), and any optimizer; notes the loss of every microbatch it is given.

    The notes are kept by epoch and by a fingerprint of the data, so they don't depend on the order of the microbatches.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] = SGD,
        scheduler: Callable[..., Any] | None = None,
        groups: Callable[[nn.Module], Iterable[Any]] | None = None,
    ) -> None:
        super().__init__()
        self.make_optimizer, self.make_scheduler, self.make_groups = optimizer, scheduler, groups
        self.seen = Notes()

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def note(self, name: str, batch: dict[str, Tensor], value: Tensor) -> None:
        first = next(iter(batch.values())).double().flatten()
        fingerprint = float(first @ torch.arange(1, len(first) + 1, dtype=torch.float64).sin())
        self.seen[self.current_epoch, name, fingerprint] = value.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.note("train", batch, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=len(next(iter(batch.values()))))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=len(next(iter(batch.values()))))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.make_groups(self) if self.make_groups else self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


def batches_of(
    make: Callable[[int], dict[str, Tensor]], count: int, size: int, dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[dict[str, Tensor]]:
    """`count` batches of `size` samples from their own seed, with floating point data in `dtype`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = [make(size) for _ in range(count)]
    return [{name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()} for batch in made]


def vectors(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 6), "y": torch.randn(n, 3)}


def images(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 8, 8), "y": torch.randn(n, 1, 8, 8)}


def pictures(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 8, 8), "y": torch.randint(5, (n,))}


def sequences(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 7, 6), "y": torch.randn(n, 3)}


def tokens(n: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(1, 40, (n, 9))}


# --- fully connected


class MLP(Lit):
    """Blocks in a Sequential, one of them without parameters, and dropout inside a layer and between layers when asked
    for.
    """

    def __init__(self, width: int = 8, depth: int = 3, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), *blocks, nn.Linear(width, 3))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(x, self.dropout, self.training))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])


class Frozen(Lit):
    """A frozen first layer, a trained adapter, a half frozen layer, and a trained layer under a frozen one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first = nn.Linear(6, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.blocks[1].weight.requires_grad_(False)
        self.blocks[3].requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])


class Distilled(Lit):
    """A student that learns from a teacher under no_grad; the teacher's first block is the student's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.teacher = nn.Sequential(self.student[0], nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch["x"])
        out = self.student(batch["x"])
        return F.mse_loss(out, target) + F.mse_loss(out, batch["y"])


class Unused(Lit):
    """A block that is never called and a parameter that is never used: they have no gradient, and weight decay spares
    them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.spare = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 3)

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in (self.blocks[0], self.blocks[1], self.blocks[3]):
            x = torch.tanh(block(x))
        return F.mse_loss(self.head(x), batch["y"])


class Siamese(Lit):
    """One encoder, called three times in a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(self, batch: Any) -> Tensor:
        anchor, positive, negative = (self.encoder(x) for x in batch["x"].unbind(1))
        return F.triplet_margin_loss(anchor, positive, negative, margin=5.0)


class VAE(Lit):
    """Draws its noise in training_step, between two layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))

    def loss(self, batch: Any) -> Tensor:
        mean, log_variance = self.encoder(batch["x"]).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return F.mse_loss(self.decoder(z), batch["x"]) + 0.1 * divergence


@dataclass
class Parts:
    main: Tensor
    side: Tensor
    note: str = "a field that is no tensor"


Pair = namedtuple("Pair", "left right")


class DictLayer(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = super().forward(x)
        return {"h": h.tanh(), "nothing": None, "nested": [h.sigmoid(), 3]}


class DataclassLayer(nn.Linear):
    def forward(self, found: dict[str, Any], *, scale: float) -> Parts:  # type: ignore[override]
        h = super().forward(found["h"] * scale + found["nested"][0] * found["nested"][1])
        return Parts(h.tanh(), h.relu())


class TupleLayer(nn.Linear):
    def forward(self, parts: Parts) -> tuple[Pair, int]:  # type: ignore[override]
        return Pair(super().forward(parts.main), parts.side), len(parts.note)


class Structured(Lit):
    """Layers that take and return a dict, a dataclass, and a tuple with a named tuple in it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = nn.ModuleList([DictLayer(6, 8), DataclassLayer(8, 8), TupleLayer(8, 8)])
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        to_dict, to_parts, to_tuple = self.blocks
        found = to_dict(batch["x"])
        assert found["nothing"] is None
        parts = to_parts(found, scale=0.5)
        assert isinstance(parts, Parts)
        pair, length = to_tuple(parts)
        assert isinstance(pair, Pair) and length == len(parts.note)
        return F.mse_loss(self.head(pair.left * pair.right), batch["y"])


class Single(Lit):
    """Nothing to split: one linear layer, and a parameter of the LightningModule itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layer = nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])


class Bare(Lit):
    """No layer at all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weight = nn.Parameter(torch.randn(6, 3))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(batch["x"] @ self.weight, batch["y"])


# --- images


class CNN(Lit):
    """Convolutions with BatchNorm, in repeated blocks and, twice in a step, in one shared module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
        )
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x))).mean((2, 3)))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])


class UNet(Lit):
    """Each level of the way down is used again on the way up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)])
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            x = F.silu(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.silu(conv(torch.cat([x, skips.pop()], dim=1)))
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])


# --- sequences


class Recurrent(Lit):
    """Two recurrent layers (LSTM or GRU) that hand on their hidden state."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__(**options)
        self.encoder = kind(6, 8, batch_first=True)
        self.decoder = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def loss(self, batch: Any) -> Tensor:
        out, state = self.encoder(batch["x"])
        hidden = state[0] if isinstance(state, tuple) else state
        start = hidden.expand(4, -1, -1).contiguous()
        out, _ = self.decoder(out, (start, torch.zeros_like(start)) if isinstance(state, tuple) else start)
        return F.mse_loss(self.head(out[:, -1]), batch["y"])


class Encoder(Lit):
    """torch's own nn.TransformerEncoder, batch first, with a padding mask and its fast path left on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embed = nn.Embedding(40, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(8, 40)

    def loss(self, batch: Any) -> Tensor:
        ids = batch["ids"]
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=ids < 3)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(1, dims=1).flatten())


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(Lit):
    """A small GPT: learnable positions used in the container's own forward, a head tied to the embedding, dropout when
    asked for.
    """

    def __init__(self, width: int = 8, depth: int = 3, dropout: float = 0.0, tied: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.embed = nn.Embedding(40, width)
        self.position = nn.Parameter(0.1 * torch.randn(1, 16, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.dropout(self.embed(ids) + self.position[:, :length])
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch["ids"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())


class TiedByHand(Lit):
    """The head is no module: the embedding's weight is used where the embedding is not running."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embed = nn.Embedding(40, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: Any) -> Tensor:
        ids = batch["ids"]
        logits = F.linear(self.blocks(self.embed(ids)), self.embed.weight) * self.scale
        penalty = 0.01 * self.blocks[0][0].weight.pow(2).sum()  # of a layer that is not running
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, dims=1).flatten()) + penalty


# --- transformers


class HuggingFace(Lit):
    """Any model of transformers that returns its own loss."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self.net = net

    def loss(self, batch: Any) -> Tensor:
        return self.net(**batch).loss


SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


def gpt2(**options: Any) -> Lit:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return HuggingFace(GPT2LMHeadModel(config), **options)


def llama(**options: Any) -> Lit:
    from transformers import LlamaConfig, LlamaForCausalLM

    return HuggingFace(
        LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=16)), **options
    )


def bert(**options: Any) -> Lit:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SMALL, hidden_dropout_prob=0, attention_probs_dropout_prob=0, max_position_embeddings=16)
    return HuggingFace(BertForMaskedLM(config), **options)


def t5(**options: Any) -> Lit:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0, decoder_start_token_id=0
    )
    return HuggingFace(T5ForConditionalGeneration(config), **options)


def mixtral(**options: Any) -> Lit:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        max_position_embeddings=16,
        experts_implementation="eager",  # the grouped matrix product knows no fp64
    )
    return HuggingFace(MixtralForCausalLM(config), **options)


def vit(**options: Any) -> Lit:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return HuggingFace(ViTForImageClassification(config), **options)


def causal(n: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (n, 9))
    return {"input_ids": ids, "labels": ids}


def masked(n: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (n, 9))
    mask = torch.ones_like(ids)
    mask[:, 7:] = torch.randint(2, (n, 2))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translated(n: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 40, (n, 9)), "labels": torch.randint(1, 40, (n, 6))}


def labelled_pictures(n: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.randint(5, (n,))}


def triplets(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 6)}


ZOO: dict[str, tuple[Callable[..., Lit], Callable[[int], dict[str, Tensor]]]] = {
    "mlp": (MLP, vectors),
    "frozen": (Frozen, vectors),
    "teacher": (Distilled, vectors),
    "unused": (Unused, vectors),
    "siamese": (Siamese, triplets),
    "structured": (Structured, vectors),
    "single layer": (Single, vectors),
    "no layer": (Bare, vectors),
    "cnn": (CNN, pictures),
    "unet": (UNet, images),
    "lstm": (partial(Recurrent, nn.LSTM), sequences),
    "gru": (partial(Recurrent, nn.GRU), sequences),
    "nn.TransformerEncoder": (Encoder, tokens),
    "tied gpt": (GPT, tokens),
    "tied by hand": (TiedByHand, tokens),
    "gpt2": (gpt2, causal),
    "llama": (llama, causal),
    "bert": (bert, masked),
    "t5": (t5, translated),
    "mixtral": (mixtral, causal),
    "vit": (vit, labelled_pictures),
}
