"""Keys for a store that are not simply given, and how long they last.

A role's keys run out after an hour or so; whoever holds a `Credentials` with `expires_s` asks for new ones before
that. Alibaba's STS speaks a protocol of its own, so the one request that is needed of it is made here; AWS's is left
to boto3.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import json
import re
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_raylm.exceptions import StorageError
from airflow_provider_raylm.spec import StorageSpec

OSS_HOST = re.compile(r"(?:^|\.)oss-(?P<region>[a-z0-9-]+?)(?P<internal>-internal)?\.aliyuncs\.com$")
_TIMEOUT_S = 10
_ROLE_LIFETIME_S = 3600


@dataclass(frozen=True)
class Credentials:
    """Keys of a store. `expires_s` is wall clock, seconds since the epoch; `None` when they last."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires_s: float | None = None


def find_credentials(storage: StorageSpec, host: str, region: str, environ: Mapping[str, str]) -> Credentials | None:
    """Keys for a store; `None` leaves it to the AWS SDK's own chain, whose keys renew themselves.

    The keys of the spec come first, then, for OSS, what the node offers. A role is assumed with either.

    Args:
        storage: What was asked for.
        host: Of the store's endpoint, empty for AWS itself.
        region: Of the store.
        environ: Environment variables.

    Raises:
        StorageError: A role gave no credentials.
    """
    base = None
    if storage.access_key_id and storage.secret_access_key:
        base = Credentials(storage.access_key_id, storage.secret_access_key, storage.session_token)
    elif OSS_HOST.search(host.partition(":")[0]):
        base = alibaba_role(environ)
    if storage.role_arn is None:
        return base
    if not storage.role_arn.startswith("acs:"):
        return _assume_aws_role(base, storage, region)
    if base is None:
        raise StorageError(
            f"the role {storage.role_arn} cannot be assumed: neither the storage connection nor the cluster has keys "
            "to assume it with"
        )
    match = OSS_HOST.search(host)
    network = "sts-vpc" if match and match["internal"] else "sts"
    return _assume_ram_role(
        base, storage, storage.sts_endpoint_url or f"https://{network}.{region.removeprefix('oss-')}.aliyuncs.com"
    )


def renew_themselves(storage: StorageSpec, environ: Mapping[str, str]) -> bool:
    """Whether keys that have run out are replaced by opening the file system again."""
    if storage.role_arn is not None:
        return storage.session_token is None
    fixed = storage.access_key_id or environ.get("ALIBABA_CLOUD_SECURITY_TOKEN") or environ.get("AWS_SESSION_TOKEN")
    return not fixed


def alibaba_role(environ: Mapping[str, str]) -> Credentials | None:
    """Credentials that an Alibaba Cloud node offers, in the order of its own SDKs; `None` when it offers none.

    Variables, then the address in `ALIBABA_CLOUD_CREDENTIALS_URI`, then the RAM role of the instance named in
    `ALIBABA_CLOUD_ECS_METADATA`.

    Raises:
        StorageError: An address was named and did not answer with credentials.
    """
    if environ.get("ALIBABA_CLOUD_ACCESS_KEY_ID"):
        return Credentials(
            environ["ALIBABA_CLOUD_ACCESS_KEY_ID"],
            environ.get("ALIBABA_CLOUD_ACCESS_KEY_SECRET", ""),
            environ.get("ALIBABA_CLOUD_SECURITY_TOKEN") or None,
        )
    url = environ.get("ALIBABA_CLOUD_CREDENTIALS_URI")
    if not url and (role := environ.get("ALIBABA_CLOUD_ECS_METADATA")):
        url = f"http://100.100.100.200/latest/meta-data/ram/security-credentials/{urllib.parse.quote(role)}"
    if not url:
        return None
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            return _of_sts(json.load(response))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise StorageError(
            f"the cluster's role gave no credentials: {type(exc).__name__} from the credentials service; "
            "check the role, or give keys in the storage connection"
        ) from exc


