"""Access logs: Istio's default formats, and the lab's own evidence log beside them.

Sources: istio/istio: pilot/pkg/model/telemetry_logging.go, pilot/pkg/networking/core/accesslog.go.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from envoy.config.accesslog.v3 import accesslog_pb2
from envoy.config.core.v3 import base_pb2, extension_pb2, substitution_format_string_pb2
from envoy.extensions.access_loggers.file.v3 import file_pb2
from envoy.extensions.formatter.req_without_query.v3 import req_without_query_pb2

from lab.discovery.protoconv import struct, to_any
from lab.discovery.proxy import Proxy
from lab.manifests import model

TEXT_FORMAT = (
    '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%" %RESPONSE_CODE% %RESPONSE_FLAGS% '
    '%RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% "%UPSTREAM_TRANSPORT_FAILURE_REASON%" '
    "%BYTES_RECEIVED% %BYTES_SENT% %DURATION% %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% "
    '"%REQ(X-FORWARDED-FOR)%" "%REQ(USER-AGENT)%" "%REQ(X-REQUEST-ID)%" "%REQ(:AUTHORITY)%" "%UPSTREAM_HOST%" '
    "%UPSTREAM_CLUSTER_RAW% %UPSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_REMOTE_ADDRESS% "
    "%REQUESTED_SERVER_NAME% %ROUTE_NAME%\n"
)

JSON_FORMAT = {
    "start_time": "%START_TIME%",
    "route_name": "%ROUTE_NAME%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
    "protocol": "%PROTOCOL%",
    "response_code": "%RESPONSE_CODE%",
    "response_flags": "%RESPONSE_FLAGS%",
    "response_code_details": "%RESPONSE_CODE_DETAILS%",
    "connection_termination_details": "%CONNECTION_TERMINATION_DETAILS%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration": "%DURATION%",
    "upstream_service_time": "%RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)%",
    "x_forwarded_for": "%REQ(X-FORWARDED-FOR)%",
    "user_agent": "%REQ(USER-AGENT)%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "authority": "%REQ(:AUTHORITY)%",
    "upstream_host": "%UPSTREAM_HOST%",
    "upstream_cluster": "%UPSTREAM_CLUSTER_RAW%",
    "upstream_local_address": "%UPSTREAM_LOCAL_ADDRESS%",
    "downstream_local_address": "%DOWNSTREAM_LOCAL_ADDRESS%",
    "downstream_remote_address": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "requested_server_name": "%REQUESTED_SERVER_NAME%",
    "upstream_transport_failure_reason": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
}

EVIDENCE_FORMAT = {
    "time": "%START_TIME%",
    "listener": "%LISTENER_NAME%",
    "filter_chain": "%FILTER_CHAIN_NAME%",
    "virtual_host": "%CEL(xds.virtual_host_name)%",
    "route_name": "%ROUTE_NAME%",
    "cluster": "%UPSTREAM_CLUSTER_RAW%",
    "endpoint": "%UPSTREAM_HOST%",
    "upstream_local": "%UPSTREAM_LOCAL_ADDRESS%",
    "downstream_local": "%DOWNSTREAM_LOCAL_ADDRESS%",
    "downstream_remote": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "downstream_direct_local": "%DOWNSTREAM_DIRECT_LOCAL_ADDRESS%",
    "stream_id": "%STREAM_ID%",
    "code": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "termination": "%CONNECTION_TERMINATION_DETAILS%",
    "upstream_failure": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
    "authority": "%REQ(:AUTHORITY)%",
    "protocol": "%PROTOCOL%",
    "sni": "%REQUESTED_SERVER_NAME%",
    "tls_version": "%DOWNSTREAM_TLS_VERSION%",
    "peer_san": "%DOWNSTREAM_PEER_URI_SAN%",
    "upstream_tls_version": "%UPSTREAM_TLS_VERSION%",
    "upstream_peer_san": "%UPSTREAM_PEER_URI_SAN%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration": "%DURATION%",
    "request_id": "%REQ(X-REQUEST-ID)%",
}

Kind = Literal["http", "tcp", "listener"]


def _no_route_filter() -> Any:
    return accesslog_pb2.AccessLogFilter(response_flag_filter=accesslog_pb2.ResponseFlagFilter(flags=["NR"]))


def _file_log(path: str, log_format: Any, only_no_route: bool) -> Any:
    return accesslog_pb2.AccessLog(
        name="envoy.access_loggers.file",
        filter=_no_route_filter() if only_no_route else None,
        typed_config=to_any(file_pb2.FileAccessLog(path=path, log_format=log_format)),
    )


def _mesh_format(config: model.MeshConfig) -> Any:
    written = config.access_log_format
    if config.access_log_encoding == "JSON":
        try:
            fields = json.loads(written) if written else JSON_FORMAT
        except ValueError:
            fields = JSON_FORMAT  # Istio logs the parse error and keeps its default
        format = substitution_format_string_pb2.SubstitutionFormatString(
            json_format=struct(fields), json_format_options={"sort_properties": False}
        )
    else:
        text = written or TEXT_FORMAT
        format = substitution_format_string_pb2.SubstitutionFormatString(
            text_format_source=base_pb2.DataSource(inline_string=text if text.endswith("\n") else text + "\n")
        )
    if "%REQ_WITHOUT_QUERY" in written:
        format.formatters.append(
            extension_pb2.TypedExtensionConfig(
                name="envoy.formatter.req_without_query", typed_config=to_any(req_without_query_pb2.ReqWithoutQuery())
            )
        )
    return format


def logs(proxy: Proxy, kind: Kind, route_config: str | None = None, *, mesh_log: bool = True) -> list[Any]:
    """The access logs of one connection manager, tcp proxy or listener.

    ``route_config`` is the name of the route configuration, kept in the evidence as a literal. ``mesh_log=False``
    leaves out MeshConfig's log (blackhole chains and per-service outbound listeners have none in Istio).
    Listener logs are written only when no filter chain matched (flag NR).
    """
    config = proxy.mesh_config
    out = []
    if mesh_log and config.access_log_file and not (kind == "listener" and config.disable_envoy_listener_log):
        key = ("access_log", kind == "listener")
        memo = proxy.push.memo
        if key not in memo:
            memo[key] = _file_log(config.access_log_file, _mesh_format(config), kind == "listener")
        out.append(memo[key])
    path = proxy.node.evidence
    if path:
        key = ("evidence_log", path, kind, route_config)  # type: ignore[assignment]
        memo = proxy.push.memo
        if key not in memo:
            fields = {"kind": kind, **EVIDENCE_FORMAT, "route_config": route_config}
            format = substitution_format_string_pb2.SubstitutionFormatString(json_format=struct(fields))
            memo[key] = _file_log(path, format, kind == "listener")
        out.append(memo[key])
    return out
