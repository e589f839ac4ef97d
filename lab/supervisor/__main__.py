"""The supervisor's first steps. Imports stay light until the zygote runs: its imports are what an up waits for longest."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from lab.fabric import paths, record
from lab.runtime import backend, launch
from lab.supervisor.options import Options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one lab to its end; the argument is `Options` as JSON."""
    (argument,) = sys.argv[1:] if argv is None else argv
    options = Options(**json.loads(argument))
    if options.detach and os.fork():
        os._exit(0)  # whoever waits for us may go on; the lab's parent is init
    os.umask(0o022)  # pods' uids must read what we write for them
    options = replace(options, backend=backend.choose(options.backend))
    lab_id = record.new_id()
    modules = launch.MODULES + (launch.LEGACY_MODULES if options.backend == "legacy" else ())
    zygote = launch.zygote(modules, {paths.ENV_MARK: lab_id})

    from lab.supervisor.process import run

    return run(options, lab_id, zygote)


if __name__ == "__main__":
    sys.exit(main())
