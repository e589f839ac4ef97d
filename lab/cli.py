"""Every verb of ``lab``. Parsing, printing and exit codes only; the work is done in the rooms below.

Exit codes (docs/reference.md): 0 all well or all verdicts hold; 1 a verdict failed; 2 wrong usage, bad input or
nothing to run; 3 something could not be observed on this kernel; if both 1 and 3 apply, 1.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from lab.errors import InputError, LabError, ObservationError

if TYPE_CHECKING:
    from lab.explaining import Backend
    from lab.manifests.model import Mesh
    from lab.proofs import Proof

BACKENDS = ("auto", "legacy", "nft", "native-nft")
PROTOCOLS = ("http", "grpc", "tcp", "tls", "udp", "dns", "dns-tcp", "icmp")
_FILES = 16384
KINDS = ("bootstrap", "listeners", "routes", "clusters", "endpoints", "secrets", "nds", "all")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; errors become one line on stderr, never a traceback.

    Without ``argv`` it is this process's own, and so are its standard streams (`lab.output`).
    """
    if argv is not None:
        return _told(argv)
    from lab.output import guarded

    _have_enough_files()
    with guarded():
        return _told(sys.argv[1:])


def _have_enough_files() -> None:
    """A lab holds some ten descriptors for each pod, whatever limit a shell was given; its processes inherit ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= _FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, max(hard, _FILES)))
    except (ValueError, OSError):  # not root, and the hard limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _told(argv: Sequence[str]) -> int:
    """The exit code of a command line whose output was written, or whose error was told."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except LabError as error:
        return _fail(error)
    except Exception as error:
        if os.environ.get("SIDECARLAB_TRACEBACK"):
            raise
        return _fail(_defect(error))
    return code


