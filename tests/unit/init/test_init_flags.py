"""Flags, environment twins, defaults and exit codes, as tables."""

from __future__ import annotations

import pytest
from init_documents import init

from init import flags
from init.config import from_flags
from init.errors import UsageError

# flag, short, environment twin, field of Config, default, a text and the value it must become
STRINGS = [
    ("inbound-capture-port", "z", "INBOUND_CAPTURE_PORT", "inbound_capture_port", "15006"),
    ("inbound-tunnel-port", "e", "INBOUND_TUNNEL_PORT", "inbound_tunnel_port", "15008"),
    ("proxy-uid", "u", "PROXY_UID", "proxy_uid", ""),
    ("proxy-gid", "g", "PROXY_GID", "proxy_gid", ""),
    ("istio-inbound-interception-mode", "m", "ISTIO_INBOUND_INTERCEPTION_MODE", "inbound_interception_mode", ""),
    ("istio-inbound-ports", "b", "ISTIO_INBOUND_PORTS", "inbound_ports_include", ""),
    ("istio-local-exclude-ports", "d", "ISTIO_LOCAL_EXCLUDE_PORTS", "inbound_ports_exclude", ""),
    ("istio-exclude-interfaces", "c", "ISTIO_EXCLUDE_INTERFACES", "exclude_interfaces", ""),
    ("istio-service-cidr", "i", "ISTIO_SERVICE_CIDR", "outbound_ip_ranges_include", ""),
    ("istio-service-exclude-cidr", "x", "ISTIO_SERVICE_EXCLUDE_CIDR", "outbound_ip_ranges_exclude", ""),
    ("istio-outbound-ports", "q", "ISTIO_OUTBOUND_PORTS", "outbound_ports_include", ""),
    (
        "istio-local-outbound-ports-exclude",
        "o",
        "ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE",
        "outbound_ports_exclude",
        "",
    ),
    ("kube-virt-interfaces", "k", "KUBE_VIRT_INTERFACES", "kube_virt_interfaces", ""),
    ("istio-inbound-tproxy-mark", "t", "ISTIO_INBOUND_TPROXY_MARK", "inbound_tproxy_mark", "1337"),
    ("istio-inbound-tproxy-route-table", "r", "ISTIO_INBOUND_TPROXY_ROUTE_TABLE", "inbound_tproxy_route_table", "133"),
    ("network-namespace", "", "NETWORK_NAMESPACE", "network_namespace", ""),
]
BOOLS = [
    ("dry-run", "n", ("DRY_RUN",), "dry_run"),
    ("skip-rule-apply", "", ("SKIP_RULE_APPLY",), "skip_rule_apply"),
    ("run-validation", "", ("RUN_VALIDATION",), "run_validation"),
    ("redirect-dns", "", ("REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"), "redirect_dns"),
    ("drop-invalid", "", ("DROP_INVALID", "INVALID_DROP"), "drop_invalid"),
    ("dual-stack", "", ("DUAL_STACK", "ISTIO_DUAL_STACK"), "dual_stack"),
    ("capture-all-dns", "", ("CAPTURE_ALL_DNS",), "capture_all_dns"),
    ("cni-mode", "", ("CNI_MODE",), "cni_mode"),
    ("reconcile", "", ("RECONCILE",), "reconcile"),
    ("cleanup-only", "", ("CLEANUP_ONLY",), "cleanup_only"),
    ("force-apply", "", ("FORCE_APPLY",), "force_apply"),
]


def value(field: str, args: list[str], env: dict[str, str] | None = None) -> object:
    return getattr(from_flags(flags.parse(args, env or {}), env or {}), field)


@pytest.mark.parametrize(("flag", "short", "env", "field", "default"), STRINGS, ids=[row[0] for row in STRINGS])
def test_a_string_flag_its_twin_and_its_default(flag: str, short: str, env: str, field: str, default: str) -> None:
    assert value(field, []) == default
    assert value(field, [f"--{flag}", "7"]) == "7"
    assert value(field, [f"--{flag}=7"]) == "7"
    assert value(field, [f"--{flag}="]) == ""
    assert value(field, [], {env: "8"}) == "8"
    assert value(field, [], {env: ""}) == "", "set but empty counts as set"
    assert value(field, [f"--{flag}=7"], {env: "8"}) == "7", "the command line wins"
    if short:
        assert [value(field, args) for args in ([f"-{short}", "7"], [f"-{short}7"], [f"-{short}=7"])] == ["7"] * 3


