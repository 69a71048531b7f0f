"""The rows of benchmark 2 through `bespokelabs-curator`: `python peers_curator.py BASE_URL ROWS CONCURRENCY`.

Runs where curator is installed and knows nothing of this project. `CONCURRENCY` 0 leaves curator's defaults, which are
rates a minute; another number is `max_concurrent_requests` with the rates out of the way. Prints how many rows were
answered.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

# litellm brings the tokenizer file that curator would download
TOKENIZERS = Path(importlib.util.find_spec("litellm").origin).parent / "litellm_core_utils" / "tokenizers"
os.environ.update(TIKTOKEN_CACHE_DIR=str(TOKENIZERS), TELEMETRY_ENABLED="0", OPENAI_API_KEY="EMPTY")
os.environ.update(CURATOR_DISABLE_CACHE="1", CURATOR_DISABLE_RICH_DISPLAY="1")

from bespokelabs import curator  # noqa: E402


def main(base_url: str, path: str, concurrency: int) -> None:
    with open(path) as lines:
        texts = [json.loads(line)["text"] for line in lines]
    params = {"base_url": base_url, "require_all_responses": False}
    if concurrency:
        params.update(max_concurrent_requests=concurrency, max_requests_per_minute=10**6, max_tokens_per_minute=10**10)
    llm = curator.LLM(model_name="sim", backend="openai", backend_params=params, generation_params={"temperature": 0})
    with tempfile.TemporaryDirectory() as folder:
        answers = llm(texts, working_dir=folder).dataset
        print(json.dumps({"answered": sum(bool(a) for a in answers["response"])}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
