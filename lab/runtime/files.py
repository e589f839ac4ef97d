"""Where the parts of a lab write and listen, beyond `lab.fabric.paths`. Pure: names in, paths out.

::

    /run/sidecarlab/NAME/
        discovery.sock, dns.sock, observer.sock     control sockets (JSON lines)
        control-plane.pem                           what discovery signs with; for root alone
        log/lab.log                                 what the supervisor did and saw
        log/{zygote,discovery,dns,observer}.log     what serves the lab itself
        log/dns-queries.jsonl                       every query that reached cluster DNS
        pods/POD.NAMESPACE/                         seen in the pod as /run/sidecar; external hosts have one, too
            log/init.log, log/agent.log             agent.log also holds Envoy's
            log/app.log                             standard output of the app
            log/evidence.jsonl                      Envoy's evidence lines
            log/echo.jsonl                          what the echo app saw of each flow
            var/run/secrets/tokens/istio-token      the pod's service account token
            var/run/secrets/istio/root-cert.pem     the mesh's root certificate
"""

from __future__ import annotations

from pathlib import Path

from lab.fabric import paths
from lab.runtime.mounts import POD_DIR

INIT_LOG = "log/init.log"
AGENT_LOG = "log/agent.log"
APP_LOG = "log/app.log"
EVIDENCE = "log/evidence.jsonl"
ECHO = "log/echo.jsonl"
TOKEN = "var/run/secrets/tokens/istio-token"
ROOT_CERT = "var/run/secrets/istio/root-cert.pem"


def inside(name: str) -> str:
    """How a file of the pod's directory is called in the pod."""
    return f"{POD_DIR}/{name}"


def discovery_socket(lab: str) -> Path:
    return paths.run_dir(lab) / "discovery.sock"


def discovery_keys(lab: str) -> Path:
    return paths.run_dir(lab) / "control-plane.pem"


def dns_socket(lab: str) -> Path:
    return paths.run_dir(lab) / "dns.sock"


def observer_socket(lab: str) -> Path:
    return paths.run_dir(lab) / "observer.sock"


def notify_dir(lab: str) -> Path:
    """READY=1 sockets of what runs in the node's namespace."""
    return paths.run_dir(lab) / "notify"


def dns_queries(lab: str) -> Path:
    return paths.log_dir(lab) / "dns-queries.jsonl"


def log(lab: str, who: str) -> Path:
    """The log of ``lab`` (the supervisor), ``zygote``, ``discovery``, ``dns`` or ``observer``."""
    return paths.log_dir(lab) / f"{who}.log"


def evidence(lab: str, pod: str) -> Path:
    return paths.pod_dir(lab, pod) / EVIDENCE


def echo(lab: str, place: str) -> Path:
    """``place`` is a pod or an external host's place (``ext-NAME``)."""
    return paths.pod_dir(lab, place) / ECHO


def agent_log(lab: str, pod: str) -> Path:
    return paths.pod_dir(lab, pod) / AGENT_LOG


def init_log(lab: str, pod: str) -> Path:
    return paths.pod_dir(lab, pod) / INIT_LOG


def app_log(lab: str, place: str, process: str = "app") -> Path:
    return paths.pod_dir(lab, place) / APP_LOG.replace("app", process)
