"""The engine and its client against a real HTTP server that behaves per row as told; back-off does not sleep."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest

from airflow_provider_raylm.exceptions import PartialFailureError, TerminalEndpointError, TransientEndpointError
from airflow_provider_raylm.ray_data import deadlines
from airflow_provider_raylm.ray_data import engine as engine_module
from airflow_provider_raylm.ray_data.client import EndpointClient
from airflow_provider_raylm.ray_data.engine import Engine
from airflow_provider_raylm.ray_data.errors import Fault
from airflow_provider_raylm.ray_data.limiter import LocalLimiter
from airflow_provider_raylm.ray_data.requests import InvalidInput, Query, Secret
from airflow_provider_raylm.ray_data.rows import reply_column
from tests.support.fixed_limiter import FixedLimiter
from tests.support.mock_endpoint import Answer, Ask, MockEndpoint, refusal

OK = {
    "content": "fine",
    "reasoning_content": None,
    "finish_reason": "stop",
    "tool_calls": None,
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "status": "ok",
    "error": None,
    "attempts": 1,
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[MockEndpoint]:
    with MockEndpoint() as server:
        yield server


class Bench:
    """An engine with everything around it, and what it did."""

    def __init__(self, endpoint: MockEndpoint, /, limit: int = 8, *, stream: bool = False, **arguments: Any) -> None:
        arguments.setdefault("base_url", endpoint.base_url)
        if not {"messages_col", "body_col"} & set(arguments):
            arguments.setdefault("prompt_col", "text")
        self.query = Query(model="m", **arguments)
        self.limiter = FixedLimiter(limit, stream=stream)
        self.sleeps: list[float] = []
        self.kept: list[tuple[int, dict[str, Any]]] = []
        self.client = EndpointClient(self.query, connections=limit + 1)
        self.engine = Engine(self.query, self.client, self.limiter, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        assert self.limiter.held < self.limiter.most_held or not self.limiter.held  # a slot is given back first
        await asyncio.sleep(0)

    async def ask(self, *values: Any, **kwargs: Any) -> list[dict[str, Any]]:
        column = self.query.columns[0]
        replies = await self.engine.answer(
            len(values),
            lambda i: self.query.body({column: values[i]}),
            on_reply=lambda i, reply: self.kept.append((i, reply)),
            **kwargs,
        )
        return [_comparable(reply) for reply in replies]

    @property
    def outcomes(self) -> list[str]:
        return [sample.outcome for sample in self.limiter.samples]


def _comparable(reply: dict[str, Any]) -> dict[str, Any]:
    latency_s = reply.pop("latency_s")
    assert latency_s is None or latency_s >= 0
    return reply


@contextlib.asynccontextmanager
async def bench(endpoint: MockEndpoint, script: Any, /, limit: int = 8, **arguments: Any) -> AsyncIterator[Bench]:
    endpoint.script = script
    endpoint.asks.clear()
    endpoint._attempts.clear()
    it = Bench(endpoint, limit, **arguments)
    try:
        yield it
    finally:
        await it.engine.close()
        assert it.limiter.held == 0
        assert it.limiter.closed


def row_error(kind: str, message: str, http_status: int | None, attempts: int) -> dict[str, Any]:
    error = {"type": kind, "message": message, "http_status": http_status}
    return {"status": "error", "error": error, "attempts": attempts}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "arguments", "expected"),
    [
        (Answer(content="fine"), {}, OK),
        (Answer(content="fine", finish_reason="length"), {}, {**OK, "finish_reason": "length"}),
        (Answer(content="你好 שלום 😀"), {}, {**OK, "content": "你好 שלום 😀"}),
        (Answer(content="cut \ud83d"), {}, {**OK, "content": "cut \ufffd"}),
        (Answer(content="fine", reasoning_content="hm"), {}, {**OK, "reasoning_content": "hm"}),
        (
            Answer(content=None, reasoning_content="the answer"),
            {"options": {"enable_thinking": False}},
            {**OK, "content": "the answer"},
        ),
        (
            Answer(content=None, reasoning_content="only thoughts", finish_reason="length"),
            {},
            {**OK, "content": None, "reasoning_content": "only thoughts", "finish_reason": "length"},
        ),
        (
            Answer(
                content=None,
                finish_reason="tool_calls",
                message={"tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
            ),
            {},
            {
                **OK,
                "content": None,
                "finish_reason": "tool_calls",
                "tool_calls": [{"id": "c1", "name": "f", "arguments": '{"a": 1}'}],
            },
        ),
        (Answer(content="fine"), {"endpoint": "completions"}, {**OK, "drop": ("reasoning_content", "tool_calls")}),
        (
            Answer(embedding=[0.5, 1, 2.5]),
            {"endpoint": "embeddings"},
            {
                "embedding": [0.5, 1, 2.5],
                **{k: OK[k] for k in ("prompt_tokens", "completion_tokens", "status", "error", "attempts")},
            },
        ),
        (
            Answer(content='{"label": "good"}'),
            {"response_format": "label STRING"},
            {**OK, "content": '{"label": "good"}', "parsed": {"label": "good"}},
        ),
        (
            Answer(content="good"),
            {"response_format": "label STRING"},
            {
                **OK,
                "content": "good",
                "status": "error",
                "error": {
                    "type": "schema_mismatch",
                    "message": "the reply is not JSON: Expecting value",
                    "http_status": 200,
                },
            },
        ),
        (
            Answer(content='{"label": "go', finish_reason="length"),
            {"response_format": "label STRING"},
            {
                **OK,
                "content": '{"label": "go',
                "finish_reason": "length",
                "status": "error",
                "error": {
                    "type": "schema_mismatch",
                    "message": "the reply is not JSON: Unterminated string starting at"
                    " (the reply was cut off at max_tokens)",
                    "http_status": 200,
                },
            },
        ),
    ],
)
async def test_an_answer_becomes_its_row_streamed_or_not(
    endpoint: MockEndpoint, answer: Answer, arguments: dict[str, Any], expected: dict[str, Any], stream: bool
) -> None:
    """Every shape of a good reply gives the same row, whether it was streamed to measure it or not."""
    expected = dict(expected)
    for name in expected.pop("drop", ()):
        del expected[name]
    async with bench(endpoint, lambda ask: answer, stream=stream, **arguments) as it:
        assert await it.ask("hello") == [expected]
        assert it.outcomes == ["success"]
        assert (it.limiter.samples[0].ttft_s is not None) == (stream and "embeddings" not in arguments.values())
        assert bool(endpoint.asks[0].body.get("stream")) == (stream and "embeddings" not in arguments.values())


@pytest.mark.parametrize(("tokens", "told"), [(6, 0), (8, 1), (30, 1)])
async def test_a_stream_is_heard_of_when_it_has_begun(endpoint: MockEndpoint, tokens: int, told: int) -> None:
    """With its eighth piece, once; a reply that is over before has said all there is."""
    async with bench(endpoint, lambda ask: Answer(content="word" * tokens), stream=True) as it:
        await it.ask("hello")
        assert len(it.limiter.beginnings) == told
        for begun in it.limiter.beginnings:
            assert begun.ttft_s == pytest.approx(it.limiter.samples[0].ttft_s)
            assert begun.step_s >= 0
            assert begun.sent_s == it.limiter.samples[0].sent_s


LONG = "a prompt that nobody should find in a message"


@pytest.mark.parametrize(
    ("answer", "expected", "outcome", "requests"),
    [
        (refusal(400, f"too long: {LONG}"), row_error("bad_request", "too long: …", 400, 1), "ignore", 1),
        (refusal(404, "no such image"), row_error("bad_request", "no such image", 404, 1), "ignore", 1),
        (refusal(413, "too large"), row_error("bad_request", "too large", 413, 1), "ignore", 1),
        (refusal(422, "bad field"), row_error("bad_request", "bad field", 422, 1), "ignore", 1),
        (refusal(500, "boom"), row_error("server_error", "boom", 500, 3), "unreachable", 3),
        (refusal(408, "slow"), row_error("server_error", "slow", 408, 3), "unreachable", 3),
        (Answer(raw=b"<html>"), row_error("invalid_reply", "the reply is not JSON", 200, 3), "ignore", 3),
        (Answer(raw=b"[]"), row_error("invalid_reply", "the reply is no JSON object", 200, 3), "ignore", 3),
        (Answer(raw=b"{}"), row_error("invalid_reply", "the reply has no choices", 200, 3), "ignore", 3),
        (
            Answer(raw=b'{"choices": [{}]}'),
            row_error("invalid_reply", "the reply's choice has no message", 200, 3),
            "ignore",
            3,
        ),
        (
            Answer(content=None, finish_reason=None),
            row_error("invalid_reply", "the reply's message is empty", 200, 3),
            "ignore",
            3,
        ),
        (
            Answer(drop=True),
            row_error("connection", "the connection failed: ServerDisconnectedError", None, 5),
            "unreachable",
            5,  # nobody else was answered meanwhile: three failures until the endpoint's health is looked at
        ),
        (refusal(502, "bad gateway"), row_error("connection", "bad gateway", 502, 5), "unreachable", 5),
    ],
)
async def test_each_failure_becomes_its_row(
    endpoint: MockEndpoint, answer: Answer, expected: dict[str, Any], outcome: str, requests: int
) -> None:
    """One bad row among good ones: its error, its attempts, and nothing else changes."""
    async with bench(
        endpoint, lambda ask: answer if ask.text == LONG else Answer(content="fine"), limit=1, max_attempts=3
    ) as it:
        assert await it.ask("a", LONG, "b", "c", "d") == [OK, expected, OK, OK, OK]
        assert sum(ask.text == LONG for ask in endpoint.asks) == requests
        assert [o for o in it.outcomes if o != "success"] == [outcome] * requests
        assert len(it.sleeps) == requests - 1
        assert (it.limiter.rows, it.limiter.errors) == (5, 1)
        assert [index for index, reply in it.kept if reply["status"] == "error"] == [1]


@pytest.mark.parametrize(
    "failure",
    [
        refusal(500),
        refusal(502),
        refusal(408),
        Answer(drop=True),
        Answer(raw=b"oops"),
        refusal(429),
        refusal(503, retry_after="300"),
    ],
)
async def test_a_passing_failure_is_retried_until_it_passes(endpoint: MockEndpoint, failure: Answer) -> None:
    """Two failures, then the answer: an ordinary row that says it took three requests."""
    async with bench(endpoint, lambda ask: failure if ask.attempt < 3 else Answer(content="fine")) as it:
        assert await it.ask("x") == [{**OK, "attempts": 3}]


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("300", 300.0), ("10000", 900.0), ("1e300", 900.0), ("Fri, 31 Dec 9999 23:59:59 GMT", 900.0), ("soon", None)],
)
async def test_retry_after_is_for_the_limiter_to_wait_out(
    endpoint: MockEndpoint, asked: str, seconds: float | None
) -> None:
    """In full above two minutes too, up to the stall limit; the row itself only backs off, without a slot."""
    script = lambda ask: refusal(429, retry_after=asked) if ask.attempt == 1 else Answer(content="fine")  # noqa: E731
    async with bench(endpoint, script) as it:
        assert await it.ask("x") == [{**OK, "attempts": 2}]
        assert len(it.sleeps) == 1
        assert it.sleeps[0] <= 30
        assert it.limiter.samples[0].retry_after_s == seconds
        assert it.outcomes == ["dropped", "success"]


async def test_no_retry_after_is_longer_than_the_stall_limit(endpoint: MockEndpoint) -> None:
    """With the real limiter: an endpoint that sends everybody away for hours is a stall."""
    endpoint.script = lambda ask: refusal(429, retry_after="10000")
    query = Query(model="m", base_url=endpoint.base_url, prompt_col="text", stall_timeout_s=0.2)
    limiter = LocalLimiter(base_url=query.base_url, model="m", stall_timeout_s=0.2, read_metrics=False)
    engine = Engine(query, EndpointClient(query, connections=4), limiter)
    with pytest.raises(TransientEndpointError, match="has answered no request"):
        await asyncio.wait_for(engine.answer(2, lambda i: query.body({"text": str(i)})), 20)
    await engine.close()


async def test_refusals_do_not_count_as_attempts(endpoint: MockEndpoint) -> None:
    """A row that is refused more often than `max_attempts` is answered all the same."""
    async with bench(
        endpoint, lambda ask: refusal(503) if ask.attempt < 20 else Answer(content="fine"), max_attempts=2
    ) as it:
        assert await it.ask("x") == [{**OK, "attempts": 20}]


async def test_an_endpoint_that_answers_nobody_costs_no_row(endpoint: MockEndpoint) -> None:
    """While everything fails and the endpoint cannot be reached, failures are not the rows'."""
    endpoint.models_status = 503
    try:
        async with bench(
            endpoint, lambda ask: refusal(502) if ask.attempt < 9 else Answer(content="fine"), max_attempts=2
        ) as it:
            assert await it.ask("x", "y") == [{**OK, "attempts": 9}] * 2
    finally:
        endpoint.models_status = 200


