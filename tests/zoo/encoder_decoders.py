"""Sequence-to-sequence models of transformers."""

from functools import partial
from typing import Any

import torch
from models import HuggingFace, Lit, translated
from torch import Tensor

from zoo.entry import VOCABULARY, Entry, network, pretrained

SMALL = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def windowed(n: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, VOCABULARY, (n, 8)), "labels": torch.randint(1, VOCABULARY, (n, 6))}


def switch(**config: Any) -> Lit:
    """Its routers convert themselves to 32-bit precision in their forward, where 64 bits are asked for here."""
    net = network("SwitchTransformersForConditionalGeneration", **config)
    for module in net.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.dtype = torch.float64
    return HuggingFace(net)


def bert_to_gpt() -> Lit:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel, GPT2Config

    encoder = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    decoder = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    return HuggingFace(EncoderDecoderModel(config))


ENTRIES = [
    Entry("T5", pretrained("T5ForConditionalGeneration", **T5), translated, "position bias handed from layer to layer"),
    Entry("BART", pretrained("BartForConditionalGeneration", **SMALL), translated),
    Entry("Marian", pretrained("MarianMTModel", **SMALL), translated, "fixed positions"),
    Entry("Pegasus", pretrained("PegasusForConditionalGeneration", **SMALL), translated, "fixed positions"),
    Entry(
        "LED",
        pretrained(
            "LEDForConditionalGeneration",
            **{k: v for k, v in SMALL.items() if k != "max_position_embeddings"},
            max_encoder_position_embeddings=16,
            max_decoder_position_embeddings=16,
            attention_window=4,
        ),
        windowed,
        "windows folded into dimension 0",
    ),
    Entry(
        "Switch Transformers",
        partial(
            switch,
            **T5,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_experts=4,
            expert_capacity=4,
            router_jitter_noise=0.0,
            output_router_logits=True,
        ),
        translated,
        "expert capacity",
    ),
    Entry(
        "ProphetNet",
        pretrained(
            "ProphetNetForConditionalGeneration",
            vocab_size=VOCABULARY,
            hidden_size=16,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_encoder_attention_heads=2,
            num_decoder_attention_heads=2,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            decoder_start_token_id=0,
        ),
        translated,
        "predicts several tokens ahead",
    ),
    Entry("BERT to GPT-2", bert_to_gpt, translated, "two models in one"),
]
