"""Multimodal items in prompts, which are encoded in the step chosen by the scheduler and merged into embeddings.

The encoders, their cache, and the lookup of a chunk's items are those of vLLM's newer runner. Drafters process only
tokens.

D: dimensions of a multimodal rotary position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gaudi_spec.attention.metadata import MultimodalInputs, SpanRows, Spans
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.device_rows import DeviceRows
from vllm_gaudi_spec.records import DECODE
from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.runner.extensions.encoders import Item
from vllm_gaudi_spec.upstream.models import EncoderCache, EncoderRunner, find_bidirectional_spans, supports_mrope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import ModelConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.graphs import Job
    from vllm_gaudi_spec.records import Batch
    from vllm_gaudi_spec.runner.extensions.media_store import MediaStore
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.upstream.scheduler import SchedulerOutput


_SEEN_BOTH_WAYS_IN_WINDOWS = ("gemma4",)
"""The `model_type` of each model that attends bidirectionally within images only in sliding-window layers."""


class Multimodal(Extension):
    """Multimodal inputs in prompts of the target."""

    def __init__(
        self,
        model_config: ModelConfig,
        model: Any,
        backend: DeviceBackend,
        max_rows: int,
        store: MediaStore | None = None,
    ) -> None:
        """Create the extension. `store` is set if the device captures steps."""
        if getattr(model, "_has_oov_mm_tokens", False):
            raise UnsupportedConfigError(
                f"{model_config.model} marks images by tokens outside of its vocabulary, which is not supported; add "
                "--language-model-only to serve its text alone."
            )
        self._model = model
        self._upload = backend.memory.upload
        self.store = store
        self._cache = EncoderCache()
        self._encoders = EncoderRunner(
            model,
            max_num_tokens=0,  # the buffer is not used, because embeddings are merged in the forward pass
            hidden_size=0,
            encoder_cache=self._cache,
            dtype=model_config.dtype,
            device=backend.traits.torch_device,
        )
        self._sees_both_ways = model_config.is_mm_prefix_lm
        self._in_windows_only = model_config.hf_config.model_type in _SEEN_BOTH_WAYS_IN_WINDOWS
        self._sliding_window = model_config.get_sliding_window()
        self._num_dims = model_config.mrope_num_dims if model_config.uses_mrope else 0
        self._rotary_np: dict[str, np.ndarray] = {}
        """Maps each request whose prompt has multimodal rotary positions to these positions, int64 [D, L]."""
        self._offsets: dict[str, int] = {}
        """Maps each of these requests to the offset that is added to the positions of tokens after the prompt."""
        self.rotary_offsets: DeviceRows | None = None
        """The offsets by row for decodes, in which all dimensions of a position are equal. None without M-RoPE."""
        if self._num_dims:
            self.rotary_offsets = DeviceRows(backend, max_rows, np.array(0, dtype=np.int32))

    def apply(self, scheduled: SchedulerOutput, requests: Requests) -> None:
        """Remove requests that have ended, register admitted requests, and run the encoders that the step needs."""
        for mm_hash in scheduled.free_encoder_mm_hashes:
            self._cache.free_encoder_cache(mm_hash)
            if self.store is not None:
                self.store.free(mm_hash)
        for req_id in requests.ended:
            self._cache.remove_request(req_id)
            self._rotary_np.pop(req_id, None)
            self._offsets.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._cache.add_request(new.req_id, new.mm_features)
            if self.store is not None:
                ends = (feature.mm_position.offset + feature.mm_position.length for feature in new.mm_features)
                requests.by_id[new.req_id].media_end = max(ends, default=0)
            if self._num_dims and new.mm_features:
                assert supports_mrope(self._model)
                assert new.prompt_token_ids is not None
                rotary_DL, offset = self._model.get_mrope_input_positions(new.prompt_token_ids, new.mm_features)
                self._rotary_np[new.req_id], self._offsets[new.req_id] = rotary_DL.numpy(), int(offset)
        if self.rotary_offsets is not None:
            for request in requests.admitted:
                offset = self._offsets.get(request.req_id)
                self.rotary_offsets.set(request.row, None if offset is None else np.array(offset, dtype=np.int32))
            self.rotary_offsets.flush()
        if self.store is not None:
            self._fill(self.store, scheduled.scheduled_encoder_inputs)
            return
        mm_hashes, items = self._encoders.prepare_mm_inputs(scheduled.scheduled_encoder_inputs)
        if items:
            outputs = self._encoders.execute_mm_encoder(items)
            self._cache.encoder_outputs.update(zip(mm_hashes, outputs, strict=True))

    def _fill(self, store: MediaStore, inputs: dict[str, list[int]]) -> None:
        for req_id, indices in inputs.items():
            for feature in (self._cache.mm_features[req_id][index] for index in indices):
                if feature.data is not None:
                    item = Item(feature.modality, feature.data, feature.mm_position.get_num_embeds())
                    store.encode(feature.identifier, item)

    def reset_encoder_cache(self) -> None:
        """Clear cached encoder outputs, because the weights have changed."""
        self._cache.reset_encoder_cache()
        if self.store is not None:
            self.store.reset()

    def add_to(self, batch: Batch) -> Batch:
        """Return the batch with embeddings and, if they differ from the token positions, rotary positions.

        Decodes need neither. However, the last token of a prompt may be processed as a decode, and if steps are not
        captured, this token may belong to an image.
        """
        is_decode = batch.shape.phase == DECODE
        if self.store is not None:
            return batch if is_decode else replace(batch, multimodal=self._make_captured_inputs(self.store, batch))
        if not batch.requests:
            return batch
        newest = batch.requests[0]  # all requests in a decode are of the same kind
        if is_decode and newest.num_computed >= len(newest.all_token_ids):
            return batch
        embeddings, is_media_T = self._gather_embeddings(batch)
        has_rotary = any(request.req_id in self._rotary_np for request in batch.requests)
        rotary_DT = self._make_rotary(batch) if has_rotary else None
        found = MultimodalInputs(embeddings, is_media_T, rotary_DT=rotary_DT, spans=self._find_spans(batch))
        return replace(batch, multimodal=found)

    def warm_up(self) -> None:
        if self.rotary_offsets is not None:
            self.rotary_offsets.warm_up()

    def jobs(self) -> Iterator[Job]:
        if self.store is not None:
            yield from self.store.jobs()

    def _make_captured_inputs(self, store: MediaStore, batch: Batch) -> MultimodalInputs:
        """Return inputs with the same shapes and dtypes for every batch of prompt chunks.

        A separate graph for text alone would have to be compiled and would save only one selection per token.
        """
        return MultimodalInputs(
            rows_T=store.find_rows(batch, self._cache.mm_features),
            rotary_DT=self._make_rotary(batch) if self._num_dims else None,
            spans=self._find_spans(batch),
        )

    def _gather_embeddings(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return encoder outputs in the order of the batch's tokens, and a mask of the tokens that they replace."""
        counts_np = np.array(batch.counts, dtype=np.int64)
        embeddings, is_media_T = self._encoders.gather_mm_embeddings(
            [request.req_id for request in batch.requests],
            batch.shape.tokens,
            counts_np,
            np.arange(len(counts_np)) * batch.shape.queries,
            np.array([len(request.all_token_ids) for request in batch.requests]),
            np.array([request.num_computed for request in batch.requests]),
        )
        return embeddings, self._upload(is_media_T) if embeddings else None

    def _find_spans(self, batch: Batch) -> Spans | None:
        """Return the spans of images that end in the chunks of the batch.

        The scheduler never ends a chunk inside an image, but the prefix cache may contain the beginning of an image.
        """
        if not self._sees_both_ways or batch.shape.phase == DECODE:
            return None  # the last token of an image can attend to the whole image anyway
        features = [self._cache.mm_features.get(request.req_id, []) for request in batch.requests]
        images = find_bidirectional_spans(features, self._sliding_window)
        found = [
            (row, first, last)
            for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=True))
            for first, last in images[row]
            if first < request.num_computed + count and last >= request.num_computed
        ]
        if not found and self.store is None:
            return None
        lasts_np = np.zeros((batch.shape.rows, batch.shape.queries), dtype=np.int32)
        for row, first, last in found:
            start = batch.requests[row].num_computed
            # Otherwise, the KV of the first tokens in the image would be computed as if the image ended with the chunk.
            assert last < start + batch.counts[row], "a chunk ends within an image"
            lasts_np[row, max(first - start, 0) : last + 1 - start] = last
        rows = None if self.store is not None else self._span_rows(found)
        return Spans(self._upload(torch.from_numpy(lasts_np)), rows, self._in_windows_only)

    def _span_rows(self, found: list[tuple[int, int, int]]) -> SpanRows:
        rows_S, firsts_S, lasts_S = torch.tensor(found, dtype=torch.int32).T.contiguous().unbind(0)
        return SpanRows(self._upload(rows_S.long()), self._upload(firsts_S), self._upload(lasts_S))

    def _make_rotary(self, batch: Batch) -> torch.Tensor:
        rows, queries = batch.shape.rows, batch.shape.queries
        rotary_np = np.zeros((self._num_dims, rows, queries), dtype=np.int64)
        for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=True)):
            positions_np = np.arange(request.num_computed, request.num_computed + count)
            # The tokens of a resumed request include its output tokens.
            rotary_np[:, row, :count] = positions_np + self._offsets.get(request.req_id, 0)
            if (prompt_np := self._rotary_np.get(request.req_id)) is not None:
                part_np = prompt_np[:, request.num_computed : request.num_computed + count]
                rotary_np[:, row, : part_np.shape[1]] = part_np
        return self._upload(torch.from_numpy(rotary_np.reshape(self._num_dims, -1)))
