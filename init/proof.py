"""``--run-validation``: a packet as proof that the rules redirect.

The program listens where Envoy will (ports 15001 and 15006 on loopback) and dials 127.0.0.6:15002, a port where
nobody listens, as the proxy's user. The rule for a proxy's self-calls sends that to 15006; there SO_ORIGINAL_DST
still says 15002, and a random token in the connection says that it is ours and nobody else's.

Only the proxy's user or group is redirected that way. Root becomes that user for the one socket it dials with, if
it may; the reference would wait for its time-out instead.

Source: istio/istio: tools/istio-iptables/pkg/validation/validator.go, vld_unix.go.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from . import state, words, xtables
from .config import Config
from .errors import InitError, ProofError
from .model import Family
from .tools import Tools

SO_ORIGINAL_DST = 80
RETRY = 1.0
"""Seconds between two attempts."""

HELP = """\
iptables validation failed; workload is not ready for Istio.
When using Istio CNI, this can occur if a pod is scheduled before the node is ready.

If installed with 'cni.repair.deletePods=true', this pod should automatically be deleted and retry.
Otherwise, this pod will need to be manually removed so that it is scheduled on a node with istio-cni running, allowing \
iptables rules to be established.
"""


def run(config: Config, tools: Tools, backend: str) -> None:
    """Returns when a packet of ours was redirected.

    Raises:
        ProofError: none was within ``config.probe_timeout``; its reason is in the log (exit 126).
    """
    log = tools.log
    family: Family = "ipv6" if ":" in config.host_ip else "ipv4"
    deadline = time.monotonic() + config.probe_timeout
    token = secrets.token_bytes(16)
    with ExitStack() as stack:
        listeners = list(_listen(config, family, tools, stack))
        if not listeners:
            _fail(tools, "nobody listens: neither the outbound nor the inbound port could be bound")
        refused, dialler = 0, _Dialler(config, family)
        while time.monotonic() < deadline:
            said = dialler.dial(token)
            if said:
                refused += 1
                log.debug(f"probe: {said}")
            if _accepted(listeners, config.probe_port, token, min(RETRY, deadline - time.monotonic()), tools):
                log.info("validation passed, iptables rules established")
                return
    _fail(tools, _cause(config, tools, family, backend, dialler, refused))


def original_destination(connection: socket.socket) -> tuple[str, int]:
    """Where the connection was going before it was redirected. Raises OSError if it was not."""
    if connection.family == socket.AF_INET:
        raw = connection.getsockopt(socket.IPPROTO_IP, SO_ORIGINAL_DST, 16)
        port, packed = struct.unpack_from("!2xH4s", raw)
        return socket.inet_ntop(socket.AF_INET, packed), port
    raw = connection.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28)
    port, packed = struct.unpack_from("!2xH4x16s", raw)
    return socket.inet_ntop(socket.AF_INET6, packed), port


def _listen(config: Config, family: Family, tools: Tools, stack: ExitStack) -> Iterator[socket.socket]:
    address = "127.0.0.1" if family == "ipv4" else "::1"
    for text in (config.proxy_port, config.inbound_capture_port):
        try:
            listener = stack.enter_context(socket.socket(_af(family), socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((address, int(text)))
            listener.listen()
        except (OSError, ValueError, OverflowError) as error:
            tools.log.error(f"cannot listen on {address}:{text}: {error}")
            continue
        yield listener


class _Dialler:
    """Dials as a proxy user, as far as this process may."""

    def __init__(self, config: Config, family: Family) -> None:
        self.family = family
        self.port = config.probe_port
        uids, gids = words.split(config.proxy_uid), words.split(config.proxy_gid)
        self.is_proxy = str(os.geteuid()) in uids or str(os.getegid()) in gids
        self.uid = next((int(uid) for uid in uids if uid.isdigit()), -1)
        self.became = self.is_proxy
        self.tried = False

    def dial(self, token: bytes) -> str:
        """Connects, sends the token and leaves; returns what went wrong, if anything did."""
        self.tried = True
        local, remote = ("127.0.0.1", "127.0.0.6") if self.family == "ipv4" else ("::1", "::6")
        with self._as_proxy():
            sock = socket.socket(_af(self.family), socket.SOCK_STREAM)
        with sock:
            sock.settimeout(RETRY)
            try:
                sock.bind((local, 0))
                sock.connect((remote, self.port))
                sock.sendall(token)
            except OSError as error:
                return f"cannot connect to {remote}:{self.port}: {error.strerror or error}"
        return ""

    @contextmanager
    def _as_proxy(self) -> Iterator[None]:
        """The owner of a socket is the file system UID with which it was opened."""
        if self.is_proxy or self.uid < 0:
            yield
            return
        setfsuid = ctypes.CDLL(None).setfsuid
        before = setfsuid(self.uid)
        self.became = setfsuid(-1) == self.uid
        try:
            yield
        finally:
            setfsuid(before)


def _accepted(listeners: list[socket.socket], port: int, token: bytes, wait: float, tools: Tools) -> bool:
    """Takes the connections that come within ``wait`` seconds; True for ours with the right original port."""
    deadline = time.monotonic() + wait
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(listeners, [], [], left)
        for listener in ready:
            connection, peer = listener.accept()
            with connection:
                connection.settimeout(max(0.05, min(RETRY, left)))
                try:
                    _, found = original_destination(connection)
                    connection.sendall(str(found).encode())
                    ours = _receive(connection, len(token)) == token
                except OSError as error:
                    tools.log.error(f"error getting original dst of {peer[0]}:{peer[1]}: {error}")
                    continue
            if ours and found == port:
                return True
    return False


def _receive(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (chunk := connection.recv(count - len(got))):
        got += chunk
    return got


def _cause(config: Config, tools: Tools, family: Family, backend: str, dialler: _Dialler, refused: int) -> str:
    """Why no packet came, as far as this process may look."""
    if not dialler.tried:
        return f"no time: the probe timeout is {config.probe_timeout:g}s, so that no packet was sent"
    if not dialler.became:
        return (
            f"this process is user {os.geteuid()} and may not open a socket as the proxy's user {config.proxy_uid} (no "
            "CAP_SETUID); the rules redirect only that user"
        )
    if _is_down("lo"):
        return "interface lo is down, so that nothing that is redirected to this pod itself arrives; set it up"
    found = _rules_by_backend(tools, family)
    # One back end, or that of IPv4 and that of IPv6.
    mine = backend.split(",")[0 if family == "ipv4" else -1].removesuffix("-restore")
    if found is None:
        seen = "was refused, so no rule redirected it" if refused else "never came"
        return f"the packet {seen}; without root the rules cannot be inspected"
    if not found:
        missing = _missing(tools, family, mine)
        return missing or f"no rule: no back end holds rules of ours for {family}"
    if mine != "auto" and mine not in found:
        return f"wrong back end: the rules are in {', '.join(found)}, {mine} was asked for"
    if refused:
        return f"the rules in {', '.join(found)} did not match the packet: the rule for user {config.proxy_uid} over lo is missing or comes too late"
    return f"nobody listening on {config.inbound_capture_port} got the packet, although {', '.join(found)} holds rules"


def _is_down(interface: str) -> bool:
    """Whether it is not set up (netdevice(7): SIOCGIFFLAGS, IFF_UP)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, 0x8913, struct.pack("16sH14x", interface.encode(), 0))
        except OSError:
            return True
    return not struct.unpack_from("H", answer, 16)[0] & 1


