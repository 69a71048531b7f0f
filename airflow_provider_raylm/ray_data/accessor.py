"""`Dataset.ai`, registered by importing `airflow_provider_raylm.ray_data`."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from ray.data import Dataset

from airflow_provider_raylm.ray_data.query import ai_query

if TYPE_CHECKING:
    from collections.abc import Callable


class AiAccessor:
    """Methods that ask a model about a dataset's rows: `ds.ai.ai_query(...)`."""

    def __init__(self, ds: Dataset) -> None:
        self._ds = ds

    @wraps(ai_query)
    def ai_query(self, *args: Any, **kwargs: Any) -> Dataset:
        return ai_query(self._ds, *args, **kwargs)


def register() -> None:
    """Give `Dataset` its `ai` property.

    Raises:
        AttributeError: Ray has a property of that name, and it is not ours.
    """
    existing = getattr(Dataset, "ai", None)
    if existing is not None and not (
        isinstance(existing, property) and getattr(existing.fget, "__module__", None) == __name__
    ):
        raise AttributeError("ray.data.Dataset has an attribute 'ai' already; call ai_query(ds, ...) instead")
    getter: Callable[[Dataset], AiAccessor] = _ai
    Dataset.ai = property(getter)


def _ai(ds: Dataset) -> AiAccessor:
    """Ask a model about this dataset's rows."""
    return AiAccessor(ds)
