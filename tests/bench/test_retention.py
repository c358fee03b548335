"""What hints are worth, replayed (S20)."""

import json
from pathlib import Path

import pytest

from bench.retention import Request, TraceInvalid, hinted, hit_rate, read_trace
from prefixd.controller.core.hints import Continuation

CAPACITY = 30


def conversations() -> list[Request]:
    """Every second request begins a conversation of two turns, the others are asked once."""
    requests = []
    for number in range(60):
        talk = tuple(range(number * 100, number * 100 + 6))
        alone = tuple(range(number * 100 + 50, number * 100 + 58))
        requests += [Request(0, talk, continues=True), Request(0, alone, continues=False)]
        if number >= 3:
            before = (number - 3) * 100
            requests.append(Request(0, tuple(range(before, before + 7)), continues=False))
    return requests


def test_s20_true_hints_find_what_is_lost_without_them() -> None:
    """S20: the pool holds the open conversations and not what lies between two turns, too."""
    requests = conversations()
    hints = hinted(requests, accuracy=1.0)
    lru = hit_rate(requests, hints, eviction_policy="lru", block_count=CAPACITY)
    retention = hit_rate(requests, hints, eviction_policy="retention", block_count=CAPACITY)
    assert lru == 0
    assert retention > 0.15


def test_a_request_continues_where_its_last_full_block_is_asked_for_again() -> None:
    """The partial block behind it is not: the next turn fills it otherwise."""
    rows = [
        {"timestamp": 0, "input_length": 1030, "hash_ids": [0, 1, 2]},
        {"timestamp": 9, "input_length": 2000, "hash_ids": [0, 1, 3, 4]},
    ]
    requests = read_trace(json.dumps(row) for row in rows)
    assert [request.continues for request in requests] == [True, False]
    told = [hint.continuation for hint in hinted(requests, accuracy=1.0)]
    assert told == [Continuation.EXPECTED, Continuation.OVER]
    lies = [hint.continuation for hint in hinted(requests, accuracy=0.0)]
    assert lies == told[::-1]


@pytest.mark.parametrize("line", ["garbage", "3", '{"timestamp": 0, "hash_ids": [0]}', "\n"])
def test_a_line_that_is_no_request_is_named(line: str) -> None:
    """The number of the line tells where a trace is damaged."""
    good = '{"timestamp": 0, "input_length": 512, "hash_ids": [0]}'
    with pytest.raises(TraceInvalid, match="line 2 is no JSON object"):
        read_trace([good, line])


@pytest.mark.slow
def test_s20_true_hints_are_worth_more_than_any_order_on_a_real_trace(shared_folder: Path) -> None:
    """S20: an hour of real conversations, in a pool of a tenth of its blocks."""
    with (shared_folder / "traces/mooncake_conversation.jsonl").open(encoding="utf-8") as lines:
        requests = read_trace(lines)[:2_000]
    block_count = len({block for request in requests for block in request.block_ids}) // 10
    hints = hinted(requests, accuracy=1.0)
    rates = [
        hit_rate(requests, hints, eviction_policy=name, block_count=block_count)
        for name in ("lru", "retention")
    ]
    assert rates[1] > rates[0] + 0.05
