"""Environment variables: those that are set, and values without their apparent effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices import choose_device
from vllm_gaudi_spec.devices.ascend import errors
from vllm_gaudi_spec.environment import (
    BLOCKTIME,
    CANN_HOME,
    HCCL_EXPANSION,
    KV_CACHE_SPACE,
    LAZY_MODE,
    NPU_SETTINGS,
    NUM_THREADS,
    QUANT_CONFIG,
    SKIP_WARMUP,
    VENDORS_SKIP_WARMUP,
    gaudi_has_lazy_mode,
    gaudi_is_lazy,
    hccl_expands_on_vector_cores,
    quant_config_path,
    set_variables,
    skip_warmup,
)
from vllm_gaudi_spec.tools.doctor.findings import NOTE, PROBLEM, WARNING, Finding


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


def npu_findings() -> Iterator[Finding]:
    """Where an NPU is the device. Nothing is imported: without its variables torch itself may not load."""
    if choose_device() != "ascend":
        return
    if not CANN_HOME.value:
        yield Finding(
            PROBLEM,
            "setting",
            f"{CANN_HOME.name} is not set, so that torch_npu does not find CANN",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        )
    for setting in NPU_SETTINGS:
        yield Finding(NOTE, "setting", f"{setting.name}={setting.value_or_default}")
    if hccl_expands_on_vector_cores():
        name = HCCL_EXPANSION.name
        yield Finding(WARNING, "setting", f"{name}=AIV is refused with several ranks", f"unset {name}")
    if versions.installed("triton") is not None:
        yield Finding(
            WARNING, "setting", "triton is installed, which breaks vLLM beside an NPU", "pip uninstall triton"
        )


def error_findings(message: str) -> Iterator[Finding]:
    """Of an error message, or of a log."""
    found = errors.codes_in(message)
    for code in found:
        meaning, remedy = errors.CODES[code]
        yield Finding(NOTE, "error", f"{code}: {meaning}", remedy)
    if not found and errors.has_no_room(message):
        yield Finding(NOTE, "error", *errors.CODES[207008])
    elif not found:
        yield Finding(NOTE, "error", "no error code of CANN in it that is known here")


def _warm_up_findings() -> Iterator[Finding]:
    try:
        skipped = skip_warmup()
    except UnsupportedConfigError as error:
        yield Finding.refusal("setting", str(error))
        return
    if skipped:
        name = (SKIP_WARMUP if SKIP_WARMUP.value else VENDORS_SKIP_WARMUP).name
        yield Finding(WARNING, "setting", f"{name} is set: graphs are made while serving", f"unset {name}")
