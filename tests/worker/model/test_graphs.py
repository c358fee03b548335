"""Recorded passes of decode against the same passes run one by one, and when they are taken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.worker.attention.batch import pack_tables
from prefixd.worker.attention.registry import create_backend
from prefixd.worker.attention.seam import AttentionBackend, RecordableBackend
from prefixd.worker.model import graphs
from prefixd.worker.model.forward import Chunk, ForwardPass, flatten
from prefixd.worker.model.graphs import (
    CudaGraphRecorder,
    GraphRecorder,
    context_token_counts,
    row_counts,
)
from prefixd.worker.model.graphs_decode import DecodeGraphs
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.model.weights import ModelWeights
from prefixd.worker.sampling import Draw, SamplingOptions
from tests.support.graphs import CpuRecorder, DenseBackend
from tests.support.models import (
    gpt_oss_config,
    llama_config,
    mixed_config,
    random_model,
    random_tokens,
)

BLOCK_SIZE = 8
BLOCK_COUNT = 200
ROW_COUNT_MAX = 5
DENSE = DenseBackend()
CONFIGS = {"llama": llama_config, "mixed": mixed_config, "gpt_oss": gpt_oss_config}


class Recorded:
    """A model with recordings, and the same model without; each with a pool of its own."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        kv_dtype: torch.dtype = torch.float32,
        backend: AttentionBackend = DENSE,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self.model = model
        self.recorded_kv, self.plain_kv = _pool(model, kv_dtype), _pool(model, kv_dtype)
        assert isinstance(backend, RecordableBackend)
        self.graphs = DecodeGraphs(
            model,
            self.recorded_kv,
            backend,
            recorder or CpuRecorder(),
            row_count_max=ROW_COUNT_MAX,
            context_token_count_max=model.context_token_count_max,
        )
        self.graphs.record()
        self.recorded = ModelRunner(model, self.recorded_kv, backend, self.graphs)
        self.plain = ModelRunner(model, self.plain_kv, backend)


