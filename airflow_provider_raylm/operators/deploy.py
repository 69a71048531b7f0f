"""Deploy a Qwen model (or any that vLLM serves) with Ray Serve LLM, and end when it has answered.

The endpoint outlives its deploy job. Take it down with `TeardownServeOperator`; give it a lease, and it goes by itself
when nobody renews it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.operators.ray import NATIVE_HINT, RaySubmitJobOperator, checked, required_result, seconds
from airflow_provider_raylm.outcome import Outcome
from airflow_provider_raylm.spec import DeploySpec, LeaseSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

DEPLOY_ENTRYPOINT = "python -m airflow_provider_raylm.ray_serve.deploy"
START_TIMEOUT_S = 1800.0
CLEAN_UP_S = 300.0
"""Seconds beyond `start_timeout` that a deploy job gets to start, and to remove what did not become ready."""
OF_ONE_MODEL = (
    "model_source",
    "engine_kwargs",
    "deployment_config",
    "autoscaling_config",
    "accelerator_type",
    "llm_config",
)
NO_HOLDER = re.compile(r"(true|false|none|[\d.+-]*)", re.IGNORECASE)
"""Text that was a value before a template made text of it: as a holder it would be the same for every run."""
NUM_GPUS_REFUSED = (
    "num_gpus in ray_actor_options is refused: the engine reserves its GPUs itself (tensor_parallel_size x "
    "pipeline_parallel_size), and the two reservations add up until nothing fits. Remove num_gpus, and set "
    "engine_kwargs={'tensor_parallel_size': ...} for more than one GPU"
)


class DeployQwenServeOperator(RaySubmitJobOperator):
    """Deploy one Serve application with one or more language models.

    Returns the fields of `spec.DeployResult` (`base_url`, `app_name`, `models`, `adapters`, ...), `submission_id`, and
    `lease` (`{"holder", "ttl_s"}` or `None`), all plain JSON.

    Args:
        model_id: Name clients ask for.
        model_source: Folder on the cluster, a cloud path or a hub name. Default: `model_id`.
        app_name: Name of the Serve application. Default: made from `model_id`, or `llm`.
        engine_kwargs: Of vLLM: `tensor_parallel_size`, `max_model_len`, ...
        deployment_config: Of the Serve deployment. `ray_actor_options` defaults to `{"num_cpus": 1}` and must not hold
            `num_gpus`.
        autoscaling_config: `min_replicas`, `max_replicas`, ...; goes into `deployment_config`.
        accelerator_type: `H20`, `L20`, `A10G`, ...: only GPUs of this kind.
        llm_config: More arguments of `ray.serve.llm.LLMConfig` for this model: `runtime_env`,
            `placement_group_config`, ... Engines report their metrics every second unless `env_vars` of `runtime_env`
            say otherwise (`RAY_metrics_report_interval_ms`): it is what query jobs go by.
        llm_configs: Instead of the arguments above: arguments of `LLMConfig`, one dict per model. With `lora_config`
            (`dynamic_lora_loading_path`) and `enable_lora` in `engine_kwargs`, a model answers under the name
            `<model_id>:<folder>` with each LoRA adapter that lies there.
        serve_config: Instead of all of them: the content of a `serve_config.yaml`, or the name of such a file that the
            DAG's templates are found by.
        route_prefix: Path under the proxy. Default: `/<app_name>`.
        ingress: `ingress_deployment_config` and `ingress_cls_config` of `build_openai_app`. Without the first, models
            on GPUs get two ingress replicas for each of theirs, on at most a quarter of the cluster's CPUs.
        http_options: Serve's HTTP options, used only if Serve does not run on the cluster yet: `host`, `port`,
            `proxy_location`, `root_path`, `ssl_certfile`, `ssl_keyfile`, ... A private authority's file is named by the
            variable `SSL_CERT_FILE` on the cluster.
        lease: Claim on the endpoint for this DAG run. `True` takes the holder from dag and run, a string names the
            holder, a number is the seconds it lives without renewal, a dict has `holder` and `ttl_s`. `None`: the
            endpoint stays.
        start_timeout: Seconds until every model must have answered.
        **kwargs: See `RaySubmitJobOperator`.
    """

    template_fields: Sequence[str] = (
        *RaySubmitJobOperator.template_fields,
        "model_id",
        "model_source",
        "app_name",
        "engine_kwargs",
        "deployment_config",
        "autoscaling_config",
        "accelerator_type",
        "llm_config",
        "llm_configs",
        "serve_config",
        "route_prefix",
        "ingress",
        "http_options",
        "lease",
    )
    template_ext: Sequence[str] = (".yaml", ".yml", ".json")
    ui_color = "#e8f5e9"

    def __init__(
        self,
        *,
        model_id: str | None = None,
        model_source: str | dict[str, Any] | None = None,
        app_name: str | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        deployment_config: dict[str, Any] | None = None,
        autoscaling_config: dict[str, Any] | None = None,
        accelerator_type: str | None = None,
        llm_config: dict[str, Any] | None = None,
        llm_configs: Sequence[dict[str, Any]] | None = None,
        serve_config: dict[str, Any] | str | None = None,
        route_prefix: str | None = None,
        ingress: dict[str, Any] | None = None,
        http_options: dict[str, Any] | None = None,
        lease: bool | str | float | dict[str, Any] | None = None,
        start_timeout: float = START_TIMEOUT_S,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("entrypoint", DEPLOY_ENTRYPOINT)
        kwargs.setdefault("reuse_succeeded", "never")  # a deploy that succeeded once says nothing about now
        if timeout is None:
            timeout = seconds("start_timeout", start_timeout or START_TIMEOUT_S) + CLEAN_UP_S
        super().__init__(start_timeout=start_timeout, timeout=timeout, **kwargs)
        self.model_id = model_id
        self.model_source = model_source
        self.app_name = app_name
        self.engine_kwargs = engine_kwargs
        self.deployment_config = deployment_config
        self.autoscaling_config = autoscaling_config
        self.accelerator_type = accelerator_type
        self.llm_config = llm_config
        self.llm_configs = llm_configs
        self.serve_config = serve_config
        self.route_prefix = route_prefix
        self.ingress = ingress
        self.http_options = http_options
        self.lease = lease
        self._refuse_num_gpus()

    def spec(self, context: Context) -> DeploySpec:
        serve_config = _parsed(self.serve_config)
        if self.serve_config and serve_config is None:
            raise SpecError(f"{self.task_id}: serve_config is the content of a serve_config.yaml, got other text")
        self._refuse_num_gpus()
        configs = self._llm_configs()
        spec = DeploySpec(
            app_name=self.app_name or _app_name(configs, serve_config),
            llm_configs=configs,
            route_prefix=self.route_prefix,
            ingress=self.ingress or {},
            http_options=self.http_options or {},
            serve_config=serve_config,
            start_timeout_s=float(self.start_timeout or START_TIMEOUT_S),
            lease=lease_of(self.lease, context),
        )
        return checked(spec, self.task_id)

    def result(self, outcome: Outcome, context: Context) -> dict[str, Any]:
        lease = lease_of(self.lease, context)
        return {
            **required_result(outcome),
            "submission_id": outcome.submission_id,
            "lease": None if lease is None else dataclasses.asdict(lease),
        }

    def _refuse_num_gpus(self) -> None:
        """Called when the DAG is read, so that the mistake shows at once, and again with rendered values."""
        configs: list[Any] = [{"deployment_config": self.deployment_config}, self.llm_config]
        configs += self.llm_configs if isinstance(self.llm_configs, (list, tuple)) else []
        for application in _dict(_parsed(self.serve_config)).get("applications") or []:
            configs += _dict(_dict(application).get("args")).get("llm_configs") or []
        for config in configs:
            if _dict(_dict(_dict(config).get("deployment_config")).get("ray_actor_options")).get("num_gpus"):
                raise SpecError(f"{self.task_id}: {NUM_GPUS_REFUSED}")

    def _llm_configs(self) -> tuple[dict[str, Any], ...]:
        ways = [name for name in ("model_id", "llm_configs", "serve_config") if getattr(self, name)]
        if len(ways) != 1:
            raise SpecError(
                f"{self.task_id}: exactly one of model_id, llm_configs and serve_config says what to deploy, "
                f"got {ways or 'none'}"
            )
        if not self.model_id and (unused := [name for name in OF_ONE_MODEL if getattr(self, name)]):
            raise SpecError(
                f"{self.task_id}: {', '.join(unused)} describes the one model of model_id and does not go with "
                f"{ways[0]}; write it there"
            )
        if self.serve_config:
            return ()
        if self.llm_configs:
            if not isinstance(self.llm_configs, (list, tuple)):
                given = type(self.llm_configs).__name__
                raise SpecError(f"{self.task_id}: llm_configs is a list of dicts, got {given}{NATIVE_HINT}")
            return tuple(_with_actor_options(self._mapping("llm_configs", config)) for config in self.llm_configs)
        source = self.model_source or self.model_id
        config = self._mapping("llm_config", self.llm_config)
        named = {
            "model_loading_config": {"model_id": self.model_id, "model_source": source},
            "engine_kwargs": self.engine_kwargs,
            "deployment_config": self.deployment_config,
        }
        for name, value in named.items():  # an argument adds to what llm_config says, and wins
            config[name] = {**self._mapping(name, config.get(name)), **self._mapping(name, value)}
        if self.autoscaling_config:
            config["deployment_config"]["autoscaling_config"] = self._mapping(
                "autoscaling_config", self.autoscaling_config
            )
        if self.accelerator_type:
            config["accelerator_type"] = self.accelerator_type
        return (_with_actor_options(config),)

    def _mapping(self, name: str, value: Any) -> dict[str, Any]:
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(f"{self.task_id}: {name} is a dict, got {type(value).__name__}{NATIVE_HINT}")
        return dict(value or {})


def lease_of(lease: bool | str | float | Mapping[str, Any] | None, context: Context) -> LeaseSpec | None:
    """The claim that a `lease` argument means for this DAG run.

    Raises:
        SpecError: It is none of the forms that `DeployQwenServeOperator` describes.
    """
    if lease is None or lease is False:
        return None
    ti = context["ti"]
    holder = f"{ti.dag_id}/{ti.run_id}"
    if lease is True:
        return LeaseSpec(holder=holder)
    if isinstance(lease, (int, float)) and lease > 0:
        return LeaseSpec(holder=holder, ttl_s=float(lease))
    if isinstance(lease, str) and not NO_HOLDER.fullmatch(lease.strip()):
        return LeaseSpec(holder=lease)
    if isinstance(lease, Mapping) and set(lease) <= {"holder", "ttl_s"}:
        claim = checked(LeaseSpec(**{"holder": holder, **lease}), "lease")
        if claim.ttl_s > 0 and claim.holder.strip():
            return claim
    hint = NATIVE_HINT if isinstance(lease, str) else ""
    raise SpecError(f"lease is True, a holder, seconds, or a dict of holder and ttl_s; got {lease!r}{hint}")


def _parsed(serve_config: Any) -> dict[str, Any] | None:
    """The content of a serve config: a rendered YAML file is still text, one that is not rendered yet only a name."""
    if not isinstance(serve_config, str):
        return serve_config or None
    try:
        parsed = yaml.safe_load(serve_config)
    except yaml.YAMLError as exc:
        raise SpecError(f"serve_config is not YAML: {exc}") from exc
    return parsed if isinstance(parsed, dict) else None


def _app_name(configs: Sequence[Mapping[str, Any]], serve_config: Mapping[str, Any] | None) -> str:
    if serve_config:
        applications = serve_config.get("applications") or [{}]
        return str(applications[0].get("name") or "default")
    if len(configs) > 1:
        return "llm"
    model_id = str((configs[0].get("model_loading_config") or {}).get("model_id") or "llm")
    return re.sub(r"[^a-z0-9]+", "-", model_id.rsplit("/", 1)[-1].lower()).strip("-") or "llm"


def _with_actor_options(config: dict[str, Any]) -> dict[str, Any]:
    deployment = dict(config.get("deployment_config") or {})
    deployment.setdefault("ray_actor_options", {"num_cpus": 1})
    return {**config, "deployment_config": deployment}


def _dict(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping; an argument may also be a template or an XCom that is not resolved yet."""
    return value if isinstance(value, Mapping) else {}
