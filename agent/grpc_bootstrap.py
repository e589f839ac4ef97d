"""The bootstrap file of proxyless gRPC clients beside this agent, and its readiness check.

Source: istio/istio: pkg/istio-agent/grpcxds/grpc_bootstrap.go, pilot/cmd/pilot-agent/status/grpcready/probe.go.
"""

from __future__ import annotations

import json
import os
from typing import Any

from agent.errors import AgentError
from agent.files import write_if_changed
from agent.node import Node

DEFAULT_PATH = "etc/istio/proxy/grpc-bootstrap.json"
LISTENER_TEMPLATE = "xds.istio.io/grpc/lds/inbound/%s"
REFRESH = "900s"


def build_grpc_bootstrap(node: Node, xds_socket: str, certificates: str) -> dict[str, Any]:
    """The file's content.

    Args:
        xds_socket: path of the agent's xDS socket.
        certificates: directory of ``OUTPUT_CERTS``, empty for none.
    """
    bootstrap: dict[str, Any] = {
        "xds_servers": [
            {
                "server_uri": f"unix:///{xds_socket}",
                "channel_creds": [{"type": "insecure"}],
                "server_features": ["xds_v3"],
            }
        ],
        "node": {
            "id": node.id,
            "metadata": {**node.metadata, "GENERATOR": "grpc"},
            "locality": node.locality.to_dict(),
        },
        "server_listener_resource_name_template": LISTENER_TEMPLATE,
    }
    if certificates:
        bootstrap["certificate_providers"] = {
            "default": {
                "plugin_name": "file_watcher",
                "config": {
                    "certificate_file": os.path.join(certificates, "cert-chain.pem"),
                    "private_key_file": os.path.join(certificates, "key.pem"),
                    "ca_certificate_file": os.path.join(certificates, "root-cert.pem"),
                    "refresh_interval": REFRESH,
                },
            }
        }
    return bootstrap


def write_grpc_bootstrap(path: str, bootstrap: dict[str, Any]) -> None:
    """Writes the file atomically.

    Raises:
        AgentError: it cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o750, exist_ok=True)
        write_if_changed(path, json.dumps(bootstrap, indent=2).encode(), 0o644)
    except OSError as error:
        raise AgentError("failed to generate gRPC XDS bootstrap", error) from None


class GRPCReadiness:
    """Passes while the bootstrap loads and the certificates that it names exist."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: list[str] | None = None

    def check(self) -> str:
        """Empty, or the reason why not."""
        if self._files is None:
            try:
                with open(self._path, encoding="utf-8") as file:
                    bootstrap = json.load(file)
                providers = bootstrap.get("certificate_providers", {}).values()
                self._files = [
                    provider["config"][key]
                    for provider in providers
                    if provider.get("plugin_name") == "file_watcher"
                    for key in ("certificate_file", "private_key_file", "ca_certificate_file")
                ]
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                return f"failed loading {self._path}: {error}"
        missing = next((path for path in self._files if not os.path.exists(path)), "")
        return f"{missing} does not exist" if missing else ""
