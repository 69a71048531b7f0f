"""The deploy job: `python -m airflow_provider_raylm.ray_serve.deploy`. It ends when every model has answered.

What must stay true:
- A failed first deploy leaves nothing behind; a failed update goes back to what ran before.
- Other applications are not touched: the application is handed to Serve under its own name. Serve's declarative
  interface would delete applications it is not told about, so a `serve_config` is built here as well.
- Readiness is asked through the URL that is handed on, after Serve has replaced the replicas of an older version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from airflow_provider_raylm.exceptions import EndpointError, ServeError, TerminalEndpointError, TransientEndpointError
from airflow_provider_raylm.job_main import run_job, say
from airflow_provider_raylm.ray_serve import app as apps
from airflow_provider_raylm.ray_serve import (
    cluster,
    diagnosis,
    footprint,
    keeper,
    ledger,
    preflight,
    probe,
    serve_state,
)
from airflow_provider_raylm.spec import DeployResult, DeploySpec, from_json

POLL_S = 1.0
ANSWER_TIMEOUT_S = 60.0
NO_OP_TIMEOUT_S = 20.0
REMOVAL_TIMEOUT_S = 180.0
HTTP_UNKNOWN, HTTP_BROKEN = 404, 500
BROKEN_LIMIT = 5
"""Answers 500 in a row after which a model that is up counts as broken; its engine may die over the first of them."""
ROUTES_HINT = "/-/routes"
"""In the 404 of a proxy that does not know the route yet, and not in an application's own 404."""
LOST = "was removed while it was being deployed"
DEFAULT_HTTP = {"host": "0.0.0.0", "port": 8000}  # noqa: S104 # other nodes must reach it


def main(spec: DeploySpec) -> DeployResult:
    """Deploy, and return when each model has answered.

    Raises:
        SpecError: The configuration is wrong; nothing was started.
        ServeError: It did not start; the message says why, and what was started is gone.
    """
    started = time.monotonic()
    preflight.check_spec(spec)
    cluster.connect()
    return _Deploy(spec, started).run()


