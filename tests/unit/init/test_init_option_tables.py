"""Option tables of libxtables are read whole, with the entry size of any release (iptables 1.8.11 made entries larger)."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("iptc", reason="python-iptables cannot load libiptc here", exc_type=Exception)

from iptc.xtables import xt_option_entry

from init.libiptc import _options

NAMES = (b"source-ports", b"sports", b"dports")


class Larger(ctypes.Structure):
    _fields_ = (("entry", xt_option_entry), ("base", ctypes.c_uint))


def table(kind: type[ctypes.Structure], names: tuple[bytes, ...]) -> ctypes.Array[ctypes.Structure]:
    made = (kind * (len(names) + 1))()
    for i, name in enumerate(names):
        entry = made[i].entry if kind is Larger else made[i]
        entry.name, entry.id = name, i
    return made


@pytest.mark.parametrize("kind", [xt_option_entry, Larger])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_every_option_is_seen(kind: type[ctypes.Structure], count: int) -> None:
    memory = table(kind, NAMES[:count])
    seen = list(_options(ctypes.cast(memory, ctypes.POINTER(xt_option_entry))))
    assert [(entry.name, entry.id) for entry in seen] == [(name, i) for i, name in enumerate(NAMES[:count])]
