"""What runs in the containers of docker-compose.yml, beside init, agent and the echo app::

python -m lab.containers discovery FILE...           the control plane of the manifests
python -m lab.containers dns FILE...                 names that no container has: Docker's resolver asks here
python -m lab.containers prober POD.NAMESPACE        sends, and watches the kernel, in one pod's network
python -m lab.containers tests FILE... [--only GLOB] [--junit FILE] [--json] [--wait SECONDS]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.containers import paths
from lab.errors import InputError, LabError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of them; an error is one line on stderr and an exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except LabError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)  # noqa: T201
        return e.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.containers", description="Parts of a mesh of containers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    discovery = commands.add_parser("discovery", help="the control plane")
    discovery.set_defaults(run=_discovery)
    dns = commands.add_parser("dns", help="names that no container has")
    dns.set_defaults(run=_dns)
    prober = commands.add_parser("prober", help="sends and watches in one pod's network")
    prober.add_argument("pod", metavar="POD.NAMESPACE")
    prober.set_defaults(run=_prober)
    tests = commands.add_parser("tests", help="runs every TrafficTest")
    tests.add_argument("--only", metavar="GLOB", help="only tests whose name matches")
    tests.add_argument("--junit", metavar="FILE", help="write a JUnit report here")
    tests.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    tests.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for the mesh to be ready")
    tests.set_defaults(run=_tests)
    for command in (discovery, dns, tests):
        command.add_argument("files", nargs="+", metavar="FILE", help="manifests")
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
