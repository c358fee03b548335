"""The controller's core without RPC: admission of a long prompt, cached and not, and decoding."""

from collections.abc import Iterator

import numpy as np

from bench.figures import Figure
from bench.hashing import library_chain
from bench.measure import Samples, Timed, in_turns, ratio_of
from bench.prompts import BLOCK_SIZE, PROMPT_TOKEN_COUNT, Prompts
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    DecodeEntry,
    Entry,
    Handle,
    OpenEntry,
    PoolSpec,
    SequenceId,
    Step,
    StepId,
    TokenArray,
)
from prefixd.controller.core.pool import Pool

ADMISSION_ROUNDS = 200
DECODE_ROUNDS = 200
DECODE_ROW_COUNT = 256
HASH_SLICE_BLOCKS = 1 << 20
"""More than any backlog here: all missing digests in one call."""


class Driver:
    """Steps a pool by itself: every step confirms the one before it."""

    def __init__(self, *, block_count: int, eviction_policy: str = "lru") -> None:
        spec = PoolSpec(
            pool_name="bench",
            block_count=block_count,
            block_size=BLOCK_SIZE,
            eviction_policy=eviction_policy,
        )
        self.pool = Pool(spec, epoch=1, hasher=Hasher("sha256_cbor", seed="0"))
        self._step_id = 0
        self._handle = 0

    def step(self, *entries: Entry) -> Step:
        """Returns the next step."""
        self._step_id += 1
        return Step(StepId(self._step_id), StepId(self._step_id - 1), entries)

    def apply(self, *entries: Entry) -> None:
        """Applies the next step."""
        self.pool.apply_step(self.step(*entries), now_ms=self._step_id)

    def open_entry(self, token_ids: TokenArray) -> OpenEntry:
        """Returns the entry that opens another sequence."""
        self._handle += 1
        name = SequenceId(f"sequence-{self._handle}")
        return OpenEntry(Handle(self._handle), name, token_ids)

    def close_last(self) -> None:
        """Closes the sequence that was opened last, and computes its missing digests."""
        self.apply(CloseEntry(Handle(self._handle), CloseReason.FINISHED))
        self.apply()
        while self.pool.hash_slice(HASH_SLICE_BLOCKS):
            pass


class Admission:
    """The admission of one prompt after the other; `prepare` comes before each call."""

    def __init__(self, driver: Driver, prompts: Iterator[TokenArray]) -> None:
        self._driver = driver
        self._prompts = prompts
        self.prepare()

    def prepare(self) -> None:
        """Makes the step that opens the next prompt."""
        self.token_ids = next(self._prompts)
        self._entry = self._driver.open_entry(self.token_ids)

    def admit(self) -> None:
        """Admits the prompt."""
        self._driver.apply(self._entry)

    def admit_and_hash(self) -> None:
        """Admits the prompt and computes all its digests."""
        self._driver.apply(self._entry)
        while self._driver.pool.hash_slice(HASH_SLICE_BLOCKS):
            pass


def same_prompt(prompt: TokenArray) -> Iterator[TokenArray]:
    """Gives one prompt again and again."""
    while True:
        yield prompt


def fresh_prompts(prompts: Prompts) -> Iterator[TokenArray]:
    """Gives prompts that share nothing."""
    while True:
        yield prompts.next()