class Growing:
    """Sequences that grow by a token per step, on tables that were shuffled once."""

    def __init__(self, model: LoadedModel, contexts: Sequence[int], *, seed: int) -> None:
        self._random = random.Random(seed)
        blocks = list(range(1, BLOCK_COUNT))
        self._random.shuffle(blocks)
        self._below = model.vocabulary_size
        self.contexts = list(contexts)
        self.tokens = [random_tokens(n, below=self._below, seed=n) for n in contexts]
        self.tables = []
        for context in contexts:
            count = context // BLOCK_SIZE + 3
            self.tables.append(
                [[blocks.pop() for _ in range(count)] for _ in range(len(model.groups))]
            )

    def prompts(self) -> ForwardPass:
        """All tokens but the last of each."""
        return flatten([self._chunk(i, 0, n - 1) for i, n in enumerate(self.contexts)])

    def step(self) -> ForwardPass:
        """The next token of some of them, in any order."""
        count = self._random.randint(1, min(ROW_COUNT_MAX, len(self.contexts)))
        chosen = self._random.sample(range(len(self.contexts)), count)
        forward = flatten([self._chunk(i, self.contexts[i] - 1, self.contexts[i]) for i in chosen])
        for index in chosen:
            self.tokens[index].append(self._random.randrange(3, self._below))
            self.contexts[index] += 1
        return forward

    def _chunk(self, index: int, start: int, end: int) -> Chunk:
        tables, size = self.tables[index], BLOCK_SIZE
        slots = [[t[p // size] * size + p % size for p in range(start, end)] for t in tables]
        return Chunk(self.tokens[index][start:end], start, tables, slots, end - start)


def _pool(model: LoadedModel, kv_dtype: torch.dtype = torch.float32) -> PagedKv:
    return PagedKv(
        model.page_geometry,
        block_count=BLOCK_COUNT,
        block_size=BLOCK_SIZE,
        dtype=kv_dtype,
        device=model.device,
    )


def _draws(count: int, *, seed: int) -> list[Draw]:
    """Greedy and drawn rows beside each other."""
    options = [
        SamplingOptions(),
        SamplingOptions(temperature=1.0, seed=seed),
        SamplingOptions(temperature=0.7, top_k=5, top_p=0.9, seed=seed),
    ]
    return [Draw(options[(seed + row) % 3], seed + row) for row in range(count)]


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0.0)


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings for contexts of up to 24 and 64 tokens, and as long as the model takes."""
    monkeypatch.setattr(graphs, "CONTEXT_TOKEN_COUNTS", (24, 64))


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    """A tiny model of one KV group."""
    return random_model(llama_config())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_recorded_steps_are_the_plain_steps(family: str) -> None:
    """Twelve steps of random rows: logits, tokens and stored KV; no Python of the model runs."""
    check_steps(Recorded(random_model(CONFIGS[family]())))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_graphs_of_a_gpu_are_the_plain_steps(family: str) -> None:
    """The same with CUDA graphs of the kernels."""
    device = torch.device("cuda")
    model = replace(random_model(CONFIGS[family]()), device=device)
    model.network.to(device)
    recorder = CudaGraphRecorder(device)
    check_steps(Recorded(model, backend=create_backend("triton"), recorder=recorder))


def check_steps(pair: Recorded) -> None:
    """Compares twelve steps of random rows."""
    growing = Growing(pair.model, (2, 20, 23, 61, 90), seed=7)
    prompts = growing.prompts()
    _assert_close(pair.recorded.run(prompts), pair.plain.run(prompts))
    for step in range(12):
        forward = growing.step()
        draws = _draws(forward.token_count, seed=step)
        expected = pair.plain.run(forward)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pair.model.network, "forward", None)
            actual = pair.recorded.run(forward).clone()
            drawn = pair.recorded.draw(forward, draws).tolist()
        _assert_close(actual, expected)
        assert pair.plain.draw(forward, draws).tolist() == drawn
    for page in range(pair.plain_kv.page_count):
        for actual_layer, expected_layer in zip(
            (pair.recorded_kv.layer(page).keys, pair.recorded_kv.layer(page).values),
            (pair.plain_kv.layer(page).keys, pair.plain_kv.layer(page).values),
            strict=True,
        ):
            _assert_close(actual_layer[BLOCK_SIZE:], expected_layer[BLOCK_SIZE:])


@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8_DTYPE])
def test_recorded_steps_store_8_bits(llama: LoadedModel, kv_dtype: torch.dtype) -> None:
    """Quantizing is part of the recording: elements and scales are those of the plain steps."""
    pair = Recorded(llama, kv_dtype=kv_dtype)
    growing = Growing(llama, (2, 20, 23), seed=9)
    prompts = growing.prompts()
    pair.recorded.run(prompts)
    pair.plain.run(prompts)
    for _ in range(4):
        forward = growing.step()
        expected = pair.plain.run(forward)
        scale = float(expected.abs().max())
        actual = pair.recorded.run(forward)
        torch.testing.assert_close(actual, expected, atol=0.02 * scale, rtol=0.0)
    recorded, plain = pair.recorded_kv.layer(0), pair.plain_kv.layer(0)
    torch.testing.assert_close(recorded.key_scales[BLOCK_SIZE:], plain.key_scales[BLOCK_SIZE:])
    # Padding moves a sum by its last bit, and with it now and then an element by one step.
    differs = recorded.keys.view(torch.uint8) != plain.keys.view(torch.uint8)
    stored = plain.key_scales[:, :, None] * torch.ones_like(differs) != 0
    assert differs[BLOCK_SIZE:].sum() < 0.01 * stored[BLOCK_SIZE:].sum()


def test_recording_writes_to_the_padding_block_only(llama: LoadedModel) -> None:
    """A pool that holds something when recordings are made still holds it afterwards."""
    kv = _pool(llama)
    for page in range(kv.page_count):
        kv.layer(page).keys.fill_(3.0)
    backend = DenseBackend()
    graphs_of_two = DecodeGraphs(
        llama, kv, backend, CpuRecorder(), row_count_max=2, context_token_count_max=100
    )
    graphs_of_two.record()
    for page in range(kv.page_count):
        assert (kv.layer(page).keys[1:] == 3.0).all()


def test_a_replay_reads_nothing_that_an_earlier_pass_left(llama: LoadedModel) -> None:
    """One row after five: rows that are padding now store to the padding block."""
    pair = Recorded(llama)
    growing = Growing(llama, (9, 10, 11, 12, 13), seed=1)
    pair.recorded.run(growing.prompts())
    five = flatten([growing._chunk(i, n - 1, n) for i, n in enumerate(growing.contexts)])
    pair.recorded.run(five)
    layer = pair.recorded_kv.layer(0).keys
    before = layer.clone()
    growing.tokens[2].append(5)
    pair.recorded.run(flatten([growing._chunk(2, 11, 12)]))
    changed = (layer != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    slot = growing.tables[2][0][11 // BLOCK_SIZE] * BLOCK_SIZE + 11 % BLOCK_SIZE
    assert {0, slot} >= set(changed)
    assert slot in changed


def test_rows_without_logits_are_computed_and_left_out(llama: LoadedModel) -> None:
    """A sequence that has ended since still stores its KV; its logits are nobody's."""
    pair = Recorded(llama)
    growing = Growing(llama, (9, 10, 11), seed=3)
    prompts = growing.prompts()
    pair.recorded.run(prompts)
    pair.plain.run(prompts)
    chunks = [growing._chunk(i, n - 1, n) for i, n in enumerate(growing.contexts)]
    forward = flatten([chunks[0], replace(chunks[1], logit_token_count=0), chunks[2]])
    expected = pair.plain.run(forward)
    assert expected.shape[0] == 2
    _assert_close(pair.recorded.run(forward), expected)
    draws = _draws(2, seed=4)
    assert pair.plain.draw(forward, draws).tolist() == pair.recorded.draw(forward, draws).tolist()


@pytest.mark.parametrize("case", ["prompt", "adapter", "too many rows"])
def test_other_passes_are_not_recorded(llama: LoadedModel, case: str) -> None:
    """They run one by one, and are told from those that fit."""
    pair = Recorded(llama)
    growing = Growing(llama, (9,) * (ROW_COUNT_MAX + 1), seed=2)
    rows = [growing._chunk(index, 8, 9) for index in range(ROW_COUNT_MAX + 1)]
    fitting = flatten(rows[:-1])
    assert pair.graphs.fits(fitting)
    other = {
        "prompt": growing.prompts(),
        "adapter": replace(fitting, lora_names=("one", *fitting.lora_names[1:])),
        "too many rows": flatten(rows),
    }[case]
    assert not pair.graphs.fits(other)


def test_other_weights_need_no_other_recording() -> None:
    """Weights that are put in the place of others are those that the recordings read."""
    pair = Recorded(random_model(llama_config()))
    growing = Growing(pair.model, (9, 10), seed=6)
    growing_before = pair.recorded.run(growing.prompts()).clone()
    ModelWeights(pair.model).replace(random_model(llama_config(), seed=2).network.state_dict())
    prompts = growing.prompts()
    assert not torch.allclose(pair.recorded.run(prompts), growing_before)
    pair.plain.run(prompts)
    forward = growing.step()
    _assert_close(pair.recorded.run(forward), pair.plain.run(forward))


def test_draws_need_no_recording(llama: LoadedModel) -> None:
    """Where passes are recorded and draws are not, the tokens are the same."""
    pair = Recorded(llama)
    graphs_of_passes = DecodeGraphs(
        llama,
        pair.recorded_kv,
        DenseBackend(),
        CpuRecorder(),
        row_count_max=ROW_COUNT_MAX,
        context_token_count_max=100,
    )
    graphs_of_passes.record_passes()
    runner = ModelRunner(llama, pair.recorded_kv, DenseBackend(), graphs_of_passes)
    growing = Growing(llama, (9, 30, 12), seed=8)
    runner.run(growing.prompts())
    for step in range(4):
        forward = growing.step()
        draws = _draws(forward.token_count, seed=step)
        drawn = runner.draw(forward, draws).tolist()
        assert drawn == pair.recorded.draw(forward, draws).tolist()


def test_memory_never_moves(llama: LoadedModel) -> None:
    """Replays write to the same logits every time, whatever ran between them."""
    pair = Recorded(llama)
    growing = Growing(llama, (9, 30), seed=5)
    pair.recorded.run(growing.prompts())
    addresses = set()
    for _ in range(4):
        forward = growing.step()
        tables = [pack_tables(group.sequences) for group in forward.groups]
        addresses.add(pair.graphs.run(forward, tables).data_ptr())
    assert len(addresses) == 1


def test_sizes_grow_to_the_limits() -> None:
    """Row counts end with the limit, contexts with the longest; the steps widen."""
    assert row_counts(1) == (1,)
    assert row_counts(5) == (1, 2, 4, 5)
    assert row_counts(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert row_counts(300)[-4:] == (240, 256, 288, 300)
    assert context_token_counts(10) == (10,)
    assert context_token_counts(24) == (24,)
    assert context_token_counts(100) == (24, 64, 100)
