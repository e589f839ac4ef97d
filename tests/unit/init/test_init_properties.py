"""Properties of the rules of any configuration."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from init_configs import configs

from init import native, native_state, restore, rules, state, words
from init.canonical import canonical
from init.config import Config
from init.errors import InitError
from init.model import Rule

QUICK = settings(max_examples=60, deadline=None)


def shape(rule: Rule) -> str:
    """A rule without what differs between families."""
    text = f"{rule.table} {restore.line(rule)}"
    return re.sub(r"-([sd]) \S+", r"-\1 ADDRESS", text)


@QUICK
@given(configs(ipv6=True, lists=False))
def test_both_families_have_the_same_shape(config: Config) -> None:
    # The user's own CIDRs and servers belong to one family; all other rules come in pairs.
    config = config._replace(outbound_ip_ranges_include="*" if config.outbound_ip_ranges_include else "")
    config = config._replace(outbound_ip_ranges_exclude="", dns_servers_v4=("10.0.0.10",), dns_servers_v6=("fd00::10",))
    built = rules.build(config)
    assert sorted(map(shape, built.ipv4)) == sorted(map(shape, built.ipv6))
    assert [shape(rule) for rule in built.ipv4 if rule.table != "nat"] == [
        shape(rule) for rule in built.ipv6 if rule.table != "nat"
    ]


@QUICK
@given(configs())
def test_ipv6_is_empty_when_off_and_ipv4_does_not_depend_on_it(config: Config) -> None:
    off = rules.build(config._replace(ipv6=False))
    on = rules.build(config._replace(ipv6=True))
    assert off.ipv6 == ()
    assert off.ipv4 == on.ipv4
    assert on.ipv6 != ()


@QUICK
@given(configs())
def test_every_chain_that_is_used_is_created_once(config: Config) -> None:
    for family in (rules.build(config).ipv4, rules.build(config._replace(ipv6=True)).ipv6):
        for table in restore.tables(family):
            created = restore.new_chains(family, table)
            used = {rule.chain for rule in family if rule.table == table} - {"PREROUTING", "OUTPUT"}
            assert len(created) == len(set(created))
            assert used <= set(created)


@QUICK
@given(configs())
def test_nothing_but_the_position_decides_where_a_native_rule_stands(config: Config) -> None:
    for table in native.TABLES:
        seen: dict[str, int] = {}
        for rule in native.placed([rule for rule in native.build(config) if rule.table == table]):
            assert rule.position is None or rule.position < seen.get(rule.chain, 0)
            seen[rule.chain] = seen.get(rule.chain, 0) + 1


@QUICK
@given(configs())
def test_what_we_want_is_what_we_would_find(config: Config) -> None:
    built = rules.build(config)
    text = "".join(
        f"*{table}\n"
        + "".join(f":{chain} - [0:0]\n" for chain in chains)
        + "".join(f"-A {chain} {rule}\n" for chain, here in chains.items() for rule in here)
        for table, chains in state.wanted(built.ipv4).items()
    )
    assert state.compare("ipv4", built.ipv4, state.parse(text)) == []


@QUICK
@given(configs(), st.data())
def test_any_lost_doubled_or_moved_rule_is_drift(config: Config, data: st.DataObject) -> None:
    built = rules.build(config)
    chains = state.wanted(built.ipv4)
    table = data.draw(st.sampled_from(sorted(chains)))
    chain = data.draw(st.sampled_from(sorted(chain for chain, here in chains[table].items() if here)))
    here = chains[table][chain]
    index = data.draw(st.integers(0, len(here) - 1))
    edit = data.draw(st.sampled_from(["delete", "double", "swap"]))
    if edit == "delete":
        del here[index]
    elif edit == "double":
        here.insert(index, here[index])
    elif len(here) < 2 or canonical(here[index]) == canonical(here[index - 1]):
        return
    else:
        here[index], here[index - 1] = here[index - 1], here[index]
    text = "".join(
        f"*{name}\n"
        + "".join(f":{chain} - [0:0]\n" for chain in found)
        + "".join(f"-A {chain} {rule}\n" for chain, rest in found.items() for rule in rest)
        for name, found in chains.items()
    )
    found = state.compare("ipv4", built.ipv4, state.parse(text))
    assert any((drift.table, drift.chain) == (table, chain) for drift in found)
    assert all(drift.diff() for drift in found)


LISTS = [
    "proxy_uid", "proxy_gid", "inbound_ports_include", "inbound_ports_exclude", "exclude_interfaces", "outbound_ports_include",
    "outbound_ports_exclude", "kube_virt_interfaces", "owner_groups_include", "proxy_port", "inbound_capture_port",
    "inbound_tunnel_port", "inbound_tproxy_mark", "outbound_ip_ranges_include", "outbound_ip_ranges_exclude", "loopback_cidr",
]  # fmt: skip
SMUGGLED = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["80 -j ACCEPT", "80\n-A OUTPUT -j ACCEPT", "80\tx", '"', "'", "80\\", "! 80", "-j", "--dport", "80;drop", "{80}", "@set", "$x", "80#", "80 counter accept", "\x00", "80\r", " 80", "80 "]
    ),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LISTS), SMUGGLED, st.booleans(), st.booleans())
def test_no_list_item_brings_an_argument_with_it(field: str, text: str, tproxy: bool, dns: bool) -> None:
    plain = Config(
        inbound_ports_include="4000", inbound_ports_exclude="1", outbound_ports_include="2", outbound_ports_exclude="3",
        exclude_interfaces="e", kube_virt_interfaces="k", owner_groups_include="7", outbound_ip_ranges_include="10.0.0.0/8",
        outbound_ip_ranges_exclude="10.9.0.0/16", inbound_interception_mode="TPROXY" if tproxy else "", redirect_dns=dns,
        dns_servers_v4=("10.0.0.10",) if dns else (),
    )  # fmt: skip
    if "," in text or text in ("", "*"):
        return
    try:
        odd = plain._replace(**{field: text})
        iptables, nft = rules.build(odd).ipv4, native.build(odd)
        script = native.script(nft)
    except InitError:
        return
    # Accepted: the documents have the shape of plain ones, word for word, with one word replaced.
    for mine, theirs in (
        (restore.document(iptables), restore.document(rules.build(plain).ipv4)),
        (script, native.script(native.build(plain))),
    ):
        assert [len(line.split()) for line in mine.splitlines()] == [len(line.split()) for line in theirs.splitlines()]
        assert [line.split()[0] for line in mine.splitlines()] == [line.split()[0] for line in theirs.splitlines()]
        for line, other in zip(mine.splitlines(), theirs.splitlines(), strict=True):
            for word, usual in zip(line.split(), other.split(), strict=True):
                if word != usual:
                    assert not word.startswith(("-", "!", '"\n', "'"))
                    assert not any(char in word for char in " \t\r\n'\\`;$#&|<>")


@QUICK
@given(st.text(alphabet="0123456789abcdef.:/,* -%", max_size=30))
def test_a_range_is_read_whole_or_not_at_all(text: str) -> None:
    try:
        canonical_text, is_v4, _ = words.prefix(text)
    except InitError:
        return
    address, _, length = canonical_text.rpartition("/")
    assert re.fullmatch(r"[0-9a-f.:]+", address)
    assert 0 <= int(length) <= (32 if is_v4 else 128)
    assert words.prefix(canonical_text)[0] == canonical_text


@QUICK
@given(configs())
def test_native_forms_tell_rules_apart(config: Config) -> None:
    built = native.build(config)
    for rule in built:
        assert native_state.form(rule)[1]
    assert len({native_state.form(rule) for rule in built}) == len({_as_kept(native.body(rule)) for rule in built})


def _as_kept(text: str) -> str:
    """What nft makes of a rule's text: it masks networks, and leaves out the protocol that a port implies."""
    masked = re.sub(r"[0-9a-f.:]+/\d+", lambda found: str(ipaddress.ip_network(found[0], strict=False)), text)
    return masked.replace("meta l4proto tcp tcp", "tcp").replace("meta sk", "sk")


