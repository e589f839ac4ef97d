"""Second runs, drift, mending, cleaning: what is in the kernel decides what a run does."""

from __future__ import annotations

import json
import random
import re

import pytest
from init_pod import (
    DEFAULT,
    HERE,
    PEER,
    POD,
    XTABLES,
    Here,
    Net,
    Place,
    ask,
    backends,
    listen,
    net,
    tool_of,
    xtables_backends,
)

pytestmark = pytest.mark.root

FULL = [
    "--ipv6=on", "-u", "1337", "-m", "TPROXY", "-i", "10.0.0.0/8,fd00::/8", "-x", "10.1.0.0/16", "-b", "*", "-d", "15020,15021", "-o", "25",
    "-q", "7000", "-k", "veth9", "-c", "eth7", "--redirect-dns", "--dns-servers=10.9.0.53,fd09::53", "--drop-invalid",
]  # fmt: skip


def counters(pod: Place, backend: str) -> list[int]:
    """The packet counter of each rule."""
    if backend == "native-nft":
        return [int(count) for count in re.findall(r"packets (\d+)", pod.tool("nft", "list", "ruleset", "inet"))]
    text = "".join(pod.tool(f"{tool_of(backend, family)}-save", "-c") for family in ("ipv4", "ipv6"))
    return [int(count) for count in re.findall(r"^\[(\d+):", text, re.MULTILINE)]


@backends
def test_a_second_run_changes_nothing_and_counters_survive(backend: str, pods: Net) -> None:
    args = [*FULL, f"--backend={backend}"]
    assert pods.pod.init(*args).code == 0
    for version in (4, 6):
        pods.pod.call(ask(PEER[version], 7000), uid=1000)
        pods.peer.call(ask(POD[version], 15020))
    before = counters(pods.pod, backend)
    assert sum(count > 0 for count in before) > 5, "some rules have counted"
    run = pods.pod.init(*args, "--json", "--log_output_level=warn")
    assert (run.code, run.document["action"], run.document["drift"], run.err) == (0, "unchanged", [], "")
    assert pods.pod.init(*args, "--reconcile", "--json").document["action"] == "unchanged"
    after = counters(pods.pod, backend)
    # Neighbour discovery goes on counting.
    assert all(new >= old for old, new in zip(before, after, strict=True))


@backends
def test_comments_make_no_difference_to_the_check(backend: str, pods: Net) -> None:
    args = [*FULL, f"--backend={backend}", "--json"]
    assert pods.pod.init(*args, "--comments").code == 0
    assert "conntrack zones of DNS" in "".join(pods.pod.save().values())
    assert pods.pod.init(*args).document["action"] == "unchanged"


@backends
def test_force_apply_writes_the_same_rules_anew(backend: str, pods: Net) -> None:
    args = [*FULL, f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).code == 0
    before = pods.pod.save()
    for _ in range(20):
        pods.pod.call(ask(PEER[4], 7000), uid=1000)
    counted = counters(pods.pod, backend)
    run = pods.pod.init(*args, "--force-apply")
    assert (run.code, run.document["action"]) == (0, "replaced")
    assert sum(counters(pods.pod, backend)) < sum(counted), "the rules are new"
    after = pods.pod.save()
    for name in before:
        assert _meaningful(_no_counts(after[name])) == _meaningful(_no_counts(before[name])), name


def test_back_ends_give_the_kernel_the_same_rules() -> None:
    """libiptc, the legacy restore tool and nft, compared as their own save tool shows them."""
    shown = {}
    for backend in XTABLES:
        with net() as made:
            assert made.pod.init(*FULL, f"--backend={backend}").code == 0
            saved = made.pod.save()
            texts = [saved[f"{tool_of(backend, family)}-save"] for family in ("ipv4", "ipv6")]
            # The order of tables and of the chains' declarations is the tool's.
            shown[backend] = [sorted(line for line in text.splitlines() if line.startswith("-A")) for text in texts]
    assert shown["legacy"] == shown["legacy-restore"] == shown["nft"]


# --- drift ----------------------------------------------------------------------------------

FOREIGN = ["-p tcp -j RETURN", "-p udp --dport 53 -j ACCEPT", "-j ACCEPT", "-p tcp --dport 80 -j RETURN"]


