"""What decides that two runs are the same run, and how an error that came through Ray is worded."""

from __future__ import annotations

import dataclasses

import pytest
import ray.exceptions

from airflow_provider_raylm.exceptions import OutputError, RaylmError, SpecError
from airflow_provider_raylm.ray_data import job
from airflow_provider_raylm.ray_data.commit import OutputFolder
from airflow_provider_raylm.ray_data.job import _plain, fingerprint_of
from airflow_provider_raylm.ray_data.source import InputFile
from airflow_provider_raylm.spec import LeaseSpec, Manifest, QuerySpec, StorageSpec

SPEC = QuerySpec(model="m", base_url="http://a/v1", input_path="/in", output_path="/out", prompt_col="text")
FILES = (InputFile("/in/a.parquet", 10, 1.0),)
DECIDING = {
    "model": "n",
    "endpoint": "completions",
    "input_columns": ("text",),
    "prompt_col": "other",
    "prompt_template": "{text}",
    "messages_col": "messages",
    "image_cols": ("image",),
    "system_prompt": "Be brief.",
    "output_col": "reply",
    "options": {"max_tokens": 5},
    "response_format": "label STRING",
}
OTHER = {
    "base_url": "http://b/v1",
    "api_key": "k",
    "input_path": "/elsewhere",
    "input_format": "parquet",
    "output_path": "/out2",
    "concurrency": 3,
    "batch_size": 4,
    "on_error": "null",
    "max_error_rate": 0.5,
    "max_errors": 3,
    "max_attempts": 2,
    "stall_timeout_s": 1.0,
    "postprocess": "a:b",
    "write_mode": "append",
    "resume": False,
    "id_col": "id",
    "max_rows_per_file": 10,
    "priority": "low",
    "group_by_prefix": True,
    "storage": StorageSpec(access_key_id="x"),
    "app_name": "app",
    "lease": LeaseSpec(holder="h"),
    "labels": {"dag": "d"},
}


def test_every_field_is_known_to_decide_or_not():
    """A new field of the spec has to be put on one of the two lists."""
    assert {field.name for field in dataclasses.fields(QuerySpec)} == {*DECIDING, *OTHER}


@pytest.mark.parametrize(("name", "value"), DECIDING.items(), ids=DECIDING)
def test_what_changes_the_replies_changes_the_fingerprint(name, value):
    """Replies to another question are not taken up."""
    changed = dataclasses.replace(SPEC, **{name: value})
    assert fingerprint_of(changed, "parquet", FILES) != fingerprint_of(SPEC, "parquet", FILES)


@pytest.mark.parametrize(("name", "value"), OTHER.items(), ids=OTHER)
def test_what_does_not_change_the_replies_does_not_change_the_fingerprint(name, value):
    """A job on a new deployment, with other credentials or another policy, goes on where the last one stopped."""
    changed = dataclasses.replace(SPEC, **{name: value})
    assert fingerprint_of(changed, "parquet", FILES) == fingerprint_of(SPEC, "parquet", FILES)


@pytest.mark.parametrize(
    "change", [{"path": "/in/b.parquet"}, {"size": 11}, {"changed_s": 2.0}, {"keys": (("dt", "1"),)}]
)
def test_other_input_files_are_another_run(change):
    """Also a file that was replaced by one of the same name, and one whose folder has become a column."""
    files = (dataclasses.replace(FILES[0], **change),)
    assert fingerprint_of(SPEC, "parquet", files) != fingerprint_of(SPEC, "parquet", FILES)
    assert fingerprint_of(SPEC, "jsonl", FILES) != fingerprint_of(SPEC, "parquet", FILES)


def interrupted(tmp_path, monkeypatch, first: QuerySpec) -> OutputFolder:
    """An output folder with a commit of `first` that was written down and then killed."""
    output = OutputFolder(str(tmp_path / "out"), None)
    fingerprint = fingerprint_of(first, *job.list_input(first.input_path, None, None))
    manifest = Manifest(
        output_path=output.name, rows_in=0, rows=0, errors=0, prompt_tokens=0, completion_tokens=0,
        seconds=1, rows_per_s=1, run_id="a", labels=first.labels,
    )  # fmt: skip
    standing = output.standing(first.write_mode, first.labels)
    with monkeypatch.context() as patch:
        patch.setattr(output, "_apply", lambda intent: None)
        output.commit(fingerprint, "_raylm/runs/x/staging/x", manifest, standing, settings=job.settings_of(first))
    return output


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"labels": {"run_id": "1", "try_number": "2"}, "concurrency": 3, "base_url": "http://b/v1"}, True),
        ({"labels": {"run_id": "2"}}, False),
        ({"postprocess": "json:loads"}, False),
        ({"resume": False}, False),
        ({"write_mode": "append"}, False),
        ({"max_rows_per_file": 1}, False),
        ({"on_error": "null"}, False),
        ({"max_errors": 1}, False),
    ],
)
def test_an_interrupted_commit_is_the_answer_only_to_the_same_task(tmp_path, monkeypatch, change, taken):
    """It is completed in any case; another run, or the same one with other settings, still has its own work to do."""

    class WentOn(Exception):
        pass

    def go_on(*args, **kwargs):
        raise WentOn

    (tmp_path / "in.csv").write_text("text\na\n")
    first = dataclasses.replace(SPEC, input_path=str(tmp_path / "in.csv"), output_path=str(tmp_path / "out"),
                                labels={"run_id": "1"})  # fmt: skip
    output = interrupted(tmp_path, monkeypatch, first)
    monkeypatch.setattr(job, "_take_up", go_on)
    monkeypatch.setattr(job, "cluster_cpus", lambda: 1)
    second = dataclasses.replace(first, **change)
    if taken:
        assert job._run_locked(second, job._query(second), output).run_id == "a"
    else:
        with pytest.raises(WentOn):
            job._run_locked(second, job._query(second), output)
    assert (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("in/out", "lies in the input"), ("in", "lies in output_path"), ("in/_out", None), ("in2", None)],
)
def test_an_output_folder_in_the_input_is_refused_at_once(tmp_path, name, words):
    """The next run would read its rows; what a listing skips is not read."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("text\na\n")
    paths = [str(tmp_path / "in")]
    _, files = job.list_input(paths, None, None)
    output = OutputFolder(str(tmp_path / name), None)
    if words is None:
        job._check_apart(paths, None, files, output)
    else:
        with pytest.raises(SpecError, match=words):
            job._check_apart(paths, None, files, output)


def _task_error(cause: Exception) -> Exception:
    error = ray.exceptions.RayTaskError("write", "Traceback: row 17 was secret\n", cause)
    return error.as_instanceof_cause()


def test_an_error_of_ours_comes_out_of_ray_as_it_was():
    """The class, attributes and words that the actor raised."""
    ours = OutputError("the output folder is not free")
    found = _plain(_task_error(ours))
    assert type(found) is OutputError
    assert str(found) == "the output folder is not free"


ADVICE = "\nFailed to apply UDF transform after 1/1 attempts (total backoff 0.0s).\nTo change retry attempts, ..."


@pytest.mark.parametrize("advice", ["", ADVICE])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda advice: MemoryError("of worker 3\nout of memory" + advice), "MemoryError: out of memory"),
        (lambda advice: KeyError("text" + advice), "KeyError: text"),
    ],
)
def test_a_foreign_error_is_one_sentence(error, words, advice):
    """Its type and last line, without the traceback, and without what Ray adds."""
    found = _plain(_task_error(error(advice)))
    assert type(found) is RaylmError
    assert str(found) == f"the query job failed: {words}"
