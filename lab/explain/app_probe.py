"""What an agent makes of a probe of its app (agent/app_probe.py)."""

from __future__ import annotations

from lab.explain.flow import ClientTls, Request
from lab.explain.world import Payload, Place, Served, serve

PREFIXES = ("/app-health/", "/app-lifecycle/")


def probed(place: Place, path: str) -> Served:
    """The agent's answer to a request of ``path``, one of those that begin with `PREFIXES`.

    The probe is not captured on its way to the app (it comes from 127.0.0.6 or ::6), so what listens in the pod decides.
    """
    probe = place.probes.get(path)
    if probe is None:
        return Served("ok", 400)
    if place.listening is None:
        return Served("unknown")
    port = probe.action["port"]
    speaks = place.listening.get((6, port)) if isinstance(port, int) and port not in place.loopback_only else None
    if speaks is None:
        return Served("ok", 500)
    if probe.kind == "tcpSocket":
        return Served("ok", 200)
    if speaks == "unknown":
        return Served("unknown")
    if probe.kind == "grpc":
        return Served("ok", 200 if speaks == "grpc" and probe.timeout > 0 else 500)
    https = probe.action.get("scheme") == "HTTPS"
    request = Request(place.addresses[0], str(probe.action.get("path", "/")), scheme="https" if https else "http")
    tls = ClientTls() if https else None
    served = serve(speaks, Payload("http1", tls, request))
    if served.result == "unknown":
        return served
    late = probe.timeout > 0 and served.delay >= probe.timeout
    if served.result != "ok" or served.status is None or late:
        return Served("ok", 500, delay=min(served.delay, probe.timeout) if probe.timeout else served.delay)
    status = 200 if 300 <= served.status < 400 else served.status
    source = "::6" if ":" in place.addresses[0] else "127.0.0.6"
    return Served("ok", status, told=served.told and status == served.status, delay=served.delay, peer=source)
