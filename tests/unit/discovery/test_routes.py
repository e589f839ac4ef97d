"""VirtualServices as Envoy routes, and who owns which domain."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.extensions.filters.http.cors.v3 import cors_pb2
from envoy.extensions.filters.http.fault.v3 import fault_pb2
from mesh_text import CLIENT, SERVER, S, hcm, hosts_of, istio, mesh_config, namespace, of, out, plain, service

HOST = f"server.b{S}"
WEB = service("server", "b", "[{name: http, port: 8080}]", vip="10.96.0.9")


def virtual_service(spec: str, name: str = "v", ns: str = "a", created: str = "") -> str:
    return istio("VirtualService", name, ns, spec, created=created)


def routes(*parts: str, route: str = "8080", host: str = f"{HOST}:8080") -> list[Any]:
    found = {v.name: v for v in of(CLIENT, SERVER, WEB, *parts).routes[route].virtual_hosts}
    return [plain(r) for r in found[host].routes]


def rule(http: str) -> list[Any]:
    return routes(virtual_service(f"hosts: [{HOST}]\nhttp:\n{http}"))


TO_SERVER = f"route: [{{destination: {{host: {HOST}}}}}]"


def test_match_pieces() -> None:
    (route, _) = rule(
        "- name: r\n  match:\n"
        "  - {name: m, uri: {prefix: /api}, ignoreUriCase: true, method: {exact: GET}, authority: {prefix: server},\n"
        "     scheme: {exact: http}, headers: {b: {regex: 'x.*'}, a: {}}, withoutHeaders: {z: {exact: q}, y: {}},\n"
        "     queryParams: {q: {exact: '1'}}}\n"
        f"  {TO_SERVER}\n- {TO_SERVER}"
    )
    assert route["name"] == "r.m"
    assert route["match"] == {
        "prefix": "/api",
        "case_sensitive": False,
        "headers": [
            {"name": "a", "present_match": True},
            {"name": "b", "string_match": {"safe_regex": {"regex": "x.*"}}},
            {"name": "y", "present_match": True, "invert_match": True},
            {
                "name": "z",
                "string_match": {"exact": "q"},
                "invert_match": True,
                "treat_missing_header_as_empty": True,
            },
            {"name": ":method", "string_match": {"exact": "GET"}},
            {"name": ":authority", "string_match": {"prefix": "server"}},
            {"name": ":scheme", "string_match": {"exact": "http"}},
        ],
        "query_parameters": [{"name": "q", "string_match": {"exact": "1"}}],
    }
    assert route["metadata"]["filter_metadata"]["istio"]["config"] == (
        "/apis/networking.istio.io/v1/namespaces/a/virtual-service/v"
    )
    assert route["decorator"]["operation"] == f"{HOST}:8080/api*"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("{exact: /x}", {"path": "/x"}),
        ("{prefix: /x}", {"prefix": "/x"}),
        ("{regex: '/x[0-9]'}", {"safe_regex": {"regex": "/x[0-9]"}}),
    ],
)
def test_uri_kinds(uri: str, expected: dict[str, Any]) -> None:
    (route,) = rule(f"- match: [{{uri: {uri}}}]\n  {TO_SERVER}")
    assert route["match"] == {**expected, "case_sensitive": True}


def test_generation_stops_after_the_first_catch_all() -> None:
    assert len(rule(f"- {TO_SERVER}\n- match: [{{uri: {{prefix: /never}}}}]\n  {TO_SERVER}")) == 1
    assert len(rule(f"- match: [{{uri: {{prefix: /}}}}]\n  {TO_SERVER}\n- {TO_SERVER}")) == 1


def test_one_route_per_match() -> None:
    found = rule(f"- match: [{{uri: {{exact: /a}}}}, {{uri: {{exact: /b}}}}]\n  {TO_SERVER}\n- {TO_SERVER}")
    assert [r["match"].get("path") for r in found] == ["/a", "/b", None]


def test_static_parts_are_decided_here() -> None:
    found = rule(
        f"- match: [{{sourceLabels: {{app: other}}}}]\n  name: labels\n  {TO_SERVER}\n"
        f"- match: [{{sourceNamespace: zzz}}]\n  name: namespace\n  {TO_SERVER}\n"
        f"- match: [{{port: 9}}]\n  name: port\n  {TO_SERVER}\n"
        f"- match: [{{gateways: [some/gateway]}}]\n  name: gateway\n  {TO_SERVER}\n"
        f"- match: [{{sourceLabels: {{app: client}}, sourceNamespace: a, port: 8080, uri: {{prefix: /mine}}}}]\n"
        f"  name: mine\n  {TO_SERVER}\n- name: rest\n  {TO_SERVER}"
    )
    assert [r["name"] for r in found] == ["mine", "rest"]


def test_a_match_that_names_mesh_asks_nothing_of_the_source() -> None:
    found = rule(
        f"- match: [{{gateways: [mesh], sourceLabels: {{app: other}}, sourceNamespace: zzz}}]\n  name: all\n  {TO_SERVER}\n"
    )
    assert [r["name"] for r in found] == ["all"]


def test_regex_of_everything_ends_the_generation() -> None:
    found = rule(f"- match: [{{uri: {{regex: '.*'}}}}]\n  name: all\n  {TO_SERVER}\n- name: rest\n  {TO_SERVER}")
    assert [r["name"] for r in found] == ["all"]


def test_destination_without_port_is_of_the_listeners_port() -> None:
    other = service("other", "b", "[{name: http, port: 9090}]", vip="10.96.0.8")
    both = f"[{{destination: {{host: other.b{S}}}, weight: 1}}, {{destination: {{host: {HOST}}}, weight: 1}}]"
    text = (
        f"- match: [{{uri: {{prefix: /one}}}}]\n  mirror: {{host: other.b{S}}}\n  route: [{{destination: {{host: other.b{S}}}}}]\n"
        f"- match: [{{uri: {{prefix: /two}}}}]\n  route: [{{destination: {{host: other.b{S}, port: {{number: 9090}}}}}}]\n"
        f"- route: {both}\n"
    )
    one, two, three = routes(other, virtual_service(f"hosts: [{HOST}]\nhttp:\n{text}"))
    assert one["route"]["cluster"] == out(8080, f"other.b{S}")
    assert one["route"]["request_mirror_policies"][0]["cluster"] == out(8080, f"other.b{S}")
    assert two["route"]["cluster"] == out(9090, f"other.b{S}")
    assert [c["name"] for c in three["route"]["weighted_clusters"]["clusters"]] == [
        out(8080, f"other.b{S}"),
        out(8080, HOST),
    ]


def test_rule_for_nobody_here_leaves_the_default_route() -> None:
    (route,) = rule(f"- match: [{{sourceNamespace: zzz}}]\n  {TO_SERVER}")
    assert route["name"] == "default"


def test_weights_and_their_headers() -> None:
    (route,) = rule(
        "- route:\n"
        f"  - {{destination: {{host: {HOST}, subset: v1}}, weight: 90, headers: {{request: {{set: {{x: '1'}}}}}}}}\n"
        f"  - {{destination: {{host: {HOST}, port: {{number: 9}}}}, weight: 10}}\n"
        f"  - {{destination: {{host: {HOST}}}, weight: 0}}"
    )
    clusters = route["route"]["weighted_clusters"]["clusters"]
    assert [(c["name"], c["weight"]) for c in clusters] == [(out(8080, HOST, "v1"), 90), (out(9, HOST), 10)]
    assert clusters[0]["request_headers_to_add"] == [
        {"header": {"key": "x", "value": "1"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    ]


def test_timeout_is_off_unless_written() -> None:
    assert rule(f"- {TO_SERVER}")[0]["route"]["timeout"] == "0s"
    action = rule(f"- timeout: 2.5s\n  {TO_SERVER}")[0]["route"]
    assert (action["timeout"], action["max_grpc_timeout"]) == ("2.500s", "2.500s")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{attempts: 0}", None),
        ("{attempts: 3}", {"num_retries": 3}),
        (
            "{attempts: 1, retryOn: '503,reset'}",
            {"retry_on": "reset,retriable-status-codes", "retriable_status_codes": [503], "num_retries": 1},
        ),
        ("{attempts: 1, perTryTimeout: 2s}", {"per_try_timeout": "2s"}),
        ("{attempts: 1, backoff: 40ms}", {"retry_back_off": {"base_interval": "0.040s"}}),
        ("{attempts: 1, retryIgnorePreviousHosts: false}", {"retry_host_predicate": None}),
    ],
)
def test_retries(written: str, expected: dict[str, Any] | None) -> None:
    policy = rule(f"- retries: {written}\n  {TO_SERVER}")[0]["route"].get("retry_policy")
    if expected is None:
        assert policy is None
        return
    for key, value in expected.items():
        assert policy.get(key) == value, key


def test_default_retries_of_the_mesh() -> None:
    off = mesh_config("defaultHttpRetryPolicy: {attempts: 0}")
    assert "retry_policy" not in routes(off)[0]["route"]
    some = mesh_config("defaultHttpRetryPolicy: {attempts: 7}")
    assert routes(some)[0]["route"]["retry_policy"]["num_retries"] == 7
    own = virtual_service(f"hosts: [{HOST}]\nhttp: [{{retries: {{attempts: 1}}, {TO_SERVER}}}]")
    assert routes(some, own)[0]["route"]["retry_policy"]["num_retries"] == 1
    unwritten = virtual_service(f"hosts: [{HOST}]\nhttp: [{{{TO_SERVER}}}]")
    assert routes(some, unwritten)[0]["route"]["retry_policy"]["num_retries"] == 7


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {"retry_on": "reset-before-request", "num_retries": 2}),
        ("{attempts: 0}", None),
        (
            "{attempts: 3, retryOn: '503'}",
            {"retry_on": "retriable-status-codes", "retriable_status_codes": [503], "num_retries": 3},
        ),
    ],
)
def test_inbound_retries_of_the_mesh(written: str, expected: dict[str, Any] | None) -> None:
    mesh = mesh_config(f"defaultInboundHttpRetryPolicy: {written}") if written else ""
    listener = of(CLIENT, SERVER, WEB, mesh, pod_name="server.b").listeners["virtualInbound"]
    route = plain(hcm(listener.filter_chains[-1]).route_config.virtual_hosts[0].routes[0])["route"]
    assert route.get("retry_policy") == expected


def test_rewrite_and_authority() -> None:
    action = rule(f"- match: [{{uri: {{prefix: /a}}}}]\n  rewrite: {{uri: /b, authority: x.example}}\n  {TO_SERVER}")[
        0
    ]["route"]
    assert (action["prefix_rewrite"], action["host_rewrite_literal"]) == ("/b", "x.example")
    regex = rule(f"- rewrite: {{uriRegexRewrite: {{match: '^/a', rewrite: /b}}}}\n  {TO_SERVER}")[0]["route"]
    assert regex["regex_rewrite"] == {"pattern": {"regex": "^/a"}, "substitution": "/b"}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{uri: /new}", {"path_redirect": "/new"}),
        ("{authority: x.example, port: 80}", {"host_redirect": "x.example", "path_redirect": ""}),
        ("{scheme: https, port: 443}", {"scheme_redirect": "https", "path_redirect": ""}),
        (
            "{scheme: https, port: 8443, redirectCode: 308}",
            {"port_redirect": 8443, "response_code": "PERMANENT_REDIRECT"},
        ),
        ("{derivePort: FROM_REQUEST_PORT}", {"port_redirect": 8080}),
    ],
)
def test_redirect(written: str, expected: dict[str, Any]) -> None:
    redirect = rule(f"- redirect: {written}")[0]["redirect"]
    for key, value in expected.items():
        assert redirect.get(key) == value, key
    if "port_redirect" not in expected:
        assert "port_redirect" not in redirect


def test_direct_response() -> None:
    assert rule("- directResponse: {status: 418, body: {string: short}}")[0]["direct_response"] == {
        "status": 418,
        "body": {"inline_string": "short"},
    }


def test_fault() -> None:
    (route,) = rule(
        "- fault: {delay: {percentage: {value: 50}, fixedDelay: 2s}, abort: {percentage: {value: 0.5}, httpStatus: 418}}\n"
        f"  {TO_SERVER}"
    )
    packed = route["typed_per_filter_config"]["envoy.filters.http.fault"]
    assert packed["delay"] == {"fixed_delay": "2s", "percentage": {"numerator": 500000, "denominator": "MILLION"}}
    assert packed["abort"] == {"http_status": 418, "percentage": {"numerator": 5000, "denominator": "MILLION"}}
    assert fault_pb2.HTTPFault.DESCRIPTOR.full_name in packed["@type"]


def test_an_abort_without_status_aborts_nothing() -> None:
    (route,) = rule(f"- fault: {{abort: {{percentage: {{value: 50}}}}}}\n  {TO_SERVER}")
    assert "typed_per_filter_config" not in route


def test_cors() -> None:
    (route,) = rule(
        "- corsPolicy: {allowOrigins: [{exact: 'https://a.example'}, {regex: '.*'}], allowMethods: [GET, PUT], "
        f"allowHeaders: [x], exposeHeaders: [x-seen], maxAge: 1h, allowCredentials: true}}\n  {TO_SERVER}"
    )
    policy = route["typed_per_filter_config"]["envoy.filters.http.cors"]
    assert policy["allow_origin_string_match"] == [{"exact": "https://a.example"}, {"safe_regex": {"regex": ".*"}}]
    assert (policy["allow_methods"], policy["max_age"], policy["allow_credentials"]) == ("GET,PUT", "3600", True)
    assert cors_pb2.CorsPolicy.DESCRIPTOR.full_name in policy["@type"]


def test_mirrors() -> None:
    action = rule(
        f"- mirrors: [{{destination: {{host: {HOST}}}}}, {{destination: {{host: {HOST}}}, percentage: {{value: 0}}}}]\n  {TO_SERVER}"
    )[0]["route"]
    assert [
        (m["cluster"], m["runtime_fraction"]["default_value"]["numerator"], m["disable_shadow_host_suffix_append"])
        for m in action["request_mirror_policies"]
    ] == [(out(8080, HOST), 100, True)]
    one = rule(f"- mirror: {{host: {HOST}, port: {{number: 9}}}}\n  mirrorPercentage: {{value: 12.5}}\n  {TO_SERVER}")
    (policy,) = one[0]["route"]["request_mirror_policies"]
    fraction = policy["runtime_fraction"]["default_value"]
    assert (policy["cluster"], fraction) == (out(9, HOST), {"numerator": 125000, "denominator": "MILLION"})


def test_header_operations() -> None:
    (route,) = rule(
        "- headers: {request: {set: {b: '1', host: other.example}, add: {a: '2'}, remove: [c]}, "
        f"response: {{remove: [server]}}}}\n  {TO_SERVER}"
    )
    assert [
        (h["header"]["key"], h.get("append_action", "APPEND_IF_EXISTS_OR_ADD")) for h in route["request_headers_to_add"]
    ] == [
        ("b", "OVERWRITE_IF_EXISTS_OR_ADD"),
        ("a", "APPEND_IF_EXISTS_OR_ADD"),
    ]
    assert route["request_headers_to_remove"] == ["c"]
    assert route["response_headers_to_remove"] == ["server"]
    assert route["route"]["host_rewrite_literal"] == "other.example"


HASHED = istio(
    "DestinationRule",
    "d",
    "a",
    f"host: {HOST}\ntrafficPolicy: {{loadBalancer: {{consistentHash: {{httpHeaderName: x-user}}}}}}\n"
    "subsets:\n- {name: v1, labels: {version: v1}, trafficPolicy: {loadBalancer: {consistentHash: {httpCookie: {name: c, path: /, ttl: 5s}}}}}",
)


def test_hash_policy_of_the_default_route_and_of_subsets() -> None:
    (default,) = routes(HASHED)
    assert default["route"]["hash_policy"] == [{"header": {"header_name": "x-user"}}]
    subset = routes(
        HASHED,
        virtual_service(f"hosts: [{HOST}]\nhttp: [{{route: [{{destination: {{host: {HOST}, subset: v1}}}}]}}]"),
    )[0]["route"]
    assert subset["hash_policy"] == [{"cookie": {"name": "c", "path": "/", "ttl": "5s"}}]
    assert "retry_host_predicate" not in subset["retry_policy"]


# --- whose route it is -----------------------------------------------------------------------------------


def to(path: str) -> str:
    return f"hosts: [{HOST}]\nhttp: [{{name: '{path}', route: [{{destination: {{host: {HOST}}}}}]}}]"


OLD, NEW = "2020-01-01T00:00:00Z", "2021-01-01T00:00:00Z"


def test_of_several_for_one_host_the_oldest_wins() -> None:
    old, new = virtual_service(to("old"), "zz", created=OLD), virtual_service(to("new"), "aa", created=NEW)
    for order in ((old, new), (new, old)):
        assert [r["name"] for r in routes(*order)] == ["old"]


def test_private_beats_exported_beats_public() -> None:
    public = virtual_service(to("public"), "public", "b", OLD)
    exported = virtual_service(to("exported") + "\nexportTo: [a]", "exported", "b", NEW)
    private = virtual_service(to("private") + "\nexportTo: ['.']", "private", "a", NEW)
    assert routes(public)[0]["name"] == "public"
    assert routes(public, exported)[0]["name"] == "exported"
    assert routes(public, exported, private)[0]["name"] == "private"


@pytest.mark.parametrize("export", ["[zzz]", "['.']"])
def test_rule_that_is_not_exported_here(export: str) -> None:
    assert routes(virtual_service(to("x") + f"\nexportTo: {export}", "x", "b"))[0]["name"] == "default"


def test_rule_for_a_gateway_only_is_not_for_sidecars() -> None:
    assert routes(virtual_service(to("x") + "\ngateways: [istio-system/gw]"))[0]["name"] == "default"
    assert routes(virtual_service(to("x") + "\ngateways: [istio-system/gw, mesh]"))[0]["name"] == "x"


def test_narrower_wildcard_wins_per_service() -> None:
    wide = virtual_service(f"hosts: ['*{S}']\nhttp: [{{name: wide, {TO_SERVER}}}]", "aa", created=OLD)
    narrow = virtual_service(f"hosts: ['*.b{S}']\nhttp: [{{name: narrow, {TO_SERVER}}}]", "zz", created=NEW)
    assert routes(wide, narrow)[0]["name"] == "narrow"
    assert routes(wide)[0]["name"] == "wide"


def test_short_names_are_of_the_rules_own_namespace() -> None:
    text = virtual_service("hosts: [server]\nhttp: [{name: x, route: [{destination: {host: server}}]}]", "x", "b")
    (route,) = routes(text)
    assert (route["name"], route["route"]["cluster"]) == ("x", out(8080, HOST))


def test_host_that_is_no_service_has_a_virtual_host_on_port_80_only() -> None:
    web80 = service("web", "b", "[{name: http, port: 80}]", vip="10.96.0.8", app="server")
    text = virtual_service(f"hosts: [www.example]\nhttp: [{{{TO_SERVER}}}]")
    resources = of(CLIENT, SERVER, WEB, web80, text)
    assert hosts_of(resources, "80")["www.example:80"] == ["www.example"]
    assert "www.example:8080" not in hosts_of(resources, "8080")


def test_delegates() -> None:
    root = virtual_service(
        f"hosts: [{HOST}]\nhttp:\n- name: root\n  match: [{{uri: {{prefix: /api}}}}]\n  delegate: {{name: child, namespace: b}}\n"
        f"- name: rest\n  {TO_SERVER}"
    )
    child = virtual_service(
        "http:\n- name: v2\n  match: [{uri: {prefix: /api/v2}}]\n"
        f"  {TO_SERVER}\n- name: foreign\n  match: [{{uri: {{prefix: /other}}}}]\n  {TO_SERVER}",
        "child",
        "b",
    )
    found = routes(root, child)
    assert [(r["name"], r["match"].get("prefix")) for r in found] == [("root-v2", "/api/v2"), ("rest", "/")]


def test_delegate_that_is_not_exported_to_the_root_is_left_out() -> None:
    root = virtual_service(
        f"hosts: [{HOST}]\nhttp:\n- name: root\n  delegate: {{name: child, namespace: b}}\n- name: rest\n  {TO_SERVER}"
    )
    child = virtual_service(f"exportTo: [b]\nhttp:\n- name: v2\n  {TO_SERVER}", "child", "b")
    assert [r["name"] for r in routes(root, child)] == ["rest"]
    assert [r["name"] for r in routes(root, child.replace("[b]", "[a]"))] == ["root-v2"]


def test_short_form_does_not_hide_the_service_whose_name_it_is() -> None:
    entry = istio(
        "ServiceEntry",
        "e",
        "a",
        "hosts: [server.b]\nresolution: STATIC\nports: [{number: 8080, name: http, protocol: HTTP}]",
        created=NEW,
    )
    old = WEB.replace("namespace: b}", f"namespace: b, creationTimestamp: '{OLD}'}}")
    found = hosts_of(of(CLIENT, SERVER, old, entry), "8080")
    assert "server.b" not in found[f"{HOST}:8080"]
    assert "server.b" in found["server.b:8080"]


def test_first_claim_of_a_domain_holds() -> None:
    entry = istio(
        "ServiceEntry",
        "e",
        "a",
        "hosts: [other.example]\naddresses: [10.96.0.9]\nresolution: STATIC\nports: [{number: 8080, name: http, protocol: HTTP}]",
        created=NEW,
    )
    old = WEB.replace("namespace: b}", f"namespace: b, creationTimestamp: '{OLD}'}}")
    found = hosts_of(of(CLIENT, SERVER, old, entry), "8080")
    assert "10.96.0.9" in found[f"{HOST}:8080"]
    assert "10.96.0.9" not in found["other.example:8080"]


def test_external_name_is_another_name_of_the_concrete_service() -> None:
    other = alias("alias", "a", HOST)
    resources = of(CLIENT, SERVER, WEB, other)
    domains = hosts_of(resources, "8080")[f"{HOST}:8080"]
    assert domains[-1] == "10.96.0.9"
    assert {f"alias.a{S}", "alias", "alias.a"} <= set(domains)
    assert not any("alias" in name for name in resources.clusters)
    text = virtual_service(f"hosts: [{HOST}]\nhttp: [{{route: [{{destination: {{host: alias.a{S}}}}}]}}]")
    assert routes(other, text)[0]["route"]["cluster"] == out(8080, HOST)


def alias(name: str, ns: str, of: str, port: str = "{name: http, port: 8080}") -> str:
    return (
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {ns}}}\n"
        f"spec: {{type: ExternalName, externalName: {of}, ports: [{port}]}}\n---\n"
    )


@pytest.mark.parametrize(
    ("hosts", "named", "cluster", "there"),
    [
        ("./*, b/*", f"near.a{S}", out(8080, HOST), True),
        ("./*, b/*", f"far.b{S}", out(8080, HOST), True),
        # what a VirtualService adds to a narrow Sidecar is the ExternalName itself, not the service behind it
        ("./*", f"near.a{S}", out(8080, HOST), False),
        ("./*", f"far.b{S}", out(8080, f"far.b{S}"), False),
        # an ExternalName of an ExternalName, or one without that port, is none
        ("./*, b/*", f"twice.a{S}", out(8080, f"near.a{S}"), False),
        ("./*, b/*", f"other.a{S}", out(8080, f"other.a{S}"), False),
        # a service, beside them
        ("./*", HOST, out(8080, HOST), True),
    ],
)
def test_a_destination_that_is_an_external_name(hosts: str, named: str, cluster: str, there: bool) -> None:
    parts = (
        *(CLIENT, SERVER, WEB, service("own", "a", "[{name: http, port: 8080}]")),
        *(alias("near", "a", HOST), alias("far", "b", HOST), alias("twice", "a", f"near.a{S}")),
        alias("other", "a", HOST, "{name: http, port: 9}"),
        istio("Sidecar", "s", "a", f"egress: [{{hosts: [{hosts}]}}]"),
        virtual_service(f"hosts: [own.a{S}]\nhttp: [{{route: [{{destination: {{host: {named}}}}}]}}]"),
    )
    assert routes(*parts[3:], host=f"own.a{S}:8080")[0]["route"]["cluster"] == cluster
    assert (cluster in of(*parts).clusters) is there


def test_unknown_route_names_are_answered_empty() -> None:
    from mesh_text import build

    from lab.discovery import routes as routes_module
    from lab.discovery import snapshot
    from lab.discovery.proxy import proxy_for
    from lab.discovery.push_context import PushContext

    mesh = build(CLIENT)
    client = mesh.pod("client.a")
    assert client is not None
    proxy = proxy_for(PushContext(mesh), snapshot.node_for_pod(mesh, client))
    config = routes_module.route_configuration(proxy, "no-such-route")
    assert (config.name, len(config.virtual_hosts)) == ("no-such-route", 0)


def test_wildcard_entry_domains() -> None:
    entry = istio(
        "ServiceEntry",
        "e",
        "a",
        "hosts: ['*.wild.example']\nresolution: NONE\nports: [{number: 8080, name: http, protocol: HTTP}]",
    )
    assert hosts_of(of(CLIENT, entry), "8080")["*.wild.example:8080"] == ["*.wild.example", "*.wild.example."]


def test_registry_only_route_of_a_sniffed_service_has_no_catch_all() -> None:
    auto = service("auto", "b", "[{port: 9000}]", vip="10.96.0.7", app="server")
    resources = of(CLIENT, SERVER, auto, mesh_config("outboundTrafficPolicy: {mode: REGISTRY_ONLY}"), namespace("c"))
    assert [v.name for v in resources.routes[f"auto.b{S}:9000"].virtual_hosts] == [f"auto.b{S}:9000"]
