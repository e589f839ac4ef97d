"""What the machine refuses is said in one line, with the cause and what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fabric_lab import planned, pod, unique_name

from lab.errors import InputError, LabError, ObservationError
from lab.fabric import build, namespaces, netfilter, netlink, paths, record
from lab.fabric.record import Record

pytestmark = pytest.mark.root

NOBODY = 65534


@pytest.fixture
def name() -> Iterator[str]:
    chosen = unique_name()
    yield chosen
    record.down(chosen)


def test_without_root_a_lab_is_refused_before_anything_is_made(name: str) -> None:
    os.seteuid(NOBODY)
    try:
        with pytest.raises(InputError, match=r"^a lab cannot keep its record: .*: Permission denied\. Run as root$"):
            Record.create(name)
    finally:
        os.seteuid(0)
    assert not paths.run_dir(name).exists()


def test_without_root_a_namespace_is_refused(name: str) -> None:
    kept = Record.create(name)
    namespaces.prepare(kept)
    os.chown(paths.netns_dir(name), NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(InputError, match=r"^a network namespace cannot be made: node: .*\. Run as root"):
            namespaces.apart(lambda _stop: namespaces.make(kept, "node"))
    finally:
        os.seteuid(0)


def test_a_place_that_is_not_there_cannot_be_entered(name: str) -> None:
    Record.create(name)
    with pytest.raises(LabError, match=r"a namespace cannot be entered: .*/ns/a.shop: No such file"):
        namespaces.inside(paths.netns_path(name, "a.shop"), os.getpid)


def test_a_pin_that_nothing_is_mounted_on_cannot_be_entered(name: str) -> None:
    Record.create(name)
    pin = paths.netns_path(name, "a.shop")
    pin.touch()
    with pytest.raises(LabError, match="a namespace cannot be entered"):
        namespaces.inside(pin, os.getpid)


def test_of_many_requests_the_one_that_failed_is_named_with_the_kernel_s_words(name: str) -> None:
    def work(_stop: namespaces.Stop) -> None:
        namespaces.make(kept, "a.shop")
        with netlink.Route("a.shop") as route:
            good = [netlink.link_up(1), netlink.address(1, "10.0.0.1")]
            route.run(good)
            missing, later = netlink.address(9999, "10.0.0.3"), netlink.address(9999, "10.0.0.4")
            route.run([*good, missing, later, *good])

    kept = Record.create(name)
    namespaces.prepare(kept)
    with pytest.raises(LabError, match=r"^cannot add the address 10\.0\.0\.3: a\.shop: No such device"):
        namespaces.apart(work)


def test_without_nft_the_legacy_programs_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("iptables-legacy-restore", "ip6tables-legacy-restore"):
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"{program} is not installed")
        (tmp_path / program).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert netfilter.backend() == "legacy"


def test_without_any_program_the_missing_one_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not netfilter.kernel_has_nf_tables():
        pytest.skip("no nf_tables in this kernel")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ObservationError, match=r"services cannot be served: the program nft is missing\. Install"):
        build.build(planned(pod("a", "10.244.1.1")), Record.create(name))


def test_a_document_that_nft_refuses_changes_nothing(name: str) -> None:
    if not netfilter.kernel_has_nf_tables():
        pytest.skip("no nf_tables in this kernel")
    kept = Record.create(name)
    build.build(planned(pod("a", "10.244.1.1")), kept, backend="nft")

    def spoil() -> None:
        netfilter.apply_nft("delete table inet sidecarlab-services\ntable inet other { chain c { nonsense } }\n")

    with pytest.raises(LabError, match=r"^nft refused the rules of a lab: .*nonsense"):
        namespaces.inside(paths.netns_path(name, "node"), spoil)
    kept.close()
