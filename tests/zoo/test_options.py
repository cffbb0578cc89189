"""Options of transformers' models that change what comes out of them and how: each trained and compared with plain
autograd. What comes out takes part in the loss, so a gradient that is lost on the way shows.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import default_dtype, fit
from models import SGD, HuggingFace, Lit, batches_of, causal, masked, translated
from torch import Tensor
from transformers.utils import ModelOutput

from zoo.decoders import GROUPED, OLD, ROUTED
from zoo.encoder_decoders import T5
from zoo.encoders import SMALL
from zoo.entry import network
from zoo.test_zoo import (
    DEVICES,
    MICROBATCHES,
    SIZES,
    TOLERANCE,
    Watched,
    by_text,
    largest_error,
    optimizer_state,
    train_plain,
)

MODELS: dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Tensor]]]] = {
    "GPT-2": (lambda: network("GPT2LMHeadModel", attention="eager", **OLD), causal),
    "Llama": (lambda: network("LlamaForCausalLM", attention="eager", **GROUPED), causal),
    "Mixtral": (
        lambda: network("MixtralForCausalLM", attention="eager", **ROUTED, num_local_experts=4, num_experts_per_tok=2),
        causal,
    ),
    "BERT": (lambda: network("BertForMaskedLM", attention="eager", **SMALL), masked),
    "T5": (lambda: network("T5ForConditionalGeneration", attention="eager", **T5), translated),
}
DECODERS = ["GPT-2", "Llama", "Mixtral", "T5"]


def total(found: Any) -> Tensor:
    """The mean square of every tensor in nested tuples, of which some may be None."""
    parts = [part.square().mean() for part in flat(found)]
    assert parts and all(part.requires_grad for part in parts)
    return torch.stack(parts).sum()


def flat(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [] if found is None else [tensor for part in found for tensor in flat(part)]


class Options(HuggingFace):
    """A model called with some options; what of its output takes part in the loss."""

    def __init__(self, model: str, options: dict[str, Any], fields: tuple[str, ...]) -> None:
        super().__init__(MODELS[model][0](), optimizer=SGD)
        self.options, self.fields = options, fields

    def loss(self, batch: Any) -> Tensor:
        out = self.net(**batch, **self.options)
        if not isinstance(out, ModelOutput):
            assert isinstance(out, tuple)
            return out[0]
        assert out["loss"] is out.loss and "logits" in out
        return out.loss + 0.1 * sum(total(out[name]) for name in self.fields)


class UsesCache(Options):
    def loss(self, batch: Any) -> Tensor:
        out = self.net(**batch, **self.options)
        cache = getattr(out, "past_key_values", None)
        assert (cache is not None) == self.options["use_cache"]
        if cache is None:
            return out.loss
        cache = getattr(cache, "self_attention_cache", cache)
        assert cache.get_seq_length() == (6 if self.net.config.is_encoder_decoder else 9)  # appended to once
        return out.loss + 0.1 * sum(total((layer.keys, layer.values)) for layer in cache.layers)


def checkpointed(model: str, options: dict[str, Any]) -> Callable[[], Lit]:
    def make() -> Lit:
        made = Options(model, {"use_cache": False}, ())
        made.net.gradient_checkpointing_enable(options)
        return made

    return make


CASES: dict[str, tuple[str, Callable[[], Lit]]] = {}
for model in MODELS:
    for name, fields in {
        "output_hidden_states": ("hidden_states",),
        "output_attentions": ("attentions",),
    }.items():
        if model == "T5":
            fields = tuple(f"{side}_{field}" for side in ("encoder", "decoder") for field in fields)
        CASES[f"{model}, {name}"] = model, lambda m=model, n=name, f=fields: Options(m, {n: True}, f)
    CASES[f"{model}, return_dict=False"] = model, lambda m=model: Options(m, {"return_dict": False}, ())
    for reentrant in (False, True):
        name = f"{model}, gradient checkpointing, use_reentrant={reentrant}"
        CASES[name] = model, checkpointed(model, {"use_reentrant": reentrant})
for model in DECODERS:
    for use in (True, False):
        CASES[f"{model}, use_cache={use}"] = model, lambda m=model, u=use: UsesCache(m, {"use_cache": u}, ())
CASES["Mixtral, output_router_logits"] = (
    "Mixtral",
    lambda: Options("Mixtral", {"output_router_logits": True}, ("router_logits",)),
)
CASES["Mixtral, everything at once"] = (
    "Mixtral",
    lambda: Options(
        "Mixtral",
        {"output_router_logits": True, "output_hidden_states": True, "output_attentions": True},
        ("router_logits", "hidden_states", "attentions", "logits"),
    ),
)


def build(make: Callable[[], Lit]) -> Lit:
    torch.manual_seed(3)
    with default_dtype(torch.float64):
        return make().double()


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_autograd(name: str) -> None:
    model, make = CASES[name]
    data = MODELS[model][1]
    batches = [batches_of(data, 1, size, seed=seed)[0] for seed, size in enumerate(SIZES)]
    plain, ours = build(make), build(make)
    plain.net.gradient_checkpointing_disable()  # it changes no gradient, but that reentrant ones lose a router's
    plain_losses, plain_optimizer = train_plain(plain, batches)
    strategy = Watched(microbatches=MICROBATCHES, split="step")
    trainer = fit(ours, batches, strategy, devices=DEVICES, precision="64-true")
    assert largest_error(dict(ours.named_parameters()), dict(plain.named_parameters())) <= TOLERANCE
    states = optimizer_state(plain, plain_optimizer)
    assert largest_error(optimizer_state(ours, trainer.optimizers[0]), states) <= TOLERANCE
    assert largest_error(by_text(ours.seen), by_text(plain.seen)) <= TOLERANCE
    assert largest_error(dict(enumerate(strategy.losses)), dict(enumerate(plain_losses))) <= TOLERANCE
    assert strategy.report().microbatches == MICROBATCHES
    if "checkpointing" in name:
        assert ours.net.is_gradient_checkpointing  # as the user left it
