"""The base of every schema: strict types, camelCase names, unknown fields refused, unused ones reported.

A schema lists the fields that the lab acts on as pydantic fields, and the known fields that it does not
act on in ``UNUSED`` (accepted, with a warning that names them).
"""

from __future__ import annotations

import datetime
import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel

from lab.manifests.document import Map, join, locate
from lab.manifests.problems import Problems, did_you_mean


@dataclass(frozen=True)
class Reading:
    """What is being read: where problems go, and how the object is called in them."""

    problems: Problems
    subject: str
    mistyped: set[str] = field(default_factory=set)
    """Paths that an unknown field was probably meant for: that they are missing need not be told as well."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Spec(BaseModel):
    """A mapping in a manifest."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, strict=True, frozen=True, extra="forbid", defer_build=True
    )

    UNUSED: ClassVar[frozenset[str]] = frozenset()
    BOOKKEEPING: ClassVar[frozenset[str]] = frozenset()
    """Fields that an API server writes, or that come in numbers; one warning names them all."""
    KEEP_NULL: ClassVar[bool] = False
    """Whether null is a value of its own; elsewhere it means "not set", as in Kubernetes."""

    @classmethod
    def field_names(cls) -> list[str]:
        """The names as written in a manifest."""
        return [info.alias or name for name, info in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, Map) or not isinstance(info.context, Reading):
            return data
        reading = info.context
        known = cls.field_names()
        kept: dict[str, object] = {}
        bookkeeping = []
        for key, value in data.items():
            if key in known:
                if value is not None or cls.KEEP_NULL:
                    kept[key] = value
            elif key in cls.UNUSED:
                reading.problems.warn(
                    data.source(key),
                    f"{reading.subject}: {join(data.path, key)} is accepted, but the lab does not act on it",
                )
            elif key in cls.BOOKKEEPING:
                bookkeeping.append(key)
            else:
                every = sorted({*known, *cls.UNUSED})
                hint = did_you_mean(key, every)
                if hint:
                    reading.mistyped.add(join(data.path, hint.split('"')[1]))
                if not hint and len(every) <= 16:
                    hint = f"Known here: {', '.join(every)}."
                reading.problems.error(
                    data.source(key), f'unknown field "{key}"', f"{reading.subject} has no {join(data.path, key)}", hint
                )
        if bookkeeping:
            named = ", ".join(join(data.path, key) for key in bookkeeping)
            reading.problems.warn(
                data.source(bookkeeping[0]), f"{reading.subject}: {named}: accepted, but the lab does not act on it"
            )
        return kept


S = TypeVar("S", bound=BaseModel)
T = TypeVar("T")

_TYPES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "NoneType": "nothing",
    "Map": "a mapping",
    "Seq": "a list",
}
_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def read(schema: type[S], document: Map, reading: Reading) -> S | None:
    """Validates a document. Every problem goes to ``reading``; None if there was an error that leaves no object."""
    try:
        return schema.model_validate(document, context=reading)
    except ValidationError as failure:
        for error in failure.errors(include_url=False):
            _report(
                error["type"], error["loc"], error["msg"], error["input"], dict(error.get("ctx", {})), document, reading
            )
        return None


