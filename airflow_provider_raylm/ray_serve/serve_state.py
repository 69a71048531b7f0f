"""What Serve says about itself, as plain dicts. Never starts Serve."""

from __future__ import annotations

import json
import time
from typing import Any

from airflow_provider_raylm.exceptions import ServeError
from airflow_provider_raylm.ray_serve import probe

ROOT_TIMEOUT_S = 10.0
PROXY_TIMEOUT_S = 20.0
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
ANY_HOSTS = ("0.0.0.0", "::", "")  # noqa: S104 # compared with, never bound to


def client() -> Any | None:
    """Client of the running Serve controller, `None` when Serve does not run."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def details(serve: Any) -> dict[str, Any]:
    """Everything Serve's own `GET /api/serve/applications` answers."""
    found: dict[str, Any] = json.loads(json.dumps(serve.get_serve_details(), default=str))  # enums become their words
    return found


def application(serve: Any, app_name: str) -> dict[str, Any] | None:
    """Details of one application, `None` when Serve does not know it."""
    found: dict[str, Any] | None = details(serve)["applications"].get(app_name)
    return found


def base_urls(serve: Any, route_prefix: str) -> tuple[str, ...]:
    """OpenAI base URLs of an application, one per proxy, the head node's first.

    Raises:
        ServeError: Serve has no HTTP proxy, or one that other hosts of the cluster cannot reach.
    """
    http = serve.http_config
    proxies = _proxies(serve) if http.host is not None else []
    healthy = [proxy for proxy in proxies if proxy["status"] == "HEALTHY"]  # none yet while Serve starts
    urls = urls_of(
        host=http.host,
        port=http.port,
        scheme="https" if getattr(http, "ssl_certfile", None) else "http",
        proxy_ips=tuple(proxy["node_ip"] for proxy in healthy or proxies),
        node_ips=node_ips(),
        head_ip=head_ip(),
        route_prefix=route_prefix,
    )
    origins = ["/".join(url.split("/")[:3]) for url in urls]
    root = probe.mounted_at(origins[0], getattr(http, "root_path", "") or "", timeout_s=ROOT_TIMEOUT_S)
    return tuple(f"{origin}{root}{url[len(origin) :]}" for origin, url in zip(origins, urls, strict=True))


def _proxies(serve: Any) -> list[dict[str, Any]]:
    """Details of Serve's proxies. Somebody may have started Serve a moment ago, then they are waited for."""
    deadline = time.monotonic() + PROXY_TIMEOUT_S
    while not (found := list(details(serve)["proxies"].values())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def head_ip() -> str:
    """Address of the head node, as the other nodes know it."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"]]
    return str(nodes[0]["NodeManagerAddress"] if nodes else ray.get_runtime_context().gcs_address.rsplit(":", 1)[0])


def node_ips() -> tuple[str, ...]:
    """Addresses of all nodes."""
    import ray

    return tuple(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])


def urls_of(
    *,
    host: str | None,
    port: int,
    scheme: str,
    proxy_ips: tuple[str, ...],
    node_ips: tuple[str, ...],
    head_ip: str,
    route_prefix: str,
) -> tuple[str, ...]:
    """URLs under which every node reaches an application.

    Args:
        host: Address the proxies listen on.
        port: Port of all proxies.
        scheme: `http` or `https`.
        proxy_ips: Node addresses of the proxies.
        node_ips: Addresses of all nodes.
        head_ip: Address of the head node.
        route_prefix: Path of the application under the proxy.

    Raises:
        ServeError: There is no proxy, or it listens on loopback while the cluster spans several hosts.
    """
    if host is None or not proxy_ips:
        raise ServeError("Serve runs without an HTTP proxy, so nothing can send requests to it; start one")
    path = f"{route_prefix.rstrip('/')}/v1"
    if host in LOOPBACK_HOSTS:
        if len(set(node_ips)) > 1:
            raise ServeError(
                f"Serve on {host} cannot be reached by all of the {len(set(node_ips))} hosts of this cluster; it must "
                "be started with http_options host 0.0.0.0"
            )
        return (f"{scheme}://{_bracketed(host)}:{port}{path}",)
    ips = sorted(set(proxy_ips), key=lambda ip: (ip != head_ip, ip)) if host in ANY_HOSTS else [host]
    return tuple(f"{scheme}://{_bracketed(ip)}:{port}{path}" for ip in ips)


def route_owner(applications: dict[str, Any], app_name: str, route_prefix: str) -> str | None:
    """Name of another application at the same route."""
    wanted = route_prefix.rstrip("/") or "/"
    for name, app in applications.items():
        if name != app_name and app.get("route_prefix") and (app["route_prefix"].rstrip("/") or "/") == wanted:
            return str(name)
    return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