@pytest.mark.parametrize(("flag", "short", "envs", "field"), BOOLS, ids=[row[0] for row in BOOLS])
def test_a_bool_flag_its_twins_and_its_default(flag: str, short: str, envs: tuple[str, ...], field: str) -> None:
    assert value(field, []) is False
    assert value(field, [f"--{flag}"]) is True
    assert value(field, [f"--{flag}=f"]) is False
    for env in envs:
        assert value(field, [], {env: "TRUE"}) is True
        assert value(field, [f"--{flag}=false"], {env: "true"}) is False
    if len(envs) == 2:
        assert value(field, [], {envs[0]: "true", envs[1]: "false"}) is False, "the extra variable comes after the twin"
    if short:
        assert value(field, [f"-{short}"]) is True


def test_every_flag_of_the_reference_is_there() -> None:
    named = {row[0] for row in STRINGS} | {row[0] for row in BOOLS}
    named |= {"envoy-port", "iptables-probe-port", "probe-timeout", "native-nftables", "force-iptables-binary"}
    named |= {"log_target", "log_as_json", "log_output_level", "log_stacktrace_level", "log_caller", "vklog"}
    own = {"ipv6", "dns-servers", "backend", "comments", "strict", "json", "lock-wait"}
    assert {flag.name for flag in flags.FLAGS} == named | own


def test_envoy_port_reads_no_environment() -> None:
    assert value("proxy_port", [], {"ENVOY_PORT": "1"}) == "15001"
    assert value("proxy_port", ["-p", "1"]) == "1"


def test_own_flags_read_no_environment() -> None:
    assert value("backend", [], {"BACKEND": "nft"}) == "auto"
    assert value("strict", [], {"STRICT": "true"}) is False


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5.0),
        ("250ms", 0.25),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        ("0", 0.0),
        ("-1s", -1.0),
        ("+2s", 2.0),
        ("3us", 3e-6),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert value("probe_timeout", ["--probe-timeout", text]) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "", "s", "5x", "5s ", "1m-3s", ".s"])
def test_bad_durations_are_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError):
        flags.parse([f"--probe-timeout={text}"], {})


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("15002", 15002),
        ("0", 0),
        ("65535", 65535),
        ("0x3A9A", 15002),
        ("0o17", 15),
        ("017", 15),
        ("0b11", 3),
        ("1_5002", 15002),
        ("0x_3A9A", 15002),
    ],
)
def test_probe_ports(text: str, port: int) -> None:
    assert value("probe_port", ["--iptables-probe-port", text]) == port


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--nope"], "unknown flag: --nope"),
        (["--istio-inbound-port", "80"], "Did you mean --istio-inbound-ports"),
        (["-y"], "unknown shorthand flag: 'y' in -y"),
        (["--proxy-uid"], "flag needs an argument: --proxy-uid"),
        (["-u"], "flag needs an argument: 'u' in -u"),
        (["--dry-run=maybe"], "invalid argument 'maybe' for --dry-run"),
        (["--iptables-probe-port=65536"], "invalid argument '65536'"),
        (["--iptables-probe-port=x"], "invalid argument 'x'"),
        (["--iptables-probe-port=_1"], "invalid argument '_1'"),
        (["--iptables-probe-port=1__5"], "invalid argument '1__5'"),
        (["--lock-wait=-1s"], "-1s is negative"),
        (["--probe-timeout=5"], "invalid argument '5'"),
        (["--ipv6=maybe"], "not one of auto, on, off"),
        (["--backend=ebpf"], "not one of auto, legacy"),
        (["--log_output_level=loud"], "unknown log level"),
        (["--redirect-dns", "--ipv6=off", "--dns-servers=ns.example"], "not an IP address"),
    ],
)
def test_wrong_usage_exits_255(args: list[str], says: str) -> None:
    run = init(args)
    assert run.code == 255
    assert says in run.err
    assert run.err.count("\n") == 1
    assert run.out == ""


