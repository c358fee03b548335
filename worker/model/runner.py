"""Runs forward passes of a loaded model on paged KV."""

import numpy as np
import torch
from torch import Tensor

from prefixd.worker.attention.batch import AttentionBatch, SequenceRows, build_batch
from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.model.forward import ForwardPass
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loader import LoadedModel


class ModelRunner:
    """One model, its KV pool and an attention backend.

    Invariants: a pass either raises before anything is written, or runs whole; block 0 is written
    by padding rows only; passes run one at a time, in the order of the calls.
    """

    def __init__(self, model: LoadedModel, kv: PagedKv, backend: AttentionBackend) -> None:
        self._model = model
        self._kv = kv
        self._backend = backend

    @property
    def model(self) -> LoadedModel:
        """The model that runs."""
        return self._model

    @property
    def kv(self) -> PagedKv:
        """The pool it reads and writes."""
        return self._kv

    def run(self, forward: ForwardPass) -> Tensor:
        """Copies blocks, computes the pass, stores its KV.

        Args:
            forward: at least one token.

        Returns:
            Logits of ``forward.logit_rows`` in their order: float32 (rows, vocabulary), on the
            model's device.

        Raises:
            AssertionError: the pass contradicts itself or the pool (a caller's fault); nothing was
                written.
        """
        raise NotImplementedError