def _run(argv: Sequence[str]) -> int:
    try:
        result = cli.main(args=list(argv), prog_name="lab", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.UsageError as error:
        raise InputError(error.format_message().rstrip("."), next_step=_usage_hint(error)) from None
    except click.ClickException as error:
        raise InputError(error.format_message()) from None
    except (click.Abort, KeyboardInterrupt):
        return 130
    return result if isinstance(result, int) else 0


def _defect(error: BaseException) -> LabError:
    """A mistake of ours, as one line that tells where it happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    where = f"{os.path.relpath(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}" if frame else ""
    return LabError(
        f"internal error, {type(error).__name__}",
        where,
        str(error),
        "Please report it; SIDECARLAB_TRACEBACK=1 shows how it came about",
    )


def _fail(error: LabError) -> int:
    click.echo(f"error: {error}", err=True)
    return error.exit_code


def _usage_hint(error: click.UsageError) -> str:
    return f"See `{error.ctx.command_path} --help`" if error.ctx else "See `lab --help`"


def _print_json(document: object) -> None:
    import json

    click.echo(json.dumps(document, indent=2, default=str))


def _progress(line: str) -> None:
    """What is being done now, for somebody who waits at a terminal."""
    if sys.stderr.isatty():
        click.secho(f"{line} ...", err=True, dim=True)


def _need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise InputError(
            f"{what} needs root",
            why="it makes network namespaces and mounts",
            next_step="Run it with sudo",
        )


class _Command(click.Command):
    """A verb that takes no empty words: what a shell makes of an unset variable means nothing to any of them."""

    def invoke(self, ctx: click.Context) -> Any:
        for parameter in self.params:
            name = parameter.name or ""
            value = ctx.params.get(name)
            empty = "" in value if isinstance(value, tuple) else value == ""
            if empty and name != "command" and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"empty value for {parameter.get_error_hint(ctx)}", ctx)
            if isinstance(value, float) and math.isnan(value):
                raise click.UsageError(f"no number for {parameter.get_error_hint(ctx)}", ctx)
        return super().invoke(ctx)


class _Group(click.Group):
    command_class = _Command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sidecarlab", prog_name="lab")
def cli() -> None:
    """An Istio-style sidecar mesh on one Linux machine, with packets as proof of where every connection goes."""


# --- running labs ---------------------------------------------------------------------------


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option("--name", "-n", help="Name of the lab (default: from the first file's name).")
@click.option("-d", "--detach", is_flag=True, help="Return when ready; the lab keeps running until `lab down`.")
@click.option("--runtime", type=click.Choice(["netns", "docker"]), default="netns", show_default=True)
@click.option("--iptables", "backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds until all is ready."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and do nothing.")
@click.option("--json", "as_json", is_flag=True)
def up(
    files: tuple[str, ...],
    name: str | None,
    detach: bool,
    runtime: str,
    backend: str,
    timeout: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Bring a lab up from manifests, or make the running one what they say now.

    Attached by default: Ctrl-C takes it down. A lab that ran already goes on by itself.
    """

    def read() -> Mesh:
        from lab.memory import mesh_of

        mesh = mesh_of(files)
        if name is not None:
            mesh = dataclasses.replace(mesh, name=name)
        _warn(mesh)
        if not as_json:  # what prints the table is imported while the lab comes up
            threading.Thread(target=importlib.import_module, args=("lab.show",), daemon=True).start()
        return mesh

    from lab.fabric import record

    up_already = [lab.name for lab in record.list_labs() if lab.state == "running"]
    if up_already:
        from lab.manifests.load import lab_name

        wanted = name or lab_name(files[0])
        if wanted in up_already:
            return _reconcile(
                wanted, files, backend, timeout, dry_run, as_json, runtime if _chosen("runtime") else None
            )
    if dry_run:
        return _plan(read(), backend, as_json)
    _need_root("lab up")
    from lab import lifecycle

    if not detach:
        show = functools.partial(_show_ready, as_json=as_json)
        return lifecycle.run_attached(read, backend=backend, timeout=timeout, runtime=runtime, on_ready=show)
    info = lifecycle.start_detached(read, backend=backend, timeout=timeout, runtime=runtime)
    try:
        _show_ready(info, as_json)
    except LabError:  # an error means that there is no lab
        lifecycle.stop(str(info["name"]))
        raise
    return 0


def _chosen(option: str) -> bool:
    """Whether the user gave it; else it has its default."""
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def _reconcile(
    name: str, files: Sequence[str], backend: str, timeout: float, dry_run: bool, as_json: bool, runtime: str | None
) -> int:
    from lab import changing, lifecycle

    _need_root("lab up of a running lab")
    # Before what could send the user to take it down under the tests.
    changing.refuse_temporary(name, "Wait for its end, or choose another name with --name")
    runs = lifecycle.inspect(name)
    lifecycle.refuse_other_settings(runs, backend, runtime)
    changes = changing.to_manifests(name, files, dry_run=dry_run, timeout=timeout)
    if changes.diff:
        _warn(changes.mesh)
    _tell(changes.doubts())
    if as_json:
        info = runs if dry_run else lifecycle.inspect(name)
        _print_json({**info, "changes": changes.to_json()})
    else:
        for line in changes.lines():
            click.echo(line)
    return 0


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option("--lab", "lab_name", help="Which lab, if several are up.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds until new pods are ready."
)
@click.option("--dry-run", is_flag=True, help="Print what would change and do nothing.")
@click.option("--json", "as_json", is_flag=True)
def apply(files: tuple[str, ...], lab_name: str | None, timeout: float, dry_run: bool, as_json: bool) -> int:
    """Add objects to a running lab, or replace those of the same kind, namespace and name."""
    _need_root("lab apply")
    from lab import changing

    changes = changing.apply(_running(lab_name), files, dry_run=dry_run, timeout=timeout)
    _warn(changes.mesh, files)
    _tell(changes.doubts())
    if as_json:
        _print_json(changes.to_json())
    else:
        for line in changes.lines():
            click.echo(line)
    return 0


def _show_ready(info: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(info)
    else:
        from lab.show import inspect_table

        inspect_table(info)
    sys.stdout.flush()


def _plan(mesh: Mesh, backend: str, as_json: bool) -> int:
    from lab.show import plan_document, plan_text

    document = plan_document(mesh, backend)
    if as_json:
        _print_json(document)
    else:
        click.echo(plan_text(document))
    return 0


@cli.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Every lab on this machine.")
@click.option("--graceful", is_flag=True, help="SIGTERM first and wait for the drain.")
@click.option("--json", "as_json", is_flag=True)
def down(name: str | None, everything: bool, graceful: bool, as_json: bool) -> int:
    """Take a lab down, also after a crash. Twice is fine."""
    from lab.fabric import record

    _need_root("lab down")
    if everything and name:
        raise InputError("both a name and --all", next_step="Give one of them")
    names = [lab.name for lab in record.list_labs()]
    if everything:
        targets = names
    elif name is not None:
        targets = [name]
    elif len(names) == 1:
        targets = names
    else:
        raise InputError(
            "which lab?" if names else "no lab is up",
            why=f"up: {', '.join(names)}" if names else "",
            next_step="Give a name or --all" if names else "",
        )
    removed: dict[str, list[str]] = {}
    for target in targets:
        if graceful:
            from lab import lifecycle

            lifecycle.drain(target)
        removed[target] = list(record.down(target))
    if as_json:
        _print_json({"down": removed})
    else:
        for target, things in removed.items():
            click.echo(f"{target}: down" if things else f"{target}: nothing to take down", err=True)
    return 0


@cli.command()
@click.option("--json", "as_json", is_flag=True)
def ls(as_json: bool) -> int:
    """List the labs on this machine."""
    from lab.fabric import record

    labs = [{"name": lab.name, "state": lab.state, "pid": lab.pid} for lab in record.list_labs()]
    if as_json:
        _print_json({"labs": labs})
        return 0
    from lab.show import labs_table

    labs_table(labs)
    return 0


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True)
def inspect(name: str | None, as_json: bool) -> int:
    """Show what runs in a lab: pods, addresses, readiness, pids, rejected configuration."""
    from lab import lifecycle

    info = lifecycle.inspect(_running(name, how="Write `lab inspect NAME`"))
    if as_json:
        _print_json(info)
    else:
        from lab.show import inspect_table

        inspect_table(info)
    return 0


def _running(name: str | None, pod: str | None = None, how: str = "Add --lab NAME") -> str:
    """The name of a running lab: as given, or the only one (that has the pod). ``how`` a user says which one is meant."""
    from lab.fabric import record

    labs = [lab for lab in record.list_labs() if lab.state == "running"]
    names = [lab.name for lab in labs]
    if name is not None:
        if name in names:
            return name
        if any(lab.name == name for lab in record.list_labs()):
            raise InputError(f"lab {name!r} has crashed", why="its process is gone", next_step=f"Run `lab down {name}`")
        raise InputError(
            f"no lab {name!r} is up",
            why=f"up: {', '.join(names) or 'none'}",
            next_step="See `lab ls`, or `lab up FILE`",
        )
    if not names:
        raise InputError("no lab is up", next_step="Start one with `lab up FILE`")
    if pod and len(names) > 1:
        from lab import lifecycle

        up, names = names, [n for n in names if _has(lifecycle.stored_mesh(n), pod)]
        if not names:
            why = f"none of the labs has it: {', '.join(up)}"
            raise InputError(f"no pod {pod!r}", why=why, next_step="See `lab inspect NAME`")
    if len(names) != 1:
        raise InputError("which lab?", why=f"up: {', '.join(names)}", next_step=how)
    return names[0]


def _has(mesh: Mesh, place: str) -> bool:
    return mesh.pod(place) is not None or any(host.meta.name == place for host in mesh.external_hosts)


@cli.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("pod")
@click.option("--as", "user", default="app", show_default=True, help="app, proxy, root or a numeric uid.")
@click.option("--lab", "lab_name", help="Which lab, if several are up.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def exec_(pod: str, user: str, lab_name: str | None, command: tuple[str, ...]) -> int:
    """Run a command inside a pod; its exit code is the command's."""
    _need_root("lab exec")
    if not command:
        raise InputError("no command given", next_step="Write `lab exec POD -- CMD...`")
    uid = _uid(user)
    name = _running(lab_name, pod)
    from lab import lifecycle

    return lifecycle.exec_in_pod(name, pod, list(command), uid)


def _uid(user: str) -> int:
    """The user that ``--as`` names."""
    uids = {"app": 1000, "proxy": 1337, "root": 0}
    if user not in uids and not (user.isascii() and user.isdigit() and int(user) <= 4294967294):
        raise InputError(
            f"unknown user {user!r} for --as", next_step="Use app, proxy, root or a uid from 0 to 4294967294"
        )
    return uids[user] if user in uids else int(user)


# --- verdicts -------------------------------------------------------------------------------


@cli.command()
@click.argument("what", nargs=-1, metavar="[NAME|FILE...]")
@click.option("--only", metavar="GLOB", help="Only tests whose name matches.")
@click.option("--junit", type=click.Path(dir_okay=False), help="Write a JUnit report here.")
@click.option("--runtime", type=click.Choice(["netns", "docker"]), default="netns", show_default=True)
@click.option("--iptables", "backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option(
    "--proof",
    type=click.Choice(["observed", "predicted", "both"]),
    default="observed",
    show_default=True,
    help="predicted: on paper, nothing runs; both: what was observed against what was predicted.",
)
@click.option("--json", "as_json", is_flag=True)
def verify(
    what: tuple[str, ...],
    only: str | None,
    junit: str | None,
    runtime: str,
    backend: str,
    proof: Proof,
    as_json: bool,
) -> int:
    """Run every TrafficTest of a lab and compare what happened with what it expects.

    A lab that is not up is brought up from FILE and taken down again.
    """
    from lab import verify as verification

    if proof != "predicted":
        _need_root("lab verify")
    if junit and not os.path.isdir(os.path.dirname(os.path.abspath(junit))):
        raise InputError("cannot write the JUnit report", junit, "there is no such directory", "Make it first")
    outcome = verification.verify(
        what,
        only=only,
        backend=backend,
        runtime=runtime if _chosen("runtime") else None,
        proof=proof,
        log=lambda line: click.echo(line, err=True),
        progress=_progress,
    )
    if junit:
        try:
            with open(junit, "w", encoding="utf-8") as report:
                report.write(outcome.junit())
        except OSError as error:
            why = error.strerror or str(error)
            raise InputError("cannot write the JUnit report", junit, why, "Name another file") from None
    if as_json:
        _print_json(outcome.to_json())
    else:
        outcome.print_table()
    return outcome.exit_code


@cli.command()
@click.option(
    "--from", "source", default="", metavar="POD", help="Where the flow begins: POD.NAMESPACE, or an ExternalHost."
)
@click.option("--to", required=True, metavar="HOST[:PORT]")
@click.option(
    "--protocol",
    type=click.Choice(PROTOCOLS),
    default="http",
    show_default=True,
)
@click.option("--uid", type=click.IntRange(0, 2**32 - 2), help="User that sends it (default: 1000).")
@click.option("-f", "--file", "files", multiple=True, type=click.Path(), help="Manifests; nothing need run.")
@click.option(
    "--iptables-save",
    "rules",
    multiple=True,
    type=click.Path(),
    help="A rule dump: iptables-save, ip6tables-save or nft.",
)
@click.option("--config-dump", type=click.Path(), help="An Envoy's config_dump (take it with ?include_eds).")
@click.option("--ipset", "sets", multiple=True, type=click.Path(), help="ipset save, for rules that look into sets.")
@click.option(
    "--direction", type=click.Choice(["in", "out"]), default="out", show_default=True, help="With dumps alone."
)
@click.option("--from-ip", default="", help="Source address (with dumps, or a forged one).")
@click.option("--to-ip", default="", help="Address of the host, with dumps alone.")
@click.option("--path", default="/", show_default=True)
@click.option("--method", default="GET", show_default=True)
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE")
@click.option("--authority", default="", help="Host header instead of HOST.")
@click.option("--sni", default="", help="TLS server name instead of HOST.")
@click.option("--iptables", "backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="With -f.")
@click.option("--lab", "lab_name", help="Which lab, if several are up.")
@click.option("--why", is_flag=True, help="Also rules, chains and routes that did not match, and what failed.")
@click.option("--json", "as_json", is_flag=True)
def explain(
    source: str,
    to: str,
    protocol: str,
    uid: int | None,
    files: tuple[str, ...],
    rules: tuple[str, ...],
    config_dump: str | None,
    sets: tuple[str, ...],
    direction: str,
    from_ip: str,
    to_ip: str,
    path: str,
    method: str,
    headers: tuple[str, ...],
    authority: str,
    sni: str,
    backend: str,
    lab_name: str | None,
    why: bool,
    as_json: bool,
) -> int:
    """Predict a flow's verdict from manifests (-f), from dumps, or for a running lab; nothing is sent.

    The first line is the verdict in one sentence, then come the hops, then the smallest changes that would flip it.
    """
    from lab import asking

    question = asking.Question(
        to=to,
        source=source,
        protocol=protocol,  # type: ignore[arg-type]
        uid=uid,
        direction=direction,  # type: ignore[arg-type]
        from_ip=from_ip,
        to_ip=to_ip,
        path=path,
        method=method,
        headers=_headers(headers),
        authority=authority,
        sni=sni,
    )
    if files and (rules or config_dump):
        raise InputError("both manifests and dumps", next_step="Give -f, or --iptables-save and --config-dump")
    if files:
        found = asking.of_files(files, question, backend, why=why)  # type: ignore[arg-type]
    elif rules or config_dump:
        found = asking.of_dumps(question, rules, config_dump, sets, why=why)
    else:
        _need_root("lab explain of a running lab")
        found = asking.of_lab(_running(lab_name, source or None), question, why=why)
    if as_json:
        _print_json(found.to_json(why=why))
    else:
        for line in found.lines(why=why):
            click.echo(line)
    return 0


@cli.command()
@click.argument("name", required=False)
@click.option("--from", "source", required=True, metavar="POD", help="POD.NAMESPACE, or an ExternalHost.")
@click.option(
    "--to", required=True, metavar="HOST[:PORT]", help="A name as the pod would look it up, an address, or a pod."
)
@click.option("--protocol", type=click.Choice(PROTOCOLS), default="http", show_default=True)
@click.option("--as", "user", default="app", show_default=True, help="Who sends: app, proxy, root or a numeric uid.")
@click.option("--path", default="/", show_default=True)
@click.option("--method", default="GET", show_default=True)
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE")
@click.option("--authority", default="", help="Host header instead of HOST.")
@click.option("--sni", default="", help="TLS server name instead of HOST.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds for all of it.",
)
@click.option("--lab", "lab_name", help="Which lab, if several are up (NAME means the same).")
@click.option("--json", "as_json", is_flag=True)
def trace(
    name: str | None,
    source: str,
    to: str,
    protocol: str,
    user: str,
    path: str,
    method: str,
    headers: tuple[str, ...],
    authority: str,
    sni: str,
    timeout: float,
    lab_name: str | None,
    as_json: bool,
) -> int:
    """Send one real flow in a running lab and show every hop of it, each with its evidence.

    The first line is the verdict in one sentence. Then come the nine steps of a sidecar request: lookup, VIP, iptables,
    virtualOutbound, original destination, route, cluster, endpoint, far pod; a step that did not happen says why. In brackets
    stands who said so: the kernel's trace or conntrack, Envoy's log or configuration, the app, the wire.

    Exit code 0 whatever became of the flow; 3 if something of it could not be observed here.
    """
    _need_root("lab trace")
    if name and lab_name and name != lab_name:
        raise InputError(f"two labs: {name} and {lab_name}", next_step="Give one of them")
    from lab import asking, tracing

    question = asking.Question(
        to=to,
        source=source,
        protocol=protocol,  # type: ignore[arg-type]
        uid=_uid(user),
        path=path,
        method=method,
        headers=_headers(headers),
        authority=authority,
        sni=sni,
    )
    chosen = _running(name or lab_name, source)
    traced = tracing.trace(chosen, question, timeout=timeout, log=lambda line: click.echo(line, err=True))
    if as_json:
        _print_json(traced.to_json())
    else:
        for line in traced.lines():
            click.echo(line)
    return traced.exit_code


@cli.command()
@click.argument("pod")
@click.option("-i", "--interface", default="", metavar="IF", help="eth0, lo or any (default: all of the pod).")
@click.option("-w", "--write", "file", default="", metavar="FILE", help="Write pcapng here; - is standard output.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N packets.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="N", help="End after N seconds.")
@click.option("--filter", "expression", default="", metavar="EXPR", help='As tcpdump writes it: "tcp and port 8080".')
@click.option("--lab", "lab_name", help="Which lab, if several are up.")
@click.option("--json", "as_json", is_flag=True, help="One document with all packets, at the end.")
def capture(
    pod: str,
    interface: str,
    file: str,
    count: int | None,
    seconds: float | None,
    expression: str,
    lab_name: str | None,
    as_json: bool,
) -> int:
    """Show a pod's packets, each with a comment that names its hop; with -w as a pcapng file for Wireshark.

    POD may be an ExternalHost, too. Captured traffic runs over lo, behind its translation; the comments say where it was going.
    They come from conntrack, the kernel's trace and list of sockets, the manifests and the packet itself (named in brackets), and
    say so where something is not known. Ctrl-C ends a capture.
    """
    _need_root("lab capture")
    if as_json and file == "-":
        raise InputError("both --json and -w -", why="one standard output", next_step="Give a FILE")
    from lab import capturing

    wanted = capturing.Wanted(interface, file, count, seconds, expression)
    kept: list[capturing.Captured] | None = [] if as_json else None
    ended = capturing.capture(
        _running(lab_name, pod), pod, wanted, log=lambda line: click.echo(line, err=True), keep=kept
    )
    if as_json:
        packets = None if file else [p.to_json() for p in kept or ()]
        _print_json({**ended.to_json(), "file": file or None, "packets": packets})
    else:
        lost = f", {ended.dropped} dropped by the kernel" if ended.dropped else ""
        where = f" to {file}" if file not in ("", "-") else ""
        click.echo(f"{ended.packets} packets{where}{lost}{f'; {ended.why}' if ended.why else ''}", err=True)
    return 0


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise InputError(f"--header {text}", next_step="Write NAME:VALUE")
        headers[name.strip().lower()] = value.strip()
    return headers


# --- manifests ------------------------------------------------------------------------------


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option("--json", "as_json", is_flag=True)
def validate(files: tuple[str, ...], as_json: bool) -> int:
    """Check manifests; needs no root and nothing running."""
    from lab.manifests.load import check

    mesh, errors = check(files)
    warnings = mesh.warnings if mesh else ()
    if as_json:
        _print_json(
            {
                "valid": not errors,
                "errors": [str(e) for e in errors],
                "warnings": [
                    {"where": str(w.source), "message": w.message, "level": w.level, "code": w.code or None}
                    for w in warnings
                ],
            }
        )
    else:
        for warning in warnings:
            click.echo(str(warning), err=True)
        for error in errors:
            click.echo(f"error: {error}", err=True)
        if mesh and not errors:
            click.echo(
                f"{mesh.name}: valid, {len(mesh.pods)} pods, {len(mesh.services)} services, {len(mesh.tests)} tests"
            )
    return 2 if errors else 0


@cli.command()
def schema() -> int:
    """Print the JSON Schema of the lab's own kinds."""
    from lab.manifests.schema import json_schema

    _print_json(json_schema())
    return 0


@cli.command("proxy-config")
@click.argument("pod")
@click.argument("kind", type=click.Choice(KINDS), default="all")
@click.option(
    "-f", "--file", "files", multiple=True, type=click.Path(), help="What discovery would send; nothing runs."
)
@click.option("--evidence", is_flag=True, help="With -f: include the lab's own evidence access log.")
@click.option("--lab", "lab_name", help="Which lab, if several are up.")
@click.option("--json", "as_json", is_flag=True)
def proxy_config(
    pod: str, kind: str, files: tuple[str, ...], evidence: bool, lab_name: str | None, as_json: bool
) -> int:
    """Show a proxy's configuration, or with -f what discovery would send it."""
    from lab import proxyconfig

    if files:
        from lab.memory import mesh_of

        document = proxyconfig.from_files(mesh_of(files), pod, kind, evidence=evidence)
    else:
        _need_root("lab proxy-config of a running proxy")
        document = proxyconfig.from_proxy(_running(lab_name, pod), pod, kind)
    if as_json:
        _print_json(document)
    else:
        proxyconfig.print_summary(document)
    return 0


@cli.command()
@click.argument("what", nargs=-1, required=True, metavar="FILE|NAME...")
@click.option(
    "-o", "--output", type=click.Choice(["mermaid", "dot", "svg", "html"]), default="mermaid", show_default=True
)
def graph(what: tuple[str, ...], output: str) -> int:
    """Draw a mesh."""
    from lab import explaining
    from lab import graph as drawing

    mesh = _mesh_of(what)
    click.echo(drawing.render(mesh, explaining.predict_all(mesh), output))
    return 0


@cli.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME|FILE...")
@click.option(
    "--from", "sources", multiple=True, metavar="POD", help="Only from here: POD.NAMESPACE, or an ExternalHost."
)
@click.option(
    "--to", "targets", multiple=True, metavar="X", help="Only to what is called so: NAME, HOST or GLOB[:PORT]."
)
@click.option(
    "--iptables", "backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="With files."
)
@click.option("--json", "as_json", is_flag=True)
def matrix(
    what: tuple[str, ...], sources: tuple[str, ...], targets: tuple[str, ...], backend: Backend, as_json: bool
) -> int:
    """Predict who reaches whom and how: every pod to every service, pod and host outside.

    From manifests alone, or with the rules and proxies of a running lab as they are now; nothing is sent.
    """
    from lab.matrix import matrix as predicting
    from lab.matrix import sides

    side = sides.read(what, backend)
    found = predicting.matrix(side.world, sources, targets, live=side.live)
    side.save()
    if as_json:
        _print_json(found.to_json())
    else:
        from lab.matrix import table

        for line in table.lines(found, _width()):
            click.echo(line)
    return 0


@cli.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option(
    "--iptables", "backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="With files."
)
@click.option("--json", "as_json", is_flag=True)
def diff(before: str, after: str, backend: Backend, as_json: bool) -> int:
    """Predict what a change of manifests would change: flows whose verdict differs, and what would be pushed.

    A and B are each a file, a directory, several of them with commas between, or the name of a running lab. Exit code 0:
    no difference, 1: there is one, 2: bad input.
    """
    from lab.matrix import difference, sides

    old = sides.read(before.split(","), backend)
    new = sides.read(after.split(","), backend, previous=old.mesh)
    found = difference.between(old, new)
    old.save()
    if as_json:
        _print_json(found.to_json())
    else:
        for line in found.lines(_width()):
            click.echo(line)
    return 1 if found else 0


def _width() -> int:
    """Columns of the terminal; into a pipe lines may be long."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 200


def _mesh_of(what: Sequence[str]) -> Mesh:
    from lab.fabric import record

    if len(what) == 1 and not os.path.exists(what[0]) and any(lab.name == what[0] for lab in record.list_labs()):
        from lab import lifecycle

        return lifecycle.stored_mesh(what[0])
    from lab.memory import mesh_of

    return mesh_of(what)


def _warn(mesh: Mesh, files: Sequence[str] = ()) -> None:
    for warning in mesh.warnings:
        if files and warning.source.file not in files:
            continue
        click.echo(str(warning), err=True)


def _tell(doubts: Sequence[str]) -> None:
    for doubt in doubts:
        click.echo(f"warning: {doubt}", err=True)


def _unreachable(value: object) -> NoReturn:
    raise AssertionError(value)


__all__ = ["InputError", "ObservationError", "cli", "main"]
