"""What counts as ours, as left behind, and as in front, on dumps alone."""

from __future__ import annotations

import pytest

from init import edits, routes, rules, state
from init.config import Config
from init.errors import InitError

TPROXY = Config(inbound_interception_mode="TPROXY", inbound_ports_include="*")
GUARDS = "".join(
    f"-A {chain} -p {proto} -j DROP\n" for chain in ("INPUT", "FORWARD", "OUTPUT") for proto in ("udp", "tcp")
)


def dump_of(config: Config) -> state.Dump:
    """The kernel's state after ``config`` was applied."""
    dump = state.Dump()
    dump.tables = state.wanted(rules.build(config).ipv4)
    return dump


@pytest.mark.parametrize("mark", ["1337", "99", "0x63"])
def test_cleanup_with_another_configuration_leaves_nothing_of_tproxy(mark: str) -> None:
    dump = dump_of(TPROXY._replace(inbound_tproxy_mark=mark))
    made = {edit.table: edit for edit in edits.cleanup(rules.build(Config()).ipv4, dump, mark)}
    deleted = [(one.chain, one.text) for one in made["mangle"].deletes]
    built_in = [
        (chain, text)
        for chain, texts in dump.tables["mangle"].items()
        for text in texts
        if not chain.startswith("ISTIO_")
    ]
    assert sorted(deleted) == sorted(built_in)


@pytest.mark.parametrize(
    ("chain", "text"),
    [
        ("PREROUTING", "-p tcp -m mark --mark 7 -j CONNMARK --save-mark"),
        ("PREROUTING", "-m mark --mark 1337 -j CONNMARK --save-mark"),
        ("OUTPUT", "-p tcp -m mark --mark 1337 -j RETURN"),
        ("OUTPUT", "-p tcp -m mark --mark 1337 -j CONNMARK --save-mark"),
        ("OUTPUT", "-p tcp -j MARK --set-xmark 0x53a/0xffffffff"),
        ("POSTROUTING", "-p tcp -m connmark --mark 1337 -j CONNMARK --restore-mark"),
    ],
)
def test_marks_of_others_stay(chain: str, text: str) -> None:
    dump = state.parse(f"*mangle\n-A {chain} {text}\nCOMMIT\n")
    assert edits.cleanup(rules.build(Config()).ipv4, dump) == []


def test_guards_that_were_left_go_with_cleanup() -> None:
    dump = state.parse(f"*filter\n-A INPUT -s 192.0.2.1/32 -j ACCEPT\n{GUARDS}-A INPUT -p tcp -j DROP\nCOMMIT\n")
    (edit,) = edits.cleanup((), dump)
    places = [(one.chain, one.position) for one in edit.deletes]
    assert sorted(places) == [("FORWARD", 1), ("FORWARD", 2), ("INPUT", 2), ("INPUT", 3), ("OUTPUT", 1), ("OUTPUT", 2)]
    for chain in ("INPUT", "FORWARD", "OUTPUT"):
        here = [position for name, position in places if name == chain]
        assert here == sorted(here, reverse=True), "from the last one, so that positions stay right"


def test_a_pair_of_drops_in_one_chain_is_somebody_elses() -> None:
    dump = state.parse("*filter\n-A INPUT -p udp -j DROP\n-A INPUT -p tcp -j DROP\nCOMMIT\n")
    assert edits.guards_left(dump) == ()
    assert edits.cleanup((), dump) == []
    # At the end of a run that has set them they are ours, though one chain was changed meanwhile.
    assert [one.position for one in edits.unguard(dump).deletes] == [2, 1]


CHAINS = {
    "ENDS": ["-p tcp -m tcp --dport 80 -j ACCEPT"],
    "ASKS": ["-p tcp -j RETURN", "-j LOG"],
    "DEEP": ["-j ASKS", "-j ENDS"],
    "SOME": ["-d 192.0.2.1/32 -j ENDS"],
    "LOOP": ["-j LOOP"],
}


@pytest.mark.parametrize(
    ("text", "ends", "for_any"),
    [
        ("-j ACCEPT", True, True),
        ("-j RETURN", True, True),
        ("-d 192.0.2.1/32 -j ACCEPT", True, False),
        ("! -d 192.0.2.1/32 -j ACCEPT", True, True),
        ("-j LOG", False, False),
        ("-p tcp", False, False),
        ("-j ENDS", True, True),
        ("-j DEEP", True, True),
        ("-j ASKS", False, False),
        ("-g ASKS", True, True),
        ("-j SOME", True, False),
        ("-d 192.0.2.1/32 -j ENDS", True, False),
        ("-j LOOP", False, False),
    ],
)
def test_a_rule_ends_the_walk_by_itself_or_by_a_chain(text: str, ends: bool, for_any: bool) -> None:
    assert state.decides(text, CHAINS) is ends
    assert state.decides(text, CHAINS, any_address=True) is for_any


@pytest.mark.parametrize("field", ["inbound_tproxy_mark", "inbound_tproxy_route_table"])
@pytest.mark.parametrize("text", ["0", "-1", "4294967296", "99999999999", "0x539", "", "1337/0xff", "9" * 5000])
def test_policy_numbers_that_a_kernel_cannot_have(field: str, text: str) -> None:
    with pytest.raises(InitError, match="failed to configure routes") as caught:
        routes.numbers(TPROXY._replace(**{field: text}))
    assert caught.value.exit_code == 1


def test_policy_numbers() -> None:
    assert routes.numbers(TPROXY) == (1337, 133)
    assert routes.numbers(TPROXY._replace(inbound_tproxy_mark=" +4294967295", inbound_tproxy_route_table="1")) == (
        4294967295,
        1,
    )
    assert routes.numbers(Config(inbound_tproxy_mark="x")) is None
