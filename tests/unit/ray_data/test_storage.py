"""Opening a file system: what the client is made with, and what is refused before any request."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data import credentials, storage
from airflow_provider_raylm.ray_data.credentials import Credentials
from airflow_provider_raylm.spec import StorageSpec

OSS = StorageSpec(endpoint_url="https://oss-cn-beijing-internal.aliyuncs.com", access_key_id="a", secret_access_key="b")


def options_of(fs: Any) -> dict[str, Any]:
    """What a client was made with, as pyarrow would pickle it."""
    return fs.__reduce__()[1][0]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "ALIBABA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(storage.CHECKSUM_VARIABLE, "when_supported")
    storage._clients.clear()


def test_a_client_for_oss(monkeypatch):
    """Virtual-hosted, signed for the endpoint's region, plain bodies, and patient with a store that is busy."""
    strategies = []
    real = pafs.S3FileSystem
    monkeypatch.setattr(pafs, "S3FileSystem", lambda **kw: (strategies.append(kw["retry_strategy"]), real(**kw))[1])
    fs, path = storage.open_filesystem("oss://lake//a/b/", OSS)
    assert path == "lake/a/b"
    assert os.environ[storage.CHECKSUM_VARIABLE] == "when_required"
    expected = {
        "endpoint_override": "oss-cn-beijing-internal.aliyuncs.com",
        "scheme": "https",
        "region": "cn-beijing",
        "force_virtual_addressing": True,
        "connect_timeout": 10.0,
        "request_timeout": 60.0,
    }
    assert {name: options_of(fs)[name] for name in expected} == expected
    assert [strategy.max_attempts for strategy in strategies] == [10]


def test_the_endpoint_may_be_part_of_the_bucket(monkeypatch):
    """As Hadoop writes it."""
    keys = dataclasses.replace(OSS, endpoint_url=None)
    fs, path = storage.open_filesystem("oss://lake.oss-cn-shanghai.aliyuncs.com/a", keys)
    assert path == "lake/a"
    assert options_of(fs)["endpoint_override"] == "oss-cn-shanghai.aliyuncs.com"
    assert options_of(fs)["region"] == "cn-shanghai"


def test_a_client_is_kept_until_its_credentials_are_about_to_expire(monkeypatch):
    """One client per process; the role is asked again before its keys run out."""
    role = dataclasses.replace(OSS, access_key_id=None, secret_access_key=None)
    given = iter([Credentials("a", "b", "c", 10_000.0), Credentials("d", "e", "f", 20_000.0)])
    monkeypatch.setattr(credentials, "alibaba_role", lambda environ: next(given))
    keys = []
    for now_s in (0.0, 9_000.0, 9_800.0, 12_000.0):
        monkeypatch.setattr(storage.time, "time", lambda now_s=now_s: now_s)
        fs, _ = storage.open_filesystem("oss://lake/a", role)
        keys.append(options_of(fs)["access_key"])
    assert keys == ["a", "a", "d", "d"]


@pytest.mark.parametrize(
    ("path", "spec", "words"),
    [
        ("gs://lake/a", OSS, "gs:// is not supported"),
        ("oss:///a", OSS, "names no bucket"),
        ("oss://lake/a", None, "needs an endpoint such as"),
        ("oss://lake/a", dataclasses.replace(OSS, verify=False), "always verifies TLS"),
    ],
)
def test_paths_that_cannot_be_opened_are_named(path, spec, words):
    """Before any request."""
    with pytest.raises(SpecError, match=words):
        storage.open_filesystem(path, spec)


@pytest.mark.parametrize("path", ["{}/x", "file://{}/x"])
def test_local_paths(tmp_path, path):
    """With and without a scheme."""
    fs, opened = storage.open_filesystem(path.format(tmp_path), None)
    assert storage.is_local(fs)
    assert opened == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("path", "hidden"),
    [("a/b", False), ("_a/b", True), ("a/.b", True), ("a/_SUCCESS", True), ("_day=1/b", False), ("a/.x=1/b", True)],
)
def test_hidden_is_what_other_readers_skip(path, hidden):
    """`_col=value` is a partition, not a hidden folder."""
    assert storage.is_hidden(path) is hidden


class _Refuses:
    """A file system whose every second read ends as that of a store which says SlowDown in more bytes than asked."""

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, 0

    def open_input_file(self, path: str) -> _Refuses:
        return self

    def size(self) -> int:
        return len(self.data)

    def read_at(self, count: int, at: int) -> bytes:
        self.reads += 1
        if self.reads % 2:
            raise OSError("AWS Error INTERNAL_FAILURE during GetObject operation: Failed to flush response stream")
        return self.data[at : at + count]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("codec", [None, "gzip"])
def test_a_refusal_longer_than_what_was_asked_for_is_asked_again(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """The SDK does not; small files and footers would fail at the first SlowDown."""
    monkeypatch.setattr(storage, "_PAUSE_S", 0)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) if codec else sink as stream:
        stream.write(b"one\ntwo\n")
    fs = _Refuses(sink.getvalue().to_pybytes())
    with storage.open_object(fs, "bucket/key", codec) as file:
        assert file.read() == b"one\ntwo\n"
    assert fs.reads >= 2


def test_other_errors_of_a_read_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused key stays refused."""
    asked = []

    def read() -> None:
        asked.append(1)
        raise OSError("ACCESS_DENIED")

    with pytest.raises(OSError, match="ACCESS_DENIED"):
        storage.again(read)
    assert len(asked) == 1
