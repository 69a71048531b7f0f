"""Run one DAG with `dag.test()` in a process that has the demo's Airflow environment. Writes what came of it as JSON.

python -m demo.run_dag DAG_ID --logical-date 2026-12-01 --conf '{...}' --report report.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pendulum


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("dag_id")
    parser.add_argument("--logical-date", required=True)
    parser.add_argument("--conf", default="{}")
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()

    from airflow.dag_processing.dagbag import DagBag
    from airflow.sdk import conf

    bag = DagBag(conf.get("core", "dags_folder"))
    dag = bag.get_dag(args.dag_id)
    if dag is None:
        raise SystemExit(f"no DAG {args.dag_id!r}; import errors: {bag.import_errors}")
    run = dag.test(logical_date=pendulum.parse(args.logical_date), run_conf=json.loads(args.conf))
    tasks = {
        ti.task_id: {"state": str(ti.state), "xcom": ti.xcom_pull(task_ids=ti.task_id)}
        for ti in run.get_task_instances()
    }
    args.report.write_text(json.dumps({"state": str(run.state), "tasks": tasks}, ensure_ascii=False, default=str))
    return 0 if run.state == "success" else 1


if __name__ == "__main__":
    raise SystemExit(main())
