"""The folder lock, in virtual time: one owner, a clear word for the second, and no waiting for the dead for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

from airflow_provider_raylm.exceptions import OutputError, StorageError
from airflow_provider_raylm.ray_data import lock as lock_module
from airflow_provider_raylm.ray_data.lock import EXPIRY_S, SETTLE_S, FolderLock, has_ended_here, this_process


class Store:
    """One object and a clock; `at` runs something when the clock passes a time."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.now = 0.0
        self.every = lambda: None

    def write(self, data: bytes) -> None:
        self.data = data

    def delete(self) -> None:
        self.data = None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.every()

    def lock(self, **kwargs) -> FolderLock:
        kwargs = {"write": self.write, "sleep": self.sleep, **kwargs}
        return FolderLock(
            lambda: self.data, delete=self.delete, folder="out", owner={"run": "r"}, clock=lambda: self.now, **kwargs
        )


def test_a_free_folder_is_taken_and_given_back():
    """Acquire, check, release."""
    store = Store()
    lock = store.lock()
    lock.acquire()
    lock.check()
    lock.release()
    assert store.data is None


def test_the_second_run_fails_and_is_told_who_writes():
    """A lock whose owner beats is respected."""
    store = Store()
    first = store.lock()
    first.acquire()
    store.every = first.renew
    with pytest.raises(OutputError, match=r"another run is writing.*run=r"):
        store.lock().acquire()
    first.check()


def test_a_dead_owner_is_waited_for_only_so_long():
    """A lock that stands still is void."""
    store = Store()
    store.lock().acquire()
    began = store.now
    second = store.lock()
    second.acquire()
    second.check()
    assert store.now - began >= EXPIRY_S


def test_of_two_that_write_at_once_the_last_owns_the_folder():
    """The first sees the other's name when the writes have settled."""
    store = Store()
    rival = store.lock()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        if not waited and seconds == SETTLE_S:
            rival.acquire()
            store.every = rival.renew
        waited.append(seconds)
        store.now += seconds
        store.every()

    with pytest.raises(OutputError, match="another run"):
        store.lock(sleep=sleep).acquire()
    rival.check()


def test_an_owner_that_was_cut_off_stops():
    """Without a renewal it may not write, whoever owns the folder now."""
    store = Store()
    lock = store.lock()
    lock.acquire()
    store.now += EXPIRY_S
    with pytest.raises(OutputError, match="could not renew its lock"):
        lock.check()


def test_an_owner_that_finds_another_name_stops():
    """It neither beats over the other's lock nor deletes it."""
    store = Store()
    first = store.lock()
    first.acquire()
    store.data = b'{"name": "other", "beat": 1}'
    first.renew()
    with pytest.raises(OutputError):
        first.check()
    first.release()
    assert store.data is not None


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for():
    """A killed driver's lock is void at once; that of a living process, or of another machine, is not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        owner = {**this_process(), "pid": child.pid, "started": lock_module._started(child.pid)}
        assert not has_ended_here({"process": owner})
    finally:
        child.kill()
        child.wait()
    assert has_ended_here({"process": owner})
    assert has_ended_here({"process": {**this_process(), "started": "another process had this number"}})
    assert not has_ended_here({"process": {**owner, "space": "elsewhere"}})
    assert not has_ended_here({})


def test_the_lock_of_an_owner_that_is_known_to_be_dead_is_taken_at_once():
    """Without the wait for a beat."""
    store = Store()
    store.lock().acquire()
    store.now = 0.0
    second = store.lock(is_dead=lambda lock: True)
    second.acquire()
    assert store.now == SETTLE_S
    second.check()


def test_a_store_that_refuses_at_the_end_does_not_hide_what_ended_the_run():
    """The lock becomes void by itself."""
    store = Store()

    def refuse() -> None:
        raise StorageError("expired")

    lock = store.lock()
    lock._delete = refuse
    with pytest.raises(KeyError), lock:
        raise KeyError
