"""The engine and its client against a real vLLM on the CPU: what only a model's server can show.

The model is a tiny Qwen3 with random weights, so any sense in an answer comes from the server's constraints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_raylm.exceptions import TerminalEndpointError
from airflow_provider_raylm.ray_data.client import EndpointClient
from airflow_provider_raylm.ray_data.contracts import Limiter
from airflow_provider_raylm.ray_data.engine import Engine
from airflow_provider_raylm.ray_data.limiter import LocalLimiter
from airflow_provider_raylm.ray_data.load import LoadReader
from airflow_provider_raylm.ray_data.requests import Query
from airflow_provider_raylm.ray_data.signals import Load
from demo.model import TINY_QWEN3_ID, cpu_dtype, tiny_qwen3
from demo.ray_head import free_ports
from tests.support.fixed_limiter import FixedLimiter

pytestmark = pytest.mark.integration

Ask = Callable[..., Awaitable[list[dict[str, Any]]]]

CONTEXT_TOKENS = 512
SEQUENCES = 8
GREEDY = {"temperature": 0, "max_tokens": 16}
THINK_TOKENS = 6
"""`<think>`, two line ends, `</think>`, two line ends: what the template adds when thinking is off."""
REVIEW = {
    "type": "object",
    "properties": {
        "sentiment": {"type": "string", "enum": ["good", "bad"]},
        "score": {"type": "integer", "enum": [1, 2, 3]},
        "sure": {"type": "boolean"},
    },
    "required": ["sentiment", "score", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `vllm serve` of its own on loopback."""
    port = free_ports(1)[0]
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(tiny_qwen3()), "--served-model-name", TINY_QWEN3_ID),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(SEQUENCES)),
        *("--dtype", cpu_dtype(), "--reasoning-parser", "qwen3"),
        *("--structured-outputs-config", json.dumps({"disable_any_whitespace": True, "backend": "xgrammar"})),
    ]
    env = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",  # the first answer would wait for a compiler
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # its engine, should it be left
        server.wait()


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 300
    while True:
        with contextlib.suppress(OSError), opener.open(url, timeout=5):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.3)


@contextlib.asynccontextmanager
async def asker(base_url: str, limiter: Limiter | None = None, **arguments: Any) -> AsyncIterator[Ask]:
    """An engine, as a function from prompts to output structs."""
    defaults = {"model": TINY_QWEN3_ID, "base_url": base_url, "prompt_col": "text", "options": GREEDY}
    query = Query(**{**defaults, **arguments})
    engine = Engine(query, EndpointClient(query, connections=256), limiter or FixedLimiter(32))
    try:
        yield lambda *prompts: engine.answer(len(prompts), lambda i: query.body({"text": prompts[i]}))
    finally:
        await engine.close()


async def ask(base_url: str, *prompts: str, limiter: Limiter | None = None, **arguments: Any) -> list[dict[str, Any]]:
    """The output structs of these prompts."""
    async with asker(base_url, limiter, **arguments) as answer:
        return await answer(*prompts)


async def test_replies_are_held_to_the_schema(base_url: str) -> None:
    """A model that knows no JSON answers in the schema's only possible words, and they arrive as typed values."""
    options = {"temperature": 1, "seed": 1, "max_tokens": 96, "enable_thinking": False}
    prompts = [f"review {i}" for i in range(8)]
    replies = await ask(base_url, *prompts, options=options, response_format=REVIEW)
    assert [r["error"] for r in replies] == [None] * 8
    for reply in replies:
        assert reply["parsed"]["sentiment"] in ("good", "bad")
        assert reply["parsed"]["score"] in (1, 2, 3)
        assert isinstance(reply["parsed"]["sure"], bool)
    free = await ask(base_url, prompts[0], options=options)
    with pytest.raises(json.JSONDecodeError):
        json.loads(free[0]["content"])


async def test_a_schema_reply_that_is_cut_off_keeps_its_text(base_url: str) -> None:
    """Not enough tokens for the object: an error row that says so, with what there is."""
    options = {**GREEDY, "max_tokens": 8, "enable_thinking": False}
    (reply,) = await ask(base_url, "review", options=options, response_format=REVIEW)
    assert (reply["status"], reply["finish_reason"]) == ("error", "length")
    assert reply["error"]["type"] == "schema_mismatch"
    assert "cut off at max_tokens" in reply["error"]["message"]
    assert reply["content"] == '{"sentiment":"good","score":1'[: len(reply["content"])]
    assert reply["content"]


