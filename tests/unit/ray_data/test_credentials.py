"""Keys from elsewhere: signed as Alibaba wants it, and asked for at the right door."""

from __future__ import annotations

import pytest

from airflow_provider_raylm.exceptions import StorageError
from airflow_provider_raylm.ray_data import credentials
from airflow_provider_raylm.ray_data.credentials import Credentials, find_credentials, ram_signature, renew_themselves
from airflow_provider_raylm.spec import StorageSpec

INTERNAL, PUBLIC = "oss-cn-hangzhou-internal.aliyuncs.com", "oss-cn-hangzhou.aliyuncs.com"
KEYS = {"access_key_id": "a", "secret_access_key": "b"}
ROLE = {"role_arn": "acs:ram::1:role/r"}


def test_the_signature_is_the_one_of_alibabas_documentation():
    """https://www.alibabacloud.com/help/en/sdk/product-overview/rpc-mechanism"""
    fields = {
        "Timestamp": "2016-02-23T12:46:24Z",
        "Format": "XML",
        "AccessKeyId": "testid",
        "Action": "DescribeRegions",
        "SignatureMethod": "HMAC-SHA1",
        "SignatureNonce": "3ee8c1b8-83d3-44af-a94f-4e0ad82fd6cf",
        "Version": "2014-05-26",
        "SignatureVersion": "1.0",
    }
    assert ram_signature(fields, "testsecret", method="GET") == "OLeaidS1JvxuMvnyHOwuJ+uX5qY="


@pytest.mark.parametrize(
    ("host", "changes", "expected"),
    [
        (PUBLIC, {}, "https://sts.cn-hangzhou.aliyuncs.com"),
        (INTERNAL, {}, "https://sts-vpc.cn-hangzhou.aliyuncs.com"),
        (INTERNAL, {"sts_endpoint_url": "https://sts.example"}, "https://sts.example"),
    ],
)
def test_a_role_is_asked_for_where_the_cluster_can_reach_it(monkeypatch, host, changes, expected):
    """A cluster that uses the internal endpoint of OSS may have no way to the internet."""
    asked = []
    monkeypatch.setattr(credentials, "_assume_ram_role", lambda base, storage, url: asked.append(url))
    find_credentials(StorageSpec(**KEYS, **ROLE, **changes), host, "oss-cn-hangzhou", {})
    assert asked == [expected]


def test_a_role_without_keys_is_assumed_with_what_the_node_has(monkeypatch):
    """And refused with a reason where it has nothing."""
    monkeypatch.setattr(credentials, "_assume_ram_role", lambda base, storage, url: base)
    node = {"ALIBABA_CLOUD_ACCESS_KEY_ID": "x", "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "y"}
    assert find_credentials(StorageSpec(**ROLE), INTERNAL, "cn-hangzhou", node) == Credentials("x", "y")
    with pytest.raises(StorageError, match="neither the storage connection nor the cluster has keys"):
        find_credentials(StorageSpec(**ROLE), INTERNAL, "cn-hangzhou", {})


@pytest.mark.parametrize(
    ("changes", "environ", "renewed"),
    [
        ({**KEYS, **ROLE}, {}, True),
        ({**KEYS, "session_token": "t"}, {}, False),
        ({**KEYS, **ROLE, "session_token": "t"}, {}, False),
        ({}, {}, True),
        ({}, {"ALIBABA_CLOUD_SECURITY_TOKEN": "t"}, False),
        ({}, {"AWS_SESSION_TOKEN": "t"}, False),
    ],
)
def test_which_keys_renew_themselves(changes, environ, renewed):
    """A role's do; a token that somebody wrote down does not."""
    assert renew_themselves(StorageSpec(**changes), environ) is renewed
