"""Attempts to be given another prompt's KV. Every one of them must end in a miss or a refusal."""

import pytest

from prefixd.controller.core import invariants, limits
from prefixd.controller.core.hashing import HASHES
from prefixd.controller.core.messages import (
    Identity,
    LoraAdapter,
    MultimodalItem,
    PoolSpec,
    PrefixMatch,
)
from prefixd.controller.core.pool import Pool
from tests.controller.core.driver import Driver, close_entry
from tests.controller.test_event_log import WatchedRun
from tests.model.colliding import CollidingHasher, CollidingWatcher

PROMPT = list(range(100, 113))
CACHED_TOKEN_COUNT = 12

LOOK_ALIKES = {
    "no identity": Identity(),
    "salt": Identity(cache_salt="x"),
    "LoRA name": Identity(lora=LoraAdapter("x")),
    "LoRA name and equal path": Identity(lora=LoraAdapter("x", "x")),
    "LoRA name and equal version": Identity(lora=LoraAdapter("x", version="x")),
    "all LoRA texts": Identity(lora=LoraAdapter("x", "x", "x")),
    "LoRA and salt": Identity(lora=LoraAdapter("x"), cache_salt="x"),
    "image": Identity(multimodal_items=(MultimodalItem("x", 0, 1),)),
    "image and salt": Identity(multimodal_items=(MultimodalItem("x", 0, 1),), cache_salt="x"),
    "embeddings": Identity(prompt_embeds_digests=(b"x" * 32,)),
    "salt of that name": Identity(cache_salt="lora"),
    "LoRA of that name": Identity(lora=LoraAdapter("cache_salt")),
}
"""Identities whose texts are as equal as they can be."""

NEAR_MISSES = {
    "boundary between name and path": (
        Identity(lora=LoraAdapter("ab", "c")),
        Identity(lora=LoraAdapter("a", "bc")),
    ),
    "path and version swapped": (
        Identity(lora=LoraAdapter("a", "b", "c")),
        Identity(lora=LoraAdapter("a", "c", "b")),
    ),
    "boundary between salt and LoRA": (
        Identity(lora=LoraAdapter("a"), cache_salt="bc"),
        Identity(lora=LoraAdapter("ab"), cache_salt="c"),
    ),
    "trailing space": (Identity(cache_salt="a"), Identity(cache_salt="a ")),
    "trailing NUL": (Identity(cache_salt="a"), Identity(cache_salt="a\0")),
    "case": (Identity(cache_salt="a"), Identity(cache_salt="A")),
    "composed and decomposed letter": (
        Identity(cache_salt="\u00e9"),
        Identity(cache_salt="e\u0301"),
    ),
    "two images swapped": (
        Identity(multimodal_items=(MultimodalItem("a", 0, 1), MultimodalItem("b", 1, 1))),
        Identity(multimodal_items=(MultimodalItem("b", 0, 1), MultimodalItem("a", 1, 1))),
    ),
    "boundary between images": (
        Identity(multimodal_items=(MultimodalItem("ab", 0, 1), MultimodalItem("c", 1, 1))),
        Identity(multimodal_items=(MultimodalItem("a", 0, 1), MultimodalItem("bc", 1, 1))),
    ),
    "one image twice and once": (
        Identity(multimodal_items=(MultimodalItem("a", 0, 1), MultimodalItem("a", 1, 1))),
        Identity(multimodal_items=(MultimodalItem("a", 0, 2),)),
    ),
    "embeddings one bit apart": (
        Identity(prompt_embeds_digests=(bytes(32),)),
        Identity(prompt_embeds_digests=(bytes(31) + b"\x01",)),
    ),
}
"""Pairs of identities that a careless key would take for equal."""


def cached(driver: Driver, handle: int, identity: Identity, token_ids: list[int]) -> None:
    """Computes and publishes a prompt, and lets its sequence go."""
    opened = driver.open(handle, token_ids, identity=identity)
    assert opened.plan.cached.end_token == 0
    driver.step(close_entry(handle))
    driver.step()


