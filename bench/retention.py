"""What hints are worth: `python -m bench.retention TRACE` replays a public trace of conversations.

The trace is the one that Mooncake published (FAST '25): a line of JSON for each request, with its
`timestamp` in milliseconds and the ids of its prompt's 512-token blocks, where equal ids stand for
equal prefixes. Each prompt is opened and closed in a pool of the core, block by block, under both
policies, and the share of blocks that are found is printed. Whether a conversation goes on, which a
client would know, is read from the rest of the trace.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    Handle,
    Identity,
    OpenEntry,
    PoolSpec,
    SequenceId,
    Step,
    StepId,
)
from prefixd.controller.core.pool import Pool

TRACE_BLOCK_TOKENS = 512
CAPACITY_SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.25)
"""Sizes of the pool, as shares of the trace's different blocks."""
ACCURACIES = (1.0, 0.9, 0.8, 0.5)
"""Shares of hints that are true; the last one says nothing."""
LAST_TOKEN = 2**32 - 1
"""Stands for what a prompt has behind its blocks, and is never computed here."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: the ids of its blocks, and whether a later one goes on behind all full ones."""

    time_ms: int
    block_ids: tuple[int, ...]
    continues: bool


class TraceInvalid(Exception):
    """A line of a trace is no request."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the trace: `full_ids` are those of `block_ids` that the prompt fills."""

    time_ms: int
    block_ids: tuple[int, ...]
    full_ids: tuple[int, ...]


def read_trace(lines: Iterable[str]) -> list[Request]:
    """Reads a trace; a request continues where its last full block is asked for again.

    Raises TraceInvalid, with the number of the line.
    """
    rows = [_row(number, line) for number, line in enumerate(lines, start=1)]
    last_use = {block_id: at for at, row in enumerate(rows) for block_id in row.block_ids}
    requests = []
    for at, row in enumerate(rows):
        continues = bool(row.full_ids) and last_use[row.full_ids[-1]] > at
        requests.append(Request(row.time_ms, row.block_ids, continues))
    return requests


def _row(number: int, line: str) -> _Row:
    try:
        fields = json.loads(line)
        block_ids = tuple(map(int, fields["hash_ids"]))
        full_count = int(fields["input_length"]) // TRACE_BLOCK_TOKENS
        return _Row(int(fields["timestamp"]), block_ids, block_ids[:full_count])
    except (ValueError, KeyError, TypeError) as error:
        raise TraceInvalid(
            f"line {number} is no JSON object with timestamp, input_length and hash_ids"
        ) from error


def hinted(requests: Sequence[Request], *, accuracy: float, seed: int = 1) -> list[RetentionHint]:
    """Says of each request whether its conversation goes on, as rightly as `accuracy`."""
    chance = random.Random(seed)
    told = (request.continues == (chance.random() < accuracy) for request in requests)
    return [
        RetentionHint(Continuation.EXPECTED if continues else Continuation.OVER)
        for continues in told
    ]


def hit_rate(
    requests: Sequence[Request],
    hints: Sequence[RetentionHint],
    *,
    eviction_policy: str,
    block_count: int,
) -> float:
    """Replays requests, one after the other, and returns the share of their blocks found."""
    spec = PoolSpec(
        "trace", block_count=block_count + 1, block_size=1, eviction_policy=eviction_policy
    )
    pool = Pool(spec, epoch=1, hasher=Hasher("xxhash_cbor", seed="0"))
    found_count = 0
    step_id = 0
    for at, (request, hint) in enumerate(zip(requests, hints, strict=True), start=1):
        token_ids = np.array([*request.block_ids[:block_count], LAST_TOKEN], np.uint32)
        matched = pool.match_prefix(token_ids, Identity()).published_token_count
        found_count += matched
        opening = OpenEntry(
            Handle(at),
            SequenceId(f"s{at}"),
            token_ids,
            schedule_token_count_max=len(token_ids) - 1 - matched,
        )
        for entry in (opening, CloseEntry(Handle(at), CloseReason.FINISHED, hint)):
            step_id += 1
            step = Step(StepId(step_id), StepId(step_id - 1), (entry,))
            pool.apply_step(step, now_ms=request.time_ms)
    return found_count / sum(len(request.block_ids) for request in requests)


def main(
    trace: Annotated[Path, typer.Argument(help="The trace: JSON lines.")],
    request_count: Annotated[int, typer.Option(help="Only so many requests; 0: all.")] = 0,
) -> None:
    """Prints the hit rate of `lru`, and of `retention` with hints of several accuracies."""
    if not trace.exists():
        raise typer.BadParameter(f"there is no trace at {trace}")
    try:
        with trace.open(encoding="utf-8") as lines:
            requests = read_trace(lines)[: request_count or None]
    except TraceInvalid as error:
        raise typer.BadParameter(f"{trace}: {error}") from error
    if not requests:
        raise typer.BadParameter(f"{trace} holds no request")
    unique_count = len({block_id for request in requests for block_id in request.block_ids})
    table = Table(title=f"blocks found: lru, and retention with hints ({len(requests):,} requests)")
    for name in ("blocks", "lru", *(f"{part:.0%} true" for part in ACCURACIES)):
        table.add_column(name, justify="right")
    for share in CAPACITY_SHARES:
        block_count = int(unique_count * share)
        rates = [
            hit_rate(
                requests,
                hinted(requests, accuracy=accuracy),
                eviction_policy=policy,
                block_count=block_count,
            )
            for policy, accuracy in (("lru", 1.0), *(("retention", part) for part in ACCURACIES))
        ]
        table.add_row(f"{block_count:,} ({share:.0%})", *(f"{rate:.1%}" for rate in rates))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
