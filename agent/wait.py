"""``wait``: returns when the proxy is ready.

Source: istio/istio: pilot/cmd/pilot-agent/app/wait.go.
"""

from __future__ import annotations

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
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        problem = _attempt(opener, parsed.string("url"), parsed.integer("requestTimeoutMillis") / 1000)
        if not problem:
            return 0
        pause = parsed.integer("periodMillis") / 1000
        if time.monotonic() + pause >= deadline:
            raise AgentError(f"timeout waiting for Envoy proxy to become ready. Last error: {problem}")
        time.sleep(pause)


def _attempt(opener: urllib.request.OpenerDirector, url: str, timeout: float) -> str:
    try:
        with opener.open(url, timeout=timeout) as response:
            return "" if response.status == 200 else f"HTTP status code {response.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP status code {error.code}"
    except (OSError, ValueError) as error:
        return str(error)
