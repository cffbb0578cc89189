"""Large language models for `python -m lightning_roundpipe plan`: configurations only, no weights.

python -m lightning_roundpipe plan --model examples.model_configs:llama_8b --batch examples.model_configs:tokens
"""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

SEQUENCE = 2048


def llama_8b() -> nn.Module:
    """Llama-3.1-8B."""
    return _made(
        LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
        )
    )  # fmt: skip


def qwen3_32b() -> nn.Module:
    """Qwen3-32B."""
    return _made(
        Qwen3Config(
            vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
            num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        )
    )  # fmt: skip


def qwen3_235b() -> nn.Module:
    """Qwen3-235B-A22B: 128 experts, of which each token goes through 8."""
    return _made(
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
            num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
            num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        ),
        experts_implementation="grouped_mm",  # sizes do not depend on where tokens are sent
    )  # fmt: skip


def tokens(samples: int) -> dict[str, torch.Tensor]:
    """Samples of 2048 tokens."""
    ids = torch.randint(1000, (samples, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


def _made(config: PretrainedConfig, **options: object) -> nn.Module:
    config.use_cache = False  # a cache would be filled at every call, and again by the recompute
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options).train()
