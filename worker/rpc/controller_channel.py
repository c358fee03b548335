"""The connection to the controller."""

import grpc

from prefixd.worker.limits import MESSAGE_BYTES_MAX
from prefixd.worker.rpc.tls import ControllerTls


def open_channel(address: str, tls: ControllerTls | None) -> grpc.aio.Channel:
    """Opens a channel; with ``tls`` encrypted. Raises TlsUnusable."""
    options = _channel_options()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def _channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A controller whose machine is gone sends no reset.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
