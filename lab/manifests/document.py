"""YAML text to plain data that remembers its lines.

Scalars follow what Kubernetes tools do with YAML (sigs.k8s.io/yaml, go-yaml v2): the booleans of YAML 1.1,
no timestamps, no base-60 numbers, and a repeated key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml
from yaml._yaml import CParser
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.resolver import BaseResolver

from lab.errors import InputError
from lab.manifests.model import Source


class Map(dict[str, object]):
    """A mapping with the line of each key. ``path`` is its place in the document, e.g. ``spec.ports[0]``."""

    __slots__ = ("file", "line", "lines", "path")

    def __init__(self, file: str, line: int, path: str) -> None:
        super().__init__()
        self.file, self.line, self.path = file, line, path
        self.lines: dict[str, int] = {}

    def source(self, key: str | None = None) -> Source:
        """Where ``key`` was written, or the mapping itself."""
        return Source(self.file, self.lines.get(key, self.line) if key is not None else self.line)


class Seq(list[object]):
    """A sequence with the line of each item."""

    __slots__ = ("line", "lines")

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: list[int] = []


def join(path: str, key: str | int) -> str:
    """``spec.ports`` and 0 give ``spec.ports[0]``; a key that is no identifier is quoted."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        return f'{path}["{key}"]'
    return f"{path}.{key}" if path else key


def locate(root: Map, path: tuple[str | int, ...]) -> Source:
    """The line of the deepest part of ``path`` that exists in ``root``."""
    here: object = root
    line = root.line
    for key in path:
        if isinstance(here, Map) and isinstance(key, str) and key in here.lines:
            line, here = here.lines[key], here.get(key)
        elif isinstance(here, Seq) and isinstance(key, int) and key < len(here):
            line, here = here.lines[key], here[key]
        else:
            break
    return Source(root.file, line)


