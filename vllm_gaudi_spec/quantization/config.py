"""The contents of a QUANT_CONFIG file, as Intel Neural Compressor (INC) reads it.

The file is INC's. On a Gaudi INC itself reads it; elsewhere it is simulated (`simulation.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import (
    ADDITIONAL_CONFIG_KEY,
    FLOAT32,
    FP8_KV,
    Options,
    UnsupportedConfigError,
    read_named_file,
)
from vllm_gaudi_spec.environment import quant_config_path
from vllm_gaudi_spec.quantization import files

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MEASURE, QUANTIZE = "MEASURE", "QUANTIZE"

# Fields that do not change what a simulation computes, or that `QuantConfig` has.
_READ_OR_IGNORED = frozenset(
    [
        "mode",
        "method",
        "observer",
        "scale_method",
        "scale_format",
        "scale_params",
        "dump_stats_path",
        "allowlist",
        "blocklist",
        "whitelist",
        "blacklist",
        "measure_exclude",
        "measure_on_hpu",
        "fp8_config",
        "hp_dtype",
        "device_for_scales",
        "ignore_modules_wo_measures",
        "recalc_scales",
        "seperate_measure_files",
        "mod_dict",
        "calibration_sample_interval",
    ]
)
# Fields of which a simulation supports one value only.
_ONLY = {
    "observer": "maxabs",
    "fp8_config": "e4m3",
    "dynamic_quantization": "false",
    "use_qdq": "false",
    "fake_quant": "false",
    "row_parallel_linear_allreduce_quantization": "false",
    "seperate_measure_files": "true",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    option: str
    """The option or variable that names the file, for messages."""
    path: str
    mode: str
    dump_stats_path: str
    """Prefix of the names of measurement and scale files."""
    scale_method: str
    measures_outputs: bool
    skips_unknown: bool
    """Modules without scales stay as they are; else they are refused."""
    allowed_names: tuple[str, ...]
    allowed_types: tuple[str, ...]
    blocked_names: tuple[str, ...]
    blocked_types: tuple[str, ...]
    fields: dict[str, Any]
    """All of the file."""

    @classmethod
    def read(cls, path: str, option: str) -> QuantConfig:
        try:
            fields = json.loads(read_named_file(path))
        except OSError as error:
            raise UnsupportedConfigError(f"{option}: {path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            raise UnsupportedConfigError(f"{option}: {path} is no JSON file: {error}.") from None
        if not isinstance(fields, dict):
            raise UnsupportedConfigError(f"{option}: {path} must hold one JSON object.")
        mode = str(fields.get("mode", "")).upper()
        if mode not in (MEASURE, QUANTIZE):
            raise UnsupportedConfigError(f"{option}: mode in {path} must be MEASURE or QUANTIZE, got {mode or 'none'}.")
        if not isinstance(fields.get("dump_stats_path"), str):
            raise UnsupportedConfigError(f"{option}: {path} has no dump_stats_path, the prefix of its files' names.")
        allowed, blocked = (_names_and_types(fields, *names) for names in (_ALLOW, _BLOCK))
        return cls(
            option=option,
            path=path,
            mode=mode,
            dump_stats_path=fields["dump_stats_path"],
            scale_method=str(fields.get("scale_method", "maxabs_hw")),
            measures_outputs=str(fields.get("measure_exclude", "OUTPUT")).upper() not in ("OUTPUT", "ALL"),
            skips_unknown=_truth(fields.get("ignore_modules_wo_measures", False)),
            allowed_names=allowed[0],
            allowed_types=allowed[1],
            blocked_names=blocked[0],
            blocked_types=blocked[1],
            fields=fields,
        )

    @property
    def measures(self) -> bool:
        return self.mode == MEASURE

    def takes(self, name: str, kind: str) -> bool:
        """Whether a module is measured or quantized, by its name in the model and the name of its class."""
        if kind in self.blocked_types or _found(self.blocked_names, name):
            return False
        if not self.allowed_names and not self.allowed_types:
            return True
        return kind in self.allowed_types or _found(self.allowed_names, name)

    def not_simulated(self) -> Iterator[str]:
        """Fields of the file that only INC supports."""
        for name, value in self.fields.items():
            supported = _ONLY.get(name)
            if supported is not None and str(value).lower() != supported:
                yield f"{self.option}: {name} {value} in {self.path} is not simulated; use {supported} without a Gaudi."
            elif supported is None and name not in _READ_OR_IGNORED:
                yield f"{self.option}: {self.path} has the field {name}, which is not simulated; leave it out."
        if isinstance(self.fields.get("scale_method"), dict):
            yield f"{self.option}: scale_method in {self.path} must be one name for all modules without a Gaudi."


_ALLOW, _BLOCK = ("allowlist", "whitelist"), ("blocklist", "blacklist")


def _names_and_types(fields: dict[str, Any], name: str, old_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    lists = fields.get(name, fields.get(old_name)) or {}
    return tuple(lists.get("names", ())), tuple(lists.get("types", ()))


def _found(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _truth(value: Any) -> bool:
    return str(value).lower() == "true"


def target_config() -> QuantConfig | None:
    path = quant_config_path()
    return None if path is None else QuantConfig.read(path, "QUANT_CONFIG")


def drafter_config(options: Options) -> QuantConfig | None:
    path = options.draft_quant_config
    name = f"additional_config.{ADDITIONAL_CONFIG_KEY}.draft_quant_config"
    return None if path is None else QuantConfig.read(path, name)


def cpu_weights_of(vllm_config: VllmConfig) -> str | None:
    """The option `cpu_weights`; float32 where the user left it and anything is rounded to FP8, by --kv-cache-dtype or
    a file: oneDNN's kernel computes a token alike however many there are, the float16 kernel does not, and a last bit
    can be the next FP8 number."""
    options = Options.from_vllm(vllm_config)
    if options.cpu_weights is not None:
        return options.cpu_weights
    configs = target_config(), drafter_config(options)
    has_fp8 = vllm_config.cache_config.cache_dtype == FP8_KV or any(c and not c.measures for c in configs)
    return FLOAT32 if has_fp8 else None


def missing_scales(config: QuantConfig, world: int) -> Iterator[str]:
    """Why a model cannot be quantized by its files, as far as the files alone show."""
    try:
        files.read_world(config.dump_stats_path, world, config.scale_method)
    except files.QuantFilesError as error:
        yield f"{config.option}: {error}."


def hostile_scales(config: QuantConfig) -> Iterator[str]:
    """Why INC must not read the files of a model: reading runs what is in them."""
    try:
        files.check_harmless(config.dump_stats_path)
    except files.QuantFilesError as error:
        yield f"{config.option}: {error}."
