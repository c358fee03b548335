"""Which row of the columns an open handle has."""

from collections.abc import Iterator, MutableMapping

import numpy as np
import numpy.typing as npt

from prefixd.controller.core.messages import IntArray

_NEAR_COUNT_FIRST = 256
_NOBODY = -1
"""Stands where a row has no sequence; no handle is negative."""


class HandleRows(MutableMapping[int, int]):
    """Rows by handle: one at a time by a dict, a whole batch at once by arrays.

    `_near` has a row for every place that the low bits of a handle choose, and `_handles` the
    handle of every row. A batch whose rows all turn out to have its handles needs no dict. Drivers
    number their sequences, so that live handles seldom share their low bits; where they do, the one
    entered last has the place, and the dict knows the others.

    Invariants: `_handles[row]` is the handle of every entered row and of no other; `_near` has a
    power of two of places, at least four for each entered handle.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._near: IntArray = np.zeros(_NEAR_COUNT_FIRST, dtype=np.int64)
        self._handles: IntArray = np.full(_NEAR_COUNT_FIRST, _NOBODY, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __getitem__(self, handle: int) -> int:
        return self._rows[handle]

    def __setitem__(self, handle: int, row: int) -> None:
        self._rows[handle] = row
        if 4 * len(self._rows) > len(self._near):
            self._near = np.zeros(2 * len(self._near), dtype=np.int64)
            for known_handle, known_row in self._rows.items():
                self._near[known_handle & (len(self._near) - 1)] = known_row
        while row >= len(self._handles):
            nobody = np.full(len(self._handles), _NOBODY, dtype=np.int64)
            self._handles = np.concatenate((self._handles, nobody))
        self._near[handle & (len(self._near) - 1)] = row
        self._handles[row] = handle

    def __delitem__(self, handle: int) -> None:
        self._handles[self._rows.pop(handle)] = _NOBODY

    def rows_of(self, handles: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return a row for each handle, and whether it is the handle's: whether it is entered."""
        rows: IntArray = self._near[handles & (len(self._near) - 1)]
        is_entered: npt.NDArray[np.bool_] = self._handles[rows] == handles
        if not is_entered.all():
            for index in np.flatnonzero(~is_entered).tolist():
                row = self._rows.get(int(handles[index]))
                if row is not None:
                    rows[index] = row
                    is_entered[index] = True
        return rows, is_entered
