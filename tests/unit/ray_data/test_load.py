"""The endpoint's queue as Ray's metrics pages show it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from aiohttp import web

from airflow_provider_raylm.ray_data.load import RAY_REPORT_S, LoadReader, Reports
from airflow_provider_raylm.ray_data.signals import Load, read_made

FULL = Load(waiting=9, running=16, busy=2)


def page(engines: dict[str, tuple[int, int, int]], model: str = "qwen") -> str:
    """A page of Ray 2.60 with vLLM 0.29: `(waiting, running, tokens made)` of each engine."""
    lines = []
    for replica, (waiting, running, made) in engines.items():
        labels = (
            f'{{Component="core_worker",ReplicaId="{replica}",engine="0",model_name="{model}",otel_scope_name="x"}}'
        )
        lines += [
            f"ray_vllm_num_requests_waiting{labels} {waiting}.0",
            f"ray_vllm_num_requests_waiting_by_reason{labels} 0.0",
            f"ray_vllm_num_requests_running{labels} {running}.0",
            f"ray_vllm_generation_tokens_total{labels} {made}.0",
        ]
    return "\n".join(lines)


def test_a_full_engine_reports_though_its_queue_stays_as_it_is() -> None:
    """The tokens it has made are another number each time; the same page read twice is no news."""
    reports = Reports(FULL, {"a": 10, "b": 10})
    assert not reports.take(1.0, FULL, {"a": 10, "b": 10})
    assert reports.take(2.0, FULL, {"a": 20, "b": 20})
    assert reports.every_s == RAY_REPORT_S  # how old the first page was cannot be told
    assert reports.take(3.0, FULL, {"a": 30, "b": 30})
    assert reports.every_s == 1.0
    assert not reports.take(4.0, FULL, {"a": 30, "b": 30})
    assert reports.take(5.0, FULL, {"a": 40, "b": 40})
    assert reports.every_s == 1.0


def test_engines_that_report_in_turn_are_not_taken_for_one_that_reports_often() -> None:
    """Each of two changes every 10 s, the page therefore every 5 s: both have reported only every 10 s."""
    reports = Reports(FULL, {"a": 0, "b": 0})
    loads = [Load(waiting=s // 5, running=16, busy=2) for s in range(41)]
    news = [reports.take(float(s), loads[s], {"a": s // 10, "b": (s + 5) // 10}) for s in range(1, 41)]
    assert reports.every_s == 10.0
    assert [s for s, new in enumerate(news, 1) if new] == [10, 20, 30, 40]


def test_an_idle_engine_is_not_waited_for() -> None:
    """Of two engines one has nothing to do and makes no tokens."""
    one = Load(waiting=3, running=8, busy=1)
    reports = Reports(one, {"a": 0, "b": 7})
    assert reports.take(1.0, one, {"a": 5, "b": 7})


def test_an_engine_that_died_is_not_waited_for_for_ever() -> None:
    """Its last words stay on the page; after three reports' time what the others say counts again."""
    reports = Reports(FULL, {"dead": 1, "alive": 1})
    assert reports.take(1.0, FULL, {"dead": 2, "alive": 2})
    for second, news in ((11.0, False), (21.0, False), (31.0, False), (41.0, True), (51.0, True)):
        load = Load(waiting=second, running=16, busy=2)
        assert reports.take(second, load, {"dead": 2, "alive": second}) == news


def test_a_queue_that_changes_is_news_even_where_no_tokens_are_shown() -> None:
    """Pages of an older vLLM, and an endpoint that becomes idle."""
    reports = Reports(FULL, {})
    assert not reports.take(1.0, FULL, {})
    assert reports.take(2.0, Load(waiting=0, running=0), {})


@pytest.mark.parametrize(("model", "made"), [("qwen", [7.0]), ("qwen:loud", [7.0]), ("", [7.0])])
def test_an_adapter_is_served_by_the_engines_of_its_model(model: str, made: list[float]) -> None:
    """A page shows the model it was loaded for, under that name."""
    assert list(read_made(page({"a": (0, 1, 7)}), model).values()) == made


def test_engines_of_other_models_do_not_count() -> None:
    """One cluster, two endpoints: the page shows both."""
    both = page({"a": (0, 1, 7)}) + "\n" + page({"b": (0, 1, 9)}, model="other")
    assert list(read_made(both, "other").values()) == [9.0]
    assert read_made(both, "third") == {}


@pytest.fixture
async def pages() -> AsyncIterator[dict[str, str]]:
    """Pages of two nodes by path, and under `url` where they are; a path that is missing answers 404."""
    texts: dict[str, str] = {}

    async def show(request: web.Request) -> web.Response:
        if request.path not in texts:
            raise web.HTTPNotFound
        return web.Response(text=texts[request.path])

    app = web.Application()
    app.router.add_get("/{tail:.*}", show)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    texts["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield texts
    await runner.cleanup()


async def test_the_pages_of_all_nodes_are_summed(pages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one node shows is a part; a node that does not answer leaves the sum incomplete."""
    monkeypatch.setattr("airflow_provider_raylm.ray_data.load.RAY_POLL_S", 0.0)
    nodes = [f"{pages['url']}/{name}" for name in ("node1", "node2")]
    pages.update({"/node1": page({"a": (0, 0, 1)}), "/node2": "up 1"})
    reader = LoadReader(f"{pages['url']}/v1", "qwen", "", lambda _: nodes)
    try:
        assert await reader.read() is None  # found; how old it is cannot be told
        pages.update({"/node1": page({"a": (1, 8, 9)}), "/node2": page({"b": (2, 8, 9), "c": (5, 0, 0)})})
        load = await reader.read()
        assert load == Load(waiting=8, running=16)
        assert (load.busy, load.whole) == (2, True)
        del pages["/node2"]
        pages["/node1"] = page({"a": (1, 8, 12)})
        load = await reader.read()
        assert load == Load(waiting=1, running=8)
        assert not load.whole
    finally:
        await reader.close()


async def test_a_queue_that_shows_up_only_at_work_is_found_soon(
    pages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh engine's gauges appear with its first requests; the search goes on, ever more slowly."""
    now_s = 100.0
    monkeypatch.setattr("airflow_provider_raylm.ray_data.load.time", SimpleNamespace(monotonic=lambda: now_s))
    asked: list[float] = []

    def urls(_: str) -> list[str]:
        asked.append(now_s - 100.0)
        return [f"{pages['url']}/node1"]

    reader = LoadReader(f"{pages['url']}/v1", "qwen", "", urls)
    try:
        for _ in range(200):
            assert await reader.read() is None
            now_s += 0.5
        assert asked == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
        pages["/node1"] = page({"a": (1, 8, 9)})
        now_s += 30.0
        assert await reader.read() is None
        assert reader.every_s == RAY_REPORT_S
    finally:
        await reader.close()


async def test_a_page_of_one_server_may_be_one_of_several(pages: dict[str, str]) -> None:
    """`/metrics` behind the endpoint's own address: what it lacks may be at a replica that it does not show."""
    pages["/metrics"] = page({"a": (0, 4, 1)}).replace("ray_vllm_", "vllm:")
    reader = LoadReader(f"{pages['url']}/v1", "qwen", "")
    try:
        load = await reader.read()
        assert load == Load(waiting=0, running=4)
        assert not load.whole
        assert (reader.every_s, reader.late_s) == (1.0, 0.0)
    finally:
        await reader.close()
