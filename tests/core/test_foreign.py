"""No connection is made while a model is made, and afterwards and in other threads all is as before."""

from __future__ import annotations

import socket
import threading

import pytest

from trtopt.core.foreign import NoDownload, offline


def test_this_thread_is_offline_and_the_others_are_not() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    address, lookup = server.getsockname(), socket.getaddrinfo
    reached: list[bool] = []

    def connect() -> None:
        with socket.create_connection(address, timeout=10):
            reached.append(True)

    with server:
        with offline() as asked:
            with pytest.raises(NoDownload):
                connect()
            thread = threading.Thread(target=connect)
            thread.start()
            thread.join(30)
            guarded = socket.getaddrinfo
        assert asked == ["127.0.0.1"] and reached == [True]
        assert socket.getaddrinfo is lookup
        assert guarded("127.0.0.1", 80)  # kept by somebody meanwhile
        connect()
    assert reached == [True, True]
