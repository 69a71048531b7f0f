"""One run at a time on an output folder, on a store without locks or a conditional write that pyarrow can send.

A lock is an object with its owner's name in it, rewritten every `BEAT_S`. To take it: read it (free), write one's
own name, wait `SETTLE_S`, read again. The last to write sees its own name and owns the folder; all others see that
name and fail. This is safe as long as nobody needs longer than `SETTLE_S` from reading a free lock to having
written it, which is measured; who was slower starts again. OSS and S3 show a write to every later read.

Whether an owner is alive is seen from its beats, by the reader's own clock: clocks of different machines are never
compared. A lock that stands still for `EXPIRY_S` is void. An owner that finds another name in its lock, or could
not renew it for most of that time, has lost it; the commit asks before each of its steps.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow_provider_raylm.exceptions import OutputError, RaylmError
from airflow_provider_raylm.ray_data import storage as store
from airflow_provider_raylm.spec import StorageSpec

log = logging.getLogger(__name__)

BEAT_S = 5.0
SETTLE_S = 2.0
EXPIRY_S = 30.0


class FolderLock:
    """The right to write to one output folder. Use as a context manager.

    Args:
        read: Returns the lock object's bytes, `None` when there is none.
        write: Replaces it.
        delete: Removes it; one that is gone is fine.
        folder: For messages.
        owner: Shown to whoever comes second: dag, task, run.
        process: Identifies the owner's process, see `this_process`.
        is_dead: Told the lock of another owner; `True` when that owner is known to have ended.
    """

    def __init__(
        self,
        read: Callable[[], bytes | None],
        write: Callable[[bytes], None],
        delete: Callable[[], None],
        *,
        folder: str,
        owner: Mapping[str, str],
        process: Mapping[str, Any] | None = None,
        is_dead: Callable[[Mapping[str, Any]], bool] = lambda lock: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read, self._write, self._delete = read, write, delete
        self._folder = folder
        self._owner = dict(owner)
        self._process = dict(process or {})
        self._is_dead = is_dead
        self._clock, self._sleep = clock, sleep
        self._name = uuid.uuid4().hex
        self._beats = 0
        self._confirmed_s = 0.0
        self._lost = False
        self._error = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FolderLock:
        self.acquire()
        self._thread = threading.Thread(target=self._run, name="raylm-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.release()
        except (RaylmError, OSError) as exc:
            # it becomes void by itself, and what ended the run matters more
            log.warning("the lock of %s was not given back: %s", self._folder, exc)

    def acquire(self) -> None:
        """Take the lock, or fail.

        Raises:
            OutputError: Another run is writing to the folder.
        """
        while True:
            began_s = self._clock()
            lock = self._seen()
            if (
                lock is not None
                and lock.get("name") != self._name
                and not self._is_dead(lock)
                and not self._stands_still(lock)
            ):
                continue
            self._beat()
            if self._clock() - began_s > SETTLE_S:
                continue
            self._sleep(SETTLE_S)
            now = self._seen()
            if now is not None and now.get("name") == self._name:
                return

    def check(self) -> None:
        """Make sure that the folder is still ours.

        Raises:
            OutputError: It is not, or that cannot be known.
        """
        if self._lost:
            raise OutputError(f"{self._folder}: another run took over this output folder; nothing more is written")
        if (silent_s := self._clock() - self._confirmed_s) > 0.8 * EXPIRY_S:
            raise OutputError(
                f"{self._folder}: this run could not renew its lock on the output folder for {silent_s:.0f} s, so "
                f"another may have it; nothing more is written. {self._error}".rstrip()
            )

    def renew(self) -> None:
        """Beat once, unless the lock has gone to another."""
        if self._lost:
            return
        lock = self._seen()
        if lock is None or lock.get("name") == self._name:
            self._beat()
        else:
            self._lost = True

    def release(self) -> None:
        """Give the lock back, if it is ours."""
        lock = self._seen()
        if lock is not None and lock.get("name") == self._name:
            self._delete()

    def _stands_still(self, first: Mapping[str, Any]) -> bool:
        """Watch a lock of another owner: `True` when it is void, `False` when it was given back."""
        began_s = self._clock()
        while self._clock() - began_s < EXPIRY_S:
            self._sleep(1.0)
            lock = self._seen()
            if lock is None:
                return False
            if lock != first:
                owner = ", ".join(f"{k}={v}" for k, v in lock.get("owner", {}).items()) or "unknown"
                raise OutputError(
                    f"{self._folder}: another run is writing to this output folder ({owner}); nothing was changed. "
                    "Wait for it, or give this run a folder of its own"
                )
        return True

    def _seen(self) -> dict[str, Any] | None:
        data = self._read()
        if data is None:
            return None
        try:
            lock = json.loads(data)
        except ValueError:
            return {}
        return lock if isinstance(lock, dict) else {}

    def _beat(self) -> None:
        self._beats += 1
        began_s = self._clock()
        lock = {"name": self._name, "beat": self._beats, "owner": self._owner, "process": self._process}
        self._write(json.dumps(lock).encode())
        self._confirmed_s = began_s

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self.renew()
            except (RaylmError, OSError) as exc:
                self._error = str(exc)
                log.warning("the lock of %s was not renewed: %s", self._folder, exc)


def folder_lock(path: str, storage: StorageSpec | None, **kwargs: Any) -> FolderLock:
    """The lock object at a path, as `open_filesystem` takes it."""

    def asking(work: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            with store.explained(path, storage):
                fs, found = store.open_filesystem(path, storage)
                return work(fs, found, *args)

        return ask

    return FolderLock(
        asking(store.read_bytes),
        asking(store.write_bytes),
        asking(lambda fs, found: store.delete_files(fs, [found])),
        process=this_process(),
        is_dead=has_ended_here,
        **kwargs,
    )


def this_process() -> dict[str, Any]:
    """What tells this process from every other one; empty where `/proc` does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # process ids mean something only inside their namespace: containers of one machine have several
        space = f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return {}
    return {"space": space, "pid": os.getpid(), "started": _started(os.getpid())}


def has_ended_here(lock: Mapping[str, Any]) -> bool:
    """Whether a lock's owner was a process of this machine that is gone."""
    owner, here = lock.get("process") or {}, this_process()
    return bool(here) and owner.get("space") == here["space"] and _started(owner["pid"]) != owner["started"]


def _started(pid: int) -> str | None:
    """When a living process began, in ticks of this machine; `None` when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