def plain(value: object) -> object:
    """The same data as ordinary dicts and lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


class _Loader(CParser, BaseResolver):
    """libyaml's parser with go-yaml's idea of what a plain scalar is."""

    def __init__(self, stream: str) -> None:
        CParser.__init__(self, stream)
        BaseResolver.__init__(self)


MAX_NODES = 500_000
"""Values of one document, keys and each use of an anchor counted: some 5,000 pods. More would be a bomb or a mistake."""


def _too_many(file: str, line: int) -> InputError:
    return InputError(
        "too many values",
        f"{file}:{line}",
        f"a document may have {MAX_NODES:,}, counting what its anchors stand for",
        "Split the file, or repeat less with anchors.",
    )


def _count_written(text: str, file: str) -> None:
    """Stops at a text with too many values before all of them are made; a value takes two characters at least."""
    if len(text) < 2 * MAX_NODES:
        return
    loader = _Loader(text)
    try:
        number = 0
        while loader.check_event():
            event = loader.get_event()
            assert event is not None
            assert event.start_mark is not None
            number = 0 if isinstance(event, yaml.DocumentStartEvent) else number + 1
            if number > 2 * MAX_NODES:  # a list or mapping has an event for its end, too
                raise _too_many(file, event.start_mark.line + 1)
    finally:
        loader.dispose()


def _expanded(node: Node, known: dict[int, int]) -> int:
    """How many values ``_data`` would make of a node: an anchor's again for each use. Each node is visited once.

    Raises:
        RecursionError: an anchor contains itself.
    """
    number = known.get(id(node))
    if number is None:
        known[id(node)] = -1
        number = 1
        if isinstance(node, SequenceNode):
            number += sum(_expanded(item, known) for item in node.value)
        elif isinstance(node, MappingNode):
            number += sum(_expanded(part, known) for pair in node.value for part in pair)
        known[id(node)] = number
    if number < 0:
        raise RecursionError
    return number


_NULL, _BOOL, _INT, _FLOAT, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "merge"))
for _tag, _pattern, _first in (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (
        _BOOL,
        r"(?:true|True|TRUE|yes|Yes|YES|on|On|ON|y|Y|false|False|FALSE|no|No|NO|off|Off|OFF|n|N)",
        list("tTyYoOfFnN"),
    ),
    (_INT, r"[-+]?(?:0[bB][01_]+|0[xX][0-9a-fA-F_]+|0[oO]?[0-7_]+|0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    (_MERGE, r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _scalar(node: ScalarNode, file: str) -> object:
    text: str = node.value
    tag = node.tag
    if tag == "tag:yaml.org,2002:str" or tag == _MERGE:
        return text
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() in ("true", "yes", "on", "y")
    try:
        if tag == _INT:
            digits = text.replace("_", "").lower()
            if re.fullmatch(r"[-+]?0[0-7]+", digits):
                return int(digits, 8)
            return int(digits, 0)
        if tag == _FLOAT:
            return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        pass
    raise InputError(
        f"bad YAML scalar {text!r}",
        f"{file}:{node.start_mark.line + 1}",
        f"it does not fit its tag {tag}",
        "Remove the tag or the value.",
    )


def _pairs(node: MappingNode, file: str, offset: int) -> Iterator[tuple[str, Node, Node]]:
    """The pairs of a mapping, those merged by ``<<`` first, so that written keys win."""
    for key, value in node.value:
        if key.tag == _MERGE:
            merged = value.value if isinstance(value, SequenceNode) else [value]
            for part in reversed(merged):
                if not isinstance(part, MappingNode):
                    raise InputError(
                        "bad YAML merge",
                        f"{file}:{key.start_mark.line + 1 + offset}",
                        "<< takes a mapping or a list of mappings",
                    )
                yield from _pairs(part, file, offset)
    for key, value in node.value:
        if key.tag != _MERGE:
            if not isinstance(key, ScalarNode):
                raise InputError(
                    "bad YAML key",
                    f"{file}:{key.start_mark.line + 1 + offset}",
                    "a key must be a plain word or a string",
                )
            yield key.value, key, value


def _data(node: Node, file: str, path: str, offset: int) -> object:
    if isinstance(node, ScalarNode):
        return _scalar(node, file)
    line = node.start_mark.line + 1 + offset
    if isinstance(node, SequenceNode):
        items = Seq(line)
        for index, item in enumerate(node.value):
            items.lines.append(item.start_mark.line + 1 + offset)
            items.append(_data(item, file, f"{path}[{index}]", offset))
        return items
    assert isinstance(node, MappingNode)
    result = Map(file, line, path)
    written: dict[str, int] = {}
    own = {id(key) for key, _ in node.value}
    for name, key, value in _pairs(node, file, offset):
        at = key.start_mark.line + 1 + offset
        if id(key) in own:
            if name in written:
                raise InputError(
                    f'key "{name}" written twice',
                    f"{file}:{at}",
                    f"{join(path, name)} is already set in line {written[name]}",
                    "Keep one of them.",
                )
            written[name] = at
        result.lines[name] = at
        result[name] = _data(value, file, join(path, name), offset)
    return result


def parse(text: str, file: str, offset: int = 0) -> list[Map]:
    """The documents of a YAML text, empty ones left out.

    Args:
        text: YAML, any number of documents.
        file: its name, for errors.
        offset: lines that precede the text in the file (text embedded in another document).

    Raises:
        InputError: bad syntax, a repeated key, a document that is no mapping, or one of more than ``MAX_NODES`` values.
    """
    documents = []
    try:
        _count_written(text, file)
        loader = _Loader(text)
        try:
            while loader.check_node():
                node = loader.get_node()
                assert node is not None
                if _expanded(node, {}) > MAX_NODES:
                    raise _too_many(file, node.start_mark.line + 1 + offset)
                data = _data(node, file, "", offset)
                if data is None:
                    continue
                if not isinstance(data, Map):
                    raise InputError(
                        "bad document",
                        f"{file}:{node.start_mark.line + 1 + offset}",
                        "a Kubernetes object is a mapping with apiVersion and kind",
                    )
                documents.append(data)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line + 1 + offset) if error.problem_mark else 0
        why = ", ".join(part for part in (error.problem, error.context) if part)
        raise InputError("bad YAML", f"{file}:{line}" if line else file, why) from None
    except yaml.YAMLError as error:
        raise InputError("bad YAML", file, str(error)) from None
    except RecursionError:
        raise InputError("bad YAML", file, "it is nested too deep, or an anchor contains itself") from None
    return documents
