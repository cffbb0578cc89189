"""LightningModules as people write them: no model here is of a library, or it is used in a way of one's own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import HuggingFace, Lit, Siamese, Structured, TiedByHand, causal, masked, tokens, triplets, vectors
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from zoo.entry import VOCABULARY, Entry, network

# --- data


def pictures(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 8, 8), "y": torch.randint(5, (n,))}


def noisy_pictures(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 8, 8), "noise": torch.randn(n, 3, 8, 8), "time": torch.rand(n)}


def two_views(n: int) -> dict[str, Tensor]:
    x = torch.randn(n, 6)
    return {"x": x + 0.1 * torch.randn(n, 6), "other": x + 0.1 * torch.randn(n, 6)}


def seeded(n: int) -> dict[str, Tensor]:
    """Every sample has a seed of its own, so that its noise is the same whatever it is computed with."""
    return {"x": torch.randn(n, 6), "seed": torch.randint(1 << 30, (n,))}


def translated(n: int) -> dict[str, Tensor]:
    return {"source": torch.randint(1, VOCABULARY, (n, 7)), "target": torch.randint(1, VOCABULARY, (n, 5))}


def sentences(n: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(1, VOCABULARY, (n, 8)), "y": torch.randint(3, (n,))}


def domains(n: int) -> dict[str, Tensor]:
    return vectors(n) | {"domain": torch.randint(2, (n,))}


def graphs(n: int) -> dict[str, Tensor]:
    return {"nodes": torch.randn(n, 5, 6), "edges": (torch.rand(n, 5, 5) < 0.5).long(), "y": torch.randn(n, 3)}


# --- pictures


class ConvBlock(nn.Module):
    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.GroupNorm(2, out)
        self.shift = nn.Linear(time, out)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.norm(self.conv1(x)) + self.shift(time)[:, :, None, None]
        return F.silu(self.conv2(F.silu(x)))


class Diffusion(Lit):
    """A U-Net that predicts noise; each block gets the embedded time, and each level of the way up a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8))
        self.down = nn.ModuleList([ConvBlock(3, 4, 8), ConvBlock(4, 8, 8)])
        self.middle = ConvBlock(8, 8, 8)
        self.up = nn.ModuleList([ConvBlock(16, 4, 8), ConvBlock(8, 4, 8)])
        self.head = nn.Conv2d(4, 3, 1)

    def loss(self, batch: Any) -> Tensor:
        time = batch["time"][:, None]
        level = time[:, :, None, None]
        x, embedded = batch["x"] * (1 - level) + batch["noise"] * level, self.embed_time(time)
        skips = []
        for block in self.down:
            x = block(x, embedded)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x, embedded)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1), embedded)
        return F.mse_loss(self.head(x), batch["noise"])


class DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu_(self.norm(torch.cat(features, dim=1))))


class DenseNet(Lit):
    """Each layer gets the list of all outputs before it, which grows from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(DenseLayer(4 + 2 * i, 2) for i in range(4))
        self.norm = nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        features = [self.stem(batch["x"])]
        for layer in self.layers:
            features.append(layer(features))
        x = F.relu_(self.norm(torch.cat(features, dim=1)))
        return F.cross_entropy(self.head(x.mean((2, 3))), batch["y"])


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width, momentum=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


class BatchNormNet(Lit):
    """Residual blocks with BatchNorm, as torchvision writes them, and a norm in training_step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(Residual(4) for _ in range(3)))
        self.head = nn.Linear(4, 5)
        self.last = nn.BatchNorm1d(64, affine=False)

    def loss(self, batch: Any) -> Tensor:
        x = self.blocks(self.stem(batch["x"]))
        x = self.last(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x.mean(2)), batch["y"])


