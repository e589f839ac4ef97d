"""gRPC ports of the echo app: any unary method is answered by the JSON that HTTP would give, as raw bytes.

``grpc.health.v1.Health`` says SERVING for every service (grpc/grpc: doc/health-checking.md). gRPC's server tells neither the
authority nor the address that a wildcard socket was reached on: those keys are null.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from lab.apps.events import EventLog
from lab.apps.ports import EchoConfig, EchoPort
from lab.apps.report import Endpoint, flow, grpc_endpoint, headers, line

# HealthCheckResponse{status: SERVING}: field 1 as varint, value 1.
_SERVING = b"\x08\x01"
_GRACE = 0.0  # seconds that running calls get on stop


class RPCListener:
    """One gRPC port on some addresses."""

    def __init__(self, config: EchoConfig, port: EchoPort, log: EventLog) -> None:
        self._config, self._port, self._log = config, port, log
        self._server: grpc.aio.Server | None = None

    async def start(self, addresses: Sequence[str]) -> list[Endpoint]:
        """Listens on addresses.

        Returns:
            where it listens (the kernel's choice for port 0).

        Raises:
            OSError: an address cannot be had.
        """
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((_Handler(self),))
        # gRPC listens on [::] for both families; 0.0.0.0 beside it would be in use.
        targets = [a for a in addresses if a != "0.0.0.0" or "::" not in addresses]
        result = []
        try:
            for address in targets:
                host = f"[{address}]" if ":" in address else address
                result.append(Endpoint(address, server.add_insecure_port(f"{host}:{self._port.port}")))
        except RuntimeError as e:
            raise OSError(str(e)) from e
        self._server = server
        await server.start()
        return result

    async def stop(self) -> None:
        """Stops listening and aborts what is open."""
        if self._server is not None:
            await self._server.stop(_GRACE)

    def seen(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> dict[str, object]:
        """What was seen of a call; logs it."""
        metadata = [(k, v if isinstance(v, str) else v.hex()) for k, v in context.invocation_metadata() or ()]
        told = {
            **flow(self._config, grpc_endpoint(context.peer()), self._local()),
            "method": "POST",
            "path": method,
            "headers": headers(metadata),
            "host": None,
            "received": len(request),
        }
        self._log.write("request", {"protocol": self._port.protocol, **told})
        return told

    def _local(self) -> Endpoint | None:
        only = self._config.addresses
        if len(only) != 1 or ipaddress.ip_address(only[0]).is_unspecified:
            return None
        return Endpoint(only[0], self._port.port)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Routes by method; requests and answers stay bytes."""

    def __init__(self, listener: RPCListener) -> None:
        self._listener = listener

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method: str = details.method

        async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return line(self._listener.seen(method, request, context))

        async def check(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self._listener.seen(method, request, context)
            return _SERVING

        async def watch(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            self._listener.seen(method, request, context)
            yield _SERVING
            await asyncio.Event().wait()  # the status never changes; the caller ends the call

        if method == "/grpc.health.v1.Health/Check":
            return grpc.unary_unary_rpc_method_handler(check)
        if method == "/grpc.health.v1.Health/Watch":
            return grpc.unary_stream_rpc_method_handler(watch)
        return grpc.unary_unary_rpc_method_handler(echo)