async def test_a_row_that_alone_breaks_a_healthy_endpoint_fails(endpoint: MockEndpoint) -> None:
    """With no other row to compare with, the endpoint is asked for its health."""
    async with bench(endpoint, lambda ask: Answer(drop=True), max_attempts=2, max_error_rate=1.0) as it:
        [reply] = await it.ask("x")
        assert reply["error"]["type"] == "connection"
        assert reply["attempts"] == 3  # the first was not counted, the endpoint is healthy from the second on


class TimingOut:
    """A client to which one row never gets an answer, while the others do."""

    def __init__(self) -> None:
        self.limits_s: list[float] = []

    async def complete(self, body: Any, *, limit_s: Callable[[], float], **_: Any) -> tuple[dict[str, Any], None]:
        await asyncio.sleep(0)
        if body["messages"][0]["content"] != "slow":
            return {"content": "fine", "completion_tokens": 2}, None
        self.limits_s.append(limit_s())
        for _ in range(50):
            await asyncio.sleep(0)
        raise Fault("timeout", "no reply in time")

    async def is_reachable(self) -> bool:
        return True

    async def close(self) -> None:
        pass


async def test_a_row_that_times_out_twice_is_quarantined() -> None:
    """It gets twice the time once, then it has failed; the others go on."""
    query = Query(model="m", base_url="http://h/v1", prompt_col="text", options={"max_tokens": 100})
    client, limiter = TimingOut(), FixedLimiter(2)
    engine = Engine(query, client, limiter, sleep=lambda s: asyncio.sleep(0))
    values = ["slow", *map(str, range(400))]
    replies = await engine.answer(len(values), lambda i: query.body({"text": values[i]}))
    assert _comparable(replies[0]) == row_error("timeout", "no reply in time", None, 2)
    assert {reply["status"] for reply in replies[1:]} == {"ok"}
    assert client.limits_s == [325.0, 120.0]  # nothing seen yet; then twice the least, since the others were quick
    await engine.close()