def edit_xtables(pod: Here, backend: str, rng: random.Random) -> str:
    """One random manual edit of the rules; says which."""
    family = rng.choice(["ipv4", "ipv6"])
    tool = tool_of(backend, family)
    table = rng.choice(["nat", "mangle", "raw"])
    chains: dict[str, list[str]] = {}
    for line in pod.tool(tool, "-t", table, "-S").splitlines():
        if line.startswith("-A "):
            _, chain, rule = line.split(" ", 2)
            chains.setdefault(chain, []).append(rule)
    chain = rng.choice(sorted(chains))
    rules = chains[chain]
    number = rng.randrange(len(rules)) + 1
    kind = rng.choice(["delete", "duplicate", "insert", "reorder"])
    if kind == "delete":
        pod.tool(tool, "-t", table, "-D", chain, str(number))
    elif kind == "duplicate":
        pod.tool(tool, "-t", table, "-I", chain, str(rng.randrange(len(rules)) + 1), *rules[number - 1].split())
    elif kind == "insert":
        # In a built-in chain a rule behind all of ours is nobody's business.
        pod.tool(tool, "-t", table, "-I", chain, "1", *rng.choice(FOREIGN).split())
    else:
        rest = [*rules[: number - 1], *rules[number:]]
        places = [at for at in range(len(rules)) if [*rest[:at], rules[number - 1], *rest[at:]] != rules]
        if not places:
            return edit_xtables(pod, backend, rng)
        pod.tool(tool, "-t", table, "-D", chain, str(number))
        pod.tool(tool, "-t", table, "-I", chain, str(rng.choice(places) + 1), *rules[number - 1].split())
    return f"{kind} {family} {table} {chain} {number} {rules[number - 1]}"


def edit_native(pod: Here, rng: random.Random) -> str:
    """The same for nftables."""
    listing = json.loads(pod.tool("nft", "-j", "list", "ruleset", "inet"))["nftables"]
    rules = [item["rule"] for item in listing if "rule" in item]
    rule = rng.choice(rules)
    same = [other for other in rules if (other["table"], other["chain"]) == (rule["table"], rule["chain"])]
    place = ["inet", rule["table"], rule["chain"]]
    kind = rng.choice(["delete", "duplicate", "insert", "reorder"])
    body = _body(pod, rule)
    if kind == "delete":
        pod.tool("nft", "delete", "rule", *place, "handle", str(rule["handle"]))
    elif kind == "duplicate":
        pod.tool("nft", "-f", "-", text=f"add rule {' '.join(place)} {body}\n")
    elif kind == "insert":
        pod.tool("nft", "-f", "-", text=f"insert rule {' '.join(place)} tcp dport 80 counter accept\n")
    else:
        others = [other for other in same if _body(pod, other) != body]
        if not others:
            return edit_native(pod, rng)
        moved = f"delete rule {' '.join(place)} handle {rule['handle']}\n"
        moved += (
            f"insert rule {' '.join(place)} {body}\n" if same[0] is not rule else f"add rule {' '.join(place)} {body}\n"
        )
        pod.tool("nft", "-f", "-", text=moved)
    return f"{kind} {place} {body}"


def _body(pod: Here, rule: dict[str, object]) -> str:
    text = pod.tool("nft", "-a", "list", "chain", "inet", str(rule["table"]), str(rule["chain"]))
    line = next(
        line for line in text.splitlines() if line.endswith(f"# handle {rule['handle']}") and "chain " not in line
    )
    return re.sub(r"counter packets \d+ bytes \d+", "counter", line.split(" # handle")[0].strip())


