"""A whole engine in one file, on nothing but the generated protos: a model for other languages.

It registers a pool, opens two prompts that share a prefix, decodes both, and gives the pool back.
Its "model" keeps one number per slot and reads its context back through the block tables, so a
wrong slot changes the answer.

    python clients/example_engine.py                   # against a controller at 127.0.0.1:7600
    python clients/example_engine.py 127.0.0.1:7700    # or wherever it listens
"""

import queue
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from prefixd.v1 import cache_pb2, cache_pb2_grpc, pool_pb2, pool_pb2_grpc, types_pb2

BLOCK_COUNT, BLOCK_SIZE, VOCABULARY_SIZE = 17, 4, 97
FINISHED = types_pb2.CLOSE_REASON_FINISHED


@dataclass
class Sequence:
    """A token list and its block table."""

    token_ids: list[int]
    block_ids: list[int]
    cached_token_count: int

    def slot(self, position: int) -> int:
        """Where the KV of a position lives."""
        return self.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


class Engine:
    """Drives one pool: each step is planned by the controller, then executed here."""

    def __init__(self, channel: grpc.Channel, pool_name: str) -> None:
        self._pools = pool_pb2_grpc.PoolServiceStub(channel)
        wanted = pool_pb2.RegisterPoolRequest(
            pool_name=pool_name, block_count=BLOCK_COUNT, block_size=BLOCK_SIZE
        )
        pool = self._pools.RegisterPool(wanted)
        self._key: dict[str, Any] = {"pool_name": pool_name, "epoch": pool.epoch}
        self._key["session_token"] = pool.session_token
        self._sent: queue.SimpleQueue[cache_pb2.SessionRequest | None] = queue.SimpleQueue()
        cache = cache_pb2_grpc.CacheServiceStub(channel)
        self._answers = iter(cache.Session(iter(self._sent.get, None)))
        self._sent.put(cache_pb2.SessionRequest(start=cache_pb2.SessionStart(**self._key)))
        self._step_id = next(self._answers).ready.applied_step_id
        self._kv = [0] * (BLOCK_COUNT * BLOCK_SIZE)
        self.sequences: dict[int, Sequence] = {}

    def step(self, *entries: cache_pb2.StepEntry) -> list[cache_pb2.EntryOutcome]:
        """Has one step planned; the step before it has been executed, which this one confirms."""
        step = cache_pb2.StepRequest(
            step_id=self._step_id + 1, executed_step_id=self._step_id, entries=entries
        )
        self._sent.put(cache_pb2.SessionRequest(step=step))
        answer = next(self._answers)
        if not answer.HasField("step"):
            raise RuntimeError(str(answer))
        self._step_id += 1
        return list(answer.step.outcomes)

    def open(self, prompts: dict[int, list[int]]) -> None:
        """Opens sequences by handle; equal prefixes are computed once, even within this step."""
        opens = [
            cache_pb2.OpenEntry(handle=handle, sequence_id=f"example-{handle}", token_ids=prompt)
            for handle, prompt in prompts.items()
        ]
        for outcome in self.step(*(cache_pb2.StepEntry(open=one) for one in opens)):
            plan = outcome.open.plan
            token_ids, block_ids = list(prompts[plan.handle]), list(plan.groups[0].block_ids)
            sequence = Sequence(token_ids, block_ids, plan.cached.end_token)
            self.sequences[plan.handle] = sequence
            for position in range(plan.scheduled.start_token, plan.scheduled.end_token):
                self._store(sequence, position)

    def decode(self) -> None:
        """Adds one token to every sequence, all of them in one columnar entry."""
        sequences = list(self.sequences.values())
        positions = [len(sequence.token_ids) for sequence in sequences]
        for sequence in sequences:
            slots = map(sequence.slot, range(len(sequence.token_ids)))
            sequence.token_ids.append(next_token(self._kv[slot] for slot in slots))
        rows = cache_pb2.DecodeEntry(
            handles=self.sequences,
            scheduled_count_before=positions,
            known_count_before=positions,
            token_counts=[1] * len(sequences),
            token_ids=[sequence.token_ids[-1] for sequence in sequences],
        )
        new_block_ids = (
            self.step(cache_pb2.StepEntry(decode=rows))[0].decode.new_blocks[0].block_ids
        )
        for sequence, position, block_id in zip(sequences, positions, new_block_ids, strict=True):
            if block_id:
                sequence.block_ids.append(block_id)
            self._store(sequence, position)

    def close(self) -> None:
        """Closes all sequences, confirms the last step and gives the pool back."""
        closes = [cache_pb2.CloseEntry(handle=one, reason=FINISHED) for one in self.sequences]
        self.step(*(cache_pb2.StepEntry(close=one) for one in closes))
        self.step()
        self._sent.put(None)
        self._pools.ReleasePool(pool_pb2.ReleasePoolRequest(**self._key))

    def _store(self, sequence: Sequence, position: int) -> None:
        self._kv[sequence.slot(position)] = kv_of(position, sequence.token_ids[position])


def kv_of(position: int, token_id: int) -> int:
    """What the toy model keeps of one token."""
    return token_id * 31 + position * 17


def next_token(kv: Iterable[int]) -> int:
    """What the toy model says behind a context."""
    return sum(kv) % VOCABULARY_SIZE


def answered_without_cache(prompt: list[int], token_count: int) -> list[int]:
    """A prompt and its answer, with everything computed anew for each token."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + token_count:
        token_ids.append(next_token(kv_of(*placed) for placed in enumerate(token_ids)))
    return token_ids


def main(address: str = "127.0.0.1:7600") -> None:
    """Runs the example against the controller at `address`."""
    shared = [11, 23, 35, 47, 59, 61, 73, 85]
    prompts = {1: [*shared, 2, 4], 2: [*shared, 3, 5, 7]}
    with grpc.insecure_channel(address) as channel:
        engine = Engine(channel, "example-engine")
        engine.open(prompts)
        for _ in range(6):
            engine.decode()
        for handle, one in engine.sequences.items():
            same = one.token_ids == answered_without_cache(prompts[handle], token_count=6)
            print(f"sequence {handle}: {one.cached_token_count} cached tokens,", end=" ")
            print(f"blocks {one.block_ids}, answer {'right' if same else 'WRONG'}")
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
