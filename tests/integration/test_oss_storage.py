"""The strict store refuses what OSS refuses: plain pyarrow fails on it, what this package opens works on it."""

from __future__ import annotations

import dataclasses
import os

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from airflow_provider_raylm.exceptions import StorageError
from airflow_provider_raylm.ray_data import storage
from airflow_provider_raylm.spec import StorageSpec
from demo.object_store import Faults, ObjectStore, object_store

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def store():
    with object_store() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_faults(store):
    yield
    store.faults.__dict__.update(Faults().__dict__)


def spec_of(store: ObjectStore, **changes: object) -> StorageSpec:
    spec = StorageSpec(
        endpoint_url=store.endpoint_url,
        region=store.region,
        access_key_id=store.access_key_id,
        secret_access_key=store.secret_access_key,
    )
    return dataclasses.replace(spec, **changes)


def plain(store: ObjectStore, **kwargs: object) -> pafs.S3FileSystem:
    return pafs.S3FileSystem(
        access_key=store.access_key_id,
        secret_key=store.secret_access_key,
        region=store.region,
        scheme="http",
        endpoint_override=store.endpoint_url.removeprefix("http://"),
        **kwargs,
    )


def test_plain_pyarrow_fails(store, monkeypatch):
    """Path style, then aws-chunked, then DeleteObjects without Content-MD5: each as OSS refuses it."""
    monkeypatch.delenv(storage.CHECKSUM_VARIABLE, raising=False)
    with pytest.raises(OSError, match="SecondLevelDomainForbidden"):
        plain(store).get_file_info(pafs.FileSelector("lake"))
    virtual = plain(store, force_virtual_addressing=True)
    with pytest.raises(OSError, match="aws-chunked encoding is not supported"):
        pq.write_table(pa.table({"a": [1]}), "lake/plain.parquet", filesystem=virtual)
    monkeypatch.setenv(storage.CHECKSUM_VARIABLE, "when_required")
    virtual = plain(store, force_virtual_addressing=True)
    pq.write_table(pa.table({"a": [1]}), "lake/dir/plain.parquet", filesystem=virtual)
    with pytest.raises(OSError, match="MissingArgument"):
        virtual.delete_dir("lake/dir")


def test_ours_writes_reads_copies_lists_and_deletes(store):
    """Names with spaces, `=`, `+` and Chinese; large files in parts."""
    fs, folder = storage.open_filesystem("oss://lake/dt=2026-12-01/a +中/", spec_of(store))
    big = os.urandom(12 * 2**20)
    for name, data in (("small", b"x"), ("big", big)):
        storage.write_bytes(fs, f"{folder}/{name}", data)
        storage.copy(fs, f"{folder}/{name}", f"{folder}/copies/{name}")
        assert storage.read_bytes(fs, f"{folder}/copies/{name}") == data
    assert any("partNumber" in what for _, what in store.requests)
    assert [e.size for e in storage.list_files(fs, folder)] == [len(big), len(big), 1, 1]
    storage.delete_folder(fs, folder)
    assert storage.list_files(fs, folder, hidden=True) == []
    assert storage.read_bytes(fs, f"{folder}/small") is None


def test_listings_of_thousands_of_objects_are_complete():
    """More than one page of 1,000."""
    with object_store() as store:  # one that has listed nothing yet: the server remembers listings for ten seconds
        folder = store.folder / "many"
        folder.mkdir()
        for number in range(2345):
            (folder / f"{number}.csv").write_text("x")
        fs, path = storage.open_filesystem("oss://lake/many", spec_of(store))
        assert len(storage.list_files(fs, path)) == 2345


@pytest.mark.parametrize(
    ("changes", "faults", "bucket", "words"),
    [
        ({"secret_access_key": "wrong"}, {}, "lake", "secret key is wrong"),
        ({"access_key_id": "wrong"}, {}, "lake", "does not know the access key id"),
        ({}, {}, "nobucket", "bucket 'nobucket' does not exist"),
        ({}, {"clock_offset_s": 3600.0}, "lake", "clock of the cluster"),
        ({"session_token": "old"}, {"token_expired": True}, "lake", "temporary credentials have expired"),
        ({"addressing_style": "path"}, {}, "lake", "virtual-hosted"),
        ({"anonymous": True}, {}, "lake", "access denied"),
    ],
)
def test_what_is_wrong_is_said(store, changes, faults, bucket, words):
    """A sentence for each way to be refused, without a key in it."""
    store.faults.__dict__.update(faults)
    fs, path = storage.open_filesystem(f"oss://{bucket}/x", spec_of(store, **changes))
    with pytest.raises(StorageError, match=words) as caught, storage.explained(f"oss://{bucket}/x"):
        storage.list_files(fs, path) or storage.check_bucket(fs, path)
    assert store.secret_access_key not in str(caught.value)


def test_a_store_that_is_slow_or_cuts_bodies_is_retried(store):
    """Every fifth request is told to slow down, every third body ends early: the data is right nevertheless."""
    store.faults.slow_down_every = 5
    store.faults.truncate_every = 3
    fs, _ = storage.open_filesystem("oss://lake", spec_of(store))
    for number in range(12):
        storage.write_bytes(fs, f"lake/faults/{number}", bytes([number]) * 1000)
        assert storage.read_bytes(fs, f"lake/faults/{number}") == bytes([number]) * 1000


def test_retries_do_not_run_out_on_a_store_that_stays_bad(store):
    """A long job meets hundreds of cut downloads with one client; each of them is read again."""
    fs, _ = storage.open_filesystem("oss://lake", spec_of(store))
    storage.write_bytes(fs, "lake/bad", b"x" * 1000)
    store.faults.truncate_every = 2
    assert all(storage.read_bytes(fs, "lake/bad") == b"x" * 1000 for _ in range(300))


def test_a_refusal_longer_than_the_object_is_read_over(store):
    """After a cut download a SlowDown whose text is longer than a tiny object ends the SDK's retries, not ours."""
    fs, _ = storage.open_filesystem("oss://lake", spec_of(store))
    storage.write_bytes(fs, "lake/tiny", b"0123456789")
    store.faults.slow_down_every, store.faults.truncate_every = 7, 5
    assert all(storage.read_bytes(fs, "lake/tiny") == b"0123456789" for _ in range(60))
