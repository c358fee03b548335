"""The recorded traces, replayed over gRPC and on the naive model; the tool says what differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import replay
from tests.golden.player import Player
from tests.golden.subjects import NaiveSubject
from tests.golden.traces import load_traces

DATA = Path(__file__).parent / "data" / "apc_traces.json"


def test_committed_traces_replay_equal_over_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    """Results, events (S25), free order, index, counts, tables and counters equal the record."""
    assert replay.main([str(DATA)]) == 0
    assert capsys.readouterr().out == "2 traces, 320 operations: all equal\n"


def test_all_recorded_traces_replay_equal_over_grpc(
    shared_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole recording replays equal."""
    assert replay.main([str(shared_folder / "golden" / "apc_traces.json")]) == 0
    assert capsys.readouterr().out == "10 traces, 1600 operations: all equal\n"


def test_naive_model_replays_the_recorded_traces() -> None:
    """The model that judges the core was itself judged by the record."""
    for trace in load_traces(DATA):
        Player(NaiveSubject(trace)).play(trace)


def changed(tmp_path: Path, change: Any) -> Path:
    """Writes the first committed trace's first operations with one change."""
    traces = json.loads(DATA.read_text())[:1]
    traces[0]["ops"] = traces[0]["ops"][:12]
    change(traces)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(traces))
    return path


def set_result(traces: Any) -> None:
    """Records another match length for the first operation."""
    traces[0]["ops"][0]["result"][0] += 1


def swap_free_blocks(traces: Any) -> None:
    """Records another free order after the third operation."""
    order = traces[0]["ops"][2]["free_queue"]
    order[0], order[1] = order[1], order[0]


def set_digest(traces: Any) -> None:
    """Records another state after the fourth operation."""
    traces[0]["ops"][3]["digest"] = "0" * 16


def change_a_stored_digest(traces: Any) -> None:
    """Records another digest for a block that the first operation stored."""
    traces[0]["ops"][0]["events"][0][1][0] ^= 1


def change_a_stored_token(traces: Any) -> None:
    """Records another token for a block that the first operation stored."""
    traces[0]["ops"][0]["events"][0][3][0] += 1


def forget_an_event(traces: Any) -> None:
    """Records one event less for the first operation."""
    traces[0]["ops"][0]["events"].pop()


def keep_counters(_: Any) -> None:
    """Keeps the counters of the whole trace behind its first operations."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_result, "trace 0, operation 0 (new r0): result"),
        (swap_free_blocks, "trace 0, operation 2"),
        (set_digest, "trace 0, operation 3"),
        (change_a_stored_digest, "trace 0, operation 0 (new r0): event"),
        (change_a_stored_token, "trace 0, operation 0 (new r0): event"),
        (forget_an_event, "trace 0, operation 0 (new r0): event"),
        (keep_counters, "trace 0, counters"),
    ],
)
def test_first_difference_is_said_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    """Any kind of difference is found and said with what was expected and what came."""
    assert replay.main([str(changed(tmp_path, change))]) == 1
    output = capsys.readouterr().out
    assert output.startswith(said)
    assert "expected:" in output
    assert "actual:" in output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{}", "expected a list of traces"),
        ("[3]", "trace 0"),
        ('[{"ops": 1}]', "ops must be a list"),
        ('[{"ops": [], "num_blocks": 4}]', "no field 'block_size'"),
    ],
)
def test_bad_trace_file_gives_one_line_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """A file of another shape is no difference and no traceback."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert replay.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_absent_trace_file_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that leads nowhere is said in one line."""
    assert replay.main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