@pytest.mark.parametrize(
    ("saved", "written"),
    [
        ("! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --uid-owner 1337 -j X", "-o lo ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m owner --uid-owner 1337 -j X"),
        ("-p udp -m udp --dport 53 -j REDIRECT --to-ports 15053", "-p udp --dport 53 -j REDIRECT --to-port 15053"),
        ("-j MARK --set-xmark 0x539/0xffffffff", "-j MARK --set-mark 1337"),
        ("-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff", "-j CONNMARK --save-mark"),
        ("-d 10.0.0.0/8 -j X", "-d 10.1.2.3/8 -j X"),
        ("-j X", "-d 0.0.0.0/0 -p all -i + -j X"),
        ("-p tcp -m tcp --dport 80 -j X", "-p tcp --dport http -j X"),
        ("-p tcp -m tcp --dport 8080:8081 -j X", "-p tcp --dport 8080:8081 -j X"),
        ("-p tcp -m conntrack --ctstate RELATED,ESTABLISHED -j X", "-p tcp -m conntrack --ctstate ESTABLISHED,RELATED -j X"),
        ("-p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff", "-p tcp -j TPROXY --tproxy-mark 1337/0xffffffff --on-port 15006"),
        ("-m owner --gid-owner 0 -j X", "-m owner --gid-owner root -j X"),
        ('-m comment --comment "with -j inside" -j X', "-j X"),
        ("-s fd00::/8 -j X", "-s fd12:3456::1/8 -j X"),
    ],
)  # fmt: skip
def test_the_same_rule_in_two_wordings(saved: str, written: str) -> None:
    assert canonical(saved) == canonical(written)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-p tcp -j X", "-p udp -j X"),
        ("-p tcp --dport 80 -j X", "-p tcp ! --dport 80 -j X"),
        ("-p tcp --dport 80 -j X", "-p tcp --sport 80 -j X"),
        ("-j X", "-g X"),
        ("-m mark --mark 1 -j X", "-m connmark --mark 1 -j X"),
        ("-m owner --uid-owner 1 -j X", "-m owner --gid-owner 1 -j X"),
        ("-m owner ! --gid-owner 1 -m owner ! --gid-owner 2 -j X", "-m owner ! --gid-owner 1 -j X"),
        ("-m rpfilter -j X", "-j X"),
        ("-m statistic --mode random --probability 0.5 -j X", "-j X"),
        ("-j MARK --set-mark 1", "-j MARK --set-mark 2"),
        ("-j MARK --set-mark 1", "-j MARK --set-xmark 0x1/0xff"),
        ("-i lo -j X", "-o lo -j X"),
        ("-j X", ""),
    ],
)
def test_different_rules_stay_different(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)
