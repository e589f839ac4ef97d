"""A pilot-agent work-alike: bootstrap, Envoy, xDS proxy, SDS, DNS and status of one sidecar."""

__version__ = "0.1.0"
