"""Flow control as a whole, replayed against simulated engines in virtual time."""

from __future__ import annotations

import itertools

import pytest

from airflow_provider_raylm.ray_data.contracts import Begun, Sample
from airflow_provider_raylm.ray_data.flow import Flow, Tally
from airflow_provider_raylm.ray_data.signals import Load
from benchmarks.engine import Engine, Request, Shape
from benchmarks.replay import Replay, fixed, job
from benchmarks.workload import MIXES, Mix

ANSWERS = Mix(name="answers", prompt_tokens=128, completion_tokens=170, spread=0.5)
SMALL = Shape(name="64 sequences", max_num_seqs=64)


def tally(**kwargs: int) -> Tally:
    return Tally(**kwargs)


@pytest.mark.parametrize("signals", ["metrics ttft fit", "ttft fit", "fit", ""])
@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        Shape(name="16 sequences", max_num_seqs=16),
        Shape(name="KV-bound", kv_tokens=20_000),
        Shape(name="two replicas, one shown", max_num_seqs=64, replicas=2, metrics="one"),
        Shape(name="turns away", max_num_seqs=64, reject_above=32, retry_after_s=1.0),
        Shape(name="hangs up", max_num_seqs=64, hangup=0.02),
    ],
    ids=lambda s: s.name,
)
def test_fills_the_server_whatever_it_shows(shape: Shape, signals: str) -> None:
    """From its defaults, at least 95 % of what a limit far above the capacity gets."""
    most = Replay(shape, [fixed(ANSWERS, 300 if shape.reject_above is None else 90)]).run(61).tokens_per_s(20, 60)
    assert Replay(shape, [job(ANSWERS, signals=signals)]).run(61).tokens_per_s(20, 60) >= 0.95 * most


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_follows_the_capacity(before: int, after: int) -> None:
    """Replicas that come or go mid-run are followed within half a minute."""
    shape = Shape(name="changes", max_num_seqs=64, replicas=before, changes=((40.0, after),))
    one = job(ANSWERS)
    replay = Replay(shape, [one]).run(81)
    assert one.trace[35]["limit"] == pytest.approx(64 * before + 16, rel=0.15)
    assert one.trace[75]["limit"] == pytest.approx(64 * after + 16, rel=0.15)
    assert replay.tokens_per_s(70, 80) == pytest.approx(replay.tokens_per_s(25, 38) * after / before, rel=0.05)


def test_late_comers_get_an_equal_share() -> None:
    """Three jobs that start 20 s apart end with equal throughput (Jain's index)."""
    jobs = [job(ANSWERS, seed=i, start_s=20.0 * i) for i in range(3)]
    replay = Replay(Shape(name="256"), jobs).run(100)
    before = [j.tokens for j in jobs]
    assert replay.now_s <= 100
    replay.run(130)
    got = [j.tokens - b for j, b in zip(jobs, before, strict=True)]
    assert sum(got) ** 2 / (3 * sum(g * g for g in got)) > 0.98


def test_a_job_of_higher_priority_gets_more() -> None:
    """Priority high keeps four times as many waiting as normal, and gets about as many times the limit."""
    jobs = [job(ANSWERS, seed=0, priority="high"), job(ANSWERS, seed=1)]
    Replay(Shape(name="256"), jobs).run(90)
    assert jobs[0].trace[-1]["limit"] > 2.5 * jobs[1].trace[-1]["limit"]


