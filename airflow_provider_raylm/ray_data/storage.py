"""Where input is read and output is written: Alibaba OSS, any S3-compatible store, or folders that every node sees.

All of it goes through `open_filesystem`, in every process, for three reasons.

OSS refuses what pyarrow sends by default: uploads in `aws-chunked` form, which the AWS SDK inside it chooses unless
`AWS_REQUEST_CHECKSUM_CALCULATION=when_required` is in the environment at the moment a client is made. The SDK reads
it then, not when pyarrow is imported, so setting it here, just before, holds in drivers and workers alike; nothing
has to be passed down to them.

An open file system is never sent to another process: pickling it would carry keys that may have expired, and would
make a client without the setting above. Processes get the `StorageSpec` and open their own.

Temporary credentials of a role run out during a long job. They are asked for again before they do, each time
somebody opens the file system; so nobody keeps it: it is opened for each piece of work. A session token in a
`StorageSpec` cannot be renewed from here: the job then fails with a sentence that says so, and its next attempt,
with a fresh one, goes on where it stopped.

`DeleteObjects` needs `Content-MD5` on OSS and pyarrow 26 does not send it, so objects are deleted one by one,
several at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from airflow_provider_raylm.exceptions import SpecError, StorageError
from airflow_provider_raylm.ray_data.credentials import OSS_HOST, find_credentials, renew_themselves
from airflow_provider_raylm.spec import StorageSpec

CHECKSUM_VARIABLE = "AWS_REQUEST_CHECKSUM_CALCULATION"
_MAX_ATTEMPTS = (
    10  # of one request, with the SDK's exponential pauses: about half a minute of a store that says SlowDown
)
_CONNECT_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_S = 60.0  # without a byte; pyarrow's own 3 s end requests when either side is merely busy
_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_DELETE_THREADS = 16
_RENEW_BEFORE_S = 300.0
_RENEW_AGAIN_S = 30.0

Read = TypeVar("Read")

_OBJECT_SCHEMES = ("oss", "s3", "s3a", "s3n")


def open_filesystem(path: str, storage: StorageSpec | None) -> tuple[Any, str]:
    """Open the file system that a path lies on, with this process's own client.

    Args:
        path: `oss://bucket/key`, `oss://bucket.<endpoint>/key`, `s3://bucket/key`, `file:///folder` or a local path.
        storage: Endpoint and credentials; `None` lets the path and the cluster's environment answer.

    Returns:
        The `pyarrow.fs.FileSystem`, and the path as it wants it (`bucket/key` or an absolute local path).

    Raises:
        SpecError: The path has another scheme or no bucket, or an `oss://` path has no endpoint.
        StorageError: The cluster's role gave no credentials.
    """
    known, found = _locate(path, storage)
    return (pafs.LocalFileSystem() if known is None else _client(known)), found


def _locate(path: str, storage: StorageSpec | None) -> tuple[StorageSpec | None, str]:
    """The store that a path lies on, `None` for local files, and the path on it."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return None, os.path.abspath(path)
    if scheme == "file":
        return None, os.path.abspath("/" + rest.lstrip("/"))
    if scheme not in _OBJECT_SCHEMES:
        raise SpecError(
            f"{path!r}: {scheme}:// is not supported; expected oss://, s3:// or a path that every node sees"
        )
    bucket, _, key = rest.partition("/")
    storage = storage or StorageSpec()
    if OSS_HOST.search(bucket):  # Hadoop's way to write it: the host name of the bucket
        bucket, _, host = bucket.partition(".")
        if storage.endpoint_url is None:
            storage = dataclasses.replace(storage, endpoint_url=f"https://{host}")
    if not bucket:
        raise SpecError(f"{path!r} names no bucket; expected {scheme}://<bucket>/<key>")
    if scheme == "oss" and storage.endpoint_url is None and not _environment_endpoint():
        raise SpecError(
            f"{path!r}: an oss:// path needs an endpoint such as https://oss-cn-hangzhou-internal.aliyuncs.com; "
            "set endpoint_url in the storage connection's extra"
        )
    key = "/".join(part for part in key.split("/") if part)
    return storage, f"{bucket}/{key}" if key else bucket


