"""Makes decode entries of rows."""

from collections.abc import Sequence

import numpy as np

from prefixd.controller.core.messages import DecodeEntry

Row = tuple[int, int, int, tuple[int, ...]]
"""Handle, scheduled count before, known count before, tokens."""


def columns(rows: Sequence[Row]) -> DecodeEntry:
    """Returns the decode entry with these rows."""
    handles, scheduled, known, tokens = zip(*rows, strict=True)
    return DecodeEntry(
        handles=np.array(handles, np.int64),
        scheduled_count_before=np.array(scheduled, np.int64),
        known_count_before=np.array(known, np.int64),
        token_counts=np.array([len(row) for row in tokens], np.int64),
        token_ids=np.array([token for row in tokens for token in row], np.uint32),
    )
