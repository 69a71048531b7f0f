"""What runs on the Ray cluster for `ai_query`. Importing it registers `Dataset.ai`:

    import airflow_provider_raylm.ray_data
    ds.ai.ai_query("Qwen3.5-4B", prompt_col="text", base_url="http://head:8000/v1", api_key="dummy")

The decisions in it (limits, deadlines, retries) need no Ray, and are importable where Ray is not installed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_provider_raylm.ray_data.query import ai_query

__all__ = ["ai_query"]

if importlib.util.find_spec("ray") is not None:
    from airflow_provider_raylm.ray_data.accessor import register

    register()


def __getattr__(name: str) -> Any:
    if name == "ai_query":
        from airflow_provider_raylm.ray_data.query import ai_query

        return ai_query
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
