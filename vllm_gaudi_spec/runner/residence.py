"""Sleep, wake-up, and weight updates.

Tensors keep their identity, so captured steps stay valid. Only their memory is freed, reallocated, or overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.common.arguments import find_tensors
from vllm_gaudi_spec.upstream.models import finalize_layerwise_reload, reload_weights

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.upstream.scheduler import SchedulerOutput

logger = init_logger(__name__)

WEIGHTS, KV = "weights", "kv_cache"  # vLLM's names for the kinds of memory


class Residence:
    """Manages the memory for weights and KV. Sleep frees this memory, and weight updates overwrite it."""

    def __init__(self, backend: DeviceBackend, target: LoadedModel, drafter: LoadedModel | None) -> None:
        self._backend, self._target, self._drafter = backend, target, drafter
        self._asleep: dict[str, Callable[[], None]] = {}
        """Maps each tag to the function that restores its memory."""
        self._incomplete: list[LoadedModel] = []
        """Models whose weights are incomplete after level 2 sleep or after a failed update."""
        self._is_new = False
        """Whether no step has run since the latest update of the target."""

    def check_step(self, scheduled: SchedulerOutput) -> None:
        if self._incomplete:
            raise UnsupportedConfigError(
                "The weights are missing or incomplete after sleep of level 2 or a failed update; call reload_weights."
            )
        if self._is_new and scheduled.num_scheduled_tokens:
            self._is_new = False
            mixed = set(scheduled.scheduled_cached_reqs.req_ids) - scheduled.scheduled_cached_reqs.resumed_req_ids
            if mixed:
                logger.warning(
                    "After a weight update, %d requests read KV that the old weights computed, for example %s. Pause "
                    "the engine before an update, so that it clears the KV cache.",
                    len(mixed),
                    min(mixed),
                )

    def sleep(self, level: int) -> None:
        """Free KV and weights. At level 0 or 1, the host keeps a copy of the weights."""
        for loaded in self._incomplete:
            finalize_layerwise_reload(loaded.model, loaded.model_config)  # Restore the tensors that steps use.
        self.discard([KV])
        models = [loaded for loaded in (self._target, self._drafter) if loaded is not None]
        if level > 1:
            self._incomplete = models
            for loaded in models:
                self._backend.weights.refresh(loaded.model, dropped=True)
        parameters = {one for loaded in models for one in loaded.model.parameters()}
        self._asleep[WEIGHTS] = self._backend.memory.release(parameters, keep=level < 2)

    def discard(self, tags: Collection[str]) -> None:
        """Free the KV cache if `tags` includes it. vLLM has already discarded its contents."""
        if KV in tags and KV not in self._asleep:
            layers = self._target.vllm_config.compilation_config.static_forward_context.values()
            tensors = find_tensors([getattr(layer, "kv_cache", None) for layer in layers])
            self._asleep[KV] = self._backend.memory.release(tensors, keep=False)

    def wake_up(self, tags: Collection[str] | None) -> None:
        for tag in [tag for tag in self._asleep if tags is None or tag in tags]:
            self._asleep[tag]()
            del self._asleep[tag]

    def reload(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
        *,
        is_draft: bool = False,
    ) -> None:
        """Overwrite the target's or the drafter's weights with new ones. The arguments are those of vLLM's method."""
        if (loaded := self._drafter if is_draft else self._target) is None:
            raise UnsupportedConfigError("The engine has no drafter with weights; leave out is_draft.")
        if not is_checkpoint_format:
            raise UnsupportedConfigError("Weights are packed on this device; pass them in the checkpoint's format.")
        if WEIGHTS in self._asleep:
            raise UnsupportedConfigError("Weights are asleep; call wake_up with the tag weights before an update.")
        if weights_path is not None and not Path(weights_path).is_dir():
            raise UnsupportedConfigError(f"weights_path {weights_path} is not a folder; pass that of a checkpoint.")
        finalize_layerwise_reload(loaded.model, loaded.model_config)  # An earlier update may have failed.
        self._incomplete.append(loaded)
        config = copy(loaded.vllm_config)
        # Make copies, because vLLM writes `weights_path` to the configuration.
        config.model_config, config.load_config = copy(loaded.model_config), loaded.load_config
        loads_on = upstream.device_type_while_loading(loaded.load_config.device)
        with upstream.tensor_parallel_group(loaded.group), loads_on:
            reload_weights(config, loaded.model, weights_iterator, weights_path, is_checkpoint_format)
        loaded.model_config = config.model_config
        self._backend.weights.refresh(loaded.model)
        self._is_new |= not is_draft
        self._incomplete = [other for other in self._incomplete if other is not loaded]
        if self._incomplete and not is_draft:
            self.reload(is_draft=True)  # Sleep has also dropped the drafter's weights.
            return
        for matrix in getattr(self._drafter and self._drafter.model, "fp8_output_matrices", ()):
            matrix.refresh()
