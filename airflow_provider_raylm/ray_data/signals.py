"""How much of what is in flight waits at the server: the waiting share, from whatever the server lets us see.

Pure functions: no clock, no I/O. Each estimator answers a share in 0..1, or `None` when it cannot tell. None of them
compares with a smallest latency seen earlier: a job that starts on a busy server would take its queue for normal.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from airflow_provider_raylm.ray_data.contracts import Begun, Sample

OVERHEAD_S = 0.05
"""What a reply takes besides queue and steps of the model: parsing, templates, proxies."""
PREFILL_STEPS = 6.0
"""Steps of the model a prompt may take before its first token without having waited: it joins a running step, is cut
into chunks, and shares them with others."""
LEAST_STEP_S = 0.001
"""No model steps faster; tokens that come closer together were held back by a server or gateway, and sent at once."""
MIN_PROBES = 6
MIN_FIT_ROWS = 32

_GAUGE = re.compile(
    r"^(?:ray_)?(?:vllm[:_]num_requests_|sglang[:_]num_|tgi_)"
    r"(?P<kind>waiting|running|queue_reqs|running_reqs|queue_size|batch_current_size)"
    r"(?:\{(?P<labels>[^}]*)\})?[ \t]+(?P<value>\S+)",
    re.MULTILINE,
)
_MADE = re.compile(r"^ray_vllm[:_]generation_tokens_total\{(?P<labels>[^}]*)\}[ \t]+(?P<value>\S+)", re.MULTILINE)
_MODEL_LABEL = re.compile(r'\bmodel_name="([^"]*)"')
_WAITING = frozenset({"waiting", "queue_reqs", "queue_size"})


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at the server at one moment, everybody's.

    Attributes:
        waiting: Not admitted yet, or preempted.
        running: In the model's batch.
        busy: Engines with requests in their batch.
        whole: No engine of the endpoint can be missing: what it does not hold is on its way to it.
    """

    waiting: float
    running: float
    busy: int = field(default=0, compare=False)
    whole: bool = field(default=False, compare=False)

    @property
    def waiting_share(self) -> float:
        """0 for an idle server."""
        total = self.waiting + self.running
        return self.waiting / total if total > 0 else 0.0


def read_load(text: str, model: str) -> Load | None:
    """Read the queue gauges of vLLM, vLLM behind Ray (`ray_vllm_*`), SGLang or TGI from a metrics page.

    Gauges of several engines are summed. Where the page labels more than one model, only `model` counts.

    Returns:
        `None` when the page has no pair of gauges for this model.
    """
    sums: dict[str, dict[bool, float]] = {}
    busy: dict[str, int] = {}
    for match in _GAUGE.finditer(text):
        label = _MODEL_LABEL.search(match["labels"] or "")
        try:
            value = float(match["value"])
        except ValueError:
            continue
        name = label[1] if label else ""
        of_model = sums.setdefault(name, {})
        waiting = match["kind"] in _WAITING
        busy[name] = busy.get(name, 0) + (not waiting and value > 0)
        of_model[waiting] = of_model.get(waiting, 0.0) + value
    name = _shown_as(model, sums)
    found = sums.get(name, {})
    return Load(waiting=found[True], running=found[False], busy=busy[name]) if len(found) == 2 else None


def read_made(text: str, model: str) -> dict[str, float]:
    """Tokens that each engine of a model behind Ray has made, by its labels.

    An engine that works shows another number each time it hands its figures to Ray, even if its queue stays as it is.
    """
    made: dict[str, dict[str, float]] = {}
    for match in _MADE.finditer(text):
        label = _MODEL_LABEL.search(match["labels"])
        with contextlib.suppress(ValueError):
            made.setdefault(label[1] if label else "", {})[match["labels"]] = float(match["value"])
    return made.get(_shown_as(model, made), {})


def _shown_as(model: str, names: Collection[str]) -> str:
    """The name a page shows a model under: its own, or the only one there, as with a LoRA adapter of another model."""
    return model if model in names else next(iter(names)) if len(names) == 1 else ""


def plausible(load: Load, *, in_flight: float, in_network: float) -> bool:
    """Whether the figures can describe the whole endpoint: they hold at least what we ourselves have there.

    One replica of several behind a balancer shows only its own part. Where no engine can be missing, a busy process
    before them may hold up to half.

    Args:
        load: What the metrics page says.
        in_flight: Requests of this job under way when it was read.
        in_network: How many of them may have been between here and the server.
    """
    part = 0.5 if load.whole else 0.7
    return load.waiting + load.running >= part * (in_flight - in_network) - 2


def are_buffered(probes: Sequence[Sample]) -> bool:
    """Whether most of these streamed rows came whole: their first token then shows when the last one was made."""
    several = [s for s in probes if s.ttft_s is not None and s.completion_tokens > 1]
    return sum(_step_s(s) < LEAST_STEP_S for s in several) > len(several) / 2


