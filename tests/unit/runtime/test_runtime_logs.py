"""The lab's own log, and what is quoted of a process's log when it fails."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from lab.runtime.logs import Log, last_error


def test_line_is_an_event_with_fields(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = Log(tmp_path / "log" / "lab.log", stream)
    log.write("process-ended", place="web.shop", code=1, why='a "b" c', nothing="")
    log.write("phase", True, ready="fabric")
    log.close()
    log.write("after", x=1)
    lines = (tmp_path / "log/lab.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        r'process-ended place=web.shop code=1 why="a \"b\" c" nothing=""',
        "phase ready=fabric",
    ]
    assert stream.getvalue().splitlines() == [
        r'lab: process-ended place=web.shop code=1 why="a \"b\" c" nothing=""',
        "lab: after x=1",
    ]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("info one\ninfo two\n\n", "info two"),
        ("info one\nError: broken\ninfo two\n", "Error: broken"),
        ("error first\nfatal second\nbye\n", "fatal second"),
        ("\xff\xfe error\n", "\xff\xfe error"),
        ("error " + "x" * 1000, "error " + "x" * 494),
    ],
)
def test_last_error_of_a_log(tmp_path: Path, text: str, last: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert last_error(log) == last


def test_log_that_is_not_there_or_is_long(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none") == ""
    log = tmp_path / "log"
    log.write_text("error old\n" + "info\n" * 100_000)
    assert last_error(log) == "info", "only the end is read"
