"""What the events of a stream say; the client itself is tested with the engine, against a server."""

from __future__ import annotations

import asyncio
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from airflow_provider_raylm.ray_data import client as client_module
from airflow_provider_raylm.ray_data.client import EndpointClient, has_token
from airflow_provider_raylm.ray_data.errors import Fault
from airflow_provider_raylm.ray_data.requests import Query, Secret
from airflow_provider_raylm.ray_data.rows import Reply
from tests.support.certificates import Certificate, certificate


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant", "content": None}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"content": "", "reasoning_content": "hm"}}, True),
        ({"delta": {"reasoning": "hm"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, True),
        ({"text": ""}, False),
        ({"text": "a"}, True),
    ],
)
def test_a_stream_has_begun_with_its_first_token(choice: dict[str, Any], expected: bool) -> None:
    """An event that only opens the stream is not the first token: a queue would stay unseen."""
    assert has_token({"choices": [choice]}) is expected
    assert has_token({"choices": [], "usage": {"prompt_tokens": 1}}) is False


def test_speaks_the_http_library_of_the_sdk_not_whichever_is_installed() -> None:
    """Version 2 of the SDK takes httpx, version 3 httpx2; an image may hold both."""
    assert client_module.httpx.Timeout.__module__.split(".")[0] == type(openai.DEFAULT_TIMEOUT).__module__.split(".")[0]


class Answers(http.server.BaseHTTPRequestHandler):
    """The same answer to every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"choices": [{"message": {"content": "y"}, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[str, Certificate]]:
    """Base URL of an HTTPS server with a certificate of a private authority, and that certificate."""
    made = certificate(tmp_path / "made", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certfile, made.keyfile)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"https://127.0.0.1:{server.server_port}/v1", made
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("trusted", [True, False])
def test_a_private_authority_is_trusted_by_its_file_and_an_unknown_one_ends_the_job(
    https: tuple[str, Certificate], monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """SSL_CERT_FILE is heard as by the deploy; without it every row would get the same error."""
    base_url, made = https
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", made.authority)

    async def ask() -> Reply:
        query = Query(model="m", base_url=base_url, api_key=Secret("k"), prompt_col="text")
        client = EndpointClient(query, connections=4)
        try:
            return (await client.complete(query.body({"text": "hello"}), limit_s=lambda: 10))[0]
        finally:
            await client.close()

    if trusted:
        assert asyncio.run(ask())["content"] == "y"
        return
    with pytest.raises(Fault, match=r"certificate is not trusted.*SSL_CERT_FILE") as caught:
        asyncio.run(ask())
    assert caught.value.kind == "fatal"
