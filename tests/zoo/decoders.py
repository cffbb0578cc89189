"""Causal language models of transformers. By default they fill a cache (`use_cache`)."""

from models import causal

from zoo.entry import VOCABULARY, Entry, pretrained, with_adam

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = SMALL | {"intermediate_size": 24}
GROUPED = WIDE | {"num_key_value_heads": 1}
OLD = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1}
OLD |= {"eos_token_id": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
# The grouped matrix product of transformers' default experts knows no fp64.
EXPERTS = {"experts_implementation": "eager"}
ROUTED = GROUPED | EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.5}

ENTRIES = [
    Entry("GPT-2", pretrained("GPT2LMHeadModel", **OLD), causal),
    Entry("GPT-J", pretrained("GPTJForCausalLM", **OLD, rotary_dim=4), causal),
    Entry("CodeGen", pretrained("CodeGenForCausalLM", **OLD | {"n_head": 4}, rotary_dim=4), causal),
    Entry("GPT-BigCode", pretrained("GPTBigCodeForCausalLM", **OLD), causal, "multi-query attention"),
    Entry(
        "GPT-Neo",
        pretrained(
            "GPTNeoForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            max_position_embeddings=16,
        ),
        causal,
        "local attention",
    ),
    Entry("GPT-NeoX", with_adam(pretrained("GPTNeoXForCausalLM", **WIDE)), causal, "parallel residual, AdamW"),
    Entry(
        "OPT",
        pretrained("OPTForCausalLM", **SMALL, ffn_dim=24, word_embed_proj_dim=8, dropout=0.0),
        causal,
        "projected embeddings",
    ),
    Entry(
        "BLOOM",
        pretrained("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2),
        causal,
        "ALiBi, custom autograd function",
    ),
    Entry(
        "Falcon",
        pretrained(
            "FalconForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
        ),
        causal,
        "multi-query attention",
    ),
    Entry(
        "MPT",
        pretrained("MptForCausalLM", vocab_size=VOCABULARY, d_model=16, n_layers=2, n_heads=2, max_seq_len=16),
        causal,
        "ALiBi",
    ),
    Entry("Llama", with_adam(pretrained("LlamaForCausalLM", **GROUPED)), causal, "AdamW"),
    Entry("Mistral", pretrained("MistralForCausalLM", **GROUPED, sliding_window=4), causal, "sliding window"),
    Entry("Qwen2", pretrained("Qwen2ForCausalLM", **GROUPED, tie_word_embeddings=True), causal),
    Entry("Qwen3", pretrained("Qwen3ForCausalLM", **GROUPED, head_dim=8), causal),
    Entry(
        "Gemma 2",
        pretrained("Gemma2ForCausalLM", **GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
        causal,
        "soft-capped logits, local and global layers",
    ),
    Entry(
        "Gemma 3",
        pretrained("Gemma3ForCausalLM", **GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
        causal,
        "local and global layers",
    ),
    Entry("Phi", pretrained("PhiForCausalLM", **WIDE, partial_rotary_factor=0.5), causal, "parallel residual"),
    Entry("Phi-3", pretrained("Phi3ForCausalLM", **GROUPED), causal),
    Entry("StableLM", pretrained("StableLmForCausalLM", **GROUPED), causal),
    Entry(
        "StarCoder2", pretrained("Starcoder2ForCausalLM", **GROUPED, residual_dropout=0, embedding_dropout=0), causal
    ),
    Entry("Cohere", pretrained("CohereForCausalLM", **GROUPED), causal, "parallel residual"),
    Entry("OLMo", pretrained("OlmoForCausalLM", **GROUPED), causal),
    Entry("OLMo 2", pretrained("Olmo2ForCausalLM", **GROUPED), causal),
    Entry(
        "Granite",
        pretrained("GraniteForCausalLM", **GROUPED, embedding_multiplier=2.0, residual_multiplier=0.5),
        causal,
    ),
    Entry("Nemotron", pretrained("NemotronForCausalLM", **GROUPED), causal),
    Entry(
        "Mamba",
        pretrained("MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2),
        causal,
        "state space model",
    ),
    Entry(
        "RecurrentGemma",
        pretrained(
            "RecurrentGemmaForCausalLM", **GROUPED | {"num_hidden_layers": 3}, lru_width=16, attention_window_size=4
        ),
        causal,
        "recurrent state on attributes",
    ),
    Entry(
        "Qwen3-Next",
        pretrained(
            "Qwen3NextForCausalLM",
            **ROUTED,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
        causal,
        "linear attention",
    ),
    Entry(
        "Mixtral",
        pretrained("MixtralForCausalLM", **ROUTED, num_local_experts=4, num_experts_per_tok=2),
        causal,
    ),
    Entry(
        "Qwen2-MoE",
        pretrained(
            "Qwen2MoeForCausalLM",
            **ROUTED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
        causal,
        "shared expert",
    ),
    Entry("OLMoE", pretrained("OlmoeForCausalLM", **ROUTED, num_experts=4, num_experts_per_tok=2), causal),
    Entry(
        "GPT-OSS",
        pretrained(
            "GptOssForCausalLM", **ROUTED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
        ),
        causal,
        "attention sinks, sliding window",
    ),
    Entry(
        "DeepSeek-V3",
        pretrained(
            "DeepseekV3ForCausalLM",
            **WIDE | EXPERTS,
            num_key_value_heads=2,
            moe_intermediate_size=8,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=4,
            q_lora_rank=4,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        ),
        causal,
        "latent attention, a dense and a routed layer",
    ),
    Entry(
        "Jamba",
        pretrained(
            "JambaForCausalLM",
            **ROUTED,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        causal,
        "Mamba and attention layers",
    ),
    Entry(
        "GraniteMoE", pretrained("GraniteMoeForCausalLM", **ROUTED, num_local_experts=4, num_experts_per_tok=2), causal
    ),
    Entry(
        "MiniMax",
        pretrained(
            "MiniMaxForCausalLM",
            **ROUTED,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            block_size=4,
            layer_types=["linear_attention", "full_attention"],
        ),
        causal,
        "linear attention",
    ),
    Entry(
        "Mamba 2",
        pretrained(
            "Mamba2ForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=4,
        ),
        causal,
        "state space model",
    ),
    Entry(
        "Zamba",
        pretrained(
            "ZambaForCausalLM",
            **WIDE | {"num_hidden_layers": 7},
            num_key_value_heads=2,
            attention_hidden_size=32,
            attention_head_dim=16,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
            n_mamba_heads=2,
        ),
        causal,
        "one attention block shared by three layers",
    ),
    Entry(
        "Gemma 3n",
        pretrained(
            "Gemma3nForCausalLM",
            **GROUPED | {"num_hidden_layers": 4},
            head_dim=8,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=4,
            num_kv_shared_layers=2,
            laurel_rank=4,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 4,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        causal,
        "keys and values shared between layers",
    ),
    Entry(
        "RWKV",
        pretrained(
            "RwkvForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=16,
            attention_hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
        ),
        causal,
        "recurrent",
    ),
    Entry("LFM2", pretrained("Lfm2ForCausalLM", **GROUPED, layer_types=["conv", "full_attention"]), causal),
    Entry(
        "Reformer",
        pretrained(
            "ReformerModelWithLMHead",
            vocab_size=VOCABULARY,
            hidden_size=16,
            attention_head_size=8,
            num_attention_heads=2,
            attn_layers=["local", "local"],
            feed_forward_size=24,
            is_decoder=True,
            axial_pos_embds=False,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0,
            local_attn_chunk_length=3,
        ),
        causal,
        "reversible layers, called again in the backward",
    ),
]
