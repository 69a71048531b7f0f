"""Each estimator of the waiting share against figures whose answer is known."""

from __future__ import annotations

import random

import pytest

from airflow_provider_raylm.ray_data.contracts import Begun, Sample
from airflow_provider_raylm.ray_data.signals import (
    Load,
    plausible,
    read_load,
    share_from_beginnings,
    share_from_fit,
    share_from_probes,
)

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen"} 200.0
vllm:num_requests_waiting{engine="0",model_name="qwen"} 12.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="qwen",reason="capacity"} 12.0
vllm:kv_cache_usage_perc{engine="0",model_name="qwen"} 0.5
"""
RAY = """ray_vllm_num_requests_running{ReplicaId="a",model_name="qwen",engine="0",Version="2.60.0"} 100.0
ray_vllm_num_requests_running{ReplicaId="b",model_name="qwen",engine="0",Version="2.60.0"} 90.0
ray_vllm_num_requests_waiting{ReplicaId="a",model_name="qwen",engine="0",Version="2.60.0"} 3.0
ray_vllm_num_requests_waiting{ReplicaId="b",model_name="qwen",engine="0",Version="2.60.0"} 4.0
ray_vllm_num_requests_running{ReplicaId="c",model_name="other",engine="0",Version="2.60.0"} 50.0
ray_vllm_num_requests_waiting{ReplicaId="c",model_name="other",engine="0",Version="2.60.0"} 50.0
"""


@pytest.mark.parametrize(
    ("text", "model", "expected"),
    [
        pytest.param(VLLM, "qwen", Load(12, 200), id="vllm"),
        pytest.param(VLLM, "served under another name", Load(12, 200), id="one model, another name"),
        pytest.param(RAY, "qwen", Load(7, 190), id="ray sums the replicas of the model"),
        pytest.param(RAY, "unknown", None, id="two models, neither is ours"),
        pytest.param("sglang:num_queue_reqs 5.0\nsglang:num_running_reqs 20.0\n", "m", Load(5, 20), id="sglang"),
        pytest.param("tgi_queue_size 5\ntgi_batch_current_size 20\n", "m", Load(5, 20), id="tgi"),
        pytest.param("vllm:num_requests_waiting 5.0\n", "m", None, id="half of a pair"),
        pytest.param("<html>404</html>", "m", None, id="no metrics page"),
    ],
)
def test_reads_the_queue_gauges(text: str, model: str, expected: Load | None) -> None:
    """Waiting and running requests of this model, from the pages of several servers."""
    assert read_load(text, model) == expected


@pytest.mark.parametrize(
    ("load", "in_flight", "in_network", "expected"),
    [
        pytest.param(Load(16, 256), 272, 1, True, id="all of it is ours"),
        pytest.param(Load(16, 256), 100, 1, True, id="others are there, too"),
        pytest.param(Load(0, 90), 272, 1, False, id="one replica of three"),
        pytest.param(Load(0, 60), 180, 100, True, id="the rest is on the wire"),
        pytest.param(Load(0, 0), 1, 0, True, id="nothing to tell from"),
    ],
)
def test_figures_must_hold_what_we_have_there(load: Load, in_flight: float, in_network: float, expected: bool) -> None:
    """Metrics that show less than our own requests are of a part of the endpoint."""
    assert plausible(load, in_flight=in_flight, in_network=in_network) is expected


def rows(wait_s: float, *, count: int = 64, step_s: float = 0.015, stream: bool = False, seed: int = 1) -> list[Sample]:
    """Rows that waited `wait_s`, then took one step a token; lengths and times vary."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        tokens, prompt = rng.randint(10, 400), rng.randint(50, 300)
        first = wait_s * rng.uniform(0.8, 1.2) + 3 * step_s
        took = first + (tokens - 1) * step_s * rng.uniform(0.95, 1.05)
        result.append(Sample(100.0, 100.0 + took, "success", prompt, tokens, first if stream else None))
    return result


