"""`vllm serve` as a command, many times: each in a child of one process that has imported vLLM, which takes seconds.

python -m tests.full_tests.abuse.starts CASES RESULTS

CASES is a JSON list of argument lists; RESULTS gets a list of [exit status, output]. A child that does not end by
itself is killed, and its status says so.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

PATIENCE_SECONDS = 60


def start(arguments: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os._exit(_serve(arguments))
        status = _ended(child)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _serve(arguments: list[str]) -> int:
    """The exit status that the command's process would have, after the same output."""
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *arguments]
    status = 0
    try:
        main()
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _ended(child: int) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def main() -> int:
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.api_server.entry  # noqa: F401

    cases, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps([start(arguments) for arguments in json.loads(cases.read_text())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