@pytest.mark.parametrize("algorithm", sorted(HASHES))
def test_s2_equal_texts_of_different_kinds_share_nothing(algorithm: str) -> None:
    """A salt, a LoRA name, path or version, and an image may be one text; digests differ too.

    Under each of the algorithms, those over pickle included, which abbreviates equal texts.
    """
    driver = Driver(block_count=100, algorithm=algorithm)
    for handle, identity in enumerate(LOOK_ALIKES.values()):
        cached(driver, handle, identity, PROMPT)
    digests = list(driver.published().values())
    assert len(digests) == 3 * len(LOOK_ALIKES)
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("pair", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_s2_identities_are_compared_exactly(pair: tuple[Identity, Identity]) -> None:
    """Field by field and character by character: nothing is joined, trimmed or folded."""
    for mine, theirs in (pair, pair[::-1]):
        driver = Driver(block_count=20)
        cached(driver, 1, theirs, PROMPT)
        assert driver.match(PROMPT, mine) == PrefixMatch(0, 0)
        assert driver.match(PROMPT, theirs) == PrefixMatch(CACHED_TOKEN_COUNT, 0)


def test_s2_a_salt_in_the_first_block_protects_all_blocks() -> None:
    """No block behind the salted one can be reached without the salt, whatever stands before it."""
    driver = Driver(block_count=40)
    cached(driver, 1, Identity(cache_salt="mine"), PROMPT)
    assert driver.match(PROMPT) == PrefixMatch(0, 0)
    assert driver.match(PROMPT[4:]) == PrefixMatch(0, 0)
    assert driver.match([*range(4), *PROMPT[4:]]) == PrefixMatch(0, 0)


def test_s2_equal_placeholders_of_different_images_share_nothing() -> None:
    """The tokens of an image are the same whatever it shows; its identifier decides."""
    placeholders = [7] * len(PROMPT)
    driver = Driver(block_count=40)
    whole = {
        name: Identity(multimodal_items=(MultimodalItem(name, 0, len(placeholders)),))
        for name in ("cat", "dog", "ca", "t")
    }
    for handle, identity in enumerate(whole.values()):
        cached(driver, handle, identity, placeholders)
    for identity in whole.values():
        assert driver.match(placeholders, identity) == PrefixMatch(CACHED_TOKEN_COUNT, 0)


def test_s2_a_later_image_ends_what_an_equal_prefix_shares() -> None:
    """Blocks in front of it are shared, the first one that it touches is not."""
    driver = Driver(block_count=20)
    cached(driver, 1, Identity(multimodal_items=(MultimodalItem("cat", 8, 4),)), PROMPT)
    dog = Identity(multimodal_items=(MultimodalItem("dog", 8, 4),))
    earlier = Identity(multimodal_items=(MultimodalItem("cat", 7, 5),))
    assert driver.match(PROMPT, dog) == PrefixMatch(8, 0)
    assert driver.match(PROMPT, earlier) == PrefixMatch(4, 0)


def test_s2_embeddings_of_equal_zero_tokens_share_what_their_digests_do() -> None:
    """Prompts of embeddings have no tokens to tell them apart, so each block's digest decides."""
    zeros = [0] * len(PROMPT)
    digests = tuple(bytes([number]) * 32 for number in range(3))
    driver = Driver(block_count=20)
    cached(driver, 1, Identity(prompt_embeds_digests=digests), zeros)
    swapped = Identity(prompt_embeds_digests=(digests[0], digests[2], digests[1]))
    fewer = Identity(prompt_embeds_digests=digests[:2])
    assert driver.match(zeros, swapped) == PrefixMatch(4, 0)
    assert driver.match(zeros, fewer) == PrefixMatch(8, 0)
    assert driver.match(zeros) == PrefixMatch(0, 0)


def test_s4_content_of_a_model_version_does_not_come_back_with_it() -> None:
    """A version that is put in force again finds nothing of its former self, nor of what ran on."""
    driver = Driver(block_count=40, model_version="1")
    cached(driver, 1, Identity(), PROMPT)
    driver.open(2, [*PROMPT, 5, 6], schedule_token_count_max=1)
    driver.pool.set_model_version("2")
    driver.pool.set_model_version("1")
    driver.extend(2, [7, 8, 9])
    driver.step(close_entry(2))
    driver.step()
    assert driver.match([*PROMPT, 5, 6, 7, 8, 9]) == PrefixMatch(0, 0)
    assert driver.published() == {}


def test_s4_a_model_version_is_no_adapter_version() -> None:
    """Equal texts of the two versions give different digests."""
    by_model = Driver(block_count=20, model_version="7")
    cached(by_model, 1, Identity(lora=LoraAdapter("x")), PROMPT)
    by_adapter = Driver(block_count=20)
    cached(by_adapter, 1, Identity(lora=LoraAdapter("x", version="7")), PROMPT)
    assert set(by_model.published().values()).isdisjoint(by_adapter.published().values())


def test_s2_texts_of_the_greatest_length_are_compared_whole() -> None:
    """Two that differ in their last character share nothing: no key is cut off."""
    long = "x" * (limits.IDENTIFIER_LENGTH_MAX - 1)
    path = "x" * (limits.LORA_PATH_LENGTH_MAX - 1)
    salt = "x" * (limits.CACHE_SALT_LENGTH_MAX - 1)
    identities = [
        identity
        for end in "ab"
        for identity in (
            Identity(cache_salt=salt + end),
            Identity(lora=LoraAdapter(long + end)),
            Identity(lora=LoraAdapter("x", path + end)),
            Identity(lora=LoraAdapter("x", version=long + end)),
            Identity(multimodal_items=(MultimodalItem(long + end, 0, 1),)),
        )
    ]
    driver = Driver(block_count=60)
    for handle, identity in enumerate(identities):
        cached(driver, handle, identity, PROMPT)
    assert len(set(driver.published().values())) == 3 * len(identities)


@pytest.mark.parametrize("sub_block_reuse", [False, True])
@pytest.mark.parametrize("digest_count", [1, 3])
def test_s3_colliding_digests_match_no_other_prompt(
    digest_count: int, sub_block_reuse: bool
) -> None:
    """Prompts that differ in any one token or salt match up to the difference and no further."""
    driver = colliding(digest_count, block_count=200, sub_block_reuse=sub_block_reuse)
    salted = Identity(cache_salt="x")
    cached(driver, 1, Identity(), PROMPT)
    cached(driver, 2, salted, PROMPT)
    for at in range(len(PROMPT) - 1):
        other = [*PROMPT[:at], 99, *PROMPT[at + 1 :]]
        equal_count = at if sub_block_reuse else at // 4 * 4
        for handle, identity in ((2 * at + 10, Identity()), (2 * at + 11, salted)):
            opened = driver.open(handle, other, identity=identity)
            assert opened.plan.cached.end_token == equal_count
            driver.step(close_entry(handle))
    assert driver.match(PROMPT, Identity(cache_salt="y")) == PrefixMatch(0, 0)


def colliding(digest_count: int, *, block_count: int, sub_block_reuse: bool = False) -> Driver:
    """Returns a driver of a pool that has so few digests."""
    driver = Driver(block_count=block_count)
    spec = PoolSpec("pool", block_count, block_size=4, sub_block_reuse=sub_block_reuse)
    driver.pool = Pool(spec, epoch=1, hasher=CollidingHasher(digest_count))
    return driver


class CollidingRun(WatchedRun):
    """A random history, operators' actions included, in a pool with few digests.

    Replies and tables are those of the naive model, which compares content and hashes nothing; the
    digests themselves are compared between the events and the blocks.
    """

    def __init__(self, seed: int, *, digest_count: int) -> None:
        super().__init__(seed)
        self.pool = Pool(self.pool.spec, epoch=1, hasher=CollidingHasher(digest_count))
        self.watcher: CollidingWatcher = CollidingWatcher(self.pool)

    def look(self) -> None:
        """Looks at no digest, which the model would compute without collisions."""
        invariants.check(self.pool)


@pytest.mark.parametrize("digest_count", [1, 3])
def test_s3_s25_random_histories_under_colliding_digests_equal_the_model(digest_count: int) -> None:
    """Nobody gets another block for it, and the events tell exactly which digests there are."""
    runs = [CollidingRun(seed, digest_count=digest_count) for seed in range(12)]
    for run in runs:
        for _ in range(150):
            run.step()
    assert sum(run.evicted_count for run in runs) > 0
    assert sum(run.watcher.revision for run in runs) > 40


def test_s25_a_digest_of_two_contents_is_removed_with_the_last() -> None:
    """Both blocks show it; evicting one by id leaves it, as a listing does."""
    driver = colliding(1, block_count=20)
    cached(driver, 1, Identity(), PROMPT[:5])
    cached(driver, 2, Identity(), PROMPT[4:9])
    (first, first_digest), (second, second_digest) = driver.published().items()
    assert first_digest == second_digest
    assert driver.pool.revision == 1
    driver.pool.evict_blocks(block_ids={first}, digests=frozenset())
    assert driver.pool.revision == 1
    assert driver.published() == {second: second_digest}
    driver.pool.evict_blocks(block_ids={second}, digests=frozenset())
    assert driver.pool.revision == 2


def test_evicting_a_digest_of_two_contents_drops_both() -> None:
    """Whoever wants a digest gone wants everything gone that goes by it."""
    driver = colliding(1, block_count=20)
    cached(driver, 1, Identity(), PROMPT[:5])
    cached(driver, 2, Identity(), PROMPT[4:9])
    digests = set(driver.published().values())
    dropped = driver.pool.evict_blocks(block_ids=frozenset(), digests=digests)
    assert dropped.block_count == 2
    assert driver.published() == {}