async def test_a_row_is_not_given_up_before_others_say_how_long_rows_take(
    endpoint: MockEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows go out together; a server that runs few at once answers the last of them late."""
    for name, seconds in {"_FIRST_S": 3.0, "_FIRST_PER_TOKEN_S": 0.0, "_LEAST_S": 3.0}.items():
        monkeypatch.setattr(deadlines, name, seconds)

    def script(ask: Ask) -> Answer:
        return Answer(content="y", delay_s=4.5 if ask.text == "late" else 1.5)

    async with bench(endpoint, script, limit=10) as it:
        replies = await it.ask("late", *["x"] * deadlines._ENOUGH_ROWS)
    assert [reply["attempts"] for reply in replies] == [1] * len(replies)


async def test_a_reply_that_does_not_come_is_given_up(endpoint: MockEndpoint) -> None:
    """The deadline is kept on the wire, with nobody else to compare with too."""
    script = lambda ask: Answer(delay_s=60)  # noqa: E731
    async with bench(endpoint, script, options={"timeout": 0.05}, max_attempts=2, max_error_rate=1.0) as it:
        assert await it.ask("x") == [row_error("timeout", "no reply within 0.05 s", None, 3)]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (refusal(401, "wrong key sk-abcdefghijklmnop"), "the endpoint refused the key: HTTP 401: wrong key ***"),
        (refusal(403, "not yours"), "the endpoint refused the key: HTTP 403: not yours"),
        (
            refusal(404, "The model `m` does not exist.", code="x"),
            "the endpoint has no model 'm': The model `m` does not exist.",
        ),
        (
            Answer(status=404, raw=b'{"detail":"Not Found"}'),
            "nothing answers the OpenAI API at this base_url (HTTP 404); it usually ends in /v1",
        ),
    ],
)
async def test_what_would_fail_every_row_fails_the_job_at_once(
    endpoint: MockEndpoint, answer: Answer, says: str
) -> None:
    """One sentence, no retry, and later calls fail with it too."""
    async with bench(endpoint, lambda ask: answer, limit=2) as it:
        with pytest.raises(TerminalEndpointError) as caught:
            await it.ask(*"abcdefgh")
        assert str(caught.value) == says
        assert len(endpoint.asks) <= 4
        with pytest.raises(TerminalEndpointError):
            await it.ask("later")


async def test_a_wrong_path_fails_the_job(endpoint: MockEndpoint) -> None:
    """The real server's answer to an unknown path."""
    async with bench(endpoint, lambda ask: Answer(), base_url=endpoint.base_url.replace("/v1", "/v2")) as it:
        with pytest.raises(TerminalEndpointError, match="nothing answers the OpenAI API at this base_url"):
            await it.ask("x")


async def test_an_endpoint_that_has_answered_and_is_gone_is_waited_for(endpoint: MockEndpoint) -> None:
    """During a redeployment the route answers 404; that is not a wrong URL any more."""

    def script(ask: Ask) -> Answer:
        gone = ask.text == "second" and ask.attempt < 4
        return Answer(status=404, raw=b"Path '/v1' not found") if gone else Answer(content="fine")

    async with bench(endpoint, script, limit=1) as it:
        assert await it.ask("first") == [OK]
        assert await it.ask("second") == [{**OK, "attempts": 4}]
        assert it.outcomes == ["success", *["unreachable"] * 3, "success"]


async def test_a_stall_ends_the_job_with_the_limiters_error(endpoint: MockEndpoint) -> None:
    """What the limiter raises reaches every caller."""
    async with bench(endpoint, lambda ask: Answer()) as it:

        async def stalled() -> bool:
            raise TransientEndpointError("stalled")

        it.limiter.acquire = stalled  # type: ignore[method-assign]
        with pytest.raises(TransientEndpointError, match="stalled"):
            await it.ask("x", "y")


async def test_nobody_there_is_waited_for_without_losing_rows() -> None:
    """Refused connections, then the server comes: all rows are answered."""
    with MockEndpoint(lambda ask: Answer(content="fine")) as endpoint:
        endpoint.stop()
        it = Bench(endpoint)
        asked = asyncio.create_task(it.ask("x", "y"))
        while not it.sleeps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        endpoint.start()
        assert [reply["content"] for reply in await asked] == ["fine", "fine"]
        assert set(it.outcomes) == {"unreachable", "success"}
        await it.engine.close()


async def test_a_stream_that_breaks_off_is_no_reply(endpoint: MockEndpoint) -> None:
    """Half a streamed answer is asked again, not kept."""
    script = lambda ask: Answer(content="fine and long", truncate=ask.attempt == 1)  # noqa: E731
    async with bench(endpoint, script, stream=True) as it:
        assert await it.ask("x") == [{**OK, "content": "fine and long", "attempts": 2}]


async def test_rows_that_cannot_be_asked_are_not_sent(endpoint: MockEndpoint) -> None:
    """Null and empty rows take no slot and no request; their neighbours are answered."""
    async with bench(endpoint, lambda ask: Answer(content="fine")) as it:
        assert await it.ask(None, "x", "") == [
            row_error("invalid_input", "column 'text' is null", None, 0),
            OK,
            row_error("invalid_input", "column 'text' is empty", None, 0),
        ]
        assert len(endpoint.asks) == len(it.limiter.samples) == 1
        assert (it.limiter.rows, it.limiter.errors) == (3, 2)
        assert [index for index, _ in it.kept] == [1]  # nothing was paid for the others


async def test_no_rows_is_no_work(endpoint: MockEndpoint) -> None:
    """An empty block returns at once."""
    async with bench(endpoint, lambda ask: Answer()) as it:
        assert await it.ask() == []


async def test_replies_line_up_with_their_rows_whatever_order_they_come_in(endpoint: MockEndpoint) -> None:
    """Rows that take different times, sent in another order than they stand in."""
    script = lambda ask: Answer(content=ask.text, delay_s=0.02 * (int(ask.text) % 5))  # noqa: E731
    async with bench(endpoint, script) as it:
        order = sorted(range(40), key=lambda i: -i)
        replies = await it.ask(*range(40), order=order)
        assert [reply["content"] for reply in replies] == [str(i) for i in range(40)]
        assert [ask.text for ask in endpoint.asks[:4]] == ["39", "38", "37", "36"]


async def test_one_slow_row_keeps_nobody_waiting(endpoint: MockEndpoint) -> None:
    """A call waits for its own rows only, and every slot that comes free is used at once."""
    release = asyncio.Event()

    def script(ask: Ask) -> Answer:
        return Answer(content="fine", delay_s=60 if ask.text == "slow" else 0)

    async with bench(endpoint, script, limit=2) as it:
        slow = asyncio.create_task(it.ask("slow", "a"))
        for number in range(10):
            assert await it.ask(f"b{number}", f"c{number}") == [OK, OK]
        assert not slow.done()
        assert it.limiter.most_held == 2
        release.set()
        slow.cancel()


async def test_rows_started_ahead_of_the_oldest_unfinished_are_bounded(endpoint: MockEndpoint) -> None:
    """A stuck row lets `window` rows start after it, not the whole dataset."""

    def script(ask: Ask) -> Answer:
        return Answer(content="fine", delay_s=60 if ask.text == "0" else 0)

    async with bench(endpoint, script, limit=4) as it:
        it.limiter._window = 10
        asked = asyncio.create_task(it.ask(*range(100)))
        while it.limiter.rows < 9:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert it.limiter.rows == 9
        assert len(endpoint.asks) == 10
        asked.cancel()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"on_error": "raise"}, "a row failed and on_error is 'raise': bad_request: no"),
        ({"max_errors": 2}, "3 rows failed, max_errors is 2; the last one: bad_request: no"),
        ({}, "the first 32 rows all failed; the last one: bad_request: no"),
    ],
)
async def test_a_policy_that_is_broken_for_sure_ends_the_job_early(
    endpoint: MockEndpoint, arguments: dict[str, Any], says: str
) -> None:
    """Not after a night of paying for it."""
    async with bench(endpoint, lambda ask: refusal(400), limit=1, **arguments) as it:
        with pytest.raises(PartialFailureError, match=says):
            await it.ask(*range(100))
        assert len(endpoint.asks) <= 33