class _Question:
    """One request in a thread of its own: an answer may take minutes, and the job may end without it."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._call = ask
        self.done = False
        self.answer: Any = None
        self.error: EndpointError | None = TransientEndpointError("the request ended without an answer")
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        try:
            self.answer = self._call()
            self.error = None
        except EndpointError as exc:
            self.error = exc
        finally:
            self.done = True


class _Turn:
    """A deploy's turn at its application, kept by a thread of its own: the deploy itself may be held up for minutes by
    vLLM's import, a model that does not answer or a Serve controller that is busy."""

    def __init__(self, app_name: str, deploy_id: str, holder: str | None) -> None:
        self._app_name, self._deploy_id, self._holder = app_name, deploy_id, holder
        self._ended = threading.Event()
        self._lost = False
        threading.Thread(target=self._keep, name="raylm-turn", daemon=True).start()

    def check(self, *, ask: bool = False) -> None:
        """Go on only while it lasts.

        Args:
            ask: Ask now; else the last heartbeat tells.

        Raises:
            ServeError: A teardown or an expired lease has begun to remove the application.
        """
        if ask:
            self._beat()
        if self._lost:
            raise ServeError(f"application {self._app_name!r} {LOST}")

    def end(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()

    def _keep(self) -> None:
        while not self._ended.wait(ledger.HEARTBEAT_S):
            self._beat()

    def _beat(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # it restarts after its node was lost
            handle = keeper.find_keeper(self._app_name)
            self._lost = handle is None or not ray.get(handle.heartbeat.remote(self._deploy_id, self._holder))


class _Deploy:
    """One deploy of one application."""

    def __init__(self, spec: DeploySpec, started: float) -> None:
        self._spec = spec
        self._started = started
        self._deadline = started + spec.start_timeout_s
        self._id = uuid.uuid4().hex
        self._holder = spec.lease.holder if spec.lease else None
        self._versions = cluster.versions()
        self._packages = cluster.package_uris()
        self._fingerprint = apps.fingerprint(spec, self._versions, self._packages)
        self._app: apps.App
        self._turn: _Turn
        self._handed_over = False
        self._last_status = ""
        self._broken = 0

    def run(self) -> DeployResult:
        """Take the application's turn, deploy, wait for the answers, and say what runs."""
        say(f"cluster: {', '.join(f'{name} {version}' for name, version in self._versions.items())}")
        checked = keeper.find_keeper(self._spec.app_name) is None
        if checked:  # before the first trace of it
            self._check()
        answer = self._begin()
        self._turn = _Turn(self._spec.app_name, self._id, self._holder)
        try:
            if answer == "ready" and (running := self._running_already()) is not None:
                return running
            if not checked:
                self._check()
            self._turn.check()
            serve = serve_state.client() or self._start_serve()
            base_url = self._hand_over(serve)
            listed = self._await_answers(serve, base_url)
            return self._finish(serve, listed, self._app.route_prefix, changed=True)
        except BaseException as exc:  # also when the job is stopped: nobody else would clean up for minutes
            try:
                self._undo()
            except Exception as left:
                raise ServeError(f"{exc} Cleaning up failed as well: {left}") from exc
            raise
        finally:
            self._turn.end()

    def _check(self) -> None:
        """Everything that can be known before something is started, the quick checks first."""
        self._app = apps.build(self._spec, self._packages, cluster.cpus())
        for config in self._app.llm_configs:
            preflight.check_no_gpus(config.model_id, config.deployment_config)
        preflight.check_model_paths(self._app.llm_configs)
        needed = apps.needs(self._app)
        preflight.check_resources(self._spec.app_name, needed)
        say(f"needs {', '.join(f'{amount:g} {resource}' for resource, amount in sorted(needed.items()))}")
        serve = serve_state.client()
        if serve is None:
            self._check_new_serve()
        else:
            self._check_running_serve(serve)
        for config in self._app.llm_configs:
            preflight.check_engine_kwargs(config)  # imports vLLM

    def _check_new_serve(self) -> None:
        """What cannot be changed any more once Serve runs."""
        http = self._http_options()
        try:
            preflight.check_port(http["host"], http["port"])
        except ServeError:
            if serve_state.client() is None:
                raise  # else another deploy has just started Serve there
        url = serve_state.urls_of(
            host=http["host"],
            port=http["port"],
            scheme="https",
            proxy_ips=(serve_state.head_ip(),),
            node_ips=serve_state.node_ips(),
            head_ip=serve_state.head_ip(),
            route_prefix=self._app.route_prefix,
        )[0]
        if http.get("ssl_certfile") and http.get("ssl_keyfile"):
            preflight.check_certificate(
                http["ssl_certfile"], http["ssl_keyfile"], http.get("ssl_keyfile_password"), url
            )

    def _check_running_serve(self, serve: Any) -> None:
        running = serve_state.details(serve)["applications"]
        if self._spec.app_name in running and keeper.find_keeper(self._spec.app_name) is None:
            raise ServeError(
                f"application {self._spec.app_name!r} runs already and was not deployed by this provider; choose "
                "another app_name, or tear it down first"
            )
        if owner := serve_state.route_owner(running, self._spec.app_name, self._app.route_prefix):
            raise ServeError(
                f"route prefix {self._app.route_prefix!r} belongs to application {owner!r}; choose another route_prefix"
            )
        base_url = serve_state.base_urls(serve, self._app.route_prefix)[0]
        try:
            probe.check_trust(base_url, timeout_s=NO_OP_TIMEOUT_S)
        except TerminalEndpointError as exc:
            raise ServeError(str(exc)) from exc

    def _begin(self) -> ledger.Answer:
        """Wait for this application's turn.

        Raises:
            ServeError: Another deploy or a removal was at work until the deadline.
        """
        said = ""
        while True:
            answer = self._ask_for_turn()
            if answer in ("deploy", "ready"):
                return answer
            what = "another deploy is at work" if answer == "wait" else "it is being removed"
            if time.monotonic() > self._deadline:
                raise ServeError(
                    f"application {self._spec.app_name!r}: {what}, and was not done within "
                    f"{self._spec.start_timeout_s:.0f} s; nothing was started"
                )
            if what != said:
                said = what
                say(f"waiting: {what}")
            time.sleep(POLL_S)

    def _ask_for_turn(self) -> ledger.Answer:
        import ray

        lease = self._spec.lease
        handle = keeper.open_keeper(self._spec.app_name)
        try:
            answer: ledger.Answer = ray.get(
                handle.begin.remote(
                    self._fingerprint, self._id, self._holder, lease.ttl_s if lease else 0.0, self._packages
                )
            )
        except ray.exceptions.RayActorError:  # it ended in between, with its application
            return "closing"
        return answer

    def _running_already(self) -> DeployResult | None:
        """The result of the deploy before, if the same configuration still answers."""
        import ray

        former = ray.get(keeper.open_keeper(self._spec.app_name).view.remote())["result"]
        serve = serve_state.client()
        running = serve_state.application(serve, self._spec.app_name) if serve is not None else None
        if serve is None or running is None or running["status"] != "RUNNING":
            return None
        try:
            for model in former["models"]:
                probe.ask(former["base_url"], model, timeout_s=NO_OP_TIMEOUT_S)
        except EndpointError as exc:
            say(f"the same configuration runs, but does not answer ({exc}); deploying it again")
            return None
        say("the same configuration runs and answers: nothing to do")
        listed = (*former["models"], *former.get("adapters", ()))
        return self._finish(serve, listed, former["route_prefix"], changed=False)

    def _http_options(self) -> dict[str, Any]:
        given = dict(self._spec.http_options)
        if self._spec.serve_config:
            given = {**(self._spec.serve_config.get("http_options") or {}), **given}
        given.pop("proxy_location", None)
        return {**DEFAULT_HTTP, **given}

    def _start_serve(self) -> Any:
        from ray import serve

        location = self._spec.http_options.get("proxy_location") or (self._spec.serve_config or {}).get(
            "proxy_location"
        )
        http = self._http_options()
        say(f"starting Serve on {http['host']}:{http['port']}")
        try:
            serve.start(**({"proxy_location": location} if location else {}), http_options=http)
        except Exception as exc:
            if serve_state.client() is None:  # else another deploy was faster
                raise ServeError(f"Serve did not start on {http['host']}:{http['port']}: {exc}") from exc
        client = serve_state.client()
        if client is None:
            raise ServeError("Serve was started, but its controller is not there")
        return client

    def _hand_over(self, serve: Any) -> str:
        """Give the application to Serve, and say where it will answer."""
        import ray

        app = self._app
        update = serve_state.application(serve, self._spec.app_name) is not None
        if update:
            free = ray.available_resources()
            if all(free.get(resource, 0) >= amount for resource, amount in apps.needs(app).items()):
                app = apps.with_surge(app)
        say(f"{'updating' if update else 'deploying'} {self._spec.app_name!r} at {app.route_prefix}")
        self._turn.check(ask=True)  # what is handed over after a removal would stay, or take a newcomer's place
        self._before = diagnosis.replica_ids(self._spec.app_name)
        self._handed_over = True
        try:
            serve.deploy_applications([app.built], wait_for_applications_running=False)
        except Exception as exc:
            words = diagnosis.root_cause(str(exc)) or str(exc).strip().splitlines()[-1]
            raise ServeError(f"Serve did not take application {self._spec.app_name!r}: {words}") from exc
        return serve_state.base_urls(serve, app.route_prefix)[0]

    def _await_answers(self, serve: Any, base_url: str) -> tuple[str, ...]:
        """Wait until every model has answered.

        Returns:
            The models, and the LoRA adapters that the endpoint lists.

        Raises:
            ServeError: Serve or a model failed for good, or the deadline passed.
        """
        listed = models = self._app.models
        answered: list[str] = []
        asking: _Question | None = None
        said = ""
        checked_s = 0.0
        while True:
            running = serve_state.application(serve, self._spec.app_name)
            deaths: dict[str, int] = {}
            if time.monotonic() - checked_s > 5 * POLL_S:
                checked_s = time.monotonic()
                deaths = diagnosis.deaths_by_deployment(self._spec.app_name, self._before)
            if words := diagnosis.failure(running, deaths):
                raise ServeError(self._why(words))
            waiting = self._waiting_for(running)
            if running is not None and running["status"] == "RUNNING":
                if asking is not None and asking.done:
                    if asking.error is not None:
                        self._judge(models[len(answered)] if models else None, base_url, asking.error)
                    elif models:
                        answered.append(models[len(answered)])
                        say(f"{self._passed_s():.1f} s: {answered[-1]!r} answered at {base_url}/{asking.answer}")
                    else:
                        listed, models = asking.answer, apps.to_ask(asking.answer)
                    asking = None
                if models and len(answered) == len(models):
                    self._say_adapters(listed)
                    return listed
                asking = asking or _Question(self._question(models, answered, base_url))
                about = f"an answer of {models[len(answered)]!r}" if models else "the list of models"
                waiting = f"{about}{self._last_status}"
            if waiting != said:
                said = waiting
                say(f"{self._passed_s():.0f} s: waiting for {waiting}")
            self._turn.check()
            if time.monotonic() > self._deadline:
                raise ServeError(self._why(f"not ready after {self._spec.start_timeout_s:.0f} s: {waiting}"))
            time.sleep(POLL_S)

    def _say_adapters(self, listed: tuple[str, ...]) -> None:
        found = apps.adapters(listed)
        for config in self._app.llm_configs:
            if config.lora_config:
                names = [name for name in found if name.startswith(f"{config.model_id}:")]
                where = config.lora_config.dynamic_lora_loading_path
                say(
                    f"LoRA adapters of {config.model_id!r}: {', '.join(names) or f'none is listed under {where}'}; "
                    f"ask for one as '{config.model_id}:<folder>', also when it is added later"
                )

    def _passed_s(self) -> float:
        return time.monotonic() - self._started

    @staticmethod
    def _question(models: tuple[str, ...], answered: list[str], base_url: str) -> Callable[[], Any]:
        """The next thing to ask: which models there are, and then one token of each."""
        if not models:
            return functools.partial(probe.list_models, base_url, timeout_s=ANSWER_TIMEOUT_S)
        return functools.partial(probe.ask, base_url, models[len(answered)], timeout_s=ANSWER_TIMEOUT_S)

    def _judge(self, model: str | None, base_url: str, exc: EndpointError) -> None:
        """Whether an error in place of an answer is final.

        Args:
            model: Who was asked; `None` when it was the list of models.
            base_url: Where.
            exc: What came back.

        Raises:
            ServeError: The model refuses the request, or its engine breaks over it again and again, or the application
                knows no models.
        """
        status = exc.http_status
        self._last_status = f" (HTTP {status})" if status else ""
        if model is None:
            if status == HTTP_UNKNOWN and ROUTES_HINT not in str(exc):
                words = f"{base_url}/models does not exist: the application is no OpenAI endpoint"
                raise ServeError(self._why(words)) from exc
            if isinstance(exc, TerminalEndpointError) and status is None:
                raise ServeError(str(exc)) from exc
            return
        self._broken = self._broken + 1 if status == HTTP_BROKEN else 0
        # 404: the proxy or the ingress does not know it yet
        if (isinstance(exc, TerminalEndpointError) and status != HTTP_UNKNOWN) or self._broken >= BROKEN_LIMIT:
            raise ServeError(self._why(f"model {model!r} does not answer the readiness request: {exc}")) from exc

    def _waiting_for(self, running: dict[str, Any] | None) -> str:
        import ray

        return diagnosis.waiting_for(running, apps.needs(self._app), ray.cluster_resources(), ray.available_resources())

    def _why(self, words: str) -> str:
        cause = diagnosis.cause_in_logs(self._spec.app_name, self._before) or diagnosis.root_cause(words)
        first = words.strip().splitlines()[0] if words.strip() else words
        return f"application {self._spec.app_name!r} did not start: {first}" + (f" Cause: {cause}" if cause else "")

    def _finish(self, serve: Any, listed: tuple[str, ...], route_prefix: str, *, changed: bool) -> DeployResult:
        import ray

        found = apps.adapters(listed)
        urls = serve_state.base_urls(serve, route_prefix)
        result = DeployResult(
            app_name=self._spec.app_name,
            base_url=urls[0],
            base_urls=urls,
            models=tuple(model for model in listed if model not in found),
            adapters=found,
            route_prefix=route_prefix,
            ready_s=round(time.monotonic() - self._started, 3),
            changed=changed,
            versions=self._versions,
        )
        kept = dataclasses.asdict(self._spec), dataclasses.asdict(result)
        handle = keeper.find_keeper(self._spec.app_name)
        holders = handle and ray.get(handle.finish.remote(self._id, self._fingerprint, *kept, self._packages))
        if holders is None:
            raise ServeError(f"application {self._spec.app_name!r} {LOST}")
        return dataclasses.replace(result, leases=tuple(holders))

    def _undo(self) -> None:
        """Remove what this deploy started; after a failed update, hand the former configuration back to Serve.

        Both need the application's turn. Whoever has it instead, a removal or a newer deploy, sees to the rest.
        """
        import ray

        if not self._handed_over and keeper.find_keeper(self._spec.app_name) is None:
            return
        if self._ask_for_turn() in ("wait", "closing"):
            return
        handle = keeper.open_keeper(self._spec.app_name)
        former = ray.get(handle.spec.remote())
        if former is not None and self._handed_over:
            say("failed: going back to what ran before")
            self._restore(former)
        try:
            in_turn = ray.get(handle.abandon.remote(self._id, self._holder))
        except ray.exceptions.RayActorError:
            in_turn = False
        if not in_turn:
            self._undo()  # a removal came in between, and may have ended before the former configuration was back
        elif former is None:
            say("failed: removing what was started")
            footprint.remove_app(
                self._spec.app_name,
                timeout_s=REMOVAL_TIMEOUT_S,
                say=say,
                is_ours=lambda: keeper.is_keeper(self._spec.app_name, handle),
            )
            with contextlib.suppress(ray.exceptions.RayActorError):  # it may have removed the application first
                ray.get(handle.forget.remote())
                ray.kill(handle)

    def _restore(self, former: dict[str, Any]) -> None:
        serve = serve_state.client()
        if serve is None:
            return
        spec = from_json(DeploySpec, json.dumps(former))
        serve.deploy_applications(
            [apps.build(spec, self._packages, cluster.cpus()).built], wait_for_applications_running=False
        )


if __name__ == "__main__":
    run_job(DeploySpec, main)
