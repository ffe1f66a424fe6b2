"""All checks, in the order of their dependencies."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.tools.doctor import findings as of
from vllm_gaudi_spec.tools.doctor.findings import Finding
from vllm_gaudi_spec.tools.doctor.machine import device_findings, driver_findings, host_findings
from vllm_gaudi_spec.tools.doctor.probe import probe
from vllm_gaudi_spec.tools.doctor.settings import (
    environment,
    error_findings,
    npu_findings,
    plugin_findings,
    serves_vllm_ascend,
    setting_findings,
    version_findings,
)


def examine(pair: dict[str, Any] | None, missing_model: str | None, error: str | None = None) -> dict[str, Any]:
    """`missing_model`: the message about a model folder that does not exist; it is not looked for again. `error`:
    a message whose codes are explained."""
    found = [*version_findings(), *driver_findings(), *device_findings(), *host_findings()]
    found += [*plugin_findings(), *setting_findings(), *npu_findings()]
    if error is not None:
        found += error_findings(error)
    if missing_model is not None:
        found.append(Finding.refusal("models", missing_model))
    if versions.vllm_mistake() is not None and not serves_vllm_ascend():
        found.append(Finding(of.NOTE, "platform", "vLLM was not loaded, because of the problem above"))
    else:
        found += probe(pair if missing_model is None else None)
    problems = sum(one.severity == of.PROBLEM for one in found)
    return {
        "conclusion": of.conclusion(found),
        "problems": problems,
        "findings": [asdict(one) for one in found],
        "environment": environment(),
    }
