"""What every job on the cluster does around its work: read the spec, run, and answer with one line.

Standard library only. The answer starts on a line of its own, whatever a progress bar left on the line before.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from airflow_provider_raylm.exceptions import RaylmError
from airflow_provider_raylm.spec import ERROR_PREFIX, RESULT_PREFIX, Spec, read_job_spec, to_json

LINGER_S = 60.0


def run_job(spec_class: type[Spec], main: Callable[[Spec], Any]) -> None:
    """Run one job: `main` gets the uploaded spec, and what it returns becomes the job's result line.

    The job is over with that line: see `end_within`.

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
        end_within(LINGER_S, 1)
        sys.exit(1)
    _write(line)
    end_within(LINGER_S, 0)


def end_within(seconds: float, code: int) -> None:
    """See to it that this process ends, with exit code `code`, when its work is done.

    A thread that somebody's function left behind, or a native library on its way out, would keep it for ever. After
    `seconds` standard error says where every thread stands.
    """

    def end() -> None:
        time.sleep(seconds)
        sys.stderr.write(f"The work is done, but the process has not ended for {seconds:.0f} s. It is ended now.\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=end, name="raylm-end", daemon=True).start()


def say(text: str) -> None:
    """Write one line of progress for people to the job's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _write(line: str) -> None:
    sys.stderr.flush()
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()
