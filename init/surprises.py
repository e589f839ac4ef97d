"""Settings with which the reference does something that their author hardly meant.

The rules stay as the reference's. Each surprise is a warning; with ``--strict`` those that misread a value stop the
program before it touches anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from . import words
from .config import Config
from .flags import Parsed


class Surprise(NamedTuple):
    """``severe`` ones are errors with ``--strict``; the others are worth a line only."""

    text: str
    severe: bool = True


def find(config: Config, parsed: Parsed) -> list[Surprise]:
    """All surprises of a complete configuration, in no order of weight."""
    return [*_values(config, parsed), *_lists(config), *_dns(config, parsed)]


def _values(config: Config, parsed: Parsed) -> Iterator[Surprise]:
    for text in parsed.misread:
        yield Surprise(f"environment: {text}")
    extra = [word for index, word in enumerate(parsed.words) if index or word != "istio-iptables"]
    if extra:
        yield Surprise(f"arguments without a flag are ignored: {' '.join(map(repr, extra))}")
    mode = config.inbound_interception_mode
    if mode not in ("", "REDIRECT", "TPROXY"):
        yield Surprise(f"interception mode {mode!r} is neither REDIRECT nor TPROXY; it acts as REDIRECT")
    chosen = {
        "--native-nftables": "native-nft" if parsed.switch("native-nftables") else "",
        "--force-iptables-binary": parsed.text("force-iptables-binary"),
    }
    for flag, backend in chosen.items():
        if backend and backend != config.backend and not config.backend.startswith(f"{backend}-"):
            yield Surprise(f"{flag} asks for {backend}, but the back end is {config.backend}")


def _lists(config: Config) -> Iterator[Surprise]:
    if config.owner_groups_include != "*":
        if not words.split(config.owner_groups_include):
            yield Surprise(
                "ISTIO_OUTBOUND_OWNER_GROUPS is set but empty: no outbound traffic of any group is captured, DNS included"
            )
        if words.split(config.owner_groups_exclude):
            yield Surprise(
                "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE is ignored because ISTIO_OUTBOUND_OWNER_GROUPS is not *"
            )
    if config.inbound_ports_include not in ("", "*") and config.inbound_ports_exclude:
        # Severe would be wrong: the injector passes its own ports in every case.
        yield Surprise("excluded inbound ports are ignored because the inbound ports are a list", severe=False)
    for kind, ids in (("user", config.proxy_uid), ("group", config.proxy_gid)):
        if len(words.split(ids)) > 1:
            yield Surprise(
                f"with several proxy {kind}s the rule for the first one already lets every other {kind} pass over lo, "
                f"so that only the first can call its own service through Envoy",
                severe=False,
            )


def _dns(config: Config, parsed: Parsed) -> Iterator[Surprise]:
    if not config.redirect_dns:
        if config.capture_all_dns:
            yield Surprise("--capture-all-dns does nothing without --redirect-dns")
        return
    if not config.captures_dns:
        yield Surprise(
            "REDIRECT_DNS is set, but CAPTURE_ALL_DNS is false, and no DNS servers provided. DNS capture disabled.",
            severe=False,
        )
        return
    if parsed.text("proxy-gid"):
        # Where GID is a copy of UID every proxy process has left the chain at the rules for its user.
        yield Surprise(
            "the self-call rule for a proxy group has no exemption for port 53, unlike that for a proxy user: TCP DNS over "
            f"lo by group {config.proxy_gid} under another user than {config.proxy_uid} goes to Envoy inbound"
        )
    elif config.tproxy and any(server.startswith("127.") for server in config.dns_servers_v4):
        # Severe would be wrong: the injector passes no group, and its TPROXY proxy runs as user 0 with that group.
        yield Surprise(
            "the self-call rule for a proxy group has no exemption for port 53, unlike that for a proxy user: TCP DNS over "
            f"lo by group {config.proxy_gid} as user 0, which is what TPROXY injection gives Envoy, goes to Envoy inbound",
            severe=False,
        )
    only_v6 = config.dns_servers_v6 and not config.dns_servers_v4 and not config.capture_all_dns
    if config.backend == "native-nft" and only_v6 and not config.ipv6:
        yield Surprise(
            "all DNS servers are IPv6 while IPv6 is off: the nftables rules jump to chains that have no rules and are "
            "not created, so that nft will refuse them"
        )
