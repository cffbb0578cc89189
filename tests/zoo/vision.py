"""Vision models of transformers."""

from functools import partial

import torch
from torch import Tensor

from zoo.entry import Entry, pretrained, with_adam

CLASSES = 5
TRANSFORMER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": CLASSES,
}


def pictures(n: int, size: int = 8) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 3, size, size), "labels": torch.randint(CLASSES, (n,))}


def segmented(n: int) -> dict[str, Tensor]:
    labels = torch.randint(CLASSES, (n, 16, 16))
    labels[:, :2] = 255  # what the model ignores
    return {"pixel_values": torch.randn(n, 3, 16, 16), "labels": labels}


def films(n: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 4, 3, 8, 8), "labels": torch.randint(CLASSES, (n,))}


large = partial(pictures, size=16)

ENTRIES = [
    Entry("ViT", with_adam(pretrained("ViTForImageClassification", **TRANSFORMER)), pictures, "AdamW"),
    Entry("DeiT", pretrained("DeiTForImageClassification", **TRANSFORMER), pictures, "distillation token"),
    Entry(
        "BEiT",
        pretrained(
            "BeitForImageClassification",
            **TRANSFORMER,
            use_relative_position_bias=True,
            use_absolute_position_embeddings=True,
            drop_path_rate=0.0,
        ),
        pictures,
        "relative position bias",
    ),
    Entry(
        "DINOv2",
        pretrained(
            "Dinov2ForImageClassification",
            **{k: v for k, v in TRANSFORMER.items() if k != "intermediate_size"},
            mlp_ratio=2,
            use_swiglu_ffn=True,
        ),
        pictures,
        "mask token without gradient",
    ),
    Entry(
        "Swin",
        pretrained(
            "SwinForImageClassification",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
            mlp_ratio=2.0,
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
        large,
        "shifted windows folded into dimension 0",
    ),
    Entry(
        "ConvNeXt",
        pretrained(
            "ConvNextForImageClassification",
            hidden_sizes=[8, 16],
            depths=[2, 1],
            num_stages=2,
            patch_size=2,
            image_size=16,
            num_labels=CLASSES,
        ),
        large,
    ),
    Entry(
        "ResNet",
        pretrained(
            "ResNetForImageClassification",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            layer_type="basic",
            num_labels=CLASSES,
        ),
        large,
    ),
    Entry(
        "RegNet",
        pretrained(
            "RegNetForImageClassification",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            groups_width=4,
            num_labels=CLASSES,
        ),
        large,
        "squeeze and excitation",
    ),
    Entry(
        "SegFormer",
        pretrained(
            "SegformerForSemanticSegmentation",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
        segmented,
        "features of all levels, ignored labels",
    ),
    Entry(
        "MobileViT",
        pretrained(
            "MobileViTForImageClassification",
            image_size=32,
            patch_size=2,
            hidden_sizes=[16, 16, 16],
            neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
            num_attention_heads=2,
            mlp_ratio=2.0,
            expand_ratio=2.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        partial(pictures, size=64),
        "patches folded into dimension 0",
    ),
    Entry(
        "Swin v2",
        pretrained(
            "Swinv2ForImageClassification",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
            mlp_ratio=2.0,
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
        large,
        "shifted windows folded into dimension 0",
    ),
    Entry(
        "PoolFormer",
        pretrained(
            "PoolFormerForImageClassification",
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[3, 3],
            strides=[2, 2],
            padding=[1, 1],
            mlp_ratio=2.0,
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
        large,
    ),
    Entry(
        "VideoMAE",
        pretrained("VideoMAEForVideoClassification", **TRANSFORMER, num_frames=4, tubelet_size=2),
        films,
        "video",
    ),
]
