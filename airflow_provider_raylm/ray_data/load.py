"""Reads an endpoint's own queue figures over HTTP: the I/O behind `signals.read_load`.

Where they are (read from the sources of Ray 2.60 and vLLM 0.29):

- `vllm serve`: `/metrics` at the server's root, all engines of that server.
- Ray Serve LLM with its default ingress: the public port answers 404 on `/metrics`, however many proxies and replicas
  there are. vLLM hands its gauges to Ray (`log_engine_metrics`, on by default), and every node shows those of its own
  replicas as `ray_vllm_*` on its metrics export port. The whole endpoint is the sum over the nodes. A replica hands
  them to Ray every `metrics_report_interval_ms`: each second where this package deployed it, else 10 s by default. So a
  reading may describe the past; it counts only when every engine at work has reported since the last one.
- Ray Serve LLM with direct streaming through HAProxy and `log_engine_metrics: false`: `/metrics` on the Serve port, of
  one replica a time; with several replicas the figures fall short of what we have in flight, and are not used.
- A gateway in front: usually nothing, then streamed probes tell.

vLLM can also return `num_requests_waiting` with a reply (request header `endpoint-load-metrics-format`). It is not
used: each such reply walks the server's whole metrics registry and writes a log line, the running requests are missing,
and Ray's ingress does not pass it on.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp

from airflow_provider_raylm.ray_data.signals import Load, read_load, read_made

SEARCH_AGAIN_S = 30.0
"""At most; at first a search follows the other sooner, since an engine that has had nothing to do shows no queue."""
TIMEOUT_S = 2.0
RAY_POLL_S = 1.0
RAY_REPORT_S = 10.0
"""Ray's default `metrics_report_interval_ms`: what is expected until a page has shown that it changes more often."""


def metrics_urls(base_url: str) -> list[str]:
    """Where a server of this OpenAI base URL may show its metrics, likeliest first."""
    parts = urlsplit(base_url)
    root = f"{parts.scheme}://{parts.netloc}"
    path = parts.path.rstrip("/")
    prefix = path[: -len("/v1")] if path.endswith("/v1") else path
    return list(dict.fromkeys(f"{root}{p}/metrics" for p in (prefix, "", path)))


