"""Imports torch and vLLM in stages, in a separate process whose crash is reported as a finding.

Usage: python -m vllm_gaudi_spec.tools.doctor.probe OPTIONS.json ANSWERS
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.tools.doctor.findings import Finding, note, ok, problem

SECONDS = 300
# The device comes after torch and vLLM, as in `vllm serve`, because an emulated card changes which libraries are found.
_STAGES = {
    "torch": "install torch's build for this machine again (`make setup`), or use the vendor's image",
    "vLLM": "install vLLM again (`make setup`), or use the vendor's image",
    "platform": "see the lines above; with VLLM_PLUGINS=gaudi_spec, vLLM uses this platform alone",
    "pair": "run `vllm serve` with these options to see more",
    "device": "see the lines above, or run with VGS_DEVICE=cpu",
}
"""Maps each stage to its remedy."""


def probe(options: dict[str, Any] | None) -> list[Finding]:
    """Run all stages, each of which requires the previous ones. `options` are the engine's options."""
    with tempfile.TemporaryDirectory() as folder:
        task, answers, log = (Path(folder) / name for name in ("options.json", "answers", "log"))
        task.write_text(json.dumps(options))
        answers.touch()
        # -P: as in `vllm serve`, Python does not search for modules in the current folder.
        ended = _run([sys.executable, "-P", "-m", __name__, str(task), str(answers)], log)
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        findings = [Finding(**finding) for line in lines for finding in line]
        if ended is not None:
            stage = [*_STAGES, "device"][len(lines)]
            output = log.read_text(errors="replace").strip().splitlines()
            text = f"{ended} while {stage} was loaded" + (f"; its last line: {output[-1].strip()}" if output else "")
            findings.append(problem(stage, text, _STAGES[stage]))
    return findings


def _run(command: list[str], log: Path) -> str | None:
    """Return a description of how the process ended, or None if it succeeded."""
    with log.open("w") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=file, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"its process was still busy after {SECONDS} s"
    if status < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"its process was ended by {names.get(-status, f'signal {-status}')}"
    return f"its process ended with status {status}" if status else None


# ---- in the child process ----------------------------------------------------------------------------------


def _check_torch(options: dict[str, Any] | None) -> Iterator[Finding]:
    import torch

    torch.zeros(2).sum()
    yield ok("torch", "loads and computes")


def _check_vllm(options: dict[str, Any] | None) -> Iterator[Finding]:
    import vllm

    yield ok("vLLM", f"loads, and reports version {vllm.__version__}")


def _check_platform(options: dict[str, Any] | None) -> Iterator[Finding]:
    from vllm.platforms import current_platform

    kind = type(current_platform)
    name, package = f"{kind.__module__}.{kind.__qualname__}", kind.__module__.split(".")[0]
    if package == "vllm_gaudi_spec":
        yield ok("platform", name)
    elif package != "vllm_ascend":  # the integration supports vllm-ascend
        yield problem("platform", f"vLLM runs on {name}, not on this platform", _STAGES["platform"])


def _check_pair(options: dict[str, Any] | None) -> Iterator[Finding]:
    if options is not None and _is_served():
        from vllm_gaudi_spec.tools.doctor.pair import check_pair

        yield from check_pair(options)
    elif options is not None:
        yield note("models", "models are checked only where this platform serves them")


def _check_device(options: dict[str, Any] | None) -> Iterator[Finding]:
    if _is_served():
        from vllm_gaudi_spec.device_table import describe_device

        found = describe_device()
        yield ok("device", f"{found['device']}, mode {found['mode']}")


def _is_served() -> bool:
    """Whether this platform is in use. Its modules cannot be loaded with vllm-ascend's version of vLLM."""
    from vllm_gaudi_spec.integrations import vllm_ascend

    if vllm_ascend.is_active():
        return False
    from vllm_gaudi_spec.platforms.base import is_active

    return is_active()


_CHECKS: tuple[Callable[[dict[str, Any] | None], Iterator[Finding]], ...] = (
    *(_check_torch, _check_vllm, _check_platform, _check_pair, _check_device),
)


def main() -> int:
    options = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "a") as answers:
        for stage, check in zip(_STAGES, _CHECKS, strict=True):
            is_over = False
            try:
                findings = list(check(options))
            except Exception as error:
                is_over = True
                text = f"{stage} does not load: {type(error).__name__}: {in_one_line(error)}"
                findings = [problem(stage, text, _STAGES[stage])]
            print(json.dumps([asdict(found) for found in findings]), file=answers, flush=True)
            if is_over:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
