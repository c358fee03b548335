"""One or more tiny configurations of every model family that the guard lets pass.

They differ in what attention is asked for: how heads are grouped, how wide keys and values are,
windows, soft caps, sinks, where positions come from. A family that the installed transformers does
not have yet is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Wide initial weights make attention far from uniform, so that a wrong mask shows.
SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What most families call the same."""

GPT_SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The same in the words of GPT-2 and its kin."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
"""Experts in groups beside one that all tokens share, behind a dense layer."""

LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
"""Keys and values come out of a narrow vector; keys are wider than values."""

_MIXED_LAYERS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
TOKEN_VECTORS = {"vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 16}
"""Each layer adds a vector of its own for each token."""

# The last two layers read the keys and values of the first two.
_SHARED_KV = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **TOKEN_VECTORS,
}
_ROPE = {"rope_theta": 10_000.0, "factor": 4.0}


@dataclass(frozen=True, slots=True)
class Family:
    """A configuration to be made.

    Attributes:
        model_type: what transformers calls the family.
        settings: of the configuration, beside ``shape``.
        shape: small sizes in the family's own words.
        has_experts: whether a pass's tokens are shared out among experts, so that on no backend
            the bits of a row are its own.
        since: the release of transformers whose code for it is meant.
    """

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=lambda: SHAPE)
    has_experts: bool = False
    since: tuple[int, int] = (5, 17)

    def config(self) -> PreTrainedConfig:
        """A fresh configuration; skips the test where the installed transformers lacks it."""
        if self.model_type not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {self.model_type}")
        if tuple(map(int, transformers.__version__.split(".")[:2])) < self.since:
            pytest.skip(f"this transformers is too old for {self.model_type}")
        return AutoConfig.for_model(self.model_type, **{**self.shape, **self.settings})


def _gpt(model_type: str, **settings: Any) -> Family:
    return Family(model_type, settings, GPT_SHAPE)


def _new_gpt(model_type: str, **settings: Any) -> Family:
    """One whose attention could not be replaced in older releases."""
    return Family(model_type, settings, GPT_SHAPE, since=(5, 24))


def _experts(model_type: str, **settings: Any) -> Family:
    return Family(model_type, settings, has_experts=True)


def _width(width: int) -> Family:
    """Llama with heads of one width, as wide as kernels have tiles for."""
    return Family("llama", {"head_dim": width, "num_attention_heads": 2, "num_key_value_heads": 1})


