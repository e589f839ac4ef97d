"""Values that do not fit their fields, in words that name the field: protobuf's own are those of its implementation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import json_format, message_factory

from agent.duration import parse_duration

_SHOWN = 40
_DURATION = "google.protobuf.Duration"


def wrong_types(message: Any, value: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """``path: expected what, got value`` for each value that its field does not take; unknown fields and nulls may be.

    Args:
        message: descriptor of the message type.
        value: what was given for it, names in camelCase or snake_case.
        path: what its members' paths begin with.
    """
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    for key, item in value.items():
        field = fields.get(str(key))
        if field is not None and item is not None:
            yield from _field(message, field, item, f"{path}{key}")


def _field(message: Any, field: Any, item: Any, path: str) -> Iterator[str]:
    nested = field.message_type
    if nested is not None and nested.GetOptions().map_entry:
        if not isinstance(item, Mapping):
            yield _wrong(path, "a mapping", item)
            return
        inner = nested.fields_by_name["value"]
        for key, member in item.items():
            if member is not None:
                yield from _one(nested, inner, member, member, f"{path}.{key}")
    elif field.is_repeated:
        if not isinstance(item, list):
            yield _wrong(path, "a list", item)
            return
        for number, member in enumerate(item):
            yield from _one(message, field, member, [member], f"{path}[{number}]")
    else:
        yield from _one(message, field, item, item, path)


def _one(message: Any, field: Any, item: Any, given: Any, path: str) -> Iterator[str]:
    """Of one value; `given` is the same as protobuf wants to have it in that field."""
    nested = field.message_type
    if nested is not None and nested.full_name == _DURATION and isinstance(item, str):
        try:
            parse_duration(item)
        except ValueError as error:
            yield f"{path}: {error}"
    elif nested is not None and not nested.full_name.startswith("google.protobuf."):
        if isinstance(item, Mapping):
            yield from wrong_types(nested, item, f"{path}.")
        else:
            yield _wrong(path, "a mapping", item)
    else:
        try:
            json_format.ParseDict({field.json_name: given}, message_factory.GetMessageClass(message)())
        except (json_format.ParseError, TypeError, ValueError):
            yield _wrong(path, _expected(field), item)


def _expected(field: Any) -> str:
    nested = field.message_type
    if nested is not None:
        if nested.full_name == _DURATION:
            return "a duration such as 10s"
        # The wrappers of scalars have this one field.
        only = nested.fields_by_name.get("value") if nested.full_name.endswith("Value") else None
        return "a mapping" if only is None else _expected(only)
    if field.enum_type is not None:
        return f"one of {', '.join(value.name for value in field.enum_type.values)}"
    kinds = {
        field.CPPTYPE_BOOL: "true or false",
        field.CPPTYPE_INT32: "a whole number of 32 bits",
        field.CPPTYPE_INT64: "a whole number of 64 bits",
        field.CPPTYPE_UINT32: "a whole number of 32 bits, not negative",
        field.CPPTYPE_UINT64: "a whole number of 64 bits, not negative",
        field.CPPTYPE_STRING: "text",
    }
    return kinds.get(field.cpp_type, "a number")


def _wrong(path: str, expected: str, item: Any) -> str:
    text = json.dumps(item, ensure_ascii=False, default=str)
    return f"{path}: expected {expected}, got {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}"
