"""What figures were taken on."""

import platform
import subprocess
from typing import Any

import numpy as np
import torch
import transformers
import triton


def machine_description(device: torch.device) -> dict[str, Any]:
    """Versions and the device, for a JSON file."""
    description: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        description |= _gpu_description(device)
    return description


def _gpu_description(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    free_byte_count, byte_count = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessor_count": properties.multi_processor_count,
        "memory_byte_count": byte_count,
        "free_memory_byte_count": free_byte_count,
        "runtime": torch.version.cuda or torch.version.hip,
        "driver": _driver(),
    }


def _driver() -> str:
    """The driver's version by its own tool; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0].strip() if done.stdout else ""
