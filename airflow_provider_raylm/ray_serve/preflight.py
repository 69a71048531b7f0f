"""Checks before anything is started: seconds on the cluster instead of minutes of GPU. Each failure is one sentence."""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from airflow_provider_raylm.exceptions import ServeError, SpecError
from airflow_provider_raylm.job_main import say
from airflow_provider_raylm.ray_serve import probe
from airflow_provider_raylm.ray_serve.footprint import on_nodes
from airflow_provider_raylm.spec import DeploySpec

LORA_STORES = ("s3://", "gs://", "abfss://", "azure://", "pyarrow-s3://", "pyarrow-gs://")
ON_OSS = (
    "A bucket on OSS is pyarrow-s3://<bucket>/<path>, with AWS_ENDPOINT_URL_S3, AWS_REGION, "
    "AWS_S3_ADDRESSING_STYLE=virtual and keys in the cluster's environment"
)
CONFIG_FILES = ("config.json", "params.json")


def check_spec(spec: DeploySpec) -> None:
    """What can be told from the spec alone.

    Raises:
        SpecError: It is incomplete, or reserves GPUs twice.
    """
    if bool(spec.llm_configs) == bool(spec.serve_config):
        raise SpecError("a deploy needs either llm_configs or a serve_config, and not both")
    if not spec.app_name or any(c in spec.app_name for c in "#/ "):
        raise SpecError(f"app_name {spec.app_name!r} must be a name without '#', '/' or spaces")
    if spec.route_prefix is not None and not spec.route_prefix.startswith("/"):
        raise SpecError(f"route_prefix {spec.route_prefix!r} must start with '/'")
    if unknown := sorted(set(spec.ingress) - {"ingress_deployment_config", "ingress_cls_config"}):
        raise SpecError(f"ingress has {unknown}; it takes ingress_deployment_config and ingress_cls_config")
    for config in spec.llm_configs:
        loading = config.get("model_loading_config")
        if not isinstance(loading, dict) or not loading.get("model_id"):
            raise SpecError("every llm_config needs model_loading_config with a model_id")
        check_names(loading["model_id"], loading.get("model_source"))
        check_no_gpus(loading["model_id"], config.get("deployment_config") or {})
        check_lora(loading["model_id"], config)


def check_names(model_id: str, model_source: Any) -> None:
    """Refuse names that Ray reads in another way.

    Raises:
        SpecError: A part of the id would be taken for a LoRA adapter, or a path on OSS for a name on a model hub.
    """
    if ":" in model_id:
        raise SpecError(f"model {model_id!r}: ':' cannot stand in a model_id; what follows it names a LoRA adapter")
    if isinstance(model_source, str) and model_source.startswith("oss://"):
        raise SpecError(f"model {model_id!r}: Ray cannot read model_source {model_source!r}. {ON_OSS}")


def check_lora(model_id: str, llm_config: dict[str, Any]) -> None:
    """See that adapters can be loaded at all; vLLM would say so only to the first request for one.

    Raises:
        SpecError: The store is one that Ray cannot read, or the engine is not told to take adapters.
    """
    lora_config = llm_config.get("lora_config")
    if not isinstance(lora_config, dict):
        return
    path = lora_config.get("dynamic_lora_loading_path")
    if path is None:
        raise SpecError(f"model {model_id!r}: lora_config needs dynamic_lora_loading_path, the folder of its adapters")
    if not str(path).startswith(LORA_STORES):
        raise SpecError(
            f"model {model_id!r}: dynamic_lora_loading_path {path!r} cannot be read; Ray takes LoRA adapters from "
            f"{', '.join(LORA_STORES)} only. {ON_OSS}"
        )
    if (llm_config.get("engine_kwargs") or {}).get("enable_lora") is not True:
        raise SpecError(f"model {model_id!r}: lora_config needs engine_kwargs enable_lora: true, and max_lora_rank")


def check_no_gpus(model_id: str, deployment_config: dict[str, Any]) -> None:
    """Refuse GPUs on the replica itself.

    Raises:
        SpecError: `ray_actor_options` reserves GPUs.
    """
    options = deployment_config.get("ray_actor_options") or {}
    if options.get("num_gpus") or (options.get("resources") or {}).get("GPU"):
        raise SpecError(
            f"model {model_id!r}: num_gpus must not stand in ray_actor_options. The engine reserves its GPUs itself, "
            "tensor_parallel_size × pipeline_parallel_size, and the two add up until nothing fits. Remove num_gpus"
        )


def local_path(model_source: Any) -> str | None:
    """The folder a model is read from, `None` when it comes from a store or a hub."""
    is_path = isinstance(model_source, str) and model_source.startswith(("/", "./", "../", "~"))
    return model_source if is_path else None


def path_problem(path: str) -> str | None:
    """What is wrong with a model path on this machine."""
    folder = Path(path).expanduser()
    if folder.is_file():
        return None  # a single-file checkpoint such as GGUF
    if not folder.is_dir():
        return "does not exist"
    if not any((folder / name).is_file() for name in CONFIG_FILES):
        return f"holds no {CONFIG_FILES[0]}"
    return None


def check_model_paths(llm_configs: tuple[Any, ...]) -> None:
    """Look for each model's folder, here first and then on the other nodes: it need not be mounted on the head.

    Raises:
        SpecError: A path is wrong on every node.
    """
    import ray

    for config in llm_configs:
        loading = config.model_loading_config
        path = local_path(loading.model_source)
        if path is None or path_problem(path) is None:
            continue
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        problems = on_nodes(dict.fromkeys(nodes, (path_problem, path)))
        if problems and all(problems):
            where = "on this cluster's node" if len(nodes) == 1 else f"on any of this cluster's {len(nodes)} nodes"
            raise SpecError(f"model {config.model_id!r}: model_source {path!r} {problems[0]} {where}")


