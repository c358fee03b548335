"""How large a pool may be: the arithmetic, the passes that are measured, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from prefixd.worker.attention.registry import create_backend
from prefixd.worker.config import ConfigInvalid, ModelConfig
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.model import memory, memory_profile
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.memory import (
    GIBIBYTE,
    DeviceMemory,
    PoolSize,
    PoolTooLarge,
    available_byte_count,
    check_fits,
    readable,
)
from prefixd.worker.model.memory_profile import (
    largest_pass,
    measure_memory,
    profile_block_count,
    run_largest_pass,
    warm_up,
)
from prefixd.worker.pool_sizing import SizedPool, size_pool
from tests.support.graphs import CpuRecorder, DenseBackend
from tests.support.models import PagedHarness, llama_config, mixed_config, random_model

LIMITS = SchedulerLimits(chunk_token_count_max=20, running_sequence_count_max=4, token_budget=50)
MEMORY = DeviceMemory(
    total=100 * GIBIBYTE,
    free=90 * GIBIBYTE,
    weights=8 * GIBIBYTE,
    activations=2 * GIBIBYTE,
    graphs=GIBIBYTE,
)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    """A tiny model of one KV group."""
    return random_model(llama_config())


def test_the_pool_gets_the_share_that_the_rest_leaves() -> None:
    """90 of 100 GiB: 8 for weights, 2 for a pass, 1 for graphs; 79 for the pool."""
    assert MEMORY.pool_byte_count_max(0.9) == 79 * GIBIBYTE
    assert MEMORY.pool_byte_count_max(0.5) == 39 * GIBIBYTE


def test_memory_of_others_is_not_ours() -> None:
    """Weights and free memory are 98 of 100 GiB: the last two belong to somebody else."""
    assert MEMORY.pool_byte_count_max(1.0) == (98 - 11) * GIBIBYTE


def test_there_may_be_nothing_left() -> None:
    """A share below what the model needs leaves less than nothing."""
    assert MEMORY.pool_byte_count_max(0.1) == -1 * GIBIBYTE


def test_lines_for_people_hold_all_numbers() -> None:
    """Total, share, weights, activations, graphs; pool, blocks, tokens, bytes of a token."""
    line = MEMORY.describe(0.9)
    assert line == ("GPU 100.0 GiB x 0.9: weights 8.0 GiB, activations 2.0 GiB, graphs 1.0 GiB")
    size = PoolSize(1_066, 16, 16 * 45 * 1_024)
    assert size.describe() == "pool 749.5 MiB: 1,066 blocks of 16, 17,040 tokens, 45.0 KiB each"


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [(0, "0 B"), (1_023, "1023 B"), (1_024, "1.0 KiB"), (3 << 39, "1.5 TiB")],
)
def test_readable(byte_count: int, text: str) -> None:
    """The largest unit of which there is one."""
    assert readable(byte_count) == text


def test_a_pool_that_does_not_fit_is_refused_with_its_numbers() -> None:
    """To the byte; the message says how many blocks fit."""
    size = PoolSize(100, 16, 1_000)
    check_fits(size, byte_count_max=100_000, where="here")
    message = (
        "--block-count is 100, a pool of 97.7 KiB, but there are 97.7 KiB here: at most 99 blocks"
    )
    with pytest.raises(PoolTooLarge, match=message):
        check_fits(size, byte_count_max=99_999, where="here")


def _system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    monkeypatch.setattr(memory, "MEMINFO_FILE", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP_FOLDER", tmp_path)
    for name, text in files.items():
        (tmp_path / name.replace("_", ".")).write_text(text, encoding="ascii")


def test_available_memory_is_the_least_of_machine_and_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have less than its machine; without a limit the machine counts."""
    meminfo = "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    4000 kB\n"
    _system(tmp_path, monkeypatch, meminfo=meminfo)
    assert available_byte_count() == 4_000 * 1_024
    statistics = "anon 300000\ninactive_file 200000\nactive_file 7\n"
    group = {"memory_current": "500000\n", "memory_stat": statistics}
    _system(tmp_path, monkeypatch, memory_max="max\n", **group)
    assert available_byte_count() == 4_000 * 1_024
    # What was read from files gives way.
    _system(tmp_path, monkeypatch, memory_max="2000000\n", **group)
    assert available_byte_count() == 1_700_000
    _system(tmp_path, monkeypatch, memory_max="200000\n", **group)
    assert available_byte_count() == 0


