"""What Airflow learns about this provider, checked by Airflow's own schemas."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import airflow
import jsonschema
import pytest

from airflow_provider_raylm.hooks.ray import RayHook
from airflow_provider_raylm.provider_info import get_provider_info

INFO = get_provider_info()
(CONNECTION,) = INFO["connection-types"]


def schema(name: str) -> Any:
    return json.loads((Path(airflow.__file__).parent / name).read_text())


def test_valid_against_airflows_schema() -> None:
    """The schema that Airflow applies when it loads a provider."""
    jsonschema.validate(INFO, schema("provider_info.schema.json"))


def test_the_connection_form_is_valid() -> None:
    """`conn-fields` and `ui-field-behaviour` are described in the schema of `provider.yaml` only."""
    item = schema("provider.yaml.schema.json")["properties"]["connection-types"]["items"]
    jsonschema.validate(CONNECTION, item)


def test_entry_point() -> None:
    """Airflow finds the provider through this."""
    found = [e for e in entry_points(group="apache_airflow_provider") if e.value.startswith("airflow_provider_raylm")]
    assert [e.load()() for e in found] == [INFO]


@pytest.mark.parametrize(
    "path",
    [
        *(m for kind in ("operators", "sensors", "hooks", "triggers") for m in INFO[kind][0]["python-modules"]),
        CONNECTION["hook-class-name"],
        *INFO["extra-links"],
    ],
)
def test_everything_named_exists(path: str) -> None:
    """A name that does not import breaks Airflow's start."""
    module, _, last = path.rpartition(".")
    if last[0].isupper():
        assert hasattr(importlib.import_module(module), last)
    else:
        importlib.import_module(path)


def test_the_form_belongs_to_the_hook() -> None:
    """The type in the form is the type that the hook asks for, and every field is one it reads."""
    assert (CONNECTION["connection-type"], CONNECTION["hook-name"]) == (RayHook.conn_type, RayHook.hook_name)
    source = Path(importlib.import_module(RayHook.__module__).__file__ or "").read_text()
    assert all(f'"{name}"' in source for name in CONNECTION["conn-fields"])
