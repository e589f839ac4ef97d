"""What the machine decides: proxy user, IPv6, DNS servers.

Source: istio/istio: tools/common/config/config.go (FillConfigFromEnvironment), pkg/util/net/ip.go.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address

from . import words
from .config import Config
from .errors import InitError, UsageError
from .flags import Parsed
from .netlink import addresses

RESOLV_CONF = "/etc/resolv.conf"
DEFAULT_UID = "1337"

IPAddress = IPv4Address | IPv6Address


def fill(config: Config, parsed: Parsed, environ: Mapping[str, str]) -> Config:
    """``config`` with UID, GID, IPv6 switch and DNS servers.

    ``--ipv6 on|off`` and ``--dns-servers`` replace what would be read.

    Raises:
        InitError: no usable local address, resolv.conf unreadable, IPv6 wanted of a kernel without.
        UsageError: ``--dns-servers`` holds something that is no IP address.
    """
    uid = config.proxy_uid or user_id(environ.get("ENVOY_USER", "istio-proxy")) or DEFAULT_UID
    config = config._replace(proxy_uid=uid, proxy_gid=config.proxy_gid or uid)
    switch = parsed.text("ipv6")
    if switch == "on" and not config.dry_run and not has_ipv6():
        raise InitError(
            "--ipv6 on", "this kernel has no IPv6 (ipv6.disable=1, or built without)", "Use --ipv6 auto or off"
        )
    if switch == "auto":
        host, ipv6 = local_address(local_addresses(), config.dual_stack)
        config = config._replace(host_ip=words.show(host), ipv6=ipv6)
    else:
        config = config._replace(ipv6=switch == "on", host_ip=_host() if switch == "on" else "127.0.0.1")
    if config.redirect_dns and not config.capture_all_dns:
        v4, v6 = _servers(parsed)
        config = config._replace(dns_servers_v4=v4, dns_servers_v6=v6)
    return config


def user_id(name: str, passwd: str = "/etc/passwd") -> str:
    """The numeric UID of a user of the local user database, or empty. No name service is asked."""
    try:
        lines = _text(passwd).splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(":")
        if len(fields) > 2 and fields[0] == name and fields[2].isdigit():
            return fields[2]
    return ""


def local_address(found: Iterable[IPAddress], dual_stack: bool) -> tuple[IPAddress, bool]:
    """The host IP and whether IPv6 is on.

    Loopback and link-local addresses do not count, IPv4-mapped ones are unwrapped. The first address decides; with
    ``dual_stack`` the walk goes on to the first IPv6 one.

    Raises:
        InitError: nothing is left.
    """
    first: IPAddress | None = None
    ipv6 = False
    for address in found:
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        plain = mapped or address
        if plain.is_loopback or plain.is_link_local or _link_local_multicast(plain):
            continue
        first = first or plain
        ipv6 = isinstance(plain, IPv6Address)
        if ipv6 or not dual_stack:
            break
    if first is None:
        raise InitError(
            "no valid local IP address found", "every address is loopback or link-local", "Use --ipv6 on or off"
        )
    return first, ipv6


def local_addresses() -> list[IPAddress]:
    """All interface addresses. Raises InitError."""
    try:
        return addresses()
    except OSError as error:
        raise InitError("cannot list the interface addresses", str(error)) from None


def has_ipv6() -> bool:
    """False if the kernel has no IPv6 at all; an interface without IPv6 addresses is another thing."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


def nameservers(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """IPv4 and IPv6 servers of a resolv.conf; what is no IP literal is dropped (miekg/dns: clientconfig.go)."""
    v4: list[str] = []
    v6: list[str] = []
    for line in text.splitlines():
        if line.startswith((";", "#")):
            continue
        fields = line.split()
        if len(fields) > 1 and fields[0] == "nameserver" and (address := words.server(fields[1])) is not None:
            (v4 if isinstance(address, IPv4Address) else v6).append(words.show(address))
    return tuple(v4), tuple(v6)


def _servers(parsed: Parsed) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if "dns-servers" in parsed.given:
        v4: list[str] = []
        v6: list[str] = []
        for item in words.split(parsed.text("dns-servers")):
            address = words.server(item.strip())
            if address is None:
                raise UsageError(f"invalid argument {item!r} for --dns-servers", "it is not an IP address")
            (v4 if isinstance(address, IPv4Address) else v6).append(item.strip())
        return tuple(v4), tuple(v6)
    try:
        return nameservers(_text(RESOLV_CONF))
    except OSError as error:
        raise InitError(f"failed to load {RESOLV_CONF}", error.strerror or str(error)) from None


def _text(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _host() -> str:
    """The first real address if there is one; only the validator asks, and only for its family."""
    try:
        return words.show(local_address(local_addresses(), dual_stack=False)[0])
    except InitError:
        return "::1"


def _link_local_multicast(address: IPAddress) -> bool:
    packed = address.packed
    if isinstance(address, IPv4Address):
        return packed[:3] == b"\xe0\x00\x00"
    return packed[0] == 0xFF and packed[1] & 0x0F == 0x02
