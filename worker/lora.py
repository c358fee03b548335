"""Which LoRA adapters there are, as options and as parts of a sequence's identity."""

import re
from dataclasses import dataclass

from prefixd.worker.limits import LORA_NAME_LENGTH_MAX, LORA_PATH_LENGTH_MAX

SOURCE_PATTERN = re.compile(r"(?P<name>[^@=]+)(@(?P<version>[^=]*))?=(?P<path>.+)")


class LoraSourceInvalid(ValueError):
    """A description of an adapter cannot be understood."""


@dataclass(frozen=True, slots=True)
class LoraIdentity:
    """What tells one adapter's KV from another's.

    Attributes:
        name: what requests call it; unique in a worker.
        path: the folder that it is read from.
        version: of its weights, as the operator says; empty: the default version.
    """

    name: str
    path: str
    version: str = ""


def parse_lora_source(text: str) -> LoraIdentity:
    """Reads ``NAME=FOLDER`` or ``NAME@VERSION=FOLDER``.

    Raises:
        LoraSourceInvalid: it is neither, or too long.
    """
    match = SOURCE_PATTERN.fullmatch(text)
    if match is None:
        raise LoraSourceInvalid(f"{text!r} is neither NAME=FOLDER nor NAME@VERSION=FOLDER")
    identity = LoraIdentity(match["name"], match["path"], match["version"] or "")
    for part, length_max in (
        (identity.name, LORA_NAME_LENGTH_MAX),
        (identity.version, LORA_NAME_LENGTH_MAX),
        (identity.path, LORA_PATH_LENGTH_MAX),
    ):
        if len(part) > length_max:
            raise LoraSourceInvalid(
                f"a part of {text[:80]!r} has {len(part)} characters, at most {length_max} are"
                " taken"
            )
    return identity
