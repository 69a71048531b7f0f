"""A Serve application that speaks enough of the OpenAI protocol to be deployed, in milliseconds and without a model."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

api = FastAPI()


# shut down as soon as no request is left: Serve's defaults look every two seconds, and wait twenty
@serve.deployment(graceful_shutdown_wait_loop_s=0.1, graceful_shutdown_timeout_s=1.0)
@serve.ingress(api)
class Echo:
    def __init__(
        self, model: str, reply: str, fails: str = "", delay_s: float = 0.0, list_delay_s: float = 0.0
    ) -> None:
        if fails:
            raise ValueError(fails)
        self._model, self._reply, self._delay_s, self._list_delay_s = model, reply, delay_s, list_delay_s

    @api.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        await asyncio.sleep(self._list_delay_s)
        return {"data": [{"id": self._model}]}

    @api.post("/v1/chat/completions")
    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self._delay_s)
        content = f"{self._reply} {os.environ.get('ECHO_WORD', '')}".strip()
        return {"model": body["model"], "choices": [{"message": {"role": "assistant", "content": content}}]}


def build(args: dict[str, Any]) -> Application:
    """`args`: constructor arguments of `Echo`, and `options` of its deployment."""
    options = args.pop("options", {})
    return Echo.options(**options).bind(**args)
