"""Models that paged attention would compute wrongly are refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.registry import create_backend
from prefixd.worker.attention.sdpa import SdpaBackend
from prefixd.worker.attention.seam import AttentionBackend, AttentionPlan, LayerTraits
from prefixd.worker.model.errors import ModelRefused, ModelUnavailable
from prefixd.worker.model.loader import load_folder
from prefixd.worker.model.numeric_probe import reduced_config
from tests.support.backends import every_backend
from tests.support.models import (
    CONFIGS,
    CPU,
    gpt_oss_config,
    llama_config,
    load_random,
    random_model,
)

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = {"rope_theta": 10_000.0, "factor": 2.0}
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def _alibi_config() -> Any:
    return transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)


REFUSED = {
    "dynamic_rope": (
        lambda: llama_config(rope_parameters={"rope_type": "dynamic", **_ROPE}),
        "RoPE type 'dynamic' depends on the longest position",
    ),
    "longrope": (
        lambda: llama_config(
            rope_parameters={
                "rope_type": "longrope",
                "original_max_position_embeddings": 128,
                **_ROPE,
                **_FACTORS,
            }
        ),
        "RoPE type 'longrope' depends on the longest position",
    ),
    "linear_attention": (
        lambda: transformers.Qwen3NextConfig(
            **_SMALL, layer_types=["linear_attention", "full_attention"]
        ),
        "layer 0 is of type 'linear_attention'",
    ),
    "chunked_attention": (
        lambda: transformers.Llama4TextConfig(**_SMALL, attention_chunk_size=8),
        "layer 0 is of type 'chunked_attention'",
    ),
    "state_space": (
        lambda: transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2),
        "layer 0 is of type 'linear_attention'",
    ),
    "encoder_decoder": (
        lambda: transformers.T5Config(vocab_size=128, d_model=64, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "not_causal": (
        lambda: transformers.BertConfig(**_SMALL, intermediate_size=64),
        "layer 0: its attention is not causal",
    ),
    "own_attention": (
        lambda: transformers.FalconConfig(**_SMALL),
        "attention cannot be replaced",
    ),
    "attention_never_called": (
        _alibi_config,
        "calls attention 0 times, but it has 2 layers",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_model_is_refused_with_its_reason(name: str) -> None:
    """Each kind that would be silently wrong is named."""
    config, reason = REFUSED[name]
    with pytest.raises(ModelRefused, match=reason) as raised:
        random_model(config())
    assert raised.value.model_name in str(raised.value)


@pytest.mark.parametrize("backend", every_backend())
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"gpt_oss"}))
def test_served_families_pass(family: str, backend: str) -> None:
    """The guard does not refuse what works."""
    assert len(_load(CONFIGS[family](), create_backend(backend)).geometry) == 3


def test_experts_are_refused_where_bitwise_equality_is_promised() -> None:
    """Routing decides which rows share a matrix product, so neighbours change the last bits."""
    assert random_model(gpt_oss_config()).geometry
    with pytest.raises(ModelRefused, match="not bitwise reproducible"):
        _load(gpt_oss_config(), create_backend("strict"))


@pytest.mark.parametrize(
    ("window_of", "family"),
    [
        (lambda window: None if window is None else window + 1, "gemma3"),
        (lambda window: 25 if window is None else window, "llama"),
    ],
    ids=["window_too_wide_by_one", "window_where_there_is_none"],
)
def test_wrong_mask_is_refused_by_its_numbers(window_of: Any, family: str) -> None:
    """A mask that is wrong in few places shows as a difference to eager attention."""
    with pytest.raises(ModelRefused, match=r"differ by .*, above 1e-04"):
        _load(CONFIGS[family](), _ChangedWindow(window_of))


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


class _ChangedWindow:
    """The fast backend with another window than the layer asks for."""

    is_bitwise_reproducible = False

    def __init__(self, window_of: Any) -> None:
        self._window_of = window_of
        self._inner = SdpaBackend()

    def refusal(self, traits: LayerTraits) -> str | None:
        return self._inner.refusal(traits)

    def padded_row_count(self, token_count: int) -> int:
        return self._inner.padded_row_count(token_count)

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        inner, window_of = self._inner.plan(batch), self._window_of

        class Plan:
            def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
                changed = LayerTraits(
                    traits.scaling,
                    window_of(traits.window_token_count),
                    traits.softcap,
                    traits.sinks,
                )
                return inner.attend(query, layer, changed)

        return Plan()


class _WithoutSoftcap(SdpaBackend):
    """A backend that lacks a feature."""

    def refusal(self, traits: LayerTraits) -> str | None:
        return None if traits.softcap is None else "no soft caps here"


def _load(config: Any, backend: AttentionBackend) -> Any:
    return load_random(config, name="subject", seed=1, backend=backend)


def _load_folder(folder: Path) -> Any:
    return load_folder(
        folder, name="subject", backend=SdpaBackend(), device=CPU, dtype=torch.float32
    )
