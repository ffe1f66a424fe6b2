"""KV connectors, which save the KV cache of prompts to external storage and load it again later.

A connector copies KV before and after a step, because captured steps cannot call it inside layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.upstream.kv_transfer import (
    ActiveKVConnector,
    OffloadingConnector,
    create_forward_context,
    get_kv_transfer_group,
    has_kv_transfer_group,
    override_forward_context,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.runner.kv_cache import KVCache
    from vllm_gaudi_spec.runner.report import Report


class KVConnector(Extension):
    def __init__(self, vllm_config: VllmConfig, kv_caches: dict[str, Any]) -> None:
        """Create the extension. `kv_caches` maps each layer whose KV is transferred to its cache."""
        self._kv_caches = kv_caches
        self._connector = get_kv_transfer_group()
        self._step = ActiveKVConnector(vllm_config, kv_caches)
        # Some connectors load nothing without metadata. They also look for caches in all layers of the context.
        self._context = create_forward_context(dict.fromkeys(kv_caches), vllm_config)
        layers = self._context.no_compile_layers
        self._context.no_compile_layers = {name: layers[name] for name in kv_caches}
        self._ended: set[str] = set()

    @classmethod
    def load(
        cls, vllm_config: VllmConfig, kv_cache: KVCache, speculation: Speculation | None, drafter: LoadedModel | None
    ) -> KVConnector | None:
        """Return the extension, or None if this process has no connector.

        A draft model's KV is not transferred. The model can read the loaded prompt itself, so it may be used on only
        one side. A head's KV is transferred, because a head would also need the prompt's hidden states, which are on
        the other side. Offloading copies all layers of a block.
        """
        if not has_kv_transfer_group():
            return None
        is_head = speculation is not None and METHODS[speculation.method].is_head
        offloads = isinstance(get_kv_transfer_group(), OffloadingConnector)
        stay = () if drafter is None or is_head or offloads else drafter.layer_names
        return cls(vllm_config, {name: cache for name, cache in kv_cache.by_layer.items() if name not in stay})

    def before_forwards(self, scheduled: SpecSchedulerOutput) -> None:
        self._ended = scheduled.finished_req_ids
        with override_forward_context(self._context):
            self._step.pre_forward(scheduled)
            if scheduled.has_sync_kv_loads:
                for name in self._kv_caches:
                    self._connector.wait_for_layer_load(name)

    def end_step(self, output: ModelRunnerOutput | Report) -> None:
        with override_forward_context(self._context):
            for name, kv_cache in self._kv_caches.items():
                self._connector.save_kv_layer(name, kv_cache, None)
            self._step.finish_forward()
            output.kv_connector_output = self._step.post_forward(self._ended)
