"""Discovery at scale: 1,000 services x 10 endpoints, 100 connected proxies, with and without Sidecar scoping.

The server is a process of its own (its CPU and memory are measured), the proxies are 100 delta streams from this one:
they take everything a sidecar takes (CDS, EDS, LDS, RDS, NDS), and acknowledge it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.listener.v3 import listener_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import struct_pb2

from lab.discovery import routes, snapshot
from lab.discovery.ads import DiscoveryServer
from lab.discovery.resources import CDS, EDS, LDS, NDS, RDS
from lab.discovery.server import start
from lab.manifests import model

SERVICES, ENDPOINTS, PROXIES, NAMESPACES = 1000, 10, 100, 20
_CLUSTER = "outbound|8080||{}"


def mesh_of(scoped: bool) -> model.Mesh:
    """The mesh as objects; with ``scoped`` each namespace imports only itself."""
    namespaces = tuple(model.Namespace(model.Meta(f"ns{i}")) for i in range(NAMESPACES))
    pods, services = [], []
    for i in range(SERVICES):
        home = f"ns{i % NAMESPACES}"
        selector = {"app": f"svc{i}"}
        services.append(
            model.Service(
                model.Meta(f"svc{i}", home),
                (f"10.96.{i // 250}.{i % 250 + 1}",),
                (model.ServicePort(8080, "http", "HTTP", 8080),),
                selector,
            )
        )
        for j in range(ENDPOINTS):
            n = i * ENDPOINTS + j
            meta = model.Meta(f"svc{i}-{j}", home, labels=selector)
            address = f"10.{100 + n // 62500}.{n // 250 % 250}.{n % 250 + 1}"
            pods.append(model.Pod(meta, (address,), (model.Container("app"),), True, f"svc{i}", owner_name=f"svc{i}"))
    sidecars = tuple(
        model.Sidecar(model.Meta("default", ns.meta.name), egress=(model.SidecarEgress(("./*",)),)) for ns in namespaces
    )
    return model.Mesh(
        "bench",
        (),
        model.MeshConfig(),
        model.Fabric("10.96.255.1", "10.96.255.2"),
        namespaces,
        tuple(pods),
        tuple(services),
        sidecars=sidecars if scoped else (),
    )


def one_endpoint_less(mesh: model.Mesh) -> model.Mesh:
    return replace(mesh, pods=tuple(replace(p, ready=not p.ready) if p.meta.name == "svc0-0" else p for p in mesh.pods))


def other_timeout(mesh: model.Mesh) -> model.Mesh:
    """A change that touches every cluster of every proxy."""
    config = mesh.mesh_config
    return replace(mesh, mesh_config=replace(config, connect_timeout=config.connect_timeout + 1))


# --- the server process ---------------------------------------------------------------------------


def _usage() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # not ru_maxrss: a spawned process inherits that of its parent
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
        "peak_rss_mb": int(status["VmHWM"].split()[0]) / 1024,
    }


async def _serve(path: str, scoped: bool, pipe: Any) -> None:
    mesh = mesh_of(scoped)
    started = time.monotonic()
    server = DiscoveryServer(mesh, debounce_after=0.0)
    grpc_server = await start(server, f"unix:{path}")
    pipe.send({"init_seconds": time.monotonic() - started})
    while True:
        op = await asyncio.to_thread(pipe.recv)
        if op == "stop":
            break
        if op == "usage":
            pipe.send(_usage())
            continue
        mesh = one_endpoint_less(mesh) if op == "endpoint" else other_timeout(mesh)
        before, began = _usage()["cpu_seconds"], time.monotonic()
        server.update(mesh)
        settled = await server.settled(120)
        pipe.send(
            {
                "settled": settled,
                "seconds": time.monotonic() - began,
                "cpu_seconds": _usage()["cpu_seconds"] - before,
                "push": server.last_push,
            }
        )
    await grpc_server.stop(grace=None)


def _server(path: str, scoped: bool, pipe: Any) -> None:
    asyncio.run(_serve(path, scoped, pipe))


# --- the proxies --------------------------------------------------------------------------------------


class Proxy:
    """One delta stream that behaves as an Envoy does: subscribes to what it was told of, acknowledges everything."""

    def __init__(self, channel: Any, mesh: model.Mesh, pod: model.Pod) -> None:
        call = channel.stream_stream(
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources",
            request_serializer=discovery_pb2.DeltaDiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DeltaDiscoveryResponse.FromString,
        )
        self._call = call()
        node = snapshot.node_for_pod(mesh, pod)
        metadata = struct_pb2.Struct()
        metadata.update({k: v for k, v in node.metadata.items() if k != "PROXY_CONFIG"})
        self._node: dict[str, Any] | None = {"id": node.id, "cluster": node.cluster, "metadata": metadata}
        self.resources = 0
        self.bytes = 0
        self.ready = asyncio.Event()
        self._wanted = {CDS, EDS, LDS, RDS, NDS}

    async def _send(self, type_url: str, **fields: Any) -> None:
        request = discovery_pb2.DeltaDiscoveryRequest(type_url=type_url, node=self._node, **fields)
        self._node = None
        await self._call.write(request)

    async def run(self) -> None:
        await self._send(CDS)
        while (response := await self._call.read()) is not grpc.aio.EOF:
            self.resources += len(response.resources)
            self.bytes += response.ByteSize()
            await self._send(response.type_url, response_nonce=response.nonce)
            if not self.ready.is_set():
                await self._follow(response)

    async def _follow(self, response: Any) -> None:
        """The next subscription of a starting Envoy."""
        self._wanted.discard(response.type_url)
        if response.type_url == CDS:
            names = [r.name for r in response.resources if r.name.startswith("outbound|")]
            assert cluster_pb2.Cluster.FromString(response.resources[0].resource.value).name
            await self._send(EDS, resource_names_subscribe=names)
        elif response.type_url == EDS:
            await self._send(LDS)
        elif response.type_url == LDS:
            found = routes.route_names(listener_pb2.Listener.FromString(r.resource.value) for r in response.resources)
            await self._send(RDS, resource_names_subscribe=found)
            await self._send(NDS)
        if not self._wanted:
            self.ready.set()

    def cancel(self) -> None:
        self._call.cancel()


async def _measure(scoped: bool, path: str, pipe: Any) -> dict[str, Any]:
    mesh = mesh_of(scoped)
    step = len(mesh.pods) // PROXIES
    channels = [
        grpc.aio.insecure_channel(
            f"unix:{path}",
            options=(
                ("grpc.max_receive_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.channel_id", i),
            ),
        )
        for i in range(PROXIES)
    ]
    proxies = [Proxy(c, mesh, mesh.pods[i * step]) for i, c in enumerate(channels)]
    began = time.monotonic()
    tasks = [asyncio.create_task(p.run()) for p in proxies]
    await asyncio.gather(*(p.ready.wait() for p in proxies))
    out: dict[str, Any] = {"connect_all_seconds": time.monotonic() - began}
    out["connect_megabytes"] = sum(p.bytes for p in proxies) / 1e6

    async def ask(op: str) -> Any:
        pipe.send(op)
        return await asyncio.to_thread(pipe.recv)

    usage = await ask("usage")
    out["connect_cpu_seconds"], out["rss_mb_connected"] = usage["cpu_seconds"], usage["rss_mb"]
    for name, op, rounds in (("endpoint", "endpoint", 5), ("full", "full", 2)):
        answers = []
        for _ in range(rounds):
            before = sum(p.resources for p in proxies)
            answer = await ask(op)
            assert answer["settled"], answer
            answer["resources"] = sum(p.resources for p in proxies) - before
            answers.append(answer)
        best = sorted(answers, key=lambda a: a["seconds"])[len(answers) // 2]
        out[f"{name}_change_to_last_ack_seconds"] = best["seconds"]
        out[f"{name}_push_seconds"] = best["push"]["seconds"]
        out[f"{name}_cpu_seconds"] = best["cpu_seconds"]
        out[f"{name}_kind"] = best["push"]["kind"]
        out[f"{name}_resources_sent"] = best["push"]["resources"]
        out[f"{name}_resources_received"] = best["resources"]
    usage = await ask("usage")
    out["rss_mb"], out["peak_rss_mb"] = usage["rss_mb"], usage["peak_rss_mb"]
    for proxy in proxies:
        proxy.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        await channel.close()
    return out


def _case(scoped: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "xds")
        ours, theirs = context.Pipe()
        process = context.Process(target=_server, args=(path, scoped, theirs))
        process.start()
        try:
            out = dict(ours.recv())
            out |= asyncio.run(_measure(scoped, path, ours))
            ours.send("stop")
            process.join(10)
        finally:
            process.kill()
            process.join()
    return out


def main() -> dict[str, Any]:
    """Both cases; prints a table."""
    cases = {"all_services": _case(False), "sidecar_scoped": _case(True)}
    print(
        f"{SERVICES} services x {ENDPOINTS} endpoints, {PROXIES} proxies in {NAMESPACES} namespaces, {os.cpu_count()} CPUs"
    )
    print(f"{'':38}{'every service':>18}{'own namespace':>18}")
    for key in cases["all_services"]:
        values = [cases[c][key] for c in cases]
        shown = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in values]
        print(f"{key:38}" + "".join(f"{s:>18}" if len(s) < 18 else f"  {s}" for s in shown))
    return {"services": SERVICES, "endpoints_per_service": ENDPOINTS, "proxies": PROXIES, **cases}


if __name__ == "__main__":
    json.dump(main(), sys.stdout, indent=2)
