"""The echo app: listens on ports of several protocols and answers each flow by what it saw of it.

Runs in a pod (``main(params)`` in a forked child) or as a program::

    python -m lab.apps.echo --name catalog.catalog --port 8080:http --port 9000:tcp

It says ``READY=1`` to ``NOTIFY_SOCKET`` once all ports listen, and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lab import notify
from lab.apps.certificate import self_signed, server_context
from lab.apps.datagrams import DatagramListener
from lab.apps.events import EventLog
from lab.apps.ports import PROTOCOLS, EchoConfig, EchoPort, addresses, from_params, parse_port
from lab.apps.report import Endpoint
from lab.apps.streams import Detect, Echo, ProtocolFactory, StreamListener
from lab.errors import InputError


class Listener(Protocol):
    """What is stopped at the end."""

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """A port as configured and where it listens."""

    port: EchoPort
    where: Endpoint


class EchoApp:
    """All listeners of one app, inside a running event loop."""

    def __init__(self, config: EchoConfig) -> None:
        self._config = config
        self._stops: list[Listener] = []
        self._log: EventLog | None = None
        self._pem = b""

    async def start(self) -> list[Bound]:
        """Listens on every port and address of the configuration.

        Returns:
            where, in the order of the ports, then of the addresses.

        Raises:
            InputError: an address is in use or not ours, or a file cannot be used; nothing listens then.
        """
        self._log = EventLog(self._config.log)
        bound = []
        try:
            for port in self._config.ports:
                try:
                    bound += [Bound(port, where) for where in await self._listen(port, self._log)]
                except OSError as e:
                    raise InputError(
                        "cannot listen", f"{port.protocol} port {port.port} of {self._config.pod}", _why(e)
                    ) from e
        except BaseException:
            await self.stop()
            raise
        return bound

    async def stop(self) -> None:
        """Stops listening and ends open connections; twice is fine."""
        while self._stops:
            await self._stops.pop().stop()
        if self._log is not None:
            self._log.close()

    async def _listen(self, port: EchoPort, log: EventLog) -> list[Endpoint]:
        config = self._config
        if port.protocol == "grpc":
            from lab.apps.rpc import RPCListener  # gRPC is loaded only where it is spoken

            rpc = RPCListener(config, port, log)
            where = await rpc.start(config.addresses)
            self._stops.append(rpc)
            return where
        result = []
        for address in config.addresses:
            listener: StreamListener | DatagramListener
            if port.protocol == "udp":
                listener = DatagramListener(config, port, log)
            else:
                context = None
                if port.protocol in ("https", "tls"):
                    context = server_context(
                        config, self._certificate(), ["http/1.1"] if port.protocol == "https" else []
                    )
                listener = StreamListener(config, port, log, _speaker(config, port, log), context)
            result.append(listener.start(address))
            self._stops.append(listener)
        return result

    def _certificate(self) -> bytes:
        if not self._pem and not self._config.certificate:
            self._pem = self_signed(self._config.hosts)
        return self._pem


def _speaker(config: EchoConfig, port: EchoPort, log: EventLog) -> ProtocolFactory:
    def tcp() -> asyncio.Protocol:
        return Echo(config, log, port.protocol)

    if port.protocol in ("tcp", "tls"):
        return tcp
    from lab.apps.web import HTTPEcho  # h11 is loaded only where HTTP is spoken

    http = HTTPEcho(config, log, port.protocol)
    if port.protocol == "auto":
        return lambda: Detect(http, tcp)
    return http


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "address in use"
    return error.strerror or str(error)


async def serve(config: EchoConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        InputError: see ``EchoApp.start``.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    app = EchoApp(config)
    await app.start()
    try:
        notify.ready()
        await ended.wait()
    finally:
        await app.stop()


def run(config: EchoConfig) -> int:
    """Serves until SIGTERM; the exit code: 0, or 2 with one line on stderr if it could not start."""
    try:
        asyncio.run(serve(config))
    except InputError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)  # noqa: T201
        return e.exit_code
    return 0


def main(params: Mapping[str, object]) -> int:
    """The entry of a pod: parameters are plain data, see ``lab.apps.ports.from_params``."""
    try:
        config = from_params(params)
    except InputError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)  # noqa: T201
        return e.exit_code
    return run(config)


def command_line(argv: Sequence[str] | None = None) -> int:
    """The program ``python -m lab.apps.echo``; defaults come from ``ECHO_NAME``, ``ECHO_PORTS`` (comma list) and ``ECHO_LOG``."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.apps.echo", description="Answers each flow by what it saw of it."
    )
    parser.add_argument(
        "--port", action="append", metavar="PORT[:PROTOCOL[:NAME]]", help=f"protocols: {', '.join(PROTOCOLS)}"
    )
    parser.add_argument("--name", default=os.environ.get("ECHO_NAME") or os.uname().nodename, help="POD.NAMESPACE")
    parser.add_argument("--address", action="append", metavar="IP", help="0.0.0.0 by default")
    parser.add_argument("--host", action="append", metavar="NAME", help="a name for the certificate")
    parser.add_argument("--log", default=os.environ.get("ECHO_LOG", "-"), metavar="FILE", help="event log, - is stdout")
    parser.add_argument("--certificate", default="", metavar="FILE")
    parser.add_argument("--key", default="", metavar="FILE")
    parser.add_argument("--client-ca", default="", metavar="FILE")
    args = parser.parse_args(argv)
    ports = args.port or [p for p in os.environ.get("ECHO_PORTS", "").split(",") if p]
    try:
        if not ports:
            raise InputError("nothing to serve", "", "", "Give --port or ECHO_PORTS")
        config = EchoConfig(
            ports=tuple(parse_port(p) for p in ports),
            pod=args.name,
            app=args.name.partition(".")[0],
            addresses=addresses(args.address or ["0.0.0.0"]),
            hosts=tuple(args.host or [args.name]),
            log=args.log,
            certificate=args.certificate,
            key=args.key,
            client_ca=args.client_ca,
        )
    except InputError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)  # noqa: T201
        return e.exit_code
    return run(config)


if __name__ == "__main__":
    sys.exit(command_line())
