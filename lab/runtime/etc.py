"""The files of /etc that a kubelet writes for a pod. Pure: values in, texts out.

Source: kubernetes/kubernetes: pkg/kubelet/network/dns/dns.go (resolv.conf), pkg/kubelet/kubelet_pods.go (hosts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def resolv_conf(nameservers: Sequence[str], search: Sequence[str], ndots: int = 5) -> str:
    """A resolv.conf as the kubelet writes it for dnsPolicy ClusterFirst."""
    lines = [f"search {' '.join(search)}"] if search else []
    lines += [f"nameserver {address}" for address in nameservers]
    lines += [f"options ndots:{ndots}"]
    return "\n".join(lines) + "\n"


def cluster_search(namespace: str, suffix: str = "cluster.local") -> tuple[str, ...]:
    """The search list of a pod of that namespace."""
    return f"{namespace}.svc.{suffix}", f"svc.{suffix}", suffix


def hosts(addresses: Sequence[str], hostname: str, subdomain: str = "") -> str:
    """A pod's hosts file. ``subdomain`` is ``SUBDOMAIN.NAMESPACE.svc.SUFFIX`` where the pod has one."""
    names = f"{hostname}.{subdomain}\t{hostname}" if subdomain else hostname
    return "\n".join(
        [
            "# Kubernetes-managed hosts file.",
            "127.0.0.1\tlocalhost",
            "::1\tlocalhost ip6-localhost ip6-loopback",
            "fe00::0\tip6-localnet",
            "fe00::0\tip6-mcastprefix",
            "fe00::1\tip6-allnodes",
            "fe00::2\tip6-allrouters",
            *(f"{address}\t{names}" for address in addresses),
            "",
        ]
    )


NSSWITCH = """\
passwd: files
group: files
shadow: files
hosts: files dns
networks: files
protocols: files
services: files
"""
"""Names come from files and DNS alone: other sources speak over sockets that no capture sees."""


def downward_api(values: Mapping[str, str]) -> str:
    """A downward-API volume file of labels or annotations: ``key="value"`` lines, sorted, Go-quoted.

    Source: kubernetes/kubernetes: pkg/fieldpath/fieldpath.go, FormatMap.
    """
    return "\n".join(f"{key}={_go_quote(values[key])}" for key in sorted(values))


_ESCAPES = {
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
    "\\": "\\\\",
    '"': '\\"',
}


def _go_quote(text: str) -> str:
    """strconv.Quote, as far as the characters of labels and annotations go."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _go_escape(ord(c))) for c in text) + '"'


def _go_escape(code: int) -> str:
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