FAMILIES: dict[str, Family] = {
    # Llama, in every grouping, width and kind of rotary table.
    "llama": Family("llama"),
    "llama_one_kv_head": Family("llama", {"num_key_value_heads": 1}),
    "llama_kv_head_per_query_head": Family("llama", {"num_key_value_heads": 4}),
    "llama_three_kv_heads": Family(
        "llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    ),
    "llama_width_64": _width(64),
    "llama_width_80": _width(80),
    "llama_width_96": _width(96),
    "llama_width_128": _width(128),
    "llama_width_256": _width(256),
    "llama_biases": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear_rope": Family("llama", {"rope_parameters": {"rope_type": "linear", **_ROPE}}),
    "llama_yarn_rope": Family(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "original_max_position_embeddings": 128,
                **_ROPE,
            }
        },
    ),
    "llama_llama3_rope": Family(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "original_max_position_embeddings": 128,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **_ROPE,
            }
        },
    ),
    # Dense ones.
    "apertus": Family("apertus"),
    "arcee": Family("arcee"),
    "bitnet": Family("bitnet"),
    "cohere": Family("cohere", {"logit_scale": 1.0}),
    "ernie4_5": Family("ernie4_5", {"head_dim": 16}),
    "exaone": Family("exaone"),
    "gemma": Family("gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "glm": Family("glm", {"head_dim": 16}),
    "glm4": Family("glm4", {"head_dim": 16}),
    "granite": Family("granite", {"attention_multiplier": 0.1}),
    "helium": Family("helium", {"head_dim": 16}),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", {"head_dim": 16}),
    "hyperclovax": Family("hyperclovax"),
    "internlm3": Family("internlm3", {"head_dim": 16}),
    "jais2": Family("jais2"),
    "nanochat": Family("nanochat"),
    "nemotron": Family("nemotron"),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "persimmon": Family("persimmon"),
    "phi": Family("phi"),
    "phi3": Family("phi3"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", {"head_dim": 32}),
    "seed_oss": Family("seed_oss", {"head_dim": 16}),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0], "layer_types": None}),
    "stablelm": Family("stablelm"),
    # GPT-2's kin.
    "biogpt": Family("biogpt"),
    "codegen": _new_gpt("codegen", rotary_dim=8, n_ctx=256),
    "ctrl": Family("ctrl", {"dff": 96}, GPT_SHAPE),
    "gpt2": _gpt("gpt2"),
    "gpt2_unscaled": _gpt("gpt2", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True),
    "gpt_bigcode": _new_gpt("gpt_bigcode"),
    "gpt_bigcode_kv_head_per_query_head": _new_gpt("gpt_bigcode", multi_query=False),
    "gpt_neox": Family("gpt_neox"),
    "gptj": _new_gpt("gptj", rotary_dim=8),
    "opt": Family("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    # Windows, in every layer or in some.
    "cohere2": Family("cohere2", {"logit_scale": 1.0, **_MIXED_LAYERS}),
    "cwm": Family("cwm", {"head_dim": 16, **_MIXED_LAYERS}),
    "exaone4": Family("exaone4", {**_MIXED_LAYERS}),
    "gemma2": Family("gemma2", {"head_dim": 16, "attn_logit_softcapping": 5.0, **_MIXED_LAYERS}),
    "gemma2_short_window": Family(
        "gemma2",
        {"head_dim": 16, "attn_logit_softcapping": 5.0, **_MIXED_LAYERS, "sliding_window": 3},
    ),
    "gemma3_text": Family("gemma3_text", {"head_dim": 16, **_MIXED_LAYERS}),
    "gemma3n_text": Family(
        "gemma3n_text",
        {
            **_SHARED_KV,
            "laurel_rank": 8,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4_text": Family(
        "gemma4_text",
        {"head_dim": 16, **TOKEN_VECTORS, **_MIXED_LAYERS, "global_head_dim": 32},
    ),
    "gemma4_text_shared_kv": Family("gemma4_text", {**_SHARED_KV, "global_head_dim": 32}),
    "granite_swa": Family("granite_swa", {**_MIXED_LAYERS}),
    "ministral": Family("ministral", {"head_dim": 16, **_MIXED_LAYERS}),
    "ministral3": Family("ministral3", {"head_dim": 16}),
    "mistral": Family("mistral", {"sliding_window": 20}),
    "modernbert-decoder": Family("modernbert-decoder", {"local_attention": 20, **_MIXED_LAYERS}),
    "mistral_full": Family("mistral", {"sliding_window": None}),
    "olmo3": Family("olmo3", {**_MIXED_LAYERS}),
    "phi3_window": Family("phi3", {"sliding_window": 20}),
    "qwen2_mixed": Family("qwen2", {"use_sliding_window": True, **_MIXED_LAYERS}),
    "qwen3_mixed": Family("qwen3", {"head_dim": 16, "use_sliding_window": True, **_MIXED_LAYERS}),
    "starcoder2": Family("starcoder2", {"sliding_window": 20}),
    "vaultgemma": Family("vaultgemma", {"head_dim": 16, **_MIXED_LAYERS}),
    # Keys wider than values.
    "deepseek_v2": Family("deepseek_v2", {**LATENT, **ROUTED_EXPERTS}, has_experts=True),
    "deepseek_v3": Family("deepseek_v3", {**LATENT, **ROUTED_EXPERTS}, has_experts=True),
    "glm4_moe_lite": Family("glm4_moe_lite", {**LATENT, **ROUTED_EXPERTS}, has_experts=True),
    "minicpm3": Family("minicpm3", {**LATENT}),
    "youtu": Family("youtu", {**LATENT}),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {"head_dim": 16, "v_head_dim": 12, **_MIXED_LAYERS, **ROUTED_EXPERTS},
        has_experts=True,
    ),
    # Mixtures of experts.
    "afmoe": Family("afmoe", {"head_dim": 16, "num_dense_layers": 1, **_EXPERTS, **_MIXED_LAYERS}),
    "dots1": _experts("dots1", **ROUTED_EXPERTS),
    "ernie4_5_moe": _experts(
        "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, head_dim=16
    ),
    "flex_olmo": _experts("flex_olmo", **_EXPERTS),
    "glm4_moe": _experts("glm4_moe", head_dim=16, **ROUTED_EXPERTS),
    "gpt_oss": _experts("gpt_oss", head_dim=16, **_LOCAL_EXPERTS, **_MIXED_LAYERS),
    "granitemoe": _experts("granitemoe", **_LOCAL_EXPERTS),
    "granitemoehybrid_attention": _experts(
        "granitemoehybrid", layer_types=["attention"] * 2, **_LOCAL_EXPERTS
    ),
    "granitemoeshared": _experts("granitemoeshared", **_LOCAL_EXPERTS),
    "hunyuan_v1_moe": _experts("hunyuan_v1_moe", head_dim=16, num_experts=4, moe_topk=2),
    "jetmoe": _experts("jetmoe", kv_channels=16, **_LOCAL_EXPERTS),
    "longcat_flash": _experts(
        "longcat_flash",
        **LATENT,
        num_layers=1,  # each holds two attention layers
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=1,
        moe_topk=2,
    ),
    "minimax_m2": _experts("minimax_m2", head_dim=16, **_LOCAL_EXPERTS),
    "mixtral": _experts("mixtral", sliding_window=20, **_LOCAL_EXPERTS),
    "olmoe": _experts("olmoe", **_EXPERTS),
    "phimoe": _experts("phimoe", sliding_window=None, **_LOCAL_EXPERTS),
    "qwen2_moe": _experts("qwen2_moe", shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3_moe": _experts("qwen3_moe", head_dim=16, **_EXPERTS),
    "solar_open": _experts("solar_open", head_dim=16, **ROUTED_EXPERTS),
}
"""By name; a family with several configurations names what is special."""
