"""Reading what ``--dry-run`` prints, shared by the tests of init."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from init import cli

HERE = Path(__file__).parent


class Run(NamedTuple):
    code: int
    out: str
    err: str


def init(args: Sequence[str], env: Mapping[str, str] | None = None) -> Run:
    """Runs the program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(args), dict(env or {}))
    return Run(code, out.getvalue(), err.getvalue())


def lines(text: str) -> list[str]:
    """Lines without blanks that do not count and without the names of the families."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def cases(folder: str) -> list[tuple[str, list[str], dict[str, str], str]]:
    """(name, arguments, environment, expected text) of each case of a folder."""
    found = json.loads((HERE / folder / "cases.json").read_text())
    return [
        (case["name"], case["args"], case["env"], (HERE / folder / f"{case['name']}.golden").read_text())
        for case in found
    ]
