"""Compiles launches for GPUs that need not be there, and reads what they take from the result."""

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prefixd.kernels.launch import Launch
from prefixd.kernels.layer_kv import FP8_DTYPE

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    FP8_DTYPE: "fp8e4nv",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}

# What the launcher infers of aligned pointers and of strides: they divide by 16.
_DIVISIBLE = (("tt.divisibility", 16),)


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to compile for.

    Attributes:
        name: as the reports call it.
        gpu: as triton calls it.
        shared_byte_count_max: shared memory that one program can have.
        fp8_refusal: why 8-bit floats do not work there, or None where they do.
    """

    name: str
    gpu: GPUTarget
    shared_byte_count_max: int
    fp8_refusal: str | None = None


# Shared memory per block: CUDA C++ programming guide, technical specifications per compute
# capability; AMD CDNA 3 instruction set architecture, local data share.
TARGETS = {
    target.name: target
    for target in (
        Target(
            "sm_80",
            GPUTarget("cuda", 80, 32),
            163 * 1024,
            "e4m3 conversions need compute capability 8.9 or newer",
        ),
        Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
        Target("sm_100", GPUTarget("cuda", 100, 32), 227 * 1024),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
    )
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a compiled kernel takes.

    Attributes:
        register_count: 32-bit registers per thread.
        shared_byte_count: shared memory.
        spill_count: instructions that move registers to or from memory (on AMD: registers so
            moved), and bytes of stack; 0 where nothing spills.
    """

    register_count: int
    shared_byte_count: int
    spill_count: int


@dataclass(frozen=True, slots=True)
class Compilation:
    """A launch on its way to a target: the source with its signature, not compiled yet."""

    launch: Launch
    target: Target

    def source(self) -> ASTSource:
        """The kernel specialised as the launcher would for these arguments."""
        signature: dict[str, str] = {}
        constants = dict(self.launch.constants)
        attributes = {}
        plain = {p.name for p in self.launch.kernel.params if p.do_not_specialize}
        for index, (name, argument) in enumerate(self.launch.arguments.items()):
            if isinstance(argument, Tensor):
                signature[name] = "*" + _TYPE_NAMES[argument.dtype]
                attributes[index,] = [list(pair) for pair in _DIVISIBLE]
            elif isinstance(argument, float):
                signature[name] = "fp32"
            elif argument == 1 and name not in plain:
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "i32" if abs(argument) < 2**31 else "i64"
                if argument % 16 == 0 and name not in plain:
                    attributes[index,] = [list(pair) for pair in _DIVISIBLE]
        signature |= dict.fromkeys(self.launch.constants, "constexpr")
        return ASTSource(self.launch.kernel, signature, constants, attributes)

    def key(self) -> str:
        """Changes with the source, its constants, the options, the target and triton itself."""
        parts = (self.source().hash(), self.launch.options(), self.target.gpu, triton.__version__)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def resources(self) -> Resources:
        """Compiles and measures.

        Raises:
            triton.errors.TritonError: the target cannot run the kernel.
        """
        options = self.launch.options()
        compiled = triton.compile(self.source(), target=self.target.gpu, options=options)
        shared = int(compiled.metadata.shared)
        if "cubin" in compiled.asm:
            return _cuda_resources(compiled.asm["cubin"], shared)
        return _amd_resources(compiled.asm["amdgcn"], shared)


def _cuda_resources(cubin: bytes, shared_byte_count: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        assembly = _cuobjdump("-sass", file.name)
    registers = _number(r"REG:(\d+)", usage)
    stack = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
    # Loads from and stores to local memory, which is where registers spill to.
    moves = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    return Resources(registers, shared_byte_count, stack + moves)


def _amd_resources(assembly: str, shared_byte_count: int) -> Resources:
    registers = _number(r"\.vgpr_count:\s*(\d+)", assembly)
    # Scalar registers spill to lanes of vector registers, which costs no memory.
    spills = _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    stack = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return Resources(registers, shared_byte_count, spills + stack)


def _cuobjdump(option: str, path: str) -> str:
    """Runs the tool that triton ships."""
    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    command = [str(tool), option, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"{pattern} not found in the compiler's output"
    return int(match.group(1))