def cached_admission_figures() -> list[Figure]:
    """Measures the admission of a long prompt that is cached whole, against an empty step."""
    prompt = Prompts(seed=1).next()
    driver = Driver(block_count=2 * PROMPT_TOKEN_COUNT // BLOCK_SIZE)
    driver.apply(driver.open_entry(prompt))
    driver.close_last()
    admission = Admission(driver, same_prompt(prompt))
    empty = Driver(block_count=2)
    samples = in_turns(
        {
            "admission": Timed(admission.admit, admission.prepare, driver.close_last),
            "empty": Timed(empty.apply),
        },
        round_count=ADMISSION_ROUNDS,
        warm_up_count=20,
    )
    return [
        Figure(
            name="core: admission of 8,192 cached tokens",
            value=samples["admission"].median_us,
            unit="us",
            baseline="an empty step",
            baseline_value=samples["empty"].median_us,
            ratio=ratio_of(samples["admission"], samples["empty"]),
            target=60,
            target_of="value",
        )
    ]


def new_admission_figures() -> list[Figure]:
    """Measures the admission of long prompts never seen before: with room, and with evictions."""
    prompt_block_count = PROMPT_TOKEN_COUNT // BLOCK_SIZE
    room = _new_admission(block_count=(ADMISSION_ROUNDS + 22) * prompt_block_count)
    full = _new_admission(block_count=8 * prompt_block_count)
    return [
        _against_libraries("core: admission of 8,192 new tokens with digests", room, target=0.7),
        _against_libraries("core: the same, each block evicting another", full, target=None),
    ]


def _new_admission(*, block_count: int) -> dict[str, Samples]:
    driver = Driver(block_count=block_count)
    admission = Admission(driver, fresh_prompts(Prompts(seed=1)))
    return in_turns(
        {
            "admission": Timed(admission.admit_and_hash, admission.prepare, driver.close_last),
            "libraries": Timed(lambda: library_chain("sha256_cbor", admission.token_ids)),
        },
        round_count=ADMISSION_ROUNDS,
        warm_up_count=20,
    )


def _against_libraries(name: str, samples: dict[str, Samples], *, target: float | None) -> Figure:
    return Figure(
        name=name,
        value=samples["admission"].median_us,
        unit="us",
        baseline="cbor2 + hashlib on the same blocks",
        baseline_value=samples["libraries"].median_us,
        ratio=ratio_of(samples["admission"], samples["libraries"]),
        target=target,
    )


class Decoding:
    """Sequences of staggered lengths that decode together: one row in 16 completes a block."""

    def __init__(self, driver: Driver, prompts: Prompts) -> None:
        entries = [
            driver.open_entry(prompts.next(4 * BLOCK_SIZE + row % BLOCK_SIZE))
            for row in range(DECODE_ROW_COUNT)
        ]
        driver.apply(*entries)
        self._driver = driver
        self._prompts = prompts
        self._handles = np.array([entry.handle for entry in entries], np.int64)
        self._positions = np.array([len(entry.token_ids) for entry in entries], np.int64)
        self._counts = np.ones(DECODE_ROW_COUNT, np.int64)
        self.prepare()

    def prepare(self) -> None:
        """Makes the entry for every sequence's next token."""
        self._entry = DecodeEntry(
            handles=self._handles,
            scheduled_count_before=self._positions.copy(),
            known_count_before=self._positions.copy(),
            token_counts=self._counts,
            token_ids=self._prompts.next(DECODE_ROW_COUNT),
        )

    def decode(self) -> None:
        """Decodes one token of every sequence."""
        self._driver.apply(self._entry)

    def settle(self) -> None:
        """Moves every sequence on by one position."""
        self._positions += 1

    def hash(self) -> None:
        """Does what the reply did not wait for, digests above all, as the server does between two
        steps."""
        while self._driver.pool.hash_slice(HASH_SLICE_BLOCKS):
            pass


def decode_figures() -> list[Figure]:
    """Measures a decode step of many sequences against an empty step."""
    block_count = DECODE_ROW_COUNT * (8 + DECODE_ROUNDS // BLOCK_SIZE)
    decoding = Decoding(Driver(block_count=block_count), Prompts(seed=2))
    empty = Driver(block_count=2)
    samples = in_turns(
        {
            "decode": Timed(decoding.decode, decoding.prepare, decoding.settle),
            "digests": Timed(decoding.hash),
            "empty": Timed(empty.apply),
        },
        round_count=DECODE_ROUNDS - 20,
        warm_up_count=20,
    )
    return [
        Figure(
            name=f"core: decode step of {DECODE_ROW_COUNT} sequences",
            value=samples["decode"].median_us,
            unit="us",
            baseline="an empty step",
            baseline_value=samples["empty"].median_us,
            ratio=ratio_of(samples["decode"], samples["empty"]),
            target=200,
            target_of="value",
        ),
        Figure(
            name="core: what is done behind such a step's reply, digests of 16 blocks included",
            value=samples["digests"].median_us,
            unit="us",
            baseline="the step",
            baseline_value=samples["decode"].median_us,
            ratio=ratio_of(samples["digests"], samples["decode"]),
        ),
    ]