class ChangedInPlace(Lit):
    """As normalizer-free networks do: what a block returned is scaled in place, and the input added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(weight_norm(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(3))
        self.gains = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.stem(batch["x"])
        for gain, block in zip(self.gains, self.blocks, strict=True):
            out = block(x)
            out *= gain
            out += x
            x = torch.tanh(out)
        return F.cross_entropy(self.head(x.mean((2, 3))), batch["y"])


class Pyramid(Lit):
    """One head, called on three levels of different size; the loss is taken over all of them."""

    def __init__(self) -> None:
        super().__init__()
        down = partial(nn.Conv2d, kernel_size=3, stride=2, padding=1)
        self.levels = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), down(4, 4), down(4, 4)])
        self.lateral = nn.ModuleList(nn.Conv2d(4, 6, 1) for _ in range(3))
        self.head = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 1))

    def loss(self, batch: Any) -> Tensor:
        x, maps = batch["x"], []
        for level in self.levels:
            x = F.relu(level(x))
            maps.append(x)
        total, above = x.new_zeros(()), None
        for lateral, found in zip(reversed(self.lateral), reversed(maps), strict=True):
            here = lateral(found)
            above = here if above is None else here + F.interpolate(above, size=here.shape[-2:])
            total = total + F.cross_entropy(self.head(above).mean((2, 3)), batch["y"])
        return total


class SpectralNorm(Lit):
    """A discriminator whose weights are divided by their largest singular value, estimated anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(spectral_norm(nn.Conv2d(a, b, 3, padding=1)), nn.LeakyReLU(0.2))
                for a, b in ((3, 4), (4, 4), (4, 4))
            )
        )
        self.head = spectral_norm(nn.Linear(4, 1))

    def loss(self, batch: Any) -> Tensor:
        return F.softplus(-self.head(self.blocks(batch["x"]).mean((2, 3)))).mean()


# --- sequences


class Seq2Seq(Lit):
    """A bidirectional LSTM reads; an LSTM cell, called token by token, writes and attends to what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.cell = nn.LSTMCell(16, 8)
        self.query = nn.Linear(8, 8)
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        read, (hidden, cell) = self.encoder(self.embed(batch["source"]))
        state = (torch.cat([*hidden[-2:]], dim=1), torch.cat([*cell[-2:]], dim=1))
        context, logits = read.mean(1), []
        written = self.embed(batch["target"])
        for step in range(written.shape[1] - 1):
            state = self.cell(torch.cat([written[:, step], context], dim=1), state)
            scores = (read @ self.query(state[0]).unsqueeze(2)).softmax(1)
            context = (read * scores).sum(1)
            logits.append(self.head(torch.cat([state[0], context], dim=1)))
        return F.cross_entropy(torch.stack(logits, dim=1).flatten(0, 1), batch["target"][:, 1:].flatten())


class Experts(nn.Module):
    """Each token goes to its best expert alone. Leaves its balancing loss on an attribute."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width)) for _ in range(count)
        )
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        best, choice = chances.max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero().squeeze(1)
            if len(chosen):
                out = out.index_add(0, chosen, expert(flat[chosen]) * best[chosen, None])
        used = F.one_hot(choice, len(self.experts)).to(x.dtype).mean(0)
        self.aux_loss = len(self.experts) * (used * chances.mean(0)).sum()
        return x + out.view_as(x)


