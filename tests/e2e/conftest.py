"""What the end-to-end tests share."""

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
