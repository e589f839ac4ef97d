"""The commands of `python -m agent`."""

from __future__ import annotations

import http.server
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port

from agent import cli, flags, options, request, security, wait
from agent.errors import AgentError, UsageError
from agent.flags import Parsed
from agent.log import parse_levels
from agent.notify import notify

ROOT = Path(__file__).resolve().parents[3]


def agent(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, "-m", "agent", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_dry_run_is_one_json_document_and_starts_nothing(tmp_path: Path) -> None:
    env = {
        "POD_NAME": "reviews-1",
        "POD_NAMESPACE": "default",
        "INSTANCE_IP": "10.244.1.7",
        "ISTIO_META_CLUSTER_ID": "Kubernetes",
        "PROXY_CONFIG": "concurrency: 2",
    }
    done = agent("proxy", "sidecar", "--dry-run", "--proxyComponentLogLevel=misc:error", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"node", "proxy_config", "bootstrap", "envoy_args"}
    assert document["node"]["id"] == "sidecar~10.244.1.7~reviews-1.default~default.svc.cluster.local"
    assert document["node"]["metadata"] == document["bootstrap"]["node"]["metadata"]
    assert document["proxy_config"]["concurrency"] == 2
    assert document["envoy_args"][:2] == ["-c", "etc/istio/proxy/envoy-rev.json"]
    assert document["envoy_args"][-2:] == ["--concurrency", "2"]
    assert list(tmp_path.iterdir()) == []


def test_files_are_read_relative_to_the_working_directory(tmp_path: Path) -> None:
    pod, mesh = tmp_path / "etc/istio/pod", tmp_path / "etc/istio/config"
    pod.mkdir(parents=True)
    mesh.mkdir(parents=True)
    (pod / "labels").write_text('app="reviews"\npod-template-hash="x"\n')
    (pod / "annotations").write_text('proxy.istio.io/config="proxyMetadata: {C: \\"3\\"}\\n"\n')
    (mesh / "mesh").write_text("defaultConfig:\n  proxyMetadata: {A: '1'}\n  discoveryAddress: d.example:15012\n")
    done = agent("proxy", "--dry-run", "--domain", "x.y", cwd=tmp_path, env={"POD_NAMESPACE": "default"})
    document = json.loads(done.stdout)
    assert document["proxy_config"]["proxyMetadata"] == {"A": "1", "C": "3"}
    assert document["node"]["metadata"]["LABELS"] == {"app": "reviews"}
    assert document["node"]["metadata"]["PILOT_SAN"] == ["d.example"]
    assert document["bootstrap"]["node"]["cluster"] == "reviews.default"
    assert document["node"]["id"].endswith("~x.y")


@pytest.fixture
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["proxy", "gateway"], {}, "Error: invalid proxy Type: gateway"),
        (["proxy", "--concurrency=x"], {}, 'Error: invalid argument "x" for "--concurrency" flag'),
        (["proxy"], {"PROXY_CONFIG": "statusPort: 0"}, "Error: failed to get proxy config: invalid status port"),
        (["proxy"], {"PROXY_CONFIG": "{"}, "Error: failed to unmarshal mesh config from environment"),
        (["proxy", "--log_output_level=default:loud"], {}, 'Error: invalid output level "default:loud"'),
        (["nonsense"], {}, 'Error: unknown command "nonsense"'),
        (["request", "GET"], {}, "Error: request needs METHOD PATH [BODY]"),
        (["request", "--debug-port=80", "GET", "/"], {}, "Error: debug port 80 is not allowed"),
        (["version", "-o", "xml"], {}, "Error: --output must be"),
    ],
)
@pytest.mark.usefixtures("logging_restored")
def test_errors_are_one_line_and_status_255(
    arguments: list[str], env: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments, env) == 255
    stderr = capsys.readouterr().err
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(("policy", "told"), [("first-party-jwt", True), ("third-party-jwt", False), ("", False)])
def test_an_old_token_policy_is_read_as_the_new_one(policy: str, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    env = {"JWT_POLICY": policy, "CA_ADDR": "ca:15010"}
    resolved = options.resolve(flags.parse([], options.PROXY_FLAGS, ignore_unknown=True), env)
    security.resolve(resolved, serve_only_files=False)
    assert ("Using deprecated JWT policy 'first-party-jwt'; treating as 'third-party-jwt'" in caplog.text) is told


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"CA_PROVIDER": "Nobody"}, "CA provider 'Nobody' not registered"),
        ({"CA_ADDR": "meshca.googleapis.com:443"}, "CA provider 'GoogleCA' not registered"),
        ({"CREDENTIAL_FETCHER_TYPE": "Mock"}, "failed to create credential fetcher"),
        ({"FILE_MOUNTED_CERTS": "true", "PROV_CERT": "/x"}, "PROV_CERT and FILE_MOUNTED_CERTS are mutually exclusive"),
        ({"ECC_SIGNATURE_ALGORITHM": "DSA"}, "invalid ECC_SIGNATURE_ALGORITHM"),
        ({"WORKLOAD_RSA_KEY_SIZE": "1024", "CA_ADDR": "c:15010"}, "requested key size 1024"),
        ({"CA_ADDR": "garbage"}, 'invalid CA address: unable to split "garbage"'),
        ({}, "root CA file for CA does not exist: ./var/run/secrets/istio/root-cert.pem"),
        ({"PILOT_CERT_PROVIDER": "none"}, "root CA file for CA required but configured provider as none"),
        ({"PILOT_CERT_PROVIDER": "custom"}, "root CA file for CA does not exist: ./etc/certs/root-cert.pem"),
    ],
)
def test_security_options_that_are_fatal(
    env: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = options.resolve(flags.parse([], options.PROXY_FLAGS, ignore_unknown=True), env)
    with pytest.raises(AgentError, match=re.escape(message)):
        security.resolve(resolved, serve_only_files=False)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PROXY_CONFIG": "discoveryAddress: d:15010"}, {"ca_address": "d:15010", "ca_root": "", "no_ca": False}),
        ({"PROXY_CONFIG": "controlPlaneAuthPolicy: NONE"}, {"ca_root": "", "prefetch": False}),
        ({"CA_ADDR": "ca:15010"}, {"ca_address": "ca:15010", "ca_root": ""}),
        (
            {"CA_ROOT_CA": "SYSTEM", "ISTIOD_SAN": "san"},
            {"ca_root": "SYSTEM", "ca_server_name": "san", "prefetch": True},
        ),
        ({"CA_ROOT_CA": "SYSTEM", "CA_ADDR": "ca:1", "ISTIOD_SAN": "san"}, {"ca_server_name": ""}),
        ({"FILE_MOUNTED_CERTS": "true"}, {"no_ca": True, "prefetch": False}),
        ({"CA_PROVIDER": "GkeWorkloadCertificate"}, {"no_ca": True}),
        ({"CA_ADDR": "c:15010", "SECRET_TTL": "20s", "OUTPUT_CERTS": "/o"}, {"ttl": 20.0, "output_directory": "/o"}),
        ({"CA_ADDR": "c:15010", "KUBERNETES_SERVICE_HOST": "k"}, {"output_mode": 0o644}),
        (
            {"CA_ADDR": "c:15010", "TRUST_DOMAIN": "td", "POD_NAMESPACE": "n", "SERVICE_ACCOUNT": "s"},
            {"identity": "spiffe://td/ns/n/sa/s"},
        ),
    ],
)
def test_security_options(
    env: dict[str, str], expected: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = options.resolve(flags.parse([], options.PROXY_FLAGS, ignore_unknown=True), env)
    found = security.resolve(resolved, serve_only_files=False)
    assert {key: getattr(found, key) for key in expected} == expected


def test_workload_credential_files_switch_to_file_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path("var/run/secrets/workload-spiffe-credentials")
    directory.mkdir(parents=True)
    for name in ("cert-chain.pem", "key.pem", "root-cert.pem"):
        (directory / name).write_text("x")
    resolved = options.resolve(flags.parse([], options.PROXY_FLAGS, ignore_unknown=True), {})
    found = security.resolve(resolved, serve_only_files=False)
    assert found.no_ca
    assert found.files.chain.endswith("workload-spiffe-credentials/cert-chain.pem")


@pytest.mark.parametrize(
    ("name", "listening", "dead", "outcome"),
    [
        ("socket", False, False, ("workload-spiffe-uds/socket", False)),
        ("socket", False, True, ("workload-spiffe-uds/socket", False)),
        ("socket", True, False, ("credential-uds/files-socket", True)),
        ("other", True, False, ("credential-uds/files-socket", True)),
        ("other", False, False, "no healthy socket was found"),
        ("a/b", False, False, "must be a file name, not a path"),
    ],
)
def test_the_workload_socket(
    name: str,
    listening: bool,
    dead: bool,
    outcome: tuple[str, bool] | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("var/run/secrets/workload-spiffe-uds") / name
    path.parent.mkdir(parents=True)
    server = socket.socket(socket.AF_UNIX)
    if listening or dead:
        server.bind(str(path))
    if listening:
        server.listen()
    env = {"WORKLOAD_IDENTITY_SOCKET_FILE": name}
    resolved = options.resolve(flags.parse([], options.PROXY_FLAGS, ignore_unknown=True), env)
    with server:
        if isinstance(outcome, str):
            with pytest.raises(AgentError, match=outcome):
                security.workload_socket(resolved)
        else:
            found = security.workload_socket(resolved)
            assert found.path.endswith(outcome[0])
            assert found.foreign is outcome[1]
            assert path.exists() is listening


def test_metadata_that_does_not_fit_ends_a_run_that_has_begun(tmp_path: Path) -> None:
    config = f"statusPort: {free_port()}\ncontrolPlaneAuthPolicy: NONE"
    env = {"ISTIO_META_DNS_CAPTURE": "maybe", "PROXY_CONFIG": config, "PROXY_XDS_DEBUG_VIA_AGENT": "false"}
    done = agent("proxy", cwd=tmp_path, env=env)
    assert done.returncode == 255
    assert done.stderr.startswith("Error: failed to decode node metadata DNS_CAPTURE='maybe'")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "etc/istio/proxy/XDS").exists()


def test_a_bootstrap_that_envoy_refuses_is_reported_and_the_status_is_0(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"static_resources": {"listeners": [{"name": "lost"}]}}')
    config = f"statusPort: {free_port()}\ncontrolPlaneAuthPolicy: NONE\ncustomConfigFile: bad.json"
    done = agent("proxy", cwd=tmp_path, env={"PROXY_CONFIG": config, "PROXY_XDS_DEBUG_VIA_AGENT": "false"})
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if "Envoy exited with error" in line]
    assert "exit status 1: " in line
    assert "lost" in line
    assert (tmp_path / "bad.json").exists()


