"""The simulated engine against real vLLM on the CPU: throughput and time to first token, by requests in flight.

The three costs of a step are read off the real server at its two ends, one request in flight and all sequences busy.
Everything in between and beyond is predicted. Compared are the shapes of the curves: each is divided by its own value
at saturation.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from airflow_provider_raylm.ray_data.contracts import Sample
from airflow_provider_raylm.ray_data.flow import Tally
from benchmarks.engine import Shape
from benchmarks.gpu.rows import Row, chat_body, make_rows
from benchmarks.real_vllm import MAX_NUM_SEQS, MODEL, serve_vllm
from benchmarks.replay import Fixed, Job, Replay

IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64)
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Point:
    """One load.

    Attributes:
        tokens_per_s: Answer tokens a second.
        ttft_s: Mean time to first token.
        step_s: Mean time from one token to the next.
    """

    tokens_per_s: float
    ttft_s: float
    step_s: float
    prompt_tokens: float


def rows_of(in_flight: int) -> list[Row]:
    """Requests to send at this load: prompts of about 48 tokens, answers of 16 to 32, the same at every call."""
    count = max(8, 4 * min(in_flight, MAX_NUM_SEQS) + in_flight)
    rows = make_rows(count, in_flight, prompt_tokens=48)
    return [row._replace(max_tokens=ANSWER_TOKENS - 8 + number * 7 % 17) for number, row in enumerate(rows)]


async def load(base_url: str, in_flight: int) -> Point:
    """Keep `in_flight` streamed requests under way; what is seen while that many are."""
    todo = iter(rows_of(in_flight))
    ended: list[tuple[float, float, float, int, int]] = []  # when, time to first token, of a step, prompt, answer

    async def ask(session: aiohttp.ClientSession, row: Row) -> None:
        body = {**chat_body(row, MODEL), "stream": True}
        body["stream_options"] = {"include_usage": True}
        sent_s, first_s, prompt_tokens = time.monotonic(), 0.0, 0
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if usage := event.get("usage"):
                    prompt_tokens = usage["prompt_tokens"]
                elif not first_s and any(c["delta"].get("content") for c in event["choices"]):
                    first_s = time.monotonic()
        done_s = time.monotonic()
        step_s = (done_s - first_s) / (row.max_tokens - 1)
        ended.append((done_s, first_s - sent_s, step_s, prompt_tokens, row.max_tokens))

    async def work(session: aiohttp.ClientSession) -> None:
        for row in todo:
            await ask(session, row)

    connector = aiohttp.TCPConnector(limit=0)
    begin = time.monotonic()
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(work(session) for _ in range(in_flight)))
    full = sorted(ended)[: len(ended) - in_flight] or sorted(ended)  # later ones ended while fewer were under way
    late = full[len(full) // 4 :]  # those that all started together first are no steady state
    return Point(
        tokens_per_s=sum(e[4] for e in full) / (full[-1][0] - begin),
        ttft_s=statistics.fmean(e[1] for e in late),
        step_s=statistics.fmean(e[2] for e in late),
        prompt_tokens=statistics.fmean(e[3] for e in late),
    )


@dataclass
class Seen(Fixed):
    """A fixed limit that streams every row and remembers what came of it."""

    ended: list[Sample] = field(default_factory=list)

    def wants_stream(self, now_s: float) -> bool:
        return True

    def add(self, now_s: float, counted: Tally, samples: Sequence[Sample], retry_after_s: float = 0.0) -> None:
        self.ended += samples


def simulate(shape: Shape, in_flight: int, prompt_tokens: float) -> Point:
    """The same load in the simulated engine."""
    seen = Seen(in_flight)
    rows = [(round(prompt_tokens), row.max_tokens) for row in rows_of(in_flight)]
    job = Job(seen, iter(rows), holds_while_waiting=True, signals="ttft fit")
    replay = Replay(shape, [job])
    while job.done < len(rows):
        replay.run(replay.now_s + 1.0)
    full = seen.ended[: len(seen.ended) - in_flight] or seen.ended
    late = full[len(full) // 4 :]
    return Point(
        tokens_per_s=sum(s.completion_tokens for s in full) / full[-1].done_s,
        ttft_s=statistics.fmean(s.ttft_s or 0.0 for s in late),
        step_s=statistics.fmean((s.done_s - s.sent_s - (s.ttft_s or 0.0)) / (s.completion_tokens - 1) for s in late),
        prompt_tokens=prompt_tokens,
    )


def calibrated(first: Point, full: Point) -> Shape:
    """A shape whose steps cost what those of the real engine do with one request and with all sequences busy."""
    prefill_s = max(0.0, first.ttft_s - first.step_s) / first.prompt_tokens
    # each answer brings one prompt, whose prefill is shared by all that run
    prefill_per_step_s = prefill_s * full.prompt_tokens * MAX_NUM_SEQS / ANSWER_TOKENS
    per_seq_s = max(0.0, full.step_s - prefill_per_step_s - first.step_s) / (MAX_NUM_SEQS - 1)
    return Shape(
        name="vLLM on the CPU",
        max_num_seqs=MAX_NUM_SEQS,
        kv_tokens=40_000,
        base_ms=1000 * (first.step_s - per_seq_s),
        per_seq_ms=1000 * per_seq_s,
        per_prefill_ms=1000 * prefill_s,
        network_s=0.0,
    )


def run() -> dict[str, Any]:
    """Measure, calibrate, simulate, compare."""
    from demo.model import smollm2_checkpoint

    model = smollm2_checkpoint()
    real: dict[int, Point] = {}
    with tempfile.TemporaryDirectory() as folder, serve_vllm(model, Path(folder) / "vllm.log") as server:
        asyncio.run(load(server.base_url, 8))
        for in_flight in IN_FLIGHT:
            real[in_flight] = asyncio.run(load(server.base_url, in_flight))
            print(in_flight, real[in_flight], flush=True)
    shape = calibrated(real[1], real[MAX_NUM_SEQS])
    simulated = {n: simulate(shape, n, real[n].prompt_tokens) for n in IN_FLIGHT}
    rows = []
    for n in IN_FLIGHT:
        pair = real[n], simulated[n]
        best = [max(p.tokens_per_s for p in of.values()) for of in (real, simulated)]
        longest = [of[IN_FLIGHT[-1]].ttft_s for of in (real, simulated)]
        throughput = [round(p.tokens_per_s / b, 3) for p, b in zip(pair, best, strict=True)]
        ttft = [round(p.ttft_s / b, 4) for p, b in zip(pair, longest, strict=True)]
        rows.append(
            {
                "in_flight": n,
                "tokens_per_s": [round(p.tokens_per_s, 1) for p in pair],
                "ttft_s": [round(p.ttft_s, 3) for p in pair],
                "throughput_normalised": throughput,
                "ttft_normalised": ttft,
            }
        )
        print(rows[-1], flush=True)

    def off(name: str) -> float:
        return round(max(abs(r[name][0] - r[name][1]) for r in rows), 3)

    return {
        "model": model.name,
        "max_num_seqs": MAX_NUM_SEQS,
        "step_ms": {"base": shape.base_ms, "per_seq": shape.per_seq_ms, "per_prefill_token": shape.per_prefill_ms},
        "real_and_simulated": rows,
        "most_off": {"throughput": off("throughput_normalised"), "ttft": off("ttft_normalised")},
    }