@pytest.mark.parametrize("arguments", [{"max_error_rate": 1.0}, {"max_errors": 100}])
async def test_a_policy_that_allows_it_lets_every_row_fail(endpoint: MockEndpoint, arguments: dict[str, Any]) -> None:
    """Whoever asks for it gets a full table of errors."""
    async with bench(endpoint, lambda ask: refusal(400), **arguments) as it:
        assert [r["status"] for r in await it.ask(*range(40))] == ["error"] * 40


async def test_key_and_headers_are_sent_and_shown_nowhere_else(
    endpoint: MockEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is the bearer token; neither it nor the prompt is logged at any level."""
    caplog.set_level(0)
    async with bench(
        endpoint,
        lambda ask: refusal(500) if ask.attempt == 1 else Answer(content="fine"),
        api_key=Secret("sk-planted"),
        options={
            "extra_headers": {"X-Extra": "1", "user-agent": "mine"},
            "extra_query": {"api-version": "2", "a": [1, 2]},
        },
    ) as it:
        await it.ask(LONG)
        assert endpoint.asks[0].headers["authorization"] == "Bearer sk-planted"
        assert endpoint.asks[0].headers["x-extra"] == "1"
        assert endpoint.asks[0].headers["user-agent"] == "mine"
        assert endpoint.asks[0].headers["content-type"] == "application/json"
        assert endpoint.asks[0].path == "/v1/chat/completions"
        assert parse_qs(endpoint.asks[0].query) == {"api-version": ["2"], "a[]": ["1", "2"]}
    assert "planted" not in caplog.text
    assert LONG not in caplog.text


async def test_a_megabyte_prompt_arrives_whole(endpoint: MockEndpoint) -> None:
    """Long texts are sent as they are."""
    async with bench(endpoint, lambda ask: Answer(content=str(len(ask.text)))) as it:
        [reply] = await it.ask("文" * 2**20)
        assert reply["content"] == str(2**20)


async def test_an_error_of_our_own_is_not_swallowed(endpoint: MockEndpoint) -> None:
    """A programming error ends the job instead of hanging it."""
    async with bench(endpoint, lambda ask: Answer()) as it:

        def keep(index: int, reply: dict[str, Any]) -> None:
            raise ZeroDivisionError("ours")

        with pytest.raises(ZeroDivisionError):
            await it.engine.answer(3, lambda i: it.query.body({"text": "x"}), on_reply=keep)


def test_the_thread_answers_callers_that_block(endpoint: MockEndpoint) -> None:
    """The same engine behind a thread, several calls at once."""
    endpoint.script = lambda ask: Answer(content=ask.text)
    query = Query(model="m", base_url=endpoint.base_url, prompt_col="text")

    async def make() -> Engine:
        return Engine(query, EndpointClient(query, connections=10), FixedLimiter(4))

    thread = engine_module.EngineThread(make)
    calls = [thread.ask(5, lambda i, n=n: query.body({"text": f"{n}.{i}"})) for n in range(3)]
    assert [[r["content"] for r in call()] for call in calls] == [[f"{n}.{i}" for i in range(5)] for n in range(3)]
    thread.close()


def test_the_same_body_is_json_of_any_script() -> None:
    """What is asked for is valid JSON in UTF-8."""
    query = Query(model="m", base_url="http://h/v1", prompt_col="text")
    text = "עברית 中文 \u202e end"
    assert json.loads(json.dumps(query.body({"text": text})))["messages"][0]["content"] == text
    with pytest.raises(InvalidInput):
        query.body({"text": None})


KEY = "s3cr3t:pa$$w0rd!"
HEADERS = {"X-Tenant": "tenant-5ecret", "Proxy-Authorization": "Basic dXNlcjpwdw"}
SSE = {"content-type": "text/event-stream"}


@pytest.mark.parametrize("secret", [KEY, "tenant-5ecret", "dXNlcjpwdw"])
@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (lambda text: refusal(400, text), False),
        (lambda text: refusal(401, text), False),
        (lambda text: refusal(404, f"model {text} not found"), False),
        (lambda text: refusal(429, text), False),
        (lambda text: refusal(500, "x" * 290 + text), False),
        (lambda text: Answer(status=422, raw=json.dumps({"detail": [{"msg": text}]})), False),
        (lambda text: Answer(status=500, raw=text), False),
        (lambda text: Answer(raw=f"data: {json.dumps({'error': text})}\n\n", headers=SSE), True),
        (lambda text: Answer(raw=f"data: {json.dumps({'error': {'message': text}})}\n\n", headers=SSE), True),
    ],
)
async def test_what_a_request_is_signed_with_is_in_no_error(
    endpoint: MockEndpoint, secret: str, answer: Any, stream: bool
) -> None:
    """The exact key and the headers' values, whatever they look like and wherever the server repeats them."""
    query = Query(
        model="m",
        base_url=endpoint.base_url,
        api_key=Secret(KEY),
        prompt_col="text",
        options={"extra_headers": HEADERS},
    )
    endpoint.script = lambda ask: answer(f"got {secret} from you")
    client = EndpointClient(query, connections=2)
    with pytest.raises(Fault) as caught:
        await client.complete(query.body({"text": "hello"}), limit_s=lambda: 10, stream=stream)
    await client.close()
    for part in (secret, secret[:8]):
        assert part not in caught.value.message
        assert part not in str(caught.value)


CHAT = '{"messages": [{"role": "user", "content": "x"}]'


@pytest.mark.parametrize(
    "value",
    [
        '{"messages": "hi"}',
        '{"messages": ["hi"]}',
        CHAT + ', "max_tokens": "many"}',
        CHAT + ', "max_tokens": [1]}',
        CHAT + ', "max_tokens": 1e999}',
        CHAT + ', "temperature": NaN}',
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        '{"messages": ' + "[" * 100_000,
        {"messages": [{"role": "user", "content": b"x"}]},
    ],
)
async def test_a_request_that_cannot_be_sent_is_its_rows_error(endpoint: MockEndpoint, value: Any) -> None:
    """Whatever a batch file holds, the rows beside it are answered."""
    async with bench(endpoint, lambda ask: Answer(content="fine"), prompt_col=None, body_col="body") as it:
        first, bad, last = await it.ask(CHAT + "}", value, CHAT + "}")
        assert (first, last) == (OK, OK)
        assert (bad["error"]["type"], bad["attempts"]) == ("invalid_input", 0)


@pytest.mark.parametrize(
    "value", ['{"messages": [{"role": "user", "content": ["bad"]}]}', CHAT + ', "chat_template_kwargs": "x"}']
)
async def test_a_request_that_may_be_right_is_the_servers_to_judge(endpoint: MockEndpoint, value: str) -> None:
    """It is JSON of a known form; servers differ in what they take."""

    def script(ask: Ask) -> Answer:
        return refusal(400) if "bad" in ask.text or "chat_template_kwargs" in ask.body else Answer(content="fine")

    endpoint_text = "tests.support.mock_endpoint._text"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint_text, lambda body: json.dumps(body["messages"]))
        async with bench(endpoint, script, prompt_col=None, body_col="body") as it:
            assert await it.ask(CHAT + "}", value) == [OK, row_error("bad_request", "no", 400, 1)]