GROUPS_65 = ",".join(str(n) for n in range(65))


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        ([], {"ISTIO_OUTBOUND_OWNER_GROUPS": GROUPS_65}, "cannot exceed 64, got 65"),
        (["--force-iptables-binary=ebtables"], {}, 'invalid FORCE_IPTABLES_BINARY value "ebtables"'),
        ([], {"FORCE_IPTABLES_BINARY": "x"}, 'invalid FORCE_IPTABLES_BINARY value "x"'),
        ([], {"ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR": "127.0.0.1"}, "failed to parse CIDR 127.0.0.1"),
        ([], {"ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR": ""}, "failed to parse CIDR"),
        (
            [],
            {"ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR": "10.0.0.0/8"},
            "expected valid IPv4 loopback address in CIDR 10.0.0.0/8; found 10.0.0.0",
        ),
        ([], {"ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR": "::1/128"}, "expected valid IPv4 loopback address"),
        ([], {"ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR": "127.0.0.0/7"}, "mask in range [8, 32]; found 7"),
        (["-x", "*"], {}, "invalid value for OUTBOUND_IP_RANGES_EXCLUDE"),
        (["-i", "10.0.0.1"], {}, "invalid CIDR '10.0.0.1'"),
        (["-i", "10.0.0.0/8,*"], {}, "invalid CIDR '*'"),
        (["-x", "10.0.0.0/33"], {}, "out of range"),
        (["-x", "010.0.0.0/8"], {}, "not an IP address"),
        (["-i", "fe80::1%eth0/64"], {}, "zone"),
        (["-z", ""], {}, "--inbound-capture-port is empty"),
        ([], {"INBOUND_CAPTURE_PORT": ""}, "--inbound-capture-port is empty"),
        (["-c", "a-name-that-is-too-long"], {}, "at most 15 bytes"),
    ],
)
def test_configuration_errors_exit_1_with_one_line(args: list[str], env: dict[str, str], says: str) -> None:
    run = init(["--dry-run", "--ipv6=off", "--log_output_level=error", *args], env)
    assert run.code == 1
    assert says in run.err
    assert run.err.count("\n") == 1
    assert run.out == ""


def test_64_groups_are_allowed() -> None:
    groups = ",".join(str(n) for n in range(64))
    run = init(["--dry-run", "--ipv6=off"], {"ISTIO_OUTBOUND_OWNER_GROUPS": groups})
    assert run.code == 0
    assert run.out.count("! --gid-owner") == 64 + 1


def test_excluded_groups_are_not_counted() -> None:
    assert init(["--dry-run", "--ipv6=off"], {"ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE": GROUPS_65}).code == 0


def test_help_names_every_flag() -> None:
    run = init(["--help"])
    assert run.code == 0
    assert all(f"--{flag.name}" in run.out for flag in flags.FLAGS)
    assert init(["-h"]).out == run.out


def test_shorthands_join_and_words_are_let_pass() -> None:
    parsed = flags.parse(["istio-iptables", "-nb", "*", "--", "--nope"], {})
    assert parsed.switch("dry-run")
    assert parsed.text("istio-inbound-ports") == "*"
    assert parsed.words == ["istio-iptables", "--nope"]


def test_log_flags_of_the_agent_are_accepted() -> None:
    args = [
        "--log_output_level=default:info",
        "--log_as_json",
        "--log_caller",
        "x",
        "--vklog=3",
        "--log_stacktrace_level=default:none",
    ]
    run = init(["--dry-run", "--ipv6=off", *args, "--log_target=stdout"])
    assert run.code == 0
    assert run.out.startswith("# ipv4\n"), "stdout is kept for the document"
    assert all(line.startswith('{"time"') for line in run.err.splitlines())


def test_log_target_may_be_a_file(tmp_path: object) -> None:
    path = f"{tmp_path}/log"
    run = init(["--dry-run", "--ipv6=off", f"--log_target={path}"])
    assert run.err == ""
    with open(path) as file:
        assert "PROXY_PORT=15001" in file.read()


