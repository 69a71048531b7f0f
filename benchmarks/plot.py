"""The plot for the README: limit, in flight, waiting and tokens per second over time, from a replay."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine import Shape
from benchmarks.replay import Replay, job
from benchmarks.workload import MIXES

UNTIL_S = 120


def draw(path: Path) -> None:
    """One job on a server whose second replica joins at 40 s and leaves at 80 s."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "raylm"
    import matplotlib.pyplot as plt

    one = job(MIXES[1])
    shape = Shape(name="256 sequences a replica", changes=((40.0, 2), (80.0, 1)))
    replay = Replay(shape, [one]).run(UNTIL_S)
    seconds = [row["elapsed_s"] for row in one.trace]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), constrained_layout=True)
    above.plot(seconds, [row["limit"] for row in one.trace], label="limit")
    above.plot(seconds, [row["in_flight"] for row in one.trace], label="in flight", linestyle="--")
    above.plot(range(len(replay.queue)), [waiting for waiting, _ in replay.queue], label="waiting at the server")
    above.set_ylabel("requests")
    above.legend(loc="upper left", frameon=False)
    above.set_title("One job from its defaults; a second replica joins at 40 s and leaves at 80 s", fontsize=10)
    rates = [replay.tokens_per_s(t, t + 1) for t in range(len(replay.served) - 1)]
    below.plot(range(len(rates)), rates, color="tab:green")
    below.set_ylabel("tokens/s")
    below.set_xlabel("seconds")
    below.set_ylim(bottom=0)
    figure.savefig(path, metadata={"Date": None})
