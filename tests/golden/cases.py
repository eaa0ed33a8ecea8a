"""The configurations of the tiny models, written as real checkpoints of each family carry them on the hub.

A case is `config` (its `config.json`), `lengths` (ids in the `short` and the `long` prompt; the long one runs past the
sliding window or the original context), and optionally
  `files`           further JSON files of the folder,
  `same_answers`    those of them that are the same configuration in another notation: transformers reads the same logits,
  `weights_of`      another case whose weights it shares,
  `twin`            also as `model.gguf`,
  `quantized_twin`  also as `model-q8_0.gguf`,
  `tokenizer`       also with `tokenizer.json` and a chat template.
"""

# 256 bytes, 12 merges, 4 special tokens: see gguf_twins.py. Cases with a GGUF twin or a tokenizer have this vocabulary.
BYTE_VOCABULARY = 272


def llama(**changes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.45.0",
        "use_cache": True,
        "vocab_size": 96,
    }
    return changed(config, changes)


def changed(config, changes):
    """`config` with `changes`; a key whose new value is `...` is left out."""
    merged = {**config, **changes}
    return dict(sorted((key, value) for key, value in merged.items() if value is not ...))


def new_notation(config, rope_parameters):
    """The same configuration as transformers 5 writes it: `rope_parameters` and `dtype` in place of the older keys."""
    return changed(
        config,
        {
            "rope_scaling": ...,
            "rope_theta": ...,
            "rope_local_base_freq": ...,
            "torch_dtype": ...,
            "dtype": config["torch_dtype"],
            "rope_parameters": rope_parameters,
            "transformers_version": "5.24.0",
        },
    )


LLAMA = llama(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    vocab_size=BYTE_VOCABULARY,
    bos_token_id=268,
    eos_token_id=268,
)

LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
LLAMA3 = llama(
    head_dim=16,
    max_position_embeddings=512,
    rope_scaling=LLAMA3_SCALING,
    tie_word_embeddings=True,
    vocab_size=BYTE_VOCABULARY,
    bos_token_id=268,
    eos_token_id=[268, 270],
)


# The original context of 24 and the base of 100 put the ramp in the middle of a head's 16 pairs: some are left alone, some
# blended, some divided.
def yarn(**scaling):
    rope_scaling = {"factor": 4.0, "original_max_position_embeddings": 24, **scaling}
    if "type" not in rope_scaling:
        rope_scaling["rope_type"] = "yarn"
    return llama(
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        rope_theta=100.0,
        rope_scaling=rope_scaling,
        vocab_size=BYTE_VOCABULARY,
    )


YARN_LENGTHS = {"short": 9, "long": 70}

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 256,
    "model_type": "mistral",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0",
    "use_cache": True,
    "vocab_size": 96,
}

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 268,
    "eos_token_id": 270,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "max_window_layers": 3,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": BYTE_VOCABULARY,
}

QWEN3 = changed(
    QWEN2,
    {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "intermediate_size": 48,
        "model_type": "qwen3",
        "rope_scaling": None,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    },
)

# Seven layers with a global one every six, a local base of 10,000 and scores scaled by the head's width: what GGUF files of
# this family leave to the reader. The second case has everything else that a config.json may say.
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 268,
    "cache_implementation": "hybrid",
    "eos_token_id": [268, 270],
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "pad_token_id": 271,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "sliding_window_pattern": 6,
    "torch_dtype": "float32",
    "transformers_version": "4.50.0",
    "use_cache": True,
    "vocab_size": BYTE_VOCABULARY,
}
GEMMA3_PATTERN = changed(
    GEMMA3,
    {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 20000.0,
        "sliding_window_pattern": 2,
        "vocab_size": 96,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
)

INTERNLM2 = {
    "architectures": ["InternLM2ForCausalLM"],
    "attn_implementation": "eager",
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModel": "modeling_internlm2.InternLM2ForCausalLM",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "bias": False,
    "bos_token_id": 268,
    "eos_token_id": 270,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "model_type": "internlm2",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 271,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.41.0",
    "use_cache": True,
    "vocab_size": BYTE_VOCABULARY,
}

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 268,
    "eos_token_id": 268,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "model_type": "mixtral",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.36.0",
    "use_cache": True,
    "vocab_size": BYTE_VOCABULARY,
}

QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 268,
    "decoder_sparse_step": 1,
    "eos_token_id": 268,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 40,
    "sliding_window": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.40.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": BYTE_VOCABULARY,
}

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 268,
    "decoder_sparse_step": 1,
    "eos_token_id": 270,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": BYTE_VOCABULARY,
}

# Its router's bias on the choice of experts is zero.
ERNIE4_5_MOE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 16,
    "moe_k": 2,
    "moe_layer_end_index": 2,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 6,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_bias": False,
    "use_cache": True,
    "vocab_size": 96,
}

