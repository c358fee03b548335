"""How the command line prints: tables for people, JSON for programs, one line for an error."""

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from prefixd.clients import results
from prefixd.clients.answers import Answer

PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""
POOL_COLUMNS = (
    *("pool", "model", "blocks", "size", "held", "evictable", "free"),
    *("sequences", "hit rate", "policy", "driver"),
)
"""What `prefixd pools` shows of a pool."""
TABLE_COLUMNS = 16
"""Block ids per row of a printed block table."""
STATE_STYLES = {
    results.BlockState.HELD: "yellow",
    results.BlockState.EVICTABLE: "cyan",
    results.BlockState.FREE: "dim",
}
"""Colour of each block state."""


def print_json(value: Any) -> None:
    """Prints a value, or a list of values, as one JSON document; the keys are the fields' names."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """Prints a value as one line of JSON and flushes."""
    print(json.dumps(_plain(value), ensure_ascii=False), flush=True)


def print_line(text: str) -> None:
    """Prints one line of a stream and flushes."""
    print(text, flush=True)


def counted(count: int, noun: str) -> str:
    """A count with its noun, `1 block` or `1,091 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_error(message: str) -> None:
    """Prints one line on standard error."""
    print("prefixd: " + " ".join(message.split()), file=sys.stderr)


def console() -> Console:
    """Standard output for tables."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=PIPED_WIDTH)


def print_pools(pools: Sequence[results.Pool]) -> None:
    """Prints pools with their accounts: a row each, or a table each on a narrow terminal."""
    accounts = [_account(pool) for pool in pools]
    table = _table(*POOL_COLUMNS, shortened=())
    for account in accounts:
        table.add_row(*account)
    screen = console()
    wide = screen.options.update(max_width=PIPED_WIDTH)
    if not accounts or Measurement.get(screen, wide, table).maximum <= screen.width:
        _print_or("no pools", table)
        return
    for account in accounts:
        table = Table(show_header=False)
        for cells in zip(POOL_COLUMNS, account, strict=True):
            table.add_row(*cells)
        screen.print(table)


def _account(pool: results.Pool) -> Sequence[str]:
    """A pool's cells under POOL_COLUMNS."""
    return (
        pool.pool_name,
        pool.model_name,
        f"{pool.block_count - 1:,}",
        str(pool.block_size),
        f"{pool.held_block_count:,}",
        f"{pool.evictable_block_count:,}",
        f"{pool.free_block_count:,}",
        f"{pool.sequence_count:,}",
        f"{pool.statistics.recent_hit_rate:.1%}",
        pool.eviction_policy,
        _driver(pool),
    )


def print_sequences(sequences: Sequence[results.Sequence]) -> None:
    """Prints open sequences."""
    names = ("sequence", "known", "scheduled", "written", "cached", "blocks", "notes")
    table = _table(*names, shortened=("sequence", "notes"))
    for sequence in sequences:
        table.add_row(
            sequence.sequence_id,
            f"{sequence.known_count:,}",
            f"{sequence.scheduled_count:,}",
            f"{sequence.written_count:,}",
            f"{sequence.cached_count:,}",
            f"{sequence.block_count:,}",
            ", ".join(_notes(sequence)),
        )
    _print_or("no open sequences", table)


def print_sequence(found: results.SequenceTables, *, block_size: int) -> None:
    """Prints a sequence with its block tables."""
    print_sequences([found.sequence])
    for group_index, table in enumerate(found.tables):
        console().print(block_table(table, group_index=group_index, block_size=block_size))


def block_table(table: results.BlockTable, *, group_index: int, block_size: int) -> Table:
    """A block table as rows of ids, each with the tokens that its blocks hold."""
    shown = Table(title=f"block table, KV group {group_index}", title_justify="left")
    shown.add_column("tokens", justify="right", no_wrap=True)
    shown.add_column(f"block ids ({block_size} tokens each)")
    for start_block in range(0, len(table.block_ids), TABLE_COLUMNS):
        block_ids = table.block_ids[start_block : start_block + TABLE_COLUMNS]
        start_token = start_block * block_size
        end_token = start_token + len(block_ids) * block_size
        shown.add_row(
            f"{start_token:,}-{end_token - 1:,}",
            " ".join(f"{block_id:>4}" for block_id in block_ids),
        )
    return shown


def print_blocks(blocks: Iterable[results.Block]) -> None:
    """Prints blocks by id."""
    names = ("block", "state", "content", "holders", "place", "group", "hash", "parent")
    table = _table(*names, shortened=("hash", "parent"))
    for block in blocks:
        indexed = bool(block.hash_hex)
        held = block.holder_count > 0
        table.add_row(
            str(block.block_id),
            Text(block.state, style=STATE_STYLES.get(block.state, "")),
            block.content,
            str(block.holder_count),
            str(block.block_index) if indexed else "",
            str(block.group_index) if indexed or held else "",
            block.hash_hex[:16],
            block.parent_hash_hex[:16],
        )
    _print_or("no blocks in this state", table)


def print_order(block_ids: Sequence[int]) -> None:
    """Prints block ids in their order; `6..11` and `11..6` stand for all ids between them."""
    console().print(" ".join(_runs(block_ids)) or "no blocks", soft_wrap=not sys.stdout.isatty())


def print_fields(value: Any) -> None:
    """Prints a value's fields, one per row; mappings and lists on one line."""
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, content in _plain(value).items():
        table.add_row(name.replace("_", " "), _one_line(content))
    console().print(table)


def answer_summary(answer: Answer) -> str:
    """What an answer cost, in one line."""
    return (
        f"{counted(answer.prompt_token_count, 'prompt token')}, "
        f"{answer.cached_token_count:,} cached; "
        f"first token after {answer.time_to_first_token_ms:,.0f} ms; "
        f"{counted(answer.generated_token_count, 'token')} "
        f"at {answer.decode_tokens_per_second:.1f}/s; "
        f"{answer.finish_reason.replace('_', ' ')}"
    )


def samples_summary(answers: Sequence[Answer]) -> str:
    """What the answers to one prompt cost together, in one line."""
    first = answers[0]
    return (
        f"{counted(first.prompt_token_count, 'prompt token')}, "
        f"{first.cached_token_count:,} cached; "
        f"first token after {first.time_to_first_token_ms:,.0f} ms; "
        f"{counted(sum(answer.generated_token_count for answer in answers), 'token')} "
        f"in {counted(len(answers), 'answer')}"
    )


def _runs(block_ids: Sequence[int]) -> Iterable[str]:
    """Runs of ids that go up or down by one, the shortest of three ids; other ids alone."""
    start = 0
    while start < len(block_ids):
        end = start + 2
        while end < len(block_ids) and (
            block_ids[end] - block_ids[end - 1] == block_ids[start + 1] - block_ids[start]
        ):
            end += 1
        if end - start > 2 and abs(block_ids[start + 1] - block_ids[start]) == 1:
            yield f"{block_ids[start]}..{block_ids[end - 1]}"
            start = end
        else:
            yield str(block_ids[start])
            start += 1


def _table(*names: str, shortened: Collection[str]) -> Table:
    """An empty table; on a narrow terminal the columns in `shortened` give way to the counts."""
    table = Table()
    for name in names:
        # What may not be wrapped is cut only when nothing else can give way.
        table.add_column(name, no_wrap=name not in shortened, overflow="ellipsis")
    return table


def _print_or(nothing: str, table: Table) -> None:
    console().print(table if table.row_count else nothing)


def _driver(pool: results.Pool) -> str:
    if pool.draining:
        return "draining"
    if pool.lease_left_ms is None:
        return "session open"
    return f"lease ends in {pool.lease_left_ms / 1_000:.0f} s"


def _notes(sequence: results.Sequence) -> list[str]:
    notes = []
    if sequence.uncacheable:
        notes.append("uncacheable")
    if sequence.cut:
        notes.append("cut")
    if sequence.preemption_count:
        notes.append(f"preempted {sequence.preemption_count}x")
    if sequence.identity.lora is not None:
        notes.append(f"LoRA {sequence.identity.lora.name}")
    if sequence.identity.multimodal_items:
        notes.append(f"{len(sequence.identity.multimodal_items)} multimodal")
    if sequence.identity.cache_salt:
        notes.append("salted")
    return notes


def _one_line(content: Any) -> str:
    match content:
        case dict():
            return ", ".join(f"{name} {value}" for name, value in sorted(content.items()))
        case list():
            return " ".join(str(item) for item in content)
        case _:
            return str(content)


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and times as JSON knows them."""
    match value:
        case datetime():
            return value.isoformat()
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case _ if dataclasses.is_dataclass(value):
            return {
                field.name: _plain(getattr(value, field.name))
                for field in dataclasses.fields(value)
            }
        case _:
            return value
