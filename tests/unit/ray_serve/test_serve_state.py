"""URLs under which every node reaches an application."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_raylm.exceptions import ServeError
from airflow_provider_raylm.ray_serve.serve_state import route_owner, urls_of

TWO_HOSTS: dict[str, Any] = {"proxy_ips": ("10.0.0.2", "10.0.0.1"), "node_ips": ("10.0.0.1", "10.0.0.2")}
ONE_HOST: dict[str, Any] = {"proxy_ips": ("10.0.0.1",), "node_ips": ("10.0.0.1", "10.0.0.1")}


@pytest.mark.parametrize(
    ("where", "host", "scheme", "route", "urls"),
    [
        (TWO_HOSTS, "0.0.0.0", "http", "/q", ("http://10.0.0.1:8000/q/v1", "http://10.0.0.2:8000/q/v1")),
        (TWO_HOSTS, "::", "https", "/q", ("https://10.0.0.1:8000/q/v1", "https://10.0.0.2:8000/q/v1")),
        (TWO_HOSTS, "10.0.0.9", "http", "/q/", ("http://10.0.0.9:8000/q/v1",)),
        (ONE_HOST, "0.0.0.0", "http", "/", ("http://10.0.0.1:8000/v1",)),
        (ONE_HOST, "127.0.0.1", "http", "/q", ("http://127.0.0.1:8000/q/v1",)),
        ({"proxy_ips": ("fd00::1",), "node_ips": ("fd00::1",)}, "::", "http", "/", ("http://[fd00::1]:8000/v1",)),
    ],
)
def test_base_urls_are_node_addresses_head_first(
    where: dict[str, Any], host: str, scheme: str, route: str, urls: tuple[str, ...]
) -> None:
    """A wildcard address never stands in a URL; loopback only where one host is the whole cluster."""
    assert urls_of(host=host, port=8000, scheme=scheme, head_ip="10.0.0.1", route_prefix=route, **where) == urls


@pytest.mark.parametrize(
    ("host", "proxies", "words"), [("127.0.0.1", ("10.0.0.1",), "host 0.0.0.0"), (None, (), "without an HTTP proxy")]
)
def test_unreachable_serve_is_refused(host: str | None, proxies: tuple[str, ...], words: str) -> None:
    """Loopback on a cluster of several hosts, or no proxy at all, is an error and not a dead URL."""
    with pytest.raises(ServeError, match=words):
        urls_of(
            host=host,
            port=8000,
            scheme="http",
            proxy_ips=proxies,
            node_ips=TWO_HOSTS["node_ips"],
            head_ip="10.0.0.1",
            route_prefix="/",
        )


@pytest.mark.parametrize(
    ("app_name", "route", "owner"), [("a", "/x", "b"), ("a", "/x/", "b"), ("b", "/x", None), ("a", "/y", None)]
)
def test_route_of_another_application_is_found(app_name: str, route: str, owner: str | None) -> None:
    """Trailing slashes do not hide a conflict, and an application does not conflict with itself."""
    assert route_owner({"b": {"route_prefix": "/x"}, "c": {"route_prefix": None}}, app_name, route) == owner