@dataclass(frozen=True)
class _Client:
    """A client of this process; times are wall clock, `None` for keys that last."""

    fs: Any
    renew_s: float | None
    expires_s: float | None


_clients: dict[StorageSpec, _Client] = {}
_clients_lock = threading.Lock()


def _client(storage: StorageSpec) -> Any:
    with _clients_lock:
        client = _clients.get(storage)
        now_s = time.time()
        if client is None or (client.renew_s is not None and now_s > client.renew_s):
            try:
                fs, expires_s = _make_client(storage)
            except StorageError as exc:
                if client is None or client.expires_s is None or now_s > client.expires_s:
                    raise
                logging.getLogger(__name__).warning("the store's keys are not renewed yet: %s", exc)
                _clients[storage] = dataclasses.replace(client, renew_s=now_s + _RENEW_AGAIN_S)
            else:
                renew_s = None if expires_s is None else max(expires_s - _RENEW_BEFORE_S, (now_s + expires_s) / 2)
                client = _clients[storage] = _Client(fs, renew_s, expires_s)
        return client.fs


def _make_client(storage: StorageSpec) -> tuple[Any, float | None]:
    os.environ[CHECKSUM_VARIABLE] = "when_required"
    options: dict[str, Any] = {
        "allow_delayed_open": True,  # one request for a small object instead of the three of a multipart upload
        # the SDK's standard strategy stops retrying at all when a client has used up its quota of about a hundred
        "retry_strategy": pafs.AwsDefaultS3RetryStrategy(max_attempts=_MAX_ATTEMPTS),
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "request_timeout": _REQUEST_TIMEOUT_S,
        "force_virtual_addressing": storage.addressing_style == "virtual",
        "region": storage.region,
    }
    endpoint = storage.endpoint_url or _environment_endpoint()
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        host = host.rstrip("/")
        options |= {"scheme": scheme or "https", "endpoint_override": host}
        match = OSS_HOST.search(host.partition(":")[0])
        # any region signs; without one the SDK asks the metadata service of AWS, and waits for it
        options["region"] = storage.region or (match["region"] if match else None) or _environment_region()
    if storage.verify is False and options.get("scheme") != "http":
        raise SpecError("storage: pyarrow always verifies TLS; name a CA bundle on the cluster instead of verify=False")
    if isinstance(storage.verify, str):
        options["tls_ca_file_path"] = storage.verify
    if storage.anonymous:
        return pafs.S3FileSystem(anonymous=True, **options), None
    host = (endpoint or "").rpartition("://")[2].rstrip("/")
    credentials = find_credentials(storage, host, options["region"] or _environment_region(), os.environ)
    if credentials is None:  # the SDK's own chain: AWS variables, profile, instance role; it renews by itself
        return pafs.S3FileSystem(**options), None
    return pafs.S3FileSystem(
        access_key=credentials.access_key_id,
        secret_key=credentials.secret_access_key,
        session_token=credentials.session_token,
        **options,
    ), credentials.expires_s


def _environment_endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _environment_region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


_DENIED = "access denied: the keys or the role may not do this"
_EXPIRED = re.compile(r"SecurityTokenExpired|ExpiredToken|EXPIRED_TOKEN|TokenRefreshRequired")
_REASONS: tuple[tuple[str, str, bool], ...] = (  # pattern, reason, whether the store refuses the credentials
    (r"NO_SUCH_BUCKET|NoSuchBucket", "the bucket does not exist", False),
    (r"INVALID_ACCESS_KEY_ID|InvalidAccessKeyId", "the store does not know the access key id", True),
    (r"SIGNATURE_DOES_NOT_MATCH|SignatureDoesNotMatch", "the secret key is wrong", True),
    (r"REQUEST_TIME_TOO_SKEWED|RequestTimeTooSkewed", "the clock of the cluster is more than 15 minutes wrong", False),
    (r"InvalidSecurityToken|InvalidToken|INVALID_CLIENT_TOKEN_ID", "the session token is not valid", True),
    (
        r"SecondLevelDomainForbidden",
        "OSS takes only virtual-hosted addressing; set addressing_style to virtual in the storage connection",
        False,
    ),
    (r"SLOW_DOWN|SlowDown", f"the store still says SlowDown after {_MAX_ATTEMPTS} attempts", False),
    (r"ACCESS_DENIED|AccessDenied|HTTP status 403", _DENIED, True),
    (r"NETWORK_CONNECTION|resolve host|connect", "the store cannot be reached", False),
)


