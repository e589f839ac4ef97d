"""YAML with lines: what a plain scalar is, where things were written, what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from lab.manifests.document import Map, Seq, join, locate, parse, plain


def one(text: str) -> Map:
    (document,) = parse(text, "f.yaml")
    return document


def test_every_key_and_item_has_its_line() -> None:
    document = one("a: 1\nb:\n  c: [x,\n    y]\n  d:\n  - e: 2\n")
    b = document["b"]
    assert isinstance(b, Map)
    assert document.lines == {"a": 1, "b": 2}
    assert b.lines == {"c": 3, "d": 5}
    c, d = b["c"], b["d"]
    assert isinstance(c, Seq)
    assert isinstance(d, Seq)
    assert (c.lines, d.lines) == ([3, 4], [6])
    assert str(locate(document, ("b", "d", 0, "e"))) == "f.yaml:6"
    assert str(locate(document, ("b", "d", 7, "e"))) == "f.yaml:5"  # the deepest part that exists


def test_lines_of_embedded_text_are_those_of_the_file() -> None:
    (document,) = parse("x: 1\ny: 2\n", "f.yaml", offset=10)
    assert document.lines == {"x": 11, "y": 12}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("On", True),
        ("off", False),
        ("n", False),
        ("~", None),
        ("", None),
        ("0644", 0o644),
        ("0x1F", 31),
        ("0b101", 5),
        ("1_000", 1000),
        ("-7", -7),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".inf", float("inf")),
        ("22:22", "22:22"),  # no base 60
        ("2024-01-31", "2024-01-31"),  # no dates
        ("0.0.0.0_8080", "0.0.0.0_8080"),
        ("outbound|8080||a.b", "outbound|8080||a.b"),
        ('"yes"', "yes"),
        ("'8080'", "8080"),
    ],
)
def test_scalars_are_read_as_kubernetes_tools_read_them(text: str, value: object) -> None:
    read = one(f"k: {text}\n")["k"]
    assert read == value
    assert type(read) is type(value)


def test_merge_keys_and_anchors_work_and_written_keys_win() -> None:
    document = one("base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\n")
    assert plain(document["use"]) == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", 'key "a" written twice', 3),
        ("a: {b: 1, b: 2}\n", 'key "b" written twice', 1),
        ("a: [1, 2\nb: 3\n", "bad YAML", 2),
        ("a: *nobody\n", "bad YAML", 1),
        ("a: 1\n---\n- 1\n- 2\n", "bad document", 3),
        ("just words\n", "bad document", 1),
        ("? [a, b]\n: 1\n", "bad YAML key", 1),
        ("a: {<<: 5}\n", "bad YAML merge", 1),
        ("a: 1\nb: !!int xyz\n", "bad YAML scalar", 2),
        ("a: \tb\n\tc: d\n", "bad YAML", 2),
    ],
)
def test_bad_yaml_is_refused_with_its_line(text: str, what: str, line: int) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "f.yaml")
    assert caught.value.what.startswith(what)
    assert caught.value.where == f"f.yaml:{line}"


def test_an_anchor_that_contains_itself_is_refused() -> None:
    with pytest.raises(InputError, match="contains itself"):
        parse("a: &a [*a]\n", "f.yaml")


def test_empty_documents_are_left_out() -> None:
    assert parse("---\n---\n# nothing\n---\na: 1\n", "f.yaml") == [{"a": 1}]


def test_paths_are_written_as_people_write_them() -> None:
    assert join("spec.ports", 0) == "spec.ports[0]"
    assert join("", "spec") == "spec"
    assert join("metadata.labels", "a.b/c") == 'metadata.labels["a.b/c"]'


_text = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="\ufeff"), max_size=20)
_keys = _text.filter(bool)
_scalars = st.none() | st.booleans() | st.integers() | _text
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(_keys, _values, max_size=5), st.sampled_from([None, 1]))
def test_json_is_yaml(data: dict[str, object], indent: int | None) -> None:
    read = parse(json.dumps(data, ensure_ascii=False, indent=indent), "f.yaml")
    assert [plain(document) for document in read] == [data]
