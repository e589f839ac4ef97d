"""Status server: readiness, merged metrics, drain, application probes, name table (spec: agent 14, 16)."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from agent_authority import Issuer
from free_ports import free_port

from agent.admin import AdminClient, parse_stats
from agent.app_probe import AppProber
from agent.dns.server import DNSOptions, DNSServer
from agent.dns.table import ProxyNames
from agent.errors import AgentError
from agent.health_check import Thresholds, WorkloadHealthCheck
from agent.http import Response
from agent.http_client import HTTPError, Target, exchange, fetch
from agent.http_server import Handler, Request, Server, text_response
from agent.metrics import Histogram, Labelled, Metrics
from agent.probe_config import parse_probers
from agent.protos import nds_pb2
from agent.protos import proxy_config_pb2 as pb
from agent.readiness import EnvoyReadiness, NotReady, Readiness
from agent.scrape import (
    OPEN_METRICS_TYPE,
    TEXT,
    Scraper,
    allowed_accept,
    exposition_format,
    merge_bodies,
)
from agent.scrape_config import ScrapeTarget, parse_scrape_config
from agent.status import StatusServer, is_loopback, listen_socket
from agent.xds_proxy import HealthEvent

DEADLINE = 10.0


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


class Peer:
    """A small HTTP server: Envoy's admin port, or an application."""

    def __init__(self, answer: Callable[[Request], Response], host: str = "127.0.0.1") -> None:
        self.requests: list[Request] = []
        self._answer, self._host = answer, host

    async def __aenter__(self) -> Peer:
        async def handle(request: Request) -> Response:
            self.requests.append(request)
            return self._answer(request)

        self._server = Server(handle)
        sock = socket.socket()
        sock.bind((self._host, 0))
        self.port: int = sock.getsockname()[1]
        await self._server.start(sock)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()


class Envoy:
    """What Envoy's admin port says."""

    def __init__(self) -> None:
        self.stats: dict[str, int] = {}
        self.status = 200

    def __call__(self, request: Request) -> Response:
        return Response(self.status, "".join(f"{name}: {value}\n" for name, value in self.stats.items()).encode())


READY = {
    "cluster_manager.cds.update_success": 1,
    "listener_manager.lds.update_success": 1,
    "server.state": 0,
    "listener_manager.workers_started": 1,
}


