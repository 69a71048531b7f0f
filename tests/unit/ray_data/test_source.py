"""Planned input: every row once, numbered the same way each time, and clear words about input that cannot be read."""

from __future__ import annotations

import csv
import functools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data import source, storage
from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL
from airflow_provider_raylm.ray_data.source import Plan, PlannedSource, list_input, make_plan, read_counts


def read_all(plan: Plan, path, counts) -> pa.Table:
    tasks = PlannedSource(plan, str(path), None, str(counts), None).get_read_tasks(1)
    tables = [table for task in tasks for table in task()]
    return pa.concat_tables(tables) if tables else source.tracked(plan.schema).empty_table()


def check_numbering(table: pa.Table, counts: dict[int, int]) -> None:
    keys = list(zip(table[BLOCK_COL].to_pylist(), table[ROW_COL].to_pylist(), strict=True))
    assert len(set(keys)) == len(keys)
    assert sum(counts.values()) == len(keys)


@pytest.mark.parametrize("row_group", [1, 7, 500, 100_000])
@pytest.mark.parametrize("actors", [1, 16])
def test_parquet_rows_are_read_once_however_the_file_is_cut(tmp_path, row_group, actors):
    """Units and row groups do not lose or double rows, in input order."""
    folder = tmp_path / "in"
    folder.mkdir()
    for part in range(3):
        ids = list(range(part * 1500, (part + 1) * 1500))
        pq.write_table(pa.table({"id": ids}), folder / f"{part}.parquet", row_group_size=row_group)
    plan = make_plan(str(folder), None, actors=actors)
    table = read_all(plan, folder, tmp_path / "counts")
    assert table["id"].to_pylist() == list(range(4500))
    assert plan.rows == 4500
    check_numbering(table, read_counts(str(tmp_path / "counts"), None))


@pytest.mark.parametrize("unit_bytes", [1, 37, 1000, 10**6])
@pytest.mark.parametrize("read_bytes", [5, 64, 10**6])
@pytest.mark.parametrize("end", ["", "\n"])
def test_json_lines_are_read_once_wherever_the_bytes_are_cut(tmp_path, monkeypatch, unit_bytes, read_bytes, end):
    """A line belongs to the piece that its first byte is in, whatever the sizes of pieces and reads."""
    monkeypatch.setattr(source, "MIN_UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(source, "_READ_BYTES", read_bytes)
    lines = [json.dumps({"id": i, "text": "长" * (i % 23)}, ensure_ascii=i % 2 == 0) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + end, encoding="utf-8")
    plan = make_plan(str(tmp_path / "a.jsonl"), None, actors=50)
    table = read_all(plan, tmp_path, tmp_path / "counts")
    assert table["id"].to_pylist() == list(range(60))
    check_numbering(table, read_counts(str(tmp_path / "counts"), None))


def test_csv_keeps_line_breaks_and_text_that_looks_like_numbers(tmp_path):
    """Quoted line breaks stay in their row; a text column keeps its zeros."""
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], ["1", "007"], ["2", "a\nb"]])
    plan = make_plan(str(tmp_path), None, text_columns=["text"])
    table = read_all(plan, tmp_path, tmp_path.parent / "counts")
    assert table.select(["id", "text"]).to_pylist() == [{"id": 1, "text": "007"}, {"id": 2, "text": "a\nb"}]


def test_csv_text_that_reads_like_nothing_stays_text(tmp_path):
    """Only an empty cell without quotes is null."""
    _write(tmp_path, a__csv='id,text,n\n1,NA,1\n2,"null",\n3,nan,3\n4,N/A,4\n5,"",5\n6,,6\n')
    table = read_all(make_plan(str(tmp_path), None), tmp_path, tmp_path.parent / "counts-null")
    assert table["text"].to_pylist() == ["NA", "null", "nan", "N/A", "", None]
    assert table["n"].to_pylist() == [1, None, 3, 4, 5, 6]


