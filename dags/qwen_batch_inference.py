"""Label a day's reviews with a Qwen model: bring an endpoint up, ask it every review, store Parquet, take it down.

The defaults of `params` are the production values; another model, another bucket or other hardware is another set of
params, not another DAG.
"""

from __future__ import annotations

import pendulum
from airflow.sdk import DAG

from airflow_provider_raylm.operators.ai_query import AiQueryBatchOperator
from airflow_provider_raylm.operators.deploy import DeployQwenServeOperator
from airflow_provider_raylm.operators.teardown import TeardownServeOperator

PROMPT = """\
Classify the sentiment of the review as negative or positive. Answer with one word.

Examples:
"I love it, great quality." -> Positive
"Rude staff, terrible room." -> Negative
"味道很好，非常满意。" -> Positive
"质量太差了，非常失望。" -> Negative

Review: {text}
Sentiment:"""

with DAG(
    "qwen_batch_inference",
    schedule="@daily",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    default_args={"retries": 2, "retry_delay": pendulum.duration(minutes=1)},
    render_template_as_native_obj=True,  # templates below give dicts, not their text
    tags=["raylm", "qwen"],
    doc_md=__doc__,
    params={
        "lake": "oss://lake",
        "model_id": "Qwen3.5-4B",
        "model_source": "/mnt/Qwen3.5-4B",
        "llm_config": {"engine_kwargs": {"max_model_len": 4096, "gpu_memory_utilization": 0.9}},
        "http_options": {"host": "0.0.0.0", "port": 8000},
    },
):
    deploy = DeployQwenServeOperator(
        task_id="deploy",
        app_name="qwen",
        model_id="{{ params.model_id }}",
        model_source="{{ params.model_source }}",
        llm_config="{{ params.llm_config }}",
        http_options="{{ params.http_options }}",
        lease=True,
        start_timeout=1800,
    )
    label = AiQueryBatchOperator(
        task_id="label",
        deploy=deploy.output,
        storage_conn_id="aliyun_oss",
        input_path="{{ params.lake }}/reviews/dt={{ ds }}/",
        output_path="{{ params.lake }}/labels/dt={{ ds }}/",
        prompt_template=PROMPT,
        output_col="generated_text",
        options={
            "temperature": 0,
            "max_tokens": 4,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        },
        max_error_rate=0.01,
    )
    teardown = TeardownServeOperator(task_id="teardown", app_name="qwen", lease=True)
    deploy >> label >> teardown.as_teardown(setups=deploy)
