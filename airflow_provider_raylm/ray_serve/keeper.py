"""The keeper: one small detached actor per application that acts when no job does.

It holds the application's `Ledger`, samples its GPUs, keeps the user's uploaded packages alive, and removes the
application when nobody holds it any more, even if Airflow never comes back. Its code is sent by value, and its state
is stored with the cluster's own, so it restarts on another node after the deploy job and its package are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from airflow_provider_raylm.ray_serve.footprint import footprint, remove_app
from airflow_provider_raylm.ray_serve.ledger import Answer, Ledger

NAMESPACE = "raylm"
PREFIX = "raylm:"
TICK_S = 5.0
PIN_S = 3600
REMOVAL_TIMEOUT_S = 300.0


class Keeper:
    """Holds one application's ledger. Methods are short; the loop runs in a thread of its own."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._lock = threading.Lock()
        stored = _kv_get(app_name)
        self._ledger = Ledger(**stored["ledger"]) if stored else Ledger(app_name, time.time())
        self._pins: tuple[str, ...] = tuple(stored["pins"]) if stored else ()
        self._pinned_s = 0.0
        threading.Thread(target=self._loop, name="raylm-keeper", daemon=True).start()

    def begin(self, fingerprint: str, deployer: str, holder: str | None, ttl_s: float, pins: tuple[str, ...]) -> Answer:
        """See `Ledger.begin`. `pins`: uploaded packages that the application needs."""
        with self._changing() as ledger:
            answer = ledger.begin(fingerprint, deployer, holder, ttl_s, time.time())
            if answer == "deploy":
                self._pins = tuple(dict.fromkeys((*self._pins, *pins)))
                self._pinned_s = 0.0
            return answer

    def heartbeat(self, deployer: str, holder: str | None) -> bool:
        """See `Ledger.heartbeat`."""
        with self._changing() as ledger:
            return ledger.heartbeat(deployer, holder, time.time())

    def finish(
        self, deployer: str, fingerprint: str, spec: dict[str, Any], result: dict[str, Any], pins: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        """See `Ledger.finish`. Returns the holders, `None` when the deploy lost its turn."""
        with self._changing() as ledger:
            now = time.time()
            if not ledger.finish(deployer, fingerprint, spec, result, now):
                return None
            self._pins = pins
            return ledger.holders(now)

    def abandon(self, deployer: str, holder: str | None) -> bool:
        """See `Ledger.abandon`."""
        with self._changing() as ledger:
            return ledger.abandon(deployer, holder, time.time())

    def renew(self, holder: str, ttl_s: float) -> bool:
        """See `Ledger.renew`."""
        with self._changing() as ledger:
            return ledger.renew(holder, ttl_s, time.time())

    def release(self, holder: str | None) -> tuple[tuple[str, ...], bool]:
        """Holders left, and whether the application is to be removed now."""
        with self._changing() as ledger:
            left = ledger.release(holder, time.time())
            return left, ledger.closing_s is not None

    def view(self) -> dict[str, Any]:
        """The ledger with a fresh GPU count, and `now_s` of its clock. Without `spec`: that may hold secrets."""
        gpus = footprint(self._app_name).gpus
        with self._changing() as ledger:
            now = time.time()
            ledger.sample(gpus, now)
            return {**dataclasses.asdict(ledger), "spec": None, "holders": ledger.holders(now), "now_s": now}

    def spec(self) -> dict[str, Any] | None:
        """The configuration that answered last."""
        with self._lock:
            return self._ledger.spec

    def forget(self) -> None:
        """The application is gone: drop the stored state. The caller ends this actor."""
        with self._lock:
            self._app_name, app_name = "", self._app_name
            _kv_delete(app_name)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Ledger]:
        with self._lock:
            before = dataclasses.asdict(self._ledger), self._pins
            yield self._ledger
            if self._app_name and before != (dataclasses.asdict(self._ledger), self._pins):
                _kv_put(self._app_name, {"ledger": dataclasses.asdict(self._ledger), "pins": self._pins})

    def _loop(self) -> None:
        log = logging.getLogger("raylm.keeper")
        while self._app_name:
            time.sleep(TICK_S)
            try:
                self._tick()
            except Exception:  # the loop must go on: nobody else removes the application
                log.exception("keeper of %r", self._app_name)

    def _tick(self) -> None:
        app_name = self._app_name
        if not app_name:
            return
        gpus = footprint(app_name).gpus
        with self._changing() as ledger:
            now = time.time()
            ledger.sample(gpus, now)
            overdue = ledger.overdue(now)
            if overdue and ledger.closing_s is None:
                ledger.closing_s = now
        if overdue:
            remove_app(app_name, timeout_s=REMOVAL_TIMEOUT_S, say=logging.getLogger("raylm.keeper").warning)
            self.forget()
            _end_this_actor()
        elif self._pins and now - self._pinned_s > PIN_S / 4:
            for uri in self._pins:
                _pin(uri)
            self._pinned_s = now


def find_keeper(app_name: str) -> Any | None:
    """Handle of an application's keeper, `None` when it has none."""
    import ray

    try:
        return ray.get_actor(PREFIX + app_name, namespace=NAMESPACE)
    except ValueError:
        return None


def open_keeper(app_name: str) -> Any:
    """Handle of an application's keeper, started if there is none. On the head node where that is possible."""
    import ray

    head = "node:__internal_head__"
    return (
        ray.remote(Keeper)
        .options(
            name=PREFIX + app_name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=3,
            max_concurrency=16,
            resources={head: 0.001} if head in ray.cluster_resources() else None,
        )
        .remote(app_name)
    )


def is_keeper(app_name: str, handle: Any | None) -> bool:
    """Whether this is still an application's keeper; `None`: whether it still has none.

    A keeper that is gone or replaced means that the removal it stood for is over, and what runs now is a newcomer's.
    """
    found = find_keeper(app_name)
    if found is None or handle is None:
        return found is handle
    return bool(found._actor_id == handle._actor_id)


def _end_this_actor() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor)


def remembers(app_name: str) -> bool:
    """Whether a deploy of ours ever claimed this application and no teardown has forgotten it since."""
    return _kv_get(app_name) is not None


def kept_apps() -> tuple[str, ...]:
    """Applications that have a keeper."""
    from ray.util import list_named_actors

    return tuple(
        sorted(
            actor["name"][len(PREFIX) :]
            for actor in list_named_actors(all_namespaces=True)
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(PREFIX)
        )
    )


def _kv_get(app_name: str) -> dict[str, Any] | None:
    from ray.experimental import internal_kv

    stored = internal_kv._internal_kv_get(PREFIX + app_name, namespace=NAMESPACE)
    found: dict[str, Any] | None = json.loads(stored) if stored else None
    return found


def _kv_put(app_name: str, state: dict[str, Any]) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(PREFIX + app_name, json.dumps(state), overwrite=True, namespace=NAMESPACE)


def _kv_delete(app_name: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(PREFIX + app_name, namespace=NAMESPACE)


def _pin(uri: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._pin_runtime_env_uri(uri, expiration_s=PIN_S)
