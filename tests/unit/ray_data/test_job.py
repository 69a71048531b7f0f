"""What decides that two runs are the same run, and how an error that came through Ray is worded."""

from __future__ import annotations

import dataclasses

import pytest
import ray.exceptions

from airflow_provider_raylm.exceptions import OutputError, RaylmError
from airflow_provider_raylm.ray_data.job import _plain, fingerprint_of
from airflow_provider_raylm.ray_data.source import InputFile
from airflow_provider_raylm.spec import LeaseSpec, QuerySpec, StorageSpec

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


def _task_error(cause: Exception) -> Exception:
    error = ray.exceptions.RayTaskError("write", "Traceback: row 17 was secret\n", cause)
    return error.as_instanceof_cause()


def test_an_error_of_ours_comes_out_of_ray_as_it_was():
    """The class, attributes and words that the actor raised."""
    ours = OutputError("the output folder is not free")
    found = _plain(_task_error(ours))
    assert type(found) is OutputError
    assert str(found) == "the output folder is not free"


def test_a_foreign_error_is_one_sentence():
    """Its type and last line, without the traceback."""
    found = _plain(_task_error(MemoryError("of worker 3\nout of memory")))
    assert type(found) is RaylmError
    assert str(found) == "the query job failed: MemoryError: out of memory"
