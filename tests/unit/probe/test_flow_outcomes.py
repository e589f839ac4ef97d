"""What a client says of an answer that is not whole: real sockets, and servers that stop in the middle."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lab.probe import flows
from lab.probe.orders import Order, Sent

HEAD = b"HTTP/1.1 200 OK\r\n"


def reset(connection: socket.socket) -> None:
    """A close that says RST (socket(7): SO_LINGER with no time)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def finish(connection: socket.socket) -> None:
    """The end of what is said, not of listening: a close would be a reset if something was not heard."""
    connection.shutdown(socket.SHUT_WR)
    stay(connection)


def stay(connection: socket.socket) -> None:
    """Until the client goes away."""
    while connection.recv(65536):
        pass
    connection.close()


@contextmanager
def server(answer: bytes, then: Callable[[socket.socket], None]) -> Iterator[int]:
    """Answers the first bytes of one connection; its port."""

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(answer)
        then(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


def send(answer: bytes, then: Callable[[socket.socket], None], protocol: str = "http", timeout: float = 5.0) -> Sent:
    with server(answer, then) as port:
        return flows.run(Order("127.0.0.1", port, protocol, timeout=timeout))  # type: ignore[arg-type]


LENGTH = HEAD + b"content-length: 100\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
UNTIL_END = HEAD + b"connection: close\r\n\r\nhello"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 100\r\n\r\nhello"


@pytest.mark.parametrize(
    ("answer", "then", "told"),
    [
        (LENGTH + b"hello", finish, "the answer ended after 5 of 100 bytes of its body"),
        (LENGTH + b"hello", reset, "the answer was reset after 5 of 100 bytes of its body"),
        (CHUNKED, finish, "the answer ended after 5 bytes of its body"),
        (CHUNKED, reset, "the answer was reset after 5 bytes of its body"),
        (UNTIL_END, reset, "the answer was reset after 5 bytes of its body"),
        (HEAD + b"server: a\r\n", finish, "the answer ended within its headers, after 28 bytes"),
        (HEAD + b"server: a\r\n", reset, "the answer was reset within its headers, after 28 bytes"),
    ],
)
def test_half_an_answer_is_closed_and_keeps_its_status(
    answer: bytes, then: Callable[[socket.socket], None], told: str
) -> None:
    sent = send(answer, then)
    assert (sent.result, sent.status, sent.error) == ("closed", 200, told)


def test_half_a_status_line_has_no_status() -> None:
    sent = send(b"HTTP/1.1 20", finish)
    assert (sent.result, sent.status) == ("closed", None)


def test_half_an_error_is_an_error() -> None:
    sent = send(BUSY, reset)
    assert (sent.result, sent.status) == ("http-error", 503)
    assert sent.error == "the answer was reset after 5 of 100 bytes of its body"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (LENGTH + b"hello", "the answer was not over in 0.5 s, and stood within its body"),
        (HEAD, "the answer was not over in 0.5 s, and stood within its headers, after 17 bytes"),
    ],
)
def test_an_answer_that_stands_still_is_late(answer: bytes, told: str) -> None:
    sent = send(answer, stay, timeout=0.5)
    assert (sent.result, sent.status, sent.error) == ("timeout", 200, told)


def test_no_answer_is_nothing() -> None:
    sent = send(b"", stay, timeout=0.5)
    assert (sent.result, sent.status, sent.error) == ("timeout", None, "nothing within 0.5 s")


@pytest.mark.parametrize("then", [finish, reset])
def test_an_end_without_a_byte_is_closed(then: Callable[[socket.socket], None]) -> None:
    sent = send(b"", then)
    assert (sent.result, sent.status) == ("closed", None)


@pytest.mark.parametrize(
    ("answer", "then"),
    [
        (LENGTH.replace(b"100", b"5") + b"hello", finish),
        (LENGTH.replace(b"100", b"5") + b"hello", reset),
        (CHUNKED + b"0\r\n\r\n", reset),
        (UNTIL_END, finish),
    ],
)
def test_a_whole_answer_is_whole_however_it_ends(answer: bytes, then: Callable[[socket.socket], None]) -> None:
    sent = send(answer, then)
    assert (sent.result, sent.status, sent.error) == ("ok", 200, None)


@pytest.mark.parametrize(("then", "error"), [(finish, None), (reset, "reset after 5 bytes"), (stay, None)])
def test_bytes_without_a_line_are_a_tcp_answer(then: Callable[[socket.socket], None], error: str | None) -> None:
    sent = send(b"hello", then, "tcp", timeout=0.5)
    assert (sent.result, sent.error) == ("ok", error)


def _frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


STATUS_200 = b"\x88"
"""``:status: 200`` of HPACK's static table (RFC 7541, appendix A)."""


@pytest.mark.parametrize(
    ("then", "result", "told"),
    [
        (finish, "closed", "the answer ended before its trailers, after 5 bytes of its body"),
        (stay, "timeout", "the answer was not over in 0.5 s, and stood before its trailers, after 5 bytes of its body"),
    ],
)
def test_a_grpc_answer_without_trailers_is_not_whole(
    then: Callable[[socket.socket], None], result: str, told: str
) -> None:
    answer = _frame(4, 0, b"", 0) + _frame(1, 4, STATUS_200) + _frame(0, 0, bytes(5))
    sent = send(answer, then, "grpc", timeout=0.5)
    assert (sent.result, sent.status, sent.error) == (result, 200, told)
