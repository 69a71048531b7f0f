"""What is running, for whom, until when: `python -m airflow_provider_raylm.ray_serve.status`, on the cluster.

Prints a line for each application of this provider, and names the ones that others run.
"""

from __future__ import annotations

from typing import Any

from airflow_provider_raylm.job_main import say
from airflow_provider_raylm.ray_serve import cluster, keeper, serve_state


def main() -> None:
    """Print the status of every application on the cluster."""
    cluster.connect()
    serve = serve_state.client()
    running = serve_state.details(serve)["applications"] if serve is not None else {}
    if serve is None:
        say("Serve does not run on this cluster")
    for app_name in keeper.kept_apps():
        for line in describe(app_name, view_of(app_name), running.pop(app_name, None)):
            say(line)
    if running:
        say(f"not of this provider: {', '.join(sorted(running))}")


def view_of(app_name: str) -> dict[str, Any] | None:
    """The keeper's view of an application, `None` when it ended in between."""
    import ray

    try:
        view: dict[str, Any] = ray.get(keeper.open_keeper(app_name).view.remote(), timeout=30)
    except ray.exceptions.RayError:
        return None
    return view


def describe(app_name: str, view: dict[str, Any] | None, running: dict[str, Any] | None) -> list[str]:
    """Lines about one application.

    Args:
        app_name: The application.
        view: What its keeper knows.
        running: Serve's details of it.
    """
    state = running["status"] if running else "not in Serve"
    if view is None:
        return [f"{app_name}: {state}"]
    now_s = view["now_s"]
    result = view["result"] or {}
    lines = [
        f"{app_name}: {state}, lives {now_s - view['created_s']:.0f} s, {view['gpus']:g} GPUs, "
        f"{view['gpu_seconds']:.0f} GPU-seconds, {result.get('base_url', 'not ready yet')} "
        f"{', '.join(result.get('models', ()))}".rstrip()
    ]
    if view["closing_s"] is not None:
        lines.append(f"  being removed since {now_s - view['closing_s']:.0f} s")
    elif view["kept"]:
        lines.append("  stays until it is torn down")
    lines += [f"  held by {holder} for {view['leases'][holder] - now_s:.0f} s more" for holder in view["holders"]]
    return lines


if __name__ == "__main__":
    main()
