"""Imports everything that a forked agent needs, and nothing more: no threads, no event loop, no gRPC runtime.

A zygote imports this once; its children share the pages and start without importing.
"""

import cryptography.hazmat.primitives.asymmetric.ec
import cryptography.hazmat.primitives.asymmetric.rsa
import cryptography.x509
import grpc
import grpc.aio
import uvloop
import yaml

import agent.app_probe
import agent.cli
import agent.debug_port
import agent.dns.server
import agent.health_check
import agent.options
import agent.run
import agent.sds
import agent.secrets
import agent.upstream
import agent.xds_proxy

agent.run.load_while_envoy_starts()

__all__ = ["agent", "cryptography", "grpc", "uvloop", "yaml"]
