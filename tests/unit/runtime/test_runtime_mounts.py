"""Which directories of the host a pod does not see, and what shows through."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.errors import InputError
from lab.runtime import mounts
from lab.runtime.mounts import Cover, plan_covers

FRESH = {"/run": 0o755, "/tmp": 0o1777}


def closed(*directories: str) -> Callable[[str], bool]:
    return lambda path: path not in directories


def test_only_fresh_directories_are_covered_when_all_is_walkable() -> None:
    assert plan_covers(["/usr", "/opt/venv"], closed(), FRESH) == (
        Cover("/run", 0o755, True),
        Cover("/tmp", 0o1777, True),
    )


def test_topmost_closed_directory_is_covered() -> None:
    covers = plan_covers(["/root/a/b/venv", "/usr"], closed("/root", "/root/a/b"), {})
    assert covers == (Cover("/root", 0o755, False, ("/root/a/b/venv",)),)


def test_path_below_a_fresh_directory_shows_through_it() -> None:
    covers = plan_covers(["/tmp/x/checkout"], closed("/tmp/x"), FRESH)
    assert covers[1] == Cover("/tmp", 0o1777, True, ("/tmp/x/checkout",))


def test_nested_paths_are_shown_once() -> None:
    paths = ["/root/code", "/root/code/.venv/lib", "/root/python", "/root/code.d"]
    (cover,) = plan_covers(paths, closed("/root"), {})
    assert cover.shown == ("/root/code", "/root/code.d", "/root/python")


def test_a_closed_path_itself_needs_no_cover() -> None:
    """What is closed is shown as it is: whether it can be read is another question (`program_paths`)."""
    assert plan_covers(["/srv/closed"], closed("/srv/closed"), {}) == ()


def test_similar_names_are_no_parents() -> None:
    assert plan_covers(["/tmpfiles/code"], closed(), FRESH)[1].shown == ()


def test_program_paths_hold_what_python_runs_on() -> None:
    import sys

    found = mounts.program_paths()
    for needed in (sys.prefix, os.path.realpath(sys.executable), os.__file__, mounts.__file__):
        assert any(needed == path or needed.startswith(path.rstrip("/") + "/") for path in found), needed


def test_program_paths_follow_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = mounts.program_paths([str(tmp_path / "link")])
    assert {str(tmp_path / "link"), str(tmp_path / "real")} <= set(found)


def test_what_strangers_cannot_read_is_an_error(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o750)
    with pytest.raises(InputError, match=rf"cannot read what they run: {secret}: .*chmod -R go\+rX {secret}"):
        mounts.program_paths([str(secret)])


@pytest.mark.parametrize(
    ("mode", "passes", "reads"),
    [(0o755, True, True), (0o711, True, False), (0o744, False, False), (0o700, False, False)],
)
def test_strangers(tmp_path: Path, mode: int, passes: bool, reads: bool) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(mode)
    assert stat.S_IMODE(directory.stat().st_mode) == mode
    assert (mounts.strangers_may_pass(str(directory)), mounts.strangers_may_read(str(directory))) == (passes, reads)
