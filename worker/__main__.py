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
from typing import Annotated, NoReturn

import typer

# gRPC's own complaints about a taken port would stand beside our one clear line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from prefixd.worker.attention.registry import BACKENDS
from prefixd.worker.config import (
    BLOCK_SIZE_DEFAULT,
    MODEL_DEFAULT,
    ConfigInvalid,
    ModelConfig,
    WorkerConfig,
)
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.logs import LOG_LEVELS, Log, json_logger
from prefixd.worker.model.errors import ModelRefused, ModelUnavailable
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.model_setup import load_runner
from prefixd.worker.rpc.controller_client import PoolRefused
from prefixd.worker.rpc.listening import (
    CONTROLLER_ADDRESS_DEFAULT,
    WORKER_ADDRESS_DEFAULT,
    AddressInvalid,
    AddressUnusable,
    checked_target,
)
from prefixd.worker.server import WorkerBroken, build, serve

LIMITS_DEFAULT = SchedulerLimits()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    *,
    controller: Annotated[
        str, typer.Option(help="Address of the controller: HOST:PORT or unix:PATH.")
    ] = CONTROLLER_ADDRESS_DEFAULT,
    listen: Annotated[
        list[str],
        typer.Option(help="Address to serve: HOST:PORT or unix:PATH; may be given again."),
    ] = [WORKER_ADDRESS_DEFAULT],  # noqa: B006 - typer copies it
    model: Annotated[
        str, typer.Option(help="Folder of a model, or the name of a model that can be fetched.")
    ] = MODEL_DEFAULT,
    pool_name: Annotated[
        str, typer.Option(help="Name of the pool at the controller; by default the model's name.")
    ] = "",
    block_size: Annotated[int, typer.Option(help="Token slots per block.")] = BLOCK_SIZE_DEFAULT,
    block_count: Annotated[
        int,
        typer.Option(help="Blocks of the pool, one of them for padding; 0: sized by the memory."),
    ] = 0,
    attention_backend: Annotated[
        str, typer.Option(help=f"How to compute attention: {', '.join(BACKENDS)}.")
    ] = "torch",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of the forward pass on the CPU.")] = 1,
    chunk_token_count_max: Annotated[
        int, typer.Option(help="Most tokens that one step prefills of one sequence.")
    ] = LIMITS_DEFAULT.chunk_token_count_max,
    running_sequence_count_max: Annotated[
        int, typer.Option(help="Most sequences that run at a time; others wait.")
    ] = LIMITS_DEFAULT.running_sequence_count_max,
    token_budget: Annotated[
        int, typer.Option(help="Most tokens that one step computes.")
    ] = LIMITS_DEFAULT.token_budget,
    lease_ms: Annotated[
        int,
        typer.Option(help="How long the pool outlives a lost worker; 0: as the controller says."),
    ] = 0,
    controller_wait_s: Annotated[
        float, typer.Option(help="How long running answers wait for a lost controller.")
    ] = 30.0,
    log_level: Annotated[
        str, typer.Option(help=f"Least level to log: {', '.join(LOG_LEVELS)}.")
    ] = "info",
) -> None:
    """Run a worker: it holds the paged KV of one model and generates answers with it."""
    try:
        if log_level not in LOG_LEVELS:
            raise ConfigInvalid(f"--log-level must be one of {', '.join(LOG_LEVELS)}")
        log = json_logger(log_level)
        targets = tuple(checked_target(text) for text in listen)
        model_config = ModelConfig(
            model=model,
            attention_backend=attention_backend,
            device=device,
            dtype=dtype,
            thread_count=threads,
            block_size=block_size,
            block_count=block_count or None,
        )
        limits = _limits(chunk_token_count_max, running_sequence_count_max, token_budget)
        log.info("model_loading", model=model)
        runner = load_runner(model_config, report=lambda line: log.info("model_fetch", step=line))
        config = WorkerConfig(
            controller=controller,
            listen=targets,
            pool_name=pool_name or re.sub(r"[^A-Za-z0-9._-]", "-", runner.model.name),
            limits=limits,
            lease_ms=lease_ms or None,
            controller_wait_s=controller_wait_s,
        )
        is_idle = asyncio.run(_run(config, runner, log, attention_backend))
    except (ConfigInvalid, AddressInvalid) as error:
        _fail(str(error), status=2)
    except (AddressUnusable, PoolRefused, WorkerBroken) as error:
        _fail(str(error), status=1)
    except (ModelRefused, ModelUnavailable) as error:
        _fail(str(error), status=3)
    if not is_idle:
        # A forward pass cannot be interrupted, and the interpreter would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _run(config: WorkerConfig, runner: ModelRunner, log: Log, attention_backend: str) -> bool:
    server = build(config, runner, log=log, attention_backend=attention_backend)
    return await serve(server, on_started=_announce, log=log)


def _announce(addresses: tuple[str, ...]) -> None:
    print(json.dumps({"event": "worker_started", "addresses": list(addresses)}), flush=True)


def _limits(
    chunk_token_count_max: int, running_sequence_count_max: int, token_budget: int
) -> SchedulerLimits:
    try:
        return SchedulerLimits(
            chunk_token_count_max=chunk_token_count_max,
            running_sequence_count_max=running_sequence_count_max,
            token_budget=token_budget,
        )
    except ValueError as error:
        raise ConfigInvalid(str(error)) from error


def _end_while_loading(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _fail(message: str, *, status: int) -> NoReturn:
    print(f"prefixd worker: {message}", file=sys.stderr)
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
