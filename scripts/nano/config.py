"""The configuration of the nano model: every part of V4.1 at a width that decodes pleasantly on a laptop."""

from __future__ import annotations

from typing import Any

from deepinfer_jax import engram_hash
from deepinfer_jax.config import ModelConfig

SEQUENCE = 1024
"""Tokens of a training sequence."""

NOISE = "<｜place▁holder▁no▁0｜>"
"""The special token that stands where the drafter is to guess one."""

_ENGRAM = {"engram_layer_ids": [1, 3], "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_vocab_size": 2500}

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 8192,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    # The release has 1e-20, which makes gradients of rows that are zero too large to train with.
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": SEQUENCE,
    },
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 64,
    # Two window layers; a source that compresses 2:1 and a layer that re-uses it; a source 1:1 that publishes the
    # candidate pool, a re-use, a re-index inside the pool, a re-use. Then three draft stages.
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "hc_mult": 4,
    # The release iterates 20 times. Matrices of 4 x 4 are doubly stochastic to 1e-3 after 6, at a third of the kernels.
    "hc_sinkhorn_iters": 6,
    "hc_eps": 1e-06,
    **_ENGRAM,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def nano_config(compressed_vocab_size: int, noise_token_id: int, **changes: Any) -> ModelConfig:
    """The configuration for a tokenizer.

    Args:
        compressed_vocab_size: Distinct ids of its compressed token map.
        noise_token_id: The special token that stands for drafted positions.
        changes: Other values of `text_config`, for tests.
    """
    rows = engram_hash.primes(
        tuple(_ENGRAM["engram_layer_ids"]), _ENGRAM["engram_max_ngram_size"], _ENGRAM["engram_n_heads"],
        changes.get("engram_vocab_size", _ENGRAM["engram_vocab_size"]),
    )  # fmt: skip
    text = _TEXT | {
        "engram_num_embeddings": [sum(columns) for columns in rows],
        "engram_compressed_vocab_size": compressed_vocab_size,
        "dspark_noise_token_id": noise_token_id,
    }
    return ModelConfig.from_dict(
        {
            "model_type": "deepseek_v41",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            },
            "text_config": text | changes,
        },
        source="nano",
    )