def _step_s(probe: Sample) -> float:
    """Seconds from one token to the next; 0 where there is only one."""
    rest_s = probe.done_s - probe.sent_s - (probe.ttft_s or 0.0)
    return rest_s / (probe.completion_tokens - 1) if probe.completion_tokens > 1 else 0.0


def share_from_probes(samples: Sequence[Sample], *, latency_s: float, overhead_s: float = OVERHEAD_S) -> float | None:
    """Waiting share from streamed rows: time before the first token that steps of the model do not explain.

    By Little's law the time waited over the time spent is the share of requests that wait. The two come from different
    rows, so that long rows, which show their wait late, need not be waited for.

    Args:
        samples: Rows sent lately; those that were streamed count.
        latency_s: Mean latency of the rows that ended lately.
        overhead_s: Time of a reply that is neither queue nor model.
    """
    probes = [s for s in samples if s.ttft_s is not None and s.outcome == "success"]
    if len(probes) < MIN_PROBES or latency_s <= 0 or are_buffered(probes):
        return None
    waits = [_wait_s(s.ttft_s or 0.0, _step_s(s), overhead_s) for s in probes]
    return min(1.0, statistics.fmean(waits) / latency_s)


def share_from_beginnings(begun: Sequence[Begun], *, latency_s: float, overhead_s: float = OVERHEAD_S) -> float | None:
    """Waiting share from streamed rows that still run. Those that wait for their first token are not among them: a
    share near 0 says that there is no queue, a larger one says little.

    Args:
        begun: Rows sent lately.
        latency_s: Mean latency of rows, or less.
        overhead_s: Time of a reply that is neither queue nor model.
    """
    held_back = sum(b.step_s < LEAST_STEP_S for b in begun) > len(begun) / 2
    if len(begun) < MIN_PROBES or latency_s <= 0 or held_back:
        return None
    return min(1.0, statistics.fmean(_wait_s(b.ttft_s, b.step_s, overhead_s) for b in begun) / latency_s)


def _wait_s(ttft_s: float, step_s: float, overhead_s: float) -> float:
    """What steps of the model do not explain of the time before the first token."""
    return max(0.0, ttft_s - PREFILL_STEPS * step_s - overhead_s)


def share_from_fit(samples: Sequence[Sample], *, overhead_s: float = OVERHEAD_S) -> float | None:
    """Waiting share from finished rows: the part of their latency that does not grow with their length.

    Fits latency = a + b x completion tokens + c x prompt tokens with Huber weights; a - 6b - overhead is the wait.
    Needs `MIN_FIT_ROWS` rows and lengths that differ.
    """
    rows = [s for s in samples if s.outcome == "success" and s.completion_tokens > 0]
    if len(rows) < MIN_FIT_ROWS:
        return None
    y = [s.done_s - s.sent_s for s in rows]
    out = [float(s.completion_tokens) for s in rows]
    if statistics.pstdev(out) < 0.1 * statistics.fmean(out):
        return None
    prompt = [float(s.prompt_tokens) for s in rows]
    with_prompt = statistics.pstdev(prompt) >= 0.1 * max(1.0, statistics.fmean(prompt))
    # in parts of the latency: long rows vary more, and the wait is best seen in short ones
    columns = [[v / t for v, t in zip(c, y, strict=True)] for c in ([1.0] * len(rows), out, *([prompt] * with_prompt))]
    coefficients = _huber(columns, [1.0] * len(rows))
    if coefficients is None or coefficients[1] < 0:
        return None
    waited = coefficients[0] - PREFILL_STEPS * coefficients[1] - overhead_s
    return min(1.0, max(0.0, waited) * len(rows) / sum(y))


def _huber(columns: list[list[float]], y: list[float], rounds: int = 6) -> list[float] | None:
    """Least squares, then re-weighted so that outliers pull with constant force. `None` if singular."""
    weights = [1.0] * len(y)
    result: list[float] | None = None
    for _ in range(rounds):
        result = _weighted_least_squares(columns, y, weights)
        if result is None:
            return None
        residuals = [abs(v - sum(k * c[i] for k, c in zip(result, columns, strict=True))) for i, v in enumerate(y)]
        scale = 1.345 * 1.4826 * statistics.median(residuals)
        if scale <= 1e-9:
            break
        weights = [1.0 if r <= scale else scale / r for r in residuals]
    return result


def _weighted_least_squares(columns: list[list[float]], y: list[float], weights: list[float]) -> list[float] | None:
    n = len(columns)
    matrix = [
        [
            *(sum(w * a * b for w, a, b in zip(weights, columns[i], columns[j], strict=True)) for j in range(n)),
            sum(w * a * b for w, a, b in zip(weights, columns[i], y, strict=True)),
        ]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(matrix[r][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            return None
        for r in range(n):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]
