"""JSON lines on a lab's Unix sockets: one question, one answer, and errors that keep their words on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.errors import InputError, LabError, ObservationError


async def ask(path: Path, question: Mapping[str, object], timeout: float = 10.0) -> dict[str, Any]:
    """One question on a JSON-lines socket of the lab, and its answer.

    Raises:
        LabError: nobody answers.
    """
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 26)
            try:
                writer.write(json.dumps(question).encode() + b"\n")
                answer: dict[str, Any] = json.loads(await reader.readline())
                return answer
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as e:
        raise LabError("no answer", str(path), str(e) or type(e).__name__) from None


def error_to_json(error: LabError) -> dict[str, str]:
    """An error for a message; `error_from_json` makes it one again."""
    kind = type(error).__name__
    return {"kind": kind, "what": error.what, "where": error.where, "why": error.why, "next_step": error.next_step}


def error_from_json(data: Mapping[str, str]) -> LabError:
    """The error that `error_to_json` was given."""
    kinds: dict[str, type[LabError]] = {"InputError": InputError, "ObservationError": ObservationError}
    kind = kinds.get(data["kind"], LabError)
    return kind(data["what"], data["where"], data["why"], data["next_step"])
