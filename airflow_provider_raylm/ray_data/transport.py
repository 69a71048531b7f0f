"""The OpenAI SDK's requests over aiohttp, whichever version of the SDK and of httpx an image has.

The SDK's own aiohttp transport comes with an extra that images seldom have, and its default one searches all
connections at each request: at 512 in flight a request costs seven times as much, and the event loop stands still for
seconds. Ray's dashboard brings aiohttp to every cluster.
"""

from __future__ import annotations

import importlib
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import openai
from yarl import URL

# version 2 of the SDK speaks httpx, version 3 httpx2; both packages may be installed
httpx: Any = importlib.import_module("httpx2" if int(openai.__version__.split(".")[0]) >= 3 else "httpx")


class AiohttpTransport(httpx.AsyncBaseTransport):  # type: ignore[misc]
    """Transport of one event loop.

    Args:
        connections: Most connections at once.
        connect_s: Seconds in which one must be made.
        trusted: Certificate authorities.
        keepalive_s: Seconds for which an idle connection is kept.
    """

    def __init__(self, *, connections: int, connect_s: float, trusted: ssl.SSLContext, keepalive_s: float) -> None:
        connector = aiohttp.TCPConnector(limit=connections, ssl=trusted, keepalive_timeout=keepalive_s)
        # the row's deadline is its caller's
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def handle_async_request(self, request: Any) -> Any:
        """Send one request.

        Raises:
            httpx.NetworkError: There is no whole response; its cause says more.
        """
        content = await request.aread()
        with _as_httpx_error():
            response = await self._session.request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=request.headers.multi_items(),
                data=content or None,
                allow_redirects=False,
            )
        return httpx.Response(response.status, headers=response.raw_headers, stream=_Content(response), request=request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()


class _Content(httpx.AsyncByteStream):  # type: ignore[misc]
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx_error():
            async for chunk in self._response.content.iter_any():
                yield chunk

    async def aclose(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


@contextmanager
def _as_httpx_error() -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientError as exc:
        raise httpx.NetworkError(str(exc)) from exc
