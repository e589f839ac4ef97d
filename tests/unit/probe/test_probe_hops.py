"""The steps of a traced flow: in the order of the flow, each with who said so, and none that did not happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_probe_join import (
    APP,
    CAUGHT,
    CLIENT,
    FACTS,
    FAR,
    POD,
    QUERY,
    UPSTREAM,
    VIP,
    entry,
    packet,
    sighting,
    step,
)

from lab.manifests.load import load
from lab.probe import hops, join, proxy_view
from lab.probe.hops import STEPS, Hop, More
from lab.probe.join import Facts
from lab.probe.orders import Query, Sent
from lab.proxyconfig import from_files
from lab.trace.rules import Listing, parse_iptables_save

NAMES = {VIP: "VIP of catalog.catalog", FAR: "pod catalog.catalog"}
CONFIG = from_files(load(["topologies/quickstart.yaml"]), "frontend.frontend", "all")


def told(facts: Facts, more: More | None = None) -> dict[str, Hop]:
    found = hops.hops(facts, join.verdict(facts), more or More(NAMES, client=CONFIG))
    return {hop.step: hop for hop in found}


def sources(hop: Hop) -> set[str]:
    return {d.source for d in hop.details}


def test_a_request_through_the_mesh_takes_the_nine_steps_in_order() -> None:
    found = told(FACTS)
    assert list(found) == [*STEPS, "wire", "outcome"]
    assert [h.number for h in found.values()] == [1, 2, 3, 4, 5, 6, 7, 8, 9, None, None]
    assert all(h.happened for h in found.values())
    assert found["vip"].text.endswith(f"tcp {POD}:40000 -> {VIP}:8080 (VIP of catalog.catalog)")
    assert found["iptables"].text.startswith("captured to 15001 by legacy nat ISTIO_REDIRECT 1: -A ISTIO_REDIRECT")
    assert found["virtualOutbound"].text == "listener virtualOutbound accepts it on 15001"
    assert found["original-destination"].text.startswith(f"{VIP}:8080: listener 0.0.0.0_8080")
    assert found["route"].text.startswith(
        "route configuration 8080, virtual host catalog.catalog.svc.cluster.local:8080"
    )
    assert found["cluster"].text == "outbound|8080||catalog.catalog.svc.cluster.local"
    assert found["endpoint"].text.startswith(f"{FAR}:8080 (pod catalog.catalog) from {POD}:50000")
    assert found["far-pod"].place == "catalog.catalog"
    assert "captured to 15006" in found["far-pod"].text


def test_each_step_names_its_sources() -> None:
    found = told(FACTS)
    assert {step: sources(found[step]) for step in STEPS[1:8]} == {
        "vip": {"socket", "manifests"},
        "iptables": {"nftrace", "conntrack"},
        "virtualOutbound": {"conntrack", "config_dump"},
        "original-destination": {"conntrack", "access-log", "config_dump"},
        "route": {"access-log", "config_dump"},
        "cluster": {"access-log", "config_dump"},
        "endpoint": {"access-log", "config_dump", "manifests"},
    }
    assert {"nftrace", "conntrack", "access-log"} <= sources(found["far-pod"])
    assert all(h.details for h in found.values() if h.happened)


def test_every_rule_that_matched_is_told_in_order_and_then_the_connection() -> None:
    assert [d.text for d in told(FACTS)["iptables"].details] == [
        "output: legacy nat OUTPUT 1: -A OUTPUT -j ISTIO_REDIRECT",
        "output: legacy nat ISTIO_REDIRECT 1: -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
        f"tcp {POD}:40000 -> {VIP}:8080, answers come from 127.0.0.1:15001; zone 0; new",
    ]


def test_the_second_way_over_lo_is_followed() -> None:
    again = packet(replace(APP, dst="127.0.0.1", dport=15001), "prerouting", step("ISTIO_IN_REDIRECT", "prerouting"))
    again.number = 9
    course = sighting([*CAUGHT.packets, again], CAUGHT.conntrack)
    found = told(FACTS, More(NAMES, course=course))["iptables"]
    assert [d.text.split(":")[0] for d in found.details] == ["output", "output", "prerouting", f"tcp {POD}"]


def test_a_pooled_connection_is_called_one() -> None:
    older, newer = packet(UPSTREAM, "output"), packet(APP, "output", *CAUGHT.packets[0].steps)
    newer.number = 2
    facts = replace(FACTS, upstream=sighting([older], []), outbound=sighting([newer], CAUGHT.conntrack))
    assert any("of the pool" in d.text for d in told(facts)["endpoint"].details)
    older.number = 3
    assert not any("of the pool" in d.text for d in told(facts)["endpoint"].details)


def test_without_capture_no_envoy_is_met_and_the_rule_says_why() -> None:
    passed = sighting([packet(APP, "output", step("OUTPUT", "output", 2))], [entry(APP, (VIP, 8080))])
    facts = replace(FACTS, outbound=passed, line=None, upstream=None)
    found = told(facts)
    assert found["iptables"].text == "not captured by legacy nat OUTPUT 2: -A OUTPUT -d 10.0.0.0/8 -j RETURN"
    for name in STEPS[3:8]:
        assert not found[name].happened
        assert found[name].text.endswith("-A OUTPUT -d 10.0.0.0/8 -j RETURN let the packet go")
        assert found[name].details == ()
    text = list(hops.lines(list(found.values())))
    assert [line for line in text if line.startswith("4-8.")] == [
        f"4-8. virtualOutbound to endpoint -  {found['route'].text}"
    ]


def test_a_black_hole_has_a_cluster_and_no_endpoint() -> None:
    line = replace(
        CLIENT, kind="tcp", route_config=None, virtual_host=None, route_name=None, cluster="BlackHoleCluster",
        endpoint=None, upstream_local=None, flags="UH", details=None,
    )  # fmt: skip
    found = told(
        replace(
            FACTS,
            line=line,
            upstream=None,
            far=None,
            wire=[],
            sent=replace(FACTS.sent, result="closed", status=None, body=None),
        )
    )
    assert found["cluster"].text == "BlackHoleCluster, flags UH (no healthy upstream)"
    assert (found["route"].happened, found["route"].text) == (
        False,
        "no HTTP: the filter chain itself names the cluster",
    )
    assert (found["endpoint"].happened, found["endpoint"].text) == (
        False,
        "the cluster gave none, flags UH (no healthy upstream)",
    )
    assert not found["far-pod"].happened
    assert found["wire"].text == "nothing of it left frontend.frontend"
    assert found["outcome"].text == "closed"


def test_an_answer_of_envoy_itself_has_no_cluster() -> None:
    line = replace(
        CLIENT,
        virtual_host="block_all",
        route_name="block_all",
        cluster=None,
        endpoint=None,
        upstream_local=None,
        code=502,
    )
    found = told(replace(FACTS, line=line, upstream=None, far=None))
    assert (found["cluster"].happened, found["cluster"].text) == (False, "none: Envoy answers 502 itself")
    assert (found["endpoint"].happened, found["endpoint"].text) == (False, "no cluster, no endpoint")


def test_a_name_that_is_not_resolved_ends_the_flow_there() -> None:
    query = Query("nowhere.example.", "A", "udp", QUERY.dst, 53, QUERY.src, QUERY.sport, "NXDOMAIN")
    sent = Sent("unreachable", error="nowhere.example was not resolved: NXDOMAIN", queries=[query])
    found = told(replace(FACTS, sent=sent, outbound=None, line=None, upstream=None, far=None, wire=[]))
    assert found["lookup"].text == "A nowhere.example.: NXDOMAIN, captured to 15053, answered by agent"
    assert [s for s in STEPS if found[s].happened] == ["lookup"]
    assert found["vip"].text == "nowhere.example was not resolved: NXDOMAIN"


def test_an_address_is_not_looked_up() -> None:
    test = replace(FACTS.test, to=replace(FACTS.test.to, host=VIP))
    found = told(replace(FACTS, test=test, sent=replace(FACTS.sent, queries=[])))
    assert (found["lookup"].happened, found["lookup"].text) == (False, "an address, nothing to look up")


def test_a_place_that_nobody_watches_says_so() -> None:
    found = told(replace(FACTS, outbound=None, observed=False, line=None))
    assert (found["iptables"].happened, found["iptables"].text) == (False, "nobody watches the kernel of this place")
    assert found["route"].text == "what netfilter did was not seen"


def test_no_table_is_not_a_rule() -> None:
    bare = sighting([packet(APP, "output")], [])
    found = told(replace(FACTS, outbound=bare, listing=Listing(), line=None))
    assert found["iptables"].text == "not captured: no rule was asked"
    assert [d.text for d in found["iptables"].details] == ["output: no table reports anything of it"]


def test_a_policy_decides_where_no_rule_does() -> None:
    listing = Listing(
        iptables={
            ("legacy", "ipv4", n): t for n, t in parse_iptables_save("*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n").items()
        }
    )
    seen = sighting([packet(APP, "output", step("OUTPUT", "output"))], [entry(APP, (VIP, 8080))])
    seen.packets[0].steps[0] = replace(seen.packets[0].steps[0], kind="policy")
    found = told(replace(FACTS, outbound=seen, listing=listing, line=None))["iptables"]
    assert found.text == "not captured by legacy nat OUTPUT: -P OUTPUT ACCEPT"
    assert found.details[0].text == "output: legacy nat OUTPUT: -P OUTPUT ACCEPT"


def test_tls_that_the_app_ends_itself_is_told() -> None:
    tls = {"version": "TLSv1.3", "sni": "two.example", "alpn": None, "peer_san": None}
    body = {"pod": "unknown", "peer": {"address": POD, "port": 50000}, "tls": tls}
    found = told(replace(FACTS, far=None, sent=replace(FACTS.sent, body=body)))["far-pod"]
    assert (found.place, found.text) == ("unknown", f"answers; it sees {POD}:50000 as its peer")
    assert [d.text for d in found.details] == [
        f"unknown sees {POD}:50000 as its peer",
        "TLSv1.3, SNI two.example, ALPN none, no client certificate",
    ]


def test_json_of_a_hop() -> None:
    hop = told(FACTS)["cluster"].to_json()
    assert (hop["number"], hop["step"], hop["place"], hop["happened"]) == (7, "cluster", "frontend.frontend", True)
    assert hop["evidence"] == ["access-log", "config_dump"]
    assert {"text", "source"} == set(hop["details"][0])


def test_a_listing_of_hops_names_the_source_of_each_line() -> None:
    text = list(hops.lines(list(told(FACTS).values())))
    assert text[0].startswith("1.   lookup               frontend.frontend: A ")
    details = [line for line in text if line.startswith("       ")]
    assert details
    assert all(line.lstrip().startswith("[") for line in details)


# --- what a proxy's configuration adds -------------------------------------------------------

POOLS = from_files(load(["topologies/connection-pools.yaml"]), "busy.clients", "all")


def test_a_destination_rule_and_its_settings() -> None:
    rule, settings = proxy_view.destination_rule(POOLS, "outbound|8080||server.plain.svc.cluster.local")
    assert rule == "DestinationRule server.clients"
    assert "max_connections 1, max_pending_requests 1" in settings
    assert "no outlier detection" in settings
    (_, single) = proxy_view.destination_rule(POOLS, "outbound|8080||single.plain.svc.cluster.local")
    assert "1 requests per connection" in single


def test_a_cluster_without_one_has_the_defaults() -> None:
    rule, settings = proxy_view.destination_rule(CONFIG, "outbound|8080||catalog.catalog.svc.cluster.local")
    assert rule == "no DestinationRule; the mesh's defaults:"
    assert settings.startswith(
        "connect timeout 10s; no connection pool limits; no outlier detection; TLS for tlsMode-istio"
    )


def test_the_listener_on_a_port_is_the_one_that_binds_it() -> None:
    found = proxy_view.listener_on(CONFIG, 15001)
    assert found is not None
    assert found["name"] == "virtualOutbound"
    assert proxy_view.listener_on(CONFIG, 8080) is None, "0.0.0.0_8080 has no socket of its own"


@pytest.mark.parametrize(
    "view", [proxy_view.listener, proxy_view.route, proxy_view.cluster, proxy_view.destination_rule]
)
def test_what_is_not_configured_any_more_is_not_shown(view: object) -> None:
    names = {proxy_view.listener: 2, proxy_view.route: 3}.get(view, 1)  # type: ignore[call-overload]
    assert list(view(CONFIG, *["gone"] * names)) == []  # type: ignore[operator]
