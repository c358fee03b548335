"""How much memory a pool may take: arithmetic, without a device."""

import os
from dataclasses import dataclass
from pathlib import Path

MEMINFO_FILE = Path("/proc/meminfo")
CGROUP_FOLDER = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """Where a control group tells its limit and use of memory, and the name of its file cache."""

    limit: str
    used: str
    statistics: str
    file_cache: str


CGROUP_FILES = (
    CgroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),
    CgroupFiles(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Of control groups of version 2, and of version 1."""

KIBIBYTE, MEBIBYTE, GIBIBYTE, TEBIBYTE = 1 << 10, 1 << 20, 1 << 30, 1 << 40


class PoolTooLarge(ValueError):
    """A pool does not fit the memory; the message names option and numbers."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a GPU's memory is taken by before there is a pool, in bytes.

    Attributes:
        total: of the device.
        free: what this process could still take, its weights being there.
        weights: of the model, adapters included.
        activations: that the largest pass takes beside the weights, at its peak.
        graphs: that recorded passes keep for themselves.
    """

    total: int
    free: int
    weights: int
    activations: int
    graphs: int

    def pool_byte_count_max(self, utilization: float) -> int:
        """What is left for a pool where the process may use such a share of the whole device.

        Others' memory is not ours: never more than what is free. May be negative.
        """
        allowed = min(int(self.total * utilization), self.weights + self.free)
        return allowed - self.weights - self.activations - self.graphs

    def describe(self, utilization: float) -> str:
        """One line for people."""
        return (
            f"GPU {readable(self.total)} x {utilization:g}: weights {readable(self.weights)},"
            f" activations {readable(self.activations)}, graphs {readable(self.graphs)}"
        )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How large a pool is.

    Attributes:
        block_count: blocks, block 0 included.
        block_size: slots per block.
        block_byte_count: bytes of a block over all page memories.
    """

    block_count: int
    block_size: int
    block_byte_count: int

    @property
    def byte_count(self) -> int:
        """Bytes of the pool."""
        return self.block_count * self.block_byte_count

    def describe(self) -> str:
        """One line for people."""
        return (
            f"pool {readable(self.byte_count)}: {self.block_count:,} blocks of {self.block_size},"
            f" {(self.block_count - 1) * self.block_size:,} tokens,"
            f" {readable(self.block_byte_count // self.block_size)} each"
        )


def check_fits(size: PoolSize, *, byte_count_max: int, where: str) -> None:
    """Refuses a pool that somebody asked for and that has no room.

    Args:
        size: of the pool.
        byte_count_max: what it may take.
        where: whose memory that is, for the message.

    Raises:
        PoolTooLarge: it takes more.
    """
    if size.byte_count > byte_count_max:
        fitting = max(0, byte_count_max // size.block_byte_count)
        raise PoolTooLarge(
            f"--block-count is {size.block_count}, a pool of {readable(size.byte_count)}, but there"
            f" are {readable(max(0, byte_count_max))} {where}: at most {fitting:,} blocks fit"
        )


def available_byte_count() -> int | None:
    """Memory that this process can still take on the host; None where the system does not say.

    The least of what the machine can give without swapping and what the control groups of the
    process leave it: beyond either the kernel would end a process.
    """
    counts = [count for count in (_machine_byte_count(), _group_byte_count()) if count is not None]
    return min(counts, default=None)


def _machine_byte_count() -> int | None:
    try:
        lines = MEMINFO_FILE.read_text(encoding="ascii").splitlines()
    except OSError:
        return _free_page_byte_count()
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * KIBIBYTE
    return _free_page_byte_count()


def _free_page_byte_count() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _group_byte_count() -> int | None:
    """What the control group leaves, where the process sees it as the root of its file system."""
    for files in CGROUP_FILES:
        try:
            limit = (CGROUP_FOLDER / files.limit).read_text(encoding="ascii").strip()
            used = (CGROUP_FOLDER / files.used).read_text(encoding="ascii").strip()
            statistics = (CGROUP_FOLDER / files.statistics).read_text(encoding="ascii")
        except OSError:
            continue
        if limit.isdecimal() and used.isdecimal():
            # Files that were read count as used, but give way to whoever needs the memory.
            fields = dict(line.split() for line in statistics.splitlines())
            return max(0, int(limit) - int(used) + int(fields.get(files.file_cache, 0)))
    return None


def readable(byte_count: int) -> str:
    """A number of bytes for people: 512 B, 46.0 KiB, 768.0 MiB, 139.8 GiB."""
    units = {"TiB": TEBIBYTE, "GiB": GIBIBYTE, "MiB": MEBIBYTE, "KiB": KIBIBYTE}
    for name, unit in units.items():
        if byte_count >= unit:
            return f"{byte_count / unit:,.1f} {name}"
    return f"{byte_count} B"
