"""Who sees what: discoverySelectors, exportTo, Sidecar hosts of every form, DestinationRule look-up."""

from __future__ import annotations

import pytest
from mesh_text import (
    CLIENT,
    SERVER,
    S,
    istio,
    mesh_config,
    namespace,
    of,
    out,
    outbound,
    pod,
    service,
)

B = namespace("b") + service("one", "b", "[{name: http, port: 80}]") + service("two", "b", "[{name: http, port: 80}]")
C = namespace("c") + service("one", "c", "[{name: http, port: 80}]")
OWN = service("own", "a", "[{name: http, port: 80}]")
ENTRIES = istio(
    "ServiceEntry",
    "e",
    "b",
    "hosts: [x.example, '*.wild.example']\nresolution: NONE\nports: [{number: 80, name: http, protocol: HTTP}]",
)
ALL = {f"80 own.a{S}", f"80 one.b{S}", f"80 two.b{S}", f"80 one.c{S}", "80 x.example", "80 *.wild.example"}


def sidecar(hosts: str, ns: str = "a", name: str = "s", more: str = "", created: str = "") -> str:
    return istio("Sidecar", name, ns, f"egress: [{{hosts: {hosts}}}]\n{more}", created=created)


def seen(*parts: str) -> set[str]:
    return outbound(of(CLIENT, OWN, B, C, ENTRIES, *parts))


# --- Sidecar hosts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("['*/*']", ALL),
        ("['./*']", {f"80 own.a{S}"}),
        ("['b/*']", {f"80 one.b{S}", f"80 two.b{S}", "80 x.example", "80 *.wild.example"}),
        (f"['b/one.b{S}']", {f"80 one.b{S}"}),
        ("['*/*.svc.cluster.local']", ALL - {"80 x.example", "80 *.wild.example"}),
        (f"['*/one.b{S}']", {f"80 one.b{S}"}),
        ("['b/one']", set()),
        ("['~/*']", set()),
        ("['*/*', '~/*']", set()),
        ("['*/*', '~b/*']", {f"80 own.a{S}", f"80 one.c{S}"}),
        (f"['*/*', '~/one.b{S}']", ALL - {f"80 one.b{S}"}),
        (f"['*/*', '~c/one.b{S}']", ALL),
        ("['./*', '~./*']", set()),
        ("['b/a.wild.example']", set()),
        ("['b/*.wild.example']", {"80 *.wild.example"}),
        ("['b/*.example']", {"80 x.example", "80 *.wild.example"}),
        ("['b/*.x.example']", set()),
        ("['zzz/*']", set()),
    ],
)
def test_host_forms(hosts: str, expected: set[str]) -> None:
    assert seen(sidecar(hosts)) == expected


def test_precedence_of_sidecars() -> None:
    selector = "workloadSelector: {labels: {app: client}}"
    own = sidecar("['./*']", name="wide")
    selected = sidecar("['c/*']", name="selected", more=selector)
    root = sidecar("['b/*']", "istio-system", "root")
    assert seen(own, root) == {f"80 own.a{S}"}
    assert seen(own, selected, root) == {f"80 one.c{S}"}
    assert f"80 two.b{S}" in seen(root)
    other = sidecar("['c/*']", name="other", more="workloadSelector: {labels: {app: zzz}}")
    assert f"80 two.b{S}" in seen(other, root)
    assert seen(sidecar("['c/*']", "istio-system", "picky", more=selector)) == ALL


def test_of_equal_sidecars_the_oldest_wins() -> None:
    old = sidecar("['./*']", name="zz", created="2020-01-01T00:00:00Z")
    new = sidecar("['c/*']", name="aa", created="2021-01-01T00:00:00Z")
    assert seen(new, old) == {f"80 own.a{S}"}


def test_sidecar_without_egress_imports_everything() -> None:
    assert seen(istio("Sidecar", "s", "a", "outboundTrafficPolicy: {mode: REGISTRY_ONLY}")) == ALL


def test_root_sidecar_means_the_proxys_own_namespace_by_dot() -> None:
    assert seen(sidecar("['./*']", "istio-system")) == {f"80 own.a{S}"}


def test_one_namespace_per_host() -> None:
    def entry(ns: str) -> str:
        return istio(
            "ServiceEntry",
            "same",
            ns,
            "hosts: [same.example]\nresolution: STATIC\nports: [{number: 80, name: http, protocol: HTTP}]\n"
            f"endpoints: [{{address: 192.0.2.{ord(ns)}}}]",
        )

    def address(*parts: str) -> str:
        groups = of(CLIENT, B, C, *parts).endpoints[out(80, "same.example")].endpoints
        return str(groups[0].lb_endpoints[0].endpoint.address.socket_address.address)

    assert address(entry("c"), entry("a")) == "192.0.2.97"
    assert address(entry("c"), entry("b")) == "192.0.2.98"


