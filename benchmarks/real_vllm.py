"""`vllm serve` on the CPU with the demo's model, for the benchmarks that compare with the real thing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from demo.model import cpu_dtype
from demo.ray_head import free_ports

MODEL = "smollm2"
MAX_NUM_SEQS = 16
ENGINE = {
    "max_model_len": 1024,
    "max_num_seqs": MAX_NUM_SEQS,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "dtype": cpu_dtype(),
}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class VllmServer:
    """A running server."""

    root: str

    @property
    def base_url(self) -> str:
        """The OpenAI base URL."""
        return f"{self.root}/v1"

    def generated(self) -> float:
        """Tokens generated so far."""
        with _OPENER.open(f"{self.root}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("vllm:generation_tokens_total"))


@contextlib.contextmanager
def serve_vllm(model: Path, log: Path) -> Iterator[VllmServer]:
    """Start it, and end it with all its processes.

    Raises:
        RuntimeError: It did not come up; its output is in `log`.
    """
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += [f"--served-model-name={MODEL}", "--host=127.0.0.1", f"--port={port}", "--no-enable-prefix-caching"]
    command += [
        f"--dtype={ENGINE['dtype']}",
        "--enforce-eager",
        f"--max-num-seqs={MAX_NUM_SEQS}",
        f"--max-model-len={ENGINE['max_model_len']}",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **ENV}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        root = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError), _OPENER.open(f"{root}/health", timeout=5):
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"vllm serve did not come up, see {log}")
            time.sleep(0.5)
        yield VllmServer(root)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
