"""Rules for rule: the published expectations of the reference, and our own for what those leave out."""

from __future__ import annotations

import json

import pytest
from init_documents import cases, init, lines

PUBLISHED = [*cases("published/iptables"), *cases("published/nftables")]
OWN = cases("expected")


def _id(case: tuple[str, list[str], dict[str, str], str]) -> str:
    return f"{'nft' if '--native-nftables' in case[1] else 'iptables'}-{case[0]}"


@pytest.mark.parametrize("case", [*PUBLISHED, *OWN], ids=_id)
def test_dry_run_prints_exactly_the_expected_rules(case: tuple[str, list[str], dict[str, str], str]) -> None:
    _, args, env, expected = case
    run = init(["--dry-run", *args], env)
    assert run.code == 0
    assert lines(run.out) == lines(expected)


@pytest.mark.parametrize("case", [*PUBLISHED, *OWN], ids=_id)
def test_comments_are_all_that_the_comments_flag_adds(case: tuple[str, list[str], dict[str, str], str]) -> None:
    import re

    _, args, env, expected = case
    run = init(["--dry-run", "--comments", *args], env)
    stripped = re.sub(r' -m comment --comment "[^"]*"| comment "[^"]*"', "", run.out)
    assert lines(stripped) == lines(expected)
    rules = [line for line in run.out.splitlines() if line.startswith(("-A", "-I", "add rule", "insert rule"))]
    assert all("comment" in rule for rule in rules)


def test_families_are_named_and_ipv6_only_if_on() -> None:
    off = init(["--dry-run", "--ipv6=off", "-u", "1337"])
    on = init(["--dry-run", "--ipv6=on", "-u", "1337"])
    assert [line for line in off.out.splitlines() if line.startswith("#")] == ["# ipv4"]
    assert [line for line in on.out.splitlines() if line.startswith("#")] == ["# ipv4", "# ipv6"]
    assert init(["--dry-run", "--ipv6=on", "--backend=native-nft"]).out.startswith("add table inet istio-proxy-nat")


def test_table_headers_keep_the_blank_of_the_reference() -> None:
    assert "* nat\n" in init(["--dry-run", "--ipv6=off"]).out


def test_json_is_one_document_with_the_same_rules() -> None:
    args = ["--dry-run", "--ipv6=on", "-b", "*", "-i", "*", "-u", "1337"]
    document = json.loads(init([*args, "--json"]).out)
    text = init(args).out
    assert document["documents"]["ipv4"] in text
    assert document["documents"]["ipv6"] in text
    assert {rule["family"] for rule in document["rules"]} == {"ipv4", "ipv6"}
    assert all(rule["text"] in text and rule["comment"] for rule in document["rules"])


def test_the_worked_example_of_the_default_sidecar() -> None:
    args = [
        "-p",
        "15001",
        "-z",
        "15006",
        "-u",
        "1337",
        "-m",
        "REDIRECT",
        "-i",
        "*",
        "-x",
        "",
        "-b",
        "*",
        "-d",
        "15090,15021,15020",
    ]
    out = lines(init(["--dry-run", "--ipv6=off", *args]).out)
    assert out[0] == "* nat"
    assert out[1:5] == ["-N ISTIO_INBOUND", "-N ISTIO_REDIRECT", "-N ISTIO_IN_REDIRECT", "-N ISTIO_OUTPUT"]
    assert out[5:9] == [
        "-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN",
        "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
        "-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006",
        "-A PREROUTING -p tcp -j ISTIO_INBOUND",
    ]
    assert out[-3:] == ["-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN", "-A ISTIO_OUTPUT -j ISTIO_REDIRECT", "COMMIT"]
    assert len(out) == 24
