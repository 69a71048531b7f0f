"""From staged files to a finished output folder, on a store without rename. Every step may be repeated.

    <output>/part-<run>-….parquet           what readers see
    <output>/_SUCCESS                       there only while the folder holds one finished state; names its run
    <output>/_raylm/manifest.json           the files that belong to it, and what they are
    <output>/_raylm/results/part-….jsonl    the last run's replies in the batch format, if its input was in it
    <output>/_raylm/lock.json               who is writing, see `lock.py`
    <output>/_raylm/commit.json             a commit that has begun
    <output>/_raylm/runs/<fingerprint>/     an unfinished run: plan, replies, staged files

A commit writes down what it is about to do (`commit.json`), and from then on it is completed, by this attempt or by
the next one that opens the folder: copy the batch results, remove `_SUCCESS`, copy the staged files into place, switch
`manifest.json`, delete the files of the run that is replaced, write `_SUCCESS`, clean up.

Why staging and not final names from the start: a job that is killed, or fails its error policy, leaves the folder
as it was, and the copies do not come through this process. What readers see at each instant:

- Whoever takes the files that `manifest.json` lists sees the old run, then the new one, with nothing between: the new
  files are there before the switch and the old ones go after it. One that was slow to open a file of the old list
  does not find it, and reads the manifest again.
- Whoever lists the folder sees a mix of both from the first copy to the last delete. `_SUCCESS` is away for just
  that stretch, which takes as long as the store needs for one copy of each new file and one delete of each old,
  sixteen at a time. A listing between two looks at `_SUCCESS` that both found the same run in it is one finished
  state. No store without rename can spare such a reader the looks; table formats have manifests for it.

`overwrite` removes files that a manifest of ours lists, nothing else. A folder with other data in it is refused: a
mistyped path must not cost anybody a table. `append` keeps what is there, except for the files that the same labels
(dag, task, run, map index) put there before, so that a cleared task does not double its rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_provider_raylm.exceptions import OutputError
from airflow_provider_raylm.ray_data import storage as store
from airflow_provider_raylm.ray_data.sink import WrittenFile, write_parquet
from airflow_provider_raylm.ray_data.source import UNIT_BLOCKS, unify
from airflow_provider_raylm.spec import Manifest, StorageSpec, WriteMode, from_json, one_of

PRIVATE = "_raylm"
SUCCESS = "_SUCCESS"
RESULTS = "results"
ABANDONED_S = 14 * 86400.0
_TRIES = ("try_number", "attempt")


@dataclass(frozen=True)
class Standing:
    """What an output folder holds before a run.

    Attributes:
        kept: Entries of files that stay, as in the manifest.
        removed: Paths relative to the folder that go when the run is committed.
    """

    kept: tuple[dict[str, Any], ...] = ()
    removed: tuple[str, ...] = ()


def owner_of(labels: Mapping[str, str]) -> str:
    """Who put files there: the labels without what differs between two tries; empty without labels."""
    named = {key: value for key, value in sorted(labels.items()) if key not in _TRIES}
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16] if named else ""


def _mapped_beside(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two owners are different mapped tasks of one run."""
    same = all(one.get(key) == other.get(key) for key in ("dag_id", "task_id", "run_id"))
    return same and "map_index" in one and "map_index" in other and one["map_index"] != other["map_index"]


def _is_inside(path: Any) -> bool:
    """Whether a path that was read from a file stays below the folder that it is relative to."""
    return isinstance(path, str) and path != "" and not path.startswith("/") and ".." not in path.split("/")


def _is_manifest(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("run_id"), str):
        return False
    lists = value.get("files"), value.get("kept_files", [])
    return isinstance(value.get("labels", {}), dict) and all(
        isinstance(entries, list)
        and all(isinstance(e, dict) and "bytes" in e and _is_inside(e.get("path")) for e in entries)
        for entries in lists
    )


def _is_intent(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_inside(value.get("run"))
        and _is_inside(value.get("staging"))
        and isinstance(value.get("removed"), list)
        and all(map(_is_inside, value["removed"]))
        and _is_manifest(value.get("manifest"))
    )


