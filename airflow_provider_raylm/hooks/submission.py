"""Ray's `JobSubmissionClient`, used only where it does what nobody should write again: packaging and uploading files.

It is made safe on the way: every request has a timeout, the address is the connection's and nothing else (Ray lets
`RAY_API_SERVER_ADDRESS` and `RAY_ADDRESS` override it), no token of the worker's own environment is sent to it (Ray
adds one when `RAY_AUTH_MODE=token`), `~/.netrc` does not replace its `Authorization`, and redirects are not followed.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from airflow_provider_raylm.exceptions import RayUnreachableError
from airflow_provider_raylm.hooks.jobs_client import Cluster, check_status

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

UPLOAD_TIMEOUT_S = 300.0
"""The head stores an upload in its object store before it answers."""


@functools.cache
def _client_class() -> type[Any]:
    import ray
    import requests
    from ray.job_submission import JobSubmissionClient

    for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they write to stderr, which Airflow shows as errors

    class Client(JobSubmissionClient):  # type: ignore[misc]
        def __init__(self, cluster: Cluster) -> None:
            # JobSubmissionClient.__init__ reads the environment and sends requests: its base class does neither
            self._client_ray_version = ray.__version__
            super(JobSubmissionClient, self).__init__(
                address=cluster.url, cookies=dict(cluster.cookies), verify=cluster.verify
            )
            self._headers = dict(cluster.headers)
            self._timeout_s = cluster.timeout_s

        def _check_connection_and_version(self, *args: Any, **kwargs: Any) -> None:
            """The first real request shows whether the cluster answers."""

        def _do_request(
            self, method: str, endpoint: str, *, data: bytes | None = None, json_data: Any = None, **kwargs: Any
        ) -> requests.Response:
            url = f"{self._address}{endpoint}"
            try:
                reply = requests.request(
                    method,
                    url,
                    data=data,
                    json=json_data,
                    headers=self._headers,
                    cookies=self._cookies,
                    verify=self._verify,
                    auth=lambda request: request,
                    allow_redirects=False,
                    timeout=UPLOAD_TIMEOUT_S if data else self._timeout_s,
                    **kwargs,
                )
            except requests.exceptions.RequestException as exc:
                raise RayUnreachableError(f"{url} did not answer: {type(exc).__name__}: {exc}") from exc
            if reply.status_code != 404:  # "no such package" is an answer
                check_status(url, reply.status_code, reply.text, reply.headers.get("Location", ""))
            return reply

    return Client


def submission_client(cluster: Cluster) -> JobSubmissionClient:
    """A client of Ray's own class for `cluster`. Sends nothing yet."""
    return _client_class()(cluster)
