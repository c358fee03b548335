"""What a part reports, line by line."""

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from bench.figures import Figure


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel of one kind of layer, compared with what is right.

    Attributes:
        kernel: the kernel, as the kernels report calls it.
        kind: the kind of layer.
        error: what was measured; None where nothing was.
        error_max: what may be.
        unit: of both.
        refusal: why this device cannot run it; such a line is no failure.
        failure: what went wrong before anything could be compared.
    """

    kernel: str
    kind: str
    error: float | None = None
    error_max: float = 0.0
    unit: str = ""
    refusal: str = ""
    failure: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the kernel is right; None where it is refused."""
        if self.refusal:
            return None
        # NaN is no error that passes.
        return not self.failure and self.error is not None and self.error <= self.error_max

    def as_json(self) -> dict[str, Any]:
        """The line for a JSON file."""
        return asdict(self) | {"passed": self.passed}


Line: TypeAlias = Check | Figure