def test_someone_else_hardly_waits() -> None:
    """An interactive user beside a saturating job waits less than a second longer for a first token."""
    alone = Replay(Shape(name="256"), [], interactive_per_s=1.0).run(60).waits
    beside = Replay(Shape(name="256"), [job(ANSWERS)], interactive_per_s=1.0).run(90).waits
    late = sorted(w for t, w in beside if t > 20)
    assert late[int(0.95 * len(late))] - sorted(w for _, w in alone)[len(alone) // 2] < 1.0


def test_nothing_is_sent_while_the_server_asks_for_a_pause() -> None:
    """Retry-After is obeyed at once, and afterwards the server is filled little by little."""
    flow = Flow(0.0, first_limit=100)
    flow.holds(40)
    flow.add(10.0, tally(dropped=3), [], retry_after_s=5.0)
    assert flow.free(10.0) == flow.free(14.9) == 0
    assert 0 <= flow.free(15.1) < 10
    assert flow.free(18.0) == flow.limit - 40


def test_while_the_endpoint_is_away_only_probes_start() -> None:
    """Five failures in a row stop everything; one answer starts it again."""
    flow = Flow(0.0, first_limit=100, stall_timeout_s=60.0)
    flow.add(10.0, tally(unreachable=5), [])
    assert flow.away
    assert flow.status(10.0)["state"] == "away"
    assert sum(flow.free(10.0 + t / 10) for t in range(70)) == 2
    assert not flow.stalled(69.0)
    assert flow.stalled(70.0)
    flow.add(71.0, tally(success=1), [])
    assert not flow.away
    assert flow.free(71.0) > 1


def test_tells_how_long_the_endpoint_was_asked() -> None:
    """From the first request to the last reply; neither the time before the rows came nor after they ended counts."""
    flow = Flow(0.0)
    assert flow.status(5.0)["asking_s"] == 0.0
    flow.add(12.0, tally(success=2), [Sample(11.0, 12.0, "success"), Sample(10.0, 11.5, "success")])
    flow.add(13.0, tally(success=1), [Sample(12.0, 12.75, "success")])
    assert flow.status(20.0)["asking_s"] == 2.75


def test_a_late_client_does_not_grow() -> None:
    """When our own event loop lags, more in flight cannot help, and the lag is not taken for a queue."""
    flow = Flow(0.0, first_limit=100)
    flow.loop_lag_s = 1.0
    flow.holds(100)
    flow.see(0.9, Load(waiting=0, running=100))
    flow.tick(1.0)
    assert flow.limit == 100


def test_a_nearly_full_process_before_the_engine_is_not_taken_for_a_queue_nor_given_streams() -> None:
    """Ray Serve before an H200, by what was measured there: 9 ms a request in one process, and 0.3 ms a streamed token.

    Its engine reports every second. From defaults, to the last of 4,000 rows.
    """
    shape = Shape(
        name="Ray Serve",
        max_num_seqs=1024,
        base_ms=6.0,
        per_seq_ms=0.038,
        budget=8192,
        front_ms=9.0,
        chunk_ms=0.3,
        report_s=1.0,
    )
    mix = Mix(name="answers", prompt_tokens=128, completion_tokens=130, spread=0.85, most=2000)
    seconds: dict[str, float] = {}
    ours = job(mix)
    for name, one in (("1024", fixed(mix, 1024)), ("2048", fixed(mix, 2048)), ("ours", ours)):
        one.rows = itertools.islice(one.rows, 4000)
        replay, seconds[name] = Replay(shape, [one]), 0.0
        while one.done < 4000 and seconds[name] < 400:
            seconds[name] += 0.25
            replay.run(seconds[name])
    assert min(seconds.values()) > 30
    assert seconds["ours"] < min(seconds["1024"], seconds["2048"]) / 0.94, seconds
    assert 0 < ours.streamed < 70


def test_metrics_read_before_the_requests_arrived_do_not_count() -> None:
    """A reading taken right after the limit grew cannot show what that did, and does not double it again."""
    flow = Flow(0.0, first_limit=64)
    flow.holds(64)
    flow.see(0.9, Load(waiting=0, running=64))
    flow.tick(1.0)
    assert flow.limit == 128
    flow.see(1.1, Load(waiting=0, running=128))
    flow.holds(128)
    flow.tick(2.0)
    assert flow.limit == 128
    flow.see(2.6, Load(waiting=0, running=128))
    flow.tick(3.0)
    assert flow.limit == 256


def test_metrics_that_change_seldom_outweigh_what_is_timed_here() -> None:
    """Ray's pages change every 10 s. Till then slow first tokens, which a busy proxy also explains, change nothing."""
    flow = Flow(0.0, first_limit=64)
    flow.expect(0.0, 10.0)
    slow = [Sample(0.1 * i, 0.1 * i + 2.0, "success", completion_tokens=50, ttft_s=1.8) for i in range(20)]
    flow.add(4.0, tally(success=20), slow)
    for second in range(1, 10):
        flow.holds(64)
        flow.tick(float(second))
    assert flow.limit == 64
    flow.see(10.0, Load(waiting=0, running=60))
    flow.holds(64)
    flow.tick(10.5)
    assert (flow.limit, flow.signal) == (128, "metrics")


def short_rows(sent_s: float) -> list[Sample]:
    """Rows of 5 to 44 tokens that took 0.01 s each, and 0.1 s besides."""
    return [Sample(sent_s, sent_s + 0.1 + n / 100, "success", completion_tokens=n) for n in range(5, 45)]


def test_pages_that_change_seldom_are_outrun_by_short_rows() -> None:
    """A streamed token costs Ray Serve more than the GPU's time for it: few in slow start, and none after it."""
    flow = Flow(0.0, first_limit=64)
    flow.expect(0.0, 10.0)
    flow.see(0.1, Load(waiting=0, running=64))
    for second in range(1, 8):
        flow.holds(flow.limit)
        assert sum(flow.wants_stream(float(second)) for _ in range(flow.limit)) == 8
        flow.add(float(second), tally(success=40), short_rows(second - 0.6))
        flow.tick(float(second))
    assert flow.limit == 64 * 2**3  # a second for those sent together to pass, one for those that tell
    flow.see(20.0, Load(waiting=400, running=112))
    flow.add(20.0, tally(success=20), [Sample(10.0 + i / 10, 20.0, "success", completion_tokens=50) for i in range(20)])
    for second in (21, 22, 23):
        flow.holds(512)
        flow.tick(float(second))
    assert flow.limit == 256
    assert not any(flow.wants_stream(24.0) for _ in range(512))


@pytest.mark.parametrize(("waited_s", "limit"), [(0.25, 64 * 2**3), (0.5, 64)])
def test_pages_that_change_seldom_are_outrun_by_streams_that_a_busy_proxy_delays(waited_s: float, limit: int) -> None:
    """Ray Serve adds a tenth of a second at 500 requests in flight; a queue of some rows adds more."""
    flow = Flow(0.0, first_limit=64)
    flow.expect(0.0, 10.0)
    flow.see(0.1, Load(waiting=0, running=64))
    for second in range(1, 8):
        flow.holds(flow.limit)
        flow.begun([Begun(second - 0.6, waited_s, 0.01)] * 6)
        flow.tick(float(second))
    assert flow.limit == limit


def test_the_first_report_of_a_page_that_changes_seldom_is_not_waited_out() -> None:
    """It was seen as soon as it changed, so it shows the server as it is: no row need end first."""
    flow = Flow(0.0, first_limit=64)
    flow.expect(0.0, 10.0)
    for second, share in ((1, None), (2, 0.0)):
        flow.holds(64)
        if share is not None:
            flow.see(second - 1.0, Load(waiting=0, running=64, whole=True))
        assert flow.tick(float(second))["waiting_share"] == share
    assert flow.limit == 128


def test_streams_that_something_else_delays_do_not_hide_what_short_rows_tell() -> None:
    """Ray Serve hands streamed tokens on late when it is busy; whole replies it does not."""
    flow = Flow(0.0, first_limit=64)
    flow.expect(0.0, 10.0)
    flow.see(0.1, Load(waiting=0, running=64))
    for second in range(1, 8):
        flow.holds(flow.limit)
        flow.begun([Begun(second - 0.6, 0.5, 0.01)] * 6)
        flow.add(float(second), tally(success=40), short_rows(second - 0.6))
        flow.tick(float(second))
    assert flow.limit == 64 * 2**3


@pytest.mark.parametrize(("waiting", "limit"), [(32, 64), (0, 128)])
def test_streams_do_not_outrun_a_page_that_has_just_shown_a_queue(waiting: int, limit: int) -> None:
    """The page counts all requests at the server, the streams are a few. A page without a queue holds nothing up."""
    flow = Flow(0.0, first_limit=64)
    flow.expect(0.0, 10.0)
    for second in (2, 3):
        flow.holds(64)
        flow.begun([Begun(second - 0.6, 0.1, 0.01)] * 6)
        flow.see(second - 0.1, Load(waiting=waiting, running=64 - waiting))
        flow.tick(float(second))
    assert flow.limit == limit


def test_a_stream_tells_when_it_has_begun() -> None:
    """Rows of minutes behind a gateway: their ends need not be waited for while nothing queues."""
    flow = Flow(0.0, first_limit=64)
    for second in range(1, 8):
        flow.holds(flow.limit)
        flow.begun([Begun(second - 0.5, 0.1, 0.02)] * 6)
        flow.tick(float(second))
    assert flow.limit == 64 * 2**3


def test_requests_sent_at_once_do_not_tell_of_a_queue() -> None:
    """Actors start when the job is long under way; what they send in their first second waits for each other."""
    flow = Flow(0.0, first_limit=64)
    flow.tick(1.0)
    rush = [Sample(30.0, 31.0, "success", completion_tokens=50, ttft_s=0.45) for _ in range(20)]
    for second in (31, 32, 33):
        flow.holds(64)
        flow.add(float(second), tally(success=20), rush)
        flow.tick(float(second))
    assert (flow.limit, flow.signal) == (64, "ttft")


def test_long_rows_are_streamed_less_often_than_short_ones() -> None:
    """A streamed token costs the client and Ray Serve more than the rest of the request."""
    every = []
    for tokens in (10, 300, 3000):
        flow = Flow(0.0)
        for second in range(1, 60):
            flow.add(
                float(second),
                tally(success=100, completion_tokens=100 * tokens),
                [Sample(0.0, 1.0, "success", ttft_s=0.1)],
            )
            flow.tick(float(second))
        every.append(flow.stream_every(60.0))
    assert every == [17, 50, 500]


def test_metrics_that_stopped_changing_are_left_for_what_is_timed_here() -> None:
    """When the pages say nothing new for two turns and a half, probes tell."""
    flow = Flow(0.0, first_limit=64)
    flow.expect(0.0, 10.0)
    slow = [Sample(26 + 0.1 * i, 28 + 0.1 * i, "success", completion_tokens=50, ttft_s=1.8) for i in range(20)]
    flow.add(30.0, tally(success=20), slow)
    flow.holds(64)
    flow.tick(30.5)
    assert flow.signal == "ttft"


def test_streams_no_probes_where_metrics_tell() -> None:
    """Probes cost the client; they are asked for only while nothing cheaper tells."""
    flow = Flow(0.0)
    assert any(flow.wants_stream(0.5) for _ in range(100))
    flow.see(1.0, Load(waiting=0, running=10))
    assert not any(flow.wants_stream(2.0) for _ in range(100))
    assert any(flow.wants_stream(60.0) for _ in range(100))


def test_stops_asking_for_probes_that_never_come() -> None:
    """A server that cannot stream (embeddings) is not asked for ever."""
    flow = Flow(0.0)
    flow.add(1.0, tally(success=1000), [Sample(0.0, 1.0, "success")])
    assert not any(flow.wants_stream(2.0) for _ in range(1000))


def test_answers_that_arrive_whole_are_measured_by_their_length() -> None:
    """A gateway that holds streams back: the fit over finished rows decides, not the probes."""
    flow = Flow(0.0)
    rows = [Sample(10.0, 10.2 + 0.01 * n, "success", 10, n, ttft_s=0.2 + 0.01 * n - 1e-3) for n in range(20, 84)]
    flow.add(12.0, tally(success=len(rows)), rows)
    assert (flow.tick(12.0)["signal"], flow.tick(13.0)["waiting_share"]) == ("fit", pytest.approx(0.13, abs=0.05))


def test_the_engine_loses_no_row_and_no_token() -> None:
    """The simulated engine ends every request with all its tokens, preempted or not, and gives all memory back."""
    engine = Engine(Shape(name="tight", max_num_seqs=32, kv_tokens=3000))
    asked = [Request(50 + i % 70, 20 + i % 90, owner=i) for i in range(200)]
    for request in asked:
        engine.submit(request)
    done = []
    while engine.load:
        done += engine.step()[2]
    assert engine.preempted > 0
    assert sorted(r.owner for r in done) == list(range(200))
    assert all(r.generated == r.completion_tokens for r in done)
    assert engine.kv_used == 0
    assert engine.decoding == 0


def test_a_first_flight_far_too_large_is_noticed_before_it_has_landed() -> None:
    """256 requests at a server for 16, without metrics: the queue is believed while it lasts, not when it is over."""
    one = job(MIXES[1], signals="ttft fit")
    Replay(Shape(name="16 sequences", max_num_seqs=16), [one]).run(20)
    assert one.trace[-1]["limit"] < 128
    assert one.trace[-1]["reason"] == "found the queue"
