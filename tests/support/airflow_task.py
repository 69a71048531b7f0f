"""A task instance and its context, as an operator sees them, without a scheduler."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeTaskInstance:
    """The attributes of Airflow's `RuntimeTaskInstance` that the operators read."""

    dag_id: str = "label_reviews"
    task_id: str = "label"
    run_id: str = "scheduled__2026-12-01T00:00:00+00:00"
    map_index: int = -1
    try_number: int = 1
    max_tries: int = 0
    start_date: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc))
    pushed: dict[str, Any] = field(default_factory=dict)

    def xcom_push(self, *, key: str, value: Any) -> None:
        self.pushed[key] = value


class FakeStateStore(dict[str, Any]):
    """Airflow 3.3's task state store: what one task instance remembers across its tries."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


def context(*, store: FakeStateStore | None = None, **ti: Any) -> dict[str, Any]:
    """A context with a task instance of these attributes. `store=None` is an Airflow before 3.3."""
    made: dict[str, Any] = {"ti": FakeTaskInstance(**ti)}
    if store is not None:
        made["task_state_store"] = store
    return made
