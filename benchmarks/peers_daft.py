"""The rows of benchmark 2 through `daft`: `python peers_daft.py BASE_URL ROWS CONCURRENCY`.

Runs where daft is installed and knows nothing of this project. `CONCURRENCY` 0 leaves the defaults of `prompt`. Prints
how many rows were answered.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(DAFT_ANALYTICS_ENABLED="0", DO_NOT_TRACK="true")

import daft
from daft.ai.openai.provider import OpenAIProvider
from daft.functions import prompt


def main(base_url: str, path: str, concurrency: int) -> None:
    with open(path) as lines:
        texts = [json.loads(line)["text"] for line in lines]
    provider = OpenAIProvider(name="sim", base_url=base_url, api_key="EMPTY")
    options = {
        "use_chat_completions": True,
        "temperature": 0.0,
        **({"concurrency": concurrency} if concurrency else {}),
    }
    answers = daft.from_pydict({"text": texts}).with_column(
        "answer", prompt(daft.col("text"), provider=provider, model="sim", **options)
    )
    print(json.dumps({"answered": sum(bool(a) for a in answers.to_pydict()["answer"])}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
