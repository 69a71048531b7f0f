"""Which Ray job belongs to a task instance.

Ray never takes a submission id twice, not even after the job was stopped. So the id is made of what identifies the
task instance (deployment, dag, task, run, map index) plus a number that counts its jobs. A retry recomputes the same
ids, asks the cluster which of them exist, and decides here. That works with nothing recorded anywhere: a worker that
was killed right after the submission leaves exactly one job behind, and the retry finds it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from airflow_provider_raylm.polling import JobInfo

Reuse = Literal["unreported", "always", "never"]
"""When a job that already SUCCEEDED with the same input answers for this attempt too."""

FINGERPRINT_LABEL = "fingerprint"
TRY_LABEL = "try_number"


def id_stem(deployment: str, dag_id: str, task_id: str, run_id: str, map_index: int) -> str:
    """The part of a submission id that all attempts of one task instance share.

    Returns:
        At most 80 characters of `[A-Za-z0-9_.-]`: readable names, cut, and a hash of the exact ones.
    """
    exact = json.dumps([deployment, dag_id, task_id, run_id, map_index])
    digest = hashlib.sha256(exact.encode()).hexdigest()[:12]
    names = [dag_id[-24:], task_id[-24:], run_id[-24:], *([str(map_index)] if map_index >= 0 else [])]
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(names)).strip("._-")[:67]
    return f"{readable}-{digest}"


def attempt_id(stem: str, attempt: int) -> str:
    """The submission id of one attempt, counted from 1."""
    return f"{stem}-{attempt}"


@dataclass(frozen=True)
class Submit:
    """Submit a new job under `submission_id`."""

    submission_id: str


@dataclass(frozen=True)
class Attach:
    """Wait for the job that already runs."""

    submission_id: str


@dataclass(frozen=True)
class Adopt:
    """Take the answer of a job that succeeded."""

    submission_id: str


@dataclass(frozen=True)
class Supersede:
    """Cancel a job whose input is not ours any more, then submit a new one."""

    running_id: str
    submission_id: str


Choice = Submit | Attach | Adopt | Supersede


def choose(
    stem: str,
    earlier: Sequence[JobInfo | None],
    *,
    fingerprint: str,
    try_number: int,
    first_try: int,
    reuse: Reuse,
    replace_cleared: bool,
) -> Choice:
    """Decide what this attempt does about the jobs of the attempts before it.

    Args:
        stem: See `id_stem`.
        earlier: The jobs `stem`-1, `stem`-2, ...; `None` where the cluster knows none.
        fingerprint: Of what this attempt would submit.
        try_number: Of this attempt. A success counts only if an earlier try submitted it: a DAG run that was deleted
            and made anew has the same ids, but starts at try 1.
        first_try: The first try since the task was last cleared. What was submitted before belongs to a request that
            somebody took back; what succeeded since was never reported, or there would be no further try.
        reuse: What the user wants of earlier successes.
        replace_cleared: Whether a job that still runs from before the clearing is replaced, or waited for.
    """
    new_id = attempt_id(stem, len(earlier) + 1)
    last = next((job for job in reversed(earlier) if job is not None), None)
    if last is None:
        return Submit(new_id)
    same = last.metadata.get(FINGERPRINT_LABEL) == fingerprint
    its_try = _int(last.metadata.get(TRY_LABEL))
    cleared = its_try < first_try
    if not last.ended:
        if same and not (cleared and replace_cleared):
            return Attach(last.submission_id)
        return Supersede(last.submission_id, new_id)
    if last.status == "SUCCEEDED" and same:
        unreported = not cleared and its_try < try_number
        if reuse == "always" or (reuse == "unreported" and unreported):
            return Adopt(last.submission_id)
    return Submit(new_id)


def _int(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        return 0
