"""DNS messages: what a query asks, and the wire form of local answers. Pure.

A local answer is built once for each distinct question and kept as bytes; only the query id and, with several
addresses, their order change from reply to reply.

Source: istio/istio: pkg/dns/client/dns.go; miekg/dns: msg.go, msg_truncate.go, acceptfunc.go.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from agent.dns.table import LookupTable

if TYPE_CHECKING:
    import dns.message

TTL = 30
A, CNAME, OPT, AAAA = 1, 5, 41, 28
QUERY, NOTIFY = 0, 4
NOERROR, FORMERR, SERVFAIL, NOTIMP, REFUSED = 0, 1, 2, 4, 5
UDP_MINIMUM = 512
TCP_MAXIMUM = 65535

_QR, _AA, _TC, _RD, _CD = 0x8000, 0x0400, 0x0200, 0x0100, 0x0010
_HEADER = struct.Struct("!HHHHHH")
_RECORD = struct.Struct("!HHIH")
# A compressed name: the one at offset 12, where the question starts.
_TO_QUESTION = b"\xc0\x0c"


class Verdict(Enum):
    """What a packet is."""

    QUESTION = "question"
    NO_QUESTION = "no question"
    MALFORMED = "malformed"
    IGNORED = "ignored"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Query:
    """A parsed query. `question` is its first question in wire form (name, type, class) as it came."""

    verdict: Verdict
    flags: int = 0
    question: bytes = b""
    name: bytes = b""
    type: int = 0
    udp_size: int = UDP_MINIMUM
    plain: bool = False
    rcode: int = NOERROR

    @property
    def lowered(self) -> bytes:
        """The name in wire form, lower-cased (a label's length byte is below 64, so it is no letter)."""
        return self.name.lower()


def parse_message(data: bytes) -> dns.message.Message | None:
    """The whole message, None if it does not parse; bytes behind it are ignored."""
    # Imported here: the agent loads dnspython while Envoy starts, not before.
    import dns.exception
    import dns.message

    try:
        return dns.message.from_wire(data, keyring=False, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError, IndexError, struct.error):
        return None


def parse_query(data: bytes) -> Query:
    """Classifies a packet; `plain` queries carry nothing that differs between repeats of the same question."""
    if len(data) < 12:
        return Query(Verdict.MALFORMED)
    _, flags, questions, answers, authorities, additionals = _HEADER.unpack_from(data)
    if flags & _QR:
        return Query(Verdict.IGNORED)
    opcode = flags >> 11 & 0xF
    if opcode not in (QUERY, NOTIFY):
        return Query(Verdict.REJECTED, flags, rcode=NOTIMP)
    if answers > 1 or authorities > 1 or additionals > 2:
        return Query(Verdict.REJECTED, flags, rcode=FORMERR)
    message = parse_message(data)
    if message is None:
        return Query(Verdict.MALFORMED)
    if not message.question:
        return Query(Verdict.NO_QUESTION, flags)
    end = 12
    while data[end]:
        if data[end] > 63:
            return Query(Verdict.MALFORMED)
        end += data[end] + 1
    end += 1
    name, (qtype, _) = data[12:end], struct.unpack_from("!HH", data, end)
    size = max(UDP_MINIMUM, message.payload) if message.edns >= 0 else UDP_MINIMUM
    plain = questions == 1 and not answers and not authorities and not message.options and additionals < 2
    return Query(Verdict.QUESTION, flags, data[12 : end + 4], name, qtype, size, plain)


def _reply_flags(flags: int, rcode: int) -> int:
    kept = flags & 0x7800
    if not kept:
        kept = flags & (_RD | _CD)
    return _QR | kept | rcode


def error_reply(data: bytes, query: Query, rcode: int) -> bytes:
    """A reply without records; the question is echoed if there is one."""
    header = data[:2] + struct.pack("!HHHHH", _reply_flags(query.flags, rcode), 1 if query.question else 0, 0, 0, 0)
    return header + query.question


class LocalAnswer:
    """The answer to one question for one size limit; `reply()` is everything behind the query id.

    A reply is `head`, the owner's name, and the records without owner, joined by the owner's name or a pointer to it.
    """

    __slots__ = ("_glue", "_head", "_keep", "_records", "fixed")

    def __init__(self, head: bytes, records: Sequence[bytes] = (), glue: bytes = b"", keep: int = 0) -> None:
        self._head, self._records, self._glue, self._keep = head, tuple(records), glue, keep
        # The bytes of every reply if there is nothing to shuffle.
        self.fixed = head + glue.join(self._records[:keep]) if len(self._records) < 2 or not keep else None

    def reply(self) -> bytes:
        """One reply; several addresses come in random order, and a truncated answer holds a random choice of them."""
        if self.fixed is not None:
            return self.fixed
        records = self._records
        if len(records) == 2:
            if random.getrandbits(1):
                records = (records[1], records[0])
        else:
            records = tuple(random.sample(records, len(records)))
        return self._head + self._glue.join(records[: self._keep])


def local_answer(query: Query, table: LookupTable, size: int) -> LocalAnswer | None:
    """The answer from the table, fitted to `size` bytes; None if the question must be forwarded."""
    if query.type not in (A, AAAA):
        return None
    match = table.lookup(query.lowered)
    if match is None:
        return None
    addresses = match.ipv4 if query.type == A else match.ipv6
    flags = _reply_flags(query.flags, NOERROR) | _AA
    if not addresses:
        return LocalAnswer(_header(flags, 0) + query.question)
    tail = _RECORD.pack(query.type, 1, TTL, len(addresses[0]))
    records = [tail + address for address in addresses]
    alias = b""
    if match.target is not None:
        alias = query.lowered + _RECORD.pack(CNAME, 1, TTL, len(match.target)) + match.target
    length = 12 + len(query.question) + len(alias) + len(records) * (len(match.owner) + len(records[0]))
    if length <= size:
        head = _header(flags, len(records) + (1 if alias else 0)) + query.question + alias + match.owner
        return LocalAnswer(head, records, match.owner, len(records))
    return _compressed(query, match.target, records, flags, size)


def _header(flags: int, answers: int) -> bytes:
    return struct.pack("!HHHHH", flags, 1, answers, 0, 0)


def _compressed(query: Query, target: bytes | None, records: Sequence[bytes], flags: int, size: int) -> LocalAnswer:
    # Records carry lower-case names, so only a lower-case question can be pointed to (RFC 1035, 4.1.4).
    lowered = query.lowered
    asked = _TO_QUESTION if query.name == lowered else lowered
    body, count, owner = query.question, 0, asked
    if target is not None:
        body += asked + _RECORD.pack(CNAME, 1, TTL, len(target))
        owner = struct.pack("!H", 0xC000 | 12 + len(body))
        body += target
        count = 1
        if 12 + len(body) > size:
            # Records go from the end, and the alias is the last that is left.
            return LocalAnswer(_header(flags | _TC, 0) + query.question)
    pointer = owner if len(owner) == 2 else struct.pack("!H", 0xC000 | 12 + len(body))
    room = size - 12 - len(body) - len(owner) - len(records[0])
    keep = min(len(records), 1 + room // (len(pointer) + len(records[0]))) if room >= 0 else 0
    if keep < len(records):
        flags |= _TC
    head = _header(flags, count + keep) + body
    return LocalAnswer(head + owner if keep else head, records, pointer, keep)