@pytest.mark.parametrize(
    "error", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), OverflowError(), KeyError("Mars/Base"), RecursionError()]
)
async def test_a_value_that_python_cannot_hold_is_its_rows_error(endpoint: MockEndpoint, error: Exception) -> None:
    """Reading a cell can fail in Arrow, in dates, in time zones; the message shows no value."""
    async with bench(endpoint, lambda ask: Answer(content="fine")) as it:

        def body(index: int) -> dict[str, Any]:
            if index == 1:
                raise error
            return it.query.body({"text": "x"})

        replies = [_comparable(reply) for reply in await it.engine.answer(3, body)]
        says = f"the row cannot be made into a request: {type(error).__name__}"
        assert replies == [OK, row_error("invalid_input", says, None, 0), OK]


def reply(message: str = '{"content": "x"}', more: str = "", usage: str = '{"prompt_tokens": 5}') -> str:
    return f'{{"choices": [{{"finish_reason": "stop", "message": {message}{more}}}], "usage": {usage}}}'


CALL = '{"tool_calls": [{"id": "\\ud83d", "function": {"name": "f", "arguments": %s}}]}'
FORM = {"response_format": "a STRING, n BIGINT, m MAP<STRING, STRING>"}
CALLED = {"id": "\ufffd", "name": "f"}


