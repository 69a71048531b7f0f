"""What the machine does meanwhile: GPU load and memory, processes, CPU by kind of process, the server's own gauges."""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import psutil

_GAUGE = re.compile(
    r"^(?:ray_)?vllm[_:](num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total)"
    r"(?:\{[^}]*\})? (\S+)",
    re.MULTILINE,
)


def gpu_snapshot() -> dict[str, Any]:
    """GPU memory in MiB and the processes on the GPU, as nvidia-smi says; and engine processes, as the system says.

    `gpu_mib` is `None` without a GPU.
    """
    engines = 0
    for process in psutil.process_iter(["name", "cmdline"]):
        title = " ".join(process.info["cmdline"] or [process.info["name"] or ""])
        engines += "EngineCore" in title or "RayWorkerWrapper" in title or "LLMServer" in title
    return {
        "gpu_mib": _nvidia_smi("--query-gpu=memory.used"),
        "gpu_processes": _nvidia_smi("--query-compute-apps=pid,process_name,used_memory"),
        "engine_processes": engines,
    }


def gpu_mib() -> int:
    """Memory in use on all GPUs, in MiB; 0 without a GPU."""
    return sum(int(line) for line in _nvidia_smi("--query-gpu=memory.used") or [])


def _nvidia_smi(query: str) -> list[str] | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


class Watch(threading.Thread):
    """Samples the machine twice a second between `start()` and `figures()`.

    Args:
        metrics_urls: Prometheus pages with vLLM's gauges; summed. They may be some seconds old.
    """

    def __init__(self, metrics_urls: Sequence[str] = ()) -> None:
        super().__init__(daemon=True)
        self._urls = metrics_urls
        self._ended = threading.Event()
        self._begun = time.time()
        self._cpu = _cpu_seconds()
        self.samples: list[dict[str, float]] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml: Any = pynvml
        except Exception:  # no GPU, or no driver: the rest is still worth watching
            self._nvml = None

    def run(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self._ended.wait(0.5):
            sample: dict[str, float] = {"t": round(time.time(), 2)}
            if self._nvml:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
                sample["gpu_busy"] = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                sample["gpu_watts"] = round(self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
            for url in self._urls:
                try:
                    with opener.open(url, timeout=2) as page:
                        text = page.read().decode(errors="replace")
                except OSError:
                    continue
                for name, value in _GAUGE.findall(text):
                    sample[name] = sample.get(name, 0.0) + float(value)
            self.samples.append(sample)

    def figures(self) -> dict[str, Any]:
        """Stop, and return means, the trace (one row about every second) and cores used by kind of process."""
        self._ended.set()
        self.join()
        seconds = time.time() - self._begun
        used: dict[str, list[float]] = {}
        for pid, (title, total) in _cpu_seconds().items():
            cores = (total - self._cpu.get(pid, (title, 0.0))[1]) / seconds
            if cores >= 0.03:
                used.setdefault(title, []).append(round(cores, 2))
        figures: dict[str, Any] = {"cores": dict(sorted(used.items(), key=lambda item: -sum(item[1]))[:14])}
        middle = self.samples[len(self.samples) // 5 : -max(1, len(self.samples) // 5)]
        for name in ("gpu_busy", "gpu_watts"):
            if values := [s[name] for s in middle if name in s]:
                figures[name] = round(statistics.fmean(values))
        figures["watch"] = self.samples[::2]
        return figures


def _cpu_seconds() -> dict[int, tuple[str, float]]:
    """CPU seconds so far of each process, with a title that is the same for processes of a kind."""
    seconds = {}
    for process in psutil.process_iter(["pid", "cmdline", "cpu_times"]):
        times, words = process.info["cpu_times"], process.info["cmdline"]
        if times and words:
            # `python -m module` is told apart by its module, Ray's actors by their title
            kept = [w.rsplit("/", 1)[-1] for w in " ".join(words).split() if not w.startswith("-")]
            seconds[process.info["pid"]] = (" ".join(kept[:2])[:60], times.user + times.system)
    return seconds
