"""A real S3 server on loopback behind a front that is as strict as Alibaba OSS.

The server is `rclone serve s3` on a folder. It is more forgiving than OSS, so a front stands before it and refuses
what OSS refuses, with OSS's words: path-style addressing, `aws-chunked` uploads, `DeleteObjects` without
`Content-MD5`, wrong keys, a wrong clock, expired tokens. What passes here in these points passes there; what it
cannot show is OSS's own limits of size and rate.

The front checks each signature itself (Signature Version 4) and signs again for the server behind it with a key
that nobody else knows: the bucket moves from the host name into the path on the way, which ends the client's
signature.

A POST to the store without a bucket gives temporary keys for a role (`AssumeRole`, as Alibaba's and as AWS's STS
answer it); they expire on the second.

Buckets are host names: `http://<bucket>.localhost:<port>`. RFC 6761 reserves `.localhost` for loopback, and curl,
which is inside pyarrow, resolves it without asking DNS, so neither `/etc/hosts` nor a wildcard domain is needed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import datetime as dt
import email.utils
import hashlib
import hmac
import itertools
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import aiohttp
import yarl
from aiohttp import web

from demo.ray_head import LOOPBACK, free_ports

CLOCK_TOLERANCE_S = 15 * 60
ROLE = "lake-writer"
"""Name of the one role that may be assumed."""


@dataclass(kw_only=True)
class Faults:
    """What goes wrong on purpose. Fields may be changed while the store runs.

    Attributes:
        slow_down_every: Every nth request is answered with 503 `SlowDown`; 0 never.
        error_every: Every nth request is answered with 500 `InternalError`; 0 never.
        lose_every: Every nth request is carried out, and the connection closed without an answer; 0 never.
        truncate_every: Every nth object download ends in the middle of its body; 0 never.
        clock_offset_s: Seconds the store's clock is ahead.
    """

    slow_down_every: int = 0
    error_every: int = 0
    lose_every: int = 0
    truncate_every: int = 0
    clock_offset_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TemporaryKeys:
    """Keys that a role's user has, with their end in seconds since the epoch."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_s: float


@dataclass(kw_only=True)
class ObjectStore:
    """A running store.

    Attributes:
        endpoint_url: `http://localhost:<port>`, without bucket.
        bucket: The bucket that exists at the start.
        folder: Where the bucket's objects lie on disk.
        role_lifetime_s: Seconds that the keys of an assumed role last.
        watch: Called with each request as it is added to `requests`, before anything is done about it.
        requests: `(method, what)` of each request so far, for tests; `what` is the path with the query's names.
    """

    endpoint_url: str
    bucket: str
    folder: Path
    region: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    role_lifetime_s: float = 3600.0
    faults: Faults = field(default_factory=Faults)
    watch: Callable[[str, str], None] = lambda method, what: None
    requests: list[tuple[str, str]] = field(default_factory=list, repr=False)
    issued: dict[str, TemporaryKeys] = field(default_factory=dict, repr=False)

    def issue(self, lifetime_s: float) -> TemporaryKeys:
        """Make temporary keys, by access key id in `issued`."""
        keys = TemporaryKeys(
            access_key_id="STS." + secrets.token_hex(8),
            secret_access_key=secrets.token_hex(16),
            session_token=secrets.token_hex(32),
            expires_s=time.time() + lifetime_s,
        )
        self.issued[keys.access_key_id] = keys
        return keys

    def expire(self, access_key_id: str | None = None) -> None:
        """End these temporary keys now; all of them if none are named."""
        for name in [access_key_id] if access_key_id is not None else list(self.issued):
            self.issued[name] = dataclasses.replace(self.issued[name], expires_s=time.time())


@contextlib.contextmanager
def object_store(
    bucket: str = "lake",
    *,
    folder: Path | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    region: str = "cn-hangzhou",
    faults: Faults | None = None,
    strict: bool = True,
) -> Iterator[ObjectStore]:
    """Run a store with one bucket; stopped at the end, its folder removed unless it was given.

    Args:
        bucket: Name of the bucket to make.
        folder: Parent folder of the buckets; a temp folder when `None`.
        access_key_id, secret_access_key: Fresh random keys when `None`.
        region: Named in signatures.
        faults: What goes wrong from the start.
        strict: `False` accepts what AWS accepts, to show what only OSS refuses.

    Raises:
        RuntimeError: The server did not come up.
    """
    root = folder or Path(tempfile.mkdtemp(prefix="raylm-store-"))
    (root / bucket).mkdir(parents=True, exist_ok=True)
    (front_port, port) = free_ports(2)
    store = ObjectStore(
        endpoint_url=f"http://localhost:{front_port}",
        bucket=bucket,
        folder=root / bucket,
        region=region,
        access_key_id=access_key_id or "LTAI" + secrets.token_hex(8),
        secret_access_key=secret_access_key or secrets.token_hex(16),
        faults=faults or Faults(),
    )
    inner = _Keys(secrets.token_hex(8), secrets.token_hex(16), region)
    server = _start_server(root, port, inner)
    try:
        with _serve(_Front(store, inner, f"http://{LOOPBACK}:{port}", strict), front_port):
            yield store
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
        server.kill()
        server.wait()
        if folder is None:
            shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True)
