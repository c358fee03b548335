"""The command line against a real controller: tables, JSON, errors as one line, exit codes."""

import json
import subprocess
import sys
from typing import Any

import pytest

from prefixd.clients.cli.main import EXIT_FAILED, EXIT_UNREACHABLE, EXIT_USAGE, PANELS, run
from prefixd.clients.cli.output import print_order
from tests.clients.conftest import BLOCK_COUNT, POOL_NAME, Scene
from tests.support.controller import controller_thread, stubs
from tests.support.driver import Driver

Captured = pytest.CaptureFixture[str]


def printed(capsys: Captured, *arguments: str) -> str:
    """Runs a command that must succeed and returns what it printed."""
    code = run(arguments)
    output = capsys.readouterr()
    assert (code, output.err) == (0, "")
    return output.out


def printed_json(capsys: Captured, *arguments: str) -> Any:
    """Runs a command with --json and returns the document it printed."""
    return json.loads(printed(capsys, *arguments, "--json"))


def failed(capsys: Captured, *arguments: str) -> tuple[int, str]:
    """Runs a command that must fail with one line on standard error; returns code and line."""
    code = run(arguments)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert len(lines) == 1, output.err
    assert output.out == ""
    return code, lines[0]


@pytest.fixture(autouse=True)
def _address(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands find the scene's controller by the environment variable."""
    monkeypatch.setenv("PREFIXD_CONTROLLER", scene.address)


@pytest.mark.parametrize(
    "arguments",
    [
        ("block", str(2**31)),
        ("generate", "hello", "-n", str(2**31)),
        ("generate", "hello", "--top-k", str(2**31)),
        ("generate", "hello", "--seed", str(2**63)),
        ("generate", "hello", "--seed", "-1"),
        ("generate", "no text: \udcff"),
        ("sequence", "no text: \udcff"),
        ("--timeout", "inf", "pools"),
    ],
)
def test_what_cannot_be_sent_is_wrong_usage(capsys: Captured, arguments: tuple[str, ...]) -> None:
    """A number that fits no message, and bytes that are no text, are told in one line."""
    code, line = failed(capsys, *arguments)
    assert code == EXIT_USAGE
    assert line.startswith("prefixd: ")


def test_pools_prints_a_row_per_pool(capsys: Captured) -> None:
    """The table names the pool and what drives it."""
    output = printed(capsys, "pools")
    assert POOL_NAME in output
    assert "lease ends in" in output


def test_pools_on_a_narrow_terminal_lose_no_digit(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns an account has a row per number, and nothing is cut."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = printed(capsys, "pools")
    assert "…" not in output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    assert ["pool", POOL_NAME] in rows
    assert ["blocks", str(BLOCK_COUNT - 1)] in rows
    assert max(map(len, output.splitlines())) <= 80


def test_pools_json_has_the_fields_of_a_pool(capsys: Captured) -> None:
    """The JSON keys are the documented field names."""
    (pool,) = printed_json(capsys, "pools")
    assert pool["pool_name"] == POOL_NAME
    assert pool["block_count"] == BLOCK_COUNT
    assert pool["statistics"]["sequence_count"] == 3
    assert pool["groups"][0]["kind"] == "full_attention"


def test_info_prints_the_controller(capsys: Captured) -> None:
    """Fields as rows, and the same as JSON."""
    assert "sha256_cbor" in printed(capsys, "info")
    assert printed_json(capsys, "info")["hash_algorithm"] == "sha256_cbor"


def test_sequences_lists_what_is_open(capsys: Captured) -> None:
    """The only pool needs no name, and notes tell what is special about a sequence."""
    output = printed(capsys, "sequences")
    assert "first" in output
    assert "LoRA poet" in output
    assert [3, 3, 1] == [
        row["block_count"]
        for row in sorted(
            printed_json(capsys, "sequences", "--pool", POOL_NAME), key=lambda row: row["handle"]
        )
    ]


def test_sequence_prints_its_block_table(capsys: Captured) -> None:
    """The block table stands with the tokens that its blocks hold."""
    output = printed(capsys, "sequence", "second")
    assert "0-11" in output
    assert "1    2    4" in output
    found = printed_json(capsys, "sequence", "second")
    assert [{"block_ids": [1, 2, 4]}] == found["tables"]


def test_blocks_can_be_narrowed(capsys: Captured) -> None:
    """--state asks the server for these blocks only."""
    assert len(printed_json(capsys, "blocks")) == BLOCK_COUNT - 1
    free = printed_json(capsys, "blocks", "--state", "free")
    assert [6, 7, 8, 9, 10, 11] == [block["block_id"] for block in free]
    assert "published" in printed(capsys, "blocks", "--pool", POOL_NAME, "--state", "held")


def test_block_names_its_holders(capsys: Captured) -> None:
    """A shared block is held by both sequences."""
    assert "held by first\nheld by second\n" in printed(capsys, "block", "1")
    assert ["first", "second"] == printed_json(capsys, "block", "1")["sequence_ids"]


def test_free_prints_the_free_order(capsys: Captured) -> None:
    """Ids in the order of the next takes, runs in short."""
    assert printed(capsys, "free") == "6..11\n"
    assert [6, 7, 8, 9, 10, 11] == printed_json(capsys, "free", "-p", POOL_NAME)["block_ids"]


def test_order_is_printed_in_runs(capsys: Captured) -> None:
    """Up and down by one, three ids at least."""
    print_order([9, 7, 8, 6, 5, 4, 3, 10, 11, 12, 20, 30])
    assert capsys.readouterr().out == "9 7 8 6..3 10..12 20 30\n"


def test_flush_is_refused_while_blocks_are_held(capsys: Captured) -> None:
    """The server's reason stands at the front of the line."""
    code, line = failed(capsys, "flush")
    assert code == EXIT_FAILED
    assert line.startswith("prefixd: BLOCKS_IN_USE: ")


def test_flush_tells_what_it_dropped(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle pool is flushed."""
    with controller_thread() as controller, stubs(controller.address) as raw:
        Driver(raw, "idle")
        monkeypatch.setenv("PREFIXD_CONTROLLER", controller.address)
        assert printed(capsys, "flush", "--pool", "idle") == "dropped 0 cached blocks\n"
        assert printed_json(capsys, "flush", "--pool", "idle") == {"dropped_block_count": 0}


def test_several_pools_must_be_told_apart(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name there is one line that lists the choices; without a pool it says so."""
    with controller_thread() as controller, stubs(controller.address) as raw:
        monkeypatch.setenv("PREFIXD_CONTROLLER", controller.address)
        assert failed(capsys, "blocks") == (EXIT_FAILED, "prefixd: the controller has no pool")
        Driver(raw, "one")
        Driver(raw, "two")
        code, line = failed(capsys, "blocks")
        assert (code, "name one of the 2 pools with --pool: one, two" in line) == (
            EXIT_FAILED,
            True,
        )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("blocks", "--pool", "nobody"), "POOL_NOT_FOUND"),
        (("sequence", "nobody"), "SEQUENCE_NOT_FOUND"),
        (("block", "4000"), "BLOCK_NOT_FOUND"),
    ],
)
def test_a_refusal_is_one_line_with_its_reason(
    capsys: Captured, arguments: tuple[str, ...], reason: str
) -> None:
    """What the server refused, in the server's words."""
    code, line = failed(capsys, *arguments)
    assert code == EXIT_FAILED
    assert line.startswith(f"prefixd: {reason}: ")


