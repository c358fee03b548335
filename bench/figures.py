"""A figure: what was measured, against what, and what was hoped for."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report.

    `baseline` says what `ratio` compares with; `target` bounds the value or the ratio, whichever
    `target_of` names, from above or (where `at_least`) from below.
    """

    name: str
    value: float
    unit: str
    baseline: str = ""
    baseline_value: float | None = None
    ratio: float | None = None
    target: float | None = None
    target_of: str = "ratio"
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        measured = self.value if self.target_of == "value" else self.ratio
        if measured is None:
            return False
        return measured >= self.target if self.at_least else measured <= self.target

    @property
    def target_text(self) -> str:
        """The target for people."""
        if self.target is None:
            return ""
        sign = ">=" if self.at_least else "<="
        unit = self.unit if self.target_of == "value" else "x"
        return f"{sign} {self.target:.3g} {unit}"

    def as_json(self) -> dict[str, Any]:
        """The figure for a JSON file."""
        return asdict(self) | {"met": self.met}
