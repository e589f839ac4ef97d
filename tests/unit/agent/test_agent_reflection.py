"""Reflection on the xDS socket, asked by gRPC's own client of it (spec: agent 9.1)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from agent.metrics import Metrics
from agent.reflection import V1, V1_ALPHA
from agent.xds_proxy import SERVICE, Upstream, XdsProxy, server_options

DEADLINE = 20.0
SERVICES = sorted((SERVICE, V1, V1_ALPHA))


def served(tmp_path: Path, job: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Runs `job` with the address of the xDS socket of an agent whose discovery is not there."""

    async def run() -> None:
        upstream = Upstream("127.0.0.1:1", lambda: grpc.aio.insecure_channel("127.0.0.1:1"), lambda: ())
        proxy = XdsProxy(str(tmp_path / "XDS"), upstream, Metrics(), {})
        await proxy.start(server_options(100, 4 << 20, 30, 10))
        try:
            async with asyncio.timeout(DEADLINE):
                await job(f"unix:{tmp_path}/XDS")
        finally:
            await proxy.stop()

    asyncio.run(run())


def test_a_client_that_knows_nothing_learns_how_to_call(tmp_path: Path) -> None:
    def ask(address: str) -> tuple[list[str], str, Any]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            method = pool.FindServiceByName(SERVICE).methods_by_name["DeltaAggregatedResources"]
            # A message that the service does not speak of, but discovery does.
            cluster = pool.FindMessageTypeByName("envoy.config.cluster.v3.Cluster")
            return sorted(database.get_services()), method.input_type.full_name, cluster.fields_by_name["name"].number

    async def job(address: str) -> None:
        services, taken, number = await asyncio.to_thread(ask, address)
        assert services == SERVICES
        assert taken == "envoy.service.discovery.v3.DeltaDiscoveryRequest"
        assert number == 1

    served(tmp_path, job)


def ask(address: str, service: str, *requests: bytes) -> Iterator[reflection_pb2.ServerReflectionResponse]:
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{service}/ServerReflectionInfo")
        for answer in call(iter(requests)):
            yield reflection_pb2.ServerReflectionResponse.FromString(answer)


@pytest.mark.parametrize("service", [V1, V1_ALPHA])
def test_both_versions_answer_and_describe_themselves(tmp_path: Path, service: str) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
        reflection_pb2.ServerReflectionRequest(file_by_filename="envoy/config/route/v3/route.proto"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="envoy.no.such.Thing"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="os.path"),
    ]

    async def job(address: str) -> None:
        texts = [request.SerializeToString() for request in requests]
        names, itself, route, *missing = await asyncio.to_thread(lambda: list(ask(address, service, *texts)))
        assert sorted(one.name for one in names.list_services_response.service) == SERVICES
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in itself.file_descriptor_response.file_descriptor_proto
        ]
        assert [f"{file.package}.{file.service[0].name}" for file in files] == [service]
        pool = DescriptorPool()
        pool.Add(files[0])
        answer = pool.FindServiceByName(service).methods_by_name["ServerReflectionInfo"].output_type
        assert answer.full_name == service.replace("ServerReflection", "ServerReflectionResponse")
        assert len(route.file_descriptor_response.file_descriptor_proto) > 1  # with what it imports
        assert [one.error_response.error_code for one in missing] == [5, 5]

    served(tmp_path, job)


def test_a_malformed_question_ends_the_stream(tmp_path: Path) -> None:
    async def job(address: str) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(lambda: list(ask(address, V1, b"\xff")))
        assert caught.value.code() is grpc.StatusCode.INTERNAL

    served(tmp_path, job)


def test_what_few_ask_for_is_not_loaded_at_the_start() -> None:
    code = "import sys, agent.preload; print([m for m in sys.argv[1:] if m in sys.modules])"
    modules = ["grpc_reflection.v1alpha", "h2", "OpenSSL"]
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
