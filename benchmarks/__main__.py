"""Run the benchmarks: `python -m benchmarks [NAME ...]`, all of them but `memory` without arguments.

`sweep`, `unseen`, `fairness`: the controller in virtual time. `client_cost`, `peers`: against a simulated server.
`offline`, `simulator_check`: beside real vLLM on the CPU. `plot`: the picture for the README. Prints tables and writes
`benchmarks/results/<name>.json` and `flow.svg`. `peers`, `offline` and `memory` start a Ray head of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ALL = ("sweep", "unseen", "fairness", "client_cost", "plot", "peers", "simulator_check", "offline")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run what the command line names."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started is ended then, too
    asked = sys.argv[1:] or ALL
    RESULTS.mkdir(exist_ok=True)
    for name in asked:
        print(f"== {name}", flush=True)
        if name == "plot":
            from benchmarks.plot import draw

            draw(RESULTS / "flow.svg")
            continue
        result = {"benchmark": name, "python": platform.python_version(), "cpus": os.cpu_count(), **_run(name)}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def _run(name: str) -> dict[str, Any]:
    from benchmarks import client_cost, fairness, simulator_check, sweep

    if name in ("peers", "offline", "memory"):
        return _with_ray(name)
    return {
        "sweep": sweep.run,
        "unseen": sweep.run_unseen,
        "fairness": fairness.run,
        "client_cost": client_cost.run,
        "simulator_check": simulator_check.run,
    }[name]()


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    """These variables for a while; the folder for temporary files, which is among them, is looked up anew."""
    saved = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        tempfile.tempdir = None


def _with_ray(name: str) -> dict[str, Any]:
    import ray

    from benchmarks import memory, offline, peers
    from demo.ray_head import ray_head

    with ray_head(num_cpus=8, auth=False, object_store_mib=512) as node, _environment(node.env):
        here = str(Path(__file__).resolve().parent.parent)
        ray.init(address=node.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            return {"peers": peers.run, "offline": offline.run, "memory": lambda: memory.run(node.process.pid)}[name]()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