def _shown(value: object) -> str:
    text = (
        "true"
        if value is True
        else "false"
        if value is False
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."


def _report(
    kind: str,
    loc: tuple[int | str, ...],
    message: str,
    value: object,
    ctx: Mapping[str, object],
    document: Map,
    reading: Reading,
) -> None:
    source = locate(document, loc)
    path = ""
    for key in loc:
        if key != "[key]":
            path = join(path, key)
    problems, subject = reading.problems, reading.subject
    if kind == "missing" and path in reading.mistyped:
        return
    if kind == "missing":
        parent, _, _ = path.rpartition(".")
        problems.error(source, f'missing field "{loc[-1]}"', f"{subject}: {parent or 'the object'} needs it")
        return
    if kind in _WANTED:
        next_step = ""
        if kind == "string_type" and isinstance(value, bool):
            next_step = "Put it in quotes."
        elif kind == "string_type" and isinstance(value, int | float):
            next_step = f'Quote it: "{_shown(value)}".'
        elif kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
            next_step = "Write it without quotes." if re.fullmatch(r"-?[0-9.]+|true|false", value) else ""
        found = _TYPES.get(type(value).__name__, type(value).__name__)
        shown = f" {_shown(value)}" if isinstance(value, str | int | float) else ""
        problems.error(
            source, f"bad type of {path}", f"{subject}: expected {_WANTED[kind]}, found {found}{shown}", next_step
        )
        return
    if kind in ("literal_error", "enum"):
        expected = str(ctx.get("expected", ""))
        hint = did_you_mean(value, re.findall(r"'([^']*)'", expected)) if isinstance(value, str) else ""
        problems.error(source, f"bad value {_shown(value)} of {path}", f"{subject}: expected {expected}", hint)
        return
    why = str(ctx["error"]) if kind == "value_error" and "error" in ctx else message.replace("Input should", "it must")
    shown = f" {_shown(value)}" if isinstance(value, str | int | float) else ""
    problems.error(source, f"bad value{shown} of {path}" if path else "bad object", f"{subject}: {why}")


# --- value types ----------------------------------------------------------------------------

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_GO_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def is_dns_label(text: str) -> bool:
    """RFC 1123 label, as Kubernetes has it."""
    return bool(_LABEL.fullmatch(text))


def is_dns_name(text: str) -> bool:
    """RFC 1123 subdomain: labels and dots, at most 253 characters."""
    return len(text) <= 253 and all(is_dns_label(part) for part in text.split("."))


def _port(value: int) -> int:
    if not 1 <= value <= 65535:
        raise ValueError("a port is 1 to 65535")
    return value


def _dns_name(value: str) -> str:
    if not is_dns_name(value):
        raise ValueError(
            "a name is made of lower case letters, digits, '-' and '.', and begins and ends with a letter or digit"
        )
    return value


def _dns_label(value: str) -> str:
    if not is_dns_label(value):
        raise ValueError("it must be a DNS label: lower case letters, digits and '-', at most 63 characters")
    return value


def _host(value: str) -> str:
    name = value[2:] if value.startswith("*.") else value
    if value != "*" and not all(
        re.fullmatch(r"[A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?", part) for part in name.rstrip(".").split(".")
    ):
        raise ValueError("it is no host name")
    return value


def duplicate(values: Iterable[T]) -> T | None:
    """The first value that is there a second time."""
    seen: list[T] = []
    for value in values:
        if value in seen:
            return value
        seen.append(value)
    return None


def is_socket_path(text: str) -> bool:
    """Whether ``unix://`` and a text name a Unix socket: an absolute path of a file, or ``@`` and an abstract name."""
    return text.startswith("@") or (text.startswith("/") and not text.endswith("/"))


def _ip(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("it is no IP address") from None


def _ip_or_none(value: str) -> str:
    """A Service's clusterIP: an address, "None" (headless), or nothing."""
    return value if value in ("None", "") else _ip(value)


def port_name(name: str) -> str:
    """The name of a container's port; raises ValueError.

    Source: kubernetes/apimachinery: pkg/util/validation/validation.go (IsValidPortName).
    """
    if not re.fullmatch(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*", name) or len(name) > 15:
        raise ValueError(
            "a port's name is at most 15 lower case letters, digits and single '-', with at least one letter"
        )
    return name


def _target_port(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a target port is a number, or the name of a container's port")
    return _port(value) if isinstance(value, int) else port_name(value)


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a process can be given no NUL character")
    return value


def _env_name(value: str) -> str:
    """Source: kubernetes/apimachinery: pkg/util/validation/validation.go (IsRelaxedEnvVarName)."""
    if not value or not all(" " <= char <= "~" and char != "=" for char in value):
        raise ValueError("a variable's name is made of printable ASCII characters other than '=', at least one")
    return value


def _ip_or_cidr(value: str) -> str:
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        if "host bits" in str(error):
            raise ValueError("the CIDR has host bits set") from None
        raise ValueError("it is no IP address or CIDR") from None
    return str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)


def duration(text: str) -> float:
    """Seconds of a Go duration (``1h30m``, ``1.5s``, ``100ms``); raises ValueError."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    parts = re.findall(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)", rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        raise ValueError('a duration is a number with a unit, e.g. "5s", "100ms" or "1h30m"')
    return sign * sum(float(number) * _GO_UNITS[unit] for number, unit in parts)


def _duration(value: object) -> float:
    return duration(value if isinstance(value, str) else "")


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("it must be greater than zero")
    return value


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("it must not be negative")
    return value


def _whole_milliseconds(value: float) -> float:
    if value and not math.isclose(value * 1000, round(value * 1000), abs_tol=1e-7, rel_tol=0):
        raise ValueError("it must be whole milliseconds")
    return value


def _milliseconds(value: float) -> float:
    """Source: istio/istio: pkg/config/validation/agent/validation.go (ValidateDuration)."""
    if value < 1e-3:
        raise ValueError("it must be at least 1ms")
    return _whole_milliseconds(value)


def _whole_seconds(value: float) -> float:
    if value != int(value):
        raise ValueError("it must be whole seconds")
    return value


def _seconds(*checks: Callable[[float], float]) -> BeforeValidator:
    """Reads a duration and checks it, so that an error shows what was written."""

    def read(value: object) -> float:
        seconds = _duration(value)
        for check in checks:
            seconds = check(seconds)
        return seconds

    return BeforeValidator(read, json_schema_input_type=str)


def _timestamp(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        moment = datetime.datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("a time is written 2024-01-31T12:00:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


Port = Annotated[int, AfterValidator(_port)]
PortName = Annotated[str, AfterValidator(port_name)]
DnsName = Annotated[str, AfterValidator(_dns_name)]
DnsLabel = Annotated[str, AfterValidator(_dns_label)]
MaybeLabel = Annotated[str, AfterValidator(lambda value: value and _dns_label(value))]
Host = Annotated[str, AfterValidator(_host)]
IPAddress = Annotated[str, AfterValidator(_ip)]
ClusterIP = Annotated[str, AfterValidator(_ip_or_none)]
TargetPort = Annotated[int | str, BeforeValidator(_target_port)]
Int32 = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""What Kubernetes keeps in an int32 and wants not to be negative."""
ProcessText = Annotated[str, AfterValidator(_no_nul)]
"""What a process is started with: an argument, or a value of its environment."""
EnvName = Annotated[str, AfterValidator(_env_name)]
IPOrCIDR = Annotated[str, AfterValidator(_ip_or_cidr)]
Duration = Annotated[float, _seconds(_not_negative)]
PositiveDuration = Annotated[float, _seconds(_positive)]
Milliseconds = Annotated[float, _seconds(_milliseconds)]
"""A duration as Istio's admission wants most of them."""
WholeSeconds = Annotated[float, _seconds(_milliseconds, _whole_seconds)]
MillisecondsOrNone = Annotated[float, _seconds(_not_negative, _whole_milliseconds)]
Timestamp = Annotated[float, BeforeValidator(_timestamp, json_schema_input_type=str)]
