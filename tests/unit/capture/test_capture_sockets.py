"""Whose sockets are whose, asked of this machine's own kernel."""

from __future__ import annotations

import os
import socket

from lab.capture import sockets
from lab.capture.sockets import Diag, Socket
from lab.trace.flows import Flow


def test_the_kernel_names_both_ends_of_a_connection() -> None:
    diag = Diag()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        here, there = client.getsockname(), server.getsockname()
        waiting = sockets.receiver(diag.all("tcp"), there, here, {})
        accepted, _ = server.accept()
        with accepted:
            found = diag.all("tcp")
            holders = sockets.inodes({"me": os.getpid(), "nobody": 2**22 + 1})
            sent = sockets.sender(found, Flow("tcp", *here, *there))
            got = sockets.receiver(found, there, here, holders)
    diag.close()
    assert sent
    assert got
    assert waiting
    assert (sent.uid, holders[sent.inode], holders[got.inode]) == (os.getuid(), "me", "me")
    assert (got.local, got.remote, got.waits) == (there, here, False)
    assert (waiting.local, waiting.waits) == (there, True), "nobody has accepted it: the listener's"
    assert sent.inode != got.inode


def test_a_datagram_socket_without_a_peer_is_found_by_its_port() -> None:
    diag = Diag()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(("0.0.0.0", 0))
        port = s.getsockname()[1]
        found = diag.all("udp")
        assert sockets.sender(found, Flow("udp", "127.0.0.1", port, "127.0.0.1", 53)) is not None
        assert sockets.sender(found, Flow("tcp", "127.0.0.1", port, "127.0.0.1", 53)) is None
    diag.close()


def test_an_ipv4_connection_of_an_ipv6_socket_is_shown_as_ipv4() -> None:
    diag = Diag()
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            found = [s.local for s in diag.all("tcp") if s.remote == client.getsockname()]
            assert found == [client.getpeername()]
    diag.close()


def test_other_protocols_have_no_sockets() -> None:
    diag = Diag()
    assert diag.all("icmp") == []
    diag.close()


def test_the_listener_on_the_very_address_goes_before_that_on_any() -> None:
    any_, own = (Socket((a, 80), ("0.0.0.0", 0), True, 0, n) for n, a in enumerate(("0.0.0.0", "10.0.0.1"), 1))
    assert sockets.receiver([any_, own], ("10.0.0.1", 80), ("10.0.0.2", 1)) is own
    assert sockets.receiver([any_, own], ("10.0.0.3", 80), ("10.0.0.2", 1)) is any_
    assert sockets.receiver([any_, own], ("10.0.0.1", 81), ("10.0.0.2", 1)) is None
