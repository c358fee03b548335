"""One of two ranks that split models: `python -m tests.worker.parallel.splitting RANK PORT FOLDER`.

Rank 0 opens a store instead of taking a port, and writes it to standard output; then each rank
splits every folder's model, and rank 0 writes a line of JSON: the reason why it is refused, or
null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from prefixd.worker.attention.registry import create_backend
from prefixd.worker.model.errors import ModelRefused
from prefixd.worker.model.loader import load_config, load_split
from prefixd.worker.parallel.group import find_store, join_group, open_store
from prefixd.worker.parallel.plan import check_split

RANK_COUNT = 2
CPU = torch.device("cpu")


def refusal(folder: Path) -> str | None:
    """Why a model is not split, or None where it is, and every rank holds its own heads' KV."""
    try:
        config = load_config(folder, name=folder.name)
        check_split(config, rank_count=RANK_COUNT, model_name=folder.name)
        load_split(
            folder,
            name=folder.name,
            backend=create_backend("torch"),
            device=CPU,
            dtype=torch.float32,
            rank_count=RANK_COUNT,
        )
    except ModelRefused as error:
        return error.reason
    return None


def main() -> None:
    """Splits models until there are no more."""
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if rank == 0:
        store = open_store(RANK_COUNT)
        print(store.port, flush=True)
    else:
        store = find_store(port, RANK_COUNT)
    join_group(store, rank=rank, rank_count=RANK_COUNT, device=CPU)
    for folder in map(Path, sys.argv[3:]):
        reason = refusal(folder)
        if rank == 0:
            print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    main()
