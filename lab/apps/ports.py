"""What an echo app serves: typed from the parameters of a pod, or from the command line.

Grammar of a port on the command line: ``PORT[:PROTOCOL[:NAME]]``, e.g. ``8080``, ``443:https``, ``4317:grpc:otlp``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from lab.errors import InputError

EchoProtocol = Literal["http", "https", "tls", "tcp", "udp", "grpc", "auto"]
"""``https`` is TLS, then HTTP/1.1; ``tls`` is TLS, then the TCP echo; ``auto`` is HTTP/1.1 or TCP by the first bytes."""

PROTOCOLS: tuple[str, ...] = get_args(EchoProtocol)


@dataclass(frozen=True, slots=True)
class EchoPort:
    """One port; 0 lets the kernel choose (tests)."""

    port: int
    protocol: EchoProtocol = "http"
    name: str = ""


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """An echo app.

    ``pod`` is what the answers call us (``POD.NAMESPACE`` or an external host's name), ``app`` its short form.
    ``hosts`` are the names (or addresses) that the self-signed certificate carries. ``certificate`` and ``key``
    (PEM files) replace it; ``client_ca`` (PEM file) makes TLS ports ask for a client certificate and verify it if one is sent.
    ``log`` is the path of the JSON-lines event log, ``-`` is stdout, empty is none.
    """

    ports: tuple[EchoPort, ...]
    pod: str
    app: str
    addresses: tuple[str, ...] = ("0.0.0.0",)
    hosts: tuple[str, ...] = ()
    log: str = ""
    certificate: str = ""
    key: str = ""
    client_ca: str = ""


def parse_port(text: str) -> EchoPort:
    """``PORT[:PROTOCOL[:NAME]]`` as a port.

    Raises:
        InputError: not of that form.
    """
    number, _, rest = text.partition(":")
    protocol, _, name = rest.partition(":")
    return make_port(number, protocol or "http", name)


def make_port(number: object, protocol: object, name: object = "") -> EchoPort:
    """A checked port.

    Raises:
        InputError: the number or the protocol is none.
    """
    try:
        port = int(str(number))
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise InputError("bad echo port", repr(number), "a port is a number from 0 to 65535")
    if protocol not in PROTOCOLS:
        raise InputError("bad echo protocol", f"port {port}", repr(protocol), f"Use one of {', '.join(PROTOCOLS)}")
    return EchoPort(port, cast(EchoProtocol, protocol), str(name or ""))


def from_params(params: Mapping[str, object]) -> EchoConfig:
    """The configuration from plain data (keys: see ``EchoConfig``; ``name`` is the pod's).

    Raises:
        InputError: a key is unknown or has no sense.
    """
    known = {"ports", "name", "app", "addresses", "hosts", "log", "certificate", "key", "client_ca"}
    unknown = sorted(set(params) - known)
    if unknown:
        raise InputError("unknown echo parameter", ", ".join(unknown), "", f"Known are {', '.join(sorted(known))}")
    entries = params.get("ports")
    if not isinstance(entries, list | tuple):
        raise InputError("bad echo parameter", "ports", "a list of ports is needed")
    ports = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise InputError("bad echo parameter", "ports", f"{entry!r} is no port")
        ports.append(make_port(entry.get("port"), entry.get("protocol", "http"), entry.get("name", "")))
    name = str(params.get("name") or "echo")
    return EchoConfig(
        ports=tuple(ports),
        pod=name,
        app=str(params.get("app") or name.partition(".")[0]),
        addresses=addresses(params.get("addresses") or ["0.0.0.0"]),
        hosts=_strings("hosts", params.get("hosts") or [name]),
        log=str(params.get("log") or ""),
        certificate=str(params.get("certificate") or ""),
        key=str(params.get("key") or ""),
        client_ca=str(params.get("client_ca") or ""),
    )


def addresses(values: object) -> tuple[str, ...]:
    """Listen addresses in canonical form.

    Raises:
        InputError: one is no IP address.
    """
    result = []
    for value in _strings("addresses", values):
        try:
            result.append(str(ipaddress.ip_address(value)))
        except ValueError:
            raise InputError("bad listen address", repr(value), "not an IP address") from None
    return tuple(result)


def _strings(key: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise InputError("bad echo parameter", key, "a list of strings is needed")
    return tuple(str(v) for v in values)