# The two legacy back ends differ in how they write only, which other tests compare.
@pytest.mark.parametrize("backend", ["legacy", "nft", "native-nft"])
def test_twenty_random_edits_are_each_seen_and_mended(backend: str, pods: Net) -> None:
    args = [*FULL, f"--backend={backend}", "--json"]

    def work() -> list[str]:
        """What went wrong."""
        wrong = []
        HERE.init(*args)
        clean = rules_of(HERE, backend)
        for seed in range(20):
            rng = random.Random(seed)
            edited = edit_native(HERE, rng) if backend == "native-nft" else edit_xtables(HERE, backend, rng)
            if backend != "native-nft":
                seen = HERE.init(*args)
                lines = [line for line in seen.err.splitlines() if re.match(r"[+-](?!\+\+|-- )", line)]
                if seen.code != 1 or "rules differ" not in seen.err or not lines:
                    wrong.append(f"seed {seed} not seen: {edited}: {seen}")
            mended = HERE.init(*args, "--reconcile")
            if mended.code or mended.document["action"] != "reconciled" or not mended.document["drift"]:
                wrong.append(f"seed {seed} not reconciled: {edited}: {mended}")
            # Foreign rules that were put in front are still there, behind ours.
            if _without_foreign(rules_of(HERE, backend)) != clean:
                wrong.append(f"seed {seed} not mended: {edited}")
        return wrong

    assert pods.pod.call(work) == []


def rules_of(pod: Here, backend: str) -> list[str]:
    if backend == "native-nft":
        return re.sub(
            r"packets \d+ bytes \d+|# handle \d+", "", pod.tool("nft", "list", "ruleset", "inet")
        ).splitlines()
    saved = pod.save()
    return [
        f"{family} {line}"
        for family in ("ipv4", "ipv6")
        for line in saved[f"{tool_of(backend, family)}-save"].splitlines()
        if line.startswith("-A")
    ]


def _without_foreign(rules: list[str]) -> list[str]:
    foreign = re.compile(
        r"ipv[46] -A (PREROUTING|OUTPUT) (-p tcp -j RETURN|-p udp -m udp --dport 53 -j ACCEPT|-j ACCEPT|-p tcp -m tcp --dport 80 -j RETURN)$"
    )
    return [rule for rule in rules if not foreign.match(rule)]


@xtables_backends
def test_a_stale_chain_of_another_configuration_is_seen_and_removed(backend: str, pods: Net) -> None:
    assert pods.pod.init("--ipv6=off", "-m", "TPROXY", "-b", "*", "-u", "1337", f"--backend={backend}").code == 0
    plain = ["--ipv6=off", "-b", "*", "-u", "1337", f"--backend={backend}", "--json"]
    assert pods.pod.init(*plain).code == 1
    run = pods.pod.init(*plain, "--reconcile")
    assert {drift["kind"] for drift in run.document["drift"]} >= {"unexpected", "changed"} or run.code == 0
    assert "ISTIO_TPROXY" not in "".join(pods.pod.save().values())
    assert pods.pod.init(*plain).document["action"] == "unchanged"


@xtables_backends
def test_ipv6_rules_left_behind_are_seen_with_ipv6_off(backend: str, pods: Net) -> None:
    assert pods.pod.init("--ipv6=on", "-u", "1337", f"--backend={backend}").code == 0
    off = ["--ipv6=off", "-u", "1337", f"--backend={backend}", "--json"]
    assert pods.pod.init(*off).code == 1
    assert pods.pod.init(*off, "--reconcile").document["action"] == "reconciled"
    assert "ISTIO_" not in pods.pod.save()[f"{tool_of(backend, 'ipv6')}-save"]
    assert pods.pod.init(*off).document["action"] == "unchanged"


def test_native_mends_without_being_told_and_removes_stale_tables(pods: Net) -> None:
    assert pods.pod.init(*FULL, "--native-nftables").code == 0
    run = pods.pod.init("--ipv6=off", "-u", "1337", "--native-nftables", "--json")
    assert (run.code, run.document["action"]) == (0, "reconciled")
    assert "istio-proxy-mangle" not in pods.pod.save()["nft"]
    assert "istio-proxy-raw" not in pods.pod.save()["nft"]


def test_a_native_difference_is_in_words_that_nft_reads(pods: Net) -> None:
    """Rules of another configuration are no words of ours: they are told from nft's listing."""
    full = [*FULL, "--native-nftables"]
    assert pods.pod.init(*full).code == 0
    run = pods.pod.init("--ipv6=off", "-u", "7", "--native-nftables", "--json")
    told = [
        f"add rule inet {drift['table']} {drift['chain']} {text}\n"
        for drift in run.document["drift"]
        for text in drift["actual"]
    ]
    assert len(told) > 40
    assert "packets" not in "".join(told), "counts are no difference"
    assert '{"' not in run.err
    assert pods.pod.init(*full).code == 0
    before = pods.pod.save()["nft"]
    flush = "".join(f"flush chain inet {drift['table']} {drift['chain']}\n" for drift in run.document["drift"])
    pods.pod.tool("nft", "-f", "-", text=flush + "".join(told))
    assert _no_counts(pods.pod.save()["nft"]) == _no_counts(before), "and they are the rules that were there"


