"""Single rule sets and packets about which evaluator and kernel, or the observer of the kernel, once did not agree."""

from __future__ import annotations

from collections.abc import Iterator

import explain_disagreement as disagreement
import pytest
from explain_ground import CAPTURE, Ground, make
from explain_shrink import smallest

from lab.explain.packet import Packet

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]


@pytest.fixture(scope="module", params=["legacy", "nft"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    made = make(request.param)
    yield made
    made.close()


def _sent_back(address: str) -> str:
    """TCP to anywhere else comes back to a program here, and is counted on its way out."""
    return (
        "*mangle\n-A POSTROUTING -p tcp\nCOMMIT\n"
        f"*nat\n-A OUTPUT -p tcp -m tcp --dport 80 -j DNAT --to-destination {address}:{CAPTURE}\nCOMMIT\n"
    )


@pytest.mark.parametrize(
    ("source", "destination"),
    [("10.5.0.2", "203.0.113.9"), ("fd00:5::2", "2001:db8::9"), ("::1", "::1"), ("127.0.0.1", "127.0.0.1")],
)
def test_a_reset_is_a_packet_of_its_own(ground: Ground, source: str, destination: str) -> None:
    """The program answers SYN, ACK; nobody asked it, so the kernel sends RST: the same addresses and ports, out over ``lo`` again."""
    documents = [_sent_back("10.5.0.2"), _sent_back("[fd00:5::2]")]
    rules = ground.apply(documents)
    packet = ground.with_port(Packet(6, source, destination, 0, 80, uid=1000, gid=1000))
    sent = ground.send([packet])[0]
    assert sent.first == (("nat", "OUTPUT", 1), ("mangle", "POSTROUTING", 1))
    assert sent.again == ()
    assert disagreement.in_the_verdict(packet, sent, rules, None) == ""
    out = [p for p in ground.place.index.packets("tcp", source, packet.sport) if p.hook == "output"]
    assert ["postrouting" in {ground.listing.hook(s) for s in p.steps} for p in out] == [True, True]


ENDS = [("10.5.0.2", "203.0.113.9"), ("fd00:5::2", "2001:db8::9"), ("10.5.0.2", "10.7.0.1"), ("fd00:5::2", "fd00:7::1")]


def _refusing(answer: str, chain: str) -> str:
    """Resets for port 80; in ``chain`` (if it is one) resets are refused themselves."""
    second = f"-A {chain} -p tcp -m tcp --tcp-flags RST RST -j REJECT --reject-with {answer}\n" if chain else ""
    return (
        f"*filter\n-A OUTPUT -p tcp -m tcp --dport 80 -j REJECT --reject-with tcp-reset\n{second}COMMIT\n"
        f"*nat\n-A OUTPUT -p tcp -m tcp --dport 81 -j DNAT --to-destination :{CAPTURE}\nCOMMIT\n"
    )


@pytest.mark.parametrize(("source", "destination"), ENDS)
@pytest.mark.parametrize("chain", ["", "OUTPUT", "INPUT"])
def test_a_reset_that_is_rejected_itself_confirms_the_connection_that_it_refuses(
    ground: Ground, source: str, destination: str, chain: str
) -> None:
    """The ICMP error about the reset goes the way of the first packet (SIDECARLAB_FUZZ_SEED=2911353531): the packet was rejected
    all the same, as predicted, and without such a second rule no connection comes of it."""
    rules = ground.apply([_refusing("icmp-port-unreachable", chain), _refusing("icmp6-port-unreachable", chain)])
    packet = ground.with_port(Packet(6, source, destination, 0, 80, uid=1000, gid=1000))
    sent = ground.send([packet])[0]
    assert (sent.first, sent.again) == ((("filter", "OUTPUT", 1),), None)
    assert (sent.entry is not None) == bool(chain)
    assert disagreement.in_the_verdict(packet, sent, rules, None) == ""


def test_a_failure_is_shrunk_to_the_rules_that_it_needs() -> None:
    rules = [f"-A OUTPUT -p tcp --dport {port} -j RETURN" for port in range(1, 40)]
    document = "\n".join(["*nat", ":OUTPUT ACCEPT [0:0]", *rules, "COMMIT", ""])
    small = smallest([document, document], lambda tried: rules[6] in tried[0] and rules[30] in tried[0], 30.0)
    assert small == [
        "\n".join(["*nat", ":OUTPUT ACCEPT [0:0]", rules[6], rules[30], "COMMIT", ""]),
        "\n".join(["*nat", ":OUTPUT ACCEPT [0:0]", "COMMIT", ""]),
    ]