def _assume_ram_role(base: Credentials, storage: StorageSpec, url: str) -> Credentials:
    """One `AssumeRole` request (https://www.alibabacloud.com/help/en/ram/developer-reference/api-sts-2015-04-01-assumerole)."""
    fields = {
        "Action": "AssumeRole",
        "Version": "2015-04-01",
        "Format": "JSON",
        "AccessKeyId": base.access_key_id,
        "SignatureMethod": "HMAC-SHA1",
        "SignatureVersion": "1.0",
        "SignatureNonce": uuid.uuid4().hex,
        "Timestamp": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "RoleArn": storage.role_arn or "",
        "RoleSessionName": storage.role_session_name,
        "DurationSeconds": str(_ROLE_LIFETIME_S),
        **({"ExternalId": storage.external_id} if storage.external_id else {}),
        **({"SecurityToken": base.session_token} if base.session_token else {}),
    }
    fields["Signature"] = ram_signature(fields, base.secret_access_key)
    try:
        body = urllib.parse.urlencode(fields).encode()
        with urllib.request.build_opener().open(url, body, timeout=_TIMEOUT_S) as response:
            return _of_sts(json.load(response)["Credentials"])
    except urllib.error.HTTPError as exc:
        # its message quotes the request
        code = re.search(rb'"Code"\s*:\s*"([\w.]+)"', exc.read())
        reason = code[1].decode() if code else f"HTTP status {exc.code}"
        raise _not_assumed(storage, reason, refused=exc.code < 500 and "Throttl" not in reason) from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _not_assumed(storage, f"{type(exc).__name__} from {url}") from exc


def ram_signature(fields: Mapping[str, str], secret: str, *, method: str = "POST") -> str:
    """Signature of a request with these fields in its form or query, in the RPC style of Alibaba's APIs, version 1.0.

    https://www.alibabacloud.com/help/en/sdk/product-overview/rpc-mechanism
    """
    canonical = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted(fields.items()))
    digest = hmac.new(f"{secret}&".encode(), f"{method}&%2F&{_quoted(canonical)}".encode(), hashlib.sha1).digest()
    return base64.b64encode(digest).decode()


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")


def _of_sts(raw: Mapping[str, Any]) -> Credentials:
    expires = dt.datetime.fromisoformat(raw["Expiration"].replace("Z", "+00:00")).timestamp()
    return Credentials(raw["AccessKeyId"], raw["AccessKeySecret"], raw["SecurityToken"], expires)


def _assume_aws_role(base: Credentials | None, storage: StorageSpec, region: str) -> Credentials:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as exc:
        raise _not_assumed(storage, "boto3 is not installed on the cluster", refused=True) from exc
    try:
        client = boto3.client(
            "sts",
            region_name=region,
            endpoint_url=storage.sts_endpoint_url,
            aws_access_key_id=base and base.access_key_id,
            aws_secret_access_key=base and base.secret_access_key,
            aws_session_token=base and base.session_token,
        )
        raw = client.assume_role(
            RoleArn=storage.role_arn,
            RoleSessionName=storage.role_session_name,
            DurationSeconds=_ROLE_LIFETIME_S,
            **({"ExternalId": storage.external_id} if storage.external_id else {}),
        )["Credentials"]
    except ClientError as exc:
        code = exc.response["Error"]["Code"]
        status = exc.response["ResponseMetadata"]["HTTPStatusCode"]
        raise _not_assumed(storage, code, refused=status < 500 and "Throttl" not in code) from exc
    except BotoCoreError as exc:
        raise _not_assumed(storage, type(exc).__name__) from exc
    return Credentials(raw["AccessKeyId"], raw["SecretAccessKey"], raw["SessionToken"], raw["Expiration"].timestamp())


def _not_assumed(storage: StorageSpec, reason: str, *, refused: bool = False) -> StorageError:
    return StorageError(
        f"the role {storage.role_arn} could not be assumed: {reason}; check the role's trust policy and the keys that "
        "assume it",
        refused=refused,
    )
