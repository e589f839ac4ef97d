"""First process of a container of ours: ``python -m lab.runtime.contained SPEC``, SPEC a `ProcessSpec` as JSON.

Whose it is, what it may do, its environment and its directory are the engine's to set; the rest is as in any pod.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lab.runtime import spawn


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the function that the spec names; its exit code."""
    (spec,) = sys.argv[1:] if argv is None else argv
    return spawn.run_here(spawn.ProcessSpec.from_json(json.loads(spec)))


if __name__ == "__main__":
    sys.exit(main())
