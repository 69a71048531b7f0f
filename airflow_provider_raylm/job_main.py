"""What every job on the cluster does around its work: read the spec, run, and answer with one line.

Standard library only. The answer starts on a line of its own, whatever a progress bar left on the line before.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from airflow_provider_raylm.exceptions import RaylmError
from airflow_provider_raylm.spec import ERROR_PREFIX, RESULT_PREFIX, Spec, read_job_spec, to_json


def run_job(spec_class: type[Spec], main: Callable[[Spec], Any]) -> None:
    """Run one job: `main` gets the uploaded spec, and what it returns becomes the job's result line.

    Args:
        spec_class: Class of the spec that was uploaded with the job.
        main: The work. Returns a result dataclass of `spec.py`.

    Raises:
        SystemExit: With code 1 after the error line, when `main` or reading the spec raised.
    """
    try:
        line = RESULT_PREFIX + to_json(main(read_job_spec(spec_class)))
    except Exception as exc:
        if not isinstance(exc, RaylmError):  # ours say everything in one sentence; others need their origin
            traceback.print_exc()
        error = {"type": type(exc).__name__, "message": str(exc) or repr(exc)}
        _write(ERROR_PREFIX + json.dumps(error, ensure_ascii=False))
        sys.exit(1)
    _write(line)


def say(text: str) -> None:
    """Write one line of progress for people to the job's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _write(line: str) -> None:
    sys.stderr.flush()
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()
