"""What a registry gets to see of us: logins of a Docker configuration, in it or from the credential helpers it names.

Sources: google/go-containerregistry: pkg/authn/keychain.go; docker/cli: cli/config/configfile/file.go,
cli/config/credentials/native_store.go; docker/docker-credential-helpers: client/client.go.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.files import read_file
from agent.wasm.fetch import FetchError
from agent.wasm.options import WasmOptions

log = logging.getLogger("wasm")

DOCKER_HUB = ("index.docker.io", "docker.io")
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER = "docker-credential-"
_NOT_FOUND = "credentials not found in native keychain"
_TOKEN_USER = "<token>"
_VARIABLE = "DOCKER_AUTH_CONFIG"
_OUTPUT_LIMIT = 64 << 10
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Nested too deeply, JSON is a RecursionError.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Login:
    """Of these the first that is there counts: a bearer token, an identity token (OAuth 2), basic credentials."""

    registry_token: str = ""
    identity_token: str = ""
    basic: str = ""


NOBODY = Login()


def find(secret: bytes, host: str, repository: str, options: WasmOptions, deadline: float) -> Login:
    """What there is for an image: in its pull secret, else in the machine's own configuration. Blocks.

    Raises:
        FetchError: the configuration is none, or a helper that it names fails.
    """
    what = "the image pulling secret" if secret else options.docker_config
    try:
        config = json.loads(secret or _own(options))
        if secret and "auths" not in config and "credHelpers" not in config and "credsStore" not in config:
            raise KeyError("auths")
        auths, helpers = config.get("auths") or {}, config.get("credHelpers") or {}
        hub = host in DOCKER_HUB
        first = _from_environment(options) if secret or options.docker_config else {}
        for key in (f"{DOCKER_HUB[0] if hub else host}/{repository}", _HUB_KEY if hub else host):
            if key in first:
                return Login(basic=first[key])
            helper = helpers.get(key) or config.get("credsStore")
            found = _asked(str(helper), key, options, deadline) if helper else _entry(auths, key)
            if found != NOBODY:
                if _unsendable(found):
                    source = f"the answer of {_HELPER}{helper}" if helper else what
                    raise FetchError(f"{source}: the login for {key} has control characters")
                return found
    except _MALFORMED:
        raise FetchError(f"{what} is no Docker configuration") from None
    return NOBODY


def _from_environment(options: WasmOptions) -> dict[str, str]:
    """The logins of ``DOCKER_AUTH_CONFIG``, which come before those of a file; none of them if one is wrong."""
    text = options.environment.get(_VARIABLE, "")
    try:
        config = json.loads(text or "{}")
        if config.keys() - {"auths"}:
            raise ValueError("it has more than auths")
        found = {key: str(entry["auth"]) for key, entry in (config.get("auths") or {}).items()}
        for key, value in found.items():
            user, colon, _ = base64.b64decode(value, validate=True).partition(b":")
            if not user or not colon:
                raise ValueError(f"the login for {key} is no user and password")
            if _unsendable(Login(basic=value)):
                raise ValueError(f"the login for {key} has control characters")
    except _MALFORMED as error:
        # What it holds is secret, also where it is wrong.
        log.error("cannot use %s: %s", _VARIABLE, str(error) if type(error) is ValueError else type(error).__name__)
        return {}
    return found


def _own(options: WasmOptions) -> bytes:
    try:
        # Read each time: it may be mounted, and changed, while the agent runs.
        return read_file(options.docker_config) if options.docker_config else b"{}"
    except OSError:
        return b"{}"


def _entry(auths: Mapping[str, Any], key: str) -> Login:
    """What the configuration itself has; a registry's key may be a URL."""
    found = auths.get(key)
    hosts = DOCKER_HUB if key == _HUB_KEY else (key,)
    if found is None:
        found = next((entry for name, entry in auths.items() if _host(name) in hosts), None)
    if not found:
        return NOBODY
    entry = dict(found)
    basic = str(entry.get("auth") or "")
    if not basic and entry.get("username"):
        basic = _basic(str(entry["username"]), str(entry.get("password") or ""))
    return Login(str(entry.get("registrytoken") or ""), str(entry.get("identitytoken") or ""), basic)


def _host(name: str) -> str:
    return name.removeprefix("https://").removeprefix("http://").partition("/")[0]


def _basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def _unsendable(login: Login) -> bool:
    """True if a part of it has control characters: no header carries them, no user or password has them (RFC 7617)."""
    texts = [login.registry_token, login.identity_token, login.basic]
    # What is no base64 goes to the registry as it is, which refuses it.
    with contextlib.suppress(ValueError):
        texts.append(base64.b64decode(login.basic).decode("latin-1"))
    return any(_CONTROL.search(text) for text in texts)


def _asked(helper: str, key: str, options: WasmOptions, deadline: float) -> Login:
    """What a helper says of a registry: its key goes in, JSON comes out; nobody if it does not know it."""
    program = _HELPER + helper
    try:
        status, output = _run(program, key, options, deadline)
    except TimeoutError:
        raise FetchError(f"error getting credentials: {program} does not answer") from None
    except OSError as error:
        raise FetchError(f"error getting credentials: {program}: {error.strerror}") from None
    if len(output) > _OUTPUT_LIMIT:
        raise FetchError(f"error getting credentials: {program} answers with more than {_OUTPUT_LIMIT >> 10} KiB")
    said = output.decode(errors="replace").strip()
    if status != 0:
        if said == _NOT_FOUND:
            return NOBODY
        # What it says of a failure is no secret; what it says otherwise is one.
        raise FetchError(f"error getting credentials: {program}: exit status {status}: {' '.join(said.split())}")
    try:
        answer = json.loads(said)
        user, password = str(answer.get("Username") or ""), str(answer.get("Secret") or "")
    except _MALFORMED:
        raise FetchError(f"error getting credentials: {program} answers without JSON") from None
    if user == _TOKEN_USER:
        return Login(identity_token=password)
    return Login(basic=_basic(user, password)) if user or password else NOBODY


def _run(program: str, key: str, options: WasmOptions, deadline: float) -> tuple[int, bytes]:
    """The exit status and the output of a helper; one that writes more than the limit is killed.

    Raises:
        OSError: it cannot be run.
        TimeoutError: it has not ended by the deadline, and was killed.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([program, "get"], stdin=pipe, stdout=pipe, env=dict(options.environment)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # One that does not read, or has ended, says by its output what there is to say. A key fits into the pipe.
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(key.encode())
            output, descriptor = b"", process.stdout.fileno()
            while len(output) <= _OUTPUT_LIMIT:
                if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError
                if not (piece := os.read(descriptor, _OUTPUT_LIMIT)):
                    return process.wait(max(0.0, deadline - time.monotonic())), output
                output += piece
            return 0, output
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            process.kill()