def test_kubernetes_service_displaces_an_entry_of_its_name() -> None:
    entry = istio(
        "ServiceEntry",
        "squatter",
        "c",
        f"hosts: [one.b{S}]\nresolution: STATIC\nports: [{{number: 80, name: http, protocol: HTTP}}]\n"
        "endpoints: [{address: 192.0.2.9}]",
        created="2001-01-01T00:00:00Z",
    )
    resources = of(CLIENT, B, C, entry)
    assert not resources.endpoints[out(80, f"one.b{S}")].endpoints
    assert resources.name_table.table[f"one.b{S}"].registry == "Kubernetes"


# --- exportTo -----------------------------------------------------------------------------------------


def exported(value: str) -> str:
    return service("x", "b", "[{name: http, port: 80}]").replace(
        "namespace: b}", f"namespace: b, annotations: {{networking.istio.io/exportTo: '{value}'}}}}"
    )


@pytest.mark.parametrize(
    ("value", "visible"),
    [("*", True), (".", False), ("~", False), ("a", True), ("c, a", True), ("c", False), ("c,*", True), ("a,~", False)],
)
def test_service_export_to(value: str, visible: bool) -> None:
    assert (f"80 x.b{S}" in outbound(of(CLIENT, B, exported(value)))) == visible


def test_mesh_default_for_services() -> None:
    private = mesh_config("defaultServiceExportTo: ['.']")
    assert seen(private) == {f"80 own.a{S}"}
    assert f"80 x.b{S}" in outbound(of(CLIENT, B, private, exported("a")))


def test_private_and_public_are_combined_by_and_with_the_sidecar() -> None:
    assert f"80 x.b{S}" not in outbound(of(CLIENT, B, exported("."), sidecar("['b/*']")))


# --- discoverySelectors -----------------------------------------------------------------------------------


def selectors(text: str) -> str:
    return mesh_config(f"discoverySelectors: {text}")


def test_unselected_namespace_does_not_exist() -> None:
    text = selectors("[{matchLabels: {kubernetes.io/metadata.name: a}}, {matchLabels: {team: c}}]")
    c = C.replace("labels: {istio-injection: enabled}", "labels: {team: c}")
    assert outbound(of(CLIENT, OWN, B, c, ENTRIES, text)) == {f"80 own.a{S}", f"80 one.c{S}"}


def test_unselected_root_namespace_loses_its_policies() -> None:
    root = sidecar("['./*']", "istio-system")
    text = selectors(
        "[{matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [istio-system]}]}]"
    )
    assert outbound(of(CLIENT, OWN, B, root)) == {f"80 own.a{S}"}
    assert len(outbound(of(CLIENT, OWN, B, root, text))) == 3


def test_proxy_of_an_unselected_namespace_has_nothing_of_its_own() -> None:
    text = selectors("[{matchLabels: {kubernetes.io/metadata.name: b}}]")
    mine = service("client", "a", "[{name: http, port: 80, targetPort: 8080}]")
    resources = of(CLIENT, mine, B, text)
    assert outbound(resources) == {f"80 one.b{S}", f"80 two.b{S}"}
    assert "inbound|8080||" not in resources.clusters


# --- VirtualServices widen clusters -------------------------------------------------------------------------


def test_virtual_service_destinations() -> None:
    vs = istio(
        "VirtualService",
        "v",
        "a",
        f"hosts: [own.a{S}]\nhttp:\n- match: [{{sourceNamespace: zzz}}]\n  route: [{{destination: {{host: one.c{S}}}}}]\n"
        f"- route: [{{destination: {{host: one.b{S}, port: {{number: 80}}}}}}]\n  mirrors: [{{destination: {{host: x.example}}}}]",
    )
    found = of(CLIENT, OWN, B, C, ENTRIES, vs, sidecar("['./*']"))
    assert outbound(found) == {f"80 own.a{S}", f"80 one.b{S}", "80 x.example"}
    assert [v.name for v in found.routes["80"].virtual_hosts] == [f"own.a{S}:80", "allow_any"]


def test_destination_of_two_foreign_namespaces_is_the_kubernetes_service() -> None:
    host = f"server.b{S}"
    entry = istio(
        "ServiceEntry",
        "e",
        "c",
        f"hosts: [{host}]\nresolution: STATIC\nports: [{{number: 8080, name: http, protocol: HTTP}}]\nendpoints: [{{address: 192.0.2.1}}]",
    )
    web = service("server", "b", "[{name: http, port: 8080}]", vip="10.96.0.9", created="2024-01-01T00:00:00Z")
    scope = istio("Sidecar", "s", "a", "egress: [{hosts: ['./*']}]")
    to = istio(
        "VirtualService", "v", "a", f"hosts: [x.example]\nhttp: [{{route: [{{destination: {{host: {host}}}}}]}}]"
    )
    resources = of(CLIENT, SERVER, namespace("c"), web, entry, scope, to)
    (group,) = resources.endpoints[out(8080, host)].endpoints
    assert [e.endpoint.address.socket_address.address for e in group.lb_endpoints] == ["10.2.0.1"]


