"""The QUANT_CONFIG file of Intel Neural Compressor (INC), and the context in which a model is measured or quantized.

On a Gaudi, INC itself reads the file; on other devices, INC is simulated (`simulation.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, FLOAT32, FP8_KV, Options, UnsupportedConfigError
from vllm_gaudi_spec.environment import QUANT_CONFIG
from vllm_gaudi_spec.quantization import files

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig

MEASURE, QUANTIZE = "MEASURE", "QUANTIZE"

# Fields of the file that a simulation reads, and fields that do not affect its results.
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
# Fields of the file for which a simulation supports only the given value.
_ONLY = {
    "observer": "maxabs",
    "fp8_config": "e4m3",
    "dynamic_quantization": "false",
    "use_qdq": "false",
    "fake_quant": "false",
    "row_parallel_linear_allreduce_quantization": "false",
    "seperate_measure_files": "true",
}


NEEDS_CALIBRATION = (
    "without Intel Neural Compressor on a Gaudi, mode MEASURE is for calibration/step_3_measure.py; run that, or use "
    "mode QUANTIZE."
)


class Selection(NamedTuple):
    """The modules that an entry of the file selects, by patterns for their names and by class."""

    names: tuple[str, ...]
    types: tuple[str, ...]

    @classmethod
    def read(cls, fields: dict[str, Any], name: str, old_name: str) -> Selection:
        lists = fields.get(name, fields.get(old_name)) or {}
        return cls(tuple(lists.get("names", ())), tuple(lists.get("types", ())))

    def selects(self, name: str, kind: str) -> bool:
        return kind in self.types or any(re.search(pattern, name) for pattern in self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    option: str
    """The option or environment variable that specifies the file, for use in messages."""
    path: str
    mode: str
    dump_stats_path: str
    """The path prefix of measurement and scale files."""
    scale_method: str
    measures_outputs: bool
    skips_unknown: bool
    """Whether modules without scales stay unquantized instead of causing an error."""
    allowed: Selection
    """The modules to include. If this selection is empty, all modules are included."""
    blocked: Selection
    fields: dict[str, Any]
    """All fields in the file."""

    @classmethod
    def read(cls, path: str, option: str) -> QuantConfig:
        """Read and validate a file. `option` is the option that specifies it, for use in messages."""
        try:
            fields = json.loads(Path(path).read_text())
        except OSError as error:
            raise UnsupportedConfigError(f"{option}: {path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            raise UnsupportedConfigError(f"{option}: {path} is not a JSON file: {error}.") from None
        if not isinstance(fields, dict):
            raise UnsupportedConfigError(f"{option}: {path} must hold one JSON object.")
        mode = str(fields.get("mode", "")).upper()
        if mode not in (MEASURE, QUANTIZE):
            raise UnsupportedConfigError(f"{option}: mode in {path} must be MEASURE or QUANTIZE, got {mode or 'none'}.")
        if not isinstance(fields.get("dump_stats_path"), str):
            raise UnsupportedConfigError(f"{option}: {path} has no dump_stats_path, the prefix of its files' names.")
        return cls(
            option=option,
            path=path,
            mode=mode,
            dump_stats_path=fields["dump_stats_path"],
            scale_method=str(fields.get("scale_method", "maxabs_hw")),
            measures_outputs=str(fields.get("measure_exclude", "OUTPUT")).upper() not in ("OUTPUT", "ALL"),
            skips_unknown=str(fields.get("ignore_modules_wo_measures")).lower() == "true",
            allowed=Selection.read(fields, "allowlist", "whitelist"),
            blocked=Selection.read(fields, "blocklist", "blacklist"),
            fields=fields,
        )

    @property
    def measures(self) -> bool:
        return self.mode == MEASURE

    def takes(self, name: str, kind: str) -> bool:
        """Whether a module with this name and class is measured or quantized."""
        is_allowed = not any(self.allowed) or self.allowed.selects(name, kind)
        return is_allowed and not self.blocked.selects(name, kind)

    def unsimulated_refusals(self) -> Iterator[str]:
        """Yield reasons to reject the file on devices on which INC is simulated."""
        for name, value in self.fields.items():
            supported = _ONLY.get(name)
            if supported is not None and str(value).lower() != supported:
                yield f"{self.option}: {name} {value} in {self.path} is not simulated; use {supported} without a Gaudi."
            elif supported is None and name not in _READ_OR_IGNORED:
                yield f"{self.option}: {self.path} has the field {name}, which is not simulated; leave it out."
        if isinstance(self.fields.get("scale_method"), dict):
            yield f"{self.option}: scale_method in {self.path} must be one name for all modules without a Gaudi."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """Information about the model that is being loaded, its rank, and its device."""

    model: str
    """The model's folder or name."""
    rank: int
    world: int
    """The number of ranks. Each rank has its own measurement and scale files."""
    fp8_range: str | None
    """The card whose e4m3 range the device uses, or None to use the range for which the scales were computed."""
    apart: Collection[nn.Module] = ()
    """Modules to leave unchanged, which are those of latent attention and those shared with another model."""


class Measuring(Protocol):
    reads_logits: bool
    """Whether logits are computed for every token, so that the logits layer is also measured."""

    def counting(self, real_T: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context for a forward pass in which only tokens with `real_T` set are measured, and not padding."""
        ...

    def write(self) -> None:
        """Write all measurements so far to files, replacing older files."""
        ...


def target_config() -> QuantConfig | None:
    """Return the target's QUANT_CONFIG, or None."""
    path = QUANT_CONFIG.value
    return None if path is None else QuantConfig.read(path, "QUANT_CONFIG")


def drafter_config(options: Options) -> QuantConfig | None:
    """Return the drafter's QUANT_CONFIG, or None."""
    path = options.draft_quant_config
    name = f"additional_config.{ADDITIONAL_CONFIG_KEY}.draft_quant_config"
    return None if path is None else QuantConfig.read(path, name)


def get_cpu_weights(vllm_config: VllmConfig) -> str | None:
    """Return the value of the option `cpu_weights`. It defaults to float32 if any values are rounded to FP8.

    The reason is that the results of the float16 kernel depend on the number of tokens, and a difference of one bit can
    change an FP8 value. The results of oneDNN's float32 kernel do not depend on the number of tokens.
    """
    options = Options.from_vllm(vllm_config)
    if options.cpu_weights is not None:
        return options.cpu_weights
    configs = target_config(), drafter_config(options)
    has_fp8 = vllm_config.cache_config.cache_dtype == FP8_KV or any(c and not c.measures for c in configs)
    return FLOAT32 if has_fp8 else None


def missing_scales(config: QuantConfig, world: int) -> Iterator[str]:
    """Yield reasons why a model cannot be quantized, such as missing scale files. The model itself is not inspected."""
    try:
        files.read_world(config.dump_stats_path, world, config.scale_method)
    except files.QuantFilesError as error:
        yield f"{config.option}: {error}."


def hostile_scales(config: QuantConfig) -> Iterator[str]:
    """Yield reasons why INC must not read a model's scale files, because INC would run any code in them."""
    try:
        files.check_harmless(config.dump_stats_path)
    except files.QuantFilesError as error:
        yield f"{config.option}: {error}."
