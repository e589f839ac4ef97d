"""Any valid configuration gives documents that the tools accept, and rules that are found again as they were meant."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from init_pod import Net, backends, net

from init import native, program, restore, rules
from init.config import Config
from init.log import Log

sys.path.append(str(Path(__file__).parents[2] / "unit" / "init"))
from init_configs import configs

pytestmark = pytest.mark.root

# Shrinking would take minutes, and a failing example is readable as it is.
FEW = settings(
    max_examples=10,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def place() -> Iterator[Net]:
    with net() as made:
        yield made


@FEW
@given(configs(ipv6=True))
def test_documents_are_accepted_by_the_tools(place: Net, config: Config) -> None:
    built = rules.build(config)
    for kind in ("legacy", "nft"):
        for family, tool in (("ipv4", "iptables"), ("ipv6", "ip6tables")):
            for comments in (False, True):
                text = restore.document(built.family("ipv4" if family == "ipv4" else "ipv6"), comments)
                place.pod.tool(f"{tool}-{kind}-restore", "--noflush", "--test", text=text)
    for comments in (False, True):
        place.pod.tool("nft", "-c", "-f", "-", text=native.script(native.build(config), comments))


@backends
@FEW
@given(config=configs())
def test_what_is_applied_is_found_again(place: Net, backend: str, config: Config) -> None:
    only_v6 = config.dns_servers_v6 and not config.dns_servers_v4 and not config.capture_all_dns
    if backend == "native-nft" and config.redirect_dns and only_v6 and not config.ipv6:
        # nft refuses these rules, see init.surprises.
        return
    config = config._replace(backend=backend)

    def work() -> list[object]:
        log = Log(level=0)
        runs = [config, config, config._replace(reconcile=True), config._replace(cleanup_only=True)]
        actions = []
        for settings_ in runs:
            result = program.run(settings_, {"PATH": "/usr/sbin:/usr/bin"}, log)
            actions.append([result.action, [drift.diff() for drift in result.drift]])
        return actions

    assert place.pod.call(work) == [["applied", []], ["unchanged", []], ["unchanged", []], ["cleaned", []]]
    left = "".join(place.pod.save().values())
    assert "ISTIO" not in left
    assert "istio-proxy" not in left
