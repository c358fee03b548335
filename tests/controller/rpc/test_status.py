import inspect
import re

import grpc
import pytest
from google.rpc import error_details_pb2

from prefixd.controller.core import errors
from prefixd.controller.rpc.status import CODES, InternalFailure, error_status, step_error
from prefixd.v1 import errors_pb2, inspect_pb2
from tests.support.driver import Driver, refused

ERROR_CLASSES = [
    error_class
    for _, error_class in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error_class, errors.CacheError) and error_class is not errors.CacheError
] + [InternalFailure]


def info_of(status):
    """The status's only ErrorInfo."""
    infos = []
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            infos.append(info)
    assert len(infos) == 1
    return infos[0]


@pytest.mark.parametrize("error_class", ERROR_CLASSES, ids=lambda one: one.reason)
def test_every_error_has_a_code_and_one_error_info(error_class):
    """Each class of the core maps to a code, a reason of the protocol, and its numbers."""
    error = error_class("some text", numbers={"limit": 3})
    status = error_status(error)
    info = info_of(status)
    assert (info.domain, info.reason) == ("prefixd", error_class.reason)
    assert dict(info.metadata) == {"limit": "3"}
    assert status.code == CODES[error_class.reason].value[0]
    assert f"ERROR_REASON_{error_class.reason}" in list(errors_pb2.ErrorReason.keys())


@pytest.mark.parametrize("reason", sorted(CODES))
def test_codes_are_the_documented_ones(reason, repository_folder):
    """The code of each reason is the one that its comment in the protocol names."""
    proto = (repository_folder / "protos/prefixd/v1/errors.proto").read_text()
    comment = re.search(rf"((?: +//.*\n)+) +ERROR_REASON_{reason} =", proto)
    assert comment is not None
    assert comment[1].split()[1] == f"{CODES[reason].name}:"


def test_field_error_names_the_field():
    """A field error carries a BadRequest with the field's path."""
    error = errors.TokenIdInvalid("bad", field="entries[0].open.token_ids[17]")
    bad = error_details_pb2.BadRequest()
    error_status(error).details[1].Unpack(bad)
    assert [violation.field for violation in bad.field_violations] == [error.field]


@pytest.mark.parametrize(
    "error_class", [errors.PoolExhausted, errors.StepsInFlight, errors.Draining]
)
def test_passing_shortage_says_when_to_retry(error_class):
    """A shortage that passes by itself carries a RetryInfo above zero."""
    retry = error_details_pb2.RetryInfo()
    error_status(error_class("later")).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() > 0


def test_busy_blocks_are_a_precondition():
    """A flush that fails carries a PreconditionFailure."""
    failure = error_details_pb2.PreconditionFailure()
    error_status(errors.BlocksInUse("held", numbers={"held_block_count": 2})).details[1].Unpack(
        failure
    )
    assert [violation.type for violation in failure.violations] == ["BLOCKS_IN_USE"]


def test_in_band_error_says_the_same_as_the_status():
    """A refused step of a session carries code, reason, numbers and field."""
    error = errors.FieldInvalid("bad", numbers={"low": 1}, field="step_id")
    message = step_error(error, step_id=4)
    assert (message.step_id, message.field, message.message) == (4, "step_id", "bad")
    assert message.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert message.reason == errors_pb2.ERROR_REASON_FIELD_INVALID
    assert dict(message.metadata) == {"low": "1"}


@pytest.mark.parametrize("character", ["x", "é", "\U0001f600", "\n"])
@pytest.mark.parametrize("length", [300, 3_000, 300_000])
def test_errors_arrive_whole_however_long_a_name_they_repeat(calls, character, length):
    """A text too long for trailers is cut in its middle; what it is about stands at both ends."""
    name = character * length
    error = refused(lambda: Driver(calls, eviction_policy=name))
    assert (error.reason, error.fields) == ("FIELD_INVALID", ("eviction_policy",))
    assert error.message.startswith("eviction_policy is '")
    assert error.message.endswith("', not one of lru, retention")
    request = inspect_pb2.GetPoolRequest(pool_name=name)
    error = refused(lambda: calls.inspect.GetPool(request))
    assert error.reason == "POOL_NOT_FOUND"