def test_a_pool_on_the_cpu_stays_below_what_is_available(
    llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it takes half; asked for more than there is, it refuses."""
    _system(tmp_path, monkeypatch, meminfo="MemAvailable: 1200 kB\n")
    backend = create_backend("torch")

    def count(block_count: int | None) -> int:
        config = ModelConfig(block_count=block_count)
        pool = size_pool(llama, backend, config, kv_dtype=torch.float32, records_graphs=False)
        return pool.block_count

    # 16 slots, 3 layers, K and V, 2 heads of 16 float32.
    per_block = 16 * 3 * 2 * 2 * 16 * 4
    assert count(None) == 600 * 1_024 // per_block
    assert count(50) == 50
    with pytest.raises(ConfigInvalid, match=r"--block-count is 101, .* at most 100 blocks fit"):
        count(101)


@pytest.mark.parametrize("config", [llama_config, mixed_config])
def test_the_largest_pass_runs(config: type) -> None:
    """It spends the budget in chunks, wants all logits, and fits the pool made for it."""
    model = random_model(config())
    forward = largest_pass(model, LIMITS, block_size=8)
    assert [rows.query_token_count for rows in forward.groups[0].sequences] == [20, 20, 10]
    assert len(forward.logit_rows) == 50
    harness = PagedHarness(
        model, backend="torch", block_count=profile_block_count(forward), block_size=8
    )
    run_largest_pass(harness.runner, LIMITS, forward)
    layer = harness.kv.layer(0).keys
    assert layer[8:].flatten(1).any(dim=1).sum() >= 50


@pytest.mark.parametrize("block_count", [2, 3, 5, 200])
def test_warm_up_keeps_to_the_pool(llama: LoadedModel, block_count: int) -> None:
    """However small the pool is, something runs."""
    harness = PagedHarness(llama, backend="torch", block_count=block_count, block_size=8)
    warm_up(harness.runner)
    assert harness.kv.layer(0).keys[8:].any()


def test_a_pool_without_room_for_a_token_is_left_alone() -> None:
    """One block is no place for a token of a model of several KV groups."""
    harness = PagedHarness(random_model(mixed_config()), backend="torch", block_count=2)
    warm_up(harness.runner)
    assert not harness.kv.layer(0).keys.any()


class PretendedGpu:
    """Numbers where torch would ask a GPU; all that runs, runs on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        free = itertools.chain([(900, 1_000), (860, 1_000)], itertools.repeat((700, 1_000)))
        answers = {
            "memory_allocated": lambda _device: 250,
            "max_memory_allocated": lambda _device: 300,
            "mem_get_info": lambda _device: next(free),
            "reset_peak_memory_stats": lambda _device: None,
            "synchronize": lambda _device: None,
            "empty_cache": lambda: None,
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(memory_profile, "CudaGraphRecorder", lambda _device: CpuRecorder())
        patch.setattr(memory_profile, "GRAPH_OVERHEAD_BYTE_COUNT", 2)


def test_measuring_runs_the_largest_passes(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, the peak beside them, and graphs: the largest one and a bit for each."""
    PretendedGpu(monkeypatch)
    measured = measure_memory(
        llama,
        DenseBackend(),
        LIMITS,
        block_size=8,
        kv_dtype=torch.float32,
        records_graphs=True,
    )
    # Recordings for 1, 2 and 4 rows at one context length, and their draws.
    graphs = (900 - 860) + 2 * (3 + 3)
    assert measured == DeviceMemory(
        total=1_000, free=700, weights=250, activations=50, graphs=graphs
    )


def test_a_model_that_cannot_be_recorded_is_measured_without_graphs(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker serves it kernel by kernel, as the line about its recordings says later."""

    class Refusing(CpuRecorder):
        def record(self, run: Callable[[], None]) -> NoReturn:
            raise RuntimeError("operation not permitted when stream is capturing")

    PretendedGpu(monkeypatch)
    monkeypatch.setattr(memory_profile, "CudaGraphRecorder", lambda _device: Refusing())
    measured = measure_memory(
        llama,
        DenseBackend(),
        LIMITS,
        block_size=8,
        kv_dtype=torch.float32,
        records_graphs=True,
    )
    assert measured.graphs == 0


def test_a_step_that_does_not_fit_a_gpu_is_refused(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the option, where the largest pass runs out of memory."""

    def run_out(*_arguments: object, **_options: object) -> NoReturn:
        raise torch.OutOfMemoryError("tried to allocate 9.00 GiB")

    monkeypatch.setattr(memory_profile, "measure_memory", run_out)
    on_gpu = replace(llama, device=torch.device("cuda:0"))
    config = ModelConfig(limits=LIMITS)
    with pytest.raises(ConfigInvalid, match=r"--token-budget is 50, but .* of cuda:0: tried to"):
        size_pool(on_gpu, DenseBackend(), config, kv_dtype=torch.float32, records_graphs=False)


def _size_on_gpu(
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    config: ModelConfig,
    *,
    measure: Callable[..., DeviceMemory] = lambda *_arguments, **_named: MEMORY,
) -> SizedPool:
    """The pool of a model on a GPU whose memory is taken as `measure` says."""
    monkeypatch.setattr(memory_profile, "measure_memory", measure)
    on_gpu = replace(model, device=torch.device("cuda"))
    backend = create_backend("torch")
    return size_pool(on_gpu, backend, config, kv_dtype=torch.float32, records_graphs=True)


def test_a_gpu_gives_its_rest_to_the_pool(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many blocks as the share leaves room for, up to the most that nobody asked for."""
    # 4,096 slots, 3 layers, K and V, 2 heads of 16 float32: 3 MiB.
    config = ModelConfig(block_size=4_096)
    pool = _size_on_gpu(llama, monkeypatch, config)
    assert pool.block_count == 79 * GIBIBYTE // (3 << 20)
    assert pool.line.startswith(f"{MEMORY.describe(0.9)}, pool 79.0 GiB: 26,965 blocks of 4096")
    assert _size_on_gpu(llama, monkeypatch, ModelConfig()).block_count == 1_048_576
    asked = ModelConfig(block_size=4_096, block_count=26_965)
    assert _size_on_gpu(llama, monkeypatch, asked).block_count == 26_965


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ModelConfig(block_size=4_096, block_count=26_966),
            r"--block-count is 26966, .* 79.0 GiB left by --gpu-memory-utilization"
            r" \(GPU 100.0 GiB x 0.9: .*\): at most 26,965 blocks fit",
        ),
        (
            ModelConfig(gpu_memory_utilization=0.1),
            r"--gpu-memory-utilization is 0.1, which leaves no room for a pool of 2 blocks"
            r" \(GPU 100.0 GiB x 0.1: weights 8.0 GiB, ",
        ),
    ],
)
def test_what_a_gpu_has_no_room_for_is_refused(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, config: ModelConfig, message: str
) -> None:
    """Options and numbers are named."""
    with pytest.raises(ConfigInvalid, match=message):
        _size_on_gpu(llama, monkeypatch, config)


@pytest.mark.parametrize("utilization", [0.0, -0.5, 1.1, float("nan")])
def test_a_share_is_above_0_and_at_most_1(utilization: float) -> None:
    """The error names the option, its value and its limits."""
    message = "--gpu-memory-utilization is .*, but must be above 0 and at most 1"
    with pytest.raises(ConfigInvalid, match=message):
        ModelConfig(gpu_memory_utilization=utilization).check()
