"""Sleep and new weights: steps keep the tensors that they know, whose memory goes and comes, or gets new contents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.common.arguments import find_tensors
from vllm_gaudi_spec.upstream.models import finalize_layerwise_reload, reload_weights

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.model import LoadedModel

WEIGHTS, KV = "weights", "kv_cache"  # vLLM's tags


class Residence:
    """The weights and the KV of a loaded runner."""

    def __init__(self, backend: DeviceBackend, target: LoadedModel, drafter: LoadedModel | None) -> None:
        self._backend, self._target, self._drafter = backend, target, drafter
        self._asleep: dict[str, Callable[[], None]] = {}  # what brings back the memory, by tag
        self._incomplete: list[LoadedModel] = []  # models whose weights were dropped, or are only partly new

    def check_weights(self) -> None:
        if self._incomplete:
            raise UnsupportedConfigError("Sleep of level 2 or a failed update left no weights; call reload_weights.")

    def sleep(self, level: int) -> None:
        """Free KV and weights. Up to level 1, the host keeps the weights."""
        self.discard([KV])
        models = [loaded for loaded in (self._target, self._drafter) if loaded is not None]
        if level > 1:
            self._incomplete = models
            for loaded in models:
                self._backend.weights.refresh(loaded.model, dropped=True)
        parameters = {one for loaded in models for one in loaded.model.parameters()}
        self._asleep[WEIGHTS] = self._backend.memory.release(parameters, keep=level < 2)

    def discard(self, tags: Collection[str]) -> None:
        """Free KV, whose contents vLLM has forgotten. It discards nothing else."""
        if KV in tags and KV not in self._asleep:
            layers = self._target.vllm_config.compilation_config.static_forward_context.values()
            tensors = find_tensors([getattr(layer, "kv_cache", None) for layer in layers])
            self._asleep[KV] = self._backend.memory.release(tensors, keep=False)

    def wake_up(self, tags: Collection[str] | None) -> None:
        for tag in [tag for tag in self._asleep if tags is None or tag in tags]:
            self._asleep.pop(tag)()

    def reload(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
        *,
        is_draft: bool = False,
    ) -> None:
        """Copy new weights of the target or the drafter over those that steps read, with vLLM's arguments."""
        if (loaded := self._drafter if is_draft else self._target) is None:
            raise UnsupportedConfigError("The engine has no drafter with weights; leave out is_draft.")
        if WEIGHTS in self._asleep:
            raise UnsupportedConfigError("Weights are asleep; call wake_up with the tag weights before an update.")
        if weights_path is not None and not Path(weights_path).is_dir():
            raise UnsupportedConfigError(f"{weights_path} is no folder, from which weights could be read.")
        finalize_layerwise_reload(loaded.model, loaded.model_config)  # of an update that failed
        self._incomplete.append(loaded)
        config = copy(loaded.vllm_config)
        config.model_config, config.load_config = loaded.model_config, loaded.load_config
        loads_on = upstream.device_type_while_loading(loaded.load_config.device)
        with upstream.tensor_parallel_group(loaded.group), loads_on:
            reload_weights(config, loaded.model, weights_iterator, weights_path, is_checkpoint_format)
        self._backend.weights.refresh(loaded.model)
        self._incomplete = [other for other in self._incomplete if other is not loaded]
        if self._incomplete and not is_draft:
            self.reload(is_draft=True)  # sleep has dropped the drafter as well
