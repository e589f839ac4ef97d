"""Real flows: scapy's packets over sockets of the kernel, opened by whoever calls, in the namespaces it is in."""

from __future__ import annotations

import errno
import http.client
import io
import ipaddress
import json
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from lab.probe import packets, resolver
from lab.probe.orders import Order, Sent

TCP_LINE = b"sidecarlab tcp probe\n"
"""First bytes of a tcp flow: no HTTP method begins so, or Envoy's http_inspector would call it HTTP."""

_ERRORS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.EPERM: "unreachable",  # a filter rule of this namespace drops what we send
    errno.EACCES: "unreachable",
    errno.ECONNRESET: "closed",
    errno.EPIPE: "closed",
    errno.ETIMEDOUT: "timeout",
}

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_GRPC_PATH = "/sidecarlab.Echo/Call"


class Closed(Exception):
    """The other side ended the connection without a byte."""


@dataclass
class Attempt:
    """One flow in the making."""

    order: Order
    sent: Sent
    deadline: float
    got: int = 0
    """Bytes that came back."""
    cut: str = ""
    """How the stream ended, if it did: ``ended``, ``reset`` or ``late`` (it had not, when time was over)."""

    def left(self) -> float:
        """Seconds until the deadline.

        Raises:
            TimeoutError: it has passed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def run(order: Order) -> Sent:
    """Sends a flow and tells what became of it. Whatever the network does is a result, never an exception."""
    attempt = Attempt(order, Sent("no-answer"), time.monotonic() + order.timeout)
    sent = attempt.sent
    if order.protocol in ("dns", "dns-tcp"):
        _dns(attempt)
        return sent
    datagram = order.protocol in ("udp", "icmp")
    sent.proto = order.protocol if datagram else "tcp"
    if not find_address(attempt):
        return sent
    try:
        _SENDERS[order.protocol](attempt)
    except TimeoutError:
        sent.result = "no-answer" if datagram else "timeout"
        sent.error = f"{'no whole answer' if attempt.got else 'nothing'} within {order.timeout:g} s"
    except Closed:
        sent.result = "closed"
    except ssl.SSLError as e:
        sent.result, sent.error = "closed", f"TLS: {e.reason or e}"
    except OSError as e:
        sent.result, sent.error = _ERRORS.get(e.errno or 0, "unreachable"), e.strerror or str(e)
    return sent


def find_address(attempt: Attempt) -> bool:
    """Finds out where to go; False if the name has no address (then the outcome is set)."""
    order, sent = attempt.order, attempt.sent
    sent.port = order.port
    try:
        sent.address = str(ipaddress.ip_address(order.host))
    except ValueError:
        sent.address, sent.queries = resolver.lookup(order.host, attempt.deadline)
        if sent.address is None:
            last = sent.queries[-1] if sent.queries else None
            why = (last.error or last.rcode or "") if last else "no server"
            sent.result, sent.error = "unreachable", f"{order.host} was not resolved: {why}"
            return False
    return True


def _dns(attempt: Attempt) -> None:
    order, sent = attempt.order, attempt.sent
    config = resolver.parse_resolv_conf(resolver.read_file("/etc/resolv.conf"))
    server = order.server or config.servers[0]
    proto = "tcp" if order.protocol == "dns-tcp" else "udp"
    sent.proto, sent.address, sent.port = proto, server, order.port or 53
    for name in config.candidates(order.host) if order.query_type in ("A", "AAAA") else [order.host]:
        query = resolver.ask(name, order.query_type, server, proto, attempt.deadline, sent.port)
        sent.queries.append(query)
        if query.answers or query.rcode is None:
            break
    last = sent.queries[-1]
    sent.src, sent.sport = last.src, last.sport
    if last.rcode is None:
        known = last.error in ("refused", "unreachable", "closed", "no-answer")
        sent.result, sent.error = str(last.error) if known else "unreachable", last.error
    elif last.rcode == "NOERROR" and last.answers:
        sent.result = "ok"
    else:
        sent.result, sent.error = "no-answer", last.rcode if last.rcode != "NOERROR" else "no such record"


def _connect(attempt: Attempt) -> socket.socket:
    sent = attempt.sent
    assert sent.address is not None
    family = socket.AF_INET6 if ":" in sent.address else socket.AF_INET
    s = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        s.settimeout(attempt.left())
        try:
            s.connect((sent.address, sent.port))
        finally:
            sent.src, sent.sport = s.getsockname()[:2]
    except BaseException:
        s.close()
        raise
    return s


def _chunk(attempt: Attempt, s: socket.socket, size: int = 65536) -> bytes:
    """The next bytes of a stream, none at its end; counts them, and remembers how it ended.

    Raises:
        TimeoutError: too late.
    """
    try:
        s.settimeout(attempt.left())
        chunk = s.recv(size)
    except TimeoutError:
        attempt.cut = "late"
        raise
    except (ConnectionResetError, ssl.SSLEOFError):
        attempt.cut = "reset"
        return b""
    attempt.got += len(chunk)
    if not chunk:
        attempt.cut = "ended"
    return chunk


def _receive(attempt: Attempt, s: socket.socket, done: Callable[[bytes], bool]) -> bytes:
    """Bytes until ``done``, the end of the stream, or the deadline; ``attempt.cut`` says if it was not the first.

    Raises:
        Closed: the stream ended, or was reset, without a byte.
        TimeoutError: too late, and no byte came.
    """
    data = b""
    while not done(data):
        try:
            chunk = _chunk(attempt, s)
        except TimeoutError:
            if not data:
                raise
            break
        if not chunk:
            break
        data += chunk
    if not data:
        raise Closed
    return data


def _cut_off(attempt: Attempt, where: str) -> None:
    """The outcome of an answer that began and is not whole; its status, if it has one, is known already."""
    sent = attempt.sent
    sent.result = "timeout" if attempt.cut == "late" else "closed"
    if sent.status is not None and sent.status >= 400:
        sent.result = "http-error"
    how = {"reset": "was reset", "late": f"was not over in {attempt.order.timeout:g} s, and stood"}
    sent.error = f"the answer {how.get(attempt.cut, 'ended')} {where}"


def _tcp(attempt: Attempt) -> None:
    with _connect(attempt) as s:
        if not attempt.order.silent:
            packets.put(s, packets.Raw(TCP_LINE))
        data = _receive(attempt, s, lambda d: b"\n" in d or len(d) > 65536)
    attempt.sent.result = "ok"
    if attempt.cut == "reset":
        attempt.sent.error = f"reset after {len(data)} bytes"
    attempt.sent.body = _json(data.partition(b"\n")[0])


def _http(attempt: Attempt) -> None:
    with _connect(attempt) as s:
        packets.put(s, _request(attempt.order))
        _response(attempt, s)


def _tls(attempt: Attempt) -> None:
    order, sent = attempt.order, attempt.sent
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # what is seen matters here, not whether we would trust it
    with _connect(attempt) as plain:
        plain.settimeout(attempt.left())
        try:
            secure = context.wrap_socket(plain, server_hostname=order.sni or order.host)
        except (ConnectionResetError, ssl.SSLEOFError):
            raise Closed from None
        with secure:
            sent.tls = {"version": secure.version(), "cipher": (secure.cipher() or ("",))[0]}
            secure.sendall(bytes(_request(order)))  # an HTTPS port answers it, a TLS echo too
            _response(attempt, secure)


def _request(order: Order) -> packets.Raw:
    """The HTTP/1.1 request of an order. Host is ``authority``, or the host with its port unless 80 (443 for TLS)."""
    usual = 443 if order.protocol == "tls" else 80
    host = f"[{order.host}]" if ":" in order.host else order.host
    authority = order.authority or (host if order.port == usual else f"{host}:{order.port}")
    fixed = {"host": authority, "user-agent": "sidecarlab", "accept": "*/*", "connection": "close"}
    headers = {**fixed, **{k.lower(): v for k, v in order.headers.items()}}
    lines = {k.title().encode(): v.encode() for k, v in headers.items()}
    request = packets.HTTP() / packets.HTTPRequest(
        Method=order.method.encode(), Path=order.path.encode(), Host=lines.pop(b"Host"), Unknown_Headers=lines
    )
    # scapy gives every message a length; a request without a body has none (RFC 9110, 8.6).
    return packets.Raw(bytes(request).replace(b"Content-Length: 0\r\n", b"", 1))


def _response(attempt: Attempt, s: socket.socket) -> None:
    sent = attempt.sent
    data = _receive(attempt, s, lambda d: not d.startswith(b"HTTP/"[: len(d)]) or b"\r\n\r\n" in d)
    if not data.startswith(b"HTTP/"):  # a TLS echo answers with one JSON line
        if b"\n" not in data and not attempt.cut:
            data += _receive(attempt, s, lambda more: b"\n" in more)
        sent.result, sent.body = "ok", _json(data.partition(b"\n")[0])
        return
    if b"\r\n\r\n" not in data:
        line = re.match(rb"HTTP/\S+ (\d{3})\b.*\n", data)
        sent.status = int(line[1]) if line else None
        _cut_off(attempt, f"within its headers, after {len(data)} bytes")
        return
    response = http.client.HTTPResponse(cast(socket.socket, _Replay(attempt, s, data)), method=attempt.order.method)
    try:
        response.begin()
    except http.client.HTTPException as e:
        sent.result, sent.error = "closed", f"a response that is none: {type(e).__name__}"
        return
    sent.status = response.status
    _body(attempt, response)


def _body(attempt: Attempt, response: http.client.HTTPResponse) -> None:
    sent = attempt.sent
    expected = response.length  # None: it is chunked, or ends with the connection
    try:
        body = response.read()
    except http.client.IncompleteRead as e:
        of = "" if expected is None else f" of {expected}"
        return _cut_off(attempt, f"after {len(e.partial)}{of} bytes of its body")
    except http.client.HTTPException as e:
        sent.result, sent.error = "closed", f"a body that is none: {type(e).__name__}"
        return None
    except TimeoutError:
        return _cut_off(attempt, "within its body")
    if attempt.cut == "reset" and expected is None:
        return _cut_off(attempt, f"after {len(body)} bytes of its body")
    sent.result = "http-error" if response.status >= 400 else "ok"
    sent.body = _json(body)
    return None


class _Replay:
    """Looks like a socket to http.client: bytes that were read already, then the socket, within the deadline."""

    def __init__(self, attempt: Attempt, s: socket.socket, data: bytes) -> None:
        self._reader = io.BufferedReader(_Reader(attempt, s, data))

    def makefile(self, _mode: str) -> io.BufferedIOBase:
        return self._reader


class _Reader(io.RawIOBase):
    def __init__(self, attempt: Attempt, s: socket.socket, data: bytes) -> None:
        self._attempt, self._socket, self._data = attempt, s, data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._data:
            self._data = _chunk(self._attempt, self._socket, len(buffer))
        size = min(len(buffer), len(self._data))
        buffer[:size], self._data = self._data[:size], self._data[size:]
        return size


def _udp(attempt: Attempt) -> None:
    order, sent = attempt.order, attempt.sent
    assert sent.address is not None
    family = socket.AF_INET6 if ":" in sent.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
        s.connect((sent.address, order.port))
        sent.src, sent.sport = s.getsockname()[:2]
        packets.put(s, packets.Raw(b"sidecarlab udp probe\n"))
        s.settimeout(attempt.left())
        sent.body = _json(s.recv(65535))
    sent.result = "ok"


def _icmp(attempt: Attempt) -> None:
    sent = attempt.sent
    assert sent.address is not None
    six = ":" in sent.address
    family, number = (socket.AF_INET6, socket.IPPROTO_ICMPV6) if six else (socket.AF_INET, socket.IPPROTO_ICMP)
    sent.proto = "icmpv6" if six else "icmp"
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, number) as s:
        s.connect((sent.address, 0))
        level, receive_errors = (
            (socket.IPPROTO_IPV6, 25) if six else (socket.IPPROTO_IP, 11)
        )  # IPV6_RECVERR, IP_RECVERR
        s.setsockopt(level, receive_errors, 1)
        ping = packets.ICMPv6EchoRequest(seq=1) if six else packets.ICMP(type=8, seq=1)
        packets.put(s, ping / packets.Raw(b"sidecarlab ping"))
        sent.src, sent.sport = s.getsockname()[:2]
        s.settimeout(attempt.left())
        s.recv(65535)
    sent.result = "ok"


def _grpc(attempt: Attempt) -> None:
    """One unary call over HTTP/2 with prior knowledge; the request is one empty message."""
    order = attempt.order
    host = f"[{order.host}]" if ":" in order.host else order.host
    path = order.path if order.path != "/" else _GRPC_PATH
    extra = "".join(f"{k.lower()}: {v}\n" for k, v in order.headers.items())
    text = (
        f":method POST\n:scheme http\n:path {path}\n:authority {order.authority or f'{host}:{order.port}'}\n"
        f"content-type: application/grpc\nte: trailers\nuser-agent: sidecarlab\n{extra}"
    )
    frames = packets.HPackHdrTable().parse_txt_hdrs(text.encode(), stream_id=1, body=struct.pack(">BI", 0, 0))
    with _connect(attempt) as s:
        packets.put(s, packets.Raw(_PREFACE + bytes(_settings()) + bytes(frames)))
        _h2_answer(attempt, s)


def _settings(ack: bool = False) -> Any:
    return packets.H2Frame(bytes([0, 0, 0, 4, 1 if ack else 0, 0, 0, 0, 0]))


def _h2_answer(attempt: Attempt, s: socket.socket) -> None:
    table = packets.HPackHdrTable()
    headers: dict[str, str] = {}
    message = fragment = buffer = b""
    while True:
        while len(buffer) >= 9 and len(buffer) >= 9 + (size := int.from_bytes(buffer[:3], "big")):
            frame, buffer = buffer[: 9 + size], buffer[9 + size :]
            kind, flags, payload = frame[3], frame[4], _unpadded(frame)
            if kind == 4 and not flags & 1:
                s.sendall(bytes(_settings(ack=True)))
            elif kind == 0:
                message += payload
            elif kind in (1, 9):
                fragment += payload[5:] if kind == 1 and flags & 0x20 else payload
                if flags & 4:
                    headers |= _h2_headers(table, fragment)
                    fragment = b""
            elif kind in (3, 7):  # RST_STREAM, GOAWAY
                attempt.cut = "reset"
                return _h2_outcome(attempt, headers, message)
            if kind in (0, 1) and flags & 1:
                return _h2_outcome(attempt, headers, message)
        try:
            chunk = _chunk(attempt, s)
        except TimeoutError:
            if ":status" not in headers:
                raise
        if attempt.cut:
            if not attempt.got:
                raise Closed
            return _h2_outcome(attempt, headers, message)
        buffer += chunk


def _unpadded(frame: bytes) -> bytes:
    payload = frame[9:]
    if frame[3] in (0, 1) and frame[4] & 8 and payload:
        return payload[1 : len(payload) - payload[0]]
    return payload


def _h2_headers(table: Any, fragment: bytes) -> dict[str, str]:
    size = len(fragment).to_bytes(3, "big")
    frame = packets.H2Frame(size + bytes([1, 4, 0, 0, 0, 1]) + fragment)
    found: dict[str, str] = {}
    for line in table.gen_txt_repr(frame, register=True).splitlines():
        if line.startswith(":"):
            name, _, value = line.partition(" ")
        else:
            name, _, value = line.partition(": ")
        found[name] = value
    return found


def _h2_outcome(attempt: Attempt, headers: dict[str, str], message: bytes) -> None:
    sent = attempt.sent
    status, grpc = headers.get(":status", ""), headers.get("grpc-status", "")
    sent.status = int(status) if status.isdigit() else None
    sent.grpc_status = int(grpc) if grpc.isdigit() else None
    sent.body = _json(message[5:])
    if sent.status is None:
        raise Closed
    if attempt.cut and sent.grpc_status is None:
        _cut_off(attempt, f"before its trailers, after {len(message)} bytes of its body")
        return
    failed = sent.status >= 400 or sent.grpc_status != 0
    sent.result = "http-error" if failed else "ok"
    if failed:
        sent.error = headers.get("grpc-message") or None


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


_SENDERS: dict[str, Callable[[Attempt], None]] = {
    "http": _http,
    "grpc": _grpc,
    "tcp": _tcp,
    "tls": _tls,
    "udp": _udp,
    "icmp": _icmp,
}
