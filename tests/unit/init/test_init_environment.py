"""What the machine decides: addresses, users, resolvers."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest
from init_documents import init

from init import environment
from init.errors import InitError

V4, V6, LO4, LO6, LINK = "10.1.2.3", "2001:db8::1", "127.0.0.1", "::1", "fe80::1"


@pytest.mark.parametrize(
    ("found", "dual", "host", "ipv6"),
    [
        ([LO4, V4, LO6, V6], False, V4, False),
        ([LO4, V4, LO6, V6], True, V4, True),
        ([LO4, V6], False, V6, True),
        ([LO4, V6, V4], True, V6, True),
        ([LO4, V4, LINK], True, V4, False),
        ([LO4, "169.254.1.1", "ff02::1", V6], False, V6, True),
        ([f"::ffff:{V4}", V6], False, V4, False),
        ([f"::ffff:{LO4}", V6], False, V6, True),
        (["224.0.0.1", V4], False, V4, False),
    ],
)
def test_the_first_real_address_decides(found: list[str], dual: bool, host: str, ipv6: bool) -> None:
    address, on = environment.local_address(map(ip_address, found), dual)
    assert (str(address), on) == (host, ipv6)


def test_only_loopback_is_an_error() -> None:
    with pytest.raises(InitError, match="no valid local IP address found"):
        environment.local_address(map(ip_address, [LO4, LO6, LINK]), False)


def test_this_machine_lists_loopback() -> None:
    assert ip_address(LO4) in environment.local_addresses()


def test_nameservers() -> None:
    text = "# nameserver 1.1.1.1\n;nameserver 2.2.2.2\nnameserver 10.0.0.10\nnameserver\t::127.0.0.53\nsearch x\n"
    text += "nameserver ns.example\nnameserver fe80::1%eth0\nnameserver ::ffff:1.2.3.4 tail\n nameserver 10.0.0.11\nnameserver\n"
    assert environment.nameservers(text) == (("10.0.0.10", "10.0.0.11"), ("::7f00:35", "::ffff:1.2.3.4"))


def test_users_of_the_local_database(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/:/bin/sh\nistio-proxy:x:4711:4711::/:/bin/false\nbroken\nodd:x:y:z\n")
    assert environment.user_id("istio-proxy", str(passwd)) == "4711"
    assert environment.user_id("nobody-here", str(passwd)) == ""
    assert environment.user_id("odd", str(passwd)) == ""
    assert environment.user_id("root", str(tmp_path / "none")) == ""


def test_uid_default_and_gid_copy() -> None:
    run = init(["--dry-run", "--ipv6=off"], {"ENVOY_USER": "no-such-user-here"})
    assert "--uid-owner 1337" in run.out
    assert "--gid-owner 1337" in run.out
    assert "--uid-owner 0 " in init(["--dry-run", "--ipv6=off"], {"ENVOY_USER": "root"}).out
    several = init(["--dry-run", "--ipv6=off", "-u", "5,6"]).out
    assert "--gid-owner 5 " in several
    assert "--gid-owner 6 " in several


def test_servers_given_by_flag_replace_resolv_conf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "RESOLV_CONF", "/nonexistent/resolv.conf")
    args = ["--dry-run", "--ipv6=off", "--redirect-dns"]
    failed = init(args)
    assert failed.code == 1
    assert "failed to load /nonexistent/resolv.conf" in failed.err
    assert init([*args, "--capture-all-dns"]).code == 0, "capture-all reads no resolv.conf"
    assert "-d 9.9.9.9/32" in init([*args, "--dns-servers=9.9.9.9"]).out
    without = init([*args, "--dns-servers="])
    assert without.code == 0
    assert "ISTIO_OUTPUT_DNS" not in without.out
    assert "DNS capture disabled" in without.err


def test_servers_come_from_resolv_conf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 10.0.0.10\nnameserver 2001:DB8::1\n")
    monkeypatch.setattr(environment, "RESOLV_CONF", str(path))
    out = init(["--dry-run", "--ipv6=on", "--redirect-dns"]).out
    assert "-d 10.0.0.10/32" in out
    assert "-d 2001:db8::1/128" in out
