"""What the events of a stream say; the client itself is tested with the engine, against a server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from airflow_provider_raylm.ray_data import client as client_module
from airflow_provider_raylm.ray_data.client import EndpointClient, has_token
from airflow_provider_raylm.ray_data.requests import Query, Secret
from airflow_provider_raylm.ray_data.rows import Reply
from tests.support.mock_endpoint import MockEndpoint


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


def test_asks_without_the_aiohttp_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM needs plain `openai`: a cluster's image may lack the extra, and its rows are asked all the same."""

    def missing(**_: Any) -> None:
        raise RuntimeError("To use the aiohttp client you must have installed the package with the `aiohttp` extra")

    monkeypatch.setattr(openai, "DefaultAioHttpClient", missing)

    async def ask(base_url: str) -> Reply:
        query = Query(model="m", base_url=base_url, api_key=Secret("k"), prompt_col="text")
        client = EndpointClient(query, connections=4)
        try:
            return (await client.complete(query.body({"text": "hello"}), timeout_s=10))[0]
        finally:
            await client.close()

    with MockEndpoint() as endpoint:
        assert asyncio.run(ask(endpoint.base_url))["finish_reason"] == "stop"