class MixtureOfExperts(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Experts(8, 4) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["ids"])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["ids"].roll(-1, dims=1).flatten())
        return loss + 0.3 * sum(module.aux_loss for module in self.modules() if isinstance(module, Experts))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Reader(Lit):
    """Embeds and classifies sentences; which blocks are called in between is the subclasses' matter."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(0.1 * torch.randn(1, 8, 8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def between(self, x: Tensor, batch: Any) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        x = self.between(self.embed(batch["ids"]) + self.position, batch)
        return F.cross_entropy(self.head(x.mean(1)), batch["y"])


class EarlyExit(Reader):
    """Stops where the head is sure enough, and not before the first block; each exit adds to the loss."""

    def loss(self, batch: Any) -> Tensor:
        x, total = self.embed(batch["ids"]) + self.position, 0.0
        for depth, block in enumerate(self.blocks):
            x = block(x)
            logits = self.head(x.mean(1))
            total = total + F.cross_entropy(logits, batch["y"])
            if logits.detach().softmax(1).amax() > 0.55 + 0.03 * depth:
                break
        return total


class LayerDrop(Reader):
    """Leaves out blocks; which ones, the data says."""

    def between(self, x: Tensor, batch: Any) -> Tensor:
        for number, block in enumerate(self.blocks):
            if (int(batch["ids"][0, number]) + number) % 3:
                x = block(x)
        return x


class Reordered(Reader):
    """Calls its blocks in an order that the data gives, some twice, some never."""

    def between(self, x: Tensor, batch: Any) -> Tensor:
        for number in (batch["ids"][0, :5] % len(self.blocks)).tolist():
            x = self.blocks[number](x)
        return x


class Ponder(Reader):
    """Adaptive computation: one block, called until its halting unit says so, at most six times."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.halt = nn.Linear(8, 1)

    def between(self, x: Tensor, batch: Any) -> Tensor:
        left, out, number = x.new_ones(x.shape[0], 1, 1), torch.zeros_like(x), 0
        while number < 6 and float(left.detach().max()) > 0.2:
            x = self.blocks[0](x)
            share = left * self.halt(x.mean(1, keepdim=True)).sigmoid()
            out, left, number = out + share * x, left - share, number + 1
        return out + left * x


class MixtureOfDepths(Reader):
    """Every other block sees only the tokens that its router scores highest; the others pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def between(self, x: Tensor, batch: Any) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number % 2 == 0:
                x = block(x)
                continue
            scores = self.routers[number // 2](x).squeeze(2)
            best, chosen = scores.topk(3, dim=1)
            index = chosen.unsqueeze(2).expand(-1, -1, x.shape[2])
            picked = x.gather(1, index)
            x = x.scatter(1, index, picked + best.sigmoid().unsqueeze(2) * block(picked))
        return x


class Checkpointed(Reader):
    """Blocks under torch.utils.checkpoint, as one writes it oneself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def between(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class SharedBias(Reader):
    """Blocks are handed parameters of their container: one bias for all of them, a scale for each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(8) for _ in range(4))
        self.bias = nn.Parameter(0.1 * torch.randn(8, 8))
        self.scales = nn.ParameterList(nn.Parameter(0.5 * torch.ones(8)) for _ in range(4))

    def between(self, x: Tensor, batch: Any) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x, self.bias, scale=scale)
        return x


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside, self.mix = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor, *, scale: Tensor) -> Tensor:
        return x + scale * self.mix((x @ self.inside(x).transpose(1, 2) + bias).softmax(-1) @ x)


# --- vectors


class Variational(Lit):
    """A variational autoencoder. Its noise is drawn in training_step from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))

    def loss(self, batch: Any) -> Tensor:
        mean, log_variance = self.encoder(batch["x"]).chunk(2, dim=1)
        draws = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in batch["seed"].tolist()]
        z = mean + (0.5 * log_variance).exp() * torch.stack(draws).to(mean)
        divergence = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, (0.5 * log_variance).exp()),
            torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean)),
        )
        return F.mse_loss(self.decoder(z), batch["x"]) + 0.1 * divergence.sum(1).mean()


class NeuralODE(Lit):
    """One layer, called four times in each of four Runge-Kutta steps, with the time as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.field = Field()
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, step = self.embed(batch["x"]), 0.25
        for number in range(4):
            t = number * step
            k1 = self.field(t, x)
            k2 = self.field(t + step / 2, x + step / 2 * k1)
            k3 = self.field(t + step / 2, x + step / 2 * k2)
            k4 = self.field(t + step, x + step * k3)
            x = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return F.mse_loss(self.head(x), batch["y"])


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 12), nn.Linear(12, 8)
        self.calls = 0

    def forward(self, t: float, x: Tensor) -> Tensor:
        self.calls += 1
        return self.outside(torch.tanh(self.inside(x) + t))


class TransposeOf(nn.Module):
    """A parametrization: the weight is another module's, transposed."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.source = source

    def forward(self, weight: Tensor) -> Tensor:
        return self.source.weight.T + 0.1 * weight


