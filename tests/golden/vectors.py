"""Checks the core's digests against a file of hash vectors: `python -m tests.golden.vectors FILE`.

Prints one line and exits with 0 where all are equal, 1 at the first difference, 2 for a bad file.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefixd.controller.core import inspect
from prefixd.controller.core.hashing import ExtraKeys, Hasher, Seed, choose_seed, group_key
from prefixd.controller.core.messages import (
    BlockHash,
    Handle,
    Identity,
    LoraAdapter,
    MultimodalItem,
    OpenEntry,
    PoolSpec,
    SequenceId,
    Step,
    StepId,
)
from prefixd.controller.core.pool import Pool
from tests.golden.player import Difference, differ
from tests.golden.traces import (
    FormatError,
    as_algorithm,
    as_token_ids,
    read_json,
    reading,
    require,
)
from tests.model.digests import extra_keys


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows of each kind were compared."""

    root_count: int
    vector_count: int
    block_count: int
    group_key_count: int
    lookahead_vector_count: int

    def __str__(self) -> str:
        return (
            f"{self.root_count} roots, {self.vector_count} vectors ({self.block_count} blocks), "
            f"{self.group_key_count} group keys: all equal; "
            f"{self.lookahead_vector_count} lookahead vectors not checked"
        )


def check_vectors(path: Path) -> Counts:
    """Checks a whole file. Raises Difference or FormatError."""
    document = read_json(path)
    with reading(str(path)):
        require(isinstance(document, dict), "expected an object with none_hash and vectors")
        roots, vectors = document["none_hash"], document["vectors"]
        keys, lookahead = document["group_keys"], document.get("lookahead_vectors", [])
        for index, row in enumerate(roots):
            _check(f"none_hash[{index}]", row, _check_root)
        for index, row in enumerate(vectors):
            _check(f"vectors[{index}]", row, _check_vector)
        for index, row in enumerate(keys):
            _check(f"group_keys[{index}]", row, _check_group_key)
        block_count = sum(len(row["blocks"]) for row in vectors)
    return Counts(len(roots), len(vectors), block_count, len(keys), len(lookahead))


def _check(where: str, row: Any, check: Any) -> None:
    with reading(where):
        require(isinstance(row, dict), "expected an object")
        try:
            check(row)
        except Difference as difference:
            case = f" ({row['algo']}, {row['case']})" if "case" in row else ""
            raise Difference(f"{where}{case}: {difference}") from difference


def _expect(what: str, *, expected: object, actual: object) -> None:
    if expected != actual:
        raise differ(what, expected=expected, actual=actual)


def _check_root(row: Any) -> None:
    algorithm = as_algorithm(row["algo"])
    seed = choose_seed(
        algorithm, option=None, environment=row["pythonhashseed"], random_bytes=bytes(32)
    )
    if row["none_hash"] is None:
        _expect("seed", expected=Seed(bytes(32).hex(), is_random=True), actual=seed)
        return
    _expect("seed", expected=row["seed_string"], actual=seed.text)
    hasher = Hasher(algorithm, seed=seed.text)
    _expect("root digest", expected=row["none_hash"], actual=hasher.root.hex())
    preimage = hasher.algorithm.serialise_seed(seed.text)
    _expect("root preimage", expected=row["preimage_hex"], actual=preimage.hex())


def _check_vector(row: Any) -> None:
    hasher = Hasher(as_algorithm(row["algo"]), seed=row["pythonhashseed"])
    size = int(row["block_size"])
    token_ids = as_token_ids(row["token_ids"])
    identity = _identity(row)
    require(len(row["blocks"]) == len(token_ids) // size, "one row per full block is needed")
    parent = hasher.root
    for index, block in enumerate(row["blocks"]):
        recorded = _extra_keys(block["extra_keys"])
        derived = extra_keys(identity, block_index=index, block_size=size)
        _expect(f"extra keys of block {index}", expected=recorded, actual=derived or ())
        tokens = token_ids[index * size : (index + 1) * size]
        preimage = hasher.preimage(parent, tokens, recorded)
        if "preimage_hex" in block:
            _expect(
                f"preimage of block {index}",
                expected=block["preimage_hex"],
                actual=preimage.hex(),
            )
        parent = hasher.block_hash(parent, tokens, recorded)
        _expect(f"digest of block {index}", expected=block["hash"], actual=parent.hex())
    _expect(
        "digests in a pool",
        expected=[block["hash"] for block in row["blocks"]],
        actual=pool_digests(hasher, token_ids=token_ids, identity=identity, block_size=size),
    )


def pool_digests(
    hasher: Hasher, *, token_ids: Sequence[int], identity: Identity, block_size: int
) -> list[str]:
    """Opens a sequence in a fresh pool and returns the digests of its published blocks."""
    block_count = len(token_ids) // block_size + 2
    pool = Pool(
        PoolSpec(pool_name="vectors", block_count=block_count, block_size=block_size),
        epoch=1,
        hasher=hasher,
    )
    entry = OpenEntry(
        Handle(1), SequenceId("vector"), np.array(token_ids, np.uint32), identity=identity
    )
    pool.apply_step(Step(StepId(1), StepId(0), (entry,)), now_ms=0)
    pool.apply_step(Step(StepId(2), StepId(1)), now_ms=0)
    rows = inspect.blocks(pool, after=0, count=block_count)
    return [row.block_hash.hex() for row in rows if row.block_hash is not None]


def _identity(row: Any) -> Identity:
    lora = row["lora"]
    return Identity(
        lora=None if lora is None else LoraAdapter(name=lora["name"], path=lora["path"]),
        multimodal_items=tuple(
            MultimodalItem(
                identifier=item["identifier"], offset=item["offset"], token_count=item["length"]
            )
            for item in row["mm"]
        ),
        cache_salt=row["cache_salt"] or "",
        prompt_embeds_digests=tuple(
            key[1]
            for block in row["blocks"]
            for key in _extra_keys(block["extra_keys"])
            if key[0] == "prompt_embeds" and isinstance(key[1], bytes)
        ),
    )


def _extra_keys(rows: Any) -> ExtraKeys:
    return tuple(
        tuple(bytes.fromhex(part["bytes"]) if isinstance(part, dict) else part for part in row)
        for row in rows or ()
    )


def _check_group_key(row: Any) -> None:
    digest = BlockHash(bytes.fromhex(row["hash"]))
    key = group_key(digest, group_index=int(row["group_id"]))
    _expect("index key", expected=row["index_key"], actual=key.hex())


def main(arguments: Sequence[str]) -> int:
    """Checks the file that the only argument names; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m tests.golden.vectors FILE", file=sys.stderr)
        return 2
    try:
        print(check_vectors(Path(arguments[0])))
    except Difference as difference:
        print(difference)
        return 1
    except FormatError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
