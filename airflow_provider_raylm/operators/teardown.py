"""Take an endpoint down and see that it is gone: replicas, engine processes, reserved GPUs.

Running it twice, or after the endpoint has gone, is a success. Other applications are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.operators.deploy import lease_of
from airflow_provider_raylm.operators.ray import RaySubmitJobOperator, checked, required_result
from airflow_provider_raylm.outcome import Outcome
from airflow_provider_raylm.spec import TeardownSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

TEARDOWN_ENTRYPOINT = "python -m airflow_provider_raylm.ray_serve.teardown"


class TeardownServeOperator(RaySubmitJobOperator):
    """Release a claim on a Serve application, and remove the application when nobody holds one.

    Returns the fields of `spec.TeardownResult` (`state`: `removed`, `absent` or `leased`, ...) and `submission_id`.

    Args:
        app_name: Application to remove. Not needed with `deploy`.
        deploy: What the deploy task returned (`deploy.output`): its application and its lease.
        lease: The `lease` argument of the deploy operator, to release this run's claim even if the deploy failed and
            returned nothing.
        holder: Lease to release. Default: that of `lease`, else the one in `deploy`; without any, the application is
            removed whoever holds it.
        removal_timeout: Seconds until replicas, engines and reservations must be gone.
        **kwargs: See `RaySubmitJobOperator`.
    """

    template_fields: Sequence[str] = (*RaySubmitJobOperator.template_fields, "app_name", "deploy", "lease", "holder")
    ui_color = "#fbe9e7"

    def __init__(
        self,
        *,
        app_name: str | None = None,
        deploy: dict[str, Any] | None = None,
        lease: bool | str | float | dict[str, Any] | None = None,
        holder: str | None = None,
        removal_timeout: float = 300.0,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("entrypoint", TEARDOWN_ENTRYPOINT)
        kwargs.setdefault("reuse_succeeded", "never")  # that it was gone once says nothing about now
        super().__init__(**kwargs)
        self.app_name = app_name
        self.deploy = deploy
        self._claims_with_deploy = deploy is not None
        self.lease = lease
        self.holder = holder
        self.removal_timeout = removal_timeout

    def spec(self, context: Context) -> TeardownSpec:
        deploy = self.deploy or {}
        if not isinstance(deploy, dict):
            raise SpecError(f"{self.task_id}: deploy is what the deploy task returned, got {type(deploy).__name__}")
        app_name = self.app_name or deploy.get("app_name")
        if not app_name:
            raise SpecError(f"{self.task_id}: app_name or deploy says what to take down, got neither")
        lease = lease_of(self.lease, context)
        if self._claims_with_deploy and not deploy and not self.holder and lease is None:
            raise SpecError(
                f"{self.task_id}: the deploy task returned nothing, so whose lease to release is unknown; give lease= "
                "as at the deploy task. A deploy that failed has cleaned up, and a lease that is not renewed runs out"
            )
        spec = TeardownSpec(
            app_name=app_name,
            holder=self.holder or (lease.holder if lease else (deploy.get("lease") or {}).get("holder")),
            timeout_s=self.removal_timeout,
        )
        return checked(spec, self.task_id)

    def result(self, outcome: Outcome, context: Context) -> dict[str, Any]:
        return {**required_result(outcome), "submission_id": outcome.submission_id}