class TiedAutoencoder(Lit):
    """The decoder's weights are the encoder's transposed, and a little of their own, by parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 4)])
        self.decoder = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 6)])
        for layer, source in zip(self.decoder, reversed(self.encoder), strict=True):
            parametrize.register_parametrization(layer, "weight", TransposeOf(source))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for layer in (*self.encoder, *self.decoder):
            x = torch.tanh(layer(x))
        return F.mse_loss(x, batch["x"])


class Bootstrap(Lit):
    """A student learns to predict a teacher, which runs without gradient and follows the student after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch["other"])
        return (1 - F.cosine_similarity(self.predictor(self.student(batch["x"])), target)).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class Reversal(torch.autograd.Function):
    """The identity, with the gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class DomainAdversarial(Lit):
    """Gradient reversal before a second head; the two losses are weighted by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.regressor, self.discriminator = nn.Linear(8, 3), nn.Linear(8, 2)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def loss(self, batch: Any) -> Tensor:
        h = self.features(batch["x"])
        task = F.mse_loss(self.regressor(h), batch["y"])
        domain = F.cross_entropy(self.discriminator(Reversal.apply(h)), batch["domain"])
        losses = torch.stack([task, domain])
        return (losses * (-self.log_variances).exp() + self.log_variances).sum()


