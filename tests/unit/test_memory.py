"""`lab.memory`: what is remembered counts only as long as all that it depends on is the same, and never makes a command fail."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import memory
from lab.cli import main
from lab.memory import Memory

MANIFEST = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SIDECARLAB_CACHE", "")
    file = tmp_path / "shop.yaml"
    file.write_text(MANIFEST)
    return file


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "sidecarlab").rglob("*.memory"))


def remember(file: Path, value: str = "first") -> None:
    known = Memory.of([str(file)])
    assert known.get("key", lambda: value) == value
    known.save()


def recalls(file: Path) -> bool:
    return Memory.of([str(file)]).get("key", lambda: "made again") == "first"


def test_what_was_made_is_there_the_next_time(manifest: Path) -> None:
    remember(manifest)
    assert recalls(manifest)


def _other_text(file: Path) -> None:
    file.write_text(MANIFEST + "---\n")


def _other_package(file: Path) -> None:
    (file.parent / "site-packages" / "new.dist-info").mkdir()


@pytest.mark.parametrize("change", [_other_text, _other_package])
def test_nothing_is_recalled_of_what_is_not_the_same_now(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    packages = manifest.parent / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    remember(manifest)
    assert recalls(manifest)
    os.utime(packages, ns=(0, 0))
    remember(manifest)
    change(manifest)
    assert not recalls(manifest)


def test_a_directory_stands_for_the_manifests_in_it(manifest: Path) -> None:
    remember(manifest.parent)
    (manifest.parent / "notes.txt").write_text("not a manifest")
    assert recalls(manifest.parent)
    (manifest.parent / "more.yml").write_text("---\n")
    assert not recalls(manifest.parent)


def test_what_was_made_while_a_manifest_changed_is_not_kept(manifest: Path, tmp_path: Path) -> None:
    def make() -> str:
        _other_text(manifest)
        return "first"

    known = Memory.of([str(manifest)])
    known.get("key", make)
    known.save()
    assert kept(tmp_path) == []


@pytest.mark.parametrize("loosen", ["file", "directory"])
def test_a_memory_that_others_could_have_written_is_not_read(manifest: Path, tmp_path: Path, loosen: str) -> None:
    remember(manifest)
    (file,) = kept(tmp_path)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path = file if loosen == "file" else file.parent
    path.chmod(path.stat().st_mode | 0o020)
    assert not recalls(manifest)


def test_nothing_is_kept_in_another_users_directory(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 1, 1)
    else:
        theirs = Path("/usr")
    monkeypatch.setenv("XDG_CACHE_HOME", str(theirs))
    remember(manifest)
    assert not recalls(manifest)
    assert not (theirs / "sidecarlab").exists()


def _a_file_is_there(cache: Path) -> None:
    cache.write_text("no directory")


def _truncated(cache: Path) -> None:
    (file,) = cache.rglob("*.memory")
    file.write_bytes(file.read_bytes()[:-5])


def _put(cache: Path, content: bytes) -> None:
    (file,) = cache.rglob("*.memory")
    file.write_bytes(content)


def _too_long(cache: Path) -> None:
    _put(cache, b"\x80\x05\x8e" + b"\xff" * 8)  # BINBYTES8 of 2**64-1 bytes: OverflowError


def _too_much(cache: Path) -> None:
    _put(cache, b"\x80\x05\x8e" + (2**62).to_bytes(8, "little"))  # BINBYTES8: MemoryError


def _damaged_inside(cache: Path) -> None:
    """The file is whole, what is kept under the key is not."""
    (file,) = cache.rglob("*.memory")
    with file.open("rb") as source:
        depends = pickle.load(source)
    damaged = b"\x80\x05\x8e" + b"\xff" * 8
    file.write_bytes(pickle.dumps(depends) + pickle.dumps({"key": damaged}))


def _fifo(cache: Path) -> None:
    (file,) = cache.rglob("*.memory")
    file.unlink()
    os.mkfifo(file, 0o600)


def _directory(cache: Path) -> None:
    (file,) = cache.rglob("*.memory")
    file.unlink()
    file.mkdir(0o700)


def _off(cache: Path) -> None:
    os.environ["SIDECARLAB_CACHE"] = "off"  # the fixture's monkeypatch puts it back


@pytest.mark.parametrize(
    "harm",
    [
        _a_file_is_there,
        _truncated,
        _too_long,
        _too_much,
        _damaged_inside,
        _fifo,
        _directory,
        _off,
    ],
)
def test_without_a_memory_everything_is_made(manifest: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    if harm is not _a_file_is_there:
        remember(manifest)
    harm(tmp_path / "cache")
    assert not recalls(manifest)
    remember(manifest)


def test_so_many_are_kept(manifest: Path, tmp_path: Path) -> None:
    for number in range(memory.KEPT + 3):
        manifest.write_text(MANIFEST + "---\n" * number)
        remember(manifest)
    assert len(kept(tmp_path)) == memory.KEPT
    assert recalls(manifest)


def _fail() -> str:
    raise AssertionError("it is remembered")


@pytest.mark.parametrize("verb", [["up", "--dry-run"], ["graph"], ["verify", "--proof", "predicted"], ["matrix"]])
def test_any_verb_that_reads_manifests_remembers_the_mesh(
    manifest: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with manifest.open("a") as file:
        file.write(
            "---\napiVersion: sidecarlab.dev/v1alpha1\nkind: TrafficTest\nmetadata: {name: own}\n"
            "spec: {from: {pod: web.shop}, to: {host: web.shop, port: 8080}, expect: {outcome: {result: ok}}}\n"
        )
    assert main([*verb, str(manifest)]) in (0, 1)
    capsys.readouterr()
    mesh = Memory.of([str(manifest)]).get("mesh", _fail)
    assert [pod.name for pod in mesh.pods] == ["web.shop"]  # type: ignore[attr-defined]
    assert mesh == Memory.of([str(manifest)]).mesh()


def test_bad_manifests_are_told_each_time(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest.write_text("kind: Nothing\n")
    assert [main(["graph", str(manifest)]) for _ in range(2)] == [2, 2]
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
