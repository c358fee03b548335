"""Pages of a listing: sizes, and opaque tokens that say where to go on."""

import base64
import binascii
import json
from dataclasses import dataclass

from prefixd.controller.core.errors import FieldInvalid, PageTokenInvalid

PAGE_SIZE_DEFAULT = 100
"""Rows of a page where the caller names none."""
PAGE_SIZE_MAX = 1_000
"""Rows of a page; a larger wish is read as this."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a page token is good for: one listing of one pool's epoch, under one filter."""

    name: str
    pool_name: str = ""
    epoch: int = 0
    row_filter: int = 0

    def row_count_max(self, page_size: int) -> int:
        """Rows of the next page. Raises FieldInvalid for a negative size."""
        if page_size < 0:
            raise FieldInvalid(
                f"page_size must not be negative, got {page_size}",
                field="page_size",
                numbers={"page_size": page_size},
            )
        return min(page_size or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)

    def token(self, last_key: str) -> str:
        """Makes the token of the page behind the row with this key."""
        text = json.dumps([self.name, self.pool_name, self.epoch, self.row_filter, last_key])
        return base64.urlsafe_b64encode(text.encode()).decode()

    def last_key(self, token: str) -> str | None:
        """Reads a token: the key of the last row seen; None for the first page.

        Raises PageTokenInvalid for a token that this listing did not make.
        """
        if not token:
            return None
        try:
            fields = json.loads(base64.urlsafe_b64decode(token.encode("ascii")))
        except (ValueError, binascii.Error, RecursionError):
            fields = None
        match fields:
            case [self.name, self.pool_name, self.epoch, self.row_filter, str(last_key)]:
                return last_key
            case _:
                raise PageTokenInvalid(
                    "page_token was not made by this listing, or its pool changed epoch",
                    field="page_token",
                )