def test_a_csv_column_that_is_not_asked_for_ends_no_run(tmp_path, monkeypatch):
    """Whatever is in it, far below the rows that its type would be guessed from."""
    monkeypatch.setattr(source, "_CSV_BLOCK_BYTES", (100,))
    _write(tmp_path, a__csv="text,n\n" + "a,1\n" * 100 + "b,word\n")
    table = read_all(make_plan(str(tmp_path), None, columns=["text"]), tmp_path, tmp_path.parent / "counts-other")
    assert table["text"].to_pylist() == ["a"] * 100 + ["b"]


@pytest.mark.parametrize("scan", [0, 2**30])
def test_csv_cells_may_be_larger_than_a_block(tmp_path, monkeypatch, scan):
    """Rows before the large one are numbered once, whether all of the text is looked at or its head."""
    monkeypatch.setattr(source, "SCAN_BYTES", scan)
    monkeypatch.setattr(source, "_CSV_BLOCK_BYTES", (100, 400, 20_000))
    cells = ["a\nb" if i % 3 else "x" * (i * 10) for i in range(200)]
    for name, part in (("a", cells), ("b", cells[::-1])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerows([["id", "text"], *enumerate(part)])
    read = functools.partial(read_all, make_plan(str(tmp_path), None), tmp_path)
    table = read(tmp_path.parent / "counts-large")
    assert table["text"].to_pylist() == cells + cells[::-1]
    assert table["id"].to_pylist() == [*range(200), *range(200)]
    check_numbering(table, read_counts(str(tmp_path.parent / "counts-large"), None))
    assert read(tmp_path.parent / "counts-large").equals(table)


def test_a_csv_cell_larger_than_any_block_is_named(tmp_path, monkeypatch):
    """The largest block is the end of it."""
    monkeypatch.setattr(source, "_CSV_BLOCK_BYTES", (10, 20))
    _write(tmp_path, a__csv="text\n" + "x" * 100 + "\n")
    with pytest.raises(SpecError, match=r"a\.csv.*larger than 20 bytes"):
        make_plan(str(tmp_path), None)


def test_batch_files_become_rows_with_the_request_as_text(tmp_path):
    """Requests of different shapes are one schema."""
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/x", "body": {"k" * (i + 1): i}} for i in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plan = make_plan(str(tmp_path), None, input_format="openai_batch")
    table = read_all(plan, tmp_path, tmp_path.parent / "counts-batch")
    assert table["body"].to_pylist() == ['{"k": 0}', '{"kk": 1}']


def test_a_folder_of_batch_files_is_read_and_other_formats_in_it_are_not(tmp_path):
    """Batch files are known by the suffix of JSON Lines."""
    line = json.dumps({"custom_id": "1", "body": {}})
    _write(tmp_path, a__jsonl=line, b__jsonl=line, c__csv="x")
    input_format, files = list_input(str(tmp_path), None, "openai_batch")
    assert input_format == "openai_batch"
    assert [storage.relative(file.path, str(tmp_path)) for file in files] == ["a.jsonl", "b.jsonl"]


def test_a_stored_plan_is_the_same_plan(tmp_path):
    """JSON and back, so that a run taken up numbers its rows as before."""
    (tmp_path / "d=1").mkdir()
    pq.write_table(pa.table({"a": [1], "s": [{"x": [1.0]}]}), tmp_path / "d=1" / "a.parquet")
    plan = make_plan(str(tmp_path), None)
    assert Plan.from_json(plan.to_json()) == plan


def test_folders_below_the_input_path_become_columns(tmp_path):
    """Hive partitions below the path are columns; those in the path itself are not."""
    for day in ("2026-12-01", "2026-12-02"):
        folder = tmp_path / "in" / f"dt={day}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"a": [1]}), folder / "a.parquet")
    plan = make_plan(str(tmp_path / "in"), None)
    assert read_all(plan, tmp_path, tmp_path / "c1")["dt"].to_pylist() == ["2026-12-01", "2026-12-02"]
    assert make_plan(str(tmp_path / "in" / "dt=2026-12-01"), None).schema.names == ["a"]


def test_schemas_are_joined_when_nothing_is_lost(tmp_path):
    """Missing columns become null, integers widen."""
    pq.write_table(pa.table({"a": pa.array([1], pa.int32())}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": pa.array([2**40]), "b": ["x"]}), tmp_path / "2.parquet")
    plan = make_plan(str(tmp_path), None)
    table = read_all(plan, tmp_path, tmp_path.parent / "counts-join")
    assert table.select(["a", "b"]).to_pylist() == [{"a": 1, "b": None}, {"a": 2**40, "b": "x"}]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_integers_in_one_place_and_floats_in_another_are_floats(tmp_path, suffix):
    """Across the files of an input."""
    for name, value in (("a", 1), ("b", 2.5)):
        table = pa.table({"x": [value]})
        if suffix == "parquet":
            pq.write_table(table, tmp_path / f"{name}.parquet")
        else:
            text = json.dumps({"x": value}) if suffix == "jsonl" else f"x\n{value}"
            (tmp_path / f"{name}.{suffix}").write_text(f"{text}\n")
    plan = make_plan(str(tmp_path), None)
    assert plan.schema.field("x").type == pa.float64()
    assert read_all(plan, tmp_path, tmp_path.parent / f"counts-{suffix}")["x"].to_pylist() == [1.0, 2.5]


def test_numbers_inside_objects_and_lists_widen_too(tmp_path, monkeypatch):
    """Across files, and across the chunks of one file."""
    monkeypatch.setattr(source, "_READ_BYTES", 5)
    rows = [{"s": {"x": 1, "l": [{"y": 1}]}}, {"s": {"x": 1.5, "l": [{"y": 2.5}]}}, {"s": {"l": None, "z": "t"}}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:2]))
    (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (rows[0], rows[2])))
    table = read_all(make_plan(str(tmp_path), None), tmp_path, tmp_path.parent / "counts-nested")
    found = table["s"].to_pylist()
    assert [row["x"] for row in found] == [1.0, 1.5, 1.0, None]
    assert [row["l"] for row in found] == [[{"y": 1.0}], [{"y": 2.5}], [{"y": 1.0}], None]
    assert found[3]["z"] == "t"


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_column_of_the_file_wins_over_a_folder_of_its_name(tmp_path, suffix):
    """The folder's value is for the files that lack the column."""
    for folder in ("1", "2"):
        (tmp_path / f"dt={folder}").mkdir()
    if suffix == "parquet":
        pq.write_table(pa.table({"a": [1], "dt": [7]}), tmp_path / "dt=1" / "a.parquet")
        pq.write_table(pa.table({"a": [2]}), tmp_path / "dt=2" / "a.parquet")
    else:
        with_it, without = ('{"a": 1, "dt": 7}', '{"a": 2}') if suffix == "jsonl" else ("a,dt\n1,7", "a\n2")
        (tmp_path / "dt=1" / f"a.{suffix}").write_text(f"{with_it}\n")
        (tmp_path / "dt=2" / f"a.{suffix}").write_text(f"{without}\n")
    table = read_all(make_plan(str(tmp_path), None), tmp_path, tmp_path.parent / f"counts-own-{suffix}")
    assert table["dt"].to_pylist() == [7, 2]


