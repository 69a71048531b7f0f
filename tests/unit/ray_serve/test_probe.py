"""The readiness request, against a small real server."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_raylm.exceptions import TerminalEndpointError, TransientEndpointError
from airflow_provider_raylm.ray_serve.probe import ask, check_trust, error_words, list_models, mounted_at
from tests.support.certificates import Certificate, certificate

CUT_OFF = {"choices": ["the rest is missing"]}
CHOICE = {"choices": [{"message": {"content": "y"}}]}


class Server(ThreadingHTTPServer):
    """Answers each path with the status and body it is told to."""

    replies: dict[str, tuple[int, Any]]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        status, body = self.server.replies.get(self.path, (404, {"detail": "Not Found"}))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(status)
        if body is CUT_OFF:
            self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


@pytest.mark.parametrize(
    ("replies", "path"),
    [
        ({"/v1/chat/completions": (200, CHOICE)}, "chat/completions"),
        ({"/v1/chat/completions": (400, {}), "/v1/completions": (200, CHOICE)}, "completions"),
        ({"/v1/embeddings": (200, {"data": [{"embedding": [0.0]}]})}, "embeddings"),
    ],
)
def test_each_kind_of_model_is_asked_what_it_can_do(server: Server, replies: Any, path: str) -> None:
    """Chat first; a model without a chat template completes; an embedding model embeds."""
    server.replies = replies
    assert ask(url(server), "m", timeout_s=5) == path


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_server_that_is_not_ready_is_asked_again(server: Server, status: int) -> None:
    """Errors of the server are no verdict about the model."""
    server.replies = {"/v1/chat/completions": (status, {"error": {"message": "busy"}})}
    with pytest.raises(TransientEndpointError, match="busy"):
        ask(url(server), "m", timeout_s=5)


def test_a_refusal_of_everything_carries_the_words_about_chat(server: Server) -> None:
    """When nothing works, the reason is the one a user of the chat endpoint would see."""
    server.replies = {"/v1/chat/completions": (400, {"error": {"message": "Token id 9 is out of vocabulary"}})}
    with pytest.raises(TerminalEndpointError, match="Token id 9") as caught:
        ask(url(server), "m", timeout_s=5)
    assert caught.value.http_status == 400


def test_nobody_there_is_not_ready() -> None:
    """A refused connection is a start that is not done yet."""
    with pytest.raises(TransientEndpointError):
        ask("http://127.0.0.1:9/v1", "m", timeout_s=1)


def test_a_reply_that_is_cut_off_is_not_ready(server: Server) -> None:
    """A proxy that dies in the middle of the first answer proves nothing."""
    server.replies = {"/v1/chat/completions": (200, CUT_OFF)}
    with pytest.raises(TransientEndpointError, match="did not answer"):
        ask(url(server), "m", timeout_s=5)


def test_an_empty_answer_is_not_ready(server: Server) -> None:
    """200 alone proves nothing."""
    server.replies = {"/v1/chat/completions": (200, {"choices": []})}
    with pytest.raises(TransientEndpointError, match="without a completion"):
        ask(url(server), "m", timeout_s=5)


def test_models_are_listed(server: Server) -> None:
    """An application of the user's own says itself what it serves."""
    server.replies = {"/v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]})}
    assert list_models(url(server), timeout_s=5) == ("a", "b")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no\\nroom"}}', "no room"),
        (b'{"error": {"message": "\\u001b[36mray\\u001b[39m died"}}', "ray died"),
        (b'{"detail": "x"}', "{'detail': 'x'}"),
        (b"<html>", "<html>"),
    ],
)
def test_error_words_are_one_short_line(body: bytes, words: str) -> None:
    """Whatever the body is, the message stays readable."""
    assert error_words(body) == words


@pytest.mark.parametrize(
    ("answers_at", "root_path", "mounted"),
    [("/root/-/healthz", "/root/", "/root"), ("/-/healthz", "/root", ""), ("/-/healthz", "", "")],
)
def test_root_path_is_part_of_the_url_where_the_proxy_takes_it(
    server: Server, answers_at: str, root_path: str, mounted: str
) -> None:
    """Serve versions differ in who strips the root path, so the proxy is asked."""
    server.replies = {answers_at: (200, "success")}
    assert mounted_at(url(server).removesuffix("/v1"), root_path, timeout_s=5) == mounted


@pytest.fixture
def https(server: Server, tmp_path: Path) -> Certificate:
    """The server's certificate, of a private authority; the server speaks TLS from now on."""
    made = certificate(tmp_path / "server", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certfile, made.keyfile)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return made


def test_a_private_authority_is_trusted_by_its_file(
    server: Server, https: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSL_CERT_FILE names the authority for every request of readiness."""
    monkeypatch.setenv("SSL_CERT_FILE", https.authority)
    server.replies = {"/v1/chat/completions": (200, CHOICE), "/v1/models": (200, {"data": [{"id": "a"}]})}
    base_url = url(server).replace("http:", "https:")
    check_trust(base_url, timeout_s=5)
    assert ask(base_url, "m", timeout_s=5) == "chat/completions"
    assert list_models(base_url, timeout_s=5) == ("a",)


@pytest.mark.parametrize(
    ("trusted", "host", "words"), [(False, "127.0.0.1", "issuer"), (True, "localhost", "localhost")]
)
def test_a_certificate_that_is_not_trusted_is_final(
    server: Server, https: Certificate, monkeypatch: pytest.MonkeyPatch, trusted: bool, host: str, words: str
) -> None:
    """An unknown authority or another host's certificate is no start that is not done yet, and the way out is named."""
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", https.authority)
    base_url = f"https://{host}:{server.server_port}/v1"
    for request in (check_trust, list_models, lambda url, timeout_s: ask(url, "m", timeout_s=timeout_s)):
        with pytest.raises(TerminalEndpointError, match=f"(?s)not trusted here.*{words}.*SSL_CERT_FILE") as caught:
            request(base_url, timeout_s=5)
        assert caught.value.http_status is None


def test_trust_is_asked_of_https_only_and_of_those_who_answer(server: Server) -> None:
    """A server that is not up yet, or speaks plain HTTP, has no certificate to judge."""
    check_trust(url(server), timeout_s=5)
    check_trust(url(server).replace("http:", "https:"), timeout_s=5)
    check_trust("https://127.0.0.1:9/v1", timeout_s=1)
