"""What of TLS, tokens and addresses a service may be started with, and what clients show."""

from __future__ import annotations

import datetime
import re
from concurrent import futures
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Self

import grpc
import pytest
from served import legato
from typer.testing import CliRunner

from legato.cluster import security_rules
from legato.cluster.cli import connection
from legato.cluster.cli.app import build_app
from legato.cluster.client import AsyncClient, Client, ClientAccess, ClientTls
from legato.cluster.client_access import choose_access, is_loopback
from legato.cluster.config import RouterOptions, ServiceConfig
from legato.cluster.dev_certs import make_certs
from legato.cluster.security_rules import check_security, inner_access, own_access
from legato.protos.internal_access import ROUTER_NAME, InternalAccess
from legato.protos.tls_files import TlsFiles

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

TOKEN = "token-of-a-client-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder)
    (folder / "tokens").write_text(TOKEN)
    return folder


def files(folder: Path, name: str, *, ca: bool = True) -> TlsFiles:
    return TlsFiles(
        str(folder / f"{name}.pem"),
        str(folder / f"{name}.key"),
        str(folder / "ca.pem") if ca else None,
    )


def config(
    worker_tls: TlsFiles | None = None, *, plain: bool = False, **options: object
) -> ServiceConfig:
    return ServiceConfig(
        model="demo",
        router=RouterOptions(**options),  # type: ignore[arg-type]  # as the tests have them
        worker_tls=worker_tls,
        allow_plain_token=plain,
    )


def test_a_service_on_loopback_needs_nothing() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.9"):
        assert check_security(config(host=host)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "llm.example.com"])
def test_one_that_is_open_to_others_says_so(host: str, folder: Path) -> None:
    [note] = check_security(config(host=host))
    assert "no authentication" in note
    service, worker = files(folder, "service"), files(folder, "worker", ca=False)
    assert check_security(config(worker, host=host, tls=service)) == []
    tokens = str(folder / "tokens")
    assert (
        check_security(config(host=host, token_file=tokens, tls=replace(service, ca_file=None)))
        == []
    )
    # TLS alone keeps nobody out.
    assert len(check_security(config(host=host, tls=replace(service, ca_file=None)))) == 1


def test_tokens_come_over_tls_or_loopback_unless_told_otherwise(folder: Path) -> None:
    tokens = str(folder / "tokens")
    assert check_security(config(token_file=tokens)) == []
    with pytest.raises(ValueError, match=r"in plain, where others may read them.*--allow-plain"):
        check_security(config(host="0.0.0.0", token_file=tokens))
    assert check_security(config(host="0.0.0.0", token_file=tokens, plain=True)) == []


def test_with_a_ca_each_certificate_must_have_its_name(folder: Path) -> None:
    service, worker = files(folder, "service"), files(folder, "worker", ca=False)
    assert check_security(config(worker, tls=service)) == []
    with pytest.raises(ValueError, match=r"--tls-cert .*service.pem' has no DNS name worker"):
        check_security(config(tls=service))
    with pytest.raises(ValueError, match=r"--tls-cert .*client.pem'"):
        check_security(config(worker, tls=replace(files(folder, "client"))))
    with pytest.raises(
        ValueError, match=r"--worker-tls-cert .*service.pem' has no DNS name worker"
    ):
        check_security(config(replace(service, ca_file=None), tls=service))
    with pytest.raises(ValueError, match="--worker-tls-cert needs"):
        check_security(config(worker, tls=replace(service, ca_file=None)))
    with pytest.raises(ValueError, match="--worker-tls-cert needs"):
        check_security(config(worker))


def test_files_that_are_wrong_are_named(folder: Path, tmp_path: Path) -> None:
    service = files(folder, "service", ca=False)
    with pytest.raises(ValueError, match="TLS key '/nowhere': No such file"):
        check_security(config(tls=replace(service, key_file="/nowhere")))
    with pytest.raises(ValueError, match="do not fit each other"):
        check_security(config(tls=replace(service, key_file=str(folder / "worker.key"))))
    (tmp_path / "ca").write_text("no PEM")
    with pytest.raises(ValueError, match=r"TLS CA .* is no PEM"):
        check_security(config(tls=replace(service, ca_file=str(tmp_path / "ca"))))


