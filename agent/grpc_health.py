"""One gRPC health check (grpc/grpc-proto: grpc/health/v1/health.proto)."""

from __future__ import annotations

METHOD = "/grpc.health.v1.Health/Check"
# HealthCheckResponse{status: SERVING}; HealthCheckRequest has the service's name as field 1, as StringValue its value.
_SERVING = b"\x08\x01"


class Unhealthy(Exception):
    """The service does not serve, or could not be asked."""


async def check(target: str, service: str, timeout: float, user_agent: str = "") -> None:
    """Returns if a server says SERVING.

    Args:
        target: gRPC's name of it, e.g. ``10.0.0.1:8080`` or ``unix:/path``.
        service: name to ask for, empty for the server as a whole.
        timeout: seconds.
        user_agent: put in front of gRPC's own.

    Raises:
        Unhealthy: with the reason.
    """
    import grpc
    import grpc.aio
    from google.protobuf.wrappers_pb2 import StringValue

    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if user_agent:
        options.append(("grpc.primary_user_agent", user_agent))
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        call = channel.unary_unary(METHOD)
        try:
            answer: bytes = await call(StringValue(value=service).SerializeToString(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Unhealthy("the service does not implement grpc.health.v1.Health") from None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unhealthy(f"health rpc probe timed out after {timeout:g}s") from None
            raise Unhealthy(f"health rpc probe failed with status {error.code().name}: {error.details()}") from None
    if answer != _SERVING:
        raise Unhealthy("the service is not serving")
