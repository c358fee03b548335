"""Attempts to be given another prompt's KV by what stands in an identity on the wire."""

import grpc
import pytest

from prefixd.v1 import cache_pb2, inspect_pb2, types_pb2
from tests.support.driver import Driver, close_entry, open_entry, refused

PROMPT = list(range(100, 110))

UNKNOWN_FIELD = b"\xf8\x3f\x01"
"""Field 1023 of some newer protocol."""

TEXTS = {
    "cache_salt": ("cache_salt_length_max", lambda text: types_pb2.Identity(cache_salt=text)),
    "lora.name": (
        "identifier_length_max",
        lambda text: types_pb2.Identity(lora=types_pb2.LoraAdapter(name=text)),
    ),
    "lora.path": (
        "lora_path_length_max",
        lambda text: types_pb2.Identity(lora=types_pb2.LoraAdapter(name="x", path=text)),
    ),
    "lora.version": (
        "identifier_length_max",
        lambda text: types_pb2.Identity(lora=types_pb2.LoraAdapter(name="x", version=text)),
    ),
    "multimodal_items[0].identifier": (
        "identifier_length_max",
        lambda text: types_pb2.Identity(
            multimodal_items=[types_pb2.MultimodalItem(identifier=text, offset=0, token_count=1)]
        ),
    ),
}
"""Every text of an identity, with the limit that `GetServerInfo` reports for it."""


def matched(driver: Driver, identity: types_pb2.Identity) -> int:
    """Returns how many tokens of the prompt are found under an identity."""
    request = cache_pb2.MatchPrefixRequest(
        pool_name=driver.pool_name, token_ids=PROMPT, identity=identity
    )
    answer = driver.stubs.cache.MatchPrefix(request)
    return answer.published_token_count + answer.pending_token_count


def compute(driver: Driver, identity: types_pb2.Identity) -> None:
    """Computes and publishes the prompt, and closes its sequence."""
    driver.step(open_entry(driver.applied_step_id + 1, PROMPT, identity=identity))
    driver.step(close_entry(driver.applied_step_id))
    driver.step()


@pytest.mark.parametrize("field", TEXTS)
def test_text_beyond_its_limit_is_refused_and_never_cut(calls, field):
    """S2: the limit itself passes, a character more is refused by open and match alike."""
    limit_name, identity_of = TEXTS[field]
    limits = calls.inspect.GetServerInfo(inspect_pb2.GetServerInfoRequest()).limits
    longest = "x" * limits[limit_name]
    driver = Driver(calls)
    compute(driver, identity_of(longest))
    assert matched(driver, identity_of(longest)) == 8
    longer = identity_of(longest + "y")
    error = refused(lambda: driver.step(open_entry(99, PROMPT, identity=longer)))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.fields == (f"entries[0].open.identity.{field}",)
    error = refused(lambda: matched(driver, longer))
    assert error.fields == (f"identity.{field}",)


@pytest.mark.parametrize(
    "unknown",
    [
        types_pb2.Identity.FromString(UNKNOWN_FIELD),
        types_pb2.Identity(lora=types_pb2.LoraAdapter.FromString(UNKNOWN_FIELD), cache_salt="a"),
        types_pb2.Identity(
            multimodal_items=[types_pb2.MultimodalItem.FromString(UNKNOWN_FIELD)], cache_salt="a"
        ),
    ],
    ids=["identity", "LoRA", "image"],
)
def test_s5_unknown_fields_neither_find_nor_are_found(calls, unknown):
    """However deep they lie, and although all that is known is equal."""
    if unknown.HasField("lora"):
        unknown.lora.name = "x"
    for item in unknown.multimodal_items:
        item.MergeFrom(types_pb2.MultimodalItem(identifier="x", offset=0, token_count=1))
    known = types_pb2.Identity.FromString(unknown.SerializeToString())
    known.DiscardUnknownFields()
    driver = Driver(calls)
    compute(driver, known)
    assert (matched(driver, known), matched(driver, unknown)) == (8, 0)
    other = Driver(calls, "other")
    compute(other, unknown)
    assert (matched(other, known), matched(other, unknown)) == (0, 0)


def test_pools_of_one_controller_share_nothing(calls):
    """Equal prompts of two models have equal digests and different KV."""
    mine = Driver(calls, "mine", model_name="a")
    theirs = Driver(calls, "theirs", model_name="b")
    compute(theirs, types_pb2.Identity())
    assert (matched(theirs, types_pb2.Identity()), matched(mine, types_pb2.Identity())) == (8, 0)
