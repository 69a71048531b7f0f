"""Deploy, share, update, lose, recover and remove applications on a real cluster of two nodes, without a model.

The application answers the OpenAI protocol in milliseconds, so that what is tested is everything around a model.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.experimental import internal_kv

from airflow_provider_raylm.exceptions import ServeError
from airflow_provider_raylm.ray_serve import deploy, footprint, keeper, leases, ledger, serve_state
from airflow_provider_raylm.spec import DeploySpec, LeaseSpec, TeardownSpec
from demo.ray_head import free_ports, ray_head, start_worker
from tests.integration.serve_jobs import ECHO_DIR, Cluster

pytestmark = pytest.mark.integration

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
    """A replica killed after the deploy job and its uploaded package are gone comes back from the user's package."""
    deployed = cluster.run("deploy", echo("survivor", port), working_dir=ECHO_DIR)
    assert deployed.result is not None
    assert deployed.result["models"] == ["survivor"]
    base_url = deployed.result["base_url"]
    assert base_url == f"http://127.0.0.1:{port}/survivor/v1"

    eventually(lambda: not internal_kv._internal_kv_exists(deployed.package_uri), timeout_s=90)
    (replica,) = footprint.footprint("survivor").replicas
    ray.kill(ray.get_actor(replica, namespace="serve"))
    eventually(lambda: footprint.footprint("survivor").replicas not in ((), (replica,)))
    eventually(lambda: answers(base_url, "one"))

    (removed,) = [cluster.run("teardown", TeardownSpec(app_name="survivor")).result]
    assert removed is not None
    assert removed["state"] == "removed"
    assert removed["lived_s"] > 0
    assert removed["gpu_seconds"] == 0
    assert not footprint.footprint("survivor")
    assert "survivor" not in keeper.kept_apps()


@shared
def test_same_configuration_is_a_no_op_and_leases_are_shared(cluster: Cluster, port: int) -> None:
    """Two runs share an endpoint: the second deploy changes nothing, the first teardown removes nothing."""
    first = cluster.run("deploy", echo("shared", port, holder="monday"), working_dir=ECHO_DIR).result
    before = footprint.footprint("shared").replicas
    second = cluster.run("deploy", echo("shared", port, holder="tuesday"), working_dir=ECHO_DIR).result
    assert first is not None
    assert second is not None
    assert (first["changed"], second["changed"]) == (True, False)
    assert sorted(second["leases"]) == ["monday", "tuesday"]
    assert footprint.footprint("shared").replicas == before
    assert leases.renew("shared", "monday", 600)

    kept = cluster.run("teardown", TeardownSpec(app_name="shared", holder="monday")).result
    assert kept is not None
    assert (kept["state"], kept["leases"]) == ("leased", ["tuesday"])
    assert ask(second["base_url"]) == "one"

    status = cluster.run("status", TeardownSpec(app_name="shared"))
    assert "tuesday" in status.log

    gone = cluster.run("teardown", TeardownSpec(app_name="shared", holder="tuesday")).result
    assert gone is not None
    assert gone["state"] == "removed"
    assert not leases.renew("shared", "tuesday", 600)
    again = cluster.run("teardown", TeardownSpec(app_name="shared", holder="tuesday")).result
    assert again is not None
    assert again["state"] == "absent"


@shared
def test_expired_lease_removes_the_endpoint_without_airflow(cluster: Cluster, port: int) -> None:
    """Nobody renews and nobody tears down: the endpoint removes itself, and the keeper with it."""
    spec = echo("forgotten", port, holder="crashed", ttl_s=1.0)
    deployed = cluster.run("deploy", spec, working_dir=ECHO_DIR).result
    assert deployed is not None
    eventually(lambda: not footprint.footprint("forgotten"))
    eventually(lambda: "forgotten" not in keeper.kept_apps())


@shared
def test_update_loses_no_request_and_a_failed_one_goes_back(cluster: Cluster, port: int) -> None:
    """A client that keeps sending sees old or new replies, never an error; a broken update leaves the old version."""
    deployed = cluster.run("deploy", echo("rolling", port, reply="old"), working_dir=ECHO_DIR).result
    assert deployed is not None
    base_url = deployed["base_url"]
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
        updated = cluster.run("deploy", echo("rolling", port, reply="new"), working_dir=ECHO_DIR).result
        assert updated is not None
        assert updated["changed"]
        assert ask(base_url) == "new"
        broken = cluster.run("deploy", echo("rolling", port, fails="weights are corrupt"), working_dir=ECHO_DIR)
    finally:
        stop.set()
        for sender in senders:
            sender.join()
    assert broken.error is not None
    assert "weights are corrupt" in broken.error["message"]
    eventually(lambda: answers(base_url, "new"))
    assert set(replies) == {"old", "new"}
    cluster.run("teardown", TeardownSpec(app_name="rolling"))


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
    "never answers": ({"delay_s": 600.0, "start_timeout_s": 8.0}, "not ready after 8 s"),
    "never lists its models": ({"list_delay_s": 600.0, "start_timeout_s": 8.0}, "not ready after 8 s"),
}


