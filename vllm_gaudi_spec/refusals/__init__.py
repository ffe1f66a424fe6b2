"""Checks that reject configurations at start-up, and requests, in one-line errors that name the option to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.refusals.features import adapter_refusals, feature_refusals
from vllm_gaudi_spec.refusals.files import damage_refusals, other_file_refusals
from vllm_gaudi_spec.refusals.formats import (
    format_refusals,
    kv_scale_refusals,
    quantization_refusals,
    weight_refusals,
)
from vllm_gaudi_spec.refusals.models import expert_refusals, model_refusals
from vllm_gaudi_spec.refusals.speculation import speculation_refusals

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend


def refuse_unsupported(vllm_config: VllmConfig, backend: DeviceBackend) -> None:
    """Raise `UnsupportedConfigError` at start-up for combinations of options that would fail later."""
    if vllm_config.model_config is None:
        return
    for refusals in _IN_ORDER:
        for reason in refusals(vllm_config, backend):
            raise UnsupportedConfigError(reason)


# Only the first reason is reported. Damaged files are checked late, because each file must be opened.
_IN_ORDER: tuple[Callable[[VllmConfig, DeviceBackend], Iterator[str]], ...] = (
    other_file_refusals,
    model_refusals,
    feature_refusals,
    speculation_refusals,
    expert_refusals,
    damage_refusals,
    format_refusals,
    weight_refusals,
    quantization_refusals,
    kv_scale_refusals,
    adapter_refusals,
)
