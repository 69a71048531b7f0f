"""Deploy, share, update, lose, recover and remove applications on a real cluster of two nodes, without a model.

The application answers the OpenAI protocol in milliseconds, so that what is tested is everything around a model.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.experimental import internal_kv

from airflow_provider_raylm.exceptions import ServeError
from airflow_provider_raylm.ray_serve import cluster as job_cluster
from airflow_provider_raylm.ray_serve import (
    deploy,
    diagnosis,
    footprint,
    keeper,
    leases,
    ledger,
    serve_state,
    status,
    teardown,
)
from airflow_provider_raylm.spec import DeploySpec, LeaseSpec, TeardownSpec
from demo.ray_head import free_ports, ray_head, start_worker
from tests.integration.serve_jobs import ECHO_DIR, Cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

BYSTANDER = "bystander"
# real clusters delete an uploaded package when its last user is gone, after ten minutes of grace; here after seconds
GARBAGE_SOON = {
    "RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S": "15",
    "RAY_RUNTIME_ENV_PY_MODULES_CACHE_SIZE_GB": "0",
    "RAY_RUNTIME_ENV_WORKING_DIR_CACHE_SIZE_GB": "0",
}


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # without a token: Ray reads the authentication mode once per process, and this process connects as well
    with ray_head(num_cpus=6, auth=False, env=GARBAGE_SOON) as node:
        ray.init(node.address, namespace="test", log_to_driver=False, logging_level="error")
        try:
            yield Cluster(node)
        finally:
            ray.shutdown()


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deploys and teardowns can run in this process: quicker than jobs, and a test can stop one between two steps."""
    monkeypatch.setattr(job_cluster, "connect", lambda: None)
    monkeypatch.syspath_prepend(str(ECHO_DIR))
    echo_app = importlib.import_module("echo_app")
    cloudpickle.register_pickle_by_value(echo_app)
    yield
    cloudpickle.unregister_pickle_by_value(echo_app)


def echo(app_name: str, port: int, *, reply: str = "one", holder: str | None = None, **args: Any) -> DeploySpec:
    ttl_s = args.pop("ttl_s", 600.0)
    start_timeout_s = args.pop("start_timeout_s", 120.0)
    deployments = args.pop("deployments", [])
    return DeploySpec(
        app_name=app_name,
        serve_config={
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [
                {
                    "name": "default",
                    "import_path": "echo_app:build",
                    "args": {"model": app_name, "reply": reply, **args},
                    "deployments": deployments,
                }
            ],
        },
        start_timeout_s=start_timeout_s,
        lease=LeaseSpec(holder=holder, ttl_s=ttl_s) if holder else None,
    )


def ask(base_url: str, timeout_s: float = 30) -> str:
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "m", "messages": []}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return str(json.loads(response.read())["choices"][0]["message"]["content"])


def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def answers(base_url: str, reply: str) -> bool:
    try:
        return ask(base_url, timeout_s=10) == reply
    except OSError:
        return False


def is_gone(app_name: str) -> bool:
    running = serve_state.application(serve_state.client(), app_name)
    return running is None and not footprint.footprint(app_name) and app_name not in keeper.kept_apps()


@pytest.fixture(scope="module")
def bystander(cluster: Cluster, port: int) -> str:
    """Somebody else's application, started with `serve run`; must answer after every test."""
    script = (
        "import ray; from ray import serve; import echo_app; ray.init('auto');"
        f"serve.start(proxy_location='HeadOnly', http_options={{'host': '127.0.0.1', 'port': {port}}});"
        f"serve.run(echo_app.build({{'model': 'b', 'reply': 'here'}}), name='{BYSTANDER}', route_prefix='/bystander',"
        "blocking=True)"
    )
    job = cluster.jobs.submit_job(
        entrypoint=f'{sys.executable} -c "{script}"', runtime_env={"working_dir": str(ECHO_DIR)}
    )
    base_url = f"http://127.0.0.1:{port}/bystander/v1"
    eventually(lambda: answers(base_url, "here"))
    cluster.jobs.stop_job(job)
    eventually(lambda: cluster.jobs.get_job_status(job).is_terminal())
    return base_url


