"""What the documentation tells a reader to type is really run.

README.md and docs/*.md hold commands in fenced blocks. In a ``console`` block a line ``$ COMMAND`` is a command and the rest is its
output; in a ``sh`` block every line is a command; a line that ends in a backslash goes on. Words after the language say how a block is tested:

- ``run``: here, command by command, in a clean process at the top of the checkout with the environment's programs on PATH;
- ``root``: the same, as root, where labs of this machine are neither seen nor touched;
- ``exit=N``: the last command of the block ends with code N, all others with 0.

A command of a block without such words must be run elsewhere: a ``make`` target by ``.ci/run``, any other by the test that ``ELSEWHERE`` names.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("README.md")), *sorted((ROOT / "docs").glob("*.md"))]
DEADLINE = 110.0  # seconds for one block
LANGUAGES = ("console", "sh", "bash", "shell")

ELSEWHERE: dict[str, str] = {
    "docker compose up": "tests/docker/test_compose.py::test_up_shows_the_verdict_table_and_leaves_the_mesh_running",
    "docker compose run --rm tests": "tests/docker/test_compose.py::test_run_gives_the_verdicts_and_their_exit_status",
    "docker compose down -v": "tests/docker/test_compose.py::test_down_leaves_nothing",
    ".venv/bin/lab up topologies/quickstart.yaml -d --runtime docker": (
        "tests/docker/test_runtime_docker.py::test_verdicts_are_those_of_namespaces"
    ),
    (
        "docker run --rm --user 0 --cap-drop ALL   --cap-add SYS_ADMIN --cap-add SYS_CHROOT --cap-add SYS_PTRACE"
        "   --cap-add NET_ADMIN --cap-add NET_RAW --cap-add NET_BIND_SERVICE"
        "   --cap-add SETUID --cap-add SETGID --cap-add SETPCAP"
        "   --cap-add CHOWN --cap-add DAC_OVERRIDE --cap-add FOWNER --cap-add KILL"
        "   --security-opt systempaths=unconfined --security-opt apparmor=unconfined"
        '   -v "$PWD/docs/example:/src:ro" sidecarlab:latest lab verify /src/mesh.yaml'
    ): "tests/docker/test_documented.py::test_a_container_with_the_listed_capabilities_runs_a_lab",
}
"""Command -> ``tests/FILE.py::test_name`` that runs it."""


@dataclass(frozen=True)
class Block:
    """One fenced block: where it begins, the words after its language, its commands."""

    file: str
    line: int
    language: str
    words: tuple[str, ...]
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def runs(self) -> bool:
        return "run" in self.words or "root" in self.words

    @property
    def code(self) -> int:
        """The exit code that the last command must have."""
        return next((int(w.removeprefix("exit=")) for w in self.words if w.startswith("exit=")), 0)


def blocks(file: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a document (CommonMark 0.31, 4.5)."""
    fence, start, info, body = "", 0, "", list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" {0,3}(`{3,}|~{3,})(.*)", line)
        if not fence:
            if mark:
                fence, start, info, body = mark[1], number, mark[2].strip(), []
        elif mark and mark[1].startswith(fence) and not mark[2].strip():
            language, *words = info.split() or [""]
            yield Block(file, start, language, tuple(words), tuple(commands(language, body)))
            fence = ""
        else:
            body.append(line)
    assert not fence, f"{file}:{start}: a fence is not closed"


def commands(language: str, body: Iterable[str]) -> Iterator[str]:
    """The commands in the lines of a block."""
    prompt = language not in ("sh", "bash", "shell")
    open_command = ""
    for line in body:
        if open_command:
            line = line.removeprefix("> ")
        elif prompt:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        elif not line.strip() or line.lstrip().startswith("#"):
            continue
        open_command += line
        if open_command.endswith("\\"):
            open_command = open_command[:-1]
        else:
            yield open_command.strip()
            open_command = ""


ALL = [b for path in DOCUMENTS for b in blocks(str(path.relative_to(ROOT)), path.read_text())]
TOLD = [b for b in ALL if b.commands and b.language in LANGUAGES]


