"""Loads adapters with vLLM's managers. Each adapter is fully checked before any state changes.

vLLM checks an adapter's configuration and module names. vLLM would detect wrong matrix sizes only while copying the
matrices into a slot, after the adapter has been registered, or not at all. This module therefore checks adapters first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.logger import init_logger

from vllm_gaudi_spec.config import REFUSED_ADAPTER, UnsupportedConfigError, in_one_line
from vllm_gaudi_spec.lora.application import TokenSlots, Upload, make_adapters
from vllm_gaudi_spec.upstream.layers import QKVParallelLinear
from vllm_gaudi_spec.upstream.lora import (
    LogitsProcessorWithLoRA,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    VocabParallelEmbeddingWithLoRA,
    get_adapter_absolute_path,
)
from vllm_gaudi_spec.upstream.models import supports_lora

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

    from vllm_gaudi_spec.upstream.lora import LoRALayerWeights, LoRAModel


logger = init_logger(__name__)


class AdapterError(ValueError):
    """Raised for an adapter that cannot be served."""


class SlottedAdapters(LRUCacheLoRAModelManager):
    """Adapter slots that vLLM fills on the host, with copies on the device."""

    def make_tables(self, upload: Upload) -> TokenSlots:
        """Replace the tensors that vLLM has created on the device with adapter tensors for each wrapped layer."""
        if not self.modules:
            raise UnsupportedConfigError(
                f"{type(self.model).__name__} has none of these modules; change --lora-target-modules or leave it out."
            )
        (slots,) = {id(module.punica_wrapper): module.punica_wrapper for module in self.modules.values()}.values()
        for module in self.modules.values():
            module.set_mapping(make_adapters(module, slots, upload))
        return cast(TokenSlots, slots)

    def activate_adapter(self, lora_id: int) -> bool:
        newly: bool = super().activate_adapter(lora_id)
        if newly:
            for module in self.modules.values():
                module.punica_wrapper.send()
        return newly

    def pin_adapter(self, lora_id: int) -> bool:
        # If every slot were pinned, vLLM could not evict any adapter, and the next request with a new one would fail.
        if len(self._active_adapters.pinned_items - {lora_id}) + 1 >= self.lora_slots:
            raise ValueError(f"Pinning adapter {lora_id} would leave no slot for others; raise --max-loras.")
        pinned: bool = super().pin_adapter(lora_id)
        return pinned

    def make_room(self, lora_ids: set[int]) -> None:
        """Unpin adapters in slots that a step needs.

        vLLM's scheduler allows as many adapters per step as there are slots, whether or not they are pinned, and vLLM's
        caches would then evict an adapter that the step needs.
        """
        for cache, size in ((self._active_adapters, self.lora_slots), (self._registered_adapters, self.capacity)):
            unused = sorted(cache.pinned_items - lora_ids)
            for lora_id in unused[: max(0, len(unused) + len(lora_ids) - size)]:
                cache.pinned_items.remove(lora_id)
                logger.warning(
                    "Adapter %d is no longer pinned, because requests need its slot; raise --max-loras.", lora_id
                )


class AdapterLoader(LRUCacheWorkerLoRAManager):
    """A loader that keeps adapters on the host and loads those needed by a step into slots."""

    _manager_cls = SlottedAdapters

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, device: torch.device, upload: Upload) -> None:
        if not supports_lora(model):
            raise UnsupportedConfigError(
                f"{type(model).__name__} does not support LoRA adapters; leave out --enable-lora."
            )
        super().__init__(vllm_config, device, model.embedding_modules)
        self.create_lora_manager(model, vllm_config)
        self.slots: TokenSlots = self._adapter_manager.make_tables(upload)
        self._sizes = {
            name: sizes
            for module_name in self._adapter_manager.modules
            for name, sizes in self._list_sizes(module_name)
        }

    def load_into_slots(self, adapters: Iterable[LoRARequest]) -> dict[int, int]:
        """Load adapters that are not in a slot yet, and return the slots of all adapters, keyed by adapter ID."""
        manager, adapters = self._adapter_manager, list(adapters)
        manager.make_room({request.lora_int_id for request in adapters})
        # Process loaded adapters first, so that loading other adapters does not evict them.
        for request in sorted(adapters, key=lambda request: request.lora_int_id not in manager.list_adapters()):
            number = request.lora_int_id
            if manager.get_adapter(number) is None:
                self.add_adapter(request)
            else:
                manager.activate_adapter(number)
        return {number: slot for slot, number in enumerate(manager.lora_index_to_id) if number is not None}

    # --- rejected adapters ---

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        try:
            _refuse_pickle(Path(get_adapter_absolute_path(lora_request.lora_path)))
            loaded = super()._load_adapter(lora_request)
            for reason in self._check(loaded.loras):
                raise AdapterError(reason)
        except LoRAAdapterNotFoundError:
            raise
        except Exception as error:
            raise AdapterError(
                f"LoRA adapter {lora_request.lora_name} {REFUSED_ADAPTER}: {in_one_line(error)}"
            ) from error
        return loaded

    def _check(self, loras: dict[str, LoRALayerWeights]) -> Iterator[str]:
        """Yield problems with the matrices of an adapter."""
        if not loras:
            yield "it contains no matrices."
        for name, lora in loras.items():
            sizes = self._sizes.get(name)
            if sizes is None:
                # A deployment may restrict adapters to certain modules. Matrices for other modules are then ignored.
                if self.lora_config.target_modules is None:
                    yield f"the model has no module {name} that supports adapters."
                continue
            if lora.lora_a is None or lora.lora_b is None:
                yield f"one of the two matrices of {name} is missing."
                continue
            found = tuple(lora.lora_a.shape), tuple(lora.lora_b.shape)
            expected = (lora.rank, sizes[0]), (sizes[1], lora.rank)
            if found != expected:
                yield f"the matrices of {name} have shapes {found}, but {expected} are expected."
            elif not all(part.isfinite().all() for part in (lora.lora_a, lora.lora_b, lora.lora_b * lora.scaling)):
                # Zero times a non-finite number is not zero, so it would affect requests without the adapter.
                yield f"not all numbers in {name} are finite."

    def _list_sizes(self, module_name: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the input and output sizes summed over all ranks, each with the name used in adapters."""
        manager = self._adapter_manager
        module = manager.modules[module_name]
        names = manager.packed_modules.get(module_name, [module_name])
        num_inputs, outputs = _sizes(module)
        if len(names) == 1:
            outputs = [sum(outputs)]
        if len(names) != len(outputs):
            raise UnsupportedConfigError(
                f"LoRA adapters of {module_name} are not supported, because it is fused from {len(outputs)} parts but "
                f"has {len(names)} names; leave out --enable-lora."
            )
        return ((name, (num_inputs, size)) for name, size in zip(names, outputs, strict=True))


def _sizes(module: Any) -> tuple[int, list[int]]:
    if isinstance(module, LogitsProcessorWithLoRA):
        return module.hidden_size, [module.vocab_size]
    base = module.base_layer
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return base.org_vocab_size, [base.embedding_dim]
    if isinstance(base, QKVParallelLinear):
        heads = (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
        return base.input_size, [number * base.head_size for number in heads]
    return base.input_size, list(getattr(base, "output_sizes", [base.output_size]))


def _refuse_pickle(folder: Path) -> None:
    pickled = [name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).is_file()]
    if pickled and not (folder / "adapter_model.safetensors").is_file():
        raise AdapterError(f"{pickled[0]} is a pickle, which may run code; save it as adapter_model.safetensors.")
