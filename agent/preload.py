"""Imports everything that a forked agent needs, and nothing more: no threads, no event loop, no gRPC runtime.

A zygote imports this once; its children share the pages and start without importing.
"""

import cryptography.hazmat.primitives.asymmetric.ec
import cryptography.hazmat.primitives.asymmetric.rsa
import cryptography.x509
import dns.message
import dns.rdtypes.ANY.OPT
import grpc
import grpc.aio
import h11
import uvloop

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

__all__ = ["agent", "cryptography", "dns", "grpc", "h11", "uvloop"]