def _rules_by_backend(tools: Tools, family: Family) -> list[str] | None:
    """Back ends that hold rules of ours; None if this process may not look."""
    from . import native
    from .netlink import nft_tables

    if os.geteuid() != 0:
        return None
    found = []
    try:
        found = ["native-nft"] if any(name in native.TABLES for _, name in nft_tables()) else []
    except OSError:
        pass
    for kind in ("legacy", "nft"):
        name = f"{'iptables' if family == 'ipv4' else 'ip6tables'}-{kind}"
        if not xtables.may_hold_rules("nft" if kind == "nft" else "legacy", family) or not tools.find(f"{name}-save"):
            continue
        result = tools.run([f"{name}-save"])
        if result.code == 0 and state.parse(result.out).any_of_ours():
            found.append(kind)
    return found


def _missing(tools: Tools, family: Family, backend: str) -> str:
    """What the kernel lacks for the back end, or nothing."""
    from . import detect

    try:
        if backend == "native-nft":
            result = tools.run(
                ["nft", "-c", "-f", "-"],
                "add table inet istio-probe\nadd chain inet istio-probe x { type nat hook output priority -100 ; }\n",
            )
            return "" if result.code == 0 else f"missing module: nft cannot make a nat chain: {result.err.strip()}"
        detect.usable(backend, family, tools)
    except InitError as error:
        return f"missing module: {error}"
    return ""


def _fail(tools: Tools, cause: str) -> None:
    tools.log.error(f"validation failed: {cause}")
    raise ProofError(HELP.strip(), "", f"Cause: {cause}")


def _af(family: Family) -> int:
    return socket.AF_INET if family == "ipv4" else socket.AF_INET6
