"""gRPC server reflection: what services a server of the agent has, and their descriptors.

Go's ``reflection.Register`` serves version 1 and the older v1alpha, whose messages are the same on the wire.
Source: istio/istio: pkg/istio-agent/xds_proxy.go (initDownstreamServer); grpc/grpc: doc/server-reflection.md.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

V1 = "grpc.reflection.v1.ServerReflection"
V1_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
_METHODS = frozenset(f"/{service}/ServerReflectionInfo" for service in (V1, V1_ALPHA))


class Reflection(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers for a server with `services`; what that needs is loaded with the first question, on a thread."""

    def __init__(self, *services: str) -> None:
        self._services = (*services, V1, V1_ALPHA)
        self._loading = threading.Lock()

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method not in _METHODS:
            return None
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            try:
                answer = await asyncio.to_thread(self._respond, data)
            except DecodeError:
                await context.abort(grpc.StatusCode.INTERNAL, "malformed reflection request")
            yield answer

    def _respond(self, data: bytes) -> bytes:
        from grpc_reflection.v1alpha import reflection_pb2

        with self._loading:
            servicer = self._servicer
        request = reflection_pb2.ServerReflectionRequest.FromString(data)
        (response,) = servicer.ServerReflectionInfo(iter((request,)), None)
        answer: bytes = response.SerializeToString()
        return answer

    @functools.cached_property
    def _servicer(self) -> Any:
        from google.protobuf import descriptor_pb2, descriptor_pool
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        from agent.message_types import MessageTypes

        # The package has the older version alone.
        newer = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(newer)
        _rename(newer)
        # Adding the same file once more changes nothing.
        descriptor_pool.Default().AddSerializedFile(newer.SerializeToString())
        return reflection.ReflectionServicer(self._services, MessageTypes())


def _rename(file: Any) -> None:
    """Version 1 out of v1alpha: the same messages in another package."""

    def renamed(name: str) -> str:
        return name.replace("grpc.reflection.v1alpha", "grpc.reflection.v1")

    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = renamed(file.package)
    for message in file.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = renamed(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type, method.output_type = renamed(method.input_type), renamed(method.output_type)
