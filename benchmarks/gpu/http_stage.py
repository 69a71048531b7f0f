"""Ray's own HTTP stage (`ray.data.llm`, `HttpRequestProcessorConfig`) on the same rows. Prints one JSON line.

Runs on the cluster that `RAY_ADDRESS` names. `--actors 1` is the stage as it comes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from benchmarks.gpu.rows import Row, chat_body, make_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    import ray
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    ray.init(logging_level="warning")
    rows = make_rows(args.rows, args.seed)
    model = args.model

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        return {"payload": chat_body(Row(row["prompt"], int(row["max_tokens"])), model)}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": (row["http_response"].get("usage") or {}).get("completion_tokens", 0)}

    # the default batch of 64 rows would leave actors idle where there are fewer rows than actors x 64
    batch = max(1, min(64, args.rows // args.actors))
    config = HttpRequestProcessorConfig(
        url=f"{args.base_url}/chat/completions",
        headers={"Authorization": "Bearer EMPTY"},
        qps=None,
        concurrency=args.actors,
        batch_size=batch,
        http_request_stage={"num_cpus": 0.1} if args.actors > 1 else True,  # else the CPUs bound the actors
    )
    processor = build_processor(config, preprocess=ask, postprocess=answer)
    dataset = ray.data.from_items([row._asdict() for row in rows], override_num_blocks=max(8, args.actors))
    begun = time.monotonic()
    tokens = sum(row["tokens"] for row in processor(dataset).iter_rows())
    seconds = time.monotonic() - begun
    figures = {
        "actors": args.actors,
        "batch_size": batch,
        "rows": args.rows,
        "seed": args.seed,
        "seconds": round(seconds, 2),
        "rows_per_s": round(args.rows / seconds, 2),
        "tokens_per_s": round(tokens / seconds),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