class Rig:
    """A status server."""

    def __init__(self, **settings: Any) -> None:
        self.envoy, self.metrics = Envoy(), Metrics()
        self.events: list[str] = []
        self.settings = settings

    async def __aenter__(self) -> Rig:
        settings = self.settings
        self.admin = await Peer(self.envoy).__aenter__()
        self.readiness = Readiness(
            EnvoyReadiness(AdminClient("127.0.0.1", self.admin.port)), settings.get("checks", [])
        )

        async def drain() -> None:
            self.events.append("drain")

        self.server = StatusServer(
            self.readiness,
            Scraper(self.metrics, settings.get("envoy_port"), settings.get("targets", [])),
            AppProber(settings.get("probers", {}), settings.get("pod_ip", "127.0.0.1"), 15020, ipv6=False),
            settings.get("dns"),
            drain,
            lambda: self.events.append("quit"),
            local_metrics_only=settings.get("local_metrics_only", False),
        )
        self.port = free_port()
        await self.server.start(self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()
        await self.admin.__aexit__()

    async def get(self, path: str, method: str = "GET", host: str = "127.0.0.1", **headers: str) -> Response:
        pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return await fetch(Target(host, self.port), method, path, pairs, timeout=DEADLINE)


@pytest.mark.parametrize(
    ("stats", "reason"),
    [
        ({}, "config not received from XDS server"),
        ({"cluster_manager.cds.update_success": 1}, "config not fully received"),
        ({"cluster_manager.cds.update_rejected": 1}, "was rejected"),
        (
            {"cluster_manager.cds.update_success": 3, "listener_manager.lds.update_rejected": 2},
            "was rejected: cds: 3 successful, 0 rejected, lds: 0 successful, 2 rejected",
        ),
        ({**READY, "server.state": 2}, "server is not live, current state is: PRE_INITIALIZING"),
        ({**READY, "listener_manager.workers_started": 0}, "workers have not yet started"),
        (READY, ""),
    ],
)
def test_envoys_readiness(stats: dict[str, int], reason: str) -> None:
    async def job() -> None:
        async with Rig() as rig:
            rig.envoy.stats = stats
            if reason:
                with pytest.raises(NotReady, match=reason):
                    await rig.readiness.check()
            response = await rig.get("/healthz/ready")
            assert response.status == (503 if reason else 200)
            assert response.body == b""

    run(job)


def test_readiness_is_remembered_until_the_end() -> None:
    async def job() -> None:
        async with Rig() as rig:
            rig.envoy.stats = {**READY, "server.state": 2}
            assert (await rig.get("/healthz/ready")).status == 503
            rig.envoy.stats = {"server.state": 0, "listener_manager.workers_started": 1}
            assert (await rig.get("/healthz/ready")).status == 200
            asked = len(rig.admin.requests)
            rig.envoy.stats = {}
            assert (await rig.get("/healthz/ready", "POST")).status == 200
            assert len(rig.admin.requests) == asked
            assert rig.readiness.envoy is not None
            rig.readiness.envoy.terminated = True
            assert (await rig.get("/healthz/ready")).status == 503

    run(job)


def test_an_admin_port_that_fails_is_not_ready() -> None:
    async def job() -> None:
        async with Rig() as rig:
            rig.envoy.status = 500
            with pytest.raises(NotReady, match="failed to get stats from Envoy"):
                await rig.readiness.check()
        readiness = EnvoyReadiness(AdminClient("127.0.0.1", 1))
        with pytest.raises(NotReady, match="failed to get stats from Envoy"):
            await readiness.check()

    run(job)


def test_further_checks_come_after_envoy() -> None:
    async def job() -> None:
        reasons = ["no table"]
        async with Rig(checks=[lambda: reasons[0]]) as rig:
            rig.envoy.stats = READY
            with pytest.raises(NotReady, match="no table"):
                await rig.readiness.check()
            reasons[0] = ""
            assert (await rig.get("/healthz/ready")).status == 200

    run(job)


def test_drain_and_quit() -> None:
    async def job() -> None:
        async with Rig() as rig:
            for path, event in (("/drain", "drain"), ("/quitquitquit", "quit")):
                assert (await rig.get(path)).status == 405
                assert rig.events == []
                response = await rig.get(path, "POST")
                assert (response.status, response.body) == (200, b"OK")
                assert rig.events.pop() == event
            other = own_address()
            if other:
                assert (await rig.get("/drain", "POST", host=other)).status == 403
                assert (await rig.get("/quitquitquit", "POST", host=other)).status == 403
                assert (await rig.get("/debug/ndsz", host=other)).status == 403
                assert (await rig.get("/healthz/ready", host=other)).status == 503
            assert rig.events == []

    run(job)


def own_address() -> str:
    """An address of this machine that is not loopback, empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


def test_unknown_paths() -> None:
    async def job() -> None:
        async with Rig() as rig:
            assert (await rig.get("/")).status == 404
            assert (await rig.get("/app-health/x/livez")).status == 400
            assert (await rig.get("/debug/ndsz")).status == 404
            assert b"thread" in (await rig.get("/debug/pprof/goroutine")).body

    run(job)


def test_name_table_dump(tmp_path: Path) -> None:
    async def job() -> None:
        conf = tmp_path / "resolv.conf"
        conf.write_text("nameserver 127.0.0.1\nsearch ns1.svc.cluster.local\n")
        names = ProxyNames("ns1", "ns1.svc.cluster.local")
        dns = DNSServer(DNSOptions("127.0.0.1:1", names, resolv_conf=str(conf)), Metrics())
        async with Rig(dns=dns) as rig:
            empty = await rig.get("/debug/ndsz")
            assert (empty.status, empty.body) == (404, b"{}")
            table = nds_pb2.NameTable()
            info = table.table["a.ns1.svc.cluster.local"]
            info.ips.append("1.1.1.1")
            info.registry, info.shortname, info.namespace = "Kubernetes", "a", "ns1"
            table.table["api.vendor.example"].ips.append("240.240.0.1")
            table.table["api.vendor.example"].registry = "External"
            await dns.update(table)
            shown = json.loads((await rig.get("/debug/ndsz")).body)["table"]
            own = {"ips": ["1.1.1.1"], "registry": "Kubernetes"}
            assert shown == {
                "a.ns1.svc.cluster.local": {**own, "shortname": "a", "namespace": "ns1"},
                **dict.fromkeys(("a.", "a.ns1.", "a.ns1.svc.", "a.ns1.svc.cluster.local."), own),
                "api.vendor.example": {"ips": ["240.240.0.1"], "registry": "External"},
                "api.vendor.example.": {"ips": ["240.240.0.1"], "registry": "Kubernetes"},
            }

    run(job)


def metrics_app(body: str, content_type: str = "text/plain") -> Callable[[Request], Response]:
    return lambda request: Response(200, body.encode(), (("Content-Type", content_type),))


def test_merged_metrics() -> None:
    async def job() -> None:
        async with (
            Peer(metrics_app("envoy_up 1\n")) as envoy,
            Peer(metrics_app("app_up 1\n# EOF\n", f"{OPEN_METRICS_TYPE}; version=1.0.0")) as app,
            Rig(envoy_port=envoy.port, targets=[ScrapeTarget(app.port, "/m")]) as rig,
        ):
            headers = {
                "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                "User-Agent": "Prometheus/3",
                "X-Prometheus-Scrape-Timeout-Seconds": "5",
            }
            response = await rig.get("/stats/prometheus?usedonly", **headers)
            text = response.body.decode()
            assert response.header("content-type") == f"{OPEN_METRICS_TYPE}; version=1.0.0; charset=utf-8"
            assert text.index("istio_agent_scrapes_total 1") < text.index("envoy_up 1") < text.index("app_up 1")
            assert text.endswith("# EOF\n")
            assert (envoy.requests[0].path, envoy.requests[0].query) == ("/stats/prometheus", "usedonly")
            assert app.requests[0].path == "/m"
            assert app.requests[0].header("user-agent") == "Prometheus/3"
            assert OPEN_METRICS_TYPE in app.requests[0].header("accept")
            assert OPEN_METRICS_TYPE not in envoy.requests[0].header("accept")

    run(job)


def test_failed_scrapes_are_counted_and_left_out() -> None:
    async def job() -> None:
        async with (
            Peer(lambda _: Response(500)) as app,
            Rig(envoy_port=1, targets=[ScrapeTarget(app.port, "/metrics")]) as rig,
        ):
            response = await rig.get("/metrics")
            assert response.status == 200
            assert response.header("content-type") == TEXT
            assert rig.metrics.scrape_failures_total.values == {"envoy": 1, "application": 1}
            again = (await rig.get("/metrics")).body.decode()
            assert 'istio_agent_scrape_failures_total{type="envoy"} 2' in again

    run(job)


def test_several_targets_and_compression() -> None:
    async def job() -> None:
        big = "x" * (10 * 1024 * 1024 + 1)
        async with (
            Peer(metrics_app("one 1", "text/plain")) as one,
            Peer(metrics_app("two 2\n# EOF", OPEN_METRICS_TYPE)) as two,
            Peer(metrics_app(big)) as three,
            Rig(targets=[ScrapeTarget(peer.port, "/metrics") for peer in (one, two, three)]) as rig,
        ):
            response = await rig.get("/metrics", Accept_Encoding="gzip")
            assert response.header("content-encoding") == "gzip"
            text = gzip.decompress(response.body).decode()
            assert text.endswith("one 1\ntwo 2\n")
            assert rig.metrics.scrape_failures_total.values == {"application": 1}

    run(job)


class RawApp:
    """An application that writes its answer as it likes."""

    def __init__(self, talk: Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]) -> None:
        self._talk = talk
        self.asked: list[bytes] = []

    async def __aenter__(self) -> RawApp:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            await self._talk(writer)
            writer.close()

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


def whole(body: bytes, *headers: str) -> Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    head = "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", *headers, f"Content-Length: {len(body)}", ""))

    async def talk(writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + body)
        await writer.drain()

    return talk


def test_a_single_target_is_passed_on_as_it_comes() -> None:
    async def job() -> None:
        seen = asyncio.Event()

        async def talk(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nfirst 1\n")
            await seen.wait()
            writer.write(b"second 1\n")

        async with RawApp(talk) as app, Rig(targets=[ScrapeTarget(app.port, "/m")]) as rig:
            server = Target("127.0.0.1", rig.port)
            for headers in ([], [("Accept-Encoding", "identity")]):
                seen.clear()
                body = b""
                async with exchange(server, "GET", "/stats/prometheus", headers, timeout=DEADLINE) as incoming:
                    async for piece in incoming.pieces:
                        body += piece
                        if body.endswith(b"first 1\n"):
                            seen.set()
                assert body.endswith(b"first 1\nsecond 1\n")

    run(job)


def test_an_application_that_breaks_off_is_counted() -> None:
    async def job() -> None:
        async def talk(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nfirst 1\n")

        async with RawApp(talk) as app, Rig(targets=[ScrapeTarget(app.port, "/m")]) as rig:
            response = await rig.get("/stats/prometheus")
            assert response.status == 200
            assert response.body.endswith(b"first 1\n")
            assert rig.metrics.scrape_failures_total.values == {"application": 1}

    run(job)


@pytest.mark.parametrize("count", [1, 2])
def test_an_application_that_always_packs_its_metrics(count: int) -> None:
    async def job() -> None:
        talk = whole(gzip.compress(b"app_metric 1\n"), "Content-Encoding: gzip", "Content-Type: text/plain")
        async with RawApp(talk) as app, Rig(targets=[ScrapeTarget(app.port, "/m")] * count) as rig:
            assert (await rig.get("/stats/prometheus")).body.endswith(b"\n" + b"app_metric 1\n" * count)
        for broken in (gzip.compress(b"app_metric 1\n")[:-9], b"rubbish"):
            talk = whole(broken, "Content-Encoding: gzip")
            async with RawApp(talk) as app, Rig(targets=[ScrapeTarget(app.port, "/m")] * count) as rig:
                assert (await rig.get("/stats/prometheus")).status == 200
                assert rig.metrics.scrape_failures_total.values == {"application": count}

    run(job)


def test_packing_leaves_room_for_others() -> None:
    async def job() -> None:
        async with (
            RawApp(whole(b"a_metric_with_some_name 1\n" * 160_000)) as app,
            Rig(targets=[ScrapeTarget(app.port, "/m")]) as rig,
        ):
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            async with exchange(
                Target("127.0.0.1", rig.port), "GET", "/metrics", [("Accept-Encoding", "gzip")], timeout=DEADLINE
            ) as incoming:
                counter = asyncio.create_task(count())
                packed = b"".join([piece async for piece in incoming.pieces])
                counter.cancel()
            assert gzip.decompress(packed).endswith(b"a_metric_with_some_name 1\n" * 160_000)
            # Four megabytes are 64 pieces, and at least one turn of the loop comes with each.
            assert turns >= 50

    run(job)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate, GZIP;q=0.5", "gzip"),
        ("gzip;q=0", ""),
        ("gzip; q=0.0", ""),
        ("identity", ""),
        ("", ""),
    ],
)
def test_accepted_encodings(accepted: str, encoding: str) -> None:
    async def job() -> None:
        async with Rig() as rig:
            assert (await rig.get("/metrics", Accept_Encoding=accepted)).header("content-encoding") == encoding

    run(job)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "0", "soon", ""])
def test_scrape_timeouts_that_are_none(seconds: str) -> None:
    async def job() -> None:
        async with RawApp(whole(b"a 1\n")) as app, Rig(targets=[ScrapeTarget(app.port, "/m")]) as rig:
            response = await rig.get("/metrics", X_Prometheus_Scrape_Timeout_Seconds=seconds)
            assert (response.status, response.body[-4:]) == (200, b"a 1\n")

    run(job)


def test_probes_with_odd_targets() -> None:
    async def job() -> None:
        async with RawApp(whole(b"")) as app:
            async with Rig(probers=prober_for("httpGet", app.port, path="/a b\u00fc%20?c=d e")) as rig:
                assert (await rig.get("/app-health/a/livez")).status == 200
            assert app.asked[0].startswith(b"GET /a%20b%C3%BC%20?c=d%20e HTTP/1.1\r\n")
            async with Rig(probers=prober_for("httpGet", app.port), pod_ip="") as rig:
                assert (await rig.get("/app-health/a/livez")).status == 200
            for kind in ("httpGet", "tcpSocket", "grpc"):
                # No port of the application has this number, though one has it modulo 65536.
                async with Rig(probers=prober_for(kind, app.port + 65536)) as rig:
                    assert (await rig.get("/app-health/a/livez")).status == 500
            assert len(app.asked) == 2

    run(job)


def test_hooks_of_the_applications_life_are_passed_on_too() -> None:
    async def job() -> None:
        async with RawApp(whole(b"bye")) as app:
            probers = parse_probers(
                json.dumps({"/app-lifecycle/a/prestopz": {"httpGet": {"port": app.port, "path": "/stop"}}})
            )
            async with Rig(probers=probers) as rig:
                assert (await rig.get("/app-lifecycle/a/prestopz")).body == b"bye"
                assert (await rig.get("/app-lifecycle/a/poststartz")).status == 400
            assert app.asked[0].startswith(b"GET /stop ")

    run(job)


def test_a_request_may_name_a_whole_url() -> None:
    async def job() -> None:
        async with Rig() as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(b"GET http://pod:15020/metrics HTTP/1.1\r\nHost: pod:15020\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()

    run(job)


def test_metrics_for_loopback_only() -> None:
    async def job() -> None:
        async with Rig(local_metrics_only=True) as rig:
            assert (await rig.get("/metrics")).status == 200
            other = own_address()
            if other:
                assert (await rig.get("/metrics", host=other)).status == 403

    run(job)


@pytest.mark.parametrize(
    ("header", "app", "expected"),
    [
        ("", True, "text/plain;version=0.0.4"),
        ("*/*", True, "text/plain; q=0.1; version=0.0.4"),
        ("*", False, "text/plain; q=0.1; version=0.0.4"),
        ("application/*", True, "application/openmetrics-text; q=0.1; version=0.0.1"),
        ("application/*", False, "text/plain;version=0.0.4"),
        ("application/vnd.google.protobuf;proto=x", True, "text/plain;version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.1,*/*;q=0.05",
            True,
            "application/openmetrics-text; q=0.2; version=1.0.0,text/plain; q=0.1; version=0.0.4",
        ),
        ("not a media type", True, "text/plain;version=0.0.4"),
    ],
)
def test_accept_headers(header: str, app: bool, expected: str) -> None:
    allowed = ("text/*", "text/plain", OPEN_METRICS_TYPE) if app else ("text/*", "text/plain")
    assert allowed_accept(header, allowed) == expected


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (f"{OPEN_METRICS_TYPE}; version=1.0.0", f"{OPEN_METRICS_TYPE}; version=1.0.0; charset=utf-8"),
        (OPEN_METRICS_TYPE, f"{OPEN_METRICS_TYPE}; version=0.0.1; charset=utf-8"),
        (f"{OPEN_METRICS_TYPE}; version=9", TEXT),
        ("text/plain", TEXT),
        ("", TEXT),
    ],
)
def test_formats(content_type: str, expected: str) -> None:
    assert exposition_format(content_type) == expected


def test_merged_openmetrics_end_once() -> None:
    kind = f"{OPEN_METRICS_TYPE}; version=1.0.0"
    merged_type, body = merge_bodies([(kind, b"a 1\n# EOF\n"), (kind, b"b 2")])
    assert body == b"a 1\nb 2\n# EOF\n"
    assert merged_type.startswith(kind)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, []),
        ('{"scrape":"true","path":"/p","port":"8080"}', [ScrapeTarget(8080, "/p")]),
        ('{"scrape":"false","port":"8080"}', []),
        ("{}", [ScrapeTarget(80, "/metrics")]),
        (
            '{"targets":[{"port":"9090","path":"/m"},{"port":"9091"}]}',
            [ScrapeTarget(9090, "/m"), ScrapeTarget(9091, "/metrics")],
        ),
    ],
)
def test_scrape_configuration(text: str | None, expected: Sequence[ScrapeTarget]) -> None:
    assert parse_scrape_config(text, 15020) == expected


@pytest.mark.parametrize("port", ["http", "0", "70000", "15020", "015020", "15090", "15000", "15053"])
def test_ports_that_cannot_be_scraped(port: str) -> None:
    with pytest.raises(AgentError, match="invalid prometheus scrape configuration"):
        parse_scrape_config(json.dumps({"port": port}), 15020)
    with pytest.raises(AgentError, match="failed to unmarshal"):
        parse_scrape_config("[]", 15020)


PROBERS = {
    "/app-health/app/livez": {"httpGet": {"path": "/hello", "port": 8080, "scheme": "HTTPS"}, "timeoutSeconds": 3},
    "/app-health/app/readyz": {"tcpSocket": {"port": 9090}},
    "/app-health/app/startupz": {"grpc": {"port": 9091, "service": "s"}, "timeoutSeconds": 1},
    "/app-lifecycle/app/prestopz": {"httpGet": {"port": 8080}},
}


def test_prober_configuration() -> None:
    probers = parse_probers(json.dumps(PROBERS))
    assert {path: (prober.kind, prober.port) for path, prober in probers.items()} == {
        "/app-health/app/livez": ("httpGet", 8080),
        "/app-health/app/readyz": ("tcpSocket", 9090),
        "/app-health/app/startupz": ("grpc", 9091),
        "/app-lifecycle/app/prestopz": ("httpGet", 8080),
    }
    assert probers["/app-health/app/livez"].https
    assert probers["/app-lifecycle/app/prestopz"].path == "/"
    assert parse_probers("") == {}


@pytest.mark.parametrize(
    ("path", "prober"),
    [
        ("/app-health/a/b/livez", {"tcpSocket": {"port": 1}}),
        ("/healthz", {"tcpSocket": {"port": 1}}),
        ("/app-health/a/livez", {}),
        ("/app-health/a/livez", {"tcpSocket": {"port": 1}, "httpGet": {"port": 1}}),
        ("/app-health/a/livez", {"httpGet": {"port": "http"}}),
        ("/app-health/a/livez", {"httpGet": {"port": 1}, "timeoutSeconds": "soon"}),
        ("/app-health/a/livez", {"httpGet": {"port": 1}, "timeoutSeconds": 1.5}),
    ],
)
def test_probers_that_are_fatal(path: str, prober: dict[str, Any]) -> None:
    with pytest.raises(AgentError, match=r"invalid"):
        parse_probers(json.dumps({path: prober}))


def prober_for(kind: str, port: int, **action: Any) -> dict[str, Any]:
    timeout = action.pop("timeout", 5)
    return parse_probers(
        json.dumps({"/app-health/a/livez": {kind: {"port": port, **action}, "timeoutSeconds": timeout}})
    )


def test_http_probes() -> None:
    async def job() -> None:
        def app(request: Request) -> Response:
            if request.path == "/redirect":
                return Response(302, b"", (("Location", "/ok"),))
            if request.path == "/away":
                return Response(302, b"", (("Location", "http://elsewhere.example/"),))
            if request.path == "/loop":
                return Response(302, b"", (("Location", "/loop"),))
            if request.path == "/bad":
                return text_response(418, "teapot")
            if request.path == "/same":  # nothing that is followed
                return Response(304, b"", (("Location", "/bad"),))
            if request.path == "/unparsable":
                return Response(302, b"", (("Location", "http://[::1/"),))
            if request.path == "/other-scheme":
                return Response(302, b"", (("Location", "ftp://127.0.0.1/"),))
            return Response(200, b"y" * 20000)

        cases = {"/ok": 200, "/redirect": 200, "/away": 200, "/loop": 500, "/bad": 418}
        cases |= {"/same": 200, "/unparsable": 500, "/other-scheme": 500}
        async with Peer(app) as peer:
            for path, status in cases.items():
                async with Rig(probers=prober_for("httpGet", peer.port, path=path)) as rig:
                    response = await rig.get("/app-health/a/livez", X_Probe="yes", Host="app.example:15020")
                    assert response.status == status, path
                    if path == "/ok":
                        assert len(response.body) == 10240
                    request = peer.requests[-1]
                    assert request.peer == "127.0.0.6"
                    assert request.header("x-probe") == "yes"
                    assert request.header("host") == f"app.example:{peer.port}"
        async with Rig(probers=prober_for("httpGet", peer.port, path="/ok")) as rig:
            assert (await rig.get("/app-health/a/livez")).status == 500

    run(job)


def test_https_probes_are_not_verified(tmp_path: Path) -> None:
    async def job() -> None:
        key, certificate = Issuer().pair("nobody")
        (tmp_path / "pem").write_bytes(key + certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "pem")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with Rig(probers=prober_for("httpGet", port, scheme="HTTPS")) as rig:
            assert (await rig.get("/app-health/a/livez")).status == 204
        server.close()

    run(job)


def test_tcp_probes() -> None:
    async def job() -> None:
        async with Peer(lambda _: Response(200)) as peer, Rig(probers=prober_for("tcpSocket", peer.port)) as rig:
            assert (await rig.get("/app-health/a/livez")).status == 200
        async with Rig(probers=prober_for("tcpSocket", peer.port)) as rig:
            assert (await rig.get("/app-health/a/livez")).status == 500

    run(job)


def test_a_slow_probe_times_out(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        held: list[object] = []  # a writer that nobody has any more closes its connection
        silent = await asyncio.start_server(lambda *streams: held.append(streams), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        async with Rig(probers=prober_for("httpGet", port, timeout=1)) as rig:
            assert (await rig.get("/app-health/a/livez")).status == 500
        assert "Request to probe app failed: timeout, " in caplog.text
        silent.close()

    run(job)


class Health:
    """grpc.health.v1 with a fixed answer (1 is SERVING)."""

    def __init__(self, status: int) -> None:
        self.status, self.requests, self.peers = status, [], []

    async def __aenter__(self) -> Health:
        async def check(request: bytes, context: Any) -> bytes:
            self.requests.append(request)
            self.peers.append(context.peer())
            return bytes((8, self.status))

        self._server = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
        )
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    requests: list[bytes]
    peers: list[str]


@pytest.mark.parametrize(("serving", "timeout", "status"), [(1, 5, 200), (2, 5, 500), (1, 0, 500)])
def test_grpc_probes(serving: int, timeout: int, status: int) -> None:
    async def job() -> None:
        async with Health(serving) as health:
            async with Rig(probers=prober_for("grpc", health.port, service="svc", timeout=timeout)) as rig:
                assert (await rig.get("/app-health/a/livez")).status == status
            if timeout:
                assert health.requests == [b"\n\x03svc"]
                assert health.peers[0].startswith("ipv4:127.0.0.6:")

    run(job)


def test_health_check_thresholds() -> None:
    thresholds = Thresholds(success=2, failure=3)
    results = [True, True, True, False, False, True, False, False, False, False, True, True]
    assert [thresholds.add(result) for result in results] == [
        *(False, True, False, False, False, False, False, False, True, False, False, True)
    ]


def test_workload_health_events() -> None:
    async def job() -> None:
        answers = iter([200, 500, 500, 200])
        events: asyncio.Queue[HealthEvent] = asyncio.Queue()

        def app(request: Request) -> Response:
            assert request.header("user-agent") == "istio-probe/1.0"
            return Response(next(answers, 200))

        async with Peer(app) as peer:
            probe = pb.ReadinessProbe(http_get=pb.ReadinessProbe.HTTPHealthCheckConfig(path="h", port=peer.port))
            probe.period_seconds = 1
            check = WorkloadHealthCheck(probe, None, "127.0.0.1", ipv6=False, report=events.put_nowait)
            task = asyncio.create_task(check.run())
            assert await events.get() == HealthEvent(True, "")
            unhealthy = await events.get()
            assert not unhealthy.healthy
            assert "bad code 500" in unhealthy.message
            assert await events.get() == HealthEvent(True, "")
            assert {request.path for request in peer.requests} == {"/h"}
            assert {request.peer for request in peer.requests} == {"127.0.0.6"}
            task.cancel()

    run(job)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("moved", ""),
        ("moved-to-bad", "bad code 500"),
        ("loop", "stopped after 10 redirects"),
        ("not-modified", ""),
        ("mail", 'unsupported protocol scheme "mailto"'),
    ],
)
def test_a_health_check_goes_where_it_is_sent(path: str, message: str) -> None:
    async def job() -> None:
        events: asyncio.Queue[HealthEvent] = asyncio.Queue()

        def app(request: Request) -> Response:
            # A host that is named is what the next request asks for.
            away = f"http://localhost:{request.header('host').rpartition(':')[2]}"
            sent = {
                "/moved": (302, f"{away}/good"),
                "/moved-to-bad": (307, f"{away}/bad"),
                "/loop": (301, "/loop"),
                "/not-modified": (304, "/bad"),
                "/mail": (308, "mailto:a@b.example"),
            }
            if request.path in sent:
                status, location = sent[request.path]
                return Response(status, b"", (("Location", location),))
            return Response(200 if request.header("host").startswith("localhost:") and request.path == "/good" else 500)

        async with Peer(app) as peer:
            probe = pb.ReadinessProbe(http_get=pb.ReadinessProbe.HTTPHealthCheckConfig(path=path, port=peer.port))
            check = WorkloadHealthCheck(probe, None, "127.0.0.1", ipv6=False, report=events.put_nowait)
            task = asyncio.create_task(check.run())
            event = await events.get()
            assert event.healthy is not bool(message)
            assert message in event.message
            task.cancel()

    run(job)


@pytest.mark.parametrize(
    ("command", "healthy"), [(["true"], True), (["false"], False), (["sleep", "60"], False), (["/nonexistent"], False)]
)
def test_exec_health_checks(command: list[str], healthy: bool) -> None:
    async def job() -> None:
        events: asyncio.Queue[HealthEvent] = asyncio.Queue()
        probe = pb.ReadinessProbe(exec=pb.ReadinessProbe.ExecHealthCheckConfig(command=command))
        task = asyncio.create_task(
            WorkloadHealthCheck(probe, None, "127.0.0.1", ipv6=False, report=events.put_nowait).run()
        )
        event = await events.get()
        assert event.healthy is healthy
        assert bool(event.message) is not healthy
        task.cancel()

    run(job)


def test_a_grpc_health_check_that_does_not_serve_says_so() -> None:
    async def job() -> None:
        events: asyncio.Queue[HealthEvent] = asyncio.Queue()
        async with Health(2) as health:
            probe = pb.ReadinessProbe(grpc=pb.ReadinessProbe.GrpcHealthCheckConfig(port=health.port))
            task = asyncio.create_task(
                WorkloadHealthCheck(probe, None, "127.0.0.1", ipv6=False, report=events.put_nowait).run()
            )
            assert await events.get() == HealthEvent(False, "the service is not serving")
            task.cancel()

    run(job)


def test_stats_lines() -> None:
    assert parse_stats("a.b: 1\nc: -2\nno number: x\nbroken\n") == {"a.b": 1, "c": -2}


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_loopback_peers(peer: str, expected: bool) -> None:
    assert is_loopback(peer) is expected


def test_exposition_has_istios_names() -> None:
    metrics = Metrics()
    metrics.istiod_connection_terminations.add("error")
    metrics.dns_upstream_request_duration_seconds.observe(0.004)
    text = metrics.render()
    for line in (
        "# TYPE istio_agent_xds_proxy_requests counter",
        "istio_agent_xds_proxy_requests 0",
        'istio_agent_istiod_connection_terminations{type="error"} 1',
        'istio_agent_dns_upstream_request_duration_seconds_bucket{le="0.001"} 0',
        'istio_agent_dns_upstream_request_duration_seconds_bucket{le="0.005"} 1',
        'istio_agent_dns_upstream_request_duration_seconds_bucket{le="+Inf"} 1',
        "istio_agent_dns_upstream_request_duration_seconds_count 1",
        "istio_agent_dns_requests_total 0",
    ):
        assert line in text.splitlines()
    assert all(
        line.startswith(("istio_agent_", "# HELP istio_agent_", "# TYPE istio_agent_")) for line in text.splitlines()
    )


def test_labels_are_escaped() -> None:
    labelled = Labelled("m", "h", "l")
    labelled.add('a"b\\c\n')
    assert list(labelled.samples()) == [("m", '{l="a\\"b\\\\c\\n"}', 1)]
    histogram = Histogram("h", "h", (1, 5))
    histogram.observe(1)
    assert [value for _, _, value in histogram.samples()] == [1, 1, 1, 1, 1]


def test_http_client_limits() -> None:
    async def job() -> None:
        async with Peer(lambda _: Response(200, b"z" * 1000)) as peer:
            target = Target("127.0.0.1", peer.port)
            with pytest.raises(HTTPError, match="response exceeds 10 bytes"):
                await fetch(target, "GET", "/", timeout=DEADLINE, limit=10)
            assert len((await fetch(target, "GET", "/", timeout=DEADLINE, limit=10, cut=True)).body) == 10
            assert (await fetch(Target("localhost", peer.port), "GET", "/", timeout=DEADLINE)).status == 200
        with pytest.raises(HTTPError, match="refused"):
            await fetch(target, "GET", "/", timeout=DEADLINE)

    run(job)


def test_http_server_keeps_connections_and_survives_rubbish() -> None:
    async def job() -> None:
        async with Peer(lambda request: text_response(200, request.path)) as peer:
            reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
            for path in ("/one", "/two"):
                writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK")
                assert await reader.readexactly(4) == path.encode()
            writer.write(b"\x16\x03\x01\x00\xa5rubbish\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
            assert (await fetch(Target("127.0.0.1", peer.port), "GET", "/still", timeout=DEADLINE)).body == b"/still"

    run(job)


@pytest.mark.parametrize("length", ["9223372036854775808", "99999999999999999999", "9" * 40, "-1", "x"])
def test_a_length_that_is_none_is_a_400(length: str) -> None:
    async def job() -> None:
        async with Peer(lambda _: Response(200)) as peer:
            reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
            writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request")
            writer.close()

    run(job)


def test_a_handler_that_raises_is_a_500() -> None:
    async def job() -> None:
        def broken(_: Request) -> Response:
            raise RuntimeError("broken")

        async with Peer(broken) as peer:
            assert (await fetch(Target("127.0.0.1", peer.port), "GET", "/", timeout=DEADLINE)).status == 500

    run(job)


def test_a_status_port_in_use_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        async with Rig() as rig:
            with pytest.raises(OSError, match="in use"):
                listen_socket(rig.port)
            second = StatusServer.__new__(StatusServer)
            second._server = Server(_unused)
            await second.start(rig.port)

    run(job)
    assert "Error listening on status port: Address already in use" in caplog.text


def test_a_status_port_that_is_none_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        server = StatusServer.__new__(StatusServer)
        server._server = Server(_unused)
        await server.start(99999)

    run(job)
    assert "Error listening on status port: bind(): port must be 0-65535" in caplog.text


async def _unused(_: Request) -> Response:
    return Response(200)


HANDLER: Handler = _unused
