"""The process group in which the ranks of one model add up their parts."""

import os
import socket
from contextlib import closing
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined] # its stubs leave it out

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
MEETING_TIMEOUT = timedelta(minutes=1)
"""How long ranks wait for one another to appear, once all have said that they come."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others' parts: as far apart as loading may take them.

A rank that ends is noticed at once; this is for one that neither ends nor goes on.
"""


def open_store(rank_count: int) -> TCPStore:
    """Opens the place where ranks find one another; for this machine only, on a free port."""
    with closing(socket.create_server((LOOPBACK, 0))) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            LOOPBACK,
            port,
            rank_count,
            is_master=True,
            timeout=MEETING_TIMEOUT,
            wait_for_workers=False,
            # torch would listen on all interfaces.
            master_listen_fd=listener.detach(),
        )


def find_store(port: int, rank_count: int) -> TCPStore:
    """Connects to the store that rank 0 opened."""
    return TCPStore(LOOPBACK, port, rank_count, timeout=MEETING_TIMEOUT)


def join_group(store: TCPStore, *, rank: int, rank_count: int, device: torch.device) -> None:
    """Joins the group of this process: gloo for a CPU, NCCL for GPUs.

    There is one per process, because transformers splits models over the default group. It finds
    the number of a GPU in LOCAL_RANK.
    """
    os.environ["LOCAL_RANK"] = str(rank)
    if device.type == "cpu":
        # Else the machine's name is looked up, and the ranks listen where others can reach them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        backend, device_id = "gloo", None
    else:
        torch.cuda.set_device(device)
        backend, device_id = "nccl", device
    distributed.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=rank_count,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device_id,
    )
