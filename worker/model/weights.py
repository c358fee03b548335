"""Reads a model's weights again, and puts them in the place of those in use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from prefixd.worker.model.errors import ModelRefused, ModelUnavailable, WeightsUnusable
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.loader import check_weights, load_network

UNRELATED_SETTINGS = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
"""Settings of a configuration that say nothing about what the model computes."""


class ModelWeights:
    """The weights of one running model.

    Invariant: what was read and found to fit can be put in place without failing.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Takes the model's weights over."""
        self._model = model
        self._folder = model.folder

    def read(self, folder: str) -> Mapping[str, Tensor]:
        """Reads weights that fit the model; empty names the folder of the last ones read.

        Raises:
            WeightsUnusable: they cannot be read or do not fit.
        """
        path = Path(folder) if folder else self._folder
        if path is None:
            raise WeightsUnusable(folder=Path(), reason="the model has no folder of its own")
        model = self._model
        if model.rank_count > 1:
            reason = f"a model that is split over {model.rank_count} ranks keeps those it has"
            raise WeightsUnusable(folder=path, reason=reason)
        try:
            network = load_network(path, name=model.name, dtype=model.dtype)
            check_weights(network, path, name=model.name)
        except (ModelUnavailable, ModelRefused) as error:
            raise WeightsUnusable(folder=path, reason=error.reason) from error
        if _settings(network) != _settings(model.network):
            raise WeightsUnusable(folder=path, reason="their configuration is another model's")
        weights: dict[str, Tensor] = network.state_dict()
        present = model.network.state_dict()
        if {name: t.shape for name, t in weights.items()} != {
            name: t.shape for name, t in present.items()
        }:
            raise WeightsUnusable(folder=path, reason="their names or shapes are another model's")
        self._folder = path
        return weights

    def replace(self, weights: Mapping[str, Tensor]) -> None:
        """Puts weights in place, in the tensors in use; no pass may be running."""
        self._model.network.load_state_dict(weights)


def _settings(network: Any) -> dict[str, Any]:
    settings: dict[str, Any] = network.config.to_dict()
    return {name: value for name, value in settings.items() if name not in UNRELATED_SETTINGS}
