"""Encoders of text of transformers."""

import torch
from models import causal, masked
from torch import Tensor

from zoo.entry import VOCABULARY, Entry, pretrained, with_adam

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}


def classified(n: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, VOCABULARY, (n, 8)), "labels": torch.randint(3, (n,))}


def windowed(n: int) -> dict[str, Tensor]:
    """Nothing to pad: a window of padding alone has no gradient that is a number."""
    ids = torch.randint(1, VOCABULARY, (n, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def answered(n: int) -> dict[str, Tensor]:
    """A question about a text: where the answer begins and ends."""
    ids = torch.randint(4, VOCABULARY, (n, 8))
    ids[:, 2] = 3  # what Splinter asks for
    return {"input_ids": ids, "start_positions": torch.randint(8, (n,)), "end_positions": torch.randint(8, (n,))}


ENTRIES = [
    Entry("BERT", pretrained("BertForMaskedLM", **SMALL), masked, "padding"),
    Entry("RoBERTa", pretrained("RobertaForMaskedLM", **SMALL), masked, "padding"),
    Entry(
        "ALBERT",
        pretrained("AlbertForMaskedLM", **SMALL | {"num_hidden_layers": 4}, embedding_size=8),
        masked,
        "one block for all depths: found as a single layer",
    ),
    Entry(
        "ALBERT, with its block as a layer",
        pretrained("AlbertForMaskedLM", **SMALL | {"num_hidden_layers": 4}, embedding_size=8),
        masked,
        "one layer object called four times, `layers=['AlbertLayer']`",
        layers=["AlbertLayer"],
    ),
    Entry(
        "DeBERTa",
        pretrained("DebertaForMaskedLM", **SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        masked,
        "relative positions passed to the layers",
    ),
    Entry(
        "DeBERTa-v2",
        pretrained(
            "DebertaV2ForMaskedLM",
            **SMALL,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=4,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            conv_kernel_size=3,
        ),
        masked,
        "relative positions passed to the layers",
    ),
    Entry("ELECTRA", pretrained("ElectraForMaskedLM", **SMALL, embedding_size=8), masked),
    Entry(
        "DistilBERT",
        pretrained(
            "DistilBertForSequenceClassification",
            vocab_size=VOCABULARY,
            max_position_embeddings=16,
            n_layers=2,
            n_heads=2,
            dim=16,
            hidden_dim=24,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            num_labels=3,
        ),
        classified,
    ),
    Entry(
        "XLNet",
        pretrained(
            "XLNetForSequenceClassification",
            vocab_size=VOCABULARY,
            d_model=16,
            n_layer=2,
            n_head=2,
            d_inner=24,
            dropout=0.0,
            summary_last_dropout=0.0,
            num_labels=3,
        ),
        classified,
        "sequence first, memory",
    ),
    Entry(
        "Longformer",
        pretrained("LongformerForMaskedLM", **SMALL, attention_window=4),
        windowed,
        "windows folded into dimension 0",
    ),
    Entry(
        "BigBird",
        pretrained("BigBirdForMaskedLM", **SMALL, attention_type="original_full"),
        masked,
        "full attention",
    ),
    Entry(
        "Funnel",
        with_adam(
            pretrained(
                "FunnelForMaskedLM",
                vocab_size=VOCABULARY,
                block_sizes=[1, 1],
                num_decoder_layers=1,
                d_model=16,
                n_head=2,
                d_head=8,
                d_inner=24,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
            )
        ),
        causal,
        "pooled between layers, AdamW",
    ),
    Entry(
        "ModernBERT",
        pretrained("ModernBertForMaskedLM", **SMALL, global_attn_every_n_layers=2, local_attention=4),
        masked,
        "local and global layers",
    ),
    Entry("MPNet", pretrained("MPNetForMaskedLM", **SMALL), masked, "shared relative positions"),
    Entry(
        "FNet",
        pretrained(
            "FNetForMaskedLM",
            **{k: v for k, v in SMALL.items() if "attention" not in k},
            use_tpu_fourier_optimizations=False,
        ),
        causal,
        "Fourier transforms",
    ),
    Entry(
        "SqueezeBERT", pretrained("SqueezeBertForMaskedLM", **SMALL, embedding_size=16), masked, "grouped convolutions"
    ),
    Entry(
        "Splinter",
        pretrained("SplinterForQuestionAnswering", **SMALL, question_token_id=3),
        answered,
        "changes an input in place",
    ),
    Entry("RoFormer", pretrained("RoFormerForMaskedLM", **SMALL, embedding_size=8), masked, "rotary positions"),
    Entry(
        "Perceiver",
        pretrained(
            "PerceiverForSequenceClassification",
            vocab_size=VOCABULARY,
            d_latents=16,
            d_model=16,
            num_latents=4,
            num_blocks=2,
            num_self_attends_per_block=2,
            num_self_attention_heads=2,
            num_cross_attention_heads=2,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=8,
            num_labels=3,
        ),
        classified,
        "two layers called twice",
    ),
    Entry(
        "ConvBERT",
        pretrained("ConvBertForMaskedLM", **SMALL, embedding_size=16, head_ratio=1, conv_kernel_size=3),
        masked,
        "dynamic convolutions",
    ),
    Entry(
        "MobileBERT",
        pretrained(
            "MobileBertForMaskedLM",
            **SMALL,
            embedding_size=16,
            intra_bottleneck_size=16,
            true_hidden_size=16,
            num_feedforward_networks=2,
        ),
        masked,
        "bottlenecks",
    ),
]
