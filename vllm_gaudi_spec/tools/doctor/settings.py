"""Environment variables: those that are set, and values without their apparent effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices import choose_device
from vllm_gaudi_spec.environment import (
    BLOCKTIME,
    KV_CACHE_SPACE,
    LAZY_MODE,
    NUM_THREADS,
    QUANT_CONFIG,
    SKIP_WARMUP,
    VENDORS_SKIP_WARMUP,
    gaudi_has_lazy_mode,
    gaudi_is_lazy,
    quant_config_path,
    set_variables,
    skip_warmup,
)
from vllm_gaudi_spec.tools.doctor.findings import PROBLEM, WARNING, Finding


def environment() -> list[dict[str, str]]:
    """The variables of our table that are set, with their meanings."""
    return [
        {"name": variable.name, "value": value, "meaning": variable.meaning}
        for variable, value in set_variables().items()
    ]


def setting_findings() -> Iterator[Finding]:
    yield from _warm_up_findings()
    path = quant_config_path()
    if path is not None and not Path(path).is_file():
        name = QUANT_CONFIG.name
        yield Finding(PROBLEM, "setting", f"{name}={path} is no file", f"correct its path, or unset {name}")
    # OpenMP passes over what it cannot read; vLLM and this platform do not start.
    for variable, severity in ((NUM_THREADS, WARNING), (BLOCKTIME, WARNING), (KV_CACHE_SPACE, PROBLEM)):
        name, value = variable.name, variable.value
        if value and not value.split(",")[0].isdigit() and (variable, value) != (BLOCKTIME, "infinite"):
            yield Finding(severity, "setting", f"{name}={value} is no whole number", f"correct or unset {name}")
    if choose_device() == "hpu" and gaudi_is_lazy() and not gaudi_has_lazy_mode():
        yield Finding(
            PROBLEM,
            "setting",
            f"{LAZY_MODE.name}={LAZY_MODE.value}, and this torch has no lazy mode",
            "unset it, or use the image that has a torch with lazy mode (docs/gaudi.md)",
        )


def _warm_up_findings() -> Iterator[Finding]:
    try:
        skipped = skip_warmup()
    except UnsupportedConfigError as error:
        yield Finding.refusal("setting", str(error))
        return
    if skipped:
        name = (SKIP_WARMUP if SKIP_WARMUP.value else VENDORS_SKIP_WARMUP).name
        yield Finding(WARNING, "setting", f"{name} is set: graphs are made while serving", f"unset {name}")
