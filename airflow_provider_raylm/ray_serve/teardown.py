"""The teardown job: `python -m airflow_provider_raylm.ray_serve.teardown`. It ends when the application is gone.

Releases the holder's lease. When nobody else holds the application, removes it and proves that replicas, engine
processes and reservations are gone. Nothing to remove is success; something left at the deadline is an error.
"""

from __future__ import annotations

from typing import Any

from airflow_provider_raylm.job_main import run_job, say
from airflow_provider_raylm.ray_serve import cluster, footprint, keeper, serve_state
from airflow_provider_raylm.spec import TeardownResult, TeardownSpec


def main(spec: TeardownSpec) -> TeardownResult:
    """Release the lease, and remove the application when it was the last one.

    Raises:
        ServeError: Something of the application is left at the deadline.
    """
    import ray

    cluster.connect()
    handle = keeper.find_keeper(spec.app_name)
    view: dict[str, Any] = {}
    if handle is not None:
        try:
            left, closing = ray.get(handle.release.remote(spec.holder))
            if not closing:
                say(f"{spec.app_name!r} stays: {', '.join(left) or 'it was deployed without a lease'}")
                return TeardownResult(app_name=spec.app_name, state="leased", leases=tuple(left))
            view = ray.get(handle.view.remote())
        except ray.exceptions.RayActorError:  # it removed the application and ended in between
            handle = None
    if handle is None and spec.holder is not None and _is_foreign(spec.app_name):
        say(f"{spec.app_name!r} runs, but was not deployed by this provider: left alone")
        return TeardownResult(app_name=spec.app_name, state="absent")
    removed = footprint.remove_app(
        spec.app_name,
        timeout_s=spec.timeout_s,
        say=say,
        is_ours=lambda: keeper.is_keeper(spec.app_name, handle),
    )
    if handle is not None:
        try:
            view = ray.get(handle.view.remote())
            ray.get(handle.forget.remote())
            ray.kill(handle)
        except ray.exceptions.RayActorError:
            say("its keeper is gone already")
    lived_s = view["now_s"] - view["created_s"] if view else None
    say(f"{spec.app_name!r}: {'gone' if removed else 'was not there'}")
    return TeardownResult(
        app_name=spec.app_name,
        state="removed" if removed else "absent",
        lived_s=None if lived_s is None else round(lived_s, 1),
        gpu_seconds=round(view["gpu_seconds"], 1) if view else None,
    )


def _is_foreign(app_name: str) -> bool:
    """Whether Serve runs an application of this name that no deploy of ours ever claimed."""
    serve = serve_state.client()
    if serve is None or keeper.remembers(app_name):
        return False
    return app_name in serve_state.details(serve)["applications"]


if __name__ == "__main__":
    run_job(TeardownSpec, main)
