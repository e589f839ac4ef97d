"""Durations, environment variables and command lines as Go reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.duration import format_duration, parse_duration
from agent.environment import Environment
from agent.errors import UsageError
from agent.flags import Flag, parse

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("0", 0),
        ("45s", 45 * SECOND),
        ("1m30s", 90 * SECOND),
        ("1h", 3600 * SECOND),
        ("1.5h", 5400 * SECOND),
        ("100ms", SECOND // 10),
        ("-2s", -2 * SECOND),
        (".5s", SECOND // 2),
        ("1µs", 1000),
        ("1us2ns", 1002),
    ],
)
def test_go_durations(text: str, nanoseconds: int) -> None:
    assert parse_duration(text) == nanoseconds


@pytest.mark.parametrize("text", ["", "5", "s", "1 s", "1d", "1s 2s", "--1s", "1e3s", "９s", "99999999999h"])
def test_what_is_no_go_duration(text: str) -> None:
    with pytest.raises(ValueError, match="invalid duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (60 * SECOND, "1m0s"),
        (5 * SECOND, "5s"),
        (3600 * SECOND, "1h0m0s"),
        (SECOND // 2, "500ms"),
        (1_500_000_000, "1.5s"),
        (1500, "1.5µs"),
        (-90 * SECOND, "-1m30s"),
        (7, "7ns"),
    ],
)
def test_durations_as_go_prints_them(nanoseconds: int, text: str) -> None:
    assert format_duration(nanoseconds) == text


@given(st.integers(min_value=-(10**17), max_value=10**17))
def test_a_printed_duration_reads_back(nanoseconds: int) -> None:
    assert parse_duration(format_duration(nanoseconds)) == nanoseconds


@given(st.text(max_size=20))
def test_no_text_crashes_the_duration_parser(text: str) -> None:
    try:
        parse_duration(text)
    except ValueError:
        pass


def test_an_invalid_variable_is_the_default_not_zero() -> None:
    env = Environment({"B": "", "I": "x", "D": "5", "F": "half", "S": "", "T": "true", "N": "-3", "P": "1m"})
    assert env.boolean("B", True) is True
    assert env.integer("I", 7) == 7
    assert env.seconds("D", 2.5) == 2.5
    assert env.number("F", 0.5) == 0.5
    assert env.string("S", "default") == ""
    assert env.boolean("T", False) is True
    assert env.integer("N", 0) == -3
    assert env.seconds("P", 0) == 60
    assert env.boolean("ABSENT", True) is True


def test_variables_by_prefix() -> None:
    env = Environment({"XDS_HEADER_A": "1", "XDS_HEADERS": "2", "OTHER": "3"})
    assert env.with_prefix("XDS_HEADER_") == {"A": "1"}


FLAGS = (Flag("domain", "", ""), Flag("concurrency", 0, ""), Flag("profiling", True, ""), Flag("dry-run", False, ""))


@pytest.mark.parametrize(
    ("arguments", "values", "rest"),
    [
        (["sidecar", "--domain", "a.b"], {"domain": "a.b"}, ["sidecar"]),
        (["--domain=a.b", "sidecar"], {"domain": "a.b"}, ["sidecar"]),
        (["--concurrency", "2", "sidecar"], {"concurrency": 2}, ["sidecar"]),
        (["--profiling=false", "sidecar"], {"profiling": False}, ["sidecar"]),
        (["--dry-run", "sidecar"], {"dry-run": True}, ["sidecar"]),
        (["--unknown", "value", "sidecar"], {}, ["sidecar"]),
        (["--unknown=value", "sidecar"], {}, ["sidecar"]),
        (["--unknown", "--dry-run", "sidecar"], {"dry-run": True}, ["sidecar"]),
        (["-x", "sidecar"], {}, []),
        (["--", "--domain"], {}, ["--domain"]),
    ],
)
def test_command_lines(arguments: list[str], values: dict[str, object], rest: list[str]) -> None:
    parsed = parse(arguments, FLAGS, ignore_unknown=True)
    assert parsed.arguments == rest
    for name, value in values.items():
        assert parsed.values[name] == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "two"], 'invalid argument "two" for "--concurrency" flag'),
        (["--profiling=maybe"], 'invalid argument "maybe" for "--profiling" flag'),
        (["--domain"], "flag needs an argument: --domain"),
    ],
)
def test_wrong_values_of_flags(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(arguments, FLAGS, ignore_unknown=True)


def test_an_unknown_flag_is_an_error_where_asked_for() -> None:
    with pytest.raises(UsageError, match="unknown flag: --nope"):
        parse(["--nope=1"], FLAGS, ignore_unknown=False)
