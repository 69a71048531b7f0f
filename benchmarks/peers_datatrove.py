"""The rows of benchmark 2 through `datatrove`: `python peers_datatrove.py BASE_URL ROWS CONCURRENCY`.

Runs where datatrove is installed and knows nothing of this project. `CONCURRENCY` 0 leaves the default of the inference
runner, 500 generations. Prints how many documents were answered.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger


async def ask(document: Document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}], "temperature": 0.0})


def main(base_url: str, path: str, concurrency: int) -> None:
    logger.remove()
    with open(path) as lines:
        documents = [Document(text=json.loads(line)["text"], id=str(n)) for n, line in enumerate(lines)]
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="sim",
        endpoint_url=base_url.removesuffix("/v1"),
        **({"max_concurrent_generations": concurrency} if concurrency else {}),
    )
    with tempfile.TemporaryDirectory() as folder:
        InferenceRunner(ask, config, JsonlWriter(folder, compression=None)).run(iter(documents))
        answered = sum(len(file.read_text().splitlines()) for file in Path(folder).glob("*.jsonl"))
    print(json.dumps({"answered": answered}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
