"""A button on the task's page that opens the job in the Ray dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

LINK_KEY = "ray_job_link"


@attrs.define()
class RayJobLink(BaseOperatorLink):
    """The job's page in the Ray dashboard, known as soon as the job is submitted."""

    name: str = "Ray job"

    @property
    def xcom_key(self) -> str:
        return LINK_KEY

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """Called when the task ends; the operator keeps the link of its job."""
        return str(getattr(operator, "job_url", "") or "")