class OutputFolder:
    """One output folder: its paths, its state and its commits.

    Args:
        name, storage: The folder as `open_filesystem` takes it.
        check: Raises when this process may not write to the folder any more.
    """

    def __init__(self, name: str, storage: StorageSpec | None, *, check: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.check = check
        self._storage = storage
        self.root = store.open_filesystem(name, storage)[1].rstrip("/")

    @property
    def fs(self) -> Any:
        """The file system, with keys that are still good."""
        return store.open_filesystem(self.name, self._storage)[0]

    def path(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    def read_json(self, *parts: str) -> Any:
        """A private JSON object; `None` when there is none."""
        data = store.read_bytes(self.fs, self.path(PRIVATE, *parts))
        if data is None:
            return None
        try:
            return json.loads(data)
        except ValueError as exc:
            raise OutputError(f"{self.name}: {PRIVATE}/{'/'.join(parts)} is damaged: {exc}") from exc

    def _read_own(self, name: str, is_own: Callable[[Any], bool]) -> Any:
        """`manifest.json` or `commit.json`, whose paths are then written and deleted; `None` when there is none."""
        value = self.read_json(name)
        if value is not None and not is_own(value):
            raise OutputError(
                f"{self.name}: {PRIVATE}/{name} is not one that this job wrote, or it names files outside the folder; "
                "nothing was changed. Use another folder, or remove the file"
            )
        return value

    def write_json(self, value: Any, *parts: str) -> None:
        self.check()
        store.write_bytes(self.fs, self.path(PRIVATE, *parts), json.dumps(value, ensure_ascii=False).encode())

    def delete(self, *parts: str) -> None:
        store.delete_files(self.fs, [self.path(*parts)])

    def standing(self, write_mode: WriteMode, labels: Mapping[str, str]) -> Standing:
        """Decide what becomes of what the folder holds.

        Raises:
            SpecError: There is no such `write_mode`.
            OutputError: `write_mode` does not allow a run here.
        """
        one_of("write_mode", write_mode, WriteMode)
        present = [store.relative(entry.path, self.root) for entry in store.list_files(self.fs, self.root)]
        manifest = self._read_own("manifest.json", _is_manifest)
        known: dict[str, dict[str, Any]] = {}
        if manifest is not None:
            owner = owner_of(manifest.get("labels", {}))
            known = {entry["path"]: {"owner": owner, **entry} for entry in manifest["files"]}
            known |= {entry["path"]: entry for entry in manifest.get("kept_files", [])}
        if write_mode == "error_if_exists":
            if present or manifest is not None:
                raise OutputError(
                    f"{self.name}: holds data already and write_mode is 'error_if_exists'; nothing was changed. Use "
                    "'overwrite' to replace it, or another folder"
                )
            return Standing()
        if write_mode == "overwrite":
            if foreign := [path for path in present if path not in known]:
                raise OutputError(
                    f"{self.name}: holds {len(foreign)} files that are not of earlier runs, such as {foreign[0]!r}; "
                    "nothing was changed. 'overwrite' replaces only its own output: use an empty folder, or 'append'"
                )
            if manifest is not None and _mapped_beside(manifest.get("labels", {}), labels):
                raise OutputError(
                    f"{self.name}: another mapped task of the same run wrote here, and 'overwrite' would drop its "
                    "rows; nothing was changed. Give each its own output_path, or use write_mode 'append'"
                )
            return Standing(removed=tuple(known))
        mine = owner_of(labels)
        removed = tuple(path for path, entry in known.items() if mine and entry.get("owner") == mine)
        return Standing(kept=tuple(entry for path, entry in known.items() if path not in removed), removed=removed)

    def commit(self, run: str, staging: str, manifest: Manifest, standing: Standing, *, settings: str = "") -> None:
        """Put staged files into place.

        Args:
            run: Folder of the run below `_raylm/runs/`.
            staging: Folder of the staged files, relative to the output folder.
            manifest: Its `files` are the staged files' names.
            standing: What `standing` said before the run.
            settings: What else the output depends on; `finish_begun` gives it back.
        """
        stored = dataclasses.asdict(dataclasses.replace(manifest, kept_files=standing.kept))
        intent = {
            "run": run,
            "staging": staging,
            "removed": list(standing.removed),
            "manifest": stored,
            "settings": settings,
        }
        self.write_json(intent, "commit.json")
        self._apply(intent)

    def finish_begun(self) -> tuple[str, str, Manifest] | None:
        """Complete a commit that an earlier attempt has begun; its run's folder, settings and manifest, if any.

        Raises:
            OutputError: `commit.json` is not ours.
        """
        intent = self._read_own("commit.json", _is_intent)
        if intent is None:
            return None
        self._apply(intent)
        manifest = from_json(Manifest, json.dumps({**intent["manifest"], "kept_files": []}))
        return intent["run"], intent.get("settings", ""), manifest

    def _apply(self, intent: Mapping[str, Any]) -> None:
        manifest = intent["manifest"]
        marked = self.fs.get_file_info(self.path(SUCCESS)).is_file
        current = self._read_own("manifest.json", _is_manifest)
        if not (marked and current is not None and current["run_id"] == manifest["run_id"]):
            self.check()
            for entry in store.list_files(self.fs, self.path(intent["staging"], RESULTS)):
                store.copy(self.fs, entry.path, self.path(PRIVATE, RESULTS, entry.path.rpartition("/")[2]))
            self.check()
            self.delete(SUCCESS)
            there = {entry.path: entry.size for entry in store.list_files(self.fs, self.root)}

            def place(entry: Mapping[str, Any]) -> None:
                target = self.path(entry["path"])
                if there.get(target) != entry["bytes"]:
                    self.check()
                    store.copy(self.fs, self.path(intent["staging"], entry["path"]), target)

            store.each(place, manifest["files"])
            self.write_json(manifest, "manifest.json")
            self.check()
            store.delete_files(self.fs, [self.path(path) for path in intent["removed"]])
            self.check()
            store.write_bytes(self.fs, self.path(SUCCESS), json.dumps({"run_id": manifest["run_id"]}).encode())
        replies = [entry.path for entry in store.list_files(self.fs, self.path(PRIVATE, RESULTS))]
        mine = self.path(PRIVATE, RESULTS, f"part-{manifest['run_id']}-")
        store.delete_files(self.fs, [path for path in replies if not path.startswith(mine)])
        # in this order: without run.json nobody takes the run up, with commit.json nobody asks its rows again
        self.delete(PRIVATE, "runs", intent["run"], "run.json")
        store.delete_folder(self.fs, self.path(PRIVATE, "runs", intent["run"]))
        self.delete(PRIVATE, "commit.json")

    def delete_abandoned(self, *, except_run: str, now_s: float | None = None) -> None:
        """Remove runs that nobody has taken up for two weeks."""
        now_s = time.time() if now_s is None else now_s
        runs = self.path(PRIVATE, "runs")
        newest: dict[str, float] = {}
        for entry in store.list_files(self.fs, runs, hidden=True):
            run = store.relative(entry.path, runs).partition("/")[0]
            newest[run] = max(newest.get(run, 0.0), entry.changed_s or now_s)
        for run, changed_s in newest.items():
            if run != except_run and now_s - changed_s > ABANDONED_S:
                store.delete_folder(self.fs, f"{runs}/{run}")


def check_complete(written: Sequence[WrittenFile], read: Mapping[int, int], units: int) -> int:
    """Make sure that the files hold every row that was read, once.

    Args:
        written: What the write tasks reported.
        read: Rows of each unit that was read to its end.
        units: Units of the plan.

    Returns:
        Rows read.

    Raises:
        OutputError: A row is missing or twice; nothing has been put into place.
    """
    if missing := [unit for unit in range(units) if unit not in read]:
        raise OutputError(
            f"{len(missing)} of {units} parts of the input were not read to their end; nothing was put into place"
        )
    found = dict.fromkeys(range(units), 0)
    last = (-1, 0)
    for block, start, stop in sorted(span for file in written for span in file.spans):
        if block == last[0] and start < last[1]:
            raise OutputError(
                f"rows {start} to {min(stop, last[1])} of input block {block} were written twice; "
                "nothing was put into place"
            )
        last = (block, stop)
        found[block // UNIT_BLOCKS] += stop - start
    if wrong := [unit for unit in found if found[unit] != read[unit]]:
        unit = wrong[0]
        raise OutputError(
            f"{read[unit]} rows of input part {unit} were read and {found[unit]} written; nothing was put into place"
        )
    return sum(read.values())


def settle_schema(
    output: OutputFolder, staging: str, written: Sequence[WrittenFile], *, empty: pa.Table, empty_name: str
) -> tuple[list[WrittenFile], pa.Schema]:
    """Give all files one schema: those that differ, as only `postprocess` can make them, are written again.

    Args:
        output: The folder.
        staging: Where the files are staged, relative to it.
        written: The files.
        empty, empty_name: The table to write when there is no row, and its file's name.

    Returns:
        The files with rows in them, at least one, and their schema.

    Raises:
        OutputError: The files' columns do not go together.
    """
    files = [file for file in written if file.name]
    if not files:
        table = written[0].schema.empty_table() if written else empty
        size = write_parquet(output.fs, output.path(staging, empty_name), table)
        file = WrittenFile(name=empty_name, rows=0, rows_in=0, size=size, spans=(), schema=table.schema)
        return [file], table.schema
    if all(file.schema.equals(files[0].schema) for file in files):
        return files, files[0].schema
    try:
        schema = unify([(file.name, file.schema) for file in files])
    except ValueError as exc:
        raise OutputError(f"postprocess gives different columns for different batches: {exc}") from exc

    def rewrite(file: WrittenFile) -> WrittenFile:
        if file.schema.equals(schema):
            return file
        path = output.path(staging, file.name)
        table = pq.read_table(store.open_object(output.fs, path))
        columns = [
            table.column(field.name).cast(field.type)
            if field.name in table.column_names
            else pa.nulls(table.num_rows, field.type)
            for field in schema
        ]
        size = write_parquet(output.fs, path, pa.Table.from_arrays(columns, schema=schema))
        return dataclasses.replace(file, size=size, schema=schema)

    return store.each(rewrite, files), schema