@pytest.fixture
def untouched(bystander: str) -> Iterator[None]:
    yield
    assert ask(bystander) == "here"


shared = pytest.mark.usefixtures("untouched")


@shared
def test_deployed_endpoint_survives_its_job_and_package(cluster: Cluster, port: int) -> None:
    """A replica that is killed, and one that was scaled to zero, come back from the user's package.

    The deploy job has ended by then, its own package is deleted, and so would the user's be if nothing kept it.
    """
    soon = {"downscale_delay_s": 0.1, "downscale_to_zero_delay_s": 0.1, "metrics_interval_s": 0.2}
    scaling = {"min_replicas": 0, "max_replicas": 1, "look_back_period_s": 0.5, **soon}
    specs = {
        "survivor": echo("survivor", port),
        "sleepy": echo("sleepy", port, options={"autoscaling_config": scaling}),
    }
    jobs = [cluster.start("deploy", spec, working_dir=ECHO_DIR) for spec in specs.values()]
    base_urls = {}
    for (name, _), job in zip(specs.items(), jobs, strict=True):
        deployed = cluster.finish(*job)
        assert deployed.result is not None
        assert deployed.result["models"] == [name]
        base_urls[name] = deployed.result["base_url"]
        assert base_urls[name] == f"http://127.0.0.1:{port}/{name}/v1"
    for _, package_uri in jobs:
        eventually(lambda uri=package_uri: not internal_kv._internal_kv_exists(uri), timeout_s=90)

    (replica,) = footprint.footprint("survivor").replicas
    ray.kill(ray.get_actor(replica, namespace="serve"))
    eventually(lambda: footprint.footprint("survivor").replicas not in ((), (replica,)))
    eventually(lambda: not footprint.footprint("sleepy"))
    for base_url in base_urls.values():
        eventually(lambda url=base_url: answers(url, "one"))

    for job in [cluster.start("teardown", TeardownSpec(app_name=name)) for name in specs]:
        removed = cluster.finish(*job).result
        assert removed is not None
        assert removed["state"] == "removed"
        assert removed["lived_s"] > 0
        assert removed["gpu_seconds"] == 0
    for name in specs:
        assert is_gone(name)