def check_engine_kwargs(config: Any) -> None:
    """Let vLLM's own argument parser judge a model's `engine_kwargs`. Needs no GPU.

    Args:
        config: A `ray.serve.llm.LLMConfig`.

    Raises:
        SpecError: vLLM does not know an argument, or refuses its value.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        engine_kwargs: dict[str, Any] = config.get_engine_config().engine_kwargs
    except ValueError as exc:
        raise SpecError(f"model {config.model_id!r}: {_with_hint(str(exc), AsyncEngineArgs)}") from exc
    try:
        parser = AsyncEngineArgs.add_cli_args(_parser_class(config.model_id)())
    except Exception as exc:  # a build of vLLM that wants its accelerator here; the engine judges the arguments then
        say(f"engine_kwargs are not checked before the start: vLLM's parser cannot be made on this node ({exc})")
        return
    parser.parse_args(cli_arguments(engine_kwargs, parser))


def cli_arguments(engine_kwargs: dict[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """Write engine arguments as vLLM's command line; those it has no option for are left out.

    Raises:
        SpecError: A switch has a value that is neither true nor false.
    """
    arguments: list[str] = []
    for key, value in engine_kwargs.items():
        option = "--" + key.replace("_", "-")
        action = parser._option_string_actions.get(option)
        if action is None or value is None:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                raise SpecError(f"engine_kwargs: {key} must be true or false, got {value!r}")
            arguments.append(option if value else "--no-" + option[2:])
        elif isinstance(value, (list, tuple)) and action.nargs in ("*", "+"):
            arguments += [option, *map(str, value)]
        elif isinstance(value, (dict, list, tuple)):
            arguments += [option, json.dumps(value, default=str)]
        else:
            arguments += [option, str(value)]
    return arguments


def _parser_class(model_id: str) -> Any:
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise SpecError(f"model {model_id!r}: vLLM refuses engine_kwargs: {message}")

    return Parser


def _with_hint(message: str, engine_args: Any) -> str:
    name = message.rpartition(": ")[2]
    near = difflib.get_close_matches(name, engine_args.__dataclass_fields__, n=1)
    return f"{message}. Did you mean {near[0]!r}?" if near else message


def shortage(
    app_name: str, needed: dict[str, float], total: dict[str, float], limit: dict[str, float] | None
) -> str | None:
    """Why an application can never fit this cluster, `None` when it can.

    Args:
        app_name: The application.
        needed: Logical resources it needs.
        total: Logical resources the cluster has, whoever holds them.
        limit: The most that the autoscaler may reach, `None` when there is no autoscaler.
    """
    missing = []
    for resource, amount in sorted(needed.items()):
        have = total.get(resource, 0)
        reachable = max(have, (limit or {}).get(resource, 0))
        if amount <= reachable:
            continue
        kind = resource.partition("accelerator_type:")[2]
        if kind:
            there = sorted(r.partition(":")[2] for r in total if r.startswith("accelerator_type:"))
            missing.append(f"an accelerator of type {kind}, cluster has {', '.join(there) or 'none'}")
        else:
            missing.append(f"{amount:g} {resource}, cluster has {have:g}")
    if not missing:
        return None
    scaler = "none" if limit is None else "at most " + ", ".join(f"{v:g} {k}" for k, v in sorted(limit.items()))
    return f"application {app_name!r} needs {'; '.join(missing)}, autoscaler: {scaler}"


def check_resources(app_name: str, needed: dict[str, float]) -> None:
    """Compare what the application needs with what this cluster and its autoscaler can give.

    Raises:
        ServeError: It can never fit.
    """
    import ray

    try:
        limit = ray._private.state.state.get_max_resources_from_cluster_config()
    except AttributeError:
        limit = None
    if problem := shortage(app_name, needed, ray.cluster_resources(), limit):
        raise ServeError(problem)


def check_port(host: str, port: int) -> None:
    """Make sure that Serve's HTTP port is free on this node, before Serve is started.

    Raises:
        ServeError: Something else listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            why = "is taken by another process" if exc.errno == errno.EADDRINUSE else f"cannot be used: {exc.strerror}"
            raise ServeError(f"Serve's HTTP port {port} on {host} {why}; choose another with http_options") from exc


def check_certificate(certfile: str, keyfile: str, password: str | None, url: str) -> None:
    """Make sure that clients will trust Serve's certificate, before Serve is started: it cannot be changed afterwards.

    Args:
        certfile, keyfile, password: Serve's `ssl_certfile`, `ssl_keyfile` and `ssl_keyfile_password`.
        url: URL that is handed on.

    Raises:
        ServeError: The files cannot be used, or a client at this node would refuse the certificate.
    """
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        served.load_cert_chain(certfile, keyfile, password or "")  # without a password, OpenSSL would ask for one
    except OSError as exc:
        raise ServeError(
            f"Serve's ssl_certfile {certfile!r} with ssl_keyfile {keyfile!r} cannot be used on this node: {exc}"
        ) from exc
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = served.wrap_bio(to_server, to_client, server_side=True)
    client = ssl.create_default_context().wrap_bio(to_client, to_server, server_hostname=urlsplit(url).hostname)
    for side in (client, server, client):  # one TLS handshake, as far as the client's verdict
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as exc:
            raise ServeError(f"Serve's ssl_certfile {certfile!r} at {url}: {probe.untrusted(exc)}") from exc
