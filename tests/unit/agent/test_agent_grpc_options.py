"""The options of gRPC are words that it ignores if it does not know them."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from agent.xds_proxy import channel_options, server_options
from lab.discovery.server import GRPC_OPTIONS

USED = [*server_options(1, 1, 30, 10), *channel_options(30, 10), *GRPC_OPTIONS]


@pytest.mark.parametrize("name", sorted({name for name, _ in USED}))
def test_grpc_knows_the_option(name: str) -> None:
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()
