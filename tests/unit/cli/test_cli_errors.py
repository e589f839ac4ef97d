"""Wrong use is one clear line on stderr and exit 2, without root and without anything running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

NOBODY = 65534

POD = """
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: a}
spec: {containers: [{name: app}]}
"""


def lab(*args: str, front: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*front, sys.executable, "-m", "lab", *args], capture_output=True, text=True, timeout=60, check=False
    )


def one_error_line(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert result.returncode == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nonsense",), ("nonsense", "--help")),
        (("up",), ("Missing argument", "lab up --help")),
        (("up", "no-such-file.yaml"), ("no-such-file.yaml",)),
        (("up", "--iptables", "ipfw", "x.yaml"), ("ipfw", "legacy")),
        (("proxy-config", "frontend.frontend", "pods"), ("pods", "listeners")),
        (
            ("proxy-config", "nobody.frontend", "-f", "topologies/quickstart.yaml"),
            ("nobody.frontend", "frontend.frontend"),
        ),
        (("proxy-config", "legacy.legacy", "-f", "topologies/quickstart.yaml"), ("no proxy", "quickstart.yaml:")),
    ],
)
def test_wrong_usage(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    line = one_error_line(lab(*args))
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2", ("bad.yaml:2",)),
        (POD.replace("kind: Pod", "kind: Pood"), ("Pood", "bad.yaml:3")),
        (POD.replace("containers", "contaniers"), ("contaniers", "bad.yaml:5")),
        (POD + "---" + POD, ("a/a", "bad.yaml:7")),
    ],
    ids=["syntax", "unknown kind", "unknown field", "the same object twice"],
)
def test_bad_manifest(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(text)
    result = lab("validate", str(bad))
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert all(line.startswith("error: ") for line in errors), result.stderr
    assert all(word in errors[0] for word in words), result.stderr
    assert one_error_line(lab("up", "--dry-run", str(bad))) == errors[0]


def test_doubts_have_a_code_and_a_level(tmp_path: Path) -> None:
    manifest = tmp_path / "doubtful.yaml"
    manifest.write_text(
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Pod\n"
        "metadata: {name: p, namespace: a}\nspec: {priority: 3, containers: [{name: c}]}\n"
    )
    result = lab("validate", "--json", str(manifest))
    told = json.loads(result.stdout)["warnings"]
    assert [(one["level"], one["code"], one["where"]) for one in told] == [
        ("warning", None, f"{manifest}:8"),
        ("info", "IST0102", f"{manifest}:3"),
    ]
    lines = lab("validate", str(manifest)).stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warning", "info"]
    assert lines[1].endswith(" [IST0102]")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(
    "args", [("up", "topologies/quickstart.yaml"), ("down", "x"), ("verify", "x"), ("exec", "a.b", "--", "id")]
)
def test_not_root(args: tuple[str, ...], as_user: Callable[[int], list[str]]) -> None:
    line = one_error_line(lab(*args, front=as_user(NOBODY)))
    assert "needs root" in line
    assert "sudo" in line


def test_no_arguments_shows_the_help() -> None:
    result = lab()
    assert result.returncode == 2
    assert "verify" in result.stdout


def test_a_defect_of_ours_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from lab import cli
    from lab.fabric import record

    def broken() -> None:
        raise ExceptionGroup("many", [KeyError("planted")])

    monkeypatch.setattr(record, "list_labs", broken)
    assert cli.main(["ls"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "internal error, KeyError" in line
    assert "planted" in line
    monkeypatch.setenv("SIDECARLAB_TRACEBACK", "1")
    with pytest.raises(ExceptionGroup):
        cli.main(["ls"])
