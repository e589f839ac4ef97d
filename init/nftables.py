"""The native nftables back end: one transaction through ``nft -f -``.

The present state is read as JSON and compared, so that a second run changes nothing and counters survive; the
reference flushes and adds anew each time. A transaction is atomic, so no guard rules are needed.

Source: istio/istio: tools/istio-nftables/pkg/capture/run.go.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from . import native, native_state
from .errors import InitError
from .model import Rule
from .netlink import nft_tables
from .state import Drift
from .tools import Output, Tools, advice


class NFTables(NamedTuple):
    """Applies the rules of ``init.native``. ``ahead``: see ``native.script``."""

    tools: Tools
    cni: bool = False
    comments: bool = False
    ahead: bool = False

    def present(self) -> list[str]:
        """Our tables that exist in this network namespace.

        Raises:
            InitError: no permission, or a kernel without nf_tables.
        """
        try:
            return [name for family, name in nft_tables() if family == "inet" and name in native.TABLES]
        except OSError as error:
            raise InitError(
                "cannot list nftables tables", str(error), "Run as root on a kernel with nf_tables"
            ) from None

    def compare(self, rules: Sequence[Rule]) -> list[Drift]:
        """How our tables differ from ``rules``.

        Raises:
            InitError: nft cannot list them, or was built without JSON.
        """
        result = self._nft("list ruleset inet", as_json=True)
        if result.code:
            raise _refused("nft cannot list the rules", result)
        return native_state.compare(rules, result.out)

    def apply(self, rules: Sequence[Rule], replace: Sequence[str] = ()) -> None:
        """Writes the rules; tables in ``replace`` are removed in the same transaction first.

        Raises:
            InitError: nft is missing or refuses.
        """
        removed = "".join(f"delete table inet {table}\n" for table in replace)
        self._run(removed + native.script(rules, self.comments, self.ahead))

    def cleanup(self) -> None:
        """Removes our three tables. Raises InitError."""
        self._run(native.cleanup())

    def _run(self, script: str) -> None:
        result = self._nft(script)
        if result.code:
            raise _refused("nft refused the rules", result)

    def _nft(self, script: str, as_json: bool = False) -> Output:
        # Loaded by init.preload only: a single run is quicker without ctypes.
        library = sys.modules.get(f"{__package__}.libnftables")
        if library is not None and library.loaded() and not self.tools.sandbox:
            result: Output = library.run(script, as_json)
            return result
        if not self.tools.find("nft"):
            where = "on the host" if self.cni else "in the sidecar container image"
            raise InitError(
                "nativeNftables is enabled", f"the nft binary is missing {where}", "Install the package nftables"
            )
        if as_json:
            return self.tools.run(["nft", "-j", script])
        return self.tools.run(["nft", "-f", "-"], script)


def _refused(what: str, result: Output) -> InitError:
    """nft complains of every line that it does not understand, each with the line and a mark under it: the first says it."""
    said = [line.strip() for line in result.err.splitlines() if line.strip(" ^~\t")]
    more = sum("Error: " in line for line in said) - 1
    why = ": ".join(said[:2]) or f"it said nothing, exit {result.code}"
    return InitError(what, f"{why} (and {more} more)" if more > 0 else why, advice(result.err))
