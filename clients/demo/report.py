"""What the demo tells its reader."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefixd.clients.answers import WorkerInfo
from prefixd.clients.demo import scenario
from prefixd.clients.demo.scenario import Asked
from prefixd.clients.processes import Servers
from prefixd.clients.results import SequenceTables


def introduce(console: Console) -> None:
    """Says what is going to happen."""
    word_count = len(scenario.manual().split())
    console.rule("[bold]prefixd: one long document, several questions[/]")
    console.print(
        f"A manual of {word_count:,} words stands in front of every question. A worker runs the "
        "model and keeps KV in pages; a controller, a process of its own, knows which page holds "
        "which tokens. The first question computes the manual; the others find it.\n"
    )


def servers(console: Console, running: Servers, info: WorkerInfo) -> None:
    """Says who runs where."""
    console.print(
        f"controller  {running.controller_connection.address}  (process {running.controller.pid})"
    )
    console.print(
        f"worker      {running.worker_connection.address}  (process {running.worker.pid}): "
        f"{info.model_name} on {info.device}, {info.dtype}, attention backend "
        f"{info.attention_backend}, {info.block_count:,} blocks of {info.block_size} tokens\n"
    )


def question_line(console: Console, asked: Asked) -> None:
    """One question as soon as it is answered."""
    answer = asked.answer
    console.print(
        f"asked: {escape(asked.question)} [dim](first token after "
        f"{_seconds(answer.time_to_first_token_ms)})[/]"
    )


def answers(console: Console, asked: Sequence[Asked]) -> None:
    """All questions as a table."""
    table = Table(title="\nthree questions about one manual", title_justify="left")
    table.add_column("question")
    for name in ("prompt tokens", "cached tokens", "time to first token"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    for one in asked:
        table.add_row(
            escape(one.question),
            f"{one.answer.prompt_token_count:,}",
            f"{one.answer.cached_token_count:,}",
            _seconds(one.answer.time_to_first_token_ms),
            escape(one.answer.text.strip()),
        )
    console.print(table)


def explain(console: Console, asked: Sequence[Asked], *, block_size: int) -> None:
    """Says why the second question was fast, and by how much."""
    first, second = asked[0].answer, asked[1].answer
    ratio = first.time_to_first_token_ms / second.time_to_first_token_ms
    computed = second.prompt_token_count - second.cached_token_count
    console.print(
        f"\nThe second question began to be answered [bold]{ratio:.0f} times sooner[/] than the "
        f"first: of its {second.prompt_token_count:,} tokens the controller knew the leading "
        f"{second.cached_token_count:,} ({second.cached_token_count // block_size:,} whole blocks "
        f"of {block_size}), so the worker computed {computed:,} instead of all."
    )


def live_sequence(console: Console, found: SequenceTables, command: str) -> None:
    """A sequence as the controller knows it, and how to fetch it."""
    sequence = found.sequence
    console.print("\n[bold]A running sequence, as the controller knows it[/]")
    console.print(
        f"{sequence.sequence_id}: {sequence.known_count:,} tokens known, "
        f"{sequence.written_count:,} written, {sequence.cached_count:,} found in the cache, "
        f"{sequence.block_count:,} blocks. Anybody can fetch its block table:\n"
    )
    console.print(f"  {command}\n", soft_wrap=True, markup=False)


def grpcurl_answer(console: Console, block_ids: Sequence[int]) -> None:
    """What the real grpcurl got."""
    ends = f"{block_ids[0]}, {block_ids[1]}, {block_ids[2]}, ... {block_ids[-1]}"
    console.print(
        f"The real grpcurl has just run this command: {len(block_ids):,} block ids ({ends})."
    )


def comparison_title(console: Console) -> None:
    """Says what is compared."""
    console.print(
        "\n[bold]The same questions the other way[/]: computed as a whole where the cache was "
        "used, from the cache where it was not"
    )


def comparison(console: Console, first: Asked, again: Asked) -> None:
    """One question with and without the cache."""
    same = first.answer.token_ids == again.answer.token_ids
    word = "[green]identical[/]" if same else "[red]different[/]"
    console.print(
        f"{escape(again.question)} {again.answer.cached_token_count:,} cached tokens, first token "
        f"after {_seconds(again.answer.time_to_first_token_ms)}, answer {word}"
    )
    if not same:
        console.print(f"  first: {escape(first.answer.text)}")
        console.print(f"  again: {escape(again.answer.text)}")


def verdict(console: Console, *, identical: bool, must_be_identical: bool) -> bool:
    """Says whether the answers agree, and returns whether that is as it must be."""
    if identical:
        console.print("[green]All greedy answers are identical with and without the cache.[/]")
        return True
    if must_be_identical:
        console.print("[red]Answers differ: on this backend they must not.[/]")
        return False
    console.print(
        "Answers differ: this backend's sums depend on how a prompt is cut, which rounding shows."
    )
    return True


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1_000:.2f} s"
