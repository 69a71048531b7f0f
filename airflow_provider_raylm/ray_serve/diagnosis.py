"""Why a replica did not start: from Serve's status and the replicas' logs to one sentence."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from airflow_provider_raylm.ray_serve.footprint import belongs, on_nodes

EXCEPTION = re.compile(r"(?:^|[\s:(])((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)$")
# they only say that something else, further up, went wrong
SYMPTOMS = (
    "Engine core initialization failed",
    "See root cause above",
    "RayTaskError",
    "RayActorError",
    "ActorDiedError",
    "The deployment failed to start",
    "EngineDeadError",
    "Failed core proc",
    "WorkerProc initialization failed",
)
FAILED_TIMES = re.compile(r"failed to start (\d+) times in a row")
TAIL_BYTES = 200_000
CAUSE_LIMIT = 600


def root_cause(text: str) -> str | None:
    """The exception in a log that explains the others: the last one that is not a mere symptom.

    Args:
        text: Log of a replica, its engine or of Serve.

    Returns:
        `ValueError: ...` on one line, or `None` when no exception is in it.
    """
    found = [
        f"{match[1].rpartition('.')[2]}: {match[2]}"
        for line in text.splitlines()
        if (match := EXCEPTION.search(line)) and not any(symptom in line for symptom in SYMPTOMS)
    ]
    return found[-1][:CAUSE_LIMIT] if found else None


def failure(app: dict[str, Any] | None, deaths: dict[str, int]) -> str | None:
    """Whether a start has failed for good, and Serve's words about it.

    A start may fail once, as when the card is still occupied by a predecessor that is shutting down. Serve itself
    gives up after three failures, but never while an application is allowed to have no replica.

    Args:
        app: Serve's details of the application, `None` when Serve does not know it.
        deaths: By deployment, replicas of this deploy that died.
    """
    if app is None:
        return "Serve does not know the application any more: someone removed it"
    if app["status"] == "DEPLOY_FAILED":
        messages = (deployment["message"] for deployment in app["deployments"].values())
        return "\n".join(filter(None, (app["message"] or "Serve gave up", *messages)))
    for name, deployment in app["deployments"].items():
        counted = FAILED_TIMES.search(deployment["message"] or "")
        if (counted and int(counted[1]) >= 2) or deployment["status"] == "DEPLOY_FAILED":
            return f"deployment {name}: {deployment['message']}"
        if deaths.get(name, 0) > max(1, deployment.get("target_num_replicas") or 0):
            return f"deployment {name}: its replicas keep dying. {deployment['message'] or ''}"
    return None


def waiting_for(
    app: dict[str, Any] | None, needed: dict[str, float], total: dict[str, float], free: dict[str, float]
) -> str:
    """What a start that is not ready waits for: resources that others hold, or its deployments.

    Args:
        app: Serve's details of the application.
        needed, total, free: Logical resources the application needs, and the cluster has, and has free.
    """
    waiting = [
        f"{name} {deployment['status']}"
        for name, deployment in (app or {"deployments": {}})["deployments"].items()
        if deployment["status"] != "HEALTHY"
    ]
    scarce = [
        f"needs {amount:g} {resource}, {free.get(resource, 0):g} of {total.get(resource, 0):g} free"
        for resource, amount in needed.items()
        if resource in ("GPU", "TPU") and free.get(resource, 0) < amount
    ]
    return "; ".join([*waiting, *scarce]) or "the first answer"


def deaths_by_deployment(app_name: str, before: frozenset[str]) -> dict[str, int]:
    """By deployment, replicas that died and were not among `before` (ids)."""
    counts: dict[str, int] = {}
    for actor in _replica_actors(app_name):
        if actor["State"] == "DEAD" and actor["ActorID"] not in before:
            name = actor["Name"].partition("::")[2].split("#")[1]
            counts[name] = counts.get(name, 0) + 1
    return counts


def replica_ids(app_name: str) -> frozenset[str]:
    """Ids of the application's replica actors, dead ones too."""
    return frozenset(actor["ActorID"] for actor in _replica_actors(app_name))


def cause_in_logs(app_name: str, before: frozenset[str]) -> str | None:
    """Read the logs of the newest replicas and say why they failed."""
    actors = [actor for actor in _replica_actors(app_name) if actor["ActorID"] not in before and actor["Pid"]]
    newest = sorted(actors, key=lambda actor: actor["StartTime"], reverse=True)[:4]
    calls = {
        actor["Address"]["NodeID"]: (
            _read_logs,
            [other["Pid"] for other in newest if other["Address"]["NodeID"] == actor["Address"]["NodeID"]],
        )
        for actor in newest
    }
    causes = [root_cause(text) for texts in on_nodes(calls) for text in texts]
    return next((cause for cause in causes if cause), None)


def _read_logs(pids: list[int]) -> list[str]:
    """On a node: the ends of the logs of its worker processes, newest process first."""
    import ray

    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    texts = []
    for pid in pids:
        text = ""
        for suffix in ("out", "err"):
            for path in folder.glob(f"worker-*-{pid}.{suffix}"):
                with contextlib.suppress(OSError), path.open("rb") as log:
                    log.seek(max(0, path.stat().st_size - TAIL_BYTES))
                    text += log.read().decode(errors="replace") + "\n"
        texts.append(text)
    return texts


def _replica_actors(app_name: str) -> list[dict[str, Any]]:
    import ray

    return [actor for actor in ray._private.state.actors().values() if belongs(actor["Name"], app_name)]
