"""Turns values that no message can hold into the clients' own error."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefixd.clients.errors import RequestInvalid

ParametersT = ParamSpec("ParametersT")
MadeT = TypeVar("MadeT")


def encodes(make: Callable[ParametersT, MadeT]) -> Callable[ParametersT, MadeT]:
    """Lets a function that makes a request raise RequestInvalid instead of ValueError.

    That is for numbers beyond their field's range, text that is no Unicode, and malformed
    hexadecimal; a value of a wrong type stays the TypeError that it is anywhere in Python.
    """

    @wraps(make)
    def making(*args: ParametersT.args, **kwargs: ParametersT.kwargs) -> MadeT:
        try:
            return make(*args, **kwargs)
        except ValueError as error:
            raise RequestInvalid(f"the request cannot be encoded: {error}") from error

    return making