class _Keys:
    access_key_id: str
    secret_access_key: str
    region: str


def _start_server(root: Path, port: int, keys: _Keys) -> subprocess.Popen[bytes]:
    rclone = Path(sys.executable).with_name("rclone")
    log = tempfile.TemporaryFile()  # noqa: SIM115  # the server writes to it as long as it lives
    server = subprocess.Popen(
        [
            str(rclone) if rclone.exists() else "rclone",
            "serve",
            "s3",
            f"--addr={LOOPBACK}:{port}",
            "--dir-cache-time=10s",  # with 0 it spins and stops answering as soon as requests overlap
            "--config=",
            str(root),
        ],
        # not an argument: those are seen by every user of the machine
        env={"RCLONE_AUTH_KEY": f'"{keys.access_key_id},{keys.secret_access_key}"', "HOME": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 30
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and server.poll() is None:
        try:
            opener.open(f"http://{LOOPBACK}:{port}/", timeout=5)
        except urllib.error.HTTPError:  # it answers: our keys are missing, as they should be
            return server
        except OSError:
            time.sleep(0.05)
    server.kill()
    log.seek(0)
    raise RuntimeError(f"rclone serve s3 did not start:\n{log.read()[-2000:].decode(errors='replace')}")


@contextlib.contextmanager
def _serve(front: _Front, port: int) -> Iterator[None]:
    """Run the front's event loop in a thread of this process."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop: asyncio.Event = asyncio.Event()
    failure: list[BaseException] = []

    async def run() -> None:
        app = web.Application(client_max_size=2**40)
        app.router.add_route("*", "/{path:.*}", front.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, port).start()
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            front.session = session
            started.set()
            await stop.wait()
        await runner.cleanup()

    def main() -> None:
        try:
            loop.run_until_complete(run())
        except BaseException as exc:
            failure.append(exc)
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=main, name="object-store-front", daemon=True)
    thread.start()
    started.wait()
    if failure:
        raise RuntimeError(f"the store's front did not start: {failure[0]}")
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


class _Refused(Exception):
    """One of OSS's error answers."""

    def __init__(self, status: int, code: str, message: str, ec: str) -> None:
        super().__init__(code)
        self.status, self.code, self.message, self.ec = status, code, message, ec


class _Front:
    """Checks each request as OSS would, then hands it to the server behind."""

    session: aiohttp.ClientSession

    def __init__(self, store: ObjectStore, inner: _Keys, server_url: str, strict: bool) -> None:
        self.store = store
        self.inner = inner
        self.server_url = server_url
        self.strict = strict
        self._requests = itertools.count(1)
        self._downloads = itertools.count(1)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        path, _, query = request.raw_path.partition("?")
        bucket = self._bucket(request)
        names = "&".join(part.partition("=")[0] for part in query.split("&") if part)
        what = f"{bucket}{path}" + (f"?{names}" if names else "")
        self.store.requests.append((request.method, what))
        self.store.watch(request.method, what)
        faults = self.store.faults
        number = next(self._requests)
        try:
            if not bucket and request.method == "POST":
                return self._assume_role(body)
            if faults.slow_down_every and number % faults.slow_down_every == 0:
                raise _Refused(503, "SlowDown", "Please reduce your request rate.", "0026-00000001")
            if faults.error_every and number % faults.error_every == 0:
                raise _Refused(500, "InternalError", "We encountered an internal error.", "0026-00000002")
            if self.strict:
                self._check_form(request, bucket, path, query)
            self._check_signature(request, path, query, body)
            self._check_body(request, body)
        except _Refused as exc:
            return self._error(exc, request)
        if request.method == "PUT" and path.endswith("/") and not body:
            # An empty object named like a folder. OSS keeps any name; the server behind has real folders, and refuses
            # one that exists.
            (self.store.folder.parent / bucket / urllib.parse.unquote(path[1:])).mkdir(parents=True, exist_ok=True)
            return web.Response(headers={"ETag": f'"{hashlib.md5(b"", usedforsecurity=False).hexdigest()}"'})
        answer = await self._forward(request, bucket, path, query, body)
        if faults.lose_every and number % faults.lose_every == 0 and request.transport is not None:
            request.transport.abort()
        return answer

    def _assume_role(self, body: bytes) -> web.Response:
        """Alibaba's STS checks its own kind of signature; AWS's is made by boto3, and not checked here."""
        fields = dict(urllib.parse.parse_qsl(body.decode()))
        for_aws = fields.get("Version") == "2011-06-15"
        if not for_aws:
            signature = fields.pop("Signature", "")
            canonical = urllib.parse.urlencode(sorted(fields.items()), quote_via=urllib.parse.quote, safe="~")
            to_sign = f"POST&%2F&{urllib.parse.quote(canonical, safe='~')}"
            key = f"{self.store.secret_access_key}&".encode()
            expected = base64.b64encode(hmac.new(key, to_sign.encode(), hashlib.sha1).digest()).decode()
            if fields.get("AccessKeyId") != self.store.access_key_id or signature != expected:
                code = "SignatureDoesNotMatch"
                return web.json_response({"Code": code, "Message": f"The string to sign is {to_sign}"}, status=400)
        if fields.get("RoleArn", "").rpartition("/")[2] != ROLE:
            if for_aws:
                return web.Response(
                    status=403, text="<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"
                )
            return web.json_response({"Code": "NoPermission", "Message": "no"}, status=403)
        keys = self.store.issue(self.store.role_lifetime_s)
        end = dt.datetime.fromtimestamp(keys.expires_s, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        given = {"AccessKeyId": keys.access_key_id, "Expiration": end}
        if not for_aws:
            given |= {"AccessKeySecret": keys.secret_access_key, "SecurityToken": keys.session_token}
            return web.json_response({"Credentials": given})
        given |= {"SecretAccessKey": keys.secret_access_key, "SessionToken": keys.session_token}
        text = "".join(f"<{name}>{value}</{name}>" for name, value in given.items())
        return web.Response(
            content_type="text/xml",
            text='<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>'
            f"{text}</Credentials></AssumeRoleResult></AssumeRoleResponse>",
        )

    def _bucket(self, request: web.Request) -> str:
        host = request.host.rpartition(":")[0] if ":" in request.host else request.host
        return host.removesuffix(".localhost") if host.endswith(".localhost") else ""

    def _check_form(self, request: web.Request, bucket: str, path: str, query: str) -> None:
        if not bucket and path != "/":
            raise _Refused(
                403, "SecondLevelDomainForbidden", "Please use virtual hosted style to access.", "0003-00000601"
            )
        payload = request.headers.get("x-amz-content-sha256", "")
        if payload.startswith("STREAMING-") or "aws-chunked" in request.headers.get("Content-Encoding", ""):
            raise _Refused(
                400,
                "InvalidArgument",
                "aws-chunked encoding is not supported with the specified x-amz-content-sha256 value.",
                "0017-00000804",
            )
        if request.method == "POST" and "delete" in query.split("&") and "Content-MD5" not in request.headers:
            raise _Refused(400, "MissingArgument", "Missing Some Required Arguments.", "0016-00000502")

    def _check_signature(self, request: web.Request, path: str, query: str, body: bytes) -> None:
        store = self.store
        scheme, _, rest = request.headers.get("Authorization", "").partition(" ")
        if not scheme:
            raise _Refused(403, "AccessDenied", "Anonymous access is forbidden for this operation.", "0003-00000001")
        fields = dict(part.strip().split("=", 1) for part in rest.split(",") if "=" in part)
        key, _, scope = fields.get("Credential", "").partition("/")
        if scheme != "AWS4-HMAC-SHA256" or scope.count("/") != 3:
            raise _Refused(400, "InvalidArgument", "The authorization header is malformed.", "0002-00000001")
        temporary = store.issued.get(key)
        if key != store.access_key_id and temporary is None:
            raise _Refused(
                403,
                "InvalidAccessKeyId",
                "The OSS Access Key Id you provided does not exist in our records.",
                "0002-00000902",
            )
        token = request.headers.get("x-amz-security-token")
        if token != (temporary and temporary.session_token):
            raise _Refused(403, "InvalidSecurityToken", "The security token you provided is invalid.", "0002-00000603")
        if temporary and time.time() >= temporary.expires_s:
            raise _Refused(403, "SecurityTokenExpired", "The security token you provided has expired.", "0002-00000605")
        stamp = request.headers.get("x-amz-date", "")
        sent = dt.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.timezone.utc).timestamp()
        if abs(time.time() + store.faults.clock_offset_s - sent) > CLOCK_TOLERANCE_S:
            raise _Refused(
                403,
                "RequestTimeTooSkewed",
                "The difference between the request time and the current time is too large.",
                "0002-00000504",
            )
        date, region, _, _ = scope.split("/")
        headers = {name: request.headers.get(name, "") for name in fields.get("SignedHeaders", "").split(";")}
        expected = _signature(
            _Keys(key, (temporary or store).secret_access_key, region),
            request.method,
            path,
            query,
            headers,
            stamp,
            date,
        )
        if not hmac.compare_digest(expected, fields.get("Signature", "")):
            raise _Refused(
                403,
                "SignatureDoesNotMatch",
                "The request signature we calculated does not match the signature you provided. "
                "Check your key and signing method.",
                "0002-00000209",
            )

    def _check_body(self, request: web.Request, body: bytes) -> None:
        payload = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if len(payload) == 64 and hashlib.sha256(body).hexdigest() != payload:
            raise _Refused(
                400, "XAmzContentSHA256Mismatch", "The body does not match x-amz-content-sha256.", "0017-00000805"
            )
        digest = request.headers.get("Content-MD5")
        if digest and base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode() != digest:
            raise _Refused(400, "InvalidDigest", "The Content-MD5 you specified was invalid.", "0017-00000503")

    def _error(self, exc: _Refused, request: web.Request) -> web.Response:
        request_id = secrets.token_hex(12).upper()
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{exc.code}</Code>'
            f"<Message>{escape(exc.message)}</Message><RequestId>{request_id}</RequestId>"
            f"<HostId>{escape(request.host)}</HostId><EC>{exc.ec}</EC>"
            f"<RecommendDoc>https://api.aliyun.com/troubleshoot?q={exc.ec}</RecommendDoc></Error>"
        )
        now = dt.datetime.fromtimestamp(time.time() + self.store.faults.clock_offset_s, dt.timezone.utc)
        headers = {
            "x-oss-request-id": request_id,
            "x-oss-ec": exc.ec,
            "Server": "AliyunOSS",
            "Date": email.utils.format_datetime(now, usegmt=True),
        }
        body = None if request.method == "HEAD" else text.encode()
        return web.Response(status=exc.status, body=body, content_type="application/xml", headers=headers)

    async def _forward(
        self, request: web.Request, bucket: str, path: str, query: str, body: bytes
    ) -> web.StreamResponse:
        target = f"/{bucket}{path}" if bucket else path
        now = dt.datetime.now(dt.timezone.utc)
        stamp = now.strftime("%Y%m%dT%H%M%SZ")
        url = yarl.URL(f"{self.server_url}{target}" + (f"?{query}" if query else ""), encoded=True)
        kept = {
            name: value
            for name, value in request.headers.items()
            if name.lower() in ("content-type", "content-md5", "range", "x-amz-copy-source", "x-amz-metadata-directive")
            or name.lower().startswith(("if-", "x-amz-meta-"))
        }
        kept |= {
            "host": f"{url.host}:{url.port}",
            "x-amz-date": stamp,
            "x-amz-content-sha256": hashlib.sha256(body).hexdigest(),
        }
        signed = {name.lower(): value for name, value in kept.items()}
        scope = f"{stamp[:8]}/{self.inner.region}/s3/aws4_request"
        signature = _signature(self.inner, request.method, target, query, signed, stamp, stamp[:8])
        kept["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.inner.access_key_id}/{scope}, "
            f"SignedHeaders={';'.join(sorted(signed))}, Signature={signature}"
        )
        async with self.session.request(request.method, url, headers=kept, data=body) as answer:
            headers = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in ("transfer-encoding", "connection", "server", "content-length", "date")
            }
            if request.method == "HEAD":
                response = web.Response(status=answer.status, headers=headers)
                if "Content-Length" in answer.headers:
                    response.headers["Content-Length"] = answer.headers["Content-Length"]
                return response
            content = await answer.read()
            every = self.store.faults.truncate_every
            is_download = request.method == "GET" and path != "/" and answer.status in (200, 206) and len(content) > 1
            if is_download and every and next(self._downloads) % every == 0:
                return await self._truncated(request, answer.status, headers, content)
            return web.Response(status=answer.status, headers=headers, body=content)

    async def _truncated(
        self, request: web.Request, status: int, headers: dict[str, str], content: bytes
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(content))})
        await response.prepare(request)
        await response.write(content[: len(content) // 2])
        if request.transport is not None:
            request.transport.close()
        return response


def _signature(keys: _Keys, method: str, path: str, query: str, headers: dict[str, str], stamp: str, date: str) -> str:
    """The hex signature of a request whose path and query are in the encoded form they are sent in.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """
    pairs = sorted((part.partition("=")[0], part.partition("=")[2]) for part in query.split("&") if part)
    names = sorted(headers)
    canonical = "\n".join(
        [
            method,
            path,
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join(headers[name].split())}" for name in names),
            "",
            ";".join(names),
            headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        ]
    )
    scope = f"{date}/{keys.region}/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in (date, keys.region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
