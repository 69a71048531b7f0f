"""A Ray head of our own: own temp folder, own free ports, loopback only, and an end that touches nobody else's Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nothing listens on at this moment, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind((LOOPBACK, 0))
        return [int(s.getsockname()[1]) for s in sockets]


@dataclass(kw_only=True)
class RayNode:
    """One started node: the head, or a worker node of it.

    Attributes:
        dashboard_url: `http://127.0.0.1:<port>`, where the Jobs API answers. Empty for a worker node.
        address: `127.0.0.1:<port>` for `ray.init(address=...)`.
        token: Token for `Authorization: Bearer`, `None` with auth off.
        env: Variables a process needs to talk to this cluster.
    """

    address: str
    dashboard_url: str = ""
    token: str | None = field(default=None, repr=False)
    env: dict[str, str] = field(default_factory=dict, repr=False)
    process: subprocess.Popen[bytes]
    temp_dir: Path
    owns_temp_dir: bool = True

    def stop(self, *, timeout_s: float = 3.0) -> None:
        """End this node's processes by their process group, and remove its temp folder."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)  # `ray start --block` ends what it started
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.owns_temp_dir:
            _end_leftovers(self.temp_dir)
            shutil.rmtree(self.temp_dir, ignore_errors=True)


def _end_leftovers(temp_dir: Path) -> None:
    """End processes of this cluster that outlived its raylet; they are recognised by the temp folder they name."""
    import psutil

    mark = str(temp_dir)
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and (
                mark in " ".join(process.cmdline()) or mark in process.environ().get("RAYLM_RAY_TEMP_DIR", "")
            ):
                left.append(process)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def start_head(
    *,
    num_cpus: int = 4,
    num_gpus: int = 0,
    auth: bool = True,
    object_store_mib: int = 256,
    resources: str = "{}",
    env: dict[str, str] | None = None,
    start_timeout_s: float = 180.0,
) -> RayNode:
    """Start a Ray head on loopback and return when its dashboard answers.

    Args:
        num_cpus: Logical CPUs; more than the machine has is fine for small tests.
        num_gpus: Logical GPUs.
        auth: Token authentication on, with a fresh token, or off.
        object_store_mib: Size of the object store in MiB.
        resources: Custom resources as JSON.
        env: More variables for the cluster's processes.
        start_timeout_s: Seconds until the dashboard must answer.

    Raises:
        RuntimeError: The head did not come up; the message ends with its output.
    """
    temp_dir = Path(tempfile.mkdtemp(prefix="raylm-", dir="/tmp"))  # sockets need a short path
    ports = free_ports(9)
    token = secrets.token_hex(32) if auth else None
    cluster_env = _cluster_env(temp_dir, token)
    command = [
        *_ray_command(),
        "--head",
        f"--node-ip-address={LOOPBACK}",
        f"--port={ports[0]}",
        "--include-dashboard=true",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={ports[1]}",
        f"--ray-client-server-port={ports[8]}",
        *_node_arguments(ports[2:8], num_cpus, num_gpus, object_store_mib, resources),
        f"--temp-dir={temp_dir}",
    ]
    patience = {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{start_timeout_s:.0f}"}
    process = _spawn(command, {**cluster_env, **patience, **(env or {})}, temp_dir / "start.log")
    node = RayNode(
        address=f"{LOOPBACK}:{ports[0]}",
        dashboard_url=f"http://{LOOPBACK}:{ports[1]}",
        token=token,
        env=cluster_env,
        process=process,
        temp_dir=temp_dir,
    )
    _await_dashboard(node, start_timeout_s)
    return node


def start_worker(head: RayNode, *, num_cpus: int = 2, num_gpus: int = 0, object_store_mib: int = 128) -> RayNode:
    """Start a second node of `head`'s cluster on this machine. It shares the head's temp folder."""
    command = [
        *_ray_command(),
        f"--address={head.address}",
        f"--node-ip-address={LOOPBACK}",
        *_node_arguments(free_ports(6), num_cpus, num_gpus, object_store_mib, "{}"),
    ]
    process = _spawn(command, head.env, head.temp_dir / f"start-{time.time_ns()}.log")
    return RayNode(
        address=head.address,
        token=head.token,
        env=head.env,
        process=process,
        temp_dir=head.temp_dir,
        owns_temp_dir=False,
    )


@contextlib.contextmanager
def ray_head(**kwargs: object) -> Iterator[RayNode]:
    """`start_head`, stopped at the end whatever happens."""
    node = start_head(**kwargs)  # type: ignore[arg-type]
    try:
        yield node
    finally:
        node.stop()


def _ray_command() -> list[str]:
    # the `ray` script is not where Ray was installed with `pip install --target`
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]


def _node_arguments(ports: list[int], num_cpus: int, num_gpus: int, object_store_mib: int, resources: str) -> list[str]:
    names = (
        "object-manager-port",
        "node-manager-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    )
    return [
        *(f"--{name}={port}" for name, port in zip(names, ports, strict=True)),
        f"--num-cpus={num_cpus}",
        f"--num-gpus={num_gpus}",
        f"--object-store-memory={object_store_mib * 2**20}",
        f"--resources={resources}",
    ]


def _cluster_env(temp_dir: Path, token: str | None) -> dict[str, str]:
    env = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token" if token else "disabled",
        "RAYLM_RAY_TEMP_DIR": str(temp_dir),
        "TMPDIR": str(temp_dir),  # what an engine leaves there when it is killed goes with the folder
    }
    if token:
        token_file = temp_dir / "auth_token"
        token_file.write_text(token)
        token_file.chmod(0o600)
        env["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    return env


def _spawn(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k in ("RAY_DEDUP_LOGS", "RAY_COLOR_PREFIX")
    }
    # a job's `python` is found on PATH: it must be the one that has Ray
    inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            env={**inherited, **env},
            cwd=log.parent,  # a job starts in its cluster's folder, where nothing must stand in for an uploaded module
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _await_dashboard(node: RayNode, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    request = urllib.request.Request(f"{node.dashboard_url}/api/version")
    if node.token:
        request.add_header("Authorization", f"Bearer {node.token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and node.process.poll() is None:
        try:
            with opener.open(request, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    output = (node.temp_dir / "start.log").read_text(errors="replace")[-2000:]
    node.stop()
    raise RuntimeError(f"the Ray head did not answer at {node.dashboard_url} within {timeout_s:.0f} s:\n{output}")
