"""Recordings of passes without a GPU: what is recorded, and how it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefixd.kernels.layer_kv import LayerKv, dequantize
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.sdpa import SdpaBackend
from prefixd.worker.attention.seam import LayerTraits

aten = torch.ops.aten
SYNCHRONISING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten._unique2.default,
}


class HostSync(AssertionError):
    """An operation that waits for the device or moves data between devices."""


class CaptureLint(TorchDispatchMode):
    """Raises at the first operation that a CUDA graph could not capture."""

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named_arguments: Mapping[str, Any] | None = None,
    ) -> Any:
        named_arguments = named_arguments or {}
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        if named_arguments.get("device") is not None and tensors:
            devices.add(torch.device(named_arguments["device"]).type)
        selects = operation == aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        if operation in SYNCHRONISING or selects or len(devices) > 1:
            raise HostSync(f"{operation} on {sorted(devices)}")
        return operation(*arguments, **named_arguments)


@dataclass
class Recording:
    """Operations with the very tensors that they were recorded with.

    A replay runs the same operations on the same memory, as a CUDA graph does: no Python of the
    model runs again, and what the host knew when it was recorded stays as it was.
    """

    operations: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], list[Tensor]]] = (
        field(default_factory=list)
    )
    replay_count: int = 0

    def replay(self) -> None:
        """Runs every operation again; results go where they went when it was recorded."""
        self.replay_count += 1
        with torch.inference_mode():
            for operation, arguments, named_arguments, targets in self.operations:
                results = _tensors(operation(*arguments, **named_arguments))
                for target, result in zip(targets, results, strict=True):
                    if result.data_ptr() != target.data_ptr():
                        target.copy_(result)


class _Recorder(CaptureLint):
    """Notes every operation that makes or changes memory."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named_arguments: Mapping[str, Any] | None = None,
    ) -> Any:
        named_arguments = named_arguments or {}
        results = super().__torch_dispatch__(operation, types, arguments, named_arguments)
        note = (operation, arguments, named_arguments, _tensors(results))
        self._recording.operations.append(note)
        return results


class CpuRecorder:
    """Records operations on the CPU; an operation that a CUDA graph could not take is an error."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def record(self, run: Callable[[], None]) -> Recording:
        """Runs the work once, then records it."""
        run()
        recording = Recording()
        with torch.inference_mode(), _Recorder(recording):
            run()
        self.recordings.append(recording)
        return recording

    def mark(self) -> None:
        """The CPU has done everything already."""

    def wait(self) -> None:
        """The CPU has done everything already."""


@dataclass(frozen=True)
class Rerun:
    """Runs the work itself again, for what no operation of torch shows: interpreted kernels."""

    replay: Callable[[], None]


class RerunRecorder(CpuRecorder):
    """Records nothing."""

    def record(self, run: Callable[[], None]) -> Any:
        """Runs the work once."""
        run()

        def replay() -> None:
            with torch.inference_mode():
                run()

        return Rerun(replay)


class DenseBackend(SdpaBackend):
    """The torch backend, whose passes of decode can be recorded: they read whole tables."""

    def static_plan(self, *, row_count: int, blocks_per_sequence: int) -> DensePlan:
        """See the seam."""
        return DensePlan(row_count, blocks_per_sequence)


class DensePlan:
    """Attention over whole block tables in memory that never moves; -1 is a padding row."""

    def __init__(self, row_count: int, blocks_per_sequence: int) -> None:
        self._positions = torch.full((row_count,), -1)
        self._tables = torch.zeros(row_count, blocks_per_sequence, dtype=torch.int64)
        self._block_size = 0

    def load(self, batch: AttentionBatch) -> None:
        """See the seam."""
        assert len(self._positions) == batch.row_count
        self._block_size = batch.block_size
        self._positions.fill_(-1)
        self._tables.zero_()
        for table, packed, rows in zip(
            self._tables, batch.block_tables, batch.sequences, strict=False
        ):
            assert rows.query_token_count == 1
            self._positions[rows.query_start] = rows.start_position
            table[: len(packed)] = torch.from_numpy(packed)

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """See the seam."""
        offsets = torch.arange(self._block_size)
        slots = (self._tables[:, :, None] * self._block_size + offsets).flatten(1)
        keys = dequantize(
            layer.keys[slots], None if layer.key_scales is None else layer.key_scales[slots]
        )
        values = dequantize(
            layer.values[slots], None if layer.value_scales is None else layer.value_scales[slots]
        )
        packed = query.float().unflatten(1, (layer.head_count, -1))
        scores = torch.einsum("rhgw,rkhw->rhgk", packed, keys) * traits.scaling
        if traits.softcap is not None:
            scores = traits.softcap * torch.tanh(scores / traits.softcap)
        distances = self._positions[:, None] - torch.arange(slots.shape[1])
        hidden = distances < 0
        if traits.window_token_count is not None:
            hidden = hidden | (distances >= traits.window_token_count)
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        if traits.sinks is not None:
            sinks = traits.sinks.float().view(1, layer.head_count, -1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : slots.shape[1]]
        output = torch.einsum("rhgk,rkhw->rhgw", weights.nan_to_num(), values)
        return output.flatten(1, 2).to(query.dtype)


def _tensors(results: Any) -> list[Tensor]:
    return [result for result in tree_leaves(results) if isinstance(result, Tensor)]
