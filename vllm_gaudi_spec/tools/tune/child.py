"""Work in a process of its own, possibly of another Python: a task goes in as JSON, an answer comes back as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.environment import environment_of_children

_ERROR = "error"
_PACKAGE = Path(__file__).parents[2]


def run_module(module: str, task: dict[str, Any], log: Path, python: str = sys.executable) -> dict[str, Any]:
    """What `module`, which calls `serve`, answers. ValueError with its reason where it fails."""
    # Else a process that is stopped would leave its child running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        asked, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(task))
        # What else lies beside the package, as vLLM's transformers, is not for another environment.
        alone = Path(folder) / "package"
        alone.mkdir()
        (alone / _PACKAGE.name).symlink_to(_PACKAGE)
        child = subprocess.Popen(
            [python, "-m", module, str(asked), str(answer)],
            env=environment_of_children(None if python == sys.executable else alone),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait()
        finally:
            # With it goes what it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        written: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    if child.returncode or _ERROR in written:
        reason = written.get(_ERROR, f"its process ended with {child.returncode}")
        raise ValueError(f"{reason} (log: {log})")
    return written


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In the child: the paths of the task and of the answer are its two arguments."""
    task, path = (Path(name) for name in sys.argv[1:])
    try:
        found = answer(json.loads(task.read_text()))
    except Exception as error:
        path.write_text(json.dumps({_ERROR: in_one_line(error)}))
        raise
    path.write_text(json.dumps(found))
