"""Finished replies, kept the moment they are there, so that no attempt asks for them again.

A reply costs money and minutes; a job dies at any point. Each query actor hands its finished replies to a
`Journal`, in whatever order they finish, and a thread of it writes them to
`<output>/_raylm/runs/<fingerprint>/journal/<block>/` every two seconds. What a kill can cost is the rows in flight
and those of the last two seconds.

Why not Ray Data's `checkpoint_config`, as of Ray 2.60: it stores ids, and only of rows that a write task has written
to the end; a finished reply that has not reached its output file is lost with the job. It needs a column of unique
ids that comes through to the sink, and loads all ids into each of its filter actors. A sink that is not one of Ray's
file sinks, as ours with its staging, gets its checkpoint after the write and so may write rows twice. Its file system
is pickled into tasks, with the keys in it (see `storage.py`).

Files are never changed and their names never reused, so nothing here depends on which of two writers was last, and
a reply stored twice is the same reply. When a writer has made `_PARTS` files of one block it replaces them by one;
a crash between the two steps leaves both. Replies that are errors are kept out when a run is taken up: the next
attempt asks those rows again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_provider_raylm.exceptions import StorageError
from airflow_provider_raylm.ray_data import storage as store
from airflow_provider_raylm.ray_data.schema import replace_surrogates
from airflow_provider_raylm.spec import StorageSpec

FLUSH_S = 2.0
FLUSH_ROWS = 2000
_PARTS = 8
_BLOCKS_HELD = 64
_REFUSALS = 2  # in a row, so that one odd answer ends no job
_SCHEMA = pa.schema([("row", pa.int64()), ("reply", pa.string())])


@dataclass
class _Block:
    """What this writer has not yet stored of one block, and the files with the rest."""

    waiting: list[tuple[int, str]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)


class Journal:
    """A `ReplyStore` on a folder. One per actor; its threads share it.

    Args:
        folder: `<output>/_raylm/runs/<fingerprint>/journal`.
        storage: See `open_filesystem`.
        flush_s: Seconds between writes; 0 for a journal that is written by `flush` only.
    """

    def __init__(self, folder: str, storage: StorageSpec | None, *, flush_s: float = FLUSH_S) -> None:
        self._folder = folder.rstrip("/")
        self._storage = storage
        self._writer = uuid.uuid4().hex[:12]
        self._number = 0
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._waiting_rows = 0
        self._lock = threading.Lock()  # guards the blocks; never held while the store is asked
        self._writing = threading.Lock()  # one write at a time
        self._wake = threading.Event()
        self._closed = False
        self._refusals = 0
        self._refused: StorageError | None = None
        self._thread: threading.Thread | None = None
        if flush_s:
            self._thread = threading.Thread(target=self._run, args=(flush_s,), name="raylm-journal", daemon=True)
            self._thread.start()

    def load(self, block: int) -> dict[int, dict[str, Any]]:
        """Replies of one input block that are answers, not errors, `{row: reply}`.

        Raises:
            StorageError: The store refused.
        """
        fs, root = store.open_filesystem(f"{self._folder}/{block}", self._storage)
        replies: dict[int, dict[str, Any]] = {}
        with store.explained(self._folder, self._storage):
            for entry in store.list_files(fs, root):
                # replaced by another file, or cut off by the crash of its writer
                with contextlib.suppress(FileNotFoundError, pa.ArrowInvalid):
                    table = _read(fs, entry.path)
                    for row, text in zip(table["row"].to_pylist(), table["reply"].to_pylist(), strict=True):
                        reply = json.loads(text)
                        if reply.get("status") == "ok":
                            replies[row] = reply
        return replies

    def append(self, block: int, row: int, reply: dict[str, Any]) -> None:
        """Keep a finished reply. Never blocks on the store.

        Raises:
            StorageError: The store has refused the credentials for some time: what finishes now would be lost.
        """
        if self._refused is not None:
            raise self._refused
        text = replace_surrogates(json.dumps(reply, ensure_ascii=False))  # one row must not keep others from the store
        with self._lock:
            self._blocks.setdefault(block, _Block()).waiting.append((row, text))
            self._blocks.move_to_end(block)
            self._waiting_rows += 1
            full = self._waiting_rows >= FLUSH_ROWS
        if full:
            self._wake.set()

    def flush(self) -> None:
        """Return when everything appended is stored.

        Raises:
            StorageError: The store refused; what was not stored is kept for the next call.
        """
        with self._writing:
            fs, root = store.open_filesystem(self._folder, self._storage)
            with self._lock:
                touched = [number for number, block in self._blocks.items() if block.waiting]
            with store.explained(self._folder, self._storage):
                for number in touched:
                    self._write(fs, f"{root}/{number}", number)
            self._forget()

    def close(self) -> None:
        """Store what is left, and end the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()

    def _write(self, fs: Any, folder: str, number: int) -> None:
        with self._lock:
            block = self._blocks[number]
            new = list(block.waiting)
            merged = list(block.parts) if len(block.parts) >= _PARTS else []
        old = []
        for part in merged:  # read again rather than kept: an actor has tens of thousands of rows under way
            with contextlib.suppress(FileNotFoundError):  # the run is over, and somebody has tidied up
                old.append(_read(fs, part))
        self._number += 1
        path = f"{folder}/{self._writer}-{self._number:06d}.parquet"
        buffer = pa.BufferOutputStream()
        table = pa.table([[row for row, _ in new], [text for _, text in new]], schema=_SCHEMA)
        pq.write_table(pa.concat_tables([*old, table]), buffer, compression="zstd")
        store.write_bytes(fs, path, buffer.getvalue())
        with self._lock:
            block.parts = [path] if merged else [*block.parts, path]
            del block.waiting[: len(new)]
            self._waiting_rows -= len(new)
        store.delete_files(fs, merged)

    def _forget(self) -> None:
        with self._lock:
            idle = [number for number, block in self._blocks.items() if not block.waiting]
            for number in idle[: max(0, len(self._blocks) - _BLOCKS_HELD)]:
                del self._blocks[number]

    def flush_or_wait(self) -> None:
        """Store what can be stored; what cannot is kept for the next time, and the sink will say if there is none."""
        try:
            self.flush()
        except StorageError as exc:
            self._refusals = self._refusals + 1 if exc.refused else 0
            self._refused = exc if self._refusals >= _REFUSALS else None
            logging.getLogger(__name__).warning("replies could not be stored yet: %s", exc)
        else:
            self._refusals, self._refused = 0, None

    def _run(self, flush_s: float) -> None:
        while not self._closed:
            self._wake.wait(flush_s)
            self._wake.clear()
            try:
                self.flush_or_wait()
            except Exception:  # the thread must go on; `close` stores what is left, or fails the job
                logging.getLogger(__name__).exception("replies could not be stored yet")


def _read(fs: Any, path: str) -> pa.Table:
    if (data := store.read_bytes(fs, path)) is None:
        raise FileNotFoundError(path)
    return pq.read_table(pa.BufferReader(data), schema=_SCHEMA)
