"""Fixtures of the tests that need no process but this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_dashboard import FakeDashboard, connection_env, fake_dashboard


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDashboard]:
    """A scripted Ray dashboard, reached by the connection `ray_default`."""
    with fake_dashboard() as fake:
        for name, value in connection_env(fake.url, request_timeout=2).items():
            monkeypatch.setenv(name, value)
        yield fake