def makes() -> set[str]:
    """The targets that ``.ci/run`` makes, and what those need first."""
    needs = dict(re.findall(r"^([\w-]+):[ \t]*(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found: set[str] = set()
    wanted = re.findall(r"^make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    while wanted:
        target = wanted.pop()
        if target not in found:
            found.add(target)
            wanted += needs.get(target, "").split()
    return found


def uncovered(block: Block, made: set[str]) -> list[str]:
    """Its commands that nothing runs."""
    if block.runs:
        return []
    return [c for c in block.commands if c not in ELSEWHERE and c.removeprefix("make ") not in made]


def script(block: Block, codes: str) -> str:
    """A bash script that runs the commands in order, ends at the first that fails early, and writes each exit code to a file."""
    lines = ["set -u"]
    if "root" in block.words:
        # A lab's state lies below /run: this block sees its own alone, and what it leaves up ends with it.
        # A mount of another lab of the same name, hidden or not, would be taken for its own. The tmpfs is not on
        # /run/sidecarlab: a lab outside that goes down removes that directory, and with it what is mounted there anywhere.
        lines += [
            "cut -d' ' -f5 /proc/self/mountinfo | grep ^/run/sidecarlab/ | sort -r | xargs -r umount -l",
            "mount -t tmpfs -o mode=0755 tmpfs /run && mkdir /run/sidecarlab || exit",
            "trap 'lab down --all >/dev/null 2>&1' EXIT",
        ]
    for number, command in enumerate(block.commands):
        last = number == len(block.commands) - 1
        lines += [f"( {command}\n)", f'code=$?; echo "$code" >> {codes}']
        if not last:
            lines.append('[ "$code" = 0 ] || exit 1')
    return "\n".join([*lines, "exit 0", ""])


def linked(document: Path) -> set[Path]:
    """The files and folders of this repository that a document links to."""
    targets = re.findall(r"\]\((?!\w+:)([^)#]+)", document.read_text())
    return {(document.parent / target).resolve() for target in targets}


def test_the_readme_leads_to_every_page() -> None:
    assert {page for page in DOCUMENTS if page.parent.name == "docs"} <= linked(ROOT / "README.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    assert [target for target in linked(document) if not target.exists()] == []


def test_no_command_hides_in_a_block_of_another_language() -> None:
    assert [str(b) for b in ALL if b.commands and b.language not in LANGUAGES] == []


def test_no_block_has_a_word_that_means_nothing() -> None:
    bad = [f"{b}: {w}" for b in TOLD for w in b.words if not re.fullmatch(r"run|root|exit=\d+", w)]
    assert bad == []


def test_a_command_that_is_not_run_here_is_run_elsewhere() -> None:
    made = makes()
    assert [f"{b}: {c}" for b in TOLD for c in uncovered(b, made)] == []


def test_the_tests_that_run_it_elsewhere_exist() -> None:
    for command, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        functions = [n.name for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef)]
        assert name in functions, command
        assert command in [c for b in TOLD for c in b.commands], f"nothing tells a reader to type {command} any more"


@pytest.mark.parametrize("block", [b for b in TOLD if b.runs], ids=str)
def test_a_told_command_works(block: Block, tmp_path: Path) -> None:
    if "root" in block.words and os.geteuid() != 0:
        pytest.skip("needs root: it brings a lab up")
    codes = run(block, tmp_path)
    assert codes == [*[0] * (len(block.commands) - 1), block.code]


def run(block: Block, path: Path) -> list[int]:
    """Runs a block; the exit codes of the commands that were run."""
    codes = path / "codes"
    codes.touch()
    command = ["bash", "-c", script(block, str(codes))]
    if "root" in block.words:
        # With its pid namespace ends every process of it, whatever happens.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={
            "PATH": f"{ROOT}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(path),
            "LANG": "C.UTF-8",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    print(done.stdout)  # pytest shows it where the block fails
    return [int(code) for code in codes.read_text().split()]


# --- the checks check ------------------------------------------------------------------------

SAMPLE = """\
Text with `$ inline` code.

```console run
$ true
output
$ echo one \\
>   two
```

  ~~~sh
  # a comment
  make test
  ~~~

```json
{"$ not": "a command"}
```

```console root exit=3
$ exit 3
```

```console
$ make nothing
```

```
$ hidden
```
"""


def sample() -> list[Block]:
    return list(blocks("doc.md", SAMPLE))


def test_blocks_are_read_with_their_words_and_commands() -> None:
    assert sample() == [
        Block("doc.md", 3, "console", ("run",), ("true", "echo one   two")),
        Block("doc.md", 10, "sh", (), ("make test",)),
        Block("doc.md", 15, "json", (), ()),
        Block("doc.md", 19, "console", ("root", "exit=3"), ("exit 3",)),
        Block("doc.md", 23, "console", (), ("make nothing",)),
        Block("doc.md", 27, "", (), ("hidden",)),
    ]


def test_an_uncovered_command_is_found() -> None:
    assert [uncovered(b, {"test"}) for b in sample()] == [[], [], [], [], ["make nothing"], ["hidden"]]


def test_an_unclosed_fence_is_found() -> None:
    with pytest.raises(AssertionError, match=r"doc\.md:2: a fence is not closed"):
        list(blocks("doc.md", "text\n```console\n$ true\n"))


def block(*commands: str, words: tuple[str, ...] = ("run",)) -> Block:
    return Block("doc.md", 1, "console", words, commands)


def test_a_failing_command_is_found(tmp_path: Path) -> None:
    assert run(block("true", "false", "true"), tmp_path) == [0, 1]


def test_the_last_command_gives_its_code(tmp_path: Path) -> None:
    assert run(block("true", "exit 3"), tmp_path) == [0, 3]


def test_a_block_runs_at_the_top_with_our_programs(tmp_path: Path) -> None:
    assert run(block("test -f pyproject.toml", 'test "$(command -v lab)" = "$PWD/.venv/bin/lab"'), tmp_path) == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes a mount namespace")
def test_a_root_block_sees_no_lab_of_this_machine(tmp_path: Path) -> None:
    commands = (
        'test -z "$(ls /run/sidecarlab)"',
        "! mountpoint -q /run/sidecarlab",
        "touch /run/sidecarlab/mine",
        'test "$$" -lt 100',
    )
    assert run(block(*commands, words=("root",)), tmp_path) == [0, 0, 0, 0]
    assert not os.path.exists("/run/sidecarlab/mine")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts")
def test_a_root_block_sees_no_mount_of_a_lab(tmp_path: Path) -> None:
    # What hides below the block's own directory is still in its table of mounts, where `lab down` looks.
    pin = Path(f"/run/sidecarlab/slt-docs-{os.getpid()}")
    pin.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(pin)], check=True)
    try:
        assert run(block(f"! grep {pin} /proc/self/mountinfo", words=("root",)), tmp_path) == [0]
        assert pin.is_mount()
    finally:
        subprocess.run(["umount", str(pin)], check=True)
        pin.rmdir()
        with suppress(OSError):
            pin.parent.rmdir()
