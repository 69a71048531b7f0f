"""The strict store refuses what OSS refuses: plain pyarrow fails on it, what this package opens works on it."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import pyarrow as pa
import pyarrow.csv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from airflow_provider_raylm.exceptions import StorageError
from airflow_provider_raylm.ray_data import source, storage
from airflow_provider_raylm.spec import StorageSpec
from demo.object_store import Faults, ObjectStore, object_store

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def store():
    with object_store() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_faults(store):
    storage._clients.clear()
    yield
    store.faults.__dict__.update(Faults().__dict__)


def spec_of(store: ObjectStore, **changes: object) -> StorageSpec:
    spec = StorageSpec(
        endpoint_url=store.endpoint_url,
        region=store.region,
        access_key_id=store.access_key_id,
        secret_access_key=store.secret_access_key,
        sts_endpoint_url=store.endpoint_url,
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
        ({"session_token": "old"}, {}, "lake", "session token is not valid"),
        ({"role_arn": "acs:ram::1:role/other"}, {}, "lake", "role/other could not be assumed: NoPermission"),
        ({"role_arn": "arn:aws:iam::1:role/other"}, {}, "lake", "role/other could not be assumed: AccessDenied"),
        (
            {"role_arn": "acs:ram::1:role/lake-writer", "secret_access_key": "wrong"},
            {},
            "lake",
            "lake-writer could not be assumed: SignatureDoesNotMatch",
        ),
        ({"addressing_style": "path"}, {}, "lake", "virtual-hosted"),
        ({"anonymous": True}, {}, "lake", "access denied"),
    ],
)
def test_what_is_wrong_is_said(store, changes, faults, bucket, words):
    """A sentence for each way to be refused, without a key in it."""
    store.faults.__dict__.update(faults)
    spec = spec_of(store, **changes)

    def look() -> None:
        fs, path = storage.open_filesystem(f"oss://{bucket}/x", spec)
        storage.list_files(fs, path) or storage.check_bucket(fs, path)

    with pytest.raises(StorageError, match=words) as caught, storage.explained(f"oss://{bucket}/x", spec):
        look()
    assert store.secret_access_key not in str(caught.value)


def put(name: str, spec: StorageSpec, data: bytes = b"x") -> None:
    with storage.explained(f"oss://lake/{name}", spec):
        fs, path = storage.open_filesystem(f"oss://lake/{name}", spec)
        storage.write_bytes(fs, path, data)


@pytest.mark.parametrize("arn", ["acs:ram::1:role/lake-writer", "arn:aws:iam::1:role/lake-writer"])
def test_keys_of_a_role_are_renewed(store, arn):
    """Alibaba's and AWS's: new keys before the old ones end, and where they ended early; one request each time."""
    spec = spec_of(store, role_arn=arn)
    store.role_lifetime_s = 3600.0
    before = len(store.issued)
    for _ in range(3):
        put("role", spec)
    assert len(store.issued) == before + 1
    store.expire()
    with pytest.raises(StorageError, match="they are asked for anew") as caught:
        put("role", spec)
    assert (caught.value.expired, caught.value.refused) == (True, False)
    store.role_lifetime_s = 1.0
    put("role", spec)
    time.sleep(1.0)
    put("role", spec)
    assert len(store.issued) == before + 3


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_file_that_is_open_for_longer_than_a_roles_keys_last_is_read_once(store, monkeypatch, kind):
    """A slow model keeps its input waiting; the keys end in the middle of the file, again and again."""
    monkeypatch.setattr(source, "_READ_BYTES", 2**14)
    monkeypatch.setattr(source, "_CSV_BLOCK_BYTES", (2**14, 2**26))
    monkeypatch.setattr(source, "BLOCK_ROWS", 512)
    store.role_lifetime_s = 3600.0
    spec = spec_of(store, role_arn="acs:ram::1:role/lake-writer")
    table = pa.table({"id": range(6000), "text": [os.urandom(20).hex() for _ in range(6000)]})
    buffer = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(table, buffer, row_group_size=500)
    elif kind == "csv":
        pa.csv.write_csv(table, buffer)
    else:
        buffer.write("".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode())
    put(f"long.{kind}", spec, buffer.getvalue().to_pybytes())
    path = f"oss://lake/long.{kind}"
    plan = source.make_plan(path, spec)
    tasks = source.PlannedSource(plan, path, spec, "oss://lake/counts", spec_of(store)).get_read_tasks(1)
    tables, began = [], len(store.issued)
    for task in tasks:
        for number, block in enumerate(task()):
            tables.append(block)
            if number % 3 == 0:
                store.expire()
    read = pa.concat_tables(tables)
    assert len(store.issued) > began
    assert read["id"].to_pylist() == list(range(6000))
    keys = zip(read[source.BLOCK_COL].to_pylist(), read[source.ROW_COL].to_pylist(), strict=True)
    assert len(set(keys)) == 6000


@pytest.mark.parametrize("ask", ["get_file_info", "read_bytes", "write_bytes", "list_files"])
def test_an_expired_token_is_one_sentence_whatever_was_asked(store, ask):
    """Also where the store answers without a body."""
    keys = store.issue(3600.0)
    spec = spec_of(store, conn_id="aliyun_oss", **{k: v for k, v in vars(keys).items() if k != "expires_s"})
    put("token", spec)
    store.expire()
    fs, path = storage.open_filesystem("oss://lake/token", spec)
    work = {
        "get_file_info": lambda: fs.get_file_info(path),
        "read_bytes": lambda: storage.read_bytes(fs, path),
        "write_bytes": lambda: storage.write_bytes(fs, path, b"y"),
        "list_files": lambda: storage.list_files(fs, "lake"),
    }[ask]
    words = "oss://lake/token: the session token of the connection 'aliyun_oss' has expired; the finished rows are"
    with pytest.raises(StorageError, match=words) as caught, storage.explained("oss://lake/token", spec):
        work()
    assert (caught.value.expired, caught.value.refused) == (True, True)


@pytest.mark.parametrize(
    "faults", [{"slow_down_every": 5, "truncate_every": 3}, {"error_every": 3}, {"lose_every": 4}], ids=str
)
def test_a_faulty_store_is_retried(store, faults):
    """It says SlowDown, cuts bodies, fails, or does what it was asked without an answer: the data is right."""
    store.faults.__dict__.update(faults)
    fs, _ = storage.open_filesystem("oss://lake", spec_of(store))
    for number in range(12):
        storage.write_bytes(fs, f"lake/faults/{number}", bytes([number]) * 1000)
        assert storage.read_bytes(fs, f"lake/faults/{number}") == bytes([number]) * 1000
        storage.copy(fs, f"lake/faults/{number}", f"lake/faults/c{number}")
        storage.delete_files(fs, [f"lake/faults/c{number}"])
        assert storage.read_bytes(fs, f"lake/faults/c{number}") is None


def test_a_clock_that_is_an_hour_wrong_does_no_harm(store):
    """The SDK takes the store's time from its refusal and signs again."""
    store.faults.clock_offset_s = 3600.0
    put("clock", spec_of(store))


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