# --- foreign rules --------------------------------------------------------------------------


def foreign(pod: Place, backend: str) -> None:
    """Rules of somebody else, before and after ours, with chains of their own."""
    if backend == "native-nft":
        script = "table inet theirs { chain out { type filter hook output priority 0; tcp dport 9 counter drop; }; }\n"
        pod.tool("nft", "-f", "-", text=script + "table ip nat { chain FOO { }; }\n")
        return
    for family in ("ipv4", "ipv6"):
        address = "192.0.2.1/32" if family == "ipv4" else "2001:db8::1/128"
        text = (
            "*nat\n:THEIRS - [0:0]\n"
            f'-A OUTPUT -d {address} -p tcp -m comment --comment "theirs, not ours" -j THEIRS\n'
            f"-A POSTROUTING -d {address} -j MASQUERADE\n-A THEIRS -p tcp -m tcp --dport 80 -j RETURN\nCOMMIT\n"
            "*filter\n:OURS_NOT - [0:0]\n-A INPUT -p tcp -m tcp --dport 9 -j DROP\n-A OUTPUT -p udp -j OURS_NOT\nCOMMIT\n"
            f"*mangle\n-A OUTPUT -d {address} -j MARK --set-xmark 0x7/0xffffffff\nCOMMIT\n"
        )
        pod.tool(f"{tool_of(backend, family)}-restore", "--noflush", text=text)


@backends
def test_foreign_rules_survive_everything_byte_for_byte(backend: str, pods: Net) -> None:
    foreign(pods.pod, backend)
    before = pods.pod.save()
    args = [*FULL, f"--backend={backend}"]
    assert pods.pod.init(*args).code == 0
    assert pods.pod.init(*args).code == 0, "foreign rules are no drift"
    assert pods.pod.init(*args, "--reconcile").code == 0
    assert pods.pod.init(*args, "--force-apply").code == 0
    assert pods.pod.init(*args, "--cleanup-only").code == 0
    after = pods.pod.save()
    for name in before:
        assert _meaningful(after[name]) == _meaningful(before[name]), name
    assert "ISTIO" not in "".join(after.values())


def _no_counts(text: str) -> str:
    return re.sub(r"packets \d+ bytes \d+", "", text)


def _meaningful(text: str) -> str:
    """Tables that a tool has created, and left without rules or chains, are no difference."""
    parts = re.split(r"(?=^\*)", text, flags=re.MULTILINE)
    return "".join(part for part in parts if re.search(r"^(-A|:.* -$)|^table", part, re.MULTILINE))


