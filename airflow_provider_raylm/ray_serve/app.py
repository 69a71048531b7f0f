"""From a deploy spec to a Serve application: built in the deploy job, run by Serve under its own name.

Each deployment gets a version that is a hash of what a replica is made of. Serve gives every deploy a new random
version otherwise, and restarts all engines when only the number of replicas changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
from dataclasses import dataclass
from typing import Any

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.spec import DeploySpec

SCALING_FIELDS = frozenset(
    {
        "num_replicas",
        "autoscaling_config",
        "max_ongoing_requests",
        "max_queued_requests",
        "user_config",
        "graceful_shutdown_timeout_s",
        "graceful_shutdown_wait_loop_s",
        "health_check_period_s",
        "health_check_timeout_s",
    }
)
"""Fields of `deployment_config` that Serve changes on a running replica."""
SURGE_FIELD = "max_surge_percent"
REPORT_VARIABLE = "RAY_metrics_report_interval_ms"
REPORT_MS = 1000
"""Ray's least. An engine's queue is what query jobs go by; with Ray's default they see one that is up to 10 s old."""


@dataclass(frozen=True)
class App:
    """An application ready to be handed to Serve.

    Attributes:
        built: Serve's own `BuiltApplication`.
        llm_configs: The `LLMConfig`s in it; empty when it is not made of Serve LLM's parts.
        route_prefix: Path under the proxy.
    """

    built: Any
    llm_configs: tuple[Any, ...]
    route_prefix: str

    @property
    def models(self) -> tuple[str, ...]:
        """Model ids it will serve; empty when its configuration does not tell all, as with LoRA adapters in a store."""
        if any(config.lora_config for config in self.llm_configs):
            return ()
        return tuple(config.model_id for config in self.llm_configs)


