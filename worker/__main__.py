"""`python -m prefixd.worker`: runs a worker until SIGTERM or SIGINT.

Standard output carries one line of JSON, once every address answers:
`{"event": "worker_started", "addresses": ["127.0.0.1:7601"]}`; health tells SERVING from the moment
the controller has registered the pool. Logs go to standard error, one JSON object per line. Exit
status: 0 told to end, 1 cannot serve, 2 bad options, 3 the model is refused or not to be had.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

# gRPC's own complaints about a taken port would stand beside our one clear line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from prefixd.worker.attention.registry import AUTO, backend_name_for
from prefixd.worker.config import (
    BLOCK_SIZE_DEFAULT,
    CONTROLLER_WAIT_S_DEFAULT,
    GPU_MEMORY_UTILIZATION_DEFAULT,
    ConfigInvalid,
    ModelConfig,
    WorkerConfig,
)
from prefixd.worker.errors import WorkerBroken
from prefixd.worker.limits import LimitInvalid, SchedulerLimits
from prefixd.worker.logs import LOG_LEVELS, Log, json_logger
from prefixd.worker.lora import LoraSourceInvalid, parse_lora_source
from prefixd.worker.model.errors import AdapterUnusable, ModelRefused, ModelUnavailable
from prefixd.worker.model.fetch import MODEL_DEFAULT
from prefixd.worker.options import (
    AllowPlaintextOption,
    AttentionBackendOption,
    BlockCountOption,
    BlockSizeOption,
    ChunkTokenCountMaxOption,
    ControllerCaOption,
    ControllerCertificateOption,
    ControllerKeyOption,
    ControllerOption,
    ControllerWaitSOption,
    CudaGraphsOption,
    DeviceOption,
    DtypeOption,
    EvictionPolicyOption,
    GpuMemoryUtilizationOption,
    KvDtypeOption,
    LeaseMsOption,
    ListenOption,
    LogLevelOption,
    LoraOption,
    MergeDuplicatesOption,
    ModelOption,
    ModelVersionOption,
    PoolNameOption,
    RunningSequenceCountMaxOption,
    SubBlockReuseOption,
    TensorParallelOption,
    ThreadsOption,
    TlsCertificateOption,
    TlsClientCaOption,
    TlsKeyOption,
    TokenBudgetOption,
)
from prefixd.worker.parallel.ranks import Ranks
from prefixd.worker.rpc.controller_client import PoolRefused
from prefixd.worker.rpc.listening import (
    CONTROLLER_ADDRESS_DEFAULT,
    WORKER_ADDRESS_DEFAULT,
    AddressInvalid,
    AddressUnusable,
    checked_target,
)
from prefixd.worker.rpc.tls import ControllerTls, ServerTls, TlsUnusable

if TYPE_CHECKING:
    from prefixd.worker.execution import Runner
    from prefixd.worker.server import Watch

LIMITS = SchedulerLimits()
USAGE_ERRORS = (ConfigInvalid, LimitInvalid, AddressInvalid, TlsUnusable, LoraSourceInvalid)
"""What is wrong with options."""

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.command()
def main(
    *,
    controller: ControllerOption = CONTROLLER_ADDRESS_DEFAULT,
    controller_ca: ControllerCaOption = None,
    controller_certificate: ControllerCertificateOption = None,
    controller_key: ControllerKeyOption = None,
    listen: ListenOption = [WORKER_ADDRESS_DEFAULT],  # noqa: B006 - typer copies it
    tls_certificate: TlsCertificateOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    allow_plaintext: AllowPlaintextOption = False,
    model: ModelOption = MODEL_DEFAULT,
    model_version: ModelVersionOption = "",
    lora: LoraOption = [],  # noqa: B006 - typer copies it
    pool_name: PoolNameOption = "",
    sub_block_reuse: SubBlockReuseOption = False,
    merge_duplicates: MergeDuplicatesOption = False,
    eviction_policy: EvictionPolicyOption = "",
    block_size: BlockSizeOption = BLOCK_SIZE_DEFAULT,
    block_count: BlockCountOption = 0,
    gpu_memory_utilization: GpuMemoryUtilizationOption = GPU_MEMORY_UTILIZATION_DEFAULT,
    cuda_graphs: CudaGraphsOption = True,
    attention_backend: AttentionBackendOption = AUTO,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
    threads: ThreadsOption = 1,
    tensor_parallel: TensorParallelOption = 1,
    chunk_token_count_max: ChunkTokenCountMaxOption = LIMITS.chunk_token_count_max,
    running_sequence_count_max: RunningSequenceCountMaxOption = LIMITS.running_sequence_count_max,
    token_budget: TokenBudgetOption = LIMITS.token_budget,
    lease_ms: LeaseMsOption = 0,
    controller_wait_s: ControllerWaitSOption = CONTROLLER_WAIT_S_DEFAULT,
    log_level: LogLevelOption = "info",
) -> None:
    """Run a worker: it holds the paged KV of one model and generates answers with it."""
    with _telling_failures():
        limits = SchedulerLimits(chunk_token_count_max, running_sequence_count_max, token_budget)
        model_config = ModelConfig(
            model=model,
            attention_backend=attention_backend,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            thread_count=threads,
            block_size=block_size,
            block_count=block_count or None,
            loras=tuple(parse_lora_source(text) for text in lora),
            rank_count=tensor_parallel,
            gpu_memory_utilization=gpu_memory_utilization,
            records_graphs=cuda_graphs,
            limits=limits,
        )
        config = WorkerConfig(
            controller=checked_target(controller),
            controller_tls=_controller_tls(controller_ca, controller_certificate, controller_key),
            listen=tuple(checked_target(text) for text in listen),
            tls=_server_tls(tls_certificate, tls_key, tls_client_ca),
            plaintext_allowed=allow_plaintext,
            pool_name=pool_name,
            model_version=model_version,
            sub_block_reuse=sub_block_reuse,
            merge_duplicates=merge_duplicates,
            eviction_policy=eviction_policy,
            limits=limits,
            lease_ms=lease_ms or None,
            controller_wait_s=controller_wait_s,
        )
        if not _run(config, model_config, _log(log_level)):
            _exit_at_once(0)


@contextmanager
def _telling_failures() -> Iterator[None]:
    """Ends the process with one line and a status where it cannot serve."""
    try:
        yield
    except USAGE_ERRORS as error:
        _fail(str(error), status=2)
    except (AddressUnusable, PoolRefused) as error:
        _fail(str(error), status=1)
    except WorkerBroken as error:
        print(f"prefixd worker: {error}", file=sys.stderr)
        _exit_at_once(1)
    except (ModelRefused, ModelUnavailable, AdapterUnusable) as error:
        _fail(str(error), status=3)


def _run(config: WorkerConfig, model_config: ModelConfig, log: Log) -> bool:
    """Loads the model and serves it; returns whether the last forward pass has ended."""
    config.check()
    model_config.check()
    log.info("model_loading", model=model_config.model)

    def report(line: str) -> None:
        log.info("model_setup", step=line)

    # Imported here: torch takes seconds, which neither help nor a bad option should cost.
    if model_config.rank_count == 1:
        from prefixd.worker.model_setup import load_runner

        return _serve(config, model_config, load_runner(model_config, report=report), (), log)
    # The other ranks start first: they import the same, at the same time.
    with Ranks(model_config.rank_count) as ranks:
        log.info("ranks_started", process_ids=ranks.process_ids)
        from prefixd.worker.parallel.setup import load_parallel_runner

        runner = load_parallel_runner(model_config, ranks, report=report)
        _serve(config, model_config, runner, (ranks.watch,), log)
    # The threads of the process group may wait for the others, which are gone.
    return False


def _serve(
    config: WorkerConfig,
    model_config: ModelConfig,
    runner: "Runner",
    watches: "Sequence[Watch]",
    log: Log,
) -> bool:
    from prefixd.worker.server import build, serve

    if not config.pool_name:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", runner.model.name)
        config = replace(config, pool_name=name)

    device = runner.model.device
    backend = backend_name_for(model_config.attention_backend, device_type=device.type)
    log.info("model_loaded", device=str(device), attention_backend=backend)

    async def serve_runner() -> bool:
        server = build(config, runner, log=log, attention_backend=backend, watches=watches)
        return await serve(server, on_started=_announce, log=log)

    return asyncio.run(serve_runner())


def _announce(addresses: tuple[str, ...]) -> None:
    print(json.dumps({"event": "worker_started", "addresses": list(addresses)}), flush=True)


def _log(log_level: str) -> Log:
    if log_level not in LOG_LEVELS:
        raise ConfigInvalid(
            f"--log-level is {log_level!r}, but must be one of {', '.join(LOG_LEVELS)}"
        )
    return json_logger(log_level)


def _server_tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None
) -> ServerTls | None:
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ConfigInvalid("TLS needs both --tls-certificate and --tls-key")
    return ServerTls(certificate, key, client_ca)


def _controller_tls(
    ca: Path | None, certificate: Path | None, key: Path | None
) -> ControllerTls | None:
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or (certificate is None) != (key is None):
        raise ConfigInvalid(
            "TLS to the controller needs --controller-ca; --controller-certificate and"
            " --controller-key go together"
        )
    return ControllerTls(ca, certificate, key)


def _end_while_loading(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _exit_at_once(status: int) -> NoReturn:
    """Ends the process; a forward pass cannot be interrupted, and the interpreter would wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fail(message: str, *, status: int) -> NoReturn:
    # Reasons of others may have several lines.
    print(f"prefixd worker: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(status)


def _refuse_optimized() -> None:
    # Assertions stand between a wrong plan and other people's KV; -O would remove them.
    if not __debug__:
        print("prefixd worker: refuses to run under python -O", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    _refuse_optimized()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_while_loading)
    app()
