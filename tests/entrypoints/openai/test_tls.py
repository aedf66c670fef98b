# SPDX-License-Identifier: Apache-2.0
"""TLS: HTTPS on one and on several accepting paths, certificates of clients, renewal, and mistakes in the files."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.api_server import run_server
from quire.entrypoints.openai.tls import CertificateRenewal, checked_tls, tls_options
from quire.errors import ConfigError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import LiveServer, live_server


def write_pair(directory: Path, name: str) -> tuple[str, str]:
    """Write a self-signed certificate of localhost and its key; return both paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / f"{name}.crt", directory / f"{name}.key"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return str(cert_file), str(key_file)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Certificate and key of a server, and of a client."""
    directory = tmp_path_factory.mktemp("tls")
    return [write_pair(directory, name) for name in ("server", "client")]


def trusting(pair: tuple[str, str], own: tuple[str, str] | None = None) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=pair[0])
    if own is not None:
        context.load_cert_chain(*own)
    return httpx.AsyncClient(verify=context)


async def status(client: httpx.AsyncClient, server: LiveServer, path: str = "/livez") -> int:
    url = server.url.replace("http:", "https:")
    return (await client.get(url + path)).status_code


async def opened(server: LiveServer) -> None:
    await asyncio.wait_for(server.http.is_open.wait(), 30)


async def test_server_with_certificate_speaks_https_only(
    engine: FakeEngine, pairs: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = pairs[0]
    async with (
        live_server(engine, ssl_certfile=certificate, ssl_keyfile=key) as server,
        trusting(pairs[0]) as client,
    ):
        await opened(server)
        assert await status(client, server) == 200
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(server.url + "/livez")
        async with httpx.AsyncClient() as distrustful:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await status(distrustful, server)
        assert await status(client, server) == 200
        async with asyncio.timeout(300):
            while await status(client, server, "/health") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert "is ready at https://127.0.0.1:" in capsys.readouterr().out


async def test_clients_need_a_certificate_if_required(
    engine: FakeEngine, pairs: list[tuple[str, str]]
) -> None:
    server_pair, client_pair = pairs
    options = {"ssl_certfile": server_pair[0], "ssl_keyfile": server_pair[1]}
    async with live_server(engine, **options, ssl_ca_certs=client_pair[0], ssl_cert_reqs=2) as server:
        await opened(server)
        async with trusting(server_pair, own=client_pair) as known:
            assert await status(known, server) == 200
        async with trusting(server_pair) as unknown:
            with pytest.raises(httpx.HTTPError):
                await status(unknown, server)


async def test_connections_accepted_elsewhere_are_encrypted(
    engine: FakeEngine, pairs: list[tuple[str, str]]
) -> None:
    certificate, key = pairs[0]
    async with live_server(engine, ssl_certfile=certificate, ssl_keyfile=key) as server:
        await opened(server)
        for is_client_secure in (True, False, True):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                client = socket.create_connection(listener.getsockname())
                server.http.admit(listener.accept()[0])
            context = ssl.create_default_context(cafile=certificate) if is_client_secure else None
            name = "localhost" if is_client_secure else None
            reader, writer = await asyncio.open_connection(sock=client, ssl=context, server_hostname=name)
            writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.startswith(b"HTTP/1.1 200") is is_client_secure
            writer.close()


def test_renewed_pair_is_used_when_it_fits(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "live")
    config = checked_tls(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, enable_ssl_refresh=True))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    renewal = CertificateRenewal(config, context)
    assert not renewal.refresh()
    new_certificate, new_key = write_pair(tmp_path, "new")
    Path(certificate).write_bytes(Path(new_certificate).read_bytes())
    assert not renewal.refresh(), "the key is still the old one"
    Path(key).write_bytes(Path(new_key).read_bytes())
    assert renewal.refresh()
    assert not renewal.refresh()
    Path(key).unlink()
    assert not renewal.refresh(), "a file is missing"


async def test_refresh_serves_the_new_certificate(engine: FakeEngine, tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "live")
    options = {"ssl_certfile": certificate, "ssl_keyfile": key, "enable_ssl_refresh": True}
    async with live_server(engine, **options) as server:
        await opened(server)
        async with trusting((certificate, key)) as client:
            assert await status(client, server) == 200
        new = write_pair(tmp_path, "new")
        for old_file, new_file in zip((certificate, key), new, strict=True):
            shutil.copy(new_file, old_file)
        assert server.http.renewal is not None
        assert server.http.renewal.refresh()
        async with trusting(new) as client:
            assert await status(client, server) == 200


def test_plain_server_has_no_tls_options() -> None:
    config = ServerConfig()
    assert tls_options(config) == {}
    assert checked_tls(config) is config
    assert (config.scheme, ServerConfig(ssl_certfile="c").scheme) == ("http", "https")


def test_paths_become_absolute(pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = map(Path, pairs[0])
    monkeypatch.chdir(certificate.parent)
    config = checked_tls(ServerConfig(ssl_certfile=certificate.name, ssl_keyfile=key.name))
    assert (config.ssl_certfile, config.ssl_keyfile) == pairs[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ssl_certfile": "none.crt"}, r"--ssl-certfile none\.crt: No such file or directory"),
        ({"ssl_certfile": "server.crt"}, r"--ssl-certfile server\.crt: "),
        ({"ssl_certfile": "server.crt", "ssl_keyfile": "client.key"}, "KEY_VALUES_MISMATCH"),
        ({"ssl_certfile": "server.key", "ssl_keyfile": "server.key"}, "PEM"),
        (
            {"ssl_certfile": "server.crt", "ssl_keyfile": "server.key", "ssl_ciphers": "none-such"},
            "No cipher can be selected",
        ),
    ],
)
def test_unusable_files_end_the_start(
    given: dict[str, Any],
    message: str,
    pairs: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(Path(pairs[0][0]).parent)
    with pytest.raises(ConfigError, match=message):
        checked_tls(ServerConfig(**given))
    assert run_server(EngineConfig(), ServerConfig(**given)) == 2
    assert capsys.readouterr().err.startswith("error: --ssl-certfile")


@pytest.mark.parametrize(
    "given", [{"ssl_keyfile": "k"}, {"ssl_ca_certs": "c"}, {"enable_ssl_refresh": True}, {"ssl_cert_reqs": 2}]
)
def test_tls_options_need_a_certificate(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        checked_tls(ServerConfig(**given))


def test_certificates_of_clients_need_roots(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match="--ssl-cert-reqs needs --ssl-ca-certs"):
        checked_tls(ServerConfig(ssl_certfile=pairs[0][0], ssl_keyfile=pairs[0][1], ssl_cert_reqs=2))
