"""What runs in the containers of docker-compose.yml, beside init, agent and the echo app::

python -m lab.containers discovery FILE...           the control plane of the manifests
python -m lab.containers dns FILE...                 names that no container has: Docker's resolver asks here
python -m lab.containers prober POD.NAMESPACE        sends, and watches the kernel, in one pod's network
python -m lab.containers tests FILE... [--only GLOB] [--junit FILE] [--json] [--wait SECONDS]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.containers import paths
from lab.errors import InputError, LabError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of them; an error is one line on stderr and an exit code."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command not in _COMMANDS:
        print(__doc__, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    parse, run = _COMMANDS[command]
    # Intermixed: more manifests may stand behind the options that a compose file gives.
    args = parse(argparse.ArgumentParser(prog=f"python -m lab.containers {command}")).parse_intermixed_args(rest)
    try:
        return run(args)
    except LabError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)  # noqa: T201
        return e.exit_code
    except KeyboardInterrupt:
        return 130


def _files(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("files", nargs="+", metavar="FILE", help="manifests")
    return parser


def _pod(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("pod", metavar="POD.NAMESPACE")
    return parser


def _of_tests(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--only", metavar="GLOB", help="only tests whose name matches")
    parser.add_argument("--junit", metavar="FILE", help="write a JUnit report here")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for the mesh to be ready")
    return _files(parser)


def _discovery(args: argparse.Namespace) -> int:
    from lab.containers import services

    return services.discovery(args.files)


def _dns(args: argparse.Namespace) -> int:
    from lab.containers import services

    return services.dns(args.files)


def _prober(args: argparse.Namespace) -> int:
    from lab.containers import prober

    return prober.main(args.pod, paths.prober_socket(args.pod))


def _tests(args: argparse.Namespace) -> int:
    from lab.containers import verdicts

    outcome = verdicts.run(args.files, only=args.only, wait=args.wait)
    if args.junit:
        try:
            Path(args.junit).write_text(outcome.junit(), encoding="utf-8")
        except OSError as e:
            raise InputError("cannot write the JUnit report", args.junit, e.strerror or "") from None
    if args.json:
        import json

        print(json.dumps(outcome.to_json(), indent=2), flush=True)  # noqa: T201
    else:
        outcome.print_table()
    return outcome.exit_code


_COMMANDS: Mapping[
    str,
    tuple[Callable[[argparse.ArgumentParser], argparse.ArgumentParser], Callable[[argparse.Namespace], int]],
] = {
    "discovery": (_files, _discovery),
    "dns": (_files, _dns),
    "prober": (_pod, _prober),
    "tests": (_of_tests, _tests),
}


if __name__ == "__main__":
    sys.exit(main())
