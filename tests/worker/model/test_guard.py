"""Models that paged attention would compute wrongly are refused, with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.registry import create_backend
from prefixd.worker.attention.sdpa import SdpaBackend
from prefixd.worker.attention.seam import (
    AttentionBackend,
    AttentionPlan,
    LayerHeads,
    LayerTraits,
)
from prefixd.worker.model.attention_hook import register_attention
from prefixd.worker.model.errors import ModelRefused, ModelUnavailable
from prefixd.worker.model.loader import load_folder
from prefixd.worker.model.numeric_probe import check_numbers, reduced_config
from tests.support.backends import every_backend, needs_triton
from tests.support.families import (
    FAMILIES,
    GPT_SHAPE,
    LATENT,
    ROUTED_EXPERTS,
    TOKEN_VECTORS,
    Family,
)
from tests.support.models import (
    CONFIGS,
    CPU,
    gpt_oss_config,
    llama_config,
    load_random,
    random_model,
)

_LONG_FACTORS = {
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
_BLOOM_SHAPE = {"vocab_size": 160, "hidden_size": 64, "n_layer": 2, "n_head": 4}
_FALCON_SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GPT_NEO_SHAPE = {"vocab_size": 160, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
_MPT_SHAPE = {"vocab_size": 160, "d_model": 64, "n_layers": 2, "n_heads": 4}
_RECURRENT = "layer 0 is of type 'linear_attention', which paged KV does not hold"
_NEVER_CALLED = "calls attention 0 times, but it has 2 layers"


def _rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    settings = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0, **settings}
    return {"rope_parameters": settings}


REFUSED: dict[str, tuple[Family, str]] = {
    # Keys that depend on the neighbours in a batch.
    "dynamic_rope": (
        Family("llama", _rope("dynamic")),
        "RoPE type 'dynamic' depends on the longest position of the batch",
    ),
    "longrope": (
        Family("phi3", _rope("longrope", **_LONG_FACTORS)),
        "RoPE type 'longrope' depends on the longest position of the batch",
    ),
    # Other masks than full and sliding ones.
    "bert": (Family("bert"), "layer 0: its attention is not causal"),
    "gemma3_text_both_ways": (
        Family("gemma3_text", {"head_dim": 16, "use_bidirectional_attention": True}),
        "layer 0: its attention is not causal",
    ),
    "gemma4_text_both_ways": (
        Family("gemma4_text", {"use_bidirectional_attention": "all", **TOKEN_VECTORS}),
        "layer 0: its attention is not causal",
    ),
    "llama4_text": (
        Family("llama4_text", {"attention_chunk_size": 8}),
        "layer 0 is of type 'chunked_attention'",
    ),
    "deepseek_v2_misshaped": (
        Family("deepseek_v2", {**LATENT, **ROUTED_EXPERTS, "num_key_value_heads": 2}),
        "its own attention fails on a small random copy: The size of tensor",
    ),
    "deepseek_v32": (
        Family("deepseek_v32"),
        r"layer 0 is of type '(indexed|deepseek_sparse)_attention'",
    ),
    "doge": (Family("doge"), "layer 0: attention gets unknown arguments: attention_mask"),
    "gpt_neo": (
        Family("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, shape=_GPT_NEO_SHAPE),
        "its attention cannot be replaced: 'prefixd_paged' is unknown to it",
    ),
    "phimoe_window": (
        # Its masks have a window of which its attention is not told.
        Family("phimoe", {"sliding_window": 8, "num_local_experts": 4}),
        r"paged attention and the model's own differ by .*, above 1e-04",
    ),
    # Biases by distance.
    "bloom": (Family("bloom", shape=_BLOOM_SHAPE), _NEVER_CALLED),
    "falcon_alibi": (Family("falcon", {"alibi": True}, _FALCON_SHAPE), r"\(ALiBi\)"),
    "mpt": (Family("mpt", shape=_MPT_SHAPE), r"\(ALiBi\)"),
    # Code of their own around attention.
    "falcon": (
        Family("falcon", shape=_FALCON_SHAPE),
        "its attention cannot be replaced: 'prefixd_paged' is unknown to it",
    ),
    "diffllama": (Family("diffllama"), "calls attention 4 times, but it has 2 layers"),
    "hrm_text": (Family("hrm_text"), r"its \d+ layers share \d attention modules"),
    "openai-gpt": (Family("openai-gpt", shape=GPT_SHAPE), _NEVER_CALLED),
    "xglm": (
        Family("xglm", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}),
        _NEVER_CALLED,
    ),
    # State that is no KV, in some layers or in all.
    "bamba": (Family("bamba"), _RECURRENT),
    "falcon_h1": (Family("falcon_h1"), "layer 0 is of type 'hybrid'"),
    "falcon_mamba": (Family("falcon_mamba"), _RECURRENT),
    "granitemoehybrid": (
        Family("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
        _RECURRENT,
    ),
    "jamba": (Family("jamba"), _RECURRENT),
    "lfm2": (
        Family("lfm2", {"layer_types": ["conv", "full_attention"]}),
        "layer 0 is of type 'conv'",
    ),
    "mamba": (Family("mamba"), _RECURRENT),
    "nemotron_h": (Family("nemotron_h"), _RECURRENT),
    "qwen3_next": (
        Family("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
        _RECURRENT,
    ),
    "recurrent_gemma": (Family("recurrent_gemma"), f"{_RECURRENT}|{_NEVER_CALLED}"),
    "rwkv": (Family("rwkv", {"context_length": 128}), _NEVER_CALLED),
    # Two stacks.
    "bart": (Family("bart", {"d_model": 64}), "it is an encoder-decoder"),
    "t5": (Family("t5", {"d_model": 64}), "it is an encoder-decoder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_with_its_reason(name: str) -> None:
    """Each family that would be silently wrong is refused, by name."""
    family, reason = REFUSED[name]
    with pytest.raises(ModelRefused, match=reason) as raised:
        random_model(family.config())
    assert str(raised.value).startswith(f"model {family.model_type!r} is refused: ")


def test_the_document_lists_what_is_served_and_refused(repository_folder: Path) -> None:
    """docs/models.md names every family of the sweep, and every refused one."""
    text = (repository_folder / "docs/models.md").read_text()
    _, served, refused = re.split(r"^## .*$", text, flags=re.MULTILINE)
    named = re.findall(r"`([a-z0-9_-]+)`", served)
    assert {family.model_type for family in FAMILIES.values()} == set(named) - {"strict"}
    assert {family.model_type for family, _ in REFUSED.values()} - {
        "llama",
        "phi3",
        "deepseek_v2",
    } == set(re.findall(r"`([a-z0-9_-]+)`", refused)) - {"dynamic", "longrope", "triton"}


def test_a_mask_that_no_configuration_told_of_shows_in_the_numbers() -> None:
    """Chunked attention is refused by its layer type; without that, the probe would find it."""
    family = Family(
        "llama4_text",
        {"attention_chunk_size": 8, "intermediate_size_mlp": 96, "num_local_experts": 2},
    )
    register_attention()
    with pytest.raises(ModelRefused, match=r"differ by .*, above 1e-04"):
        check_numbers(family.config(), SdpaBackend(), device=CPU, model_name="subject")


@pytest.mark.parametrize("backend", every_backend())
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"gpt_oss"}))
def test_served_families_pass(family: str, backend: str) -> None:
    """The guard does not refuse what works."""
    assert len(_load(CONFIGS[family](), create_backend(backend)).geometry) == 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "strict"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_on_exact_backends(family: str, backend: str) -> None:
    """All but mixtures of experts where bitwise equality is promised."""
    chosen = create_backend(backend)
    if FAMILIES[family].has_experts and chosen.is_bitwise_reproducible:
        with pytest.raises(ModelRefused, match="not bitwise reproducible"):
            _load(FAMILIES[family].config(), chosen)
    else:
        assert _load(FAMILIES[family].config(), chosen).geometry


def test_experts_are_refused_where_bitwise_equality_is_promised() -> None:
    """Routing decides which rows share a matrix product, so neighbours change the last bits."""
    assert random_model(gpt_oss_config()).geometry
    with pytest.raises(ModelRefused, match="not bitwise reproducible"):
        _load(gpt_oss_config(), create_backend("strict"))


@needs_triton
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"head_dim": 272},
            "its heads of 272 elements are wider than the kernels' tiles of 256",
        ),
        (
            {"hidden_size": 258, "num_attention_heads": 129, "num_key_value_heads": 1},
            "its 129 query heads per kv head are more than the 128 of the kernels' tiles",
        ),
    ],
    ids=["wide_heads", "many_heads"],
)
def test_triton_refuses_heads_without_tiles(settings: dict[str, Any], reason: str) -> None:
    """The error names the layer, the heads and the limit, and who takes them."""
    config = llama_config(**settings)
    message = f"'subject' is refused: layer 0: {reason}; --attention-backend torch takes them"
    with pytest.raises(ModelRefused, match=message):
        _load(config, create_backend("triton"))
    assert _load(config, create_backend("torch")).geometry


def _wider_window(traits: LayerTraits) -> LayerTraits:
    window = traits.window_token_count
    return traits if window is None else replace(traits, window_token_count=window + 1)


FAULTS: dict[str, tuple[str, Callable[[LayerTraits], LayerTraits]]] = {
    "window_too_wide_by_one": ("gemma3", _wider_window),
    "window_where_there_is_none": ("llama", lambda t: replace(t, window_token_count=25)),
    "soft_cap_dropped": ("gemma2", lambda t: replace(t, softcap=None)),
    "sinks_dropped": ("gpt_oss", lambda t: replace(t, sinks=None)),
    "scaling_off_by_a_percent": ("llama", lambda t: replace(t, scaling=1.01 * t.scaling)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_attention_is_refused_by_its_numbers(fault: str) -> None:
    """What is wrong in few places, or by little, shows as a difference to eager attention."""
    family, change = FAULTS[fault]
    with pytest.raises(ModelRefused, match=r"differ by .*, above 1e-04"):
        _load(CONFIGS[family](), _ChangedTraits(change))


def test_layer_that_the_backend_does_not_serve_is_refused() -> None:
    """The backend's own reason arrives, with the layer."""
    with pytest.raises(ModelRefused, match="layer 0: no soft caps here"):
        _load(CONFIGS["gemma2"](), _WithoutSoftcap())


