"""What an application holds on the cluster, and removing all of it.

Serve's own word that an application is deleted is not enough: a replica's engine runs in processes of its own, and
when the Serve controller is gone, its replicas and placement groups stay. Both are detached, and both carry the
replica's name, `SERVE_REPLICA::<app>#<deployment>#<id>`, by which they are found without Serve's help.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_provider_raylm.exceptions import ServeError

SERVE_NAMESPACE = "serve"
GANG_PREFIX = "SERVE_GANG::"
POLL_S = 0.5

Process = tuple[str, int, float]
"""Node id, process id, start time: a process id alone may be reused."""


@dataclass(frozen=True)
class Footprint:
    """What an application holds now.

    Attributes:
        replicas: Names of live replica actors.
        placement_groups: Ids of their placement groups that are not removed.
        gpus: GPUs that replicas and placement groups hold.
    """

    replicas: tuple[str, ...]
    placement_groups: tuple[str, ...]
    gpus: float

    def __bool__(self) -> bool:
        return bool(self.replicas or self.placement_groups)


def footprint(app_name: str) -> Footprint:
    """Look up what the application holds."""
    from ray.util import list_named_actors, placement_group_table

    replicas = tuple(
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == SERVE_NAMESPACE and belongs(actor["name"], app_name)
    )
    groups: list[str] = []
    gpus = 0.0
    for group_id, group in placement_group_table().items():
        if belongs(group["name"], app_name) and group["state"] != "REMOVED":
            groups.append(group_id)
            if group["state"] == "CREATED":
                gpus += sum(bundle.get("GPU", 0) for bundle in group["bundles"].values())
    gpus += sum(map(_gpus_outside_groups, replicas))
    return Footprint(replicas, tuple(groups), gpus)


def _gpus_outside_groups(replica: str) -> float:
    """GPUs that a live replica's actor holds itself; in a placement group, Ray calls the resource by another name."""
    import ray
    from ray.core.generated.gcs_pb2 import ActorTableData

    with contextlib.suppress(ValueError):  # it ended in between
        actor_id = ray.get_actor(replica, namespace=SERVE_NAMESPACE)._actor_id
        actor = ActorTableData.FromString(ray._private.state.state.get_actor_info(actor_id) or b"")
        if actor.state == ActorTableData.ALIVE:
            return float(actor.required_resources.get("GPU", 0))
    return 0.0


def belongs(name: str, app_name: str) -> bool:
    """Whether an actor or placement group of this name is a replica's of the application."""
    return name.startswith((f"SERVE_REPLICA::{app_name}#", f"{GANG_PREFIX}{app_name}_"))


def processes(replicas: tuple[str, ...]) -> tuple[Process, ...]:
    """Processes of replicas and everything they started, such as vLLM's engine."""
    import ray

    pids: dict[str, list[int]] = {}
    for name in replicas:
        with contextlib.suppress(ValueError):  # it ended in between
            actor_id = ray.get_actor(name, namespace=SERVE_NAMESPACE)._actor_id.hex()
            info = ray._private.state.actors(actor_id)
            if info and info["Pid"]:
                pids.setdefault(info["Address"]["NodeID"], []).append(info["Pid"])
    found = on_nodes({node: (_family, node, node_pids) for node, node_pids in pids.items()})
    return tuple(process for family in found for process in family)


def alive(known: tuple[Process, ...], *, kill: bool = False) -> tuple[Process, ...]:
    """Those of the processes that still run; with `kill`, after killing them."""
    by_node: dict[str, list[Process]] = {}
    for process in known:
        by_node.setdefault(process[0], []).append(process)
    found = on_nodes({node: (_still_there, on_node, kill) for node, on_node in by_node.items()})
    return tuple(process for on_node in found for process in on_node)


