"""What an error looks like: one line, of a length that can be read, without anything that a terminal acts on."""

from lab.errors import InputError


def test_a_long_value_is_cut_in_its_middle() -> None:
    line = str(InputError(f"bad value {'x' * 5000}end of replicas", "a.yaml:3", "it is no number", "Write one."))
    assert line == f"bad value {'x' * 60}...{'x' * 17}end of replicas: a.yaml:3: it is no number. Write one."


def test_many_words_are_cut_too() -> None:
    assert len(str(InputError("bad value", "a.yaml:1", "word " * 5000))) < 1100


def test_a_long_place_keeps_its_end() -> None:
    line = str(InputError("no such file", f"{'d/' * 5000}a.yaml"))
    assert len(line) < 400
    assert line.endswith("/a.yaml")


def test_what_a_terminal_would_act_on_is_spelled_out() -> None:
    assert str(InputError("no such file", "a\x1b[31m\udcff\nb")) == "no such file: a\\x1b[31m\\udcff b"


def test_a_question_ends_with_its_mark() -> None:
    assert str(InputError("No such option. Did you mean --json?", next_step="See --help")).endswith(
        "--json? See --help"
    )


def test_ordinary_text_stays_as_it_is() -> None:
    assert str(InputError("Übergröße „ñ“", "日本.yaml:1", "", "→ x")) == "Übergröße „ñ“: 日本.yaml:1. → x"