def test_a_folder_that_does_not_fit_the_column_of_its_name_is_refused(tmp_path):
    """Nothing is lost without a word."""
    for name, row in (("dt=1", {"dt": 7}), ("dt=x", {"a": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(json.dumps(row))
    plan = make_plan(str(tmp_path), None)
    with pytest.raises(SpecError, match=r"dt=x/a.jsonl', column 'dt'"):
        read_all(plan, tmp_path, tmp_path.parent / "counts-unfit")


def test_views_of_text_and_bytes_are_text_and_bytes(tmp_path):
    """Ray and the writers do not know them all."""
    view = pa.table(
        {
            "text": pa.array(["a", None], pa.string_view()),
            "b": pa.array([b"x", b""], pa.binary_view()),
            "l": pa.array([["a"], None], pa.list_(pa.string_view())),
            "s": pa.array([{"x": "a"}, None], pa.struct([("x", pa.string_view())])),
        }
    )
    pq.write_table(view, tmp_path / "a.parquet")
    table = read_all(make_plan(str(tmp_path), None), tmp_path, tmp_path.parent / "counts-view")
    assert "view" not in str(table.schema)
    assert table.select(view.column_names).to_pylist() == view.to_pylist()


def _write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_text(content)


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        (None, {}, "does not exist"),
        ({}, {}, "holds no files"),
        ({"_SUCCESS": ""}, {}, "holds no files"),
        ({"a__parquet": "no"}, {}, "no Parquet file"),
        ({"a__jsonl": "{"}, {}, "no JSON Lines file"),
        ({"a__jsonl": "{}", "b__csv": "a"}, {}, "several formats"),
        ({"a__txt": "x"}, {}, "not known by its suffix"),
        ({"a__parquet": pa.table({"a": [1]})}, {"columns": ["b"]}, r"no column 'b'; it has \['a'\]"),
        ({"a__parquet": pa.table({"a": [1]}), "b__parquet": pa.table({"a": ["x"]})}, {}, "column 'a' is int64"),
        ({"a__jsonl": '{"meta": {}}'}, {}, "column 'meta' .*empty objects"),
        ({"a__jsonl": '{"meta": [{"x": {}}]}'}, {}, "column 'meta' .*empty objects"),
        ({"a__parquet": pa.table({BLOCK_COL: [1]})}, {}, "a name this job needs"),
    ],
)
def test_input_that_cannot_be_read_is_named(tmp_path, files, options, words):
    """One sentence that says what is wrong and where."""
    folder = tmp_path / "in"
    if files is not None:
        _write(folder, **files)
    with pytest.raises(SpecError, match=words):
        make_plan(str(folder), None, **options)


def test_empty_objects_may_be_left_out_or_filled_elsewhere(tmp_path):
    """What is not read, or has fields in another row, can be written."""
    _write(tmp_path, a__jsonl='{"a": 1, "meta": {}, "m": {}}\n{"a": 2, "meta": {}, "m": {"x": 1}}\n')
    plan = make_plan(str(tmp_path), None, columns=["a", "m"])
    table = read_all(plan, tmp_path, tmp_path.parent / "counts-objects")
    assert table["m"].to_pylist() == [{"x": None}, {"x": 1}]


def test_no_rows_still_have_columns(tmp_path):
    """An empty Parquet file is an input of zero rows with its schema."""
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "a.parquet")
    plan = make_plan(str(tmp_path), None)
    assert (plan.rows, plan.units, plan.schema.names) == (0, (), ["a"])


def test_the_listing_is_sorted_and_has_each_file_once(tmp_path):
    """A file that two paths name is read once."""
    _write(tmp_path, b__csv="x\n1\n", a__csv="x\n2\n")
    _, files = list_input([str(tmp_path), str(tmp_path / "a.csv")], None, None)
    assert [storage.relative(file.path, str(tmp_path)) for file in files] == ["a.csv", "b.csv"]


def test_reading_twice_gives_the_same_numbers(tmp_path):
    """What a stored reply is found by does not depend on the run."""
    _write(tmp_path, a__jsonl="\n".join(json.dumps({"id": i}) for i in range(5000)))
    read = functools.partial(read_all, make_plan(str(tmp_path), None, actors=4), tmp_path)
    assert read(tmp_path.parent / "c2").equals(read(tmp_path.parent / "c3"))
