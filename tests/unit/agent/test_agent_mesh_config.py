"""The mesh configuration file: what is refused in it and what is warned of (spec: agent 5.3)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import AgentError
from agent.proxy_config import construct

PATH = "./etc/istio/config/mesh"

VALID = """
accessLogFile: /dev/stdout
unknownField: {of: a, newer: version}
connectTimeout: 2s
protocolDetectionTimeout: 0s
trustDomain: mesh.example.
trustDomainAliases: [old.example, old.example]
proxyListenPort: "15001"
outboundTrafficPolicy: {mode: REGISTRY_ONLY}
extensionProviders:
- name: otel
  opentelemetry: {service: otel.example, port: 4317}
localityLbSetting:
  distribute:
  - {from: "r1/z1", to: {"r1/z1": 80, "r1/z2": 20}}
  - {from: "r1/*", to: {"r2": 100}}
zoneAwareLbSetting: {failover: [{from: a, to: b}], failoverPriority: [topology.istio.io/network]}
serviceSettings: [{settings: {clusterLocal: true}, hosts: ["*.ns.svc.cluster.local", "*-x.example", "*"]}]
defaultTrafficPolicy:
  connectionPool: {tcp: {maxConnections: 1, idleTimeout: 0s}, http: {idleTimeout: 1s}}
  outlierDetection: {interval: 1s, maxEjectionPercent: 100}