class InAWeek(datetime.datetime):
    """A clock."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return super().now(tz) + datetime.timedelta(days=7)


def test_a_certificate_that_ends_soon_is_told_and_one_that_has_ended_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path, days=5)
    service = files(tmp_path, "service", ca=False)
    [note] = check_security(config(tls=service))
    assert "service.pem ends on " in note
    later = SimpleNamespace(datetime=InAWeek, timedelta=datetime.timedelta, UTC=datetime.UTC)
    monkeypatch.setattr(security_rules, "datetime", later)
    with pytest.raises(ValueError, match=r"service.pem' ended on 20"):
        check_security(config(tls=service))


def test_the_secret_is_new_each_time_and_never_shown(folder: Path) -> None:
    (routers, workers), (others, _) = inner_access(config()), inner_access(config())
    assert routers.secret == workers.secret
    assert routers.secret != others.secret
    assert len(routers.secret) == 64
    assert routers.secret not in repr(routers)
    service, worker = files(folder, "service"), files(folder, "worker", ca=False)
    routers, workers = inner_access(config(worker, tls=service))
    assert routers.tls == service
    assert workers.tls == files(folder, "worker")
    with pytest.raises(ValueError, match="needs a CA"):
        InternalAccess(worker)


def test_the_services_own_process_trusts_its_own_files(folder: Path) -> None:
    service = files(folder, "service")
    own = own_access(RouterOptions(tls=service, token_file=str(folder / "tokens")))
    assert own.token == TOKEN
    assert own.tls is not None
    assert own.tls.server_name == ROUTER_NAME
    alone = own_access(RouterOptions(tls=replace(service, ca_file=None)))
    assert alone.tls is not None
    assert alone.tls.ca_file == service.cert_file


# Clients.


@pytest.mark.parametrize(
    ("target", "is_own"),
    [("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True),
     ("10.0.0.1:1", False), ("localhost.example.com:1", False), ("[::]:1", False),
     ("0.0.0.0:1", False), ("127.0.0.1.nip.io:1", False)],
)  # fmt: skip
def test_what_is_this_machine(target: str, is_own: bool) -> None:
    assert is_loopback(target) is is_own


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_token_goes_to_no_other_machine_in_plain(client: type[Client]) -> None:
    with pytest.raises(ValueError, match=r"not sent to 10\.0\.0\.5:1 in plain"):
        client("127.0.0.1:1,10.0.0.5:1", token=TOKEN)
    with pytest.raises(ValueError, match="together"):
        client("10.0.0.5:1", token=TOKEN, access=ClientAccess(tls=ClientTls(cert_file="x")))
    client("127.0.0.1:1", token=TOKEN)
    client("10.0.0.5:1", token=TOKEN, access=ClientAccess(tls=ClientTls()))
    client("10.0.0.5:1", token=TOKEN, access=ClientAccess(allow_plain_token=True))
    with pytest.raises(ValueError, match="characters that no token has") as raised:
        client("127.0.0.1:1", token="two\nlines")
    assert "two" not in str(raised.value)


def test_a_token_is_not_shown() -> None:
    assert TOKEN not in repr(ClientAccess(token=TOKEN))


def test_what_a_client_was_not_told_the_environment_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "LEGATO_TOKEN_FILE": str(folder / "tokens"),
        "LEGATO_CLIENT_TLS_CA": "ca",
        "LEGATO_CLIENT_TLS": "0",
    }
    read = ClientAccess.from_environment(given)
    assert read == ClientAccess(TOKEN, ClientTls("ca"))
    assert ClientAccess.from_environment({}) == ClientAccess()
    assert ClientAccess.from_environment({"LEGATO_CLIENT_TLS": "1"}).tls == ClientTls()
    monkeypatch.setenv("LEGATO_TOKEN", TOKEN)
    assert choose_access(None, None, ["127.0.0.1:1"]).token == TOKEN
    assert choose_access(None, "other-token-of-a-client", ["127.0.0.1:1"]).token != TOKEN
    assert choose_access(ClientAccess(), None, ["127.0.0.1:1"]).token is None


# The command line.


@pytest.mark.parametrize("command", ["generate", "scale", "stop", "role", "status"])
def test_every_command_that_calls_a_service_takes_the_same_options(command: str) -> None:
    shown = CliRunner().invoke(build_app(), [command, "--help"], env={"COLUMNS": "200"}).output
    for option in ("--tls-ca", "--tls-cert", "--tls-key", "--token-file", "--allow-plain-token"):
        assert option in shown


def test_the_commands_options_go_before_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ClientAccess] = []

    def note(address: str) -> AbstractContextManager[object]:
        seen.append(connection.chosen_access())
        raise connection.ServiceError("far enough")

    monkeypatch.setattr("legato.cluster.cli.stop.connect", note)
    monkeypatch.setenv("LEGATO_CLIENT_TLS_CA", "ca-of-the-environment")
    monkeypatch.setenv("LEGATO_CLIENT_TLS_SERVER_NAME", "there")
    words = ["stop", "--tls-cert", "c", "--tls-key", "k", "--token-file", str(folder / "tokens")]
    CliRunner().invoke(build_app(), words)
    CliRunner().invoke(build_app(), ["stop", "--tls-ca", "ca-of-the-command"])
    CliRunner().invoke(build_app(), ["stop"])
    assert seen[0] == ClientAccess(TOKEN, ClientTls("ca-of-the-environment", "c", "k", "there"))
    assert seen[1].tls == ClientTls("ca-of-the-command", server_name="there")
    assert seen[2].token is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("client.key", None, None), "TLS CA '{0}' holds no certificate in PEM form, but a priva"),
        (("tokens", None, None), "TLS CA '{0}' holds no certificate in PEM form"),
        (("ca.pem", "client.pem", "worker.key"), "'{1}' and key '{2}' do not fit each other"),
        (("ca.pem", "client.key", "client.key"), "'{1}' holds no certificate in PEM form, but a p"),
        (("ca.pem", "client.pem", "client.pem"), "'{2}' holds no private key in PEM form, but a c"),
        (("ca.pem", "client.pem", None), "a client's TLS certificate and its key go together"),
        (("nowhere.pem", None, None), "TLS file '{0}': No such file or directory"),
    ],
)
def test_a_clients_files_are_checked_before_it_calls(
    folder: Path, given: tuple[str | None, ...], said: str
) -> None:
    paths = [None if name is None else str(folder / name) for name in given]
    with pytest.raises(ValueError, match=re.escape(said.format(*paths))):
        ClientAccess(tls=ClientTls(*paths)).channel("127.0.0.1:1", [])
    with pytest.raises(ValueError, match=re.escape(said.format(*paths))):
        ClientTls(*paths).ssl_context()


def test_a_command_tells_of_tls_in_one_line(folder: Path) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pair = tuple((folder / f"service.{end}").read_bytes() for end in ("key", "pem"))
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials([pair]),  # type: ignore[list-item]  # a tuple of two
    )
    server.start()
    try:
        unknown = legato("status", "--port", str(port), "--tls")
        wrong = {"LEGATO_CLIENT_TLS_CA": str(folder / "client.key")}
        no_ca = legato("status", "--port", str(port), env=wrong)
    finally:
        server.stop(0).wait(5)
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1), unknown.stderr
    assert "CERTIFICATE_VERIFY_FAILED" in unknown.stderr
    assert (no_ca.returncode, no_ca.stderr) == (
        2,
        f"legato: LEGATO_CLIENT_TLS_CA: TLS CA {str(folder / 'client.key')!r} holds no certificate "
        "in PEM form, but a private key\n",
    )


def test_certs_says_how_to_go_on(tmp_path: Path) -> None:
    made = CliRunner().invoke(
        build_app(), ["certs", str(tmp_path / "c"), "--host", "llm.example.com"]
    )
    assert made.exit_code == 0
    assert "legato serve --model demo --tls-ca" in made.output
    again = CliRunner().invoke(build_app(), ["certs", str(tmp_path / "c")])
    assert again.exit_code != 0
    assert "is there already: nothing was written" in str(again.exception)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--tls-cert", "a"], "--tls-key is missing where --tls-cert is given"),
        (["--tls-key", "a"], "--tls-cert is missing where --tls-key is given"),
        (["--tls-ca", "a"], "--tls-cert is missing where --tls-ca is given"),
        (["--worker-tls-cert", "a"], "--worker-tls-key is missing"),
    ],
)
def test_options_that_go_together_are_asked_for_together(words: list[str], missing: str) -> None:
    result = CliRunner().invoke(build_app(), ["serve", "--model", "demo", *words])
    assert missing in " ".join(result.output.split()) or missing in str(result.exception)
