"""What Airflow asks a provider about itself."""

from __future__ import annotations

from typing import Any

from airflow_provider_raylm import __version__

_INTEGRATION = "Ray"


def _field(label: str, description: str, kind: str | list[str], **more: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": kind, **more}}


def get_provider_info() -> dict[str, Any]:
    """Provider metadata, valid against Airflow's `provider_info.schema.json`."""
    package = "airflow_provider_raylm"
    return {
        "package-name": "airflow-provider-raylm",
        "name": "Ray LLM batch inference",
        "description": "Deploy a Qwen endpoint on Ray, run AI queries over files, write Parquet to OSS, take it down.",
        "versions": [__version__],
        "integrations": [
            {
                "integration-name": _INTEGRATION,
                "external-doc-url": "https://docs.ray.io/en/latest/cluster/running-applications/job-submission/",
                "tags": ["service"],
            }
        ],
        "operators": [
            {
                "integration-name": _INTEGRATION,
                "python-modules": [f"{package}.operators.{name}" for name in ("ray", "deploy", "ai_query", "teardown")],
            }
        ],
        "sensors": [{"integration-name": _INTEGRATION, "python-modules": [f"{package}.sensors.ray"]}],
        "hooks": [{"integration-name": _INTEGRATION, "python-modules": [f"{package}.hooks.ray"]}],
        "triggers": [{"integration-name": _INTEGRATION, "python-modules": [f"{package}.triggers.ray"]}],
        "extra-links": [f"{package}.links.RayJobLink"],
        "connection-types": [
            {
                "connection-type": "ray",
                "hook-class-name": f"{package}.hooks.ray.RayHook",
                "hook-name": "Ray",
                "ui-field-behaviour": {
                    "hidden-fields": ["login", "schema"],
                    "relabeling": {"host": "Dashboard or gateway URL", "password": "Token"},
                    "placeholders": {
                        "host": "https://head.example.com:8265",
                        "password": "sent as Authorization: Bearer",
                    },
                },
                "conn-fields": {
                    "headers": _field(
                        "Headers",
                        'JSON object sent with every request, for example {"ray-token": "..."} for a gateway.',
                        ["string", "null"],
                        format="password",
                    ),
                    "cookies": _field("Cookies", "JSON object.", ["string", "null"], format="password"),
                    "verify": _field(
                        "Verify TLS", "true (default), false, or the path of a CA bundle.", ["string", "null"]
                    ),
                    "request_timeout": _field(
                        "Request timeout", "Seconds that one request may take.", ["number", "null"], default=30
                    ),
                    "dashboard_url": _field(
                        "Dashboard for people",
                        "URL of the dashboard in a browser, if it differs from the host.",
                        ["string", "null"],
                    ),
                    "auth_from_environment": _field(
                        "Token from the environment",
                        "Use RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token of the worker if there is no "
                        "token above. Off by default: a token never goes to a host it was not meant for.",
                        ["boolean", "null"],
                        default=False,
                    ),
                },
            }
        ],
    }
