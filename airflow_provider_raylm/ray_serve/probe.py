"""Readiness: one real request to each model, through the URL that is handed on. Standard library only.

`/v1/models` answers minutes before the first completion does, and Serve reports health with no replica at all, so
neither is asked. A model without a chat template or without generation is asked what it can do instead.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from airflow_provider_raylm.exceptions import EndpointError, TerminalEndpointError, TransientEndpointError

PROMPT = "Say yes."
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}),
    ("completions", {"prompt": PROMPT, "max_tokens": 1}),
    ("embeddings", {"input": PROMPT}),
)
# 404 comes from a proxy that does not know the route yet, and from an engine that lacks the method
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
REFUSED = frozenset({400, 404, 405, 422, 501})


def ask(base_url: str, model: str, *, timeout_s: float) -> str:
    """Ask a model for one token.

    Returns:
        The path that answered: `chat/completions`, or for other kinds of models `completions` or `embeddings`.

    Raises:
        TransientEndpointError: No answer yet: not there, overloaded, or no reply within `timeout_s`.
        TerminalEndpointError: It refuses all three kinds of requests; the message has its words about the first.
    """
    first: EndpointError | None = None
    for path, body in REQUESTS:
        try:
            reply = _post(f"{base_url}/{path}", {"model": model, **body}, timeout_s)
        except TerminalEndpointError as exc:
            first = first or exc
            continue
        if reply.get("choices") or reply.get("data"):
            return path
        raise TransientEndpointError(f"{model!r} at {base_url}/{path} answered without a completion")
    raise first or TerminalEndpointError(f"{model!r} answers none of {[path for path, _ in REQUESTS]}")


def list_models(base_url: str, *, timeout_s: float) -> tuple[str, ...]:
    """Model ids the endpoint lists.

    Raises:
        EndpointError: See `ask`.
    """
    reply = _exchange(urllib.request.Request(f"{base_url}/models"), timeout_s)  # noqa: S310 # http by construction
    return tuple(card["id"] for card in reply.get("data", ()))


def mounted_at(origin: str, root_path: str, *, timeout_s: float) -> str:
    """Path under which a proxy of the cluster takes requests: `root_path`, or nothing.

    Older Serve versions answer under their `root_path`; later ones expect that a gateway has taken it off.
    """
    root_path = root_path.rstrip("/")
    if not root_path:
        return ""
    try:
        with _opener().open(f"{origin}{root_path}/-/healthz", timeout=timeout_s):
            return root_path
    except OSError:
        return ""


def _post(url: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310 # http by construction
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return _exchange(request, timeout_s)


def _exchange(request: urllib.request.Request, timeout_s: float) -> dict[str, Any]:
    try:
        with _opener().open(request, timeout=timeout_s) as response:
            reply: dict[str, Any] = json.loads(response.read())
            return reply
    except urllib.error.HTTPError as exc:
        words = error_words(exc.read())
        kind = TerminalEndpointError if exc.code in REFUSED else TransientEndpointError
        raise kind(f"{request.full_url} answered {exc.code}: {words}", http_status=exc.code) from exc
    except (OSError, ValueError, http.client.HTTPException) as exc:  # refused, reset, cut off, or not JSON
        if isinstance(refused := getattr(exc, "reason", exc), ssl.SSLCertVerificationError):
            raise TerminalEndpointError(f"{request.full_url}: {untrusted(refused)}") from exc
        raise TransientEndpointError(f"{request.full_url} did not answer: {exc}") from exc


def check_trust(origin: str, *, timeout_s: float) -> None:
    """See that the certificate of an `https://host:port` is one that this process trusts. Other problems may pass.

    Raises:
        TerminalEndpointError: It is not; the message says why.
    """
    parts = urllib.parse.urlsplit(origin)
    if parts.scheme != "https" or parts.hostname is None:
        return
    try:
        with (
            socket.create_connection((parts.hostname, parts.port or 443), timeout_s) as plain,
            ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname),
        ):
            return
    except ssl.SSLCertVerificationError as exc:
        raise TerminalEndpointError(f"{origin}: {untrusted(exc)}") from exc
    except OSError:
        return


def untrusted(exc: ssl.SSLCertVerificationError) -> str:
    """What to do about a certificate that is not trusted."""
    return (
        f"its certificate is not trusted here ({exc.verify_message.rstrip('.')}). It must name the host of this URL, "
        "and its authority must be known: for a private one, set SSL_CERT_FILE to its file on the cluster, as a "
        "variable of the cluster's image or of the task's runtime_env"
    )


def _opener() -> urllib.request.OpenerDirector:
    # a proxy of the environment is for the internet, not for the cluster's own nodes
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl.create_default_context())
    )


def error_words(body: bytes) -> str:
    """The message in an OpenAI error reply, else the start of the body."""
    text = body.decode(errors="replace").strip()
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        words = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        words = text
    return " ".join(COLOUR.sub("", str(words)).split())[:300]