@pytest.mark.parametrize("command", ["pools", "info", "sequences", "blocks", "free"])
def test_a_dead_controller_is_one_line(capsys: Captured, unused_port: int, command: str) -> None:
    """Nobody listens: one line with the address, and an exit code of its own."""
    address = f"127.0.0.1:{unused_port}"
    code, line = failed(capsys, command, "--controller", address)
    assert code == EXIT_UNREACHABLE
    assert address in line


@pytest.mark.parametrize("arguments", [("generate", "hello"), ("chat",), ("info", "worker")])
def test_a_dead_worker_is_one_line(
    capsys: Captured, unused_port: int, arguments: tuple[str, ...]
) -> None:
    """Before anybody has typed a message, too."""
    code, line = failed(capsys, *arguments, "--worker", f"127.0.0.1:{unused_port}")
    assert (code, "no server answers" in line) == (EXIT_UNREACHABLE, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--bogus",),
        ("bogus",),
        ("pools", "--bogus"),
        ("sequence",),
        ("block", "one"),
        ("blocks", "--state", "odd"),
        ("info", "moon"),
        ("generate", "x", "--temperature", "-1"),
        ("pools", "--controller", "nonsense"),
        ("--timeout", "0", "pools"),
        ("--key-file", __file__, "pools"),
        ("evict",),
        ("generate", "x", "--length-penalty", "2"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: Captured, arguments: tuple[str, ...]) -> None:
    """A bad option, value, argument or address: one line and exit code 2."""
    code, line = failed(capsys, *arguments)
    assert (code, line.startswith("prefixd: ")) == (EXIT_USAGE, True)


def test_a_wrong_command_line_names_the_help_to_read(capsys: Captured) -> None:
    """The help named is the command's own, and no library's words stand before ours."""
    assert failed(capsys, "bogus")[1].endswith("(see prefixd --help)")
    assert failed(capsys, "evict")[1] == (
        "prefixd: name blocks by id or with --hash (see prefixd evict --help)"
    )
    assert "Value error" not in failed(capsys, "blocks", "--state", "odd")[1]


@pytest.mark.parametrize(
    "command",
    [command.__name__ for commands in PANELS.values() for command in commands] + ["up"],
)
def test_every_command_helps_with_an_example(capsys: Captured, command: str) -> None:
    """--help says what a command is for and shows how it is used."""
    output = printed(capsys, command, "--help")
    assert "Usage: prefixd" in output
    assert "Example" in output


def test_controller_hands_its_options_on() -> None:
    """`prefixd controller --help` is the controller's own help."""
    done = subprocess.run(
        [sys.executable, "-m", "prefixd.clients.cli.main", "controller", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "python -m prefixd.controller" in done.stdout) == (0, True)


def test_a_reader_that_has_enough_is_no_error(scene: Scene) -> None:
    """`prefixd blocks | head` ends quietly when the pipe is closed."""
    command = f"{sys.executable} -m prefixd.clients.cli.main blocks --json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[\n", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_closed_standard_streams_are_told(closed: str) -> None:
    """A command that starts without standard input or output says so in one line."""
    command = f"{sys.executable} -m prefixd.clients.cli.main pools {closed}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (EXIT_FAILED, "")
    assert done.stderr == "prefixd: standard input and output must be open\n"


def test_clients_need_no_torch() -> None:
    """Neither the client library nor the command line imports torch or the other processes."""
    script = (
        "import sys; import prefixd.clients.cli.main, prefixd.clients.demo.__main__;"
        "bad = {'torch', 'transformers', 'prefixd.worker', 'prefixd.controller'} & {*sys.modules};"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
