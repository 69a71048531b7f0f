"""That a column of the input names its rows: no null, no value twice. Known before the first request is sent.

Afterwards would be too late: an input that has to be mended is another input, and its replies would be paid for again.
Only the column is read. Tasks deal its values out by their hash, so that equal ones meet in the same task, each of
which counts a million or so; the driver holds counts only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import ray

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.source import Piece, Plan, read_piece
from airflow_provider_raylm.spec import StorageSpec

_READERS = 64
_MOST_PARTS = 256
_PART_ROWS = 2**20
_PART_BYTES = 64 * 2**20


def check_ids(plan: Plan, column: str, path: str, storage: StorageSpec | None, *, cpus: float) -> None:
    """Make sure that a column's values name the rows.

    Args:
        plan: The input; has the column.
        column: Its name.
        path, storage: One of the input paths, to open the file system by.
        cpus: Of each task.

    Raises:
        SpecError: A value is null or comes twice, or the column is a list or struct.
        StorageError: The store refused.
    """
    kind = plan.schema.field(column).type
    if pa.types.is_nested(kind):
        raise SpecError(f"id_col {column!r} is {kind}; expected text, bytes, numbers or times")
    parts = math.ceil(plan.size / _PART_BYTES if plan.rows is None else plan.rows / _PART_ROWS)
    parts = min(max(parts, 1), _MOST_PARTS)
    readers = min(len(plan.units), _READERS)
    deal = ray.remote(deal_ids).options(num_returns=parts, num_cpus=cpus)
    count = ray.remote(count_ids).options(num_cpus=cpus)
    known = ray.put(plan)
    dealt = [deal.remote(known, plan.units[i::readers], column, path, storage, parts) for i in range(readers)]
    shares = [[ref] if parts == 1 else ref for ref in dealt]
    counts = ray.get([count.remote(*[share[part] for share in shares]) for part in range(parts)])
    nulls, repeated = (sum(counted) for counted in zip(*counts, strict=True)) if readers else (0, 0)
    if nulls or repeated:
        raise SpecError(
            f"id_col {column!r} does not name the rows: {nulls} of them have none and {repeated} have one that "
            "another row has before them; nothing was asked. Mend the input, or leave id_col out: rows are told apart "
            "by file and position anyway"
        )


def deal_ids(
    plan: Plan,
    units: Sequence[Sequence[Piece]],
    column: str,
    path: str,
    storage: StorageSpec | None,
    parts: int,
) -> Any:
    """The column's values in some units, dealt out into `parts` arrays by their hash."""
    schema = pa.schema([plan.schema.field(column)])
    kind = schema.field(0).type
    bytes_kind = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    found: list[list[pa.Array]] = [[] for _ in range(parts)]
    for unit in units:
        for piece in unit:
            for table in read_piece(plan.files[piece.file], piece, plan.input_format, schema, path, storage):
                values = table.column(0).combine_chunks()
                if parts == 1:
                    found[0].append(values)
                    continue
                keys = (values if bytes_kind else values.cast(pa.string())).to_numpy(zero_copy_only=False)
                shares = pd.util.hash_array(keys, categorize=False) % np.uint64(parts)
                for part in range(parts):
                    found[part].append(values.filter(pa.array(shares == part)))
    arrays = [pa.chunked_array(chunks, kind) for chunks in found]
    return arrays[0] if parts == 1 else arrays


def count_ids(*shares: pa.ChunkedArray) -> tuple[int, int]:
    """Nulls among the values, and values that came before."""
    values = pa.chunked_array([chunk for share in shares for chunk in share.chunks], shares[0].type)
    there = len(values) - values.null_count
    return values.null_count, there - pc.count_distinct(values, mode="only_valid").as_py()
