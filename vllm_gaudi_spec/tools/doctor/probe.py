"""The part that imports torch and vLLM, stage by stage, in a process of its own: a crash is a finding like others.

python -m vllm_gaudi_spec.tools.doctor.probe TASK.json ANSWERS.json
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
from vllm_gaudi_spec.tools.doctor.findings import NOTE, OK, PROBLEM, Finding

SECONDS = 300
# The device comes after the pair, as in `vllm serve`: an emulated card changes what libraries find that come later.
_STAGES = ("torch", "vLLM", "platform", "pair", "device")
_REMEDIES = {
    "torch": "install torch's build for this machine again (`make setup`), or use the vendor's image",
    "vLLM": "install vLLM again (`make setup`), or use the vendor's image",
    "platform": "see the lines above; with VLLM_PLUGINS=gaudi_spec vLLM takes this platform alone",
    "device": "see the lines above, or run with VGS_DEVICE=cpu",
    "pair": "run `vllm serve` with these options to see more",
}


def probe(pair: dict[str, Any] | None) -> list[Finding]:
    """Run the stages, each of which needs the ones before it; `pair` has the options of the engine."""
    with tempfile.TemporaryDirectory() as folder:
        task, answers, log = (Path(folder) / name for name in ("task.json", "answers", "log"))
        task.write_text(json.dumps(pair))
        answers.touch()
        # -P: as in `vllm serve`, modules are not searched for in the current folder.
        ended = _run([sys.executable, "-P", "-m", __name__, str(task), str(answers)], log)
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        findings = [Finding(**finding) for line in lines for finding in line["findings"]]
        done = [line["stage"] for line in lines]
        if ended is not None:
            stage = _STAGES[len(done)] if len(done) < len(_STAGES) else _STAGES[-1]
            output = log.read_text(errors="replace").strip().splitlines()
            text = f"{ended} while {stage} was loaded" + (f"; its last line: {output[-1].strip()}" if output else "")
            findings.append(Finding(PROBLEM, stage, text, _REMEDIES[stage]))
    return findings


def _run(command: list[str], log: Path) -> str | None:
    """Return how the process ended, or None if it succeeded."""
    with log.open("w") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=file, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"its process was still busy after {SECONDS} s"
    if status < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"its process was ended by {names.get(-status, f'signal {-status}')}"
    return f"its process ended with status {status}" if status else None


# ---- in the child ----------------------------------------------------------------------------------------


def _torch() -> Iterator[Finding]:
    import torch

    torch.zeros(2).sum()
    yield Finding(OK, "torch", "loads and computes")


def _vllm() -> Iterator[Finding]:
    import vllm

    yield Finding(OK, "vLLM", f"loads, and calls itself {vllm.__version__}")


def _platform() -> Iterator[Finding]:
    from vllm.platforms import current_platform

    kind = type(current_platform)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.split(".")[0] == "vllm_gaudi_spec":
        yield Finding(OK, "platform", name)
    elif kind.__module__.split(".")[0] != "vllm_ascend":  # where the integration serves
        yield Finding(PROBLEM, "platform", f"vLLM runs on {name}, not on this platform", _REMEDIES["platform"])


def _serves() -> bool:
    """Whether this platform serves; its modules do not load beside the vLLM of vllm-ascend."""
    from vllm_gaudi_spec.integrations import vllm_ascend

    if vllm_ascend.is_active():
        return False
    from vllm_gaudi_spec.platforms.base import is_active

    return is_active()


def _device() -> Iterator[Finding]:
    if _serves():
        from vllm_gaudi_spec.devices import describe_device

        found = describe_device()
        yield Finding(OK, "device", f"{found['device']}, mode {found['mode']}")


def _pair(task: dict[str, Any] | None) -> Iterator[Finding]:
    if task is None:
        return
    if not _serves():
        yield Finding(NOTE, "models", "models are looked at only where this platform serves them")
        return
    from vllm_gaudi_spec.tools.doctor.pair import examine

    yield from examine(task)


def _answer(stage: str, look: Callable[[], Iterator[Finding]], answers: Any) -> bool:
    try:
        findings, went_well = list(look()), True
    except Exception as error:
        text = f"{stage} does not load: {type(error).__name__}: {in_one_line(error)}"
        findings, went_well = [Finding(PROBLEM, stage, text, _REMEDIES[stage])], False
    print(json.dumps({"stage": stage, "findings": [asdict(found) for found in findings]}), file=answers, flush=True)
    return went_well


def main() -> int:
    task, path = sys.argv[1:]
    pair = json.loads(Path(task).read_text())
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (_torch, _vllm, _platform, lambda: _pair(pair), _device)
    with open(path, "a") as answers:
        all(_answer(stage, look, answers) for stage, look in zip(_STAGES, looks, strict=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
