"""Rows to ask for: how long their prompts are and how long their answers will be."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.engine import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A mix of lengths: log-normal, `spread` is the standard deviation of the logarithm."""

    name: str
    prompt_tokens: float
    completion_tokens: float
    spread: float
    most: int = 4000

    def rows(self, seed: int) -> Iterator[tuple[int, int]]:
        """Endless `(prompt tokens, completion tokens)`, the same for the same seed."""
        rng = random.Random(seed)
        while True:
            prompt = self.prompt_tokens * math.exp(rng.gauss(0, 0.3))
            answer = self.completion_tokens * math.exp(rng.gauss(0, self.spread))
            yield max(1, round(prompt)), min(self.most, max(1, round(answer)))


MIXES = (
    Mix(name="labels", prompt_tokens=200, completion_tokens=8, spread=0.5),
    Mix(name="answers", prompt_tokens=128, completion_tokens=170, spread=0.5),
    Mix(name="heavy tail", prompt_tokens=400, completion_tokens=200, spread=1.3),
)

SHAPES = (
    Shape(name="256 sequences"),
    Shape(name="KV-bound", kv_tokens=60_000),
    Shape(name="1024 sequences", max_num_seqs=1024),
    Shape(name="16 sequences", max_num_seqs=16),
    Shape(name="3 replicas", replicas=3),
    Shape(name="capacity halved", replicas=2, changes=((60.0, 1),)),
    Shape(name="capacity doubled", replicas=1, changes=((60.0, 2),)),
    Shape(name="rejects above 32", reject_above=32, retry_after_s=1.0),
    Shape(name="slow network", network_s=0.2),
    Shape(name="hangs up", hangup=0.02),
)