defaultInboundHttpRetryPolicy: {attempts: 1, retryOn: "5xx,503,reset", backoff: 25ms}
defaultConfig: {concurrency: 3}
"""


def test_a_valid_file_gives_its_proxy_configuration() -> None:
    assert construct(VALID, "", {}).concurrency.value == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("connectTimeout: 0s", "invalid connect timeout: duration must be greater than 1ms"),
        ("connectTimeout: 1500us", "invalid connect timeout: only durations to ms precision are supported"),
        ("connectTimeout: 2h", "invalid connect timeout: time 7200s must be >1ms and <1h0m0s"),
        ("connectTimeout: soon", "invalid duration"),
        ("connect_timeout: 0s", "invalid connect timeout: duration must be greater than 1ms"),
        ("protocolDetectionTimeout: 5us", "invalid protocol detection timeout: only durations to ms precision"),
        ("proxyListenPort: 0", "invalid proxy listen port: port number 0 must be in the range 1..65535"),
        ("proxyListenPort: 3000000000", "failed to convert to proto"),
        ("proxyListenPort: many", "failed to convert to proto"),
        ("trustDomain: ''", "trustDomain: empty domain name not allowed"),
        ("trustDomain: a_b.example", 'trustDomain: trust domain name "a_b.example" invalid'),
        ("trustDomainAliases: [z.example, -a]", "trustDomainAliases[0], domain `-a`: trust domain name"),
        ("accessLogEncoding: XML", "failed to convert to proto"),
        ("enableTracing: perhaps", "failed to convert to proto"),
        ("extensionProviders: [{name: 5}]", "failed to convert to proto"),
        ("extensionProviders: [{name: x, zipkin: {port: -1}}]", "failed to convert to proto"),
        ("serviceSettings: [{hosts: [ok.example, 'a.*.example']}]", "serviceSettings[0], host `a.*.example`: domain"),
        ("serviceSettings: [{hosts: ['*.example.5']}]", 'top level domain "5" cannot be all-numeric'),
        ("localityLbSetting: {distribute: [{from: a}], failover: [{from: a}]}", "'distribute' and 'failover'"),
        ("localityLbSetting: {distribute: [{from: a, to: {b: 99}}]}", "total locality weight 99 != 100"),
        ("localityLbSetting: {distribute: [{from: a, to: {b: 0, c: 100}}]}", "weight must be in range [1, 100]"),
        ("localityLbSetting: {distribute: [{from: a, to: {'b*/c': 100}}]}", "locality b*/c wildcard '*' number"),
        ("localityLbSetting: {distribute: [{from: a//c, to: {b: 100}}]}", "must not contain empty region/zone"),
        (
            "localityLbSetting: {distribute: [{from: a, to: {b: 100}}, {from: a/z, to: {b: 100}}]}",
            "locality a/z overlap with previous specified ones",
        ),
        (
            "localityLbSetting: {distribute: [{from: a/z/*, to: {b: 100}}, {from: a/z/s, to: {b: 100}}]}",
            "locality a/z/s overlap with previous specified ones",
        ),
        ("localityLbSetting: {failover: [{from: a, to: a}]}", "must specify different regions"),
        ("localityLbSetting: {failover: [{from: a/b, to: c}]}", "locality lb failover only specify region"),
        ("localityLbSetting: {failover: [{from: '*', to: c}]}", "should not contain '*' wildcard"),
        (
            "localityLbSetting: {failover: [{from: a, to: b}], failoverPriority: [topology.kubernetes.io/zone]}",
            "can not simultaneously set 'failover' and topology label 'topology.kubernetes.io/zone'",
        ),
        ("zoneAwareLbSetting: {failoverPriority: [topology.istio.io/subzone]}", "for zone aware lb must not use"),
        ("zoneAwareLbSetting: {failover: [{from: a, to: b/c}]}", "zone aware lb failover only specifies region"),
        ("meshMTLS: {ecdhCurves: [P-256]}", "mesh TLS does not support ECDH curves configuration"),
        ("defaultTrafficPolicy: {connectionPool: {}}", "connection pool must have at least one field"),
        ("defaultTrafficPolicy: {connectionPool: {http: {maxRetries: -1}}}", "max retries must be non-negative"),
        ("defaultTrafficPolicy: {connectionPool: {tcp: {connectTimeout: 0s}}}", "duration must be greater than 1ms"),
        (
            "defaultTrafficPolicy: {connectionPool: {http: {h2UpgradePolicy: UPGRADE, useClientProtocol: true}}}",
            "use client protocol must not be true when H2UpgradePolicy is UPGRADE",
        ),
        ("defaultTrafficPolicy: {outlierDetection: {minHealthPercent: 101}}", "percentage 101 is not in range 0..100"),
        (
            "defaultTrafficPolicy: {outlierDetection: {consecutiveLocalOriginFailures: 1}}",
            "split external local origin errors is set to false",
        ),
        ("defaultInboundHttpRetryPolicy: {attempts: -1}", "invalid default inbound http retry policy: attempts cannot"),
        ("defaultInboundHttpRetryPolicy: {retryOn: 5xx}", "configured when attempts are set to 0 (disabled)"),
        ("defaultInboundHttpRetryPolicy: {backoff: 1s}", "backoff configured when attempts are set to 0 (disabled)"),
        ("defaultInboundHttpRetryPolicy: {attempts: 1, retryOn: 'a,999'}", '"999" is not a valid retryOn policy'),
        ("defaultConfig: [1]", "defaultConfig must be a mapping"),
        # Also where a higher layer would mend it.
        ("defaultConfig: {statusPort: 0}", "invalid status port"),
        ("a: [", "line 2, column 1"),
        ("- a", "expected a mapping"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
    ],
)
def test_a_file_that_is_refused(text: str, problem: str) -> None:
    with pytest.raises(AgentError) as caught:
        construct(text, "statusPort: 15020", {})
    told = str(caught.value)
    assert told.startswith(f"failed to unmarshal mesh config from file {PATH}: ")
    assert problem in told
    assert "\n" not in told
    assert caught.value.exit_code == 255


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(AgentError, match=r"connect timeout.*; trustDomain: .*; config path must be set"):
        construct('connectTimeout: 0s\ntrustDomain: ""\ndefaultConfig: {configPath: ""}', "", {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "defaultConfig: {concurrency: abc}",
            'defaultConfig.concurrency: expected a whole number of 32 bits, got "abc"',
        ),
        (
            "proxyListenPort: many\nconnectTimeout: soon\nfoo: 1\ndefaultConfig: {drainDuration: 5, proxyMetadata: {A: 3}}",
            'proxyListenPort: expected a whole number of 32 bits, got "many"; connectTimeout: invalid duration "soon"; '
            "defaultConfig.drainDuration: expected a duration such as 10s, got 5; "
            "defaultConfig.proxyMetadata.A: expected text, got 3",
        ),
        # What validation refuses comes when every value fits.
        ("connectTimeout: -1s\ntrustDomain: 4", "trustDomain: expected text, got 4"),
        ("accessLogEncoding: XML", 'accessLogEncoding: expected one of TEXT, JSON, got "XML"'),
        ("enablePrometheusMerge: 4", "enablePrometheusMerge: expected true or false, got 4"),
        ("extensionProviders: 3", "extensionProviders: expected a list, got 3"),
        ("extensionProviders: [{name: x}, 3]", "extensionProviders[1]: expected a mapping, got 3"),
        (
            "extensionProviders: [{name: x, zipkin: {port: -1}}]",
            "extensionProviders[0].zipkin.port: expected a whole number of 32 bits, not negative, got -1",
        ),
        ("trustDomainAliases: [a, 3]", "trustDomainAliases[1]: expected text, got 3"),
        (
            "localityLbSetting: {distribute: [{from: a, to: {b: x}}]}",
            'localityLbSetting.distribute[0].to.b: expected a whole number of 32 bits, not negative, got "x"',
        ),
        ("defaultConfig: {tracing: {sampling: [1]}}", "defaultConfig.tracing.sampling: expected a number, got [1]"),
    ],
)
def test_values_that_do_not_fit_are_named_by_their_fields(text: str, told: str) -> None:
    with pytest.raises(AgentError) as caught:
        construct(text, "", {})
    assert str(caught.value) == f"failed to unmarshal mesh config from file {PATH}: failed to convert to proto: {told}"


def test_other_spellings_of_the_proxy_configuration_are_none() -> None:
    assert construct("default_config: {concurrency: 3}", "", {}).concurrency.value == 0


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("tlsDefaults: {ecdhCurves: [P-256, P-256, X448, P-1]}", "unrecognized ECDH curves: [P-1 X448]"),
        ("tlsDefaults: {ecdhCurves: [P-256, P-256]}", "duplicate ECDH curves: [P-256]"),
        ("defaultInboundHttpRetryPolicy: {attempts: 1, perTryTimeout: 1s}", "perTryTimeout is ignored"),
        ("defaultConfig: {proxyMetadata: {ISTIO_META_DNS_AUTO_ALLOCATE: 'true'}}", "'ISTIO_META_DNS_AUTO_ALLOCATE' is"),
    ],
)
def test_warnings(text: str, warning: str, caplog: pytest.LogCaptureFixture) -> None:
    construct(text, "", {})
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("warnings occurred during mesh validation: ")
    assert warning in line


def test_the_agent_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "mesh").write_text("connectTimeout: 0s\n")
    command = [sys.executable, "-m", "agent", "proxy", "sidecar", "--meshConfig", "mesh", "--log_output_level", "error"]
    done = subprocess.run([*command, "--dry-run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 255
    (line,) = (done.stdout + done.stderr).splitlines()
    assert "from file mesh: invalid connect timeout: duration must be greater than 1ms" in line