async def test_a_prompt_beyond_the_context_is_an_error_row(base_url: str) -> None:
    """Neither retried nor repeated in the message; its neighbours are answered."""
    long = "far too long " * CONTEXT_TOKENS
    before, failed, after = await ask(base_url, "short", long, "short")
    assert (before["status"], after["status"]) == ("ok", "ok")
    assert (failed["status"], failed["attempts"]) == ("error", 1)
    assert (failed["error"]["type"], failed["error"]["http_status"]) == ("bad_request", 400)
    assert str(CONTEXT_TOKENS) in failed["error"]["message"]
    assert "far too long far" not in failed["error"]["message"]


async def test_thinking_is_switched_in_the_template(base_url: str) -> None:
    """Off, the template closes the thought beforehand and all text is the answer; on, it is the thought."""
    (on,) = await ask(base_url, "think", options={**GREEDY, "enable_thinking": True})
    (off,) = await ask(base_url, "think", options={**GREEDY, "enable_thinking": False})
    nested = {"chat_template_kwargs": {"enable_thinking": False}}
    (off_too,) = await ask(base_url, "think", options={**GREEDY, "extra_body": nested})
    assert off["prompt_tokens"] - on["prompt_tokens"] == THINK_TOKENS
    assert (on["content"], bool(on["reasoning_content"])) == (None, True)
    assert (bool(off["content"]), off["reasoning_content"]) == (True, None)
    assert off_too["content"] == off["content"]


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_streamed_reply_is_the_same_reply(base_url: str, thinking: bool) -> None:
    """Text, thought, logprobs, counts and finish reason, put together from the pieces."""
    options = {**GREEDY, "enable_thinking": thinking, "logprobs": True, "top_logprobs": 2}
    probing = FixedLimiter(1, stream=True)
    (plain,) = await ask(base_url, "same", options=options, limiter=FixedLimiter(1))
    (streamed,) = await ask(base_url, "same", options=options, limiter=probing)
    kept = ("content", "reasoning_content", "finish_reason", "prompt_tokens", "completion_tokens", "status")
    assert {k: streamed[k] for k in kept} == {k: plain[k] for k in kept}
    tokens, again = (json.loads(reply["logprobs"])["content"] for reply in (plain, streamed))
    assert len(tokens) == plain["completion_tokens"] == 16
    assert [t["token"] for t in again] == [t["token"] for t in tokens]
    assert all(len(t["top_logprobs"]) == 2 and t["logprob"] < 0 for t in tokens)
    ttft_s = probing.samples[0].ttft_s
    assert ttft_s is not None
    assert 0 < ttft_s < streamed["latency_s"]


async def test_an_unknown_model_ends_the_job(base_url: str) -> None:
    """One sentence that names it."""
    with pytest.raises(TerminalEndpointError, match="the endpoint has no model 'nobody'") as caught:
        await ask(base_url, "hi", model="nobody")
    assert caught.value.http_status == 404


async def test_flow_control_reads_the_servers_queue(base_url: str) -> None:
    """`/metrics` as vLLM writes it: eight run, the rest waits, and the waiting share comes from there."""
    limiter = LocalLimiter(base_url=base_url, model=TINY_QWEN3_ID, first_limit=64)
    options = {**GREEDY, "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    reader = LoadReader(base_url, TINY_QWEN3_ID, "")
    loads: list[Load | None] = []
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(reader.close)
        answer = await stack.enter_async_context(asker(base_url, limiter, options=options))
        for _ in range(40):
            asked = asyncio.create_task(answer(*(f"row {i}" for i in range(64))))
            while not asked.done():
                loads.append(await reader.read())
                await asyncio.sleep(0.05)
            shares = [row["waiting_share"] for row in limiter.trace if row["signal"] == "metrics"]
            if max(shares, default=0) > 0.3:
                break
        idle: Load | None = None
        for _ in range(100):  # a busy machine may not answer at once
            if (idle := await reader.read()) == Load(waiting=0, running=0):
                break
            await asyncio.sleep(0.1)
    assert max(shares, default=0) > 0.3, [(row["signal"], row["waiting_share"]) for row in limiter.trace]
    assert any(load is not None and load.running == SEQUENCES and load.waiting > SEQUENCES for load in loads), loads
    assert idle == Load(waiting=0, running=0)
