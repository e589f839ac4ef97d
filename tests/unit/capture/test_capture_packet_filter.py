"""The language of ``lab capture --filter``."""

from __future__ import annotations

import pytest

from lab.capture import packet_filter
from lab.errors import InputError
from lab.trace.flows import Flow

APP = (0x0800, Flow("tcp", "10.244.1.1", 40000, "10.96.20.30", 8080))
QUERY = (0x0800, Flow("udp", "10.244.1.1", 41000, "10.96.0.10", 53))
PING = (0x0800, Flow("icmp", "10.244.1.1", 53, "10.96.0.10", 0))
SIX = (0x86DD, Flow("tcp", "fd00::1", 40000, "fd00::2", 443))
ARP = (0x0806, None)
ALL = {"app": APP, "query": QUERY, "ping": PING, "six": SIX, "arp": ARP}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", "app query ping six arp"),
        ("tcp", "app six"),
        ("udp or arp", "query arp"),
        ("icmp", "ping"),
        ("ip", "app query ping"),
        ("ip6", "six"),
        ("not ip", "six arp"),
        ("port 53", "query"),
        ("dst port 8080", "app"),
        ("src port 8080", ""),
        ("tcp portrange 440-450", "six"),
        ("host 10.96.0.10", "query ping"),
        ("src host 10.96.0.10", ""),
        ("net 10.96.0.0/16 and not icmp", "app query"),
        ("host fd00:0::2", "six"),
        ("tcp and (port 443 or port 8080) and host 10.244.1.1", "app"),
        ("tcp && !port 443", "app"),
        ("udp || tcp and port 443", "query six"),
        ("!(tcp or udp)", "ping arp"),
    ],
)
def test_keeps(text: str, kept: str) -> None:
    keep = packet_filter.parse(text)
    assert [name for name, packet in ALL.items() if keep(*packet)] == kept.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcp prt 80", '"prt" is not understood'),
        ("port eighty", '"eighty" is no port'),
        ("port 65536", '"65536" is no port'),
        ("portrange 80", '"" is no port'),
        ("host catalog", '"catalog" is no address'),
        ("net 10.0.0.1/8", '"10.0.0.1/8" is no network'),
        ("tcp and", "it ends too early"),
        ("(tcp", "a parenthesis is not closed"),
        ("tcp)", '")" is too much'),
    ],
)
def test_says_what_it_does_not_understand(text: str, why: str) -> None:
    with pytest.raises(InputError) as error:
        packet_filter.parse(text)
    assert error.value.why == why
    assert text in error.value.what