IRONLOOM_DENSE = {
    "architectures": ["IronloomForCausalLM"],
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 88,
    "max_position_embeddings": 256,
    "model_type": "ironloom_dense",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 128,
}
IRONLOOM_MOE = changed(
    IRONLOOM_DENSE,
    {
        "hidden_size": 32,
        "mlp_only_layers": [0, 1],
        "model_type": "ironloom_moe",
        "moe_intermediate_size": 22,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "shared_expert_intermediate_size": 22,
    },
)

PLAIN_LENGTHS = {"short": 7, "long": 40}
# The windows hold 8 positions: the long prompts pass 8 - 1, 8, 8 + 1 and 3 * 8.
WINDOW_LENGTHS = {"short": 7, "long": 29}

CASES = {
    "llama": {
        "config": LLAMA,
        "lengths": PLAIN_LENGTHS,
        "files": {
            "generation_config.json": {"bos_token_id": 268, "eos_token_id": [268, 270], "transformers_version": "4.45.0"}
        },
        "twin": True,
        "quantized_twin": True,
        "tokenizer": True,
    },
    "mistral": {"config": MISTRAL, "lengths": WINDOW_LENGTHS},
    "qwen2": {"config": QWEN2, "lengths": PLAIN_LENGTHS, "twin": True},
    "qwen2-window": {
        "config": changed(QWEN2, {"max_window_layers": 1, "sliding_window": 8, "use_sliding_window": True}),
        "lengths": WINDOW_LENGTHS,
    },
    "qwen3": {"config": QWEN3, "lengths": PLAIN_LENGTHS, "twin": True},
    "gemma3": {
        "config": GEMMA3,
        "lengths": WINDOW_LENGTHS,
        "files": {
            "config.rope_parameters.json": changed(
                new_notation(
                    GEMMA3,
                    {
                        "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                    },
                ),
                {
                    "sliding_window_pattern": ...,
                    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
                },
            )
        },
        "same_answers": ["config.rope_parameters.json"],
        "twin": True,
    },
    # From 4B on, the global layers are scaled and the local ones are not; a GGUF file says only `rope.scaling.*`.
    "gemma3-linear": {
        "config": changed(GEMMA3, {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}),
        "weights_of": "gemma3",
        "lengths": WINDOW_LENGTHS,
        "twin": True,
    },
    "gemma3-pattern": {
        "config": GEMMA3_PATTERN,
        "lengths": WINDOW_LENGTHS,
        "files": {
            "config.rope_parameters.json": changed(
                new_notation(
                    GEMMA3_PATTERN,
                    {
                        "full_attention": {"factor": 8.0, "rope_theta": 20000.0, "rope_type": "linear"},
                        "sliding_attention": {"rope_theta": 500.0, "rope_type": "default"},
                    },
                ),
                {"sliding_window_pattern": ..., "layer_types": ["sliding_attention", "full_attention"] * 2},
            )
        },
        "same_answers": ["config.rope_parameters.json"],
    },
    "llama-linear": {
        "config": llama(max_position_embeddings=64, rope_scaling={"factor": 4.0, "type": "linear"}),
        "lengths": {"short": 9, "long": 70},
        "files": {
            "config.rope_parameters.json": new_notation(
                llama(max_position_embeddings=64), {"factor": 4.0, "rope_theta": 10000.0, "rope_type": "linear"}
            )
        },
        "same_answers": ["config.rope_parameters.json"],
    },
    "llama-llama3": {
        "config": LLAMA3,
        "lengths": {"short": 9, "long": 80},
        "files": {
            "config.rope_parameters.json": new_notation(LLAMA3, {**LLAMA3_SCALING, "rope_theta": 10000.0}),
        },
        "same_answers": ["config.rope_parameters.json"],
        "twin": True,
    },
    "llama-yarn": {
        "config": yarn(),
        "lengths": YARN_LENGTHS,
        "files": {
            "config.rope_parameters.json": new_notation(
                yarn(),
                {"factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 100.0, "rope_type": "yarn"},
            )
        },
        "same_answers": ["config.rope_parameters.json"],
        "twin": True,
    },
    "llama-yarn-attention-factor": {
        "config": yarn(attention_factor=1.25, beta_fast=2.0, beta_slow=0.5, type="yarn"),
        "weights_of": "llama-yarn",
        "lengths": YARN_LENGTHS,
    },
    "llama-yarn-mscale-equal": {
        "config": yarn(mscale=1.0, mscale_all_dim=1.0),
        "weights_of": "llama-yarn",
        "lengths": YARN_LENGTHS,
    },
    "llama-yarn-mscale-differs": {
        "config": yarn(mscale=0.707, mscale_all_dim=1.4),
        "weights_of": "llama-yarn",
        "lengths": YARN_LENGTHS,
    },
    "llama-yarn-not-truncated": {
        "config": yarn(truncate=False),
        "weights_of": "llama-yarn",
        "lengths": YARN_LENGTHS,
    },
    "internlm2": {
        "config": INTERNLM2,
        "lengths": PLAIN_LENGTHS,
        # Dynamic scaling changes nothing before `max_position_embeddings`; checkpoints of InternLM2.5 carry it.
        "files": {"config.dynamic.json": changed(INTERNLM2, {"rope_scaling": {"factor": 2.0, "type": "dynamic"}})},
        "twin": True,
    },
    "mixtral": {"config": MIXTRAL, "lengths": PLAIN_LENGTHS, "twin": True},
    "qwen2_moe": {"config": QWEN2_MOE, "lengths": PLAIN_LENGTHS, "twin": True},
    "qwen2_moe-mixed": {
        # Layers 1 and 3 would be routed by the step; layer 1 is named dense: only layer 3 routes.
        "config": changed(
            QWEN2_MOE,
            {
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1],
                "norm_topk_prob": True,
                "num_hidden_layers": 4,
                "vocab_size": 96,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        "lengths": PLAIN_LENGTHS,
    },
    "qwen3_moe": {"config": QWEN3_MOE, "lengths": PLAIN_LENGTHS, "twin": True},
    "qwen3_moe-mixed": {
        "config": changed(
            QWEN3_MOE,
            {
                "mlp_only_layers": [0],
                "norm_topk_prob": False,
                "num_hidden_layers": 3,
                "tie_word_embeddings": True,
                "vocab_size": 96,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        "lengths": PLAIN_LENGTHS,
    },
    "ernie4_5_moe": {
        "config": ERNIE4_5_MOE,
        "lengths": PLAIN_LENGTHS,
        "files": {
            "config.rope_parameters.json": new_notation(
                ERNIE4_5_MOE, {"rope_theta": 500000.0, "rope_type": "default"}
            )
        },
        "same_answers": ["config.rope_parameters.json"],
    },
    "ironloom_dense": {"config": IRONLOOM_DENSE, "lengths": PLAIN_LENGTHS},
    "ironloom_moe": {"config": IRONLOOM_MOE, "lengths": PLAIN_LENGTHS},
}

# name: (folder, configuration, parameters, of them active for a token)
FULL_SIZE = {
    "moe-55m": (
        "ironloom_moe",
        changed(
            IRONLOOM_MOE,
            {
                "head_dim": 64,
                "hidden_size": 512,
                "intermediate_size": 1408,
                "max_position_embeddings": 4096,
                "moe_intermediate_size": 352,
                "num_attention_heads": 8,
                "num_hidden_layers": 8,
                "num_key_value_heads": 2,
                "shared_expert_intermediate_size": 352,
                "vocab_size": 32000,
            },
        ),
        55_181_824,
        35_717_632,
    ),
    "dense-102m": (
        "ironloom_dense",
        changed(
            IRONLOOM_DENSE,
            {
                "head_dim": 64,
                "hidden_size": 768,
                "intermediate_size": 1408,
                "max_position_embeddings": 4096,
                "num_attention_heads": 12,
                "num_hidden_layers": 16,
                "num_key_value_heads": 4,
                "vocab_size": 32000,
            },
        ),
        101_671_680,
        101_671_680,
    ),
}


def real_llama(head_dim, rope_theta, max_position_embeddings, rope_scaling):
    return llama(
        hidden_size=2048,
        head_dim=head_dim,
        num_attention_heads=2048 // head_dim,
        num_key_value_heads=8,
        max_position_embeddings=max_position_embeddings,
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
    )


TABLE_POSITIONS = [0, 1, 2, 7, 63, 64, 65, 1000, 2047, 8191, 8192, 8193, 16383]
LLAMA3_REAL = {**LLAMA3_SCALING, "original_max_position_embeddings": 8192}

ROPE_TABLES = {
    "llama-3.1": (real_llama(128, 500000.0, 131072, LLAMA3_REAL), TABLE_POSITIONS),
    "llama-3.2": (real_llama(64, 500000.0, 131072, {**LLAMA3_REAL, "factor": 32.0}), TABLE_POSITIONS),
    "qwen2.5-yarn": (
        real_llama(
            128, 1000000.0, 131072, {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"}
        ),
        TABLE_POSITIONS,
    ),
    "llama-2-yarn-128k": (
        real_llama(
            128,
            10000.0,
            131072,
            {"factor": 32.0, "finetuned": True, "original_max_position_embeddings": 4096, "rope_type": "yarn"},
        ),
        TABLE_POSITIONS,
    ),
    "yarn-mscale": (
        real_llama(
            64,
            10000.0,
            163840,
            {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40.0,
                "mscale": 0.707,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
            },
        ),
        TABLE_POSITIONS,
    ),
    "linear": (real_llama(128, 10000.0, 16384, {"factor": 4.0, "rope_type": "linear"}), TABLE_POSITIONS),
}
