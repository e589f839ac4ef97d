"""The downward-API file format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.downward import parse_downward_api, unquote


@pytest.mark.parametrize(
    ("quoted", "value"),
    [
        ('"plain"', "plain"),
        ('""', ""),
        (r'"a\"b"', 'a"b'),
        (r'"line\nbreak\ttab"', "line\nbreak\ttab"),
        (r'"\u00e9\U0001F600"', "é\U0001f600"),
        (r'"\xc3\xa9"', "é"),
        (r'"\303\251"', "é"),
        ("`raw \\n`", "raw \\n"),
        ("'x'", "x"),
        (r'"\\"', "\\"),
    ],
)
def test_go_string_literals(quoted: str, value: str) -> None:
    assert unquote(quoted) == value


@pytest.mark.parametrize(
    "quoted",
    ["", '"', "plain", '"a', 'a"', r'"\q"', '"a"b"', r'"\x4"', r'"\400"', r'"\ud800"', "'ab'", '"\\"', "`a`b`"],
)
def test_what_is_no_go_string_literal(quoted: str) -> None:
    with pytest.raises(ValueError, match="invalid syntax"):
        unquote(quoted)


def test_a_file_of_labels() -> None:
    text = 'app="reviews"\npod-template-hash="x"\n\nno equals sign\nproxy.istio.io/config="a: \\"b=c\\"\\n"\n'
    assert parse_downward_api(text) == {
        "app": "reviews",
        "pod-template-hash": "x",
        "proxy.istio.io/config": 'a: "b=c"\n',
    }


def test_one_bad_quote_spoils_the_whole_file() -> None:
    with pytest.raises(ValueError, match="failed to unquote bad"):
        parse_downward_api('app="reviews"\nversion=bad\n')


def go_quote(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="=\n"), max_size=20)
VALUES = st.text(st.characters(codec="utf-8"), max_size=60)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_what_kubernetes_writes_reads_back(annotations: dict[str, str]) -> None:
    text = "\n".join(f"{key}={go_quote(value)}" for key, value in annotations.items())
    assert parse_downward_api(text) == annotations


@given(st.text(st.sampled_from("ab=\"\\x0u9n\n`'é"), max_size=60))
def test_no_text_crashes_the_parser(text: str) -> None:
    try:
        parse_downward_api(text)
    except ValueError:
        pass
