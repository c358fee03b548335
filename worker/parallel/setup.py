"""Brings a split model into memory: this process is rank 0 and starts the others."""

from collections.abc import Callable
from dataclasses import replace

from prefixd.worker.config import ConfigInvalid, ModelConfig
from prefixd.worker.model.errors import ModelRefused, ModelUnavailable
from prefixd.worker.model.loader import load_config
from prefixd.worker.model_setup import Setting, settle
from prefixd.worker.parallel.group import open_store
from prefixd.worker.parallel.loading import load_part, rank_device
from prefixd.worker.parallel.messages import Assignment, Fits, encode_assignment, encode_number
from prefixd.worker.parallel.plan import check_split
from prefixd.worker.parallel.ranks import RankLost, Ranks
from prefixd.worker.parallel.runner import ParallelRunner


def load_parallel_runner(
    config: ModelConfig, ranks: Ranks, *, report: Callable[[str], None]
) -> ParallelRunner:
    """Loads the model over this process and others.

    Args:
        config: of the model.
        ranks: the others, just started.
        report: gets a line before a download.

    Raises:
        ConfigInvalid: an option is out of range, or there are too few GPUs.
        ModelRefused: by the guard, or it cannot be split.
        ModelUnavailable: the model's files are not to be had.
        RankLost: a rank ended or failed.
    """
    setting = settle(config, report=report)
    _check_whole(config, setting)
    return _load(config, setting, ranks, report)


def _check_whole(config: ModelConfig, setting: Setting) -> None:
    """Refuses what cannot be split, before anything large is read."""
    rank_device(setting.device, rank=0, rank_count=config.rank_count)
    model_config = load_config(setting.folder, name=setting.name)
    check_split(model_config, rank_count=config.rank_count, model_name=setting.name)


def _load(
    config: ModelConfig, setting: Setting, ranks: Ranks, report: Callable[[str], None]
) -> ParallelRunner:
    """All ranks get as many blocks as the one with the least memory has room for."""
    store = open_store(config.rank_count)
    # They need not look for it again.
    found = replace(config, model=str(setting.folder.resolve()))
    ranks.tell(
        [
            encode_assignment(Assignment(rank, store.port, found))
            for rank in range(1, config.rank_count)
        ]
    )
    ranks.answers()
    try:
        part = load_part(config, setting, rank=0, store=store)
        pool = part.fitting_pool()
        report(f"each of {config.rank_count} ranks: {pool.line}")
        fits = [answer.block_count for answer in ranks.answers() if isinstance(answer, Fits)]
        block_count = min([pool.block_count, *fits])
        ranks.tell_all(encode_number(block_count))
        runner = part.runner(block_count=block_count, report=report)
        ranks.answers()
    except RankLost:
        raise
    except (ConfigInvalid, ModelRefused, ModelUnavailable) as error:
        # What a forward shows of a model is not the model's fault where a rank has gone.
        ranks.check_ends(error)
        raise
    except Exception as error:
        ranks.give_up(error)
    return ParallelRunner(runner, ranks)
