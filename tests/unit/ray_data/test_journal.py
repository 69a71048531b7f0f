"""Stored replies: found again by block and row, whoever wrote them and wherever the writer was killed."""

from __future__ import annotations

import threading

from airflow_provider_raylm.exceptions import StorageError
from airflow_provider_raylm.ray_data import journal as module
from airflow_provider_raylm.ray_data import storage
from airflow_provider_raylm.ray_data.journal import Journal


def reply(text: str, status: str = "ok") -> dict[str, object]:
    return {"content": text, "status": status}


def test_replies_are_found_by_another_process(tmp_path):
    """What was flushed is there; what was not is not."""
    writer = Journal(str(tmp_path), None, flush_s=0)
    writer.append(7, 3, reply("三"))
    writer.flush()
    writer.append(7, 4, reply("lost with its process"))
    assert Journal(str(tmp_path), None, flush_s=0).load(7) == {3: reply("三")}


def test_errors_are_asked_again(tmp_path):
    """A reply that is an error is no answer to reuse."""
    writer = Journal(str(tmp_path), None, flush_s=0)
    writer.append(1, 0, reply("x", "error"))
    writer.append(1, 1, reply("y"))
    writer.flush()
    assert writer.load(1) == {1: reply("y")}


def test_many_flushes_leave_few_files_and_all_replies(tmp_path):
    """Files of one block are replaced by one before they become many."""
    writer = Journal(str(tmp_path), None, flush_s=0)
    for row in range(100):
        writer.append(0, row, reply(str(row)))
        writer.flush()
    assert len(list((tmp_path / "0").iterdir())) <= module._PARTS
    assert writer.load(0) == {row: reply(str(row)) for row in range(100)}


def test_a_damaged_file_costs_only_its_own_rows(tmp_path):
    """A writer that was killed in the middle of a file does not spoil the others."""
    writer = Journal(str(tmp_path), None, flush_s=0)
    writer.append(0, 0, reply("a"))
    writer.flush()
    (tmp_path / "0" / "cut.parquet").write_bytes(b"PAR1")
    assert writer.load(0) == {0: reply("a")}


def test_the_thread_stores_without_being_asked(tmp_path):
    """`close` ends the thread and leaves nothing unstored."""
    writer = Journal(str(tmp_path), None)
    writer.append(0, 0, reply("a"))
    writer.close()
    assert Journal(str(tmp_path), None, flush_s=0).load(0) == {0: reply("a")}


def test_one_odd_reply_costs_no_other(tmp_path):
    """Half a surrogate pair is no UTF-8; it must not end the storing of what comes after."""
    writer = Journal(str(tmp_path), None)
    writer.append(0, 0, reply("\ud83d"))
    writer.append(0, 1, reply("a"))
    writer.close()
    assert Journal(str(tmp_path), None, flush_s=0).load(0) == {0: reply("\ufffd"), 1: reply("a")}


def test_the_thread_outlives_what_it_cannot_store(tmp_path, monkeypatch, caplog):
    """It tries again, and says so: a thread that is gone would lose every later reply without a word."""
    tried = threading.Event()
    writer = Journal(str(tmp_path), None, flush_s=0.01)
    flush = writer.flush

    def once() -> None:
        monkeypatch.setattr(writer, "flush", flush)
        tried.set()
        raise ValueError("odd")

    monkeypatch.setattr(writer, "flush", once)
    writer.append(0, 0, reply("a"))
    assert tried.wait(20)
    writer.close()
    assert "could not be stored yet" in caplog.text
    assert writer.load(0) == {0: reply("a")}


def test_a_store_that_goes_on_refusing_ends_the_job_and_one_that_is_away_does_not(tmp_path, monkeypatch):
    """What finishes after that would be paid for and lost; a store that comes back gets everything."""
    writer = Journal(str(tmp_path), None, flush_s=0)
    writer.append(0, 0, reply("a"))
    errors = [StorageError("busy")] * 3 + [StorageError("expired", refused=True)] * 2
    real = storage.write_bytes

    def write(*args):
        if errors:
            raise errors.pop(0)
        real(*args)

    monkeypatch.setattr(storage, "write_bytes", write)
    refused = []
    for _ in range(6):
        writer.flush_or_wait()
        try:
            writer.append(0, 1, reply("b"))
            refused.append(False)
        except StorageError:
            refused.append(True)
    assert refused == [False, False, False, False, True, False]
    writer.flush()
    assert writer.load(0) == {0: reply("a"), 1: reply("b")}
