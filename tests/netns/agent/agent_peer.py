"""The far side of an agent, run as a program in the node's namespace: discovery, certificate authority, DNS.

Commands come as JSON lines on stdin, events go as JSON lines to stdout:
  {"op": "resources", "type": URL, "resources": {name: JSON}}   answered on all streams that asked for the type
  {"op": "fail", "code": NAME}                                   the next certificate request fails
Events: stream, end, request (type, nonce, error, names), csr (metadata), dns (name, source, transport).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit" / "agent"))

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import grpc
import grpc.aio
from agent_authority import Authority, Issuer
from envoy.config.cluster.v3 import cluster_pb2  # noqa: F401 - known to JSON parsing
from envoy.config.core.v3 import extension_pb2  # noqa: F401
from envoy.config.listener.v3 import listener_pb2  # noqa: F401
from envoy.extensions.filters.http.router.v3 import router_pb2  # noqa: F401
from envoy.extensions.filters.http.wasm.v3 import wasm_pb2  # noqa: F401
from envoy.extensions.filters.network.http_connection_manager.v3 import (
    http_connection_manager_pb2,  # noqa: F401
)
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2  # noqa: F401
from envoy.extensions.transport_sockets.tls.v3 import tls_pb2  # noqa: F401
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage

from agent.ca_client import METHOD
from agent.protos import ca_pb2, nds_pb2  # noqa: F401
from agent.xds_proxy import SERVICE


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class Discovery:
    def __init__(self) -> None:
        self.resources: dict[str, dict[str, AnyMessage]] = {}
        self.streams: dict[Any, set[str]] = {}
        self.nonces = itertools.count(1)

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.streams[context] = set()
        say("stream", peer=context.peer(), metadata=dict(context.invocation_metadata()))
        try:
            async for data in requests:
                request = discovery_pb2.DeltaDiscoveryRequest.FromString(data)
                say(
                    "request",
                    type=request.type_url.rpartition(".")[2],
                    nonce=request.response_nonce,
                    error=request.error_detail.message,
                    names=list(request.resource_names_subscribe),
                    node=request.node.id,
                )
                self.streams[context].add(request.type_url)
                if not request.response_nonce:
                    await self.send(context, request.type_url)
        finally:
            del self.streams[context]
            say("end")

    async def send(self, context: Any, type_url: str) -> None:
        response = discovery_pb2.DeltaDiscoveryResponse(
            type_url=type_url, nonce=str(next(self.nonces)), system_version_info="1"
        )
        for name, resource in self.resources.get(type_url, {}).items():
            response.resources.add(name=name, version="1").resource.CopyFrom(resource)
        await context.write(response.SerializeToString())

    async def set(self, type_url: str, resources: dict[str, Any]) -> None:
        found = {}
        for name, value in resources.items():
            found[name] = AnyMessage()
            json_format.ParseDict({"@type": type_url, **value}, found[name])
        self.resources[type_url] = found
        for context, types in list(self.streams.items()):
            if type_url in types:
                await self.send(context, type_url)


class ReportingAuthority(Authority):
    async def _create(self, request: Any, context: Any) -> ca_pb2.IstioCertificateResponse:
        say("csr", seconds=request.validity_duration, metadata=dict(context.invocation_metadata()))
        return await super()._create(request, context)


def dns_answer(data: bytes, zone: dict[str, str], source: str, transport: str) -> bytes:
    query = dns.message.from_wire(data)
    reply = dns.message.make_response(query)
    name, kind = query.question[0].name, query.question[0].rdtype
    say("dns", name=name.to_text(), source=source, transport=transport)
    address = zone.get(name.to_text().lower())
    if address is None:
        reply.set_rcode(dns.rcode.NXDOMAIN)
    elif kind == 1:
        reply.answer.append(dns.rrset.from_text(name, 60, "IN", "A", address))
    reply.flags |= dns.flags.RA
    return reply.to_wire()


async def serve_dns(address: str, zone: dict[str, str]) -> None:
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, 53))

    def readable() -> None:
        data, peer = sock.recvfrom(4096)
        with contextlib.suppress(OSError):
            sock.sendto(dns_answer(data, zone, peer[0], "udp"), peer)

    loop.add_reader(sock, readable)

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            data = await reader.readexactly(length)
            reply = dns_answer(data, zone, writer.get_extra_info("peername")[0], "tcp")
            writer.write(struct.pack("!H", len(reply)) + reply)
        writer.close()

    await asyncio.start_server(stream, address, 53)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--dns", default="")
    parser.add_argument("--zone", default="{}")
    parser.add_argument("--lifetime", type=float, default=3600)
    arguments = parser.parse_args()
    discovery = Discovery()
    authority = ReportingAuthority(Issuer(lifetime=arguments.lifetime))
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    stream = grpc.stream_stream_rpc_method_handler(discovery.serve)
    service, method = METHOD.strip("/").split("/")
    create = grpc.unary_unary_rpc_method_handler(
        authority._create,
        request_deserializer=ca_pb2.IstioCertificateRequest.FromString,
        response_serializer=ca_pb2.IstioCertificateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, {"DeltaAggregatedResources": stream}),
            grpc.method_handlers_generic_handler(service, {method: create}),
        )
    )
    server.add_insecure_port(f"{arguments.listen}:15010")
    await server.start()
    if arguments.dns:
        await serve_dns(arguments.dns, json.loads(arguments.zone))
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say("listening")
    while line := await reader.readline():
        command = json.loads(line)
        if command["op"] == "resources":
            await discovery.set(command["type"], command["resources"])
        elif command["op"] == "fail":
            authority.failures.append(grpc.StatusCode[command["code"]])
        say("done", op=command["op"])
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
