"""Which protocol a port speaks, as Istio decides it.

Source: istio/istio: pkg/config/kube/conversion.go (ConvertProtocol), pkg/config/protocol/instance.go (Parse).
"""

from __future__ import annotations

from lab.manifests.model import Protocol

_WORDS: dict[str, Protocol] = {
    "tcp": "TCP",
    "udp": "UDP",
    "grpc": "GRPC",
    "grpc-web": "GRPC-Web",
    "http": "HTTP",
    "http_proxy": "HTTP_PROXY",
    "http2": "HTTP2",
    "https": "HTTPS",
    "tls": "TLS",
    "mongo": "MONGO",
    "redis": "REDIS",
    "mysql": "MYSQL",
}
_APP_PROTOCOLS: dict[str, Protocol] = {
    "kubernetes.io/h2c": "HTTP2",
    "kubernetes.io/ws": "HTTP",
    "kubernetes.io/wss": "HTTPS",
}
_WELL_KNOWN_TCP = frozenset({25, 53, 3306, 27017})


def parse(word: str) -> Protocol:
    """The protocol that a word names, in any case; ``AUTO`` (detected by Envoy) if it names none."""
    return _WORDS.get(word.lower(), "AUTO")


def is_word(word: str) -> bool:
    """Whether Istio knows the word as a protocol."""
    return word.lower() in _WORDS


def of_service_port(port: int, transport: str, name: str = "", app_protocol: str = "") -> Protocol:
    """The protocol of a Kubernetes Service port: transport UDP, then the first word of appProtocol or, without one, of the name,
    then well-known numbers."""
    if transport == "UDP":
        return "UDP"
    if app_protocol in _APP_PROTOCOLS:
        return _APP_PROTOCOLS[app_protocol]
    lowered = (app_protocol or name).lower()
    chosen = "GRPC-Web" if lowered.startswith("grpc-web") else parse(lowered.partition("-")[0])
    if chosen == "AUTO" and port in _WELL_KNOWN_TCP:
        return "TCP"
    return chosen


def of_istio_port(word: str) -> Protocol:
    """The protocol of a ServiceEntry or Sidecar port: its ``protocol`` field; missing means detected."""
    return parse(word) if word else "AUTO"