def on_nodes(calls: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Run `function(*args)` on each node that is still alive; a lost node has no processes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    refs = [
        ray.remote(num_cpus=0, max_retries=0)(function)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(*args)
        for node, (function, *args) in calls.items()
        if node in there
    ]
    results = []
    for ref in refs:
        with contextlib.suppress(ray.exceptions.RayError):  # the node died under the task
            results.append(ray.get(ref, timeout=60))
    return results


def _family(node: str, pids: list[int]) -> list[Process]:
    import ray  # noqa: F401 # brings psutil along
    import psutil  # isort: skip

    family: list[Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid)
            family += [(node, p.pid, p.create_time()) for p in (parent, *parent.children(recursive=True))]
    return family


def _still_there(known: list[Process], kill: bool) -> list[Process]:
    import ray  # noqa: F401 # brings psutil along
    import psutil  # isort: skip

    there: list[Process] = []
    for node, pid, started in known:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                if kill:
                    process.kill()
                there.append((node, pid, started))
    return there


def remove_app(
    app_name: str, *, timeout_s: float, say: Callable[[str], None], is_ours: Callable[[], bool] = lambda: True
) -> bool:
    """Remove an application and prove that nothing of it is left. Works without Serve, too.

    Args:
        app_name: Application to remove; others are left alone. A deploy that hands it to Serve once more, late, does
            not bring it back.
        timeout_s: Seconds until everything must be gone. After half of it, what is left is killed.
        say: Takes lines of progress.
        is_ours: Whether this removal is still to be done. Once it was finished by someone else, an application of that
            name is a new one.

    Returns:
        Whether there was anything to remove.

    Raises:
        ServeError: Something is left after `timeout_s`; the message names it.
    """
    deadline = time.monotonic() + timeout_s
    serve = _serve_client()
    status = _status(serve, app_name)
    held = footprint(app_name)
    if status is None and not held:
        return False
    known, seen = status is not None, set(held.replicas)
    left = processes(held.replicas)
    say(
        f"removing {app_name!r}: {len(held.replicas)} replicas, {len(left)} processes, "
        f"{len(held.placement_groups)} placement groups, {held.gpus:g} GPUs"
    )
    force_at = time.monotonic() if not known else deadline - timeout_s / 2
    while is_ours():
        if serve is not None and status not in (None, "DELETING"):
            serve.delete_apps([app_name], blocking=False)
        forced = time.monotonic() >= force_at
        if forced:
            _kill(held)
        if not held and status is None:
            left = alive(left, kill=forced)
            if not left:
                return True
            force_at = min(force_at, time.monotonic() + 10)  # engines end within seconds of their replica
        if time.monotonic() >= deadline:
            raise ServeError(
                f"application {app_name!r} is not gone after {timeout_s:.0f} s: "
                + "; ".join(_leftovers(held, left, status is not None))
            )
        time.sleep(POLL_S)
        status = _status(serve, app_name)
        held = footprint(app_name)
        if new := set(held.replicas) - seen:
            seen |= new
            left += processes(tuple(new))
    say("somebody else has removed it")
    return True


def _leftovers(held: Footprint, left: tuple[Process, ...], registered: bool) -> list[str]:
    return [
        *(["Serve still lists it"] if registered else []),
        *([f"replicas {list(held.replicas)}"] if held.replicas else []),
        *([f"placement groups {list(held.placement_groups)}"] if held.placement_groups else []),
        *([f"processes {[f'{pid} on node {node[:8]}' for node, pid, _ in left]}"] if left else []),
    ]


def _serve_client() -> Any | None:
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def _status(serve: Any | None, app_name: str) -> str | None:
    """Serve's word about an application, `None` when it does not know it or is gone itself."""
    import ray

    if serve is None:
        return None
    try:
        app = serve.get_serve_details()["applications"].get(app_name)
    except ray.exceptions.RayActorError:
        return None
    return None if app is None else getattr(app["status"], "value", app["status"])


def _kill(held: Footprint) -> None:
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for name in held.replicas:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))
    for group_id in held.placement_groups:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