@contextlib.contextmanager
def explained(path: str, storage: StorageSpec | None = None, *, name: str | None = None) -> Iterator[None]:
    """Turn the store's errors into sentences. A path that does not exist stays `FileNotFoundError`.

    Args:
        path, storage: As `open_filesystem` takes them.
        name: What the message calls the path.

    Raises:
        StorageError: With the path, the reason in plain words, and the store's own code.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise _explanation(exc, path, storage, name or path) from exc


def _explanation(exc: OSError, path: str, storage: StorageSpec | None, name: str) -> StorageError:
    known, found = _locate(path, storage)
    text = str(exc)
    if known is not None and "ACCESS_DENIED" in text:
        # what is said of one object has no reason in it; what is said of a listing has
        try:
            _client(known).get_file_info(pafs.FileSelector(found.partition("/")[0]))
        except OSError as said:
            text = str(said)
    if _EXPIRED.search(text):
        renewed = known is not None and renew_themselves(known, os.environ)
        if known is not None and renewed:
            with _clients_lock:
                _clients.pop(known, None)
        reason = _expired(known or StorageSpec(), renewed=renewed)
        return StorageError(f"{name}: {reason} ({_brief(text)})", refused=not renewed, expired=True)
    for pattern, reason, refused in _REASONS:
        if re.search(pattern, text, re.IGNORECASE if pattern.islower() else 0):
            return StorageError(f"{name}: {reason} ({_brief(text)})", refused=refused)
    return StorageError(f"{name}: {_brief(text)}")


def _expired(storage: StorageSpec, *, renewed: bool) -> str:
    if renewed:
        return "the role's temporary credentials have expired; they are asked for anew"
    where = f"connection {storage.conn_id!r}" if storage.conn_id else "storage connection"
    return (
        f"the session token of the {where} has expired; the finished rows are stored, and the next attempt with a "
        "fresh token goes on from there. For jobs that outlive a token, give the connection lasting keys with a "
        "role_arn, or no keys, so that the cluster's own role answers"
    )


def _brief(text: str) -> str:
    text = re.sub(r"^When .*?: (?=AWS Error)", "", text)
    return text if len(text) <= 300 else text[:300] + "…"


@dataclass(frozen=True)
class FileEntry:
    """One file of a listing: path as the file system wants it, bytes, and when it changed (`None` if unknown)."""

    path: str
    size: int
    changed_s: float | None = None


def list_files(fs: Any, folder: str, *, hidden: bool = False) -> list[FileEntry]:
    """List the files under a folder, recursively, sorted by path; empty when there is no such folder.

    Args:
        fs: A `pyarrow.fs.FileSystem`.
        folder: Path on it.
        hidden: Include what readers skip: names with a leading `_` or `.`, at any depth.
    """
    infos = fs.get_file_info(pafs.FileSelector(folder, recursive=True, allow_not_found=True))
    entries = [
        FileEntry(info.path, info.size, info.mtime.timestamp() if info.mtime else None)
        for info in infos
        if info.type == pafs.FileType.File and (hidden or not is_hidden(relative(info.path, folder)))
    ]
    return sorted(entries, key=lambda entry: entry.path)


def check_bucket(fs: Any, path: str) -> None:
    """Make sure that a path's bucket exists: a listing of one that does not is empty, like that of an empty folder.

    Raises:
        StorageError: It does not.
    """
    bucket = path.partition("/")[0]
    if not is_local(fs) and fs.get_file_info(bucket).type == pafs.FileType.NotFound:
        raise StorageError(f"the bucket {bucket!r} does not exist, or these keys may not see it")


def relative(path: str, folder: str) -> str:
    """`path` below `folder`, without a leading slash."""
    return path[len(folder) :].lstrip("/")


def is_hidden(path: str) -> bool:
    """Whether Spark, Hive and pyarrow skip a relative path: a part of it starts with `_` or `.`.

    `_col=value` folders are Hive partitions on a column whose name starts so; they are read.
    """
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/"))


def is_local(fs: Any) -> bool:
    return isinstance(fs, pafs.LocalFileSystem)


def write_bytes(fs: Any, path: str, data: bytes) -> None:
    """Write one small object in whole or not at all."""
    if is_local(fs):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        part.write_bytes(data)
        part.replace(target)
        return
    with fs.open_output_stream(path) as stream:
        stream.write(data)


def read_bytes(fs: Any, path: str) -> bytes | None:
    """Content of one object; `None` when there is none."""

    def read() -> bytes:
        with fs.open_input_stream(path) as stream:
            return bytes(stream.read())

    try:
        return again(read)
    except FileNotFoundError:
        return None


def again(read: Callable[[], Read]) -> Read:
    """Call `read`, and once more where the SDK's own retries fail.

    A refusal whose words are longer than the bytes that were asked for does not fit into the buffer that is kept for
    them. The SDK takes that for a broken disk, and does not ask again.
    """
    for attempt in range(_MAX_ATTEMPTS - 1):
        try:
            return read()
        except OSError as exc:
            if "Failed to flush response stream" not in str(exc):
                raise
            time.sleep(min(_PAUSE_S * 2**attempt, _MAX_PAUSE_S))
    return read()


class _Object(io.RawIOBase):
    """An object in the store, each read of which is asked `again`."""

    def __init__(self, fs: Any, path: str) -> None:
        self._file = fs.open_input_file(path)
        self._size = self._file.size()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._size - self._at, 0)
        count = left if size is None or size < 0 else min(size, left)
        data: bytes = again(lambda: self._file.read_at(count, self._at)) if count else b""
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def open_object(fs: Any, path: str, codec: str | None = None) -> pa.NativeFile:
    """Open a file for reading.

    Args:
        fs, path: Of `open_filesystem`.
        codec: How it is compressed; it can then only be read from its start to its end.
    """
    file = fs.open_input_file(path) if is_local(fs) else pa.PythonFile(_Object(fs, path), mode="r")
    return pa.CompressedInputStream(file, codec) if codec else file


def copy(fs: Any, source: str, target: str) -> None:
    """Copy one object within the store: its bytes do not come through this process."""
    if is_local(fs):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        part = str(Path(target).with_name(f".{Path(target).name}.{uuid.uuid4().hex}"))
        fs.copy_file(source, part)
        Path(part).replace(target)
        return
    fs.copy_file(source, target)


def each(work: Any, items: Iterable[Any]) -> list[Any]:
    """Call `work` for each item, several at a time; the first error is raised when all have ended."""
    with ThreadPoolExecutor(_DELETE_THREADS) as pool:
        return list(pool.map(work, items))


def delete_files(fs: Any, paths: Iterable[str]) -> None:
    """Delete objects one by one, several at a time. One that is gone already is fine."""

    def delete(path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            fs.delete_file(path)

    each(delete, paths)


def delete_folder(fs: Any, folder: str) -> None:
    """Delete everything under a folder. One that is gone already is fine."""
    if is_local(fs):
        with contextlib.suppress(FileNotFoundError):
            fs.delete_dir(folder)
        return
    # pyarrow leaves empty objects named `folder/` behind, which all readers skip
    delete_files(fs, [entry.path for entry in list_files(fs, folder, hidden=True)])
