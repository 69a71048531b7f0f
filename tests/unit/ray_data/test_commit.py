"""Commits: complete from wherever they were broken off, and careful with what is not theirs."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from airflow_provider_raylm.exceptions import OutputError, SpecError
from airflow_provider_raylm.ray_data import storage
from airflow_provider_raylm.ray_data.commit import OutputFolder, check_complete, settle_schema
from airflow_provider_raylm.ray_data.sink import WrittenFile, write_parquet
from airflow_provider_raylm.ray_data.source import UNIT_BLOCKS
from airflow_provider_raylm.spec import Manifest


class Killed(BaseException):
    """The process ended here."""


def stage(output: OutputFolder, run: str, ids: list[int]) -> tuple[str, Manifest]:
    staging = f"_raylm/runs/{run}/staging/x"
    name = f"part-{run}-0.parquet"
    size = write_parquet(output.fs, output.path(staging, name), pa.table({"id": ids}))
    output.write_json({"run_id": run}, "runs", run, "run.json")
    manifest = Manifest(
        output_path=output.name, rows_in=len(ids), rows=len(ids), errors=0, prompt_tokens=0, completion_tokens=0,
        seconds=1, rows_per_s=1, run_id=run, files=({"path": name, "rows": len(ids), "bytes": size},),
    )  # fmt: skip
    return staging, manifest


def ids_in(folder) -> list[int]:
    return sorted(pads.dataset(str(folder)).to_table()["id"].to_pylist())


def folder_of(tmp_path, **kwargs) -> OutputFolder:
    return OutputFolder(str(tmp_path), None, **kwargs)


@pytest.mark.parametrize("step", range(1, 14))
def test_a_commit_broken_off_at_any_step_is_completed_by_the_next_attempt(tmp_path, monkeypatch, step):
    """Old run, new run, a kill at each write to the store: in the end the new rows once, and `_SUCCESS`."""
    output = folder_of(tmp_path)
    staging, manifest = stage(output, "old", [1, 2])
    output.commit("old", staging, manifest, output.standing("overwrite", {}))
    staging, manifest = stage(output, "new", [3, 4])
    standing = output.standing("overwrite", {})

    left = step
    with monkeypatch.context() as patch:
        for name in ("write_bytes", "copy", "delete_files", "delete_folder"):
            real = getattr(storage, name)

            def counted(*args, _real=real):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return _real(*args)

            patch.setattr(storage, name, counted)
        try:
            output.commit("new", staging, manifest, standing)
        except Killed:
            if (tmp_path / "_SUCCESS").exists():
                assert ids_in(tmp_path) in ([1, 2], [3, 4])
            broken = True
        else:
            assert left > 0
            broken = False
    begun = output.finish_begun()
    assert (begun is not None) == (broken and step > 1), "once it is written down, no row is asked again"
    if (tmp_path / "_raylm" / "runs" / "new" / "run.json").exists():
        assert step == 1, "only a commit that was never written down is forgotten"
        assert ids_in(tmp_path) == [1, 2]
    else:
        assert ids_in(tmp_path) == [3, 4]
    assert (tmp_path / "_SUCCESS").exists()
    assert not (tmp_path / "_raylm" / "commit.json").exists()


def listed(folder) -> list[int] | None:
    """What a reader takes who lists the folder between two looks at `_SUCCESS`; `None` when they do not agree."""
    mark = folder / "_SUCCESS"
    before = mark.read_text() if mark.exists() else None
    ids = ids_in(folder)
    after = mark.read_text() if mark.exists() else None
    return ids if before is not None and before == after else None


def test_readers_see_the_old_run_or_the_new_one_at_each_instant_of_a_commit(tmp_path, monkeypatch):
    """Before and after each request to the store, by the manifest and by a listing that `_SUCCESS` allows."""
    output = folder_of(tmp_path)
    output.commit("old", *stage(output, "old", [1, 2]), output.standing("overwrite", {}))
    staged, standing = stage(output, "new", [3, 4]), output.standing("overwrite", {})
    by_manifest, by_list, unmarked = [], [], []

    def look() -> None:
        manifest = output.read_json("manifest.json")
        files = [pq.read_table(tmp_path / entry["path"])["id"].to_pylist() for entry in manifest["files"]]
        by_manifest.append(sorted(i for ids in files for i in ids))
        seen = listed(tmp_path)
        (unmarked if seen is None else by_list).append(seen)

    for name in ("write_bytes", "copy", "delete_files", "delete_folder"):
        real = getattr(storage, name)

        def watched(*args, _real=real):
            look()
            _real(*args)
            look()

        monkeypatch.setattr(storage, name, watched)
    output.commit("new", *staged, standing)
    for seen in (by_manifest, by_list):
        assert [ids for ids, _ in itertools.groupby(seen)] == [[1, 2], [3, 4]]
    assert json.loads((tmp_path / "_SUCCESS").read_text()) == {"run_id": "new"}
    # `_SUCCESS` is away for one copy, the switch and one delete
    assert len(unmarked) == 8


def test_results_in_the_batch_format_are_those_of_the_last_run(tmp_path):
    """They come with the commit and go with the next one."""
    output = folder_of(tmp_path)
    for run, name in (("a", "part-a-1.jsonl"), ("b", "part-b-1.jsonl"), ("c", None)):
        staging, manifest = stage(output, run, [1])
        if name:
            storage.write_bytes(output.fs, output.path(staging, "results", name), b"{}")
        output.commit(run, staging, manifest, output.standing("overwrite", {}))
        found = storage.list_files(output.fs, output.path("_raylm", "results"))
        assert [entry.path.rpartition("/")[2] for entry in found] == ([name] if name else [])


def test_overwrite_refuses_files_of_others(tmp_path):
    """A mistyped path costs nobody a table."""
    (tmp_path / "theirs.parquet").write_text("x")
    with pytest.raises(OutputError, match=r"theirs\.parquet"):
        folder_of(tmp_path).standing("overwrite", {})


def test_error_if_exists_refuses_any_data(tmp_path):
    """Even data of ours."""
    output = folder_of(tmp_path)
    output.commit("a", *stage(output, "a", [1]), output.standing("error_if_exists", {}))
    with pytest.raises(OutputError, match="holds data already"):
        output.standing("error_if_exists", {})


def test_append_adds_and_a_cleared_task_replaces_only_its_own_rows(tmp_path):
    """Another DAG run adds; the same one again does not double."""
    output = folder_of(tmp_path)
    for run, labels, ids in (("a", {"run": "1"}, [1]), ("b", {"run": "2"}, [2]), ("c", {"run": "1"}, [3])):
        staging, manifest = stage(output, run, ids)
        manifest = dataclasses.replace(manifest, labels=labels)
        output.commit(run, staging, manifest, output.standing("append", labels))
    assert ids_in(tmp_path) == [2, 3]


MAPPED = {"dag_id": "d", "task_id": "t", "run_id": "r", "map_index": "0"}


@pytest.mark.parametrize(
    ("mode", "change", "refused"),
    [
        ("overwrite", {"map_index": "1"}, True),
        ("overwrite", {}, False),
        ("overwrite", {"try_number": "2"}, False),
        ("overwrite", {"run_id": "s", "map_index": "1"}, False),
        ("overwrite", {"task_id": "u", "map_index": "1"}, False),
        ("append", {"map_index": "1"}, False),
    ],
)
def test_a_mapped_task_does_not_overwrite_the_rows_of_its_siblings(tmp_path, mode, change, refused):
    """A retry, another run and another task may replace them; `append` keeps them."""
    output = folder_of(tmp_path)
    staging, manifest = stage(output, "a", [1])
    output.commit("a", staging, dataclasses.replace(manifest, labels=MAPPED), output.standing("overwrite", MAPPED))
    if refused:
        with pytest.raises(OutputError, match="another mapped task of the same run"):
            output.standing(mode, MAPPED | change)
    else:
        output.standing(mode, MAPPED | change)


def test_an_unknown_write_mode_is_refused(tmp_path):
    """It does not mean `append`."""
    with pytest.raises(SpecError, match=r"write_mode: expected .*'append', got 'replace'"):
        folder_of(tmp_path).standing("replace", {})


ENTRY = {"path": "part-a.parquet", "rows": 1, "bytes": 1}
INTENT = {
    "run": "r",
    "staging": "_raylm/runs/r/staging/x",
    "removed": [],
    "manifest": {"run_id": "r", "files": [ENTRY]},
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", []),
        ("manifest.json", {"a": 1}),
        ("manifest.json", {"run_id": "r", "files": ["x"]}),
        ("manifest.json", {"run_id": "r", "files": [], "labels": []}),
        ("manifest.json", {"run_id": "r", "files": [ENTRY | {"path": "../a"}]}),
        ("manifest.json", {"run_id": "r", "files": [], "kept_files": [ENTRY | {"path": "/etc/passwd"}]}),
        ("commit.json", []),
        ("commit.json", {"a": 1}),
        ("commit.json", {**INTENT, "removed": ["x/../../a"]}),
        ("commit.json", {**INTENT, "run": ".."}),
        ("commit.json", {**INTENT, "staging": "/tmp"}),
        ("commit.json", {**INTENT, "manifest": {"run_id": "r", "files": [ENTRY | {"path": "../a"}]}}),
    ],
)
def test_files_of_others_with_our_names_are_refused(tmp_path, name, content):
    """And a path that leads out of the folder is neither written nor deleted."""
    output = folder_of(tmp_path / "out")
    (tmp_path / "a").write_text("x")
    output.write_json(content, name)

    def start() -> None:
        output.finish_begun()
        output.standing("overwrite", {})

    with pytest.raises(OutputError, match=f"_raylm/{name} is not one that this job wrote"):
        start()
    assert (tmp_path / "a").exists()


def test_a_lost_lock_stops_the_commit(tmp_path):
    """Nothing is put into place by a run that no longer owns the folder."""

    def lost() -> None:
        raise OutputError("lost")

    staging, manifest = stage(folder_of(tmp_path), "a", [1])
    with pytest.raises(OutputError, match="lost"):
        folder_of(tmp_path, check=lost).commit("a", staging, manifest, folder_of(tmp_path).standing("overwrite", {}))
    assert not (tmp_path / "_SUCCESS").exists()


def written(*spans: tuple[int, int, int]) -> WrittenFile:
    return WrittenFile(name="x", rows=1, rows_in=1, size=1, spans=spans)


@pytest.mark.parametrize(
    ("spans", "read", "words"),
    [
        ([(0, 0, 5), (UNIT_BLOCKS, 0, 2)], {0: 5, 1: 2}, None),
        ([(0, 3, 5), (0, 0, 3), (UNIT_BLOCKS, 0, 2)], {0: 5, 1: 2}, None),
        ([(0, 0, 5)], {0: 5}, "1 of 2 parts of the input were not read"),
        ([(0, 0, 4), (UNIT_BLOCKS, 0, 2)], {0: 5, 1: 2}, "5 rows of input part 0 were read and 4 written"),
        ([(0, 0, 5), (0, 4, 5), (UNIT_BLOCKS, 0, 2)], {0: 5, 1: 2}, "written twice"),
    ],
)
def test_rows_in_are_rows_out(spans, read, words):
    """A missing or doubled row fails the job before anything is put into place."""
    if words is None:
        assert check_complete([written(*spans)], read, 2) == 7
        return
    with pytest.raises(OutputError, match=words):
        check_complete([written(*spans)], read, 2)


def test_files_get_one_schema(tmp_path):
    """A column that one batch has only nulls in does not spoil the folder for readers."""
    output = folder_of(tmp_path)
    files = []
    for name, table in (("a", pa.table({"x": ["1"]})), ("b", pa.table({"x": pa.nulls(1)}))):
        size = write_parquet(output.fs, output.path("s", name), table)
        files.append(WrittenFile(name=name, rows=1, rows_in=1, size=size, spans=(), schema=table.schema))
    _, schema = settle_schema(output, "s", files, empty=pa.table({}), empty_name="e")
    assert pads.dataset(str(tmp_path / "s")).to_table()["x"].to_pylist() == ["1", None]
    assert schema.field("x").type == pa.string()
