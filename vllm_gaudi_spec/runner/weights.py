"""Weights of a loaded model while the engine runs: replaced in place, saved, and compared by checksum.

Captured graphs read weights at their addresses of warm-up, so new ones are copied into the same storages. vLLM's loader
does that layer by layer (`model_loader.reload`); copies that a device makes of a weight are the backend's task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader import ShardedStateLoader, get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

from vllm_gaudi_spec.config import UnsupportedConfigError, in_one_line
from vllm_gaudi_spec.quantization.config import target_config

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend


class ModelWeights:
    """The target's weights."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, backend: DeviceBackend) -> None:
        self._vllm_config = vllm_config
        self._model = model
        self._backend = backend

    # --- read by vLLM's helpers: packed weights as they were before packing ---

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, weight) for name, weight in self._model.named_parameters() if weight.numel())
        yield from self._backend.weights.unpacked_weights(self._model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """On the host. A weight with two names has the alphabetically first one, as the loader expects."""
        state = self._model.state_dict(keep_vars=True)
        names = {id(tensor): name for name, tensor in sorted(state.items(), reverse=True)}
        weights = {name: state[name].detach().cpu() for name in names.values()}
        return weights | dict(self._backend.weights.unpacked_weights(self._model))

    # --- called by users ---

    def reload(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """The arguments are those of vLLM's worker. Without any, the model's own files are read again."""
        for reason in self._refusals("reload_weights"):
            raise UnsupportedConfigError(reason)
        if not is_checkpoint_format:
            raise ValueError("reload_weights takes weights as in a checkpoint; leave is_checkpoint_format out.")
        if weights_iterator is not None and weights_path is not None:
            raise ValueError("reload_weights takes weights_iterator or weights_path, not both; leave one out.")
        source = "weights_iterator" if weights_iterator is not None else self._check_files(weights_path)
        model_config = self._vllm_config.model_config
        try:
            reload_weights(self._vllm_config, self._model, weights_iterator, weights_path, is_checkpoint_format=True)
        except Exception as error:  # each model's loader raises its own for names and shapes that are not the model's
            finalize_layerwise_reload(self._model, model_config)  # otherwise layers would be left without storage
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = in_one_line(error).rstrip(".")
            raise ValueError(
                f"The weights of {source} do not fit {model_config.architecture}: {reason}. Some of them are in the "
                "model now: call reload_weights with weights that fit, or restart the engine."
            ) from error
        finally:
            self._backend.weights.weights_changed(self._model)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """This rank's files for `--load-format sharded_state`."""
        for reason in self._refusals("save_sharded_state"):
            raise UnsupportedConfigError(reason)
        Path(path).mkdir(parents=True, exist_ok=True)
        stand_in: Any = self
        ShardedStateLoader.save_model(stand_in, path, pattern=pattern, max_size=max_size)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each weight of this rank by name."""
        for reason in self._refusals("compute_weight_checksums"):
            raise UnsupportedConfigError(reason)
        stand_in: Any = self
        return compute_tensor_digests(stand_in)

    def _check_files(self, weights_path: str | None) -> str:
        """Before a layer is changed: check that files exist in a format that can be read again. Returns their model."""
        load_config, model_config = self._vllm_config.load_config, copy(self._vllm_config.model_config)
        loader = get_model_loader(load_config)
        if not hasattr(loader, "get_all_weights"):
            raise ValueError(
                f"Weights of load format {load_config.load_format} cannot be reloaded; set another one first with "
                'update_config({"load_config": {"load_format": "auto"}}).'
            )
        if weights_path is not None:
            model_config.model, model_config.model_weights, model_config.revision = weights_path, "", None
        try:
            loader.download_model(model_config)
        except UnsupportedConfigError:
            raise
        except Exception as error:
            raise ValueError(
                f"The weights of {model_config.model} cannot be read: {in_one_line(error).rstrip('.')}."
            ) from error
        return str(model_config.model)

    def _refusals(self, method: str) -> Iterator[str]:
        model = self._vllm_config.model_config
        if self._vllm_config.lora_config is not None:
            yield f"{method} does not work with LoRA adapters; leave out --enable-lora."
        if target_config() is not None:
            yield f"{method} does not work with QUANT_CONFIG; unset it."
        if model.quantization is not None:
            yield f"{method} is for weights in the model's dtype, and those of {model.model} are {model.quantization}."
        if model.is_moe:
            yield f"{method} does not work with experts, which {model.model} has; use a model without them."
        if model.use_mla:
            yield f"{method} does not work with MLA attention, which {model.model} has; use a model without it."


# Fields of model_config that a running engine reads again.
_RELOADED_FROM = ("model", "model_weights", "revision")


def check_overrides(overrides: dict[str, Any]) -> None:
    """For `update_config` of a worker: refuse overrides that a running engine does not read."""
    for name, fields in overrides.items():
        if name not in ("load_config", "model_config"):
            raise ValueError(
                f"update_config takes load_config and model_config, got {name}; restart the engine with it."
            )
        useless = [field for field in fields if name == "model_config" and field not in _RELOADED_FROM]
        if useless:
            raise ValueError(
                f"{', '.join(useless)} of model_config cannot be changed while the engine runs (only "
                f"{', '.join(_RELOADED_FROM)} can, for reload_weights); restart the engine with it."
            )