def adapters(listed: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the model ids that an endpoint lists that are LoRA adapters of another one: `<model id>:<adapter>`."""
    return tuple(model for model in listed if ":" in model and model.partition(":")[0] in listed)


def to_ask(listed: tuple[str, ...]) -> tuple[str, ...]:
    """Models whose answers show that all of the listed ones work: each model, and of its adapters the first."""
    found = adapters(listed)
    first = {adapter.partition(":")[0]: adapter for adapter in reversed(found)}
    return tuple(model for model in listed if model not in found or model in first.values())


def fingerprint(spec: DeploySpec, versions: dict[str, str], packages: tuple[str, ...]) -> str:
    """Hash of what decides the running application: two equal ones need no second deploy."""
    decisive = {
        **dataclasses.asdict(spec),
        "start_timeout_s": None,
        "lease": None,
        "http_options": None,
        "versions": versions,
        "packages": packages,
    }
    return _hash(decisive)


def build(spec: DeploySpec, packages: tuple[str, ...], cpus: float) -> App:
    """Build the application of a spec.

    Args:
        spec: `llm_configs` or `serve_config`.
        packages: Uploaded packages of the user, part of what a replica is made of.
        cpus: CPUs of the cluster. They bound the replicas of an ingress that the spec says nothing of.

    Raises:
        SpecError: The configuration is not one that this cluster's Ray takes.
    """
    if bool(spec.llm_configs) == bool(spec.serve_config):
        raise SpecError("a deploy needs either llm_configs or a serve_config, and not both")
    if spec.serve_config:
        return with_quick_metrics(_from_serve_config(spec, packages))
    app = with_quick_metrics(_from_llm_configs(spec, packages))
    return app if "ingress_deployment_config" in spec.ingress else with_ingress(app, cpus)


def route_of(spec: DeploySpec) -> str:
    """The route prefix of an application made of `llm_configs`."""
    return spec.route_prefix or f"/{spec.app_name}"


def needs(app: App) -> dict[str, float]:
    """Logical resources that the application takes when it answers: at least one replica of each deployment."""
    total: dict[str, float] = {}
    for deployment in app.built.deployments:
        for resource, amount in needs_of_replica(deployment).items():
            total[resource] = total.get(resource, 0) + amount * replicas_at_start(deployment)
    return total


def needs_of_replica(deployment: Any) -> dict[str, float]:
    """Logical resources of one replica: its placement group, or else its actor."""
    config = deployment._replica_config
    bundles = config.placement_group_bundles or [config.resource_dict]
    total: dict[str, float] = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            if amount:
                total[resource] = total.get(resource, 0) + amount
    return total


def replicas_at_start(deployment: Any) -> int:
    """Replicas that Serve starts with, and at least the one that answers the readiness request."""
    config = deployment._deployment_config
    scaling = config.autoscaling_config
    if scaling is None:
        return int(config.num_replicas or 1)
    return max(1, int(scaling.initial_replicas if scaling.initial_replicas is not None else scaling.min_replicas))


def with_quick_metrics(app: App) -> App:
    """The application, its engines handing their gauges to Ray's metrics pages every second unless told otherwise."""
    deployments = []
    for deployment in app.built.deployments:
        if _llm_config_of(deployment) is not None:
            version = deployment._version
            options = dict(deployment.ray_actor_options or {})
            options["runtime_env"] = reporting_often(options.get("runtime_env") or {})
            deployment = deployment.options(ray_actor_options=options)
            deployment._version = version
        deployments.append(deployment)
    return dataclasses.replace(app, built=dataclasses.replace(app.built, deployments=deployments))


def reporting_often(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """A runtime environment whose processes report their metrics every `REPORT_MS`, or as often as it says itself."""
    return {**runtime_env, "env_vars": {REPORT_VARIABLE: str(REPORT_MS), **(runtime_env.get("env_vars") or {})}}


def with_ingress(app: App, cpus: float) -> App:
    """The application, with as many ingress replicas as its GPUs need.

    Ray starts one. It is one process, and it was full (1.15 cores) before one H200 was. Models that scale, or that run
    on CPUs, are left with it.
    """
    models = [d for d in app.built.deployments if _llm_config_of(d) is not None]
    if not all(needs_of_replica(d).get("GPU") and d._deployment_config.autoscaling_config is None for d in models):
        return app
    count = ingress_replicas(sum(map(replicas_at_start, models)), cpus)
    deployments = []
    for deployment in app.built.deployments:
        if deployment not in models:
            version = deployment._version
            deployment = deployment.options(num_replicas=count, autoscaling_config=None)
            deployment._version = version
        deployments.append(deployment)
    return dataclasses.replace(app, built=dataclasses.replace(app.built, deployments=deployments))


def ingress_replicas(models: int, cpus: float) -> int:
    """Two for each replica of a model, as long as they take no more than a quarter of the cluster's CPUs."""
    return max(1, min(2 * models, int(cpus // 4)))


def with_surge(app: App) -> App:
    """The application, updating without a gap: a new replica answers before an old one goes. Needs a Ray that can."""
    deployments = [
        deployment.options(**{SURGE_FIELD: 100}) if _can_surge(deployment) else deployment
        for deployment in app.built.deployments
    ]
    for old, new in zip(app.built.deployments, deployments, strict=True):
        new._version = old._version
    return dataclasses.replace(app, built=dataclasses.replace(app.built, deployments=deployments))


def _can_surge(deployment: Any) -> bool:
    return getattr(deployment._deployment_config, SURGE_FIELD, None) == 0


def _from_llm_configs(spec: DeploySpec, packages: tuple[str, ...]) -> App:
    try:
        from ray.serve.llm import LLMConfig, build_openai_app

        known = set(LLMConfig.model_fields)
        configs = [LLMConfig(**llm_config_kwargs(raw, known)) for raw in spec.llm_configs]
        application = build_openai_app({"llm_configs": configs, **spec.ingress})
    except ImportError as exc:
        raise SpecError(f"the head node cannot import Ray Serve LLM ({exc}); its image needs ray[llm]") from exc
    except ValueError as exc:
        raise SpecError(f"application {spec.app_name!r}: {_one_line(exc)}") from exc
    built = _built(application, name=spec.app_name, route_prefix=route_of(spec))
    environment = [packages, _ray_version()]
    by_model = {config.model_id: raw for config, raw in zip(configs, spec.llm_configs, strict=True)}
    shown = [
        [raw.get("model_loading_config"), raw.get("lora_config"), (raw.get("engine_kwargs") or {}).get("max_model_len")]
        for raw in spec.llm_configs
    ]
    for deployment in built.deployments:
        config = _llm_config_of(deployment)
        deployment._version = _hash(
            [without_scaling(by_model[config.model_id]) if config is not None else [shown, spec.ingress], environment]
        )
    return App(built, tuple(configs), route_of(spec))


def llm_config_kwargs(raw: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Keyword arguments of `LLMConfig` that this Ray knows.

    Raises:
        SpecError: This Ray does not know a field, and has no other word for it.
    """
    kwargs = dict(raw)
    if "accelerator_config" in kwargs and "accelerator_config" not in known and "use_cpu" in known:
        if kwargs["accelerator_config"] == {"kind": "cpu"}:  # what Ray called it before
            kwargs["use_cpu"] = True
            del kwargs["accelerator_config"]
        elif kwargs["accelerator_config"] == {"kind": "gpu"}:
            del kwargs["accelerator_config"]
    if unknown := sorted(set(kwargs) - known):
        raise SpecError(
            f"Ray {_ray_version()} on this cluster has no LLMConfig field {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(sorted(known))}"
        )
    return kwargs


def without_scaling(llm_config: dict[str, Any]) -> dict[str, Any]:
    """What a replica is made of: the configuration less what Serve changes while it runs."""
    deployment_config = llm_config.get("deployment_config") or {}
    return {
        **llm_config,
        "deployment_config": {k: v for k, v in deployment_config.items() if k not in SCALING_FIELDS},
    }


def _from_serve_config(spec: DeploySpec, packages: tuple[str, ...]) -> App:
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve._private.utils import override_runtime_envs_except_env_vars
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(spec.serve_config)
    except ValueError as exc:
        raise SpecError(f"serve_config is not a Serve configuration: {exc}") from exc
    config = pick_application(schema.applications, spec.app_name)
    runtime_env = dict(config.runtime_env or {})
    if others := sorted(set(runtime_env) - {"env_vars"}):
        raise SpecError(
            f"serve_config: runtime_env of application {config.name!r} has {others}; here only env_vars can stand, "
            "the rest belongs into the task's runtime_env, where the code itself comes from"
        )
    os.environ.update(runtime_env.get("env_vars") or {})
    module, _, attribute = config.import_path.replace(":", ".").rpartition(".")
    try:
        target = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise SpecError(
            f"serve_config: cannot import {config.import_path!r} ({exc}); "
            "put its folder into the task's runtime_env as working_dir"
        ) from exc
    application = call_user_app_builder_with_args_if_necessary(target, config.args)
    # Serve's default route is "/", which one application of a shared cluster can have
    route_prefix = spec.route_prefix or (config.route_prefix if "route_prefix" in config.model_fields_set else None)
    route_prefix = route_prefix or f"/{spec.app_name}"
    built = _built(application, name=spec.app_name, route_prefix=route_prefix, logging_config=config.logging_config)
    overrides = {d.name: d.model_dump(exclude_unset=True, exclude={"name"}) for d in config.deployments}
    if unknown := sorted(set(overrides) - {d.name for d in built.deployments}):
        raise SpecError(
            f"serve_config: application {config.name!r} has no deployment {unknown}; "
            f"it has {sorted(d.name for d in built.deployments)}"
        )
    version = _hash([spec.serve_config, packages, _ray_version()])
    deployments = []
    for deployment in built.deployments:
        changed = deployment.options(**overrides[deployment.name]) if deployment.name in overrides else deployment
        if runtime_env:
            options = dict(changed.ray_actor_options or {})
            options["runtime_env"] = override_runtime_envs_except_env_vars(runtime_env, options.get("runtime_env", {}))
            changed = changed.options(ray_actor_options=options)
        changed._version = version
        deployments.append(changed)
    built = dataclasses.replace(built, deployments=deployments)
    configs = tuple(c for c in map(_llm_config_of, deployments) if c is not None)
    return App(built, configs, route_prefix)


def pick_application(applications: list[Any], app_name: str) -> Any:
    """The application of a `serve_config` to deploy: the one of that name, or the only one.

    Raises:
        SpecError: There are several, and none has the name.
    """
    named = [application for application in applications if application.name == app_name]
    if len(named) == 1:
        return named[0]
    if len(applications) == 1:
        return applications[0]
    raise SpecError(
        f"serve_config has the applications {[application.name for application in applications]}; one deploy is for "
        f"one application, and none of them is named {app_name!r}"
    )


def _built(application: Any, *, name: str, route_prefix: str, logging_config: Any = None) -> Any:
    import ray
    from ray.serve._private.build_app import build_app

    return build_app(
        application,
        name=name,
        route_prefix=route_prefix,
        logging_config=logging_config,
        default_runtime_env=ray.get_runtime_context().runtime_env,
    )


def _llm_config_of(deployment: Any) -> Any | None:
    """The `LLMConfig` a deployment of Serve LLM is bound to, `None` for other deployments."""
    for value in (*deployment.init_args, *deployment.init_kwargs.values()):
        if type(value).__name__ == "LLMConfig":
            return value
    return None


def _one_line(exc: ValueError) -> str:
    """A pydantic error as `field: what is wrong; ...`, other errors as they are."""
    errors = getattr(exc, "errors", None)
    if errors is None:
        return str(exc)
    return "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}".lstrip(": ") for error in errors())


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _ray_version() -> str:
    import ray

    return str(ray.__version__)