def test_only_the_named_ports_are_added() -> None:
    many = service("many", "b", "[{name: http, port: 80}, {name: http2, port: 81}]")
    vs = istio(
        "VirtualService",
        "v",
        "a",
        f"hosts: [own.a{S}]\nhttp: [{{route: [{{destination: {{host: many.b{S}, port: {{number: 81}}}}}}]}}]",
    )
    assert outbound(of(CLIENT, OWN, namespace("b"), many, vs, sidecar("['./*']"))) == {f"80 own.a{S}", f"81 many.b{S}"}


# --- DestinationRules --------------------------------------------------------------------------------------------


def rule(
    ns: str, connections: int, *, host: str = f"one.b{S}", export: str = "", name: str = "d", created: str = ""
) -> str:
    more = f"\nexportTo: {export}" if export else ""
    return istio(
        "DestinationRule",
        f"{name}-{connections}",
        ns,
        f"host: '{host}'\ntrafficPolicy: {{connectionPool: {{tcp: {{maxConnections: {connections}}}}}}}{more}",
        created=created,
    )


def connections(*parts: str, client: str = CLIENT, pod_name: str = "client.a") -> int:
    found = of(client, B, C, *parts, pod_name=pod_name).clusters[out(80, f"one.b{S}")]
    value = int(found.circuit_breakers.thresholds[0].max_connections.value)
    return 0 if value == 4294967295 else value


def test_order_client_service_root() -> None:
    root, owner, own = rule("istio-system", 1), rule("b", 2), rule("a", 3)
    assert connections(root) == 1
    assert connections(root, owner) == 2
    assert connections(root, owner, own) == 3


def test_wildcard_of_the_client_hides_the_owners_exact_rule() -> None:
    assert connections(rule("b", 2), rule("a", 3, host="*.local")) == 3


def test_most_specific_host_within_a_namespace() -> None:
    assert connections(rule("b", 2, host="*.local"), rule("b", 3, host=f"*.b{S}"), rule("b", 4)) == 4
    assert connections(rule("b", 2, host="*.local"), rule("b", 3, host=f"*.b{S}")) == 3


@pytest.mark.parametrize(("export", "seen_here"), [("['.']", False), ("['*']", True), ("[a]", True), ("[c]", False)])
def test_export_of_the_owners_rule(export: str, seen_here: bool) -> None:
    assert connections(rule("b", 2, export=export)) == (2 if seen_here else 0)


def test_unexported_exact_rule_hides_the_exported_wildcard() -> None:
    assert connections(rule("b", 2, export="[c]"), rule("b", 3, host=f"*.b{S}"), rule("istio-system", 4)) == 4


def test_rules_of_other_namespaces_are_never_seen() -> None:
    assert connections(rule("c", 5)) == 0


def test_proxies_of_the_root_namespace_use_what_is_private_to_it() -> None:
    client = namespace("istio-system") + pod("gate", "istio-system", "10.9.0.1")
    public, private = rule("istio-system", 1), rule("istio-system", 2, export="['.']")
    assert connections(rule("b", 3), public, client=client, pod_name="gate.istio-system") == 3
    assert connections(rule("b", 3), private, client=client, pod_name="gate.istio-system") == 2


def test_short_host_is_of_the_rules_namespace() -> None:
    assert connections(rule("b", 6, host="one")) == 6
    assert connections(rule("a", 6, host="one")) == 0


def test_rules_of_one_host_are_merged() -> None:
    old = istio(
        "DestinationRule",
        "old",
        "b",
        f"host: one.b{S}\ntrafficPolicy: {{connectionPool: {{tcp: {{maxConnections: 7}}}}}}\nsubsets: [{{name: v1, labels: {{v: '1'}}}}]",
        created="2020-01-01T00:00:00Z",
    )
    new = istio(
        "DestinationRule",
        "new",
        "b",
        f"host: one.b{S}\ntrafficPolicy: {{connectionPool: {{tcp: {{maxConnections: 8}}}}}}\n"
        "subsets: [{name: v1, labels: {v: '9'}}, {name: v2, labels: {v: '2'}}]",
        created="2021-01-01T00:00:00Z",
    )
    resources = of(CLIENT, B, C, new, old)
    assert connections(new, old) == 7
    assert {n.split("|")[2] for n in resources.clusters if n.endswith(f"|one.b{S}")} == {"", "v1", "v2"}
