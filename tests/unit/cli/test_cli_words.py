"""Empty words, and a lab that has to be named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import cli, lifecycle
from lab.fabric import record
from lab.fabric.record import LabInfo
from lab.manifests.load import load_text

POD = """
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: shop}
spec: {containers: [{name: app}]}
"""


@pytest.mark.parametrize(
    "args",
    [
        ("validate", ""),
        ("up", "a.yaml", "--name", ""),
        ("verify", "a.yaml", "--junit", ""),
        ("verify", ""),
        ("down", ""),
        ("explain", "--from", "a.a", "--to", "", "-f", "a.yaml"),
        ("explain", "--to", "b", "-f", ""),
        ("proxy-config", "", "-f", "a.yaml"),
    ],
    ids=" ".join,
)
def test_an_empty_word_is_wrong_use(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: empty value for ")
    assert line.endswith(f". See `lab {args[0]} --help`\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize("to", [":80", "a:0", "a:65536", "a:x"])
def test_a_target_without_host_or_with_a_strange_port_is_wrong_use(to: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(Path(__file__).parents[3] / "topologies/quickstart.yaml")
    assert cli.main(["explain", "--from", "frontend.frontend", "--to", to, "-f", where]) == 2
    wanted = f"error: --to {to}: it is no HOST:PORT. Write e.g. catalog.catalog:8080\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize("source", ["frontend.frontend", "legacy.legacy"])
@pytest.mark.parametrize("to", ["catalog.catalog:8080", "legacy.legacy:8080", "unknown.example:80", "unknown.example"])
def test_every_kind_of_end_is_explained_in_words_and_as_json(
    source: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(Path(__file__).parents[3] / "topologies/quickstart.yaml")
    asked = ["explain", "--from", source, "--to", to, "-f", where, *(["--protocol", "icmp"] if ":" not in to else [])]
    assert cli.main([*asked, "--why"]) == 0
    text = capsys.readouterr().out
    assert cli.main([*asked, "--json"]) == 0
    assert text.splitlines()[0] == json.loads(capsys.readouterr().out)["sentence"]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    "args", [("inspect", "two"), ("trace", "two", "--from", "a.a", "--to", "b:1"), ("verify", "two")]
)
def test_a_crashed_lab_is_called_so(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labs = [LabInfo(n, "", Path("/run/sidecarlab") / n, s, 1) for n, s in (("one", "running"), ("two", "crashed"))]
    monkeypatch.setattr(record, "list_labs", lambda: labs)
    assert cli.main(args) == 2
    line = capsys.readouterr().err
    assert "has crashed: its process is gone. Run `lab down two`" in line


def test_a_time_that_is_no_number_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "a.yaml", "--timeout", "nan"]) == 2
    assert capsys.readouterr().err == "error: no number for '--timeout'. See `lab up --help`\n"


def test_a_report_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "nowhere" / "report.xml"
    assert cli.main(["verify", "--proof", "predicted", "--junit", str(report), "no-such-file.yaml"]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot write the JUnit report: {report}: there is no such directory. Make it first\n"
    )


def test_an_empty_word_may_be_part_of_a_command() -> None:
    parsed = cli.cli.commands["exec"].make_context("exec", ["a.b", "--", "printf", ""])
    assert parsed.params["command"] == ("printf", "")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two labs seem to be up, each with a pod of its own and one that both have."""
    labs = [LabInfo(name, "", Path("/run/sidecarlab") / name, "running", 1) for name in ("one", "two")]
    meshes = {n: load_text(POD % n + "---" + POD % "both", name=n) for n in ("one", "two")}
    monkeypatch.setattr(record, "list_labs", lambda: labs)
    monkeypatch.setattr(lifecycle, "stored_mesh", meshes.__getitem__)
    monkeypatch.setattr(cli, "_need_root", lambda _what: None)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("inspect",), "error: which lab?: up: one, two. Write `lab inspect NAME`"),
        (("exec", "both.shop", "id"), "error: which lab?: up: one, two. Add --lab NAME"),
        (
            ("exec", "none.shop", "id"),
            "error: no pod 'none.shop': none of the labs has it: one, two. See `lab inspect NAME`",
        ),
        (("inspect", "three"), "error: no lab 'three' is up: up: one, two. See `lab ls`, or `lab up FILE`"),
    ],
)
def test_a_lab_that_must_be_named(args: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    assert capsys.readouterr().err == f"{line}\n"
