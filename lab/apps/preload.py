"""Imports all that an echo app may need, so that a process imports it once and forks many apps.

A forked app imports nothing more: the code may lie where its uid cannot walk (a checkout under ``/root``).
No threads, no event loop, no sockets come of it.
"""

from __future__ import annotations

import encodings.idna

import cryptography.hazmat.backends.openssl.backend
import cryptography.hazmat.primitives.asymmetric.ec
import cryptography.hazmat.primitives.hashes
import cryptography.hazmat.primitives.serialization
import cryptography.x509.oid

import lab.apps.echo
import lab.apps.rpc
import lab.apps.web

__all__ = ["cryptography", "encodings", "lab"]
