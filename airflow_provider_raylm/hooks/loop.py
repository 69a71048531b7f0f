"""Run a coroutine to its end from synchronous code, whatever runs around it.

The coroutine gets an event loop in a thread of its own. So it works where this thread already runs a loop, and in a
signal handler; and what interrupts the waiting thread (a signal, Airflow's execution timeout) is raised there and at
once, instead of inside some callback of a loop that would swallow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(function: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Call `function`, await what it returns, and return the result.

    If the waiting is interrupted, the coroutine is cancelled and given a second to clean up.
    """
    done: Future[Result] = Future()
    stop: list[Callable[[], object]] = []

    async def supervised() -> None:
        task = asyncio.ensure_future(function())
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            done.set_result(await task)
        except BaseException as exc:
            done.set_exception(exc)

    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(asyncio.run, supervised()), name="raylm-loop", daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        if not done.done() and stop:
            with contextlib.suppress(RuntimeError):  # the loop ended by itself just now
                stop[0]()
        thread.join(1.0)