def ray_metrics_urls(base_url: str) -> list[str]:
    """Metrics pages of this Ray cluster's nodes, if the endpoint is on one of them. Blocks; needs `ray.init`."""
    import ray

    nodes = [n for n in ray.nodes() if n.get("Alive") and n.get("MetricsExportPort")]
    host = urlsplit(base_url).hostname or ""
    here = {str(n["NodeManagerAddress"]) for n in nodes} | {str(n.get("NodeManagerHostname")) for n in nodes}
    if host not in here and not _is_loopback(host):
        return []
    return [f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics" for n in nodes]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Reports:
    """Tells when the engines behind Ray have reported, and how often they do. Pure.

    Attributes:
        every_s: Seconds from one report to the next, the least that was seen.
    """

    def __init__(self, load: Load | None = None, made: Mapping[str, float] | None = None) -> None:
        self.every_s = RAY_REPORT_S
        self._load = load
        self._made = dict(made or {})
        self._reported_s: float | None = None

    def take(self, now_s: float, load: Load, made: Mapping[str, float]) -> bool:
        """Take in a reading and the tokens made by each engine; whether it tells more than the last one did."""
        changed, self._load = load != self._load, load
        reported = sum(tokens != self._made.get(engine) for engine, tokens in made.items())
        if not made or not load.busy:
            return changed
        if reported < load.busy:  # what a dead engine last said may stay there: the others are not ignored for it
            return changed and self._reported_s is not None and now_s - self._reported_s > 3 * RAY_REPORT_S
        if self._reported_s is not None:
            self.every_s = min(self.every_s, now_s - self._reported_s)
        self._reported_s, self._made = now_s, dict(made)
        return True


class LoadReader:
    """Finds the page that shows the endpoint's queue and reads it.

    Args:
        base_url: OpenAI base URL of the endpoint.
        model: Model id, for pages that show several.
        api_key: Sent to the endpoint's own host only.
        ray_urls: Called now and then for the metrics pages of the Ray cluster the endpoint is on, all to be summed.
    """

    def __init__(
        self, base_url: str, model: str, api_key: str, ray_urls: Callable[[str], Sequence[str]] | None = None
    ) -> None:
        self._base_url = base_url
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._ray_urls = ray_urls
        self._found: list[str] = []
        self._on_ray = False
        self._search_s = 0.0
        self._search_again_s = 1.0
        self._ray_s = 0.0
        self._reports = Reports()
        self._session: aiohttp.ClientSession | None = None

    @property
    def every_s(self) -> float | None:
        """Seconds between two readings that count; `None` while no page is found."""
        if not self._found:
            return None
        return self._reports.every_s if self._on_ray else 1.0

    @property
    def late_s(self) -> float:
        """Age that a reading may have when it is read."""
        return RAY_POLL_S if self._on_ray else 0.0

    async def read(self) -> Load | None:
        """The load now, `None` when nothing shows it or, on Ray's pages, nothing has changed since."""
        if not self._found:
            return await self._search()
        now_s = time.monotonic()
        if self._on_ray:
            if now_s < self._ray_s:
                return None
            self._ray_s = now_s + RAY_POLL_S
        load, made = await self._sum(self._found, on_ray=self._on_ray)
        if load is None:
            self._found, self._search_again_s = [], 1.0
            return None
        if not self._on_ray:
            return load
        return load if self._reports.take(now_s, load, made) else None

    async def network_s(self) -> float | None:
        """Seconds a connection to the endpoint takes to be set up: the network's round trip, without any queue."""
        parts = urlsplit(self._base_url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        best: float | None = None
        for _ in range(3):
            begin = time.perf_counter()
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port), TIMEOUT_S)
            except (OSError, asyncio.TimeoutError):
                return best
            took = time.perf_counter() - begin
            writer.close()
            best = took if best is None else min(best, took)
        return best

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _search(self) -> Load | None:
        now_s = time.monotonic()
        if now_s < self._search_s:
            return None
        self._search_s = now_s + self._search_again_s
        self._search_again_s = min(SEARCH_AGAIN_S, 2 * self._search_again_s)
        for url in metrics_urls(self._base_url):
            load, _ = await self._sum([url], on_ray=False)
            if load is not None:
                self._found, self._on_ray = [url], False
                return load
        if self._ray_urls is not None:
            urls = list(await asyncio.to_thread(self._ray_urls, self._base_url))
            load, made = await self._sum(urls, on_ray=True)
            if load is not None:  # how old this first one is cannot be told: it is the next change that counts
                self._found, self._on_ray, self._reports = urls, True, Reports(load, made)
        return None

    async def _sum(self, urls: Sequence[str], *, on_ray: bool) -> tuple[Load | None, dict[str, float]]:
        """The load of all pages that show one, and the tokens made by each engine on them."""
        texts = await asyncio.gather(*(self._page(url) for url in urls))
        loads = [load for text in texts if text and (load := read_load(text, self._model)) is not None]
        if not loads:
            return None, {}
        made = {engine: tokens for text in texts if text for engine, tokens in read_made(text, self._model).items()}
        waiting, running, busy = (
            sum(part) for part in zip(*((x.waiting, x.running, x.busy) for x in loads), strict=True)
        )
        return Load(waiting=waiting, running=running, busy=int(busy), whole=on_ray and None not in texts), made

    async def _page(self, url: str) -> str | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        own_host = urlsplit(url).netloc == urlsplit(self._base_url).netloc
        try:
            async with self._session.get(url, headers=self._headers if own_host else {}) as response:
                if response.status != 200:
                    return None
                return await response.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None
