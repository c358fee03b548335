"""A kernel launch as a value: it can be run, or looked at and compiled for a device elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with all that it is started with.

    Attributes:
        kernel: a triton function.
        grid: programs per axis; no axis is 0.
        arguments: tensors and numbers by parameter name, in the order of the parameters.
        constants: compile-time values by parameter name.
        warp_count: warps per program.
        stage_count: depth of the load pipeline.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warp_count: int = 4
    stage_count: int = 2

    def options(self) -> dict[str, Any]:
        """Compiler options; fusing of products and sums is stated, as its default has changed."""
        return {
            "num_warps": self.warp_count,
            "num_stages": self.stage_count,
            "enable_fp_fusion": True,
        }

    def run(self) -> None:
        """Starts the kernel on the device of its tensors."""
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options())
