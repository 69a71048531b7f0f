"""The ceiling: vLLM without HTTP on the same rows. Prints one JSON line per repetition.

python -m benchmarks.gpu.offline --model DIR --engine '{"max_model_len": 4096}' --rows 4000 --seeds 100,101
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from benchmarks.gpu.rows import make_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--engine", default="{}", help="JSON: arguments of vllm.LLM")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seeds", default="100,101", help="one repetition each")
    args = parser.parse_args()
    started = time.monotonic()
    from vllm import LLM, SamplingParams

    engine: dict[str, Any] = json.loads(args.engine)
    llm = LLM(args.model, **engine)
    _print(event="ready", ready_s=round(time.monotonic() - started, 1))
    for label, count, seed in [
        ("warm", min(64, args.rows), 1),
        *((s, args.rows, int(s)) for s in args.seeds.split(",")),
    ]:
        rows = make_rows(count, seed)
        params = [SamplingParams(max_tokens=row.max_tokens, ignore_eos=True, temperature=0.0) for row in rows]
        chats = [[{"role": "user", "content": row.prompt}] for row in rows]
        begun = time.monotonic()
        replies = llm.chat(chats, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
        seconds = time.monotonic() - begun
        tokens = sum(len(reply.outputs[0].token_ids) for reply in replies)
        prompt_tokens = sum(len(reply.prompt_token_ids) for reply in replies)
        if label != "warm":
            _print(
                event="rep",
                seed=seed,
                rows=count,
                seconds=round(seconds, 2),
                rows_per_s=round(count / seconds, 1),
                tokens_per_s=round(tokens / seconds),
                completion_tokens=tokens,
                prompt_tokens=prompt_tokens,
            )


def _print(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