@shared
def test_same_configuration_is_a_no_op_and_leases_are_shared(
    cluster: Cluster, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs share an endpoint: the second deploy changes nothing, the first teardown removes nothing."""
    first = deploy.main(echo("shared", port, holder="monday"))
    before = footprint.footprint("shared").replicas
    second = deploy.main(echo("shared", port, holder="tuesday"))
    assert (first.changed, second.changed) == (True, False)
    assert sorted(second.leases) == ["monday", "tuesday"]
    assert footprint.footprint("shared").replicas == before
    assert leases.renew("shared", "monday", 600)

    kept = teardown.main(TeardownSpec(app_name="shared", holder="monday"))
    assert (kept.state, kept.leases) == ("leased", ("tuesday",))
    assert ask(second.base_url) == "one"

    capsys.readouterr()
    status.main()
    assert "held by tuesday" in capsys.readouterr().out

    assert teardown.main(TeardownSpec(app_name="shared", holder="tuesday")).state == "removed"
    assert not leases.renew("shared", "tuesday", 600)
    assert teardown.main(TeardownSpec(app_name="shared", holder="tuesday")).state == "absent"


@shared
def test_expired_lease_removes_the_endpoint_without_airflow(cluster: Cluster, port: int) -> None:
    """Nobody renews and nobody tears down: the endpoint removes itself, and the keeper with it."""
    deploy.main(echo("forgotten", port, holder="crashed", ttl_s=1.0))
    eventually(lambda: is_gone("forgotten"))


@shared
def test_update_loses_no_request_and_a_failed_one_goes_back(cluster: Cluster, port: int) -> None:
    """A client that keeps sending sees old or new replies, never an error; a broken update leaves the old version."""
    base_url = deploy.main(echo("rolling", port, reply="old")).base_url
    replies: list[str] = []
    stop = threading.Event()

    def keep_sending() -> None:
        while not stop.is_set():
            try:
                replies.append(ask(base_url))
            except Exception as exc:
                replies.append(repr(exc))
            time.sleep(0.02)

    senders = [threading.Thread(target=keep_sending) for _ in range(4)]
    for sender in senders:
        sender.start()
    try:
        assert deploy.main(echo("rolling", port, reply="new")).changed
        assert ask(base_url) == "new"
        with pytest.raises(ServeError, match="weights are corrupt"):
            deploy.main(echo("rolling", port, fails="weights are corrupt"))
    finally:
        stop.set()
        for sender in senders:
            sender.join()
    eventually(lambda: answers(base_url, "new"))
    assert set(replies) == {"old", "new"}
    teardown.main(TeardownSpec(app_name="rolling"))


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "constructor raises": ({"fails": "weights are corrupt"}, "weights are corrupt"),
    "constructor raises, no replica wanted": (
        {
            "fails": "weights are corrupt",
            "options": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 1}},
        },
        "weights are corrupt",
    ),
    "no GPU": ({"options": {"ray_actor_options": {"num_gpus": 1}}}, "needs 1 GPU, cluster has 0, autoscaler: none"),
    "never answers": ({"delay_s": 600.0, "start_timeout_s": 6.0}, "not ready after 6 s"),
    "never lists its models": ({"list_delay_s": 600.0, "start_timeout_s": 6.0}, "not ready after 6 s"),
}


@shared
@pytest.mark.parametrize("case", FAILURES)
def test_failed_start_says_why_and_leaves_nothing(cluster: Cluster, port: int, case: str) -> None:
    """Each way not to start ends in one sentence with the reason, and nothing of it is left on the cluster."""
    args, reason = FAILURES[case]
    with pytest.raises(ServeError, match=reason):
        deploy.main(echo("broken", port, holder="run", **args))
    assert is_gone("broken")


@shared
def test_deploy_that_is_held_up_keeps_its_turn(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the deploy itself waits for, its turn does not run out; a removal ends it."""
    monkeypatch.setattr(ledger, "HEARTBEAT_S", 0.2)
    handle = keeper.open_keeper("held-up")
    assert ray.get(handle.begin.remote("version", "me", "run", 600.0, ())) == "deploy"
    begun = ray.get(handle.view.remote())["deployer_until_s"]
    turn = deploy._Turn("held-up", "me", "run")
    try:
        eventually(lambda: ray.get(handle.view.remote())["deployer_until_s"] > begun)
        turn.check()
        ray.get(handle.release.remote(None))
        eventually(lambda: turn._lost)
        with pytest.raises(ServeError, match="'held-up' was removed while it was being deployed"):
            turn.check()
    finally:
        turn.end()
        teardown.main(TeardownSpec(app_name="held-up"))


REMOVED = "was removed while it was being deployed"


@shared
def test_teardown_during_an_update_removes_both_versions(
    cluster: Cluster, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the update waits for its first answer, or hands its version over only after the removal."""
    monkeypatch.setattr(ledger, "HEARTBEAT_S", 0.2)
    deploy.main(echo("raced", port))
    with ThreadPoolExecutor() as pool:
        update = pool.submit(deploy.main, echo("raced", port, reply="two", delay_s=600.0))
        eventually(lambda: len(footprint.footprint("raced").replicas) == 2)
        assert teardown.main(TeardownSpec(app_name="raced")).state == "removed"
        with pytest.raises(ServeError, match=REMOVED):
            update.result()
    assert is_gone("raced")

    deploy.main(echo("raced", port))
    before_hand_over = diagnosis.replica_ids

    def overtaken(app_name: str) -> frozenset[str]:
        monkeypatch.setattr(diagnosis, "replica_ids", before_hand_over)
        teardown.main(TeardownSpec(app_name="raced"))
        assert is_gone("raced")
        return before_hand_over(app_name)

    monkeypatch.setattr(diagnosis, "replica_ids", overtaken)
    with pytest.raises(ServeError, match=REMOVED):
        deploy.main(echo("raced", port, reply="two"))
    assert is_gone("raced")


@shared
def test_deploy_that_comes_during_a_removal_starts_anew_and_is_left_alone(
    cluster: Cluster, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the removal. What is late after that, a second removal or an overtaken deploy, does not touch it."""
    deploy.main(echo("again", port, holder="monday"))
    former = keeper.find_keeper("again")
    waiting, going_on = threading.Event(), threading.Event()
    monkeypatch.setattr(deploy, "say", lambda words: waiting.set() if "being removed" in words else None)
    remove = footprint.remove_app

    def slow(*args: Any, **kwargs: Any) -> bool:
        going_on.wait(60)
        return remove(*args, **kwargs)

    monkeypatch.setattr(footprint, "remove_app", slow)
    with ThreadPoolExecutor() as pool:
        removal = pool.submit(teardown.main, TeardownSpec(app_name="again", holder="monday"))
        eventually(lambda: ray.get(former.view.remote())["closing_s"] is not None)
        deployed = pool.submit(deploy.main, echo("again", port, reply="two", holder="tuesday"))
        assert waiting.wait(60)
        going_on.set()
        assert removal.result().state == "removed"
        base_url = deployed.result().base_url
    assert ask(base_url) == "two"

    late = deploy._Deploy(echo("again", port, holder="tuesday"), time.monotonic())
    late._handed_over = True
    handle = keeper.find_keeper("again")
    assert ray.get(handle.begin.remote("version", "newcomer", "wednesday", 600.0, ())) == "deploy"
    late._undo()
    remove("again", timeout_s=10, say=print, is_ours=lambda: keeper.is_keeper("again", former))
    view = ray.get(handle.view.remote())
    assert (view["deployer"], view["holders"], view["closing_s"]) == ("newcomer", ("tuesday", "wednesday"), None)
    assert ask(base_url) == "two"
    assert teardown.main(TeardownSpec(app_name="again")).state == "removed"
    assert is_gone("again")


@shared
def test_stopped_deploy_leaves_nothing(cluster: Cluster, port: int) -> None:
    """A deploy job that is cancelled half-way is cleaned up after, though it has no time for it itself."""
    job, _ = cluster.start("deploy", echo("stopped", port, delay_s=600.0), working_dir=ECHO_DIR)
    eventually(lambda: bool(footprint.footprint("stopped")))
    cluster.jobs.stop_job(job)
    eventually(lambda: is_gone("stopped"), timeout_s=120)


@shared
def test_foreign_applications_are_neither_taken_over_nor_shadowed(cluster: Cluster, port: int) -> None:
    """The name and the route of somebody else's application are refused before anything is started."""
    with pytest.raises(ServeError, match="was not deployed by this provider"):
        deploy.main(echo(BYSTANDER, port))
    assert teardown.main(TeardownSpec(app_name=BYSTANDER, holder="whose deploy was refused")).state == "absent"
    assert BYSTANDER in serve_state.details(serve_state.client())["applications"]


@shared
def test_lost_node_is_made_up_for(cluster: Cluster, port: int) -> None:
    """The only node with room for the replica dies with it; on the next node that joins, the endpoint answers again."""
    first = start_worker(cluster.node, num_cpus=8)
    try:
        eventually(lambda: len([n for n in ray.nodes() if n["Alive"]]) == 2)
        deployed = deploy.main(echo("nomad", port, options={"ray_actor_options": {"num_cpus": 8}}))
    finally:
        first.stop()
    second = start_worker(cluster.node, num_cpus=8)
    try:
        eventually(lambda: answers(deployed.base_url, "one"), timeout_s=120)
        assert teardown.main(TeardownSpec(app_name="nomad")).state == "removed"
    finally:
        second.stop()


def test_teardown_works_without_serve_and_for_serve_run(cluster: Cluster, port: int, bystander: str) -> None:
    """Serve is killed for good: its orphaned replicas are found and removed all the same.

    One of them is the bystander: its `serve run` job was stopped long ago, and it still answers.
    """
    deploy.main(echo("orphan", port))
    assert ask(bystander) == "here"
    ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"))
    for app_name in ("orphan", BYSTANDER):
        assert footprint.footprint(app_name)
        assert teardown.main(TeardownSpec(app_name=app_name)).state == "removed"
        assert not footprint.footprint(app_name)
    eventually(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
