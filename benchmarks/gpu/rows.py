"""The one workload of every measurement: chat prompts of about 128 tokens, answers of log-normal length.

Answer lengths are set per row (`max_tokens`, `ignore_eos`), so that every client makes the server do the same work.
Each prompt starts with a random word, which keeps prompts out of each other's prefix cache; a server that has seen a
seed must be measured with another.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were her all she there would their we him been has when who will more no if out so said what up its about
into than them can only other new some could time these two may then do first any my now such like our over man
me even most made after also did many before must through back years where much your way well down should because
each just those people how too little state good very make world still own see men work long get here between
both life being under never day same another know while last might us great old year off come since against go
came right used take three states himself few house use during without again place around however home small
found thought went say part once general high upon school every system data model number group water order point
table value level case side idea field rate power market process region
"""
_WORDS = _TEXT.split()
_TEMPLATE_TOKENS = 19  # what the chat template and the random word add to the words


class Row(NamedTuple):
    """One request.

    Attributes:
        prompt: User message.
        max_tokens: Tokens that will be generated.
    """

    prompt: str
    max_tokens: int


def make_rows(count: int, seed: int, *, prompt_tokens: int = 128, median: int = 128, cap: int = 1024) -> list[Row]:
    """Rows with log-normal answer lengths (sigma 0.9): with the defaults 187 tokens in the mean, 1,024 at most."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        head = f"{rng.getrandbits(32):08x}"
        words = max(8, prompt_tokens - _TEMPLATE_TOKENS + rng.randint(-16, 16))
        body = " ".join(rng.choice(_WORDS) for _ in range(words))
        tokens = round(median * math.exp(rng.gauss(0.0, 0.9)))
        rows.append(Row(f"{head} {body}", min(cap, max(4, tokens))))
    return rows


def chat_body(row: Row, model: str) -> dict[str, Any]:
    """Body of the chat completion request for one row: greedy, exactly `max_tokens` long."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": row.prompt}],
        "max_tokens": row.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def write_batch_files(folder: Path, rows: Sequence[Row], model: str, *, files: int = 1) -> Path:
    """Write rows as OpenAI batch files (`custom_id` is the row number), and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(files):
        with (folder / f"part-{part:03d}.jsonl").open("w", encoding="utf-8") as out:
            for number in range(part, len(rows), files):
                line = {
                    "custom_id": f"row-{number:06d}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": chat_body(rows[number], model),
                }
                out.write(json.dumps(line) + "\n")
    return folder
