"""What a user may name as a manifest: files that are none, that never end, or that grow when they are read."""

import os
from pathlib import Path

import pytest

from lab.errors import InputError
from lab.manifests import document, files
from lab.manifests.load import check, load, load_text


def _bomb(levels: int, width: int = 9) -> str:
    """YAML whose anchors stand for ``width ** levels`` values."""
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def _error(path: str | Path) -> str:
    mesh, errors = check([path])
    assert mesh is None
    assert len(errors) == 1
    assert errors[0].exit_code == 2
    return str(errors[0])


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    assert _error(tmp_path / "a.yaml") == f"not a file: {tmp_path}/a.yaml: it is a pipe. Name a regular file."


def test_a_device_without_end_is_refused() -> None:
    assert _error("/dev/zero") == "not a file: /dev/zero: it is a device. Name a regular file."


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("b.yaml")
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    assert f"cannot read: {tmp_path}/a.yaml: Too many levels of symbolic links." in _error(tmp_path / "a.yaml")


def test_a_directory_that_holds_itself_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to(tmp_path)
    assert _error(tmp_path) == f"no manifests: {tmp_path}: the directory holds no *.yaml or *.yml. Name another."


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a.yaml").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would need more memory than there is
    assert _error(tmp_path / "a.yaml") == (
        f"file too large: {tmp_path}/a.yaml: it has more than 8 MiB. Name a smaller one."
    )


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"#" * files.MAX_BYTES)
    assert len(files.read_text(tmp_path / "a")) == files.MAX_BYTES


def test_text_that_is_not_utf8_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: 1\nb: \xff\n")
    assert _error(tmp_path / "a.yaml").startswith(f"not a text file: {tmp_path}/a.yaml:2: manifests are UTF-8")


def test_an_empty_name_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n")
    monkeypatch.chdir(tmp_path)
    assert load(["."]).namespaces
    assert _error("") == "empty file name. Name a manifest file or a directory of them."


def test_anchors_may_not_stand_for_more_than_a_document_may_have() -> None:
    with pytest.raises(InputError) as error:
        load_text(_bomb(12), "bomb.yaml")
    assert str(error.value).startswith("too many values: bomb.yaml:1: a document may have 500,000, counting what")


def test_merged_anchors_are_counted_like_others() -> None:
    text = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
    )
    with pytest.raises(InputError, match="too many values"):
        document.parse(text, "bomb.yaml")


def test_a_document_with_too_many_values_is_refused_at_the_line_where_they_are_too_many() -> None:
    text = "a:\n" + "- 1\n" * (2 * document.MAX_NODES)
    with pytest.raises(InputError, match=r"too many values: long\.yaml:(\d+):") as error:
        document.parse(text, "long.yaml")
    assert int(error.value.where.rpartition(":")[2]) > document.MAX_NODES


def test_anchors_within_reason_are_read() -> None:
    (read,) = document.parse(_bomb(3), "some.yaml")
    last = read["a2"]
    assert isinstance(last, list)
    assert [len(last), len(last[0]), len(last[0][0])] == [9, 9, 9]


def test_an_anchor_that_contains_itself_is_refused() -> None:
    with pytest.raises(InputError, match="an anchor contains itself"):
        document.parse("a: &a [*a]\n", "self.yaml")


def test_a_dump_may_come_through_a_pipe() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "wb") as writer:
        writer.write(b"*nat\n")
        writer.close()
        assert files.read_bytes(f"/dev/fd/{ours}", 100, pipe=True) == b"*nat\n"
