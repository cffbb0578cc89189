"""Models of sound, of pictures with text, and of time series, of transformers."""

from typing import Any

import torch
import torch.nn.functional as F
from models import Lit
from torch import Tensor

from zoo.entry import VOCABULARY, Entry, network, pretrained

SPEECH = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PICTURE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def spoken(n: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(n, 200), "labels": torch.randint(1, 12, (n, 4))}


def transcribed(n: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(n, 8, 16), "labels": torch.randint(3, VOCABULARY, (n, 5))}


def spectrograms(n: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(n, 16, 8), "labels": torch.randint(5, (n,))}


def captioned(n: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (n, 7)), "pixel_values": torch.randn(n, 3, 8, 8)}


def described(n: int) -> dict[str, Tensor]:
    """Four places of the text are for the picture's patches."""
    batch = captioned(n)
    ids = torch.cat([torch.full((n, 4), VOCABULARY - 1), batch["input_ids"].clamp(max=VOCABULARY - 2)], dim=1)
    return {"input_ids": ids, "pixel_values": batch["pixel_values"], "labels": ids.masked_fill(ids > 38, -100)}


def questions(n: int) -> dict[str, Tensor]:
    return captioned(n) | {"labels": torch.rand(n, 3)}


def labelled_captions(n: int) -> dict[str, Tensor]:
    batch = captioned(n)
    return batch | {"labels": batch["input_ids"]}


def series(n: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(n, 16),
        "past_time_features": torch.randn(n, 16, 1),
        "past_observed_mask": torch.ones(n, 16),
        "future_values": torch.randn(n, 4),
        "future_time_features": torch.randn(n, 4, 1),
    }


def channels(n: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(n, 16, 2), "future_values": torch.randn(n, 4, 2)}


class Matched(Lit):
    """Brings the embeddings of a picture and of its own text together, sample by sample."""

    def __init__(self, architecture: str, **config: Any) -> None:
        super().__init__()
        self.net = network(architecture, **config)

    def loss(self, batch: Any) -> Tensor:
        found = self.net(**batch)
        alike = (found.image_embeds * found.text_embeds).sum(-1)
        return F.softplus(-alike * self.net.logit_scale.exp() * 0.1).mean()


ENTRIES = [
    Entry("Wav2Vec2", pretrained("Wav2Vec2ForCTC", **SPEECH), spoken, "CTC, weight norm"),
    Entry(
        "HuBERT",
        pretrained("HubertForCTC", **SPEECH, feat_extract_norm="layer", do_stable_layer_norm=True),
        spoken,
        "CTC, weight norm",
    ),
    Entry("WavLM", pretrained("WavLMForCTC", **SPEECH, num_buckets=8), spoken, "CTC, position bias handed on"),
    Entry(
        "Whisper",
        pretrained(
            "WhisperForConditionalGeneration",
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=8,
            max_target_positions=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        transcribed,
        "fixed positions",
    ),
    Entry(
        "Audio Spectrogram Transformer",
        pretrained(
            "ASTForAudioClassification",
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            patch_size=4,
            frequency_stride=4,
            time_stride=4,
            max_length=16,
            num_mel_bins=8,
            num_labels=5,
        ),
        spectrograms,
    ),
    Entry(
        "CLIP",
        lambda: Matched("CLIPModel", text_config=TEXT, vision_config=PICTURE, projection_dim=8),
        captioned,
        "loss per sample",
    ),
    Entry(
        "SigLIP",
        lambda: Matched("SiglipModel", text_config=TEXT | {"projection_size": 16}, vision_config=PICTURE),
        captioned,
        "loss per sample",
    ),
    Entry(
        "BLIP",
        pretrained(
            "BlipForConditionalGeneration",
            text_config=TEXT
            | {
                "encoder_hidden_size": 16,
                "projection_dim": 16,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            vision_config=PICTURE,
            projection_dim=16,
        ),
        labelled_captions,
        "text attends to the picture",
    ),
    Entry(
        "LLaVA",
        pretrained(
            "LlavaForConditionalGeneration",
            text_config={"model_type": "llama"} | TEXT | {"num_key_value_heads": 1},
            vision_config={"model_type": "clip_vision_model"} | PICTURE,
            image_token_index=VOCABULARY - 1,
            vision_feature_layer=-2,
        ),
        described,
        "picture among the tokens",
    ),
    Entry(
        "Time Series Transformer",
        pretrained(
            "TimeSeriesTransformerForPrediction",
            prediction_length=4,
            context_length=12,
            lags_sequence=[1, 2, 4],
            num_time_features=1,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
        series,
        "likelihood of a distribution object",
    ),
    Entry(
        "PatchTST",
        pretrained(
            "PatchTSTForPrediction",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            prediction_length=4,
            d_model=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=24,
        ),
        channels,
    ),
    Entry(
        "ViLT",
        pretrained(
            "ViltForQuestionAnswering",
            **PICTURE,
            vocab_size=VOCABULARY,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        ),
        questions,
        "text and picture in one sequence",
    ),
]