TEMPLATE = """{
  "node": {"id": "a"},
  "admin": {"address": {"socket_address": {"address": "{{ .localhost }}", "port_value": 15000}}}
}
"""


@pytest.mark.parametrize("way", ["ISTIO_BOOTSTRAP", "--templateFile", "proxyBootstrapTemplatePath"])
def test_a_go_template_is_refused_in_one_line(tmp_path: Path, way: str) -> None:
    (tmp_path / "template.json").write_text(TEMPLATE)
    flags = ["--templateFile=template.json"] if way == "--templateFile" else []
    env = {"ISTIO_BOOTSTRAP": "template.json"} if way == "ISTIO_BOOTSTRAP" else {}
    if way == "proxyBootstrapTemplatePath":
        env["PROXY_CONFIG"] = "proxyBootstrapTemplatePath: template.json"
    done = agent("proxy", "--dry-run", *flags, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (255, "")
    assert done.stderr == (
        "Error: bootstrap template template.json, line 3: Go template actions are not rendered. Give a complete bootstrap"
        " (JSON or YAML; ISTIO_BOOTSTRAP, customConfigFile, proxyBootstrapTemplatePath), or change the generated one with"
        " ISTIO_BOOTSTRAP_OVERRIDE.\n"
    )


@pytest.mark.parametrize(
    ("source", "args"),
    [
        ({"ISTIO_BOOTSTRAP": "whole.json"}, ["-c", "whole.json"]),
        ({"PROXY_CONFIG": "proxyBootstrapTemplatePath: whole.json"}, ["-c", "whole.json"]),
        # what is no template goes to Envoy unseen
        ({"PROXY_CONFIG": "customConfigFile: template.json"}, ["-c", "template.json"]),
        ({"PROXY_CONFIG": "customConfigFile: template.json", "ISTIO_BOOTSTRAP": "whole.json"}, ["-c", "whole.json"]),
    ],
)
def test_a_complete_bootstrap_takes_the_place_of_the_generated_one(
    tmp_path: Path, source: dict[str, str], args: list[str]
) -> None:
    (tmp_path / "template.json").write_text(TEMPLATE)
    (tmp_path / "whole.json").write_text("{}")
    plan = json.loads(agent("proxy", "--dry-run", cwd=tmp_path, env=source).stdout)
    assert plan["bootstrap"] is None
    assert plan["envoy_args"][:2] == args


def test_a_template_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = agent("proxy", "--dry-run", cwd=tmp_path, env={"ISTIO_BOOTSTRAP": "lost.json"})
    assert done.returncode == 255
    assert done.stderr == "Error: failed to read the bootstrap template lost.json: No such file or directory\n"


def odd_file(path: Path, kind: str) -> None:
    """Something under a file's name that is none, or too much of one."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, (8 << 20) + 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("pipe", "not a regular file"), ("device", "not a regular file"), ("big", "larger than 8 MiB")],
)
def test_what_is_no_file_is_refused_in_one_line(kind: str, reason: str, tmp_path: Path) -> None:
    odd_file(tmp_path / "odd", kind)
    for what, given, env in (
        ("mesh config file", ["--meshConfig=odd"], {}),
        ("the bootstrap template", [], {"ISTIO_BOOTSTRAP": "odd"}),
    ):
        done = agent("proxy", "--dry-run", *given, cwd=tmp_path, env=env)
        assert (done.returncode, done.stdout) == (255, "")
        assert done.stderr == f"Error: failed to read {what} odd: {reason}\n"


@pytest.mark.parametrize("kind", ["pipe", "device", "big"])
def test_an_optional_file_that_is_none_is_left_out(kind: str, tmp_path: Path) -> None:
    (tmp_path / "etc/istio/pod").mkdir(parents=True)
    for name in ("etc/istio/pod/annotations", "etc/istio/pod/labels", "override"):
        odd_file(tmp_path / name, kind)
    done = agent("proxy", "--dry-run", cwd=tmp_path, env={"ISTIO_BOOTSTRAP_OVERRIDE": "override"})
    assert done.returncode == 0
    for told in (
        "failed to read pod annotations: ",
        "failed to read pod labels: ",
        "Failed to read bootstrap override: ",
    ):
        assert told in done.stdout + done.stderr


def test_version(tmp_path: Path) -> None:
    assert agent("version", "--short", cwd=tmp_path).stdout.strip() == "0.1.0"
    assert json.loads(agent("version", "-o", "json", cwd=tmp_path).stdout)["clientVersion"]["version"] == "0.1.0"
    assert agent("version", "-o", "yaml", cwd=tmp_path).stdout.startswith("clientVersion:\n  version: 0.1.0\n")


def test_help(tmp_path: Path) -> None:
    assert "istio-clean-iptables" in agent(cwd=tmp_path).stdout
    assert "--proxyLogLevel" in agent("proxy", "--help", cwd=tmp_path).stdout
    assert "istio-clean-iptables" in agent("help", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("command", "flag"), [("request", "--debug-port"), ("wait", "--timeoutSeconds"), ("version", "--short")]
)
@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_help_of_a_command(command: str, flag: str, asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, asked], {}) == 0
    assert flag in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["-o", "json"], ["-ojson"], ["-o=json"], ["--output=json"]])
def test_short_flags_of_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", *arguments], {}) == 0
    assert json.loads(capsys.readouterr().out)["clientVersion"]["version"] == "0.1.0"
    assert cli.main(["version", "-s"], {}) == 0
    assert capsys.readouterr().out == "0.1.0\n"


@pytest.mark.parametrize(
    ("command", "flags_of_init"), [("istio-iptables", []), ("istio-clean-iptables", ["--cleanup-only"])]
)
def test_the_iptables_commands_are_init(command: str, flags_of_init: list[str], tmp_path: Path) -> None:
    own = subprocess.run(
        [sys.executable, "-m", "init", *flags_of_init, "--dry-run"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    ours = agent(command, "--dry-run", cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (own.returncode, own.stdout)
    assert own.returncode == 0


@pytest.fixture
def admin() -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        failures = 2

        def do_GET(self) -> None:
            Handler.failures -= 1
            failing = self.path == "/flaky" and Handler.failures >= 0
            status = {"/missing": 404, "/broken": 500}.get(self.path, 503 if failing else 200)
            body = f"{self.command} {self.path}".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = b"POST " + self.rfile.read(length)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_request_prints_the_body_only(
    admin: int, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(request, "ALLOWED_PORTS", (admin,))
    port = f"--debug-port={admin}"
    assert request.request([port, "GET", "stats"]) == 0
    assert request.request([port, "GET", "/missing"]) == 0
    assert request.request([port, "POST", "/x", "body"]) == 0
    assert capfdbinary.readouterr().out == b"GET /statsGET /missingPOST body"
    # What is no ASCII goes as UTF-8, percent-encoded in the path; what is encoded already stays.
    assert request.request([port, "POST", "/x", "\u20ac\udcff"]) == 0
    assert request.request([port, "GET", "/\u00fc%20 ?a=%7Cb|c"]) == 0
    assert capfdbinary.readouterr().out == b"POST \xe2\x82\xac\xffGET /%C3%BC%20%20?a=%7Cb|c"
    with pytest.raises(AgentError, match="received unsuccessful status code 500"):
        request.request([port, "GET", "/broken"])


def test_wait_returns_when_ready(admin: int) -> None:
    url = f"--url=http://127.0.0.1:{admin}/flaky"
    assert wait.wait([url, "--periodMillis=10"]) == 0


def test_wait_gives_up(admin: int) -> None:
    with pytest.raises(
        AgentError, match=r"timeout waiting for Envoy proxy to become ready\. Last error: HTTP status code 500"
    ):
        wait.wait([f"--url=http://127.0.0.1:{admin}/broken", "--periodMillis=10", "--timeoutSeconds=0"])


def test_what_wait_is_told_by_something_that_is_no_http_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-nonsense\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(AgentError, match=r"Last error: SSH-2\.0-nonsense"):
            wait.wait([f"--url=http://127.0.0.1:{server.getsockname()[1]}/", "--timeoutSeconds=0"])
        thread.join()


def test_times_that_are_none(admin: int) -> None:
    url = f"--url=http://127.0.0.1:{admin}/flaky"
    assert wait.wait([url, "--periodMillis=-1", "--requestTimeoutMillis=0"]) == 0


def test_levels() -> None:
    assert parse_levels("default:info,dns:debug,error") == {"default": 40, "dns": 10}
    with pytest.raises(UsageError):
        parse_levels("dns:verbose")


def test_notify_speaks_to_a_datagram_socket(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        notify(str(path), "READY=1")
        assert sock.recv(100) == b"READY=1"
    notify("", "READY=1")


def test_a_log_line_is_one_line(tmp_path: Path) -> None:
    done = agent("proxy", "--log_as_json", "--concurrency=1", "x\ny", cwd=tmp_path)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"level", "time", "msg"} <= set(lines[0])
    assert isinstance(cli.COMMANDS, dict)
    assert isinstance(Parsed({}, []), Parsed)
