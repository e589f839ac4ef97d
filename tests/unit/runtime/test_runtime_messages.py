"""Messages between supervisor, zygote and places; the specs that travel in them."""

from __future__ import annotations

import json
import os
import socket

import pytest

from lab.errors import InputError, LabError, ObservationError
from lab.runtime import channel
from lab.runtime.client import host_pid
from lab.runtime.identity import APP, INIT, PROXY, ROOT, Identity, of_uid
from lab.runtime.keeper import code_of
from lab.runtime.launch import clean_environ
from lab.runtime.lines import error_from_json, error_to_json
from lab.runtime.mounts import View
from lab.runtime.spawn import ProcessSpec


@pytest.mark.parametrize("identity", [ROOT, INIT, PROXY, APP, Identity(5, 6, frozenset({"NET_RAW"}))])
def test_spec_survives_the_way(identity: Identity) -> None:
    spec = ProcessSpec(
        name="agent",
        entry="agent.cli:main",
        args=(["proxy", "sidecar"],),
        env={"A": "b"},
        identity=identity,
        cwd="/run/sidecar",
        log="/run/sidecar/log/agent.log",
        notify=True,
    )
    assert ProcessSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    program = ProcessSpec(name="app", argv=("sleep", "1"), identity=identity)
    assert ProcessSpec.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_view_survives_the_way() -> None:
    view = View("/run/sidecarlab/x/pods/p", ("/usr", "/opt"), {"/etc/hosts": "127.0.0.1\tlocalhost\n"})
    assert View.from_json(json.loads(json.dumps(view.to_json()))) == view


@pytest.mark.parametrize("wrong", [{}, {"argv": ("a",), "entry": "b:c"}])
def test_spec_is_a_program_or_an_entry(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either argv or entry"):
        ProcessSpec(name="x", **wrong)  # type: ignore[arg-type]


def test_unknown_capability_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown capability CAP_NET_RAW"):
        Identity(0, 0, frozenset({"CAP_NET_RAW"}))


def test_uid_alone_says_who() -> None:
    assert of_uid(0) == ROOT
    assert of_uid(1000) == APP
    assert of_uid(7, 8) == Identity(7, 8)


def test_message_and_descriptor_arrive_together() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        read, write = os.pipe()
        channel.send(ours, {"op": "x", "text": "ü"}, (write,))
        os.close(write)
        received = channel.receive(theirs)
        assert received is not None
        message, (fd,) = received
        assert message == {"op": "x", "text": "ü"}
        assert not os.get_inheritable(fd)
        os.write(fd, b"through")
        os.close(fd)
        assert os.read(read, 100) == b"through"
        os.close(read)


def test_large_messages_arrive_whole() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        # Up to what an unprivileged socket may buffer; root's pairs take a mebibyte.
        text = "x" * 100_000
        channel.send(ours, {"text": text})
        received = channel.receive(theirs)
        assert received is not None
        assert received[0] == {"text": text}


def test_end_of_file_is_none() -> None:
    ours, theirs = channel.pair()
    with theirs:
        ours.close()
        assert channel.receive(theirs) is None
        with pytest.raises(BrokenPipeError):
            channel.send(theirs, {})


def test_channel_is_closed_on_exec() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        assert not ours.get_inheritable()
        assert not theirs.get_inheritable()


def test_host_pid_of_a_pidfd() -> None:
    fd = os.pidfd_open(os.getpid())
    assert host_pid(fd) == os.getpid()
    os.close(fd)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (7 << 8, 7), (9, 137), (15, 143)])
def test_wait_status_as_a_shell_gives_it(status: int, code: int) -> None:
    assert code_of(status) == code


def test_environment_of_our_processes_has_nothing_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example")
    monkeypatch.setenv("GRPC_TRACE", "all")
    assert set(clean_environ()) == {"PATH", "HOME", "LANG", "PYTHONPATH"}


@pytest.mark.parametrize("kind", [LabError, InputError, ObservationError])
def test_errors_survive_the_way(kind: type[LabError]) -> None:
    error = kind("what", "where:1", "why", "Next step")
    again = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert (type(again), str(again), again.exit_code) == (kind, str(error), error.exit_code)


def test_socket_pair_keeps_packets_apart() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        channel.send(ours, {"n": 1})
        channel.send(ours, {"n": 2})
        assert [channel.receive(theirs), channel.receive(theirs)] == [({"n": 1}, []), ({"n": 2}, [])]
        assert ours.type == socket.SOCK_SEQPACKET
