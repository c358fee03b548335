"""What a worker can be told."""

import re
from dataclasses import dataclass, field

from prefixd.worker.attention.registry import AUTO, BACKENDS
from prefixd.worker.limits import MODEL_VERSION_LENGTH_MAX, SchedulerLimits
from prefixd.worker.lora import LoraIdentity
from prefixd.worker.model.fetch import MODEL_DEFAULT
from prefixd.worker.rpc.listening import (
    CONTROLLER_ADDRESS_DEFAULT,
    WORKER_ADDRESS_DEFAULT,
    is_local,
)
from prefixd.worker.rpc.tls import ControllerTls, ServerTls

BLOCK_SIZE_DEFAULT = 16
BLOCK_SIZE_MAX = 4_096
"""Most slots per block that a controller takes; more are refused before any memory is."""
RANK_COUNT_MAX = 64
"""Most processes that one model is split over; each is on this machine."""
CONTROLLER_WAIT_S_DEFAULT = 30.0
GPU_MEMORY_UTILIZATION_DEFAULT = 0.9
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""What the model may be computed in; auto: float32 on the CPU, bfloat16 on a GPU."""
KV_DTYPES = ("auto", "int8", "fp8")
"""How a pool may store K and V: in the model's dtype, or in 8 bits (fp8 is e4m3)."""


class ConfigInvalid(Exception):
    """An option is out of its range or contradicts another."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model runs, and how.

    Attributes:
        model: a folder with weights, configuration and tokenizer; or the name of the small model.
        attention_backend: a name of `prefixd.worker.attention.registry.BACKENDS`, or "auto": the
            fastest one of the device.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: one of DTYPES.
        kv_dtype: how the pool stores K and V: one of KV_DTYPES.
        thread_count: threads of the forward pass on the CPU.
        block_size: token slots per block.
        block_count: blocks of the pool, block 0 included; None: sized by the memory.
        loras: the adapters that requests can name.
        rank_count: processes that the model is split over, by heads.
        gpu_memory_utilization: share of a GPU's memory that the process may use, pool included.
        records_graphs: whether passes of decode are recorded on a GPU, to be started at once.
        limits: of the passes that are to fit the memory.
    """

    model: str = MODEL_DEFAULT
    attention_backend: str = AUTO
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    thread_count: int = 1
    block_size: int = BLOCK_SIZE_DEFAULT
    block_count: int | None = None
    loras: tuple[LoraIdentity, ...] = ()
    rank_count: int = 1
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION_DEFAULT
    records_graphs: bool = True
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)

    def check(self) -> None:
        """Raises ConfigInvalid, naming the option and its limit."""
        self._check_names()
        if self.thread_count < 1:
            raise ConfigInvalid(f"--threads is {self.thread_count}, but must be at least 1")
        if not 1 <= self.block_size <= BLOCK_SIZE_MAX:
            raise ConfigInvalid(
                f"--block-size is {self.block_size}, but must be 1 to {BLOCK_SIZE_MAX}"
            )
        if self.block_count is not None and self.block_count < 2:
            raise ConfigInvalid(
                f"--block-count is {self.block_count}, but must be at least 2, or 0: by the memory"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigInvalid(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization:g}, but must be above 0"
                " and at most 1"
            )
        names = [lora.name for lora in self.loras]
        if len(set(names)) < len(names):
            raise ConfigInvalid("--lora gives two adapters one name")
        if not 1 <= self.rank_count <= RANK_COUNT_MAX:
            raise ConfigInvalid(
                f"--tensor-parallel is {self.rank_count}, but must be 1 to {RANK_COUNT_MAX}"
            )
        if self.rank_count > 1 and self.loras:
            raise ConfigInvalid("--lora and --tensor-parallel cannot be combined yet")

    def _check_names(self) -> None:
        backends = (AUTO, *BACKENDS)
        if self.attention_backend not in backends:
            raise ConfigInvalid(
                f"--attention-backend is {self.attention_backend!r}, but must be one of"
                f" {', '.join(backends)}"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigInvalid(
                f"--device is {self.device!r}, but must be one of auto, cpu, cuda, cuda:N"
            )
        if self.dtype not in DTYPES:
            raise ConfigInvalid(
                f"--dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigInvalid(
                f"--kv-dtype is {self.kv_dtype!r}, but must be one of {', '.join(KV_DTYPES)}"
            )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a worker serves its model.

    Attributes:
        controller: address of the controller.
        controller_tls: how to speak TLS with it; None: in the clear.
        listen: addresses to serve; the first is told to the controller.
        tls: the worker's identity; None: in the clear.
        plaintext_allowed: whether other machines may be served in the clear.
        pool_name: name of the pool at the controller.
        model_version: of the weights that the worker starts with; empty: the default version.
        sub_block_reuse: whether a cached prefix may end inside a block.
        merge_duplicates: whether equal blocks become one once they are written.
        eviction_policy: of the pool; empty: the controller's default.
        limits: of the scheduler.
        lease_ms: how long the pool outlives its worker; None: the controller's default.
        controller_wait_s: how long running answers wait for a lost controller.
    """

    controller: str = CONTROLLER_ADDRESS_DEFAULT
    controller_tls: ControllerTls | None = None
    listen: tuple[str, ...] = (WORKER_ADDRESS_DEFAULT,)
    tls: ServerTls | None = None
    plaintext_allowed: bool = False
    pool_name: str = "worker"
    model_version: str = ""
    sub_block_reuse: bool = False
    merge_duplicates: bool = False
    eviction_policy: str = ""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    lease_ms: int | None = None
    controller_wait_s: float = CONTROLLER_WAIT_S_DEFAULT

    def check(self) -> None:
        """Raises ConfigInvalid, naming the option and its limit, or the options that contradict."""
        if not self.controller_wait_s >= 0:  # also refuses NaN
            raise ConfigInvalid(
                f"--controller-wait-s is {self.controller_wait_s}, but must be at least 0"
            )
        if self.lease_ms is not None and self.lease_ms < 1:
            raise ConfigInvalid(f"--lease-ms is {self.lease_ms}, but must be at least 0")
        length = len(self.model_version)
        if length > MODEL_VERSION_LENGTH_MAX:
            raise ConfigInvalid(
                f"--model-version has {length} characters, at most {MODEL_VERSION_LENGTH_MAX} are"
                " taken"
            )
        if self.tls is None and not self.plaintext_allowed:
            for target in self.listen:
                if not is_local(target):
                    raise ConfigInvalid(
                        f"{target} can be reached from other machines: give --tls-certificate"
                        " and --tls-key, or say --allow-plaintext"
                    )
