"""The one error of the agent that ends it before Envoy runs (exit status 255)."""

from __future__ import annotations


class AgentError(Exception):
    """What failed, with its cause, in one line.

    Args:
        what: e.g. ``failed to get proxy config``.
        why: the cause; may be empty.
        next_step: what the operator can do; may be empty.
    """

    exit_code = 255

    def __init__(self, what: str, why: object = "", next_step: str = "") -> None:
        self.what, self.why, self.next_step = what, str(why), next_step
        line = f"{what}: {why}" if str(why) else what
        super().__init__(" ".join(f"{line}. {next_step}".split()) if next_step else " ".join(line.split()))


class UsageError(AgentError):
    """Wrong flags or arguments."""
