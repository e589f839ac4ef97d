"""``wait``: returns when the proxy is ready.

Source: istio/istio: pilot/cmd/pilot-agent/app/wait.go.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from agent.errors import AgentError
from agent.flags import Flag, parse

FLAGS = (
    Flag("timeoutSeconds", 60, "maximum number of seconds to wait for Envoy to be ready"),
    Flag("requestTimeoutMillis", 500, "number of milliseconds to wait for response"),
    Flag("periodMillis", 500, "number of milliseconds to wait between attempts"),
    Flag("url", "http://localhost:15021/healthz/ready", "URL to use in requests"),
)


def wait(arguments: Sequence[str]) -> int:
    """Asks until the answer is 200.

    Raises:
        AgentError: not within the time.
    """
    parsed = parse(arguments, FLAGS, ignore_unknown=False)
    deadline = time.monotonic() + parsed.integer("timeoutSeconds")
    # For Go no time, or less, is no limit here (but that of the whole) and no pause there.
    milliseconds = parsed.integer("requestTimeoutMillis")
    limit = milliseconds / 1000 if milliseconds > 0 else max(1.0, parsed.integer("timeoutSeconds"))
    pause = max(0, parsed.integer("periodMillis")) / 1000
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        problem = _attempt(opener, parsed.string("url"), limit)
        if not problem:
            return 0
        if time.monotonic() + pause >= deadline:
            raise AgentError(f"timeout waiting for Envoy proxy to become ready. Last error: {problem}")
        time.sleep(pause)


def _attempt(opener: urllib.request.OpenerDirector, url: str, timeout: float) -> str:
    try:
        with opener.open(url, timeout=timeout) as response:
            return "" if response.status == 200 else f"HTTP status code {response.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP status code {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", "") or error) or type(error).__name__