@pytest.mark.parametrize(
    ("raw", "arguments", "expected"),
    [
        (reply(usage='{"prompt_tokens": NaN}'), {}, {"prompt_tokens": None}),
        (reply(usage='{"prompt_tokens": 1e30, "completion_tokens": -1}'), {}, {"prompt_tokens": None}),
        (reply(usage='{"prompt_tokens": 1.5, "completion_tokens": 2.0}'), {}, {"completion_tokens": 2}),
        (reply(more=', "logprobs": {"content": ["\\ud83d"]}'), {"options": {"logprobs": True}}, {"content": "x"}),
        (reply(CALL % '{"a": "\\ud83d"}'), {}, {"tool_calls": [{**CALLED, "arguments": '{"a": "\ufffd"}'}]}),
        (reply(CALL % '""'), {}, {"tool_calls": [{**CALLED, "arguments": ""}]}),
        (reply(CALL % ("[" * 900 + "]" * 900)), {}, {}),
        ("[" * 200_000, {}, {"status": "error"}),
        (reply(json.dumps({"content": "[" * 1500 + "]" * 1500})), FORM, {"status": "error"}),
        (reply('{"content": "{\\"n\\": 1e999}"}'), FORM, {"status": "error"}),
        (
            reply(json.dumps({"content": json.dumps({"a": "x", "n": 1, "m": {"\ud83d": "a"}})})),
            FORM,
            {"parsed": {"a": "x", "n": 1, "m": [("\ufffd", "a")]}},
        ),
        ('{"data": [{"embedding": [16777217, 1]}]}', {"endpoint": "embeddings"}, {"embedding": [16777216.0, 1.0]}),
        ('{"data": [{"embedding": [1%s]}]}' % ("0" * 400), {"endpoint": "embeddings"}, {"status": "error"}),
        ('{"data": [{"embedding": ["a"]}]}', {"endpoint": "embeddings"}, {"status": "error"}),
    ],
)  # fmt: skip
async def test_an_odd_reply_is_its_rows_matter(
    endpoint: MockEndpoint, raw: str, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The row has an answer or an error that can be stored; its neighbours are answered."""
    good = {"content": '{"a": "x", "n": 1, "m": {}}'}
    script = lambda ask: Answer(raw=raw) if ask.text == "odd" else Answer(**good)  # noqa: E731
    async with bench(endpoint, script, **arguments) as it:
        replies = await it.engine.answer(3, lambda i: it.query.body({"text": ("a", "odd", "b")[i]}))
        rows = reply_column(replies, it.query).to_pylist()
        assert [rows[0]["status"], rows[2]["status"]] == ["ok", "ok"]
        assert {key: rows[1][key] for key in expected} == expected
        json.dumps([reply for _, reply in it.kept], ensure_ascii=False).encode()


async def test_half_a_character_in_an_error_can_be_stored(endpoint: MockEndpoint) -> None:
    """The server's words are text."""
    script = lambda ask: Answer(raw='{"error": {"message": "bad \\ud83d"}}', status=400)  # noqa: E731
    async with bench(endpoint, script) as it:
        assert await it.ask("x") == [row_error("bad_request", "bad \ufffd", 400, 1)]


def events(*texts: str) -> Answer:
    return Answer(raw="".join(f"data: {text}\n\n" for text in texts), headers=SSE)


@pytest.mark.parametrize(
    "answer",
    [
        refusal(400, "stream is not supported"),
        refusal(422, "stream_options: extra fields not permitted"),
        Answer(raw="<html>"),
        Answer(raw="<html>", headers={"content-type": "text/html"}),
        events('{"choices": [null]}', "[DONE]"),
        events('{"choices": [{"delta": "x"}]}', "[DONE]"),
        events('{"choices": [{"delta": {"tool_calls": [null]}}]}', "[DONE]"),
        events('{"choices": [{"delta": {"content": "a"}, "logprobs": [1]}]}', "[DONE]"),
        events("[1]", "[DONE]"),
        events("[" * 100_000, "[DONE]"),
        events('{"choices": [{"delta": {"content": "a"}}]}', "[DONE]"),
    ],
)
async def test_a_server_that_cannot_stream_is_asked_without(endpoint: MockEndpoint, answer: Answer) -> None:
    """The probe was our wish: it costs the row nothing, and the actor sends no more of them."""
    script = lambda ask: answer if ask.body.get("stream") else Answer(content="fine")  # noqa: E731
    async with bench(endpoint, script, limit=1, stream=True, max_attempts=1) as it:
        assert await it.ask(*range(5)) == [OK] * 5
        assert [bool(ask.body.get("stream")) for ask in endpoint.asks] == [True] + [False] * 5
        assert not it.sleeps


async def test_a_server_that_does_not_heed_stream_is_understood(endpoint: MockEndpoint) -> None:
    """It answers as a plain request would get it."""
    script = lambda ask: Answer(raw=reply(), headers={"content-type": "application/json"})  # noqa: E731
    async with bench(endpoint, script, stream=True) as it:
        assert await it.ask("x") == [{**OK, "content": "x", "completion_tokens": None}]
        assert len(endpoint.asks) == 1


async def test_a_bad_row_does_not_end_the_probes(endpoint: MockEndpoint) -> None:
    """What is refused without streaming too was not refused for it."""
    script = lambda ask: refusal(400) if ask.text == "bad" else Answer(content="fine")  # noqa: E731
    async with bench(endpoint, script, limit=1, stream=True) as it:
        assert await it.ask("bad") == [row_error("bad_request", "no", 400, 1)]
        assert await it.ask("x") == [OK]
        assert [bool(ask.body.get("stream")) for ask in endpoint.asks] == [True, False, True]


async def test_logprobs_are_the_same_streamed_or_not(endpoint: MockEndpoint) -> None:
    """Completions have several lists, chat has one."""
    pieces = [
        {"text": text, "logprobs": {"tokens": [text], "token_logprobs": [-1.0], "text_offset": [at]}}
        for at, text in enumerate("ab")
    ]
    pieces[-1]["finish_reason"] = "stop"
    answer = events(*(json.dumps({"choices": [piece]}) for piece in pieces), "[DONE]")
    async with bench(endpoint, lambda ask: answer, stream=True, endpoint="completions", options={"logprobs": 1}) as it:
        [row] = await it.ask("x")
        assert row["content"] == "ab"
        assert json.loads(row["logprobs"]) == {
            "tokens": ["a", "b"],
            "token_logprobs": [-1.0, -1.0],
            "text_offset": [0, 1],
        }
