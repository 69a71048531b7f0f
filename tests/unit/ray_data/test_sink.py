"""The user's function on the way out."""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_raylm.ray_data.sink import apply_postprocess


def test_postprocess_leaves_large_integers_beside_nulls_as_they_are() -> None:
    """pandas would make them floating point, and round what is above 2**53."""
    table = pa.table({"id": pa.array([2**53 + 1, None, -5], pa.int64())})
    assert apply_postprocess(lambda frame: frame, table, "m:f").equals(table)
