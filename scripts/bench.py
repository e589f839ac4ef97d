"""``make bench``: runs every benchmark, prints their tables and writes ``bench.json``.

Speed goals live here and never in a timed test. Each ``scripts/bench_*.py`` has ``main() -> dict`` (plain data,
units in the key names). ``python -m scripts.bench NAME...`` runs only those.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(argv: list[str]) -> int:
    found = sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))
    unknown = [name for name in argv if name not in found]
    if unknown:
        print(f"error: no benchmark {unknown[0]!r}. Choose from {', '.join(found)}", file=sys.stderr)
        return 2
    results: dict[str, object] = {
        "machine": {"kernel": platform.release(), "cpus": os.cpu_count(), "python": platform.python_version()}
    }
    failed = False
    for name in argv or found:
        print(f"== {name}", flush=True)
        try:
            results[name] = importlib.import_module(f"scripts.bench_{name}").main()
        except Exception as error:  # one broken benchmark must not hide the others' figures
            print(f"error: benchmark {name}: {type(error).__name__}: {error}", file=sys.stderr)
            results[name] = {"error": str(error)}
            failed = True
    Path("bench.json").write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
