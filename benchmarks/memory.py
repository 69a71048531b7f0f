"""Memory of a whole query job, by the number of rows: what only it holds, of each process, at its highest.

Parquet in, a server that answers 256 requests at a time without delay, Parquet out, on one Ray head. Rows of about 240
bytes, in files of 50,000. What a request in flight takes is `client_cost`'s to tell, so their number stays about the
same. Blocks between the processes lie in Ray's object store, whose size is fixed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from airflow_provider_raylm.ray_data.job import run as run_job
from airflow_provider_raylm.spec import QuerySpec
from benchmarks.endpoint import serve
from benchmarks.server import INSTANT, prompt

ROWS = (10_000, 100_000, 1_000_000)
FILE_ROWS = 50_000
SHAPE = dataclasses.replace(INSTANT, name="256 at once", max_num_seqs=256)
ROLES = {"AiQuery": "query actors", "ray::Keeper": "flow control", "ray::": "reading, writing, and Ray's own"}


class Meter(threading.Thread):
    """Highest memory by role, in MiB: the sum of the processes of that role, without what they share."""

    def __init__(self, head_pid: int) -> None:
        super().__init__(daemon=True)
        self.highest: dict[str, float] = {}
        self._head = psutil.Process(head_pid)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(1.0):
            self._look()

    def _look(self) -> None:
        now: dict[str, float] = {}
        for process in [psutil.Process(), *self._head.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                role = next((role for word, role in ROLES.items() if word in words), None)
                role = "driver" if process.pid == psutil.Process().pid else role
                if role is not None:
                    now[role] = now.get(role, 0.0) + process.memory_full_info().uss / 2**20
        for role, mib in now.items():
            self.highest[role] = round(max(self.highest.get(role, 0.0), mib), 1)

    def stop(self) -> dict[str, float]:
        """The figures."""
        self._over.set()
        self.join()
        return dict(sorted(self.highest.items()))


@contextlib.contextmanager
def _input(count: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").mkdir()
        text = prompt(30, 30)[:220]
        for start in range(0, count, FILE_ROWS):
            ids = range(start, min(start + FILE_ROWS, count))
            table = pa.table({"id": pa.array(ids, pa.int64()), "text": [f"{text} {i:09d}" for i in ids]})
            pq.write_table(table, Path(folder) / "in" / f"{start:09d}.parquet")
        yield Path(folder)


def run(head_pid: int, counts: tuple[int, ...] = ROWS) -> dict[str, Any]:
    """One job for each number of rows. Needs `ray.init`."""
    runs = []
    with serve(SHAPE) as endpoint:
        for count in (1_000, *counts):  # the first to load what is loaded once
            with _input(count) as folder:
                spec = QuerySpec(
                    model="sim",
                    base_url=endpoint.base_url,
                    input_path=str(folder / "in"),
                    output_path=str(folder / "out"),
                    prompt_col="text",
                )
                meter = Meter(head_pid)
                meter.start()
                begin = time.monotonic()
                manifest = run_job(spec)
                seconds = round(time.monotonic() - begin, 1)
                runs.append({"rows": manifest.rows, "errors": manifest.errors, "seconds": seconds, "mib": meter.stop()})
                print(runs[-1], flush=True)
    return {"runs": runs[1:]}