class Hypernetwork(Lit):
    """One network computes the weights that another one is called with, by torch.func.functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3 * 6))
        self.target = nn.Linear(6, 3)

    def loss(self, batch: Any) -> Tensor:
        weight = self.target.weight + self.generator(batch["x"].mean(0)).view(3, 6)
        out = torch.func.functional_call(self.target, {"weight": weight}, (batch["x"],))
        return F.mse_loss(out, batch["y"])


class GraphNetwork(Lit):
    """Message passing over graphs: nodes and edges are both updated, by layers with two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges = nn.Linear(6, 8), nn.Embedding(2, 4)
        self.layers = nn.ModuleList(MessagePassing(8, 4) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        nodes, edges = self.nodes(batch["nodes"]), self.edges(batch["edges"])
        for layer in self.layers:
            nodes, edges = layer(nodes, edges)
        return F.mse_loss(self.head(nodes.sum(1)), batch["y"]) + 0.1 * edges.square().mean()


class MessagePassing(nn.Module):
    def __init__(self, nodes: int, edges: int) -> None:
        super().__init__()
        self.edge = nn.Linear(2 * nodes + edges, edges)
        self.node = nn.Linear(nodes + edges, nodes)

    def forward(self, nodes: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        count = nodes.shape[1]
        pairs = [nodes.unsqueeze(2).expand(-1, -1, count, -1), nodes.unsqueeze(1).expand(-1, count, -1, -1), edges]
        edges = edges + torch.tanh(self.edge(torch.cat(pairs, dim=-1)))
        return nodes + torch.tanh(self.node(torch.cat([nodes, edges.mean(2)], dim=-1))), edges


# --- models of transformers, used in ways of one's own

BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


class LooksInside(HuggingFace):
    """Hidden states and attention maps are part of the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.mix = nn.Parameter(torch.zeros(3))

    def loss(self, batch: Any) -> Tensor:
        found = self.net(**batch, output_hidden_states=True, output_attentions=True)
        mixed = sum(w * h for w, h in zip(self.mix.softmax(0), found.hidden_states, strict=True))
        entropy = -sum((a * (a + 1e-6).log()).sum(-1).mean() for a in found.attentions)
        return found.loss + 0.1 * mixed.square().mean() + 0.01 * entropy


def checkpointed(architecture: str, reentrant: bool, **config: Any) -> Callable[[], Lit]:
    def make() -> Lit:
        net = network(architecture, **config)
        net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return HuggingFace(net)

    return make


def adapted(kind: str) -> Callable[[], Lit]:
    """A Llama wrapped by peft. LoRA's adapters start at random: started at zero, half of them would not learn."""

    def make() -> Lit:
        import peft

        options = {
            "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
            "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True),
            "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        }
        return HuggingFace(peft.get_peft_model(network("LlamaForCausalLM", **LLAMA), options[kind]()))

    return make


ENTRIES = [
    Entry("U-Net", Diffusion, noisy_pictures, "skips, time embedding into every block"),
    Entry("DenseNet", DenseNet, pictures, "lists of tensors, changed in place"),
    Entry("Residual CNN", BatchNormNet, pictures, "statistics of the whole batch, in-place sums"),
    Entry("NF-Net", ChangedInPlace, pictures, "outputs changed in place, weight norm"),
    Entry("Feature pyramid", Pyramid, pictures, "one head for three sizes"),
    Entry("Spectral norm", SpectralNorm, pictures, "buffers change in every forward"),
    Entry("LSTM seq2seq", Seq2Seq, translated, "a cell called token by token"),
    Entry("Mixture of experts", MixtureOfExperts, tokens, "loss left on an attribute"),
    Entry("Early exit", EarlyExit, sentences, "calls depend on data"),
    Entry("LayerDrop", LayerDrop, sentences, "calls depend on data"),
    Entry("Reordered blocks", Reordered, sentences, "calls depend on data"),
    Entry("Adaptive computation", Ponder, sentences, "calls depend on data"),
    Entry("Mixture of depths", MixtureOfDepths, sentences, "a part of the tokens"),
    Entry("Checkpointed blocks", partial(Checkpointed, False), sentences, "torch.utils.checkpoint"),
    Entry("Checkpointed blocks, reentrant", partial(Checkpointed, True), sentences, "torch.utils.checkpoint"),
    Entry("Shared bias", SharedBias, sentences, "parameters as arguments"),
    Entry("Tied by hand", TiedByHand, tokens, "a layer's parameters used outside, penalty on weights"),
    Entry("VAE", Variational, seeded, "noise from its own generator"),
    Entry("Neural ODE", NeuralODE, vectors, "one layer in a loop"),
    Entry("Tied autoencoder", TiedAutoencoder, vectors, "parametrization with another layer's weight"),
    Entry("Siamese network", Siamese, triplets, "one encoder called three times"),
    Entry("Teacher and student", Bootstrap, two_views, "no_grad, moving average"),
    Entry("Domain-adversarial network", DomainAdversarial, domains, "gradient reversal, learned weights of losses"),
    Entry("Hypernetwork", Hypernetwork, vectors, "functional_call"),
    Entry("Graph network", GraphNetwork, graphs, "two inputs and two outputs"),
    Entry("Structured outputs", Structured, vectors, "dict, dataclass, named tuple"),
    Entry(
        "BERT, hidden states and attentions in the loss",
        lambda: LooksInside(network("BertForMaskedLM", attention="eager", **BERT)),
        masked,
        "output_hidden_states, output_attentions",
    ),
    Entry(
        "GPT-2, gradient checkpointing",
        checkpointed("GPT2LMHeadModel", False, **GPT2),
        causal,
        "gradient checkpointing",
    ),
    Entry(
        "Llama, reentrant gradient checkpointing",
        checkpointed("LlamaForCausalLM", True, **LLAMA),
        causal,
        "gradient checkpointing",
    ),
    Entry("Llama, LoRA", adapted("lora"), causal, "peft"),
    Entry("Llama, DoRA", adapted("dora"), causal, "peft"),
    Entry("Llama, IA3", adapted("ia3"), causal, "peft"),
]
