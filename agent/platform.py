"""The cloud that a proxy runs on, as far as the environment says it; metadata servers are not asked.

Source: istio/istio: pkg/bootstrap/platform/discovery.go, pkg/bootstrap/platform/gcp.go.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.environment import Environment
from agent.node import Locality

log = logging.getLogger("default")

RESOLV_CONF = "/etc/resolv.conf"
_STATIC = ("gcp_project", "gcp_project_number", "gcp_gke_cluster_name", "gcp_location")
_ZONE = re.compile(r"([^-]+-[^-]+)-[^-]+")
_SEARCHED_ZONE = re.compile(r"^search.* ([^-]+-[^-]+-[^-]+)\.c\.[^.]+\.internal", re.MULTILINE)
_CLUSTER_URL = "https://container.googleapis.com/v1/projects/{}/locations/{}/clusters/{}"


@dataclass(frozen=True)
class Platform:
    """What the node of a proxy takes from its platform."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    locality: Locality = field(default_factory=Locality)


def discover(environment: Environment, resolv_conf: str = RESOLV_CONF) -> Platform:
    """``CLOUD_PLATFORM``, else Google's if ``GCP_METADATA`` says something of it, else none."""
    name = environment.string("CLOUD_PLATFORM").lower()
    metadata = _gcp_metadata(environment)
    if name in ("aws", "azure") or (name == "gcp" and not metadata):
        log.warning("CLOUD_PLATFORM is %s, but the metadata server of a cloud is not asked", name)
    if name in ("aws", "azure", "none") or not metadata:
        return Platform()
    return Platform(metadata, _gcp_locality(metadata, resolv_conf))


def _gcp_metadata(environment: Environment) -> dict[str, str]:
    text = environment.string("GCP_METADATA")
    if not text:
        return {}
    found: dict[str, str] = {}
    parts = text.split("|")
    if len(parts) == len(_STATIC):
        found = dict(zip(_STATIC, parts, strict=True))
        found["gcp_gke_cluster_url"] = _CLUSTER_URL.format(parts[0], parts[3], parts[2])
    for key, variable in (("gcp_quota_project", "GCP_QUOTA_PROJECT"), ("gcp_zone", "GCP_ZONE")):
        if environment.string(variable):
            found[key] = environment.string(variable)
    return found


def _gcp_locality(metadata: Mapping[str, str], resolv_conf: str) -> Locality:
    """Region and zone of the pod; a node's resolv.conf has the zone as a part of a search domain."""
    zone = metadata.get("gcp_zone", "")
    if not zone:
        try:
            with open(resolv_conf, encoding="utf-8", errors="replace") as file:
                found = _SEARCHED_ZONE.search(file.read())
        except OSError:
            found = None
        if found is None:
            log.warning("Failed to load the zone name of the pod from resolv.conf")
            return Locality()
        zone = found[1]
    region = _ZONE.fullmatch(zone)
    if region is None:
        log.warning("unable to extract region from GCP zone: %s", zone)
        return Locality()
    return Locality(region[1], zone)
