"""Input files as a plan: the same files give the same row numbers, so that a stored reply finds its row again.

Ray Data's own readers number nothing and may split differently from run to run. Here the driver lists the files
once and cuts them into *units*, one read task each: stretches of rows for Parquet (cut at row groups where those
are small), stretches of bytes for JSON Lines, whole files for CSV and compressed text; small files share a unit. A
unit yields *blocks* of at most `BLOCK_ROWS` rows. Block number and row number travel with each row as `BLOCK_COL`
and `ROW_COL` until the sink. The plan is stored with the run, and an attempt that takes the run up reads it instead
of planning again.

How many rows were read is proven, not assumed: each unit leaves its count in the run's folder when it was read to
the end, and the commit compares the written rows with it.

Columns: Parquet files with different schemas are read as their union when that loses nothing (a missing column
becomes null, integers and floats widen, integers beside floats become floats); anything else is refused with both
files named. JSON Lines and CSV types are inferred from all of the text up to `SCAN_BYTES`, from the head of every file
beyond. In CSV only an empty cell without quotes is null. Folders `key=value` *below* the input path become string
columns, as Spark and Ray read them; those that are part of the input path itself do not, and where a file has a column
of that name, the file's values count.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.fs as pafs
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from airflow_provider_raylm.exceptions import SpecError, StorageError
from airflow_provider_raylm.ray_data import storage as store
from airflow_provider_raylm.ray_data.batch_files import INPUT_SCHEMA, read_line
from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL
from airflow_provider_raylm.spec import InputFormat, StorageSpec

BLOCK_ROWS = 1024
UNIT_BLOCKS = 2**20
"""Block number = unit × this + position of the block in its unit."""

MIN_UNIT_ROWS, MAX_UNIT_ROWS = 64, 8192
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 2**16, 32 * 2**20
SCAN_BYTES = 256 * 2**20
_HEAD_BYTES = 2**20
_READ_BYTES = 4 * 2**20
_CSV_BLOCK_BYTES = (_READ_BYTES, 2**26, 2**30)
"""A row must fit into a block, and blocks take memory: the next size is for files in which one does not."""
_MAX_CUTS_PER_ROW_GROUP = 8  # each cut decodes its row group from the start

_SUFFIXES: dict[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
}
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class InputFile:
    """One input file. `rows` is `None` for text; `keys` are the `key=value` folders above it."""

    path: str
    size: int
    changed_s: float | None
    rows: int | None = None
    keys: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A stretch of one file: rows of a Parquet file, bytes of JSON Lines, or all of it (`stop` is `None`)."""

    file: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is read, in which order, as which columns.

    Attributes:
        input_format: Of all files.
        files: Sorted by path.
        units: Pieces of each read task.
        schema: Columns of the rows, without `BLOCK_COL` and `ROW_COL`.
        rows: Rows of all files; `None` for text.
    """

    input_format: InputFormat
    files: tuple[InputFile, ...]
    units: tuple[tuple[Piece, ...], ...]
    schema: pa.Schema

    @property
    def rows(self) -> int | None:
        return sum(file.rows for file in self.files if file.rows is not None) if self._counted else None

    @property
    def _counted(self) -> bool:
        return all(file.rows is not None for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def to_json(self) -> str:
        return json.dumps(
            {
                "input_format": self.input_format,
                "files": [dataclasses.astuple(file) for file in self.files],
                "units": [[dataclasses.astuple(piece) for piece in unit] for unit in self.units],
                "schema": base64.b64encode(self.schema.serialize()).decode(),
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        raw = json.loads(text)
        return cls(
            input_format=raw["input_format"],
            files=tuple(
                InputFile(path, size, changed_s, rows, tuple((key, value) for key, value in keys))
                for path, size, changed_s, rows, keys in raw["files"]
            ),
            units=tuple(tuple(Piece(*piece) for piece in unit) for unit in raw["units"]),
            schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(raw["schema"]))),
        )


def list_input(
    paths: str | Sequence[str], storage: StorageSpec | None, input_format: InputFormat | None
) -> tuple[InputFormat, tuple[InputFile, ...]]:
    """List the input files of one or more paths.

    Hidden files (`_SUCCESS`, `.part`) are skipped, and so are files with a suffix of another format.

    Returns:
        The format and the files sorted by path, each once.

    Raises:
        SpecError: A path does not exist or holds no file of the format, or the formats are mixed.
        StorageError: The store refused.
    """
    found: dict[str, InputFile] = {}
    skipped: list[str] = []
    by_suffix = "jsonl" if input_format == "openai_batch" else input_format
    for path in [paths] if isinstance(paths, str) else paths:
        fs, root = store.open_filesystem(path, storage)
        with store.explained(path, storage):
            # a store is listed first: it says why it refuses a listing, but not why it refuses to look at an object
            entries = [] if store.is_local(fs) and os.path.isfile(root) else store.list_files(fs, root)
            if not entries:
                store.check_bucket(fs, root)
                info = fs.get_file_info(root)
                if info.type == pafs.FileType.NotFound:
                    raise SpecError(f"input_path {path!r} does not exist")
                if info.type == pafs.FileType.File:
                    changed_s = info.mtime.timestamp() if info.mtime else None
                    entries = [store.FileEntry(root, info.size, changed_s)]
                else:
                    raise SpecError(f"input_path {path!r} holds no files (names with a leading _ or . are skipped)")
        wanted = [e for e in entries if len(entries) == 1 or not by_suffix or _format(e.path) in (by_suffix, None)]
        skipped += [e.path for e in entries if e not in wanted]
        for e in wanted:
            found[e.path] = InputFile(e.path, e.size, e.changed_s, keys=_keys(store.relative(e.path, root)))
    formats = {_format(path) for path in found}
    if input_format is None:
        if len(formats - {None}) > 1:
            raise SpecError(f"input_path holds files of several formats {sorted(map(str, formats))}; set input_format")
        input_format = next(iter(formats - {None}), None)
        if input_format is None:
            raise SpecError(
                f"input_path: the format of {min(found)!r} is not known by its suffix; set input_format to parquet, "
                "jsonl, csv or openai_batch"
            )
        found = {path: file for path, file in found.items() if _format(path) == input_format}
    if not found:
        raise SpecError(f"input_path holds no {input_format} file; there are {skipped[:3]}")
    return input_format, tuple(found[path] for path in sorted(found))


def _format(path: str) -> InputFormat | None:
    name = path.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return next((fmt for suffix, fmt in _SUFFIXES.items() if name.endswith(suffix)), None)


def _keys(relative: str) -> tuple[tuple[str, str | None], ...]:
    pairs = (part.partition("=") for part in relative.split("/")[:-1] if "=" in part)
    return tuple((key, None if value == _HIVE_NULL else urllib.parse.unquote(value)) for key, _, value in pairs if key)


def make_plan(
    paths: str | Sequence[str],
    storage: StorageSpec | None,
    *,
    input_format: InputFormat | None = None,
    columns: Sequence[str] | None = None,
    text_columns: Sequence[str] = (),
    actors: int = 1,
    listing: tuple[InputFormat, tuple[InputFile, ...]] | None = None,
) -> Plan:
    """Read schemas and sizes, and cut the files into units.

    Args:
        paths: File, folder or list of them.
        storage: See `open_filesystem`.
        input_format: `None` goes by the suffix.
        columns: Columns to keep, in this order; `None` keeps all.
        text_columns: Columns that stay text although they look like numbers or dates (CSV), and that exist even when
            the input has no row to show them (JSON Lines).
        actors: Units are made small enough to keep this many readers busy.
        listing: What `list_input` returned, if it was called already.

    Raises:
        SpecError: See `list_input`; also a missing column, or schemas that do not go together.
        StorageError: The store refused.
    """
    input_format, files = listing or list_input(paths, storage, input_format)
    first = paths if isinstance(paths, str) else paths[0]
    fs, _ = store.open_filesystem(first, storage)
    with store.explained(first, storage):
        if input_format == "parquet":
            files, schema, groups = _parquet_footers(fs, files)
            units = _parquet_units(files, groups, actors)
        else:
            schema = _text_schema(fs, files, input_format, text_columns)
            units = _text_units(files, input_format, actors)
    names = dict.fromkeys(key for file in files for key, _ in file.keys)
    for name in names:
        if name not in schema.names:
            schema = schema.append(pa.field(name, pa.string()))
    for name in (BLOCK_COL, ROW_COL):
        if name in schema.names:
            raise SpecError(f"the input has a column {name!r}, a name this job needs for itself; rename it")
    if columns is not None:
        check_columns(columns, schema)
        schema = pa.schema([schema.field(name) for name in columns])
    for field in schema:
        if "struct<>" in str(field.type):
            raise SpecError(
                f"the input's column {field.name!r} holds empty objects only ({{}}), which Parquet cannot store; name "
                "the other columns in input_columns"
            )
    return Plan(input_format, files, units, schema)


def check_columns(names: Sequence[str], schema: pa.Schema) -> None:
    """Make sure that the input has these columns.

    Raises:
        SpecError: Naming those it has.
    """
    if missing := [name for name in names if name not in schema.names]:
        raise SpecError(f"the input has no column {missing[0]!r}; it has {schema.names}")


def _parquet_footers(fs: Any, files: tuple[InputFile, ...]) -> tuple[tuple[InputFile, ...], pa.Schema, list[list[int]]]:
    """Rows of each file, the schema of all of them, and the rows of each row group."""

    def footer(file: InputFile) -> tuple[pa.Schema, list[int]]:
        try:
            with pq.ParquetFile(store.open_object(fs, file.path), pre_buffer=False) as parquet:
                meta = parquet.metadata
                rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
                return parquet.schema_arrow.remove_metadata(), rows
        except pa.ArrowInvalid as exc:
            raise SpecError(f"input file {file.path!r} is no Parquet file: {exc}") from exc

    footers = store.each(footer, files)
    schema = unify([(file.path, schema) for file, (schema, _) in zip(files, footers, strict=True)])
    counted = tuple(dataclasses.replace(file, rows=sum(rows)) for file, (_, rows) in zip(files, footers, strict=True))
    return counted, schema, [rows for _, rows in footers]


def unify(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema that holds the columns of all, if nothing is lost by it.

    Args:
        schemas: `(path, schema)` of each file.

    Raises:
        SpecError: Two files have a column in types that do not go together.
    """
    fields: dict[str, tuple[pa.DataType, str]] = {}
    for path, schema in schemas:
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise SpecError(f"input file {path!r} has the column {twice!r} twice")
        for field in schema:
            kind = _without_views(field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
            if field.name not in fields:
                fields[field.name] = (kind, path)
                continue
            known, where = fields[field.name]
            if known.equals(kind):
                continue
            joined = _join_types(known, kind)
            if joined is None:
                raise SpecError(
                    f"column {field.name!r} is {known} in {where!r} and {kind} in {path!r}; "
                    "convert the files, or read them in separate runs"
                )
            fields[field.name] = (joined, where)
    return pa.schema(
        [pa.field(name, pa.string() if pa.types.is_null(kind) else kind) for name, (kind, _) in fields.items()]
    )


def _join_types(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if a.equals(b):
        return a
    if types.is_list(a) and types.is_list(b):
        value = _join_types(a.value_type, b.value_type)
        return None if value is None else pa.list_(value)
    if types.is_struct(a) and types.is_struct(b):
        fields = {field.name: field.type for field in a}
        for field in b:
            joined = _join_types(fields.get(field.name, field.type), field.type)
            if joined is None:
                return None
            fields[field.name] = joined
        return pa.struct(list(fields.items()))
    if types.is_nested(a) or types.is_nested(b) or types.is_null(a) or types.is_null(b):
        option = "default"  # only nulls and missing fields of structs
    elif any(kind(a) and kind(b) for kind in (_is_number, types.is_decimal, _is_text, _is_bytes, _is_time)):
        option = "permissive"
    else:
        return None
    try:
        left, right = pa.schema([("x", a)]), pa.schema([("x", b)])
        return pa.unify_schemas([left, right], promote_options=option).field("x").type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _parquet_units(files: tuple[InputFile, ...], groups: list[list[int]], actors: int) -> tuple[tuple[Piece, ...], ...]:
    rows = sum(map(sum, groups))
    size = sum(file.size for file in files)
    target = min(max(math.ceil(rows / (4 * actors)), MIN_UNIT_ROWS), MAX_UNIT_ROWS)
    if size > MAX_UNIT_BYTES:
        target = max(1, min(target, math.ceil(rows * MAX_UNIT_BYTES / size)))
    pieces: list[tuple[Piece, int]] = []
    for index, counts in enumerate(groups):
        start = 0
        for count in counts:
            cuts = min(math.ceil(count / target), _MAX_CUTS_PER_ROW_GROUP)
            step = math.ceil(count / cuts) if cuts else 0
            for offset in range(0, count, step or 1):
                part = min(step, count - offset)
                pieces.append((Piece(index, start + offset, start + offset + part), part))
            start += count
    return _pack(pieces, target)


def _text_units(files: tuple[InputFile, ...], input_format: InputFormat, actors: int) -> tuple[tuple[Piece, ...], ...]:
    size = sum(file.size for file in files)
    target = min(max(math.ceil(size / (4 * actors)), MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    pieces: list[tuple[Piece, int]] = []
    for index, file in enumerate(files):
        if file.size == 0:
            continue
        if input_format == "csv" or _codec(file.path):
            pieces.append((Piece(index), file.size))
            continue
        step = math.ceil(file.size / math.ceil(file.size / target))
        pieces += [
            (Piece(index, start, min(start + step, file.size)), min(step, file.size - start))
            for start in range(0, file.size, step)
        ]
    return _pack(pieces, target)


def _pack(pieces: list[tuple[Piece, int]], target: int) -> tuple[tuple[Piece, ...], ...]:
    """Put consecutive pieces together until the next would exceed the target; a stretch of one file stays one piece."""
    units: list[list[Piece]] = []
    room = 0
    for piece, weight in pieces:
        if not units or weight > room:
            units.append([])
            room = target
        last = units[-1][-1] if units[-1] else None
        if last and last.file == piece.file and last.stop == piece.start:
            units[-1][-1] = Piece(piece.file, last.start, piece.stop)
        else:
            units[-1].append(piece)
        room -= weight
    return tuple(tuple(unit) for unit in units)


def _codec(path: str) -> str | None:
    return next((codec for suffix, codec in _COMPRESSED.items() if path.lower().endswith(suffix)), None)


def _text_schema(
    fs: Any, files: tuple[InputFile, ...], input_format: InputFormat, text_columns: Sequence[str]
) -> pa.Schema:
    if input_format == "openai_batch":
        return INPUT_SCHEMA
    limit = None if sum(file.size for file in files) <= SCAN_BYTES else _HEAD_BYTES

    def infer(file: InputFile) -> pa.Schema:
        if file.size == 0:
            return pa.schema([])
        if input_format == "csv":
            return _csv_schema(fs, file, limit, text_columns)
        schema: pa.Schema | None = None
        for chunk in _line_chunks(fs, file, 0, limit):
            part = _settled(_read_json(chunk, None, file).schema)
            schema = part if schema is None else unify([(file.path, schema), (file.path, part)])
        return schema if schema is not None else pa.schema([])

    schemas = store.each(infer, files)
    schema = unify(list(zip([file.path for file in files], schemas, strict=True)))
    if not schema.names:
        schema = pa.schema([(name, pa.string()) for name in dict.fromkeys(text_columns)])
    return schema


def _settled(schema: pa.Schema) -> pa.Schema:
    """JSON has no times: text that looks like one stays text."""
    return pa.schema([pa.field(field.name, _without_times(field.type)) for field in schema])


def _without_times(kind: pa.DataType) -> pa.DataType:
    return _rebuilt(kind, lambda leaf: pa.string() if pa.types.is_timestamp(leaf) else leaf)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Views of text and bytes, which Parquet files of other tools bring along, as text and bytes."""
    if "_view" not in str(kind):
        return kind
    return _rebuilt(kind, lambda leaf: {"string_view": pa.string(), "binary_view": pa.binary()}.get(str(leaf), leaf))


def _rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _rebuilt(f.type, change)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(_rebuilt(kind.value_type, change))
    return change(kind)


def _csv_schema(fs: Any, file: InputFile, limit: int | None, text_columns: Sequence[str]) -> pa.Schema:
    types = {name: pa.string() for name in text_columns}
    for block_size in _CSV_BLOCK_BYTES:
        with store.open_object(fs, file.path, _codec(file.path)) as stream:
            try:
                if limit is None:
                    return pa_csv.read_csv(stream, **_csv_options(block_size, types)).schema
                with pa_csv.open_csv(stream, **_csv_options(block_size, types)) as reader:
                    return reader.schema  # its types are those of the first block
            except pa.ArrowInvalid as exc:
                error = _csv_error(file, exc)
                if not _is_cut(exc):
                    raise error from exc
    raise error


def _csv_options(block_size: int, types: dict[str, pa.DataType]) -> dict[str, Any]:
    return {
        "read_options": pa_csv.ReadOptions(block_size=block_size),
        "parse_options": pa_csv.ParseOptions(newlines_in_values=True),
        "convert_options": pa_csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    }


def _is_cut(exc: pa.ArrowInvalid) -> bool:
    """Whether a row did not fit into a block."""
    return "straddl" in str(exc)


def _csv_error(file: InputFile, exc: pa.ArrowInvalid) -> SpecError:
    words = f"a row is larger than {_CSV_BLOCK_BYTES[-1]} bytes" if _is_cut(exc) else exc
    return SpecError(f"input file {file.path!r}: {words}")


class PlannedSource(Datasource):  # type: ignore[misc]  # Ray is not typed
    """Ray Data source of a `Plan`; each row carries `BLOCK_COL` and `ROW_COL`.

    Args:
        plan: What is read.
        path: One of the input paths, to open the file system by.
        storage: See `open_filesystem`.
        counts_folder: Where each unit leaves the number of rows it had, as `open_filesystem` takes it.
        counts_storage: Storage of that folder.
    """

    def __init__(
        self,
        plan: Plan,
        path: str,
        storage: StorageSpec | None,
        counts_folder: str,
        counts_storage: StorageSpec | None,
    ) -> None:
        super().__init__()
        self._plan = plan
        self._place = (path, storage)
        self._counts = (counts_folder, counts_storage)

    def get_name(self) -> str:
        return "Input"

    def estimate_inmemory_data_size(self) -> int | None:
        return self._plan.size * (4 if self._plan.input_format == "parquet" else 1)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One task per unit; `parallelism` is not asked, since the plan is fixed."""
        plan = self._plan
        schema = tracked(plan.schema)
        tasks = []
        for index, unit in enumerate(plan.units):
            sources = [(plan.files[piece.file], piece) for piece in unit]
            read = functools.partial(
                _read_unit, index, sources, plan.input_format, plan.schema, self._place, self._counts
            )
            read.__name__ = "read_input"  # type: ignore[attr-defined]  # Ray names the task by it
            size = sum((piece.stop or 0) - piece.start or file.size for file, piece in sources)
            rows = size if plan.input_format == "parquet" else None
            meta = BlockMetadata(num_rows=rows, size_bytes=None, input_files=None, exec_stats=None)
            tasks.append(ReadTask(read, meta, schema=schema, per_task_row_limit=per_task_row_limit))
        return tasks


def tracked(schema: pa.Schema) -> pa.Schema:
    """A plan's schema with the two columns that travel from source to sink."""
    return schema.append(pa.field(BLOCK_COL, pa.int64())).append(pa.field(ROW_COL, pa.int64()))


def _read_unit(
    unit: int,
    sources: list[tuple[InputFile, Piece]],
    input_format: str,
    schema: pa.Schema,
    place: tuple[str, StorageSpec | None],
    counts: tuple[str, StorageSpec | None],
) -> Iterator[pa.Table]:
    block = unit * UNIT_BLOCKS
    rows = 0
    for file, piece in sources:
        for table in read_piece(file, piece, input_format, schema, *place):
            for offset in range(0, table.num_rows, BLOCK_ROWS):
                part = table.slice(offset, BLOCK_ROWS)
                count = part.num_rows
                rows += count
                yield part.append_column(BLOCK_COL, pa.repeat(pa.scalar(block, pa.int64()), count)).append_column(
                    ROW_COL, pa.array(range(count), pa.int64())
                )
                block += 1
    with store.explained(*counts):
        fs, folder = store.open_filesystem(*counts)
        store.write_bytes(fs, f"{folder}/{unit:06d}.json", json.dumps({"unit": unit, "rows": rows}).encode())
    if rows == 0:
        yield tracked(schema).empty_table()


def read_counts(folder: str, storage: StorageSpec | None) -> dict[int, int]:
    """Rows of each unit that was read to its end, `{unit: rows}`."""
    with store.explained(folder, storage):
        fs, root = store.open_filesystem(folder, storage)
        entries = store.list_files(fs, root)
        texts = store.each(lambda entry: store.read_bytes(fs, entry.path) or b"{}", entries)
    counts = (json.loads(text) for text in texts)
    return {raw["unit"]: raw["rows"] for raw in counts if raw}


def read_piece(
    file: InputFile, piece: Piece, input_format: str, schema: pa.Schema, path: str, storage: StorageSpec | None
) -> Iterator[pa.Table]:
    """Read a stretch of a file, the same tables each time.

    A slow model keeps a file open for longer than a role's keys last. The file is then opened with new ones, and the
    tables that were read already are passed over.

    Args:
        file, piece, input_format, schema: Of the plan.
        path, storage: One of the input paths, to open the file system by.

    Raises:
        StorageError: The store refused.
    """
    read, before = 0, -1
    while True:
        try:
            with store.explained(path, storage, name=file.path):
                fs, _ = store.open_filesystem(path, storage)
                for table in itertools.islice(_read_piece(fs, file, piece, input_format, schema), read, None):
                    read += 1
                    yield table
            return
        except StorageError as exc:
            if not exc.expired or exc.refused or read == before:
                raise
            before = read


def _read_piece(fs: Any, file: InputFile, piece: Piece, input_format: str, schema: pa.Schema) -> Iterator[pa.Table]:
    if input_format == "parquet":
        tables = _read_parquet(fs, file, piece, schema)
    elif input_format == "csv":
        tables = _read_csv(fs, file, schema)
    elif input_format == "openai_batch":
        tables = (_read_batch_lines(chunk, file) for chunk in _line_chunks(fs, file, piece.start, piece.stop))
    else:
        tables = (_read_json(chunk, schema, file) for chunk in _line_chunks(fs, file, piece.start, piece.stop))
    for table in tables:
        if table.num_rows:
            # each line of JSON has its own columns: one without a folder's column takes the folder's value
            yield _conform(table, schema, file, fill=input_format == "jsonl")


def _conform(table: pa.Table, schema: pa.Schema, file: InputFile, *, fill: bool) -> pa.Table:
    keys = dict(file.keys)
    columns = []
    for field in schema:
        own = table.column(field.name) if field.name in table.column_names else None
        try:
            if own is not None and not own.type.equals(field.type):
                own = own.cast(field.type)
            if own is None or (fill and own.null_count and field.name in keys):
                folder = pa.scalar(keys.get(field.name), pa.string()).cast(field.type)
                own = pa.repeat(folder, table.num_rows) if own is None else pc.coalesce(own, folder)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            raise SpecError(f"input file {file.path!r}, column {field.name!r}: {exc}") from exc
        columns.append(own)
    if not columns:
        raise SpecError("input_columns is empty: a row needs at least the prompt's column")
    return pa.Table.from_arrays(columns, schema=schema)


def _read_parquet(fs: Any, file: InputFile, piece: Piece, schema: pa.Schema) -> Iterator[pa.Table]:
    stop = file.rows if piece.stop is None else piece.stop
    with pq.ParquetFile(store.open_object(fs, file.path), pre_buffer=False, buffer_size=_READ_BYTES) as parquet:
        groups, first, at = [], None, 0
        for index in range(parquet.metadata.num_row_groups):
            count = parquet.metadata.row_group(index).num_rows
            if at < cast(int, stop) and at + count > piece.start:
                groups.append(index)
                first = at if first is None else first
            at += count
        if at != file.rows:
            raise StorageError(f"input file {file.path!r} changed while it was read: {file.rows} rows, now {at}")
        present = [name for name in schema.names if name in parquet.schema_arrow.names]
        at = first or 0
        for batch in parquet.iter_batches(batch_size=BLOCK_ROWS, row_groups=groups, columns=present):
            begin, end = max(piece.start - at, 0), min(cast(int, stop) - at, batch.num_rows)
            at += batch.num_rows
            if begin < end:
                part = batch.slice(begin, end - begin)
                if present:
                    yield pa.Table.from_batches([part])
                else:
                    yield pa.table({BLOCK_COL: pa.nulls(part.num_rows, pa.int64())})
            if at >= cast(int, stop):
                return


def _read_csv(fs: Any, file: InputFile, schema: pa.Schema) -> Iterator[pa.Table]:
    wanted = {field.name: field.type for field in schema}
    open_file = functools.partial(store.open_object, fs, file.path, _codec(file.path))
    rows = 0
    for block_size in _CSV_BLOCK_BYTES:
        skip = rows
        with open_file() as head, open_file() as stream:
            try:
                # a column without a type gets that of the first block, and the rest of it may not fit
                with pa_csv.open_csv(head, **_csv_options(block_size, wanted)) as reader:
                    types = {name: wanted.get(name, pa.binary()) for name in reader.schema.names}
                with pa_csv.open_csv(stream, **_csv_options(block_size, types)) as reader:
                    for batch in reader:
                        part = batch.slice(min(skip, batch.num_rows))
                        skip -= batch.num_rows - part.num_rows
                        rows += part.num_rows
                        yield pa.Table.from_batches([part])
                return
            except pa.ArrowInvalid as exc:
                error = _csv_error(file, exc)
                if not _is_cut(exc):
                    raise error from exc
    raise error


def _line_chunks(fs: Any, file: InputFile, start: int, stop: int | None) -> Iterator[bytes]:
    """Whole lines whose first byte lies in `[start, stop)`, some MiB at a time."""
    codec = _codec(file.path)
    with store.open_object(fs, file.path, codec) as stream:
        at = start
        rest = b""
        if start:
            # the line that runs across `start` belongs to the piece before; one that begins at it is ours
            stream.seek(start - 1)
            at = start - 1
            while True:
                data = stream.read(_READ_BYTES)
                cut = data.find(b"\n")
                if cut >= 0 or not data:
                    break
                at += len(data)
            if not data:
                return
            at += cut + 1
            rest = data[cut + 1 :]
        # `at` is the position of `rest`, which begins a line
        while stop is None or at < stop:
            data = stream.read(_READ_BYTES)
            rest += data
            if stop is not None and at + len(rest) >= stop:
                end = rest.find(b"\n", stop - 1 - at)  # the end of the last line that begins before `stop`
                if end >= 0:
                    yield rest[: end + 1]
                    return
            if not data:
                if rest.strip():
                    yield rest
                return
            if stop is None or at + len(rest) < stop:
                end = rest.rfind(b"\n") + 1
                if end:
                    yield rest[:end]
                    rest = rest[end:]
                    at += end


def _read_json(chunk: bytes, schema: pa.Schema | None, file: InputFile) -> pa.Table:
    if not chunk.strip():
        return pa.table({})
    options = pa_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    try:
        return pa_json.read_json(
            io.BytesIO(chunk), read_options=pa_json.ReadOptions(block_size=len(chunk) + 1), parse_options=options
        )
    except pa.ArrowInvalid as exc:
        raise SpecError(f"input file {file.path!r} is no JSON Lines file of one schema: {exc}") from exc


def _read_batch_lines(chunk: bytes, file: InputFile) -> pa.Table:
    try:
        rows = [read_line(line) for line in chunk.split(b"\n") if line.strip()]
    except SpecError as exc:
        raise SpecError(f"input file {file.path!r}: {exc}") from exc
    return pa.Table.from_pylist(rows, schema=INPUT_SCHEMA)