def test_argument_that_nobody_understands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that a model hands to attention must not be dropped silently."""
    forward = transformers.models.llama.modeling_llama.LlamaAttention.forward

    def forward_with_bias(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, position_bias=torch.zeros(1), **kwargs)

    monkeypatch.setattr(
        transformers.models.llama.modeling_llama.LlamaAttention, "forward", forward_with_bias
    )
    with pytest.raises(ModelRefused, match="attention gets unknown arguments: position_bias"):
        random_model(llama_config())


def test_folder_without_config_is_unavailable(tmp_path: Path) -> None:
    """The error names the folder."""
    with pytest.raises(ModelUnavailable, match=r"holds no config\.json"):
        _load_folder(tmp_path)


def test_folder_that_lacks_weights_is_unavailable(tmp_path: Path) -> None:
    """transformers would make the missing weights up; that must not go unseen."""
    model = random_model(llama_config())
    state = model.network.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.network.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelUnavailable, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj"):
        _load_folder(tmp_path)


def test_folder_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    """Weights come back as they were saved; there is no tokenizer."""
    model = random_model(llama_config())
    model.network.save_pretrained(tmp_path)
    loaded = _load_folder(tmp_path)
    assert loaded.tokenizer is None
    assert frozenset({2}) == loaded.end_token_ids
    saved = model.network.state_dict()
    assert all(torch.equal(saved[k], v) for k, v in loaded.network.state_dict().items())


def test_reduced_config_keeps_every_layer_type() -> None:
    """The copy holds the first layers up to the last type to appear, and leaves its source."""
    layer_types = ["sliding_attention"] * 5 + ["full_attention"]
    config = CONFIGS["gemma3"]()
    config.num_hidden_layers, config.layer_types = 12, layer_types * 2
    config.sliding_window = 4_096
    reduced = reduced_config(config)
    assert (reduced.num_hidden_layers, reduced.layer_types) == (6, layer_types)
    assert reduced.sliding_window < 10, "the probe's sequences must reach beyond the window"
    assert (config.num_hidden_layers, len(config.layer_types)) == (12, 12)
    assert config.sliding_window == 4_096


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "gemma3_text", "gemma4_text", "gpt_oss", "mixtral", "qwen3_moe"]
)
def test_reduced_config_of_a_real_size_is_small(model_type: str) -> None:
    """Whatever else is large (experts, vocabularies of layers), only heads keep their size."""
    auto_model: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        network = auto_model.from_config(reduced_config(config))
    assert sum(weight.numel() for weight in network.parameters()) < 400_000_000
    text = network.config.get_text_config()
    assert text.num_attention_heads == config.get_text_config().num_attention_heads


class _ChangedTraits(SdpaBackend):
    """The fast backend, which takes layers for others."""

    def __init__(self, change: Callable[[LayerTraits], LayerTraits]) -> None:
        self._change = change

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        inner, change = super().plan(batch), self._change

        class Plan:
            def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
                return inner.attend(query, layer, change(traits))

        return Plan()


class _WithoutSoftcap(SdpaBackend):
    """A backend that lacks a feature."""

    def refusal(self, heads: LayerHeads, traits: LayerTraits) -> str | None:
        return None if traits.softcap is None else "no soft caps here"


def _load(config: Any, backend: AttentionBackend) -> Any:
    return load_random(config, name="subject", seed=1, backend=backend)


def _load_folder(folder: Path) -> Any:
    return load_folder(
        folder, name="subject", backend=SdpaBackend(), device=CPU, dtype=torch.float32
    )
