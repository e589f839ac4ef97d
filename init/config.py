"""What the rules are built from: every setting with its final value.

``Config`` is pure data. ``init.environment`` fills what a machine decides (addresses, users, resolv.conf).

Source: istio/istio: tools/common/config/config.go, types.go, validation.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import words
from .errors import InitError, UsageError
from .flags import Parsed

MAX_OWNER_GROUPS = 64
"""A rule holds one match for each included group; kernels allow 128 to 1200 matches in a rule."""

INBOUND_MARK = "1337"
OUTBOUND_MARK = "1338"
DNS_PORT = "15053"
DOCKER_RESOLVER = "127.0.0.11"


class Config(NamedTuple):
    """All settings. Strings are as given; lists stay comma lists.

    ``dns_servers_v4``/``_v6`` are IP literals. ``docker_resolver`` says that OUTPUT already jumps to Docker's chain
    and that 127.0.0.11 is a listed server (see ``init.rules``). Times are seconds.
    """

    proxy_port: str = "15001"
    inbound_capture_port: str = "15006"
    inbound_tunnel_port: str = "15008"
    proxy_uid: str = "1337"
    proxy_gid: str = "1337"
    inbound_interception_mode: str = ""
    inbound_ports_include: str = ""
    inbound_ports_exclude: str = ""
    exclude_interfaces: str = ""
    outbound_ip_ranges_include: str = ""
    outbound_ip_ranges_exclude: str = ""
    outbound_ports_include: str = ""
    outbound_ports_exclude: str = ""
    kube_virt_interfaces: str = ""
    inbound_tproxy_mark: str = INBOUND_MARK
    inbound_tproxy_route_table: str = "133"
    owner_groups_include: str = "*"
    owner_groups_exclude: str = ""
    loopback_cidr: str = "127.0.0.1/32"
    redirect_dns: bool = False
    capture_all_dns: bool = False
    dns_servers_v4: tuple[str, ...] = ()
    dns_servers_v6: tuple[str, ...] = ()
    drop_invalid: bool = False
    dual_stack: bool = False
    ipv6: bool = False
    host_ip: str = ""
    docker_resolver: bool = False

    probe_port: int = 15002
    probe_timeout: float = 5.0
    lock_wait: float = 30.0
    dry_run: bool = False
    dry_run_file: str = ""
    skip_rule_apply: bool = False
    run_validation: bool = False
    reconcile: bool = False
    cleanup_only: bool = False
    force_apply: bool = False
    network_namespace: str = ""
    cni_mode: bool = False
    backend: str = "auto"
    comments: bool = False
    strict: bool = False
    json: bool = False

    @property
    def tproxy(self) -> bool:
        """The exact word selects it; anything else acts as REDIRECT."""
        return self.inbound_interception_mode == "TPROXY"

    @property
    def captures_dns(self) -> bool:
        """DNS capture as it takes effect: without capture-all it needs a server to match."""
        return self.redirect_dns and (self.capture_all_dns or bool(self.dns_servers_v4 or self.dns_servers_v6))

    def lines(self) -> str:
        """``KEY=value`` lines for the log."""
        return "\n".join(f"{name.upper()}={_shown(value)}" for name, value in self._asdict().items())


class Ranges(NamedTuple):
    """A CIDR list by family. ``wildcard`` is the exact string ``*``; ``loopback``: an item is a loopback address."""

    wildcard: bool = False
    ipv4: tuple[str, ...] = ()
    ipv6: tuple[str, ...] = ()
    loopback: bool = False


def ranges(text: str) -> Ranges:
    """Reads a CIDR list. Raises InitError on a bare address or a ``*`` inside a list."""
    if text == "*":
        return Ranges(wildcard=True)
    v4: list[str] = []
    v6: list[str] = []
    loopback = False
    for item in words.split(text):
        cidr, is_v4, is_loopback = words.prefix(item)
        (v4 if is_v4 else v6).append(cidr)
        loopback = loopback or is_loopback
    return Ranges(False, tuple(v4), tuple(v6), loopback)


def from_flags(parsed: Parsed, environ: Mapping[str, str]) -> Config:
    """The settings that flags and environment alone decide; UID, GID, addresses and servers come later."""
    text, switch = parsed.text, parsed.switch
    return Config(
        proxy_port=text("envoy-port"),
        inbound_capture_port=text("inbound-capture-port"),
        inbound_tunnel_port=text("inbound-tunnel-port"),
        proxy_uid=text("proxy-uid"),
        proxy_gid=text("proxy-gid"),
        inbound_interception_mode=text("istio-inbound-interception-mode"),
        inbound_ports_include=text("istio-inbound-ports"),
        inbound_ports_exclude=text("istio-local-exclude-ports"),
        exclude_interfaces=text("istio-exclude-interfaces"),
        outbound_ip_ranges_include=text("istio-service-cidr"),
        outbound_ip_ranges_exclude=text("istio-service-exclude-cidr"),
        outbound_ports_include=text("istio-outbound-ports"),
        outbound_ports_exclude=text("istio-local-outbound-ports-exclude"),
        kube_virt_interfaces=text("kube-virt-interfaces"),
        inbound_tproxy_mark=text("istio-inbound-tproxy-mark"),
        inbound_tproxy_route_table=text("istio-inbound-tproxy-route-table"),
        owner_groups_include=environ.get("ISTIO_OUTBOUND_OWNER_GROUPS", "*"),
        owner_groups_exclude=environ.get("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", ""),
        loopback_cidr=environ.get("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "127.0.0.1/32"),
        redirect_dns=switch("redirect-dns"),
        capture_all_dns=switch("capture-all-dns"),
        drop_invalid=switch("drop-invalid"),
        dual_stack=switch("dual-stack"),
        probe_port=parsed.number("iptables-probe-port"),
        probe_timeout=parsed.seconds("probe-timeout"),
        lock_wait=_lock_wait(parsed),
        dry_run=switch("dry-run"),
        dry_run_file=environ.get("DRY_RUN_FILE_PATH", ""),
        skip_rule_apply=switch("skip-rule-apply"),
        run_validation=switch("run-validation"),
        reconcile=switch("reconcile"),
        cleanup_only=switch("cleanup-only"),
        force_apply=switch("force-apply"),
        network_namespace=text("network-namespace"),
        cni_mode=switch("cni-mode"),
        backend=chosen_backend(parsed),
        comments=switch("comments"),
        strict=switch("strict"),
        json=switch("json"),
    )


def _lock_wait(parsed: Parsed) -> float:
    seconds = parsed.seconds("lock-wait")
    if seconds < 0:
        raise UsageError("invalid argument for --lock-wait", f"{seconds:g}s is negative", "Write 0 or more, such as 5s")
    return seconds


def chosen_backend(parsed: Parsed) -> str:
    """``--backend``, or what the reference's two flags say in its words."""
    if parsed.text("backend") != "auto":
        return parsed.text("backend")
    if parsed.switch("native-nftables"):
        return "native-nft"
    forced = parsed.text("force-iptables-binary")
    return forced if forced in ("legacy", "nft") else "auto"


def validate(config: Config, forced_binary: str) -> None:
    """The reference's checks, in its order.

    Raises:
        InitError: exit 1.
    """
    if config.owner_groups_include != "*":
        groups = words.split(config.owner_groups_include)
        if len(groups) > MAX_OWNER_GROUPS:
            raise InitError(
                "number of owner groups whose outgoing traffic should be redirected to Envoy cannot exceed "
                f"{MAX_OWNER_GROUPS}, got {len(groups)}: [{' '.join(groups)}]"
            )
    if forced_binary not in ("", "legacy", "nft"):
        raise InitError(f'invalid FORCE_IPTABLES_BINARY value "{forced_binary}"')
    cidr = config.loopback_cidr
    try:
        canonical, is_v4, is_loopback = words.prefix(cidr)
    except InitError as error:
        raise InitError(f"failed to parse CIDR {cidr}", str(error)) from None
    address, _, length = canonical.rpartition("/")
    if not (is_v4 and is_loopback):
        raise InitError(f"expected valid IPv4 loopback address in CIDR {cidr}; found {address}")
    if not 8 <= int(length) <= 32:
        raise InitError(f"expected CIDR {cidr} to have mask in range [8, 32]; found {length}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)
