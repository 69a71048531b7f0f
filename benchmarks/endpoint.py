"""A simulated server in a process of its own, and the time in which it was full."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.engine import Shape
from demo.ray_head import free_ports

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Endpoint:
    """A running simulated server."""

    base_url: str
    pid: int
    root: str = field(repr=False, default="")

    def counters(self) -> dict[str, Any]:
        """Tokens generated so far, and what is there now."""
        with _OPENER.open(f"{self.root}/counters", timeout=30) as response:
            return dict(json.load(response))

    def use_replicas(self, count: int) -> None:
        """From now on requests go to so many of the replicas."""
        _OPENER.open(f"{self.root}/replicas/{count}", data=b"", timeout=30).close()


@contextlib.contextmanager
def serve(shape: str | Shape, *, scale: float = 1.0) -> Iterator[Endpoint]:
    """Start a server of this shape, and end it afterwards."""
    port = free_ports(1)[0]
    name = shape if isinstance(shape, str) else json.dumps(asdict(shape))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.server", "--shape", name, "--port", str(port), "--scale", str(scale)]
    )
    endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", process.pid, f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                endpoint.counters()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.2)
        yield endpoint
    finally:
        process.kill()
        process.wait()


class Watch(threading.Thread):
    """Reads an endpoint's counters twice a second. `rate()` leaves start-up and tail out."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._ended = threading.Event()
        self.seen: list[dict[str, Any]] = []

    def run(self) -> None:
        while not self._ended.wait(0.5):
            with contextlib.suppress(OSError):
                self.seen.append(self._endpoint.counters())

    def stop(self) -> None:
        """End, and keep what was seen while there was work."""
        self._ended.set()
        self.join()

    def rate(self) -> float:
        """Tokens per second in the middle of the run: from a third to nine tenths of the tokens."""
        total = self.seen[-1]["tokens"] if self.seen else 0
        part = [s for s in self.seen if total / 3 <= s["tokens"] <= 0.9 * total]
        if len(part) < 2:
            return 0.0
        return float((part[-1]["tokens"] - part[0]["tokens"]) / (part[-1]["time"] - part[0]["time"]))
