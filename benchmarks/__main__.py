"""Run the benchmarks: `python -m benchmarks [sweep] [peers] [client_cost] [fairness] [plot]`, all without arguments.

Prints tables and writes `benchmarks/results/<name>.json` and `flow.svg`. `peers` starts a Ray head of its own.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run what the command line names."""
    asked = sys.argv[1:] or ["sweep", "fairness", "client_cost", "peers", "plot"]
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
    from benchmarks import client_cost, fairness, sweep

    if name == "peers":
        return _with_ray()
    return {"sweep": sweep.run, "fairness": fairness.run, "client_cost": client_cost.run}[name]()


def _with_ray() -> dict[str, Any]:
    import ray

    from benchmarks import peers
    from demo.ray_head import ray_head

    with ray_head(num_cpus=8, auth=False, object_store_mib=512) as node:
        os.environ.update(node.env)
        here = str(Path(__file__).resolve().parent.parent)
        ray.init(address=node.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            return peers.run()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
