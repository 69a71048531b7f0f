"""Rows to Parquet files in a hidden staging folder; `commit.py` puts them into place.

A write task gets many small pieces from the query actors (Ray bundles them to `MIN_ROWS_PER_WRITE`) and makes few
files of them, rows in input order within each. A file's name is made of its run and its first row, so a write task
that Ray runs again replaces its own file. What a task reports are the stretches of `(block, row)` that its files
hold: the commit takes only reported files, and only if together they hold every row that was read, once.

`postprocess` runs here, before the write. It sees the rows without their identity and may drop or change them; it
may not add any.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray.data.datasource import Datasink

from airflow_provider_raylm.exceptions import OutputError, SpecError
from airflow_provider_raylm.ray_data import storage as store
from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL
from airflow_provider_raylm.ray_data.source import UNIT_BLOCKS
from airflow_provider_raylm.spec import StorageSpec

MIN_ROWS_PER_WRITE = 20_000
MAX_FILE_BYTES = 256 * 2**20
"""In memory; keeps each file far below the size that a store copies in one request."""
_ROW_GROUP_ROWS = 50_000


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """One staged file and what is in it.

    Attributes:
        name: File name in the staging folder; empty when `postprocess` dropped all rows.
        rows: Rows in the file.
        rows_in: Rows before `postprocess`.
        size: Bytes.
        spans: `(block, first row, row after the last)`, what of the input is in it.
        errors_by_type: Rows whose status is not `ok`.
        schema: Of the file.
    """

    name: str
    rows: int
    rows_in: int
    size: int
    spans: tuple[tuple[int, int, int], ...]
    errors_by_type: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))


class StagingSink(Datasink[list[WrittenFile]]):  # type: ignore[misc]  # Ray is not typed
    """Ray Data sink that stages Parquet files.

    Args:
        folder: The staging folder.
        storage: See `open_filesystem`.
        run_id: First part of the files' names.
        output_col: Column with the replies.
        max_rows_per_file: Most rows in one file.
        dropped: Columns that were read for the query only.
        postprocess: `module:function`, see `load_postprocess`.

    Attributes:
        written: After the write, all files.
    """

    def __init__(
        self,
        folder: str,
        storage: StorageSpec | None,
        *,
        run_id: str,
        output_col: str,
        max_rows_per_file: int,
        dropped: Sequence[str] = (),
        postprocess: str | None = None,
    ) -> None:
        self._folder, self._storage = folder, storage
        self._run_id = run_id
        self._output_col = output_col
        self._max_rows = max_rows_per_file
        self._dropped = [BLOCK_COL, ROW_COL, *dropped]
        self._postprocess = postprocess
        self.written: list[WrittenFile] = []

    def get_name(self) -> str:
        return "Output"

    @property
    def min_rows_per_write(self) -> int | None:
        return min(self._max_rows, MIN_ROWS_PER_WRITE)

    def write(self, blocks: Iterable[Any], ctx: Any) -> list[WrittenFile]:
        """Write the pieces of one task to as few files as the limits allow."""
        written: list[WrittenFile] = []
        held: list[pa.Table] = []
        rows = size = 0
        for block in blocks:
            table = block if isinstance(block, pa.Table) else pa.Table.from_pandas(block, preserve_index=False)
            while table.num_rows:
                part = table.slice(0, self._max_rows - rows)
                table = table.slice(part.num_rows)
                held.append(part)
                rows += part.num_rows
                size += part.nbytes
                if rows >= self._max_rows or size >= MAX_FILE_BYTES:
                    written.append(self._write_file(held))
                    held, rows, size = [], 0, 0
        if held:
            written.append(self._write_file(held))
        return written

    def on_write_complete(self, write_result: Any) -> None:
        self.written = [file for files in write_result.write_returns if files for file in files]

    def _write_file(self, tables: list[pa.Table]) -> WrittenFile:
        table = pa.concat_tables(tables).sort_by([(BLOCK_COL, "ascending"), (ROW_COL, "ascending")])
        spans = spans_of(table)
        counted = _count(table.column(self._output_col))
        table = table.drop_columns(self._dropped)
        rows_in = table.num_rows
        if self._postprocess is not None:
            table = apply_postprocess(load_postprocess(self._postprocess), table, self._postprocess)
        name, size = "", 0
        if table.num_rows:
            name = file_name(self._run_id, spans[0])
            with store.explained(self._folder, self._storage):
                fs, folder = store.open_filesystem(self._folder, self._storage)
                size = write_parquet(fs, f"{folder}/{name}", table)
        return WrittenFile(
            name=name, rows=table.num_rows, rows_in=rows_in, size=size, spans=spans, schema=table.schema, **counted
        )


def file_name(run_id: str, span: tuple[int, int, int]) -> str:
    """`part-<run>-<unit>-<block in unit>-<row>.parquet`, the first row in it."""
    unit, block = divmod(span[0], UNIT_BLOCKS)
    return f"part-{run_id}-{unit:06d}-{block:05d}-{span[1]:04d}.parquet"


def write_parquet(fs: Any, path: str, table: pa.Table) -> int:
    """Write one Parquet file and return its bytes."""
    if store.is_local(fs):
        fs.create_dir(path.rpartition("/")[0], recursive=True)
    with fs.open_output_stream(path) as stream:
        pq.write_table(table, stream, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
        return int(stream.tell())


def spans_of(table: pa.Table) -> tuple[tuple[int, int, int], ...]:
    """Stretches of consecutive rows in a table sorted by block and row."""
    blocks = table.column(BLOCK_COL).to_numpy()
    rows = table.column(ROW_COL).to_numpy()
    breaks = np.flatnonzero((np.diff(blocks) != 0) | (np.diff(rows) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(rows)]
    return tuple((int(blocks[a]), int(rows[a]), int(rows[b - 1]) + 1) for a, b in zip(starts, ends, strict=True))


def _count(column: pa.ChunkedArray) -> dict[str, Any]:
    errors: Counter[str] = Counter()
    prompt_tokens = completion_tokens = 0
    for chunk in column.chunks:
        # a null struct is a failed row of on_error="null"
        if chunk.null_count:
            errors["failed"] += chunk.null_count
        prompt_tokens += _sum(chunk, "prompt_tokens")
        completion_tokens += _sum(chunk, "completion_tokens")
        for error in chunk.field("error").filter(chunk.is_valid()).drop_null():
            errors[error["type"].as_py() or "unknown"] += 1
    return {
        "errors_by_type": dict(errors),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }


def _sum(chunk: pa.StructArray, name: str) -> int:
    return int(chunk.field(name).filter(chunk.is_valid()).sum().as_py() or 0)


def load_postprocess(name: str) -> Callable[[Any], Any]:
    """Import `module:function`.

    Raises:
        SpecError: It cannot be imported on the cluster.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as exc:
        raise SpecError(
            f"postprocess {name!r} cannot be imported on the cluster ({exc}); expected 'module:function' of a module "
            "that travels with the job or is installed there"
        ) from exc
    if not callable(found):
        raise SpecError(f"postprocess {name!r} is no function")
    return found  # type: ignore[no-any-return]


def apply_postprocess(function: Callable[[Any], Any], table: pa.Table, name: str) -> pa.Table:
    """Call a user's function on a batch, and keep the types of the columns that it left alone.

    Raises:
        OutputError: It failed, or returned something else than a `pandas.DataFrame` of at most as many rows.
    """
    import pandas as pd

    try:
        result = function(table.to_pandas(integer_object_nulls=True))
    except Exception as exc:
        # the message may quote a row
        raise OutputError(f"postprocess {name!r} raised {type(exc).__name__}") from exc
    if not isinstance(result, pd.DataFrame):
        raise OutputError(f"postprocess {name!r} returned {type(result).__name__}, expected a pandas.DataFrame")
    if len(result) > table.num_rows:
        raise OutputError(
            f"postprocess {name!r} returned {len(result)} rows for {table.num_rows}; it may drop rows but not add any"
        )
    fields, arrays = [], []
    for column in result.columns:
        kind = table.schema.field(column).type if column in table.column_names else None
        try:
            array = pa.Array.from_pandas(result[column], type=kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            try:
                array = pa.Array.from_pandas(result[column])
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as exc:
                raise OutputError(f"postprocess {name!r}: column {column!r} has values of different types") from exc
        fields.append(pa.field(str(column), array.type))
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))
