"""A stored mesh counts only while the manifests are those that it was read from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.errors import InputError
from lab.manifests import load as reading
from lab.manifests import stored

POD = """
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: shop}
spec: {containers: [{name: app}]}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "manifests"
    directory.mkdir()
    (directory / "a.yaml").write_text(POD % "web")
    stored.save(reading.load([directory], "shop"), directory)
    return directory


def refuse(*_: object) -> None:
    raise AssertionError("the manifests were read")


def test_stored_mesh_is_the_one_that_was_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reading.load([directory], "shop")
    monkeypatch.setattr(reading, "load", refuse)
    assert stored.load(directory, "shop") == expected
    assert stored.load(directory) == expected


@pytest.mark.parametrize("change", ["edit", "add", "remove and add", "rename"])
def test_changed_manifests_are_read(directory: Path, change: str) -> None:
    if change == "edit":
        (directory / "a.yaml").write_text(POD % "other")
    elif change == "add":
        (directory / "b.yml").write_text(POD % "other")
    elif change == "remove and add":
        (directory / "a.yaml").unlink()
        (directory / "b.yaml").write_text(POD % "other")
    else:
        (directory / "a.yaml").rename(directory / "b.yaml")
    mesh = stored.load(directory, "shop")
    names = {"edit": ["other"], "add": ["web", "other"], "remove and add": ["other"], "rename": ["web"]}[change]
    assert [pod.meta.name for pod in mesh.pods] == names


def test_other_name_is_another_mesh(directory: Path) -> None:
    assert stored.load(directory, "else").name == "else"


@pytest.mark.parametrize("data", [b"", b"rubbish", b"\x80\x04N."])
def test_spoilt_copy_is_passed_over(directory: Path, data: bytes) -> None:
    copy = directory.with_name("manifests.mesh")
    assert copy.exists()
    copy.write_bytes(data)
    assert stored.load(directory, "shop").pods[0].meta.name == "web"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_copy_of_another_user_is_not_opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(directory.with_name("manifests.mesh"), 1000, 1000)
    monkeypatch.setattr(stored.pickle, "loads", refuse)
    assert stored.load(directory, "shop").pods[0].meta.name == "web"


def test_nothing_lies_among_the_manifests(directory: Path) -> None:
    assert [file.name for file in directory.iterdir()] == ["a.yaml"]


def test_errors_are_those_of_reading(directory: Path) -> None:
    (directory / "a.yaml").write_text("kind: Nothing\n")
    with pytest.raises(InputError):
        stored.load(directory, "shop")


def test_a_file_is_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POD % "web")
    assert stored.load(tmp_path / "a.yaml", "shop").pods[0].meta.name == "web"
