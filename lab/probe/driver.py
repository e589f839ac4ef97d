"""The process that sends: it has scapy loaded, and forks one child a flow into the place where the flow begins.

``python -m lab.probe.driver FD``: orders come and results go as packets on the SOCK_SEQPACKET socket ``FD``
(``lab.runtime.channel``); its other end's death ends this process and all its children. Orders::

    {"op": "flow", "id": 1, "lab": NAME or "", "place": ..., "netns": path, "whole": true, "order": {...}}
    {"op": "judge"} with one descriptor: forks the judge, which answers on it
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.probe import craft, fence, flows, judge
from lab.probe.orders import Order, Sent
from lab.runtime import channel, enter
from lab.runtime.identity import ROOT, Identity


def main(control: socket.socket) -> int:
    """Serves orders until the other end is gone."""
    children: dict[int, tuple[enter.Child, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        try:
            channel.send(control, {"ready": True})
        except BrokenPipeError:  # who wanted it has gone meanwhile
            return 0
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    received = channel.receive(control)
                    if received is None:
                        return _end(children)
                    _obey(*received, control, children, selector)
                else:
                    child, number = children.pop(key.fd)
                    selector.unregister(key.fd)
                    _buried(control, child, number)


def _end(children: Mapping[int, tuple[enter.Child, int]]) -> int:
    for child, _ in children.values():
        child.kill()
    return 0


def _buried(control: socket.socket, child: enter.Child, number: int) -> None:
    code = child.wait(0)
    if code and number:
        _tell(control, {"id": number, "error": f"the flow's process ended with {code}"})


def _tell(control: socket.socket, message: channel.Message) -> None:
    """An answer, if whoever asked is still there: an interrupt ends it in the middle of flows."""
    with suppress(BrokenPipeError):
        channel.send(control, message)


def _obey(
    message: Mapping[str, Any],
    fds: list[int],
    control: socket.socket,
    children: dict[int, tuple[enter.Child, int]],
    selector: selectors.BaseSelector,
) -> None:
    number = int(message.get("id", 0))
    try:
        if message["op"] == "judge":
            here = enter.Place("", "here", Path("/proc/self/ns/net"))
            child = enter.start(here, lambda: judge.main(socket.socket(fileno=fds[0])), namespaces=("net",))
        else:
            child = _start_flow(message, control, number)
    except (LabError, OSError) as e:
        _tell(control, {"id": number, "error": str(e)})
        return
    finally:
        for fd in fds:
            os.close(fd)
    children[child.pidfd] = (child, number)
    selector.register(child.pidfd, selectors.EVENT_READ)


def _start_flow(message: Mapping[str, Any], control: socket.socket, number: int) -> enter.Child:
    order = Order(**message["order"])
    lab, name = str(message["lab"]), str(message["place"])
    place = enter.find(lab, name) if lab else enter.Place("", name, Path(message["netns"]))
    whole: tuple[enter.Kind, ...] = ("net", "mnt", "pid") if message.get("whole") else ("net",)

    def work() -> int:
        _tell(control, {"id": number, "sent": send(order).to_json()})
        return 0

    who = ROOT if order.crafted or order.uid == 0 else Identity(order.uid, order.uid)
    return enter.start(place, work, who, namespaces=whole)


def send(order: Order) -> Sent:
    """Sends a flow from where this process is, then a fence after it."""
    if order.crafted:
        deadline = time.monotonic() + order.timeout
        attempt = flows.Attempt(order, Sent("unreachable", port=order.port), deadline)
        if flows.find_address(attempt):
            assert attempt.sent.address is not None
            sent = craft.send(order, attempt.sent.address, deadline)
            sent.queries = attempt.sent.queries
        else:
            sent = attempt.sent
    else:
        sent = flows.run(order)
    towards = fence.gateway()
    if towards is not None:
        try:
            sent.fence = fence.send(towards)
        except OSError as e:
            sent.error = sent.error or f"no fence could be sent: {e.strerror}"
    return sent


if __name__ == "__main__":
    try:
        sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError:
        traceback.print_exc()
        sys.exit(1)
