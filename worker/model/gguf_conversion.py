"""Converts a GGUF file of the Llama architecture to a folder that transformers loads quickly.

transformers can read such a file itself, but takes many times as long, on every start, and needs
one more package for it. Here every tensor is dequantized once. Layout of the tensors: the GGUF
specification and llama.cpp's converter, which interleaves the two rotary halves of each head.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufUnsupported(Exception):
    """The file holds something this conversion does not know."""


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (float32) and the tokenizer with its chat template.

    Args:
        gguf_file: of the Llama architecture.
        folder: exists; its files are overwritten.

    Raises:
        GgufUnsupported: another architecture, or a tensor of unknown name.
    """
    reader = GGUFReader(gguf_file)
    config = _config_of(reader)
    tensors = _tensors_of(reader)
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _config_of(reader: GGUFReader) -> LlamaConfig:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise GgufUnsupported(f"architecture {architecture!r} is not llama")
    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _field(reader, "llama.rope.freq_base"),
        },
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )


def _tensors_of(reader: GGUFReader) -> dict[str, torch.Tensor]:
    head_counts = {
        "attn_q.weight": _field(reader, "llama.attention.head_count"),
        "attn_k.weight": _field(reader, "llama.attention.head_count_kv"),
    }
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weights = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        suffix = tensor.name.split(".", 2)[-1]
        if suffix in head_counts:
            weights = _halves_apart(weights, head_count=head_counts[suffix])
        tensors[_name_of(tensor.name)] = torch.from_numpy(np.array(weights, order="C"))
    return tensors


def _name_of(gguf_name: str) -> str:
    if gguf_name in _MODEL_TENSORS:
        return _MODEL_TENSORS[gguf_name]
    parts = gguf_name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}"
    raise GgufUnsupported(f"tensor {gguf_name!r} is unknown")


def _halves_apart(weights: NDArray[np.float32], *, head_count: int) -> NDArray[np.float32]:
    """Undoes the interleaving: rows (head, pair, half) become (head, half, pair)."""
    row_count, column_count = weights.shape
    paired = weights.reshape(head_count, row_count // head_count // 2, 2, column_count)
    return paired.swapaxes(1, 2).reshape(row_count, column_count)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    if field is None:
        raise GgufUnsupported(f"field {name!r} is missing")
    return field.contents()