def test_log_target_is_taken_whole(tmp_path: object) -> None:
    path = f"{tmp_path}/a,b"
    assert init(["--dry-run", "--ipv6=off", f"--log_target={path}"]).code == 0
    with open(path) as file:
        assert "PROXY_PORT=15001" in file.read()


@pytest.mark.parametrize("target", ["/nonexistent/log", "", "/"])
def test_a_log_target_that_cannot_be_written_is_one_line(target: str) -> None:
    run = init(["--dry-run", "--ipv6=off", f"--log_target={target}"])
    assert (run.code, run.out) == (1, "")
    assert f"cannot write the log to {target!r}" in run.err
    assert run.err.count("\n") == 1


def test_dry_run_of_cleanup_prints_what_removes_the_rules(tmp_path: object) -> None:
    path = f"{tmp_path}/calls"
    args = ["--dry-run", "--cleanup-only", "--ipv6=off", "-u", "1", "-k", "veth9", "-b", "80"]
    run = init(args, {"DRY_RUN_FILE_PATH": path})
    assert run.code == 0
    chains = ["ISTIO_INBOUND", "ISTIO_REDIRECT", "ISTIO_IN_REDIRECT", "ISTIO_OUTPUT"]
    assert run.out.splitlines() == [
        "# ipv4",
        "*nat",
        "-D PREROUTING -p tcp -j ISTIO_INBOUND",
        "-D PREROUTING -i veth9 -j RETURN",
        "-D OUTPUT -j ISTIO_OUTPUT",
        *(f"-F {chain}" for chain in chains),
        *(f"-X {chain}" for chain in chains),
        "COMMIT",
    ]
    with open(path) as file:
        calls = file.read().splitlines()
    assert calls[:2] == ["iptables-save", "ip6tables-save"]
    assert (
        calls[2]
        == "iptables -t nat -D ISTIO_OUTPUT -o lo ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m owner --gid-owner 1 -j ISTIO_IN_REDIRECT"
    )
    assert "iptables -t nat -D PREROUTING -i veth9 -j RETURN" in calls
    assert not any("--to-ports" in call for call in calls)
    assert calls[-3:] == ["iptables -t nat -F ISTIO_REDIRECT", "iptables -t nat -X ISTIO_REDIRECT", "iptables-save"]
    native = init([*args, "--native-nftables"]).out.splitlines()
    assert [line.split()[0] for line in native] == ["add", "delete"] * 3
    assert init([*args, "--json"]).out.count("ISTIO_OUTPUT") == 3


def test_back_end_words_of_the_reference_mean_the_same() -> None:
    assert value("backend", ["--native-nftables"]) == "native-nft"
    assert value("backend", ["--force-iptables-binary=legacy"]) == "legacy"
    assert value("backend", [], {"FORCE_IPTABLES_BINARY": "nft"}) == "nft"
    assert value("backend", ["--backend=nft", "--native-nftables"]) == "nft"


def test_dry_run_file_holds_the_calls_of_the_reference(tmp_path: object) -> None:
    path = f"{tmp_path}/calls"
    with open(path, "w") as file:
        file.write("x" * 100000)
    run = init(["--dry-run", "--ipv6=on", "-u", "1"], {"DRY_RUN_FILE_PATH": path})
    with open(path) as file:
        text = file.read()
    assert len(text) == 100000, "the file is not truncated"
    calls = text.rstrip("x").splitlines()
    assert calls[:3] == ["iptables-save", "ip6tables-save", "* nat"]
    assert calls[-2:] == ["iptables-save", "ip6tables-save"]
    assert calls[2:-2] == [line for line in run.out.splitlines() if not line.startswith("#")]


def test_dry_run_file_that_cannot_be_written_is_an_error() -> None:
    run = init(["--dry-run", "--ipv6=off"], {"DRY_RUN_FILE_PATH": "/nonexistent/file"})
    assert run.code == 1
    assert "unable to open dry run output file" in run.err


def test_skip_rule_apply_with_dry_run_prints_no_rules() -> None:
    assert init(["--dry-run", "--skip-rule-apply", "--ipv6=off"]).out == ""
