"""From logs and statuses to one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_raylm.ray_serve.diagnosis import failure, root_cause, waiting_for

ENGINE_LOG = """\
(EngineCore pid=7) ERROR 12-02 02:00:01 [core.py:843] Traceback (most recent call last):
(EngineCore pid=7) ERROR 12-02 02:00:01 [core.py:843]   File "x.py", line 1, in run
(EngineCore pid=7) ERROR 12-02 02:00:01 [core.py:843] torch.OutOfMemoryError: CUDA out of memory. Tried to use 2 GiB
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (ENGINE_LOG, "OutOfMemoryError: CUDA out of memory. Tried to use 2 GiB"),
        ("Traceback\nValueError: first\n\nDuring handling\nKeyError: 'second'", "KeyError: 'second'"),
        ("INFO all is well: no Error here", None),
        ("", None),
    ],
)
def test_root_cause_is_the_last_exception_that_is_not_a_symptom(text: str, cause: str | None) -> None:
    """What only says that something else failed is passed over."""
    assert root_cause(text) == cause


def app(status: str = "DEPLOYING", *, deployment: str = "UPDATING", message: str = "", target: int = 1) -> Any:
    return {
        "status": status,
        "message": "",
        "deployments": {"D": {"status": deployment, "message": message, "target_num_replicas": target}},
    }


@pytest.mark.parametrize(
    ("details", "deaths", "failed"),
    [
        (app(), {}, False),
        (app(), {"D": 1}, False),
        (app(), {"D": 2}, True),
        (app(target=4), {"D": 4}, False),
        (app(target=4), {"D": 5}, True),
        (app("RUNNING", deployment="HEALTHY", target=0), {"D": 1}, False),
        (app("RUNNING", deployment="HEALTHY", target=0), {"D": 2}, True),
        (app(message="The deployment failed to start 1 times in a row. This"), {}, False),
        (app(message="The deployment failed to start 2 times in a row. This"), {}, True),
        (app("DEPLOY_FAILED"), {}, True),
        (app(deployment="DEPLOY_FAILED"), {}, True),
        (None, {}, True),
    ],
)
def test_a_start_may_fail_once_and_not_twice(details: Any, deaths: dict[str, int], failed: bool) -> None:
    """A predecessor may still occupy the card at the first try; afterwards a failure is final."""
    assert (failure(details, deaths) is not None) is failed


def test_waiting_names_the_resource_that_others_hold() -> None:
    """A start that waits for a GPU says so."""
    words = waiting_for(app(), {"GPU": 1, "CPU": 2}, {"GPU": 1, "CPU": 8}, {"CPU": 6})
    assert words == "D UPDATING; needs 1 GPU, 0 of 1 free"
