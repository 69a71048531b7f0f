"""The query actor's own decisions; what it does on Ray is tested there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_raylm.ray_data.query import AiQuery
from airflow_provider_raylm.ray_data.requests import Query


def test_a_row_that_cannot_be_read_is_sorted_all_the_same() -> None:
    """Whatever reading its cells raises, its neighbours are put next to their like."""
    actor = AiQuery.__new__(AiQuery)
    actor._query = Query(model="m", base_url="http://h/v1", prompt_col="text", group_by_prefix=True)

    def row(position: int) -> Mapping[str, Any]:
        if position == 1:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")
        return {"text": ["b", "", "a"][position]}

    assert actor._prefix_order(3, row) == [1, 2, 0]
