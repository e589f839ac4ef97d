"""The errors of this program.

InitError         exit 1: configuration, tools, kernel, routes
 ├── UsageError   exit 255: an unknown flag or a flag value that does not parse
 ├── LockHeld     exit 1: another process holds the xtables lock
 └── ProofError   exit 126: the validator's packet was not redirected

Codes: istio/istio: tools/istio-iptables/pkg/cmd/root.go, .../constants/constants.go.
"""

from __future__ import annotations


class InitError(Exception):
    """An error written for its reader.

    Args:
        what: what failed.
        why: the cause; may be empty.
        next_step: what the user can do; may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        self.what, self.why, self.next_step = what, why, next_step
        super().__init__(str(self))

    def __str__(self) -> str:
        line = ": ".join(part for part in (self.what, self.why) if part).rstrip(".")
        text = f"{line}. {self.next_step}" if self.next_step else line
        return " ".join(text.split())


class UsageError(InitError):
    """A flag that the command line does not have, or a value of the wrong type."""

    exit_code = 255


class LockHeld(InitError):
    """The xtables lock stayed with another process for the whole wait; says nothing about the kernel's modules."""


class ProofError(InitError):
    """The validation packet was not redirected."""

    exit_code = 126

    def __str__(self) -> str:
        return f"{self.what}\n{self.next_step}"
