"""Where a server of ours listens."""

from __future__ import annotations

import socket

import pytest

from hisparse import local_server


def test_the_port_is_free_and_none_that_the_system_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 20_000 <= local_server.free_port() < 32_000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(local_server, "PORTS", [port])
        with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            local_server.free_port()
    assert local_server.free_port() == port
