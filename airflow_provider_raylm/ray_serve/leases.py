"""Leases for jobs that use an endpoint: renew while you live, and it stays.

Light to import and to call; works from any process that is connected to the cluster.
"""

from __future__ import annotations

import contextlib

from airflow_provider_raylm.ray_serve.keeper import find_keeper

CALL_TIMEOUT_S = 10.0


def renew(app_name: str, holder: str, ttl_s: float) -> bool:
    """Hold an application for `ttl_s` seconds from now. Call it well before the last claim runs out.

    Returns:
        False when the application is being removed, has no keeper, or the keeper did not answer in time. The endpoint
        may still answer; try again at the next turn.
    """
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        if (keeper := find_keeper(app_name)) is not None:
            return bool(ray.get(keeper.renew.remote(holder, ttl_s), timeout=CALL_TIMEOUT_S))
    return False
