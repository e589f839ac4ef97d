"""``request METHOD PATH [BODY]``: one HTTP request to a port of this pod.

Source: istio/istio: pilot/cmd/pilot-agent/app/request.go, pilot/pkg/request/command.go.
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence
from urllib.parse import quote

from agent.errors import AgentError, UsageError
from agent.flags import Flag, parse

TIMEOUT_SECONDS = 60
AS_IT_IS = "".join(map(chr, range(128))).replace(" ", "")
FLAGS = (Flag("debug-port", 15000, "Port to send the request to: 15000, 15004, 15020 or 15021"),)
ALLOWED_PORTS = (15000, 15004, 15020, 15021)


def request(arguments: Sequence[str]) -> int:
    """Prints the body of the answer and nothing else.

    Raises:
        AgentError: no answer, or a status above 399 other than 404.
    """
    parsed = parse(arguments, FLAGS, ignore_unknown=False)
    if not 2 <= len(parsed.arguments) <= 3:
        raise UsageError("request needs METHOD PATH [BODY]")
    method, path = parsed.arguments[0], parsed.arguments[1]
    # The argument's own bytes, whatever they are.
    body = parsed.arguments[2].encode("utf-8", "surrogateescape") if len(parsed.arguments) > 2 else None
    port = parsed.integer("debug-port")
    if port not in ALLOWED_PORTS:
        raise UsageError(f"debug port {port} is not allowed", "", f"Ports are {', '.join(map(str, ALLOWED_PORTS))}")
    connection = http.client.HTTPConnection("localhost", port, timeout=TIMEOUT_SECONDS)
    try:
        path = quote(path if path.startswith("/") else f"/{path}", safe=AS_IT_IS, errors="surrogateescape")
        connection.request(method, path, body)
        response = connection.getresponse()
        text = response.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise AgentError(f"failed to request localhost:{port}", error) from None
    finally:
        connection.close()
    if response.status > 399 and response.status != 404:
        raise AgentError(f"received unsuccessful status code {response.status}", text.decode("utf-8", "replace"))
    sys.stdout.buffer.write(text)
    sys.stdout.flush()
    return 0
