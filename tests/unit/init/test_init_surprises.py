"""Where the reference does something that was hardly meant: a warning, and an error with --strict."""

from __future__ import annotations

import json

import pytest
from init_documents import init

BASE = ["--dry-run", "--ipv6=off", "--log_output_level=warn"]
DNS = ["--redirect-dns", "--dns-servers=10.0.0.10"]

SEVERE = [
    ("a bad bool", [], {"REDIRECT_DNS": "yes"}, "REDIRECT_DNS: 'yes' is not a bool"),
    ("an empty bool", [], {"DROP_INVALID": ""}, "it is taken as false"),
    ("a bad duration", [], {"PROBE_TIMEOUT": "abc"}, "it is taken as 0s"),
    ("a bad port", [], {"IPTABLES_PROBE_PORT": "http"}, "it is taken as 0"),
    ("a port too high", [], {"IPTABLES_PROBE_PORT": "70000"}, "it is taken as 65535"),
    ("the gid rule and port 53", [*DNS, "-g", "1337"], {}, "no exemption for port 53"),
    ("no groups", ["-i", "*"], {"ISTIO_OUTBOUND_OWNER_GROUPS": ""}, "no outbound traffic of any group is captured"),
    (
        "both group lists",
        [],
        {"ISTIO_OUTBOUND_OWNER_GROUPS": "a", "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE": "b"},
        "_EXCLUDE is ignored",
    ),
    (
        "only IPv6 resolvers",
        ["--redirect-dns", "--dns-servers=fd00::1", "--native-nftables"],
        {},
        "nft will refuse them",
    ),
    ("mode in lower case", ["-m", "tproxy"], {}, "it acts as REDIRECT"),
    ("capture-all alone", ["--capture-all-dns"], {}, "does nothing without --redirect-dns"),
    ("a stray word", ["istio-iptables", "80"], {}, "arguments without a flag are ignored: '80'"),
    ("two back ends", ["--backend=nft", "--native-nftables"], {}, "but the back end is nft"),
]


@pytest.mark.parametrize(("name", "args", "env", "says"), SEVERE, ids=[row[0] for row in SEVERE])
def test_a_misread_value_is_a_warning_and_with_strict_an_error(
    name: str, args: list[str], env: dict[str, str], says: str
) -> None:
    lax = init([*BASE, *args], env)
    assert lax.code == 0
    assert says in lax.err
    assert lax.out != ""
    strict = init([*BASE, "--strict", *args], env)
    assert strict.code == 1
    assert "refused by --strict" in strict.err
    assert says in strict.err
    assert strict.out == ""


HARMLESS = [
    (
        "the default sidecar",
        ["istio-iptables", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", "", "-b", "*", "-d", "15090,15021,15020"],
        {},
    ),
    ("with DNS capture", ["-u", "1337", "-i", "*", "-b", "*", *DNS], {}),
    (
        "with DNS capture by environment",
        ["-i", "*", "-b", "*", "--dns-servers=10.0.0.10"],
        {"ISTIO_META_DNS_CAPTURE": "true"},
    ),
    ("TPROXY", ["-m", "TPROXY", "-b", "*"], {}),
    ("only IPv6 resolvers on iptables", ["--redirect-dns", "--dns-servers=fd00::1"], {}),
    ("back end by the same name twice", ["--backend=legacy-restore", "--force-iptables-binary=legacy"], {}),
]


@pytest.mark.parametrize(("name", "args", "env"), HARMLESS, ids=[row[0] for row in HARMLESS])
def test_plain_settings_pass_strict_in_silence(name: str, args: list[str], env: dict[str, str]) -> None:
    run = init([*BASE, "--strict", *args], env)
    assert run.code == 0
    assert run.err == ""


NOTES = [
    ("excluded ports beside a list", ["-b", "80", "-d", "15020"], "excluded inbound ports are ignored"),
    ("two proxy users", ["-u", "1,2"], "only the first can call its own service"),
    (
        "TPROXY and a resolver on lo",
        ["-m", "TPROXY", "-b", "*", "--redirect-dns", "--dns-servers=127.0.0.53"],
        "as user 0, which is what TPROXY injection gives Envoy",
    ),
    ("no server to capture", ["--redirect-dns", "--dns-servers="], "DNS capture disabled"),
]


@pytest.mark.parametrize(("name", "args", "says"), NOTES, ids=[row[0] for row in NOTES])
def test_a_note_is_no_error_with_strict(name: str, args: list[str], says: str) -> None:
    run = init([*BASE, "--strict", *args])
    assert run.code == 0
    assert says in run.err


def test_warnings_are_in_the_json() -> None:
    document = json.loads(init([*BASE, "--json", "-m", "tproxy"]).out)
    assert any("acts as REDIRECT" in warning for warning in document["warnings"])