@shared
@pytest.mark.parametrize("case", FAILURES)
def test_failed_start_says_why_and_leaves_nothing(cluster: Cluster, port: int, case: str) -> None:
    """Each way not to start ends in one sentence with the reason, and nothing of it is left on the cluster."""
    args, reason = FAILURES[case]
    failed = cluster.run("deploy", echo("broken", port, holder="run", **args), working_dir=ECHO_DIR)
    assert failed.error is not None
    assert failed.error["type"] == "ServeError"
    assert reason in failed.error["message"]
    assert not footprint.footprint("broken")
    assert "broken" not in keeper.kept_apps()


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
        cluster.run("teardown", TeardownSpec(app_name="held-up"))


@shared
def test_stopped_deploy_leaves_nothing(cluster: Cluster, port: int) -> None:
    """A deploy job that is cancelled half-way is cleaned up after, though it has no time for it itself."""
    job, _ = cluster.start("deploy", echo("stopped", port, delay_s=600.0), working_dir=ECHO_DIR)
    eventually(lambda: bool(footprint.footprint("stopped")))
    cluster.jobs.stop_job(job)
    eventually(lambda: not footprint.footprint("stopped"), timeout_s=120)
    eventually(lambda: "stopped" not in keeper.kept_apps())


@shared
def test_foreign_applications_are_neither_taken_over_nor_shadowed(cluster: Cluster, port: int) -> None:
    """The name and the route of somebody else's application are refused before anything is started."""
    name = cluster.run("deploy", echo(BYSTANDER, port), working_dir=ECHO_DIR)
    assert name.error is not None
    assert "was not deployed by this provider" in name.error["message"]
    left = cluster.run("teardown", TeardownSpec(app_name=BYSTANDER, holder="whose deploy was refused")).result
    assert left is not None
    assert left["state"] == "absent"
    assert BYSTANDER in serve_state.details(serve_state.client())["applications"]


@shared
def test_scaled_to_zero_endpoint_wakes_up(cluster: Cluster, port: int) -> None:
    """With no replica left, the user's uploaded package outlives its grace, and the next request is answered."""
    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 1, "downscale_to_zero_delay_s": 1}
    spec = echo("sleepy", port, options={"autoscaling_config": scaling})
    deployed = cluster.run("deploy", spec, working_dir=ECHO_DIR)
    assert deployed.result is not None
    eventually(lambda: not footprint.footprint("sleepy"))
    # our package is deleted after the same grace as the user's would be
    eventually(lambda: not internal_kv._internal_kv_exists(deployed.package_uri), timeout_s=90)
    eventually(lambda: answers(deployed.result["base_url"], "one"))
    cluster.run("teardown", TeardownSpec(app_name="sleepy"))


@shared
def test_lost_node_is_made_up_for(cluster: Cluster, port: int) -> None:
    """The only node with room for the replica dies with it; on the next node that joins, the endpoint answers again."""
    first = start_worker(cluster.node, num_cpus=8)
    try:
        eventually(lambda: len([n for n in ray.nodes() if n["Alive"]]) == 2)
        spec = echo("nomad", port, options={"ray_actor_options": {"num_cpus": 8}})
        deployed = cluster.run("deploy", spec, working_dir=ECHO_DIR).result
        assert deployed is not None
    finally:
        first.stop()
    second = start_worker(cluster.node, num_cpus=8)
    try:
        eventually(lambda: answers(deployed["base_url"], "one"), timeout_s=120)
        removed = cluster.run("teardown", TeardownSpec(app_name="nomad")).result
        assert removed is not None
        assert removed["state"] == "removed"
    finally:
        second.stop()


def test_teardown_works_without_serve_and_for_serve_run(cluster: Cluster, port: int, bystander: str) -> None:
    """Serve is killed for good: its orphaned replicas are found and removed all the same.

    One of them is the bystander: its `serve run` job was stopped long ago, and it still answers.
    """
    assert cluster.run("deploy", echo("orphan", port), working_dir=ECHO_DIR).result is not None
    assert ask(bystander) == "here"
    ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"))
    for app_name in ("orphan", BYSTANDER):
        assert footprint.footprint(app_name)
        removed = cluster.run("teardown", TeardownSpec(app_name=app_name)).result
        assert removed is not None
        assert removed["state"] == "removed"
        assert not footprint.footprint(app_name)
    eventually(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
