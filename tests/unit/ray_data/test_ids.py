"""Counting ids: every null and every repetition, however the values are dealt out."""

from __future__ import annotations

import datetime as dt
import decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.ids import check_ids, count_ids, deal_ids
from airflow_provider_raylm.ray_data.source import make_plan

VALUES = {
    "text": ["a", "b", "", "ü"],
    "bytes": [b"a", b"\xff", b"", b"c"],
    "integers": [1, 2**60, 0, -1],
    "floats": [1.5, 2.0, 0.0, -1.0],
    "times": [dt.datetime(2026, 1, day) for day in range(1, 5)],
    "decimals": [decimal.Decimal(n) for n in range(4)],
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", VALUES)
def test_nulls_and_repetitions_are_counted(tmp_path, kind, parts):
    """Across files and tasks: one null, one value three times and one twice are 1 and 3."""
    few = VALUES[kind]
    pq.write_table(pa.table({"id": [*few, few[0]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [few[1], None, few[0]]}), tmp_path / "b.parquet")
    plan = make_plan(str(tmp_path), None, actors=100)
    pieces = [((piece,),) for unit in plan.units for piece in unit]
    assert len(pieces) == 2
    dealt = [deal_ids(plan, units, "id", str(tmp_path), None, parts) for units in pieces]
    shares = [[share] if parts == 1 else share for share in dealt]
    counts = [count_ids(*[share[part] for share in shares]) for part in range(parts)]
    assert [sum(counted) for counted in zip(*counts, strict=True)] == [1, 3]


def test_a_column_that_cannot_name_rows_is_refused(tmp_path):
    """Before any task."""
    pq.write_table(pa.table({"id": [[1]]}), tmp_path / "a.parquet")
    with pytest.raises(SpecError, match=r"id_col 'id' is list<.*expected text"):
        check_ids(make_plan(str(tmp_path), None), "id", str(tmp_path), None, cpus=1)
