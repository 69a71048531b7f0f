"""Errors cross processes: from the worker to Airflow, from a Ray task to its driver."""

from __future__ import annotations

import inspect
import pickle

import pytest

from airflow_provider_raylm import exceptions
from airflow_provider_raylm.exceptions import RayJobError, RaylmError, SpecError, TransientEndpointError
from airflow_provider_raylm.outcome import Outcome

TREE = [cls for cls in vars(exceptions).values() if inspect.isclass(cls) and issubclass(cls, RaylmError)]
DETAILS = {"submission_id": "a-1", "http_status": 503, "retry_after_s": 2.5, "rows": 10, "errors": 3}


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_every_error_pickles_with_its_attributes(cls: type[RaylmError]) -> None:
    """Message, class and attributes arrive."""
    names = {name for klass in cls.__mro__ if "__init__" in vars(klass) for name in _keywords(klass)}
    error = cls("what happened", **{name: value for name, value in DETAILS.items() if name in names})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), copy.message) == ("what happened", "what happened")
    assert vars(copy) == vars(error)
    assert all(getattr(copy, name) == DETAILS[name] for name in names & set(DETAILS))


def _keywords(cls: type) -> list[str]:
    return [p.name for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]


def test_the_tree_is_the_one_in_the_docstring() -> None:
    """Whoever adds an error draws it."""
    assert all(cls.__name__ in (exceptions.__doc__ or "") for cls in TREE if cls is not RaylmError)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_no_error_is_an_os_error(cls: type[RaylmError]) -> None:
    """Those lose their message on the way between processes."""
    assert not issubclass(cls, OSError)
    assert issubclass(cls, ValueError) == (cls is SpecError)


def test_attributes_of_a_transient_error() -> None:
    """The keyword of the middle class survives too."""
    error = pickle.loads(pickle.dumps(TransientEndpointError("busy", http_status=429, retry_after_s=1.0)))
    assert (error.http_status, error.retry_after_s) == (429, 1.0)


@pytest.mark.parametrize("state", ["failed", "stopped", "start_timeout", "timeout", "lost", "unreachable", "new"])
def test_every_outcome_but_success_is_an_error(state: str) -> None:
    """Also a state that this version does not know."""
    error = Outcome(submission_id="a-1", state=state, reason="why", log_tail=("x",)).error()  # type: ignore[arg-type]
    assert isinstance(error, RayJobError)
    assert error.submission_id == "a-1"
    assert str(error) == "why\nLast log lines:\nx"
    assert Outcome(submission_id="a-1", state="succeeded").error() is None
