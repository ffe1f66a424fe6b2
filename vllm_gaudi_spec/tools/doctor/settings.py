"""Environment variables: those that are set, and values that will not do what they look like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_gaudi_spec.devices import choose_device
from vllm_gaudi_spec.environment import environment_value, quant_config_path, skip_warmup
from vllm_gaudi_spec.tools.doctor.findings import PROBLEM, WARNING, Finding
from vllm_gaudi_spec.variables import VARIABLES


def environment() -> list[dict[str, str]]:
    """Of the variables that matter those that are set, with what they mean."""
    values = [(variable, environment_value(variable.name)) for variable in VARIABLES]
    return [
        {"name": variable.name, "value": value, "meaning": variable.meaning}
        for variable, value in values
        if value is not None
    ]


def setting_findings() -> Iterator[Finding]:
    if skip_warmup():
        yield Finding(
            WARNING, "setting", "VGS_SKIP_WARMUP is set: graphs are made while serving", "unset VGS_SKIP_WARMUP"
        )
    path = quant_config_path()
    if path is not None and not Path(path).is_file():
        yield Finding(PROBLEM, "setting", f"QUANT_CONFIG={path} is no file", "correct its path, or unset QUANT_CONFIG")
    # OpenMP passes over what it can not read; vLLM and this platform do not start.
    for name, severity in (
        ("OMP_NUM_THREADS", WARNING),
        ("KMP_BLOCKTIME", WARNING),
        ("VLLM_CPU_KVCACHE_SPACE", PROBLEM),
    ):
        value = environment_value(name)
        if value and not value.split(",")[0].isdigit() and (name, value) != ("KMP_BLOCKTIME", "infinite"):
            yield Finding(severity, "setting", f"{name}={value} is no whole number", f"correct or unset {name}")
    lazy = environment_value("PT_HPU_LAZY_MODE")
    if lazy == "0" and (choose_device() or "").startswith("hpu"):
        yield Finding(
            WARNING,
            "setting",
            "PT_HPU_LAZY_MODE=0 runs the mode whose programs are not counted",
            "unset it, or set it to 1, for the mode that is proven",
        )