@xtables_backends
def test_a_foreign_rule_put_in_front_is_seen_and_ours_go_back_to_the_top(backend: str, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    tool = tool_of(backend)
    pods.pod.tool(tool, "-t", "nat", "-A", "OUTPUT", "-d", "192.0.2.1/32", "-j", "ACCEPT")
    assert pods.pod.init(*args).code == 0
    assert pods.pod.init(*args).document["action"] == "unchanged", "what was there before is no drift"
    pods.pod.tool(tool, "-t", "nat", "-I", "OUTPUT", "-p", "tcp", "-j", "RETURN")
    pods.pod.serve(listen(15001), uid=1337)
    pods.peer.serve(listen(80), uid=0)
    assert pods.pod.call(ask(PEER[4], 80), uid=1000)["listener"] == 80, "the foreign rule leaks"
    seen = pods.pod.init(*args)
    assert seen.code == 1
    assert "in-front" in seen.err
    assert pods.pod.init(*args, "--reconcile").document["drift"][0]["kind"] == "in-front"
    rules = pods.pod.tool(tool, "-t", "nat", "-S", "OUTPUT").splitlines()[1:]
    assert rules == ["-A OUTPUT -j ISTIO_OUTPUT", "-A OUTPUT -p tcp -j RETURN", "-A OUTPUT -d 192.0.2.1/32 -j ACCEPT"]
    assert pods.pod.call(ask(PEER[4], 80), uid=1000)["listener"] == 15001
    assert pods.pod.init(*args).document["action"] == "unchanged"


@xtables_backends
def test_a_foreign_rule_that_decides_first_is_warned_of_at_the_first_run(backend: str, pods: Net) -> None:
    pods.pod.tool(tool_of(backend), "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", "RETURN")
    run = pods.pod.init(*DEFAULT, "--ipv6=off", f"--backend={backend}")
    assert run.code == 0
    assert "a foreign rule decides in front of ours: ipv4 nat OUTPUT -p tcp -j RETURN" in run.err


@xtables_backends
def test_mending_leaves_ours_before_a_foreign_rule_that_came_later(backend: str, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    tool = tool_of(backend)
    assert pods.pod.init(*args).code == 0
    pods.pod.tool(tool, "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", "ACCEPT")
    pods.pod.tool(tool, "-t", "nat", "-D", "ISTIO_OUTPUT", "1")
    assert pods.pod.init(*args, "--reconcile").code == 0
    assert pods.pod.tool(tool, "-t", "nat", "-S", "OUTPUT").splitlines()[1:] == [
        "-A OUTPUT -j ISTIO_OUTPUT",
        "-A OUTPUT -p tcp -j ACCEPT",
    ]


# --- cleanup and guards ---------------------------------------------------------------------


def test_cleanup_without_a_name_finds_every_back_end(pods: Net) -> None:
    for backend in ("legacy", "nft", "native-nft"):
        assert pods.pod.init(*FULL, f"--backend={backend}").code == 0
    run = pods.pod.init("--ipv6=off", "--cleanup-only", "--json")
    assert run.document["action"] == "cleaned"
    assert run.document["backend"] == "legacy,nft,native-nft"
    left = "".join(pods.pod.save().values())
    assert "ISTIO" not in left
    assert "istio" not in left


@xtables_backends
def test_cleanup_removes_a_jump_from_a_foreign_chain_too(backend: str, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}"]
    assert pods.pod.init(*args).code == 0
    tool = tool_of(backend)
    pods.pod.tool(tool, "-t", "nat", "-N", "THEIRS")
    pods.pod.tool(tool, "-t", "nat", "-A", "THEIRS", "-j", "ISTIO_REDIRECT")
    assert pods.pod.init(*args, "--cleanup-only").code == 0
    assert pods.pod.tool(tool, "-t", "nat", "-S").splitlines()[-1] == "-N THEIRS"


@xtables_backends
def test_guards_of_a_killed_run_are_taken_away_by_the_next(backend: str, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).code == 0
    tool = tool_of(backend)
    pods.pod.tool(tool, "-A", "INPUT", "-p", "tcp", "-j", "DROP")
    mine = pods.pod.tool(tool, "-S")
    for chain in ("INPUT", "FORWARD", "OUTPUT"):
        for proto in ("tcp", "udp"):
            pods.pod.tool(tool, "-I", chain, "1", "-p", proto, "-j", "DROP")
    pods.pod.tool(tool, "-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    assert pods.pod.init(*args, "--reconcile").code == 0
    assert pods.pod.tool(tool, "-S") == mine, "guards are gone, the foreign DROP stays"


@xtables_backends
def test_a_refused_document_changes_nothing(backend: str, pods: Net) -> None:
    """Two tables, a bad word in the second: the check comes before the first commit."""
    before = pods.pod.save()
    args = ["--ipv6=on", "-u", "nosuchuser,1", "--redirect-dns", "--dns-servers=10.9.0.53", f"--backend={backend}"]
    run = pods.pod.init(*args)
    assert run.code == 1
    assert "nosuchuser" in run.err
    after = pods.pod.save()
    assert {name: _meaningful(after[name]) for name in after} == {name: _meaningful(before[name]) for name in before}


def test_native_refusal_names_what_nft_said(pods: Net) -> None:
    run = pods.pod.init("--ipv6=off", "--redirect-dns", "--dns-servers=fd09::53", "--native-nftables")
    assert run.code == 1
    assert "nft refused the rules" in run.err
    assert "nft will refuse them" in run.err
    assert pods.pod.save()["nft"] == ""