@pytest.mark.parametrize("wait_s", [0.5, 2.0, 10.0])
def test_probes_and_fit_find_the_time_waited(wait_s: float) -> None:
    """Both estimators find the wait within a fifth, and none without a wait."""
    probes, plain = rows(wait_s, stream=True), rows(wait_s)
    latency_s = sum(s.done_s - s.sent_s for s in plain) / len(plain)
    assert share_from_probes(probes, latency_s=latency_s) == pytest.approx(wait_s / latency_s, rel=0.35)
    assert share_from_fit(plain) == pytest.approx(wait_s / latency_s, rel=0.35)


@pytest.mark.parametrize(
    ("whole", "tokens", "expected"),
    [
        pytest.param(12, 50, None, id="whole answers"),
        pytest.param(12, 2, None, id="two tokens at once"),
        pytest.param(7, 50, None, id="most of them"),
        pytest.param(5, 50, 0.75, id="a few tokens that met on the way"),
        pytest.param(12, 1, 0.75, id="one token is always whole"),
    ],
)
def test_a_stream_that_was_held_back_tells_nothing(whole: int, tokens: int, expected: float | None) -> None:
    """An answer sent at once shows its first token when its last was made; that is not taken for a queue."""
    probes = [
        Sample(0.0, 0.8 if i < whole else 0.8 + 0.02 * tokens, "success", 10, tokens, 0.8 - 1e-4 * tokens)
        for i in range(12)
    ]
    share = share_from_probes(probes, latency_s=1.0)
    assert share is expected if expected is None else share == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("ttft_s", "step_s", "count", "expected"),
    [
        pytest.param(0.1, 0.02, 6, 0.0, id="no queue"),
        pytest.param(2.17, 0.02, 6, 0.2, id="two seconds of ten"),
        pytest.param(30.0, 0.02, 6, 1.0, id="more than rows take"),
        pytest.param(0.1, 0.02, 5, None, id="too few"),
        pytest.param(0.1, 0.0001, 6, None, id="held back"),
    ],
)
def test_rows_that_still_run_show_the_wait(ttft_s: float, step_s: float, count: int, expected: float | None) -> None:
    """Time to first token less what six steps explain, over the latency of a row."""
    share = share_from_beginnings([Begun(1.0, ttft_s, step_s)] * count, latency_s=10.0)
    assert share == (expected if expected is None else pytest.approx(expected))


def test_no_wait_is_no_share() -> None:
    """Long answers alone are not a queue."""
    assert share_from_probes(rows(0.0, stream=True), latency_s=3.0) == 0
    assert share_from_fit(rows(0.0)) == pytest.approx(0, abs=0.01)


def test_time_that_is_not_the_server_s_is_taken_off() -> None:
    """A slow network or a late event loop of the client is no queue."""
    assert share_from_probes(rows(0.3, stream=True), latency_s=3.0, overhead_s=0.4) == pytest.approx(0, abs=0.01)
    assert share_from_fit(rows(0.3), overhead_s=0.4) == pytest.approx(0, abs=0.01)


def test_outliers_do_not_bend_the_fit() -> None:
    """A few rows that took a hundred times longer change the share by little."""
    plain = rows(1.0, count=100)
    stuck = [Sample(s.sent_s, s.done_s + 60.0, "success", s.prompt_tokens, s.completion_tokens) for s in plain[:5]]
    total = sum(s.done_s - s.sent_s for s in plain)
    mixed = share_from_fit([*stuck, *plain[5:]])
    assert mixed is not None
    assert mixed * (total + 300) / len(plain) == pytest.approx(1.0, rel=0.4)


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(rows(1.0, count=31), id="too few"),
        pytest.param([Sample(0.0, 1.0 + i / 100, "success", 10, 50) for i in range(64)], id="all of one length"),
        pytest.param([Sample(0.0, 1.0, "success", 10, 0) for _ in range(64)], id="no token counts"),
        pytest.param([Sample(0.0, 1.0, "ignore", 10, i) for i in range(64)], id="no successes"),
    ],
)
def test_says_that_it_cannot_tell(samples: list[Sample]) -> None:
    """No answer is made up from rows that cannot give one."""
    assert share_from_fit(samples) is None
    assert share_from_probes(samples, latency_s=1.0) is None
