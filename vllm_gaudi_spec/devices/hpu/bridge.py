"""Loads `habana_frameworks`, Intel's bridge between torch and Gaudi, and determines its mode."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.hpu.compiled import make_region_compiler
from vllm_gaudi_spec.environment import INPUT_REUSE, gaudi_is_lazy

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_gaudi_spec.devices.common.regions import RegionCompiler


class Bridge(NamedTuple):
    """The module `habana_frameworks.torch`, and the functions that depend on its mode."""

    habana: Any
    regions: RegionCompiler | None
    """The region compiler in compiled mode, or None in lazy mode."""
    mark_step: Callable[[], None]
    """Ends and launches the pending graph in lazy mode, or ends the region being traced in compiled mode."""


def open_bridge() -> Bridge:
    """Load the bridge without opening the card.

    vLLM's front-end process also creates a backend. If it opened the card, the engine could not use the card. Importing
    the bridge registers `torch.hpu` and the "hccl" process group. The bridge reads environment variables only once.
    """
    habana, is_lazy = _import_bridge(), gaudi_is_lazy()
    if habana.utils.internal.is_lazy() != is_lazy:
        raise UnsupportedConfigError(
            f"habana_frameworks was loaded before PT_HPU_LAZY_MODE was set; export PT_HPU_LAZY_MODE={int(is_lazy)} "
            "before Python starts."
        )
    if not is_lazy:
        _keep_states_apart()
    # Run vLLM functions decorated with torch.compile eagerly, because they are part of the step.
    torch.compiler.set_stance("force_eager")
    if is_lazy:
        return Bridge(habana, None, habana.core.mark_step)
    regions = make_region_compiler()
    return Bridge(habana, regions, regions.cut)


def _import_bridge() -> Any:
    try:
        return importlib.import_module("habana_frameworks.torch")
    except ImportError as error:
        raise UnsupportedConfigError(
            f"device hpu needs habana_frameworks, which comes with Intel's Gaudi image ({error}); without a Gaudi, set "
            "VGS_DEVICE to hpu-emulated or cpu."
        ) from error
    except (AssertionError, AttributeError) as error:  # mismatched versions, or stock torch in lazy mode
        advice = (
            "leave PT_HPU_LAZY_MODE unset, or use Intel's image pytorch-installer, whose torch has lazy mode"
            if "lazy" in str(error).lower()
            else f"torch is {torch.__version__}, which another package may have installed; reinstall the version "
            "that the bridge was built for"
        )
        raise UnsupportedConfigError(f"habana_frameworks does not load with this torch ({error}); {advice}.") from error


def _keep_states_apart() -> None:
    """Disable input reuse if torch loaded the bridge before the default of its environment variable was set (quirk
    C33)."""
    found: Any = sys.modules.get("habana_frameworks.torch.dynamo.compile_backend.config")
    if INPUT_REUSE.value == "0" and hasattr(found, "enable_synapse_input_reuse"):
        found.enable_synapse_input_reuse = False
