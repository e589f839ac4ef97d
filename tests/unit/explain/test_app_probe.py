"""What is predicted of the agent's answer to a probe."""

from __future__ import annotations

import pytest

from lab.explain.app_probe import probed
from lab.explain.packet import Host
from lab.explain.world import Place, Served, Speaks
from lab.manifests.model import AppProbe

PATH = "/app-health/web/readyz"
LISTENING: dict[tuple[int, int], Speaks] = {
    (6, 80): "http", (6, 443): "https", (6, 90): "grpc", (6, 70): "unknown", (6, 15000): "admin"
}  # fmt: skip


def place(probe: AppProbe, address: str = "10.0.0.1") -> Place:
    return Place(
        "web.shop",
        Host({"eth0": (address,)}),
        addresses=(address,),
        listening=LISTENING,
        loopback_only=frozenset({15000}),
        probes={PATH: probe},
    )


def http(path: str = "/", port: int = 80, scheme: str = "HTTP", timeout: int = 1) -> AppProbe:
    return AppProbe("readyz", "httpGet", {"path": path, "port": port, "scheme": scheme}, timeout)


def tcp(port: int) -> AppProbe:
    return AppProbe("readyz", "tcpSocket", {"port": port}, 1)


@pytest.mark.parametrize(
    ("probe", "status"),
    [
        (http(), 200),
        (http("/status/503"), 503),
        (http("/status/302"), 200),
        (http("/close"), 500),
        (http("/delay/3"), 500),
        (http("/delay/3", timeout=5), 200),
        (http("/delay/3", timeout=0), 200),
        (http(port=443, scheme="HTTPS"), 200),
        (http(port=443), 500),  # plain text to a TLS port
        (http(scheme="HTTPS"), 500),
        (http(port=81), 500),
        (http(port=15000), 500),  # Envoy listens there on loopback alone
        (tcp(80), 200),
        (tcp(70), 200),
        (tcp(81), 500),
        (AppProbe("readyz", "grpc", {"port": 90}, 1), 200),
        (AppProbe("readyz", "grpc", {"port": 90}, 0), 500),
        (AppProbe("readyz", "grpc", {"port": 80}, 1), 500),
        (AppProbe("readyz", "grpc", {"port": 91}, 1), 500),
    ],
)
def test_status(probe: AppProbe, status: int) -> None:
    assert probed(place(probe), PATH).status == status


def test_the_app_sees_the_agents_special_address() -> None:
    assert probed(place(http()), PATH) == Served("ok", 200, told=True, peer="127.0.0.6")
    assert probed(place(http(), "fd00::1"), PATH).peer == "::6"


def test_what_a_program_of_the_users_answers_is_not_known() -> None:
    assert probed(place(http(port=70)), PATH).result == "unknown"


def test_a_probe_that_nobody_wrote() -> None:
    assert probed(place(http()), "/app-health/web/livez").status == 400
