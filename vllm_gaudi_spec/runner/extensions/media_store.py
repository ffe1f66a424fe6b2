"""The media store, which contains encoder outputs for prompt chunks on devices that capture steps, one row per token.

Rows are assigned like KV slots: the host assigns rows to each image, and each token of a prompt chunk gets a row
number. The graph of the chunk therefore does not depend on the images.

S: rows in the store. N: rows in an encoder's output. W: width of a row, which contains the embedding of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gaudi_spec.attention.metadata import NO_MEDIA
from vllm_gaudi_spec.graphs import ENCODERS, Job
from vllm_gaudi_spec.upstream.models import get_mm_features_in_window

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.graphs import StepRecorder
    from vllm_gaudi_spec.records import Batch
    from vllm_gaudi_spec.runner.extensions.encoders import Encoders, Encoding, Item


_NO_ROWS = np.empty(0, dtype=np.int64)


class MediaStore:
    def __init__(self, encoders: Encoders, backend: DeviceBackend, recorder: StepRecorder) -> None:
        self._encoders = encoders
        self._recorder = recorder
        self._upload = backend.memory.upload
        self._pads_np = np.arange(encoders.num_pads, dtype=np.int64)
        self._free_np = np.arange(encoders.num_kept, dtype=np.int64) + encoders.num_pads
        self.rows_SW = torch.zeros(
            encoders.num_pads + encoders.num_kept,
            encoders.width,
            dtype=encoders.dtype,
            device=backend.traits.torch_device,
        )
        self._rows_np: dict[str, np.ndarray] = {}
        """Maps the hash of an item to its row numbers, int64."""
        self._run_encode = backend.graphs.graph(self._encode)

    # --- encoders ---

    def jobs(self) -> Iterator[Job]:
        for encoding in self._encoders.listed:
            yield Job(ENCODERS, partial(self._run, encoding), (encoding.signature,), encoding.num_rows)

    def encode(self, mm_hash: str, item: Item) -> None:
        """Encode an item, unless the store already contains it."""
        if mm_hash in self._rows_np:
            return
        assert item.num_rows <= len(self._free_np), "vLLM's scheduler keeps more tokens of images than it has room for"
        self._rows_np[mm_hash], self._free_np = np.split(self._free_np, [item.num_rows])
        self._run(self._encoders.encoding(item), self._rows_np[mm_hash])

    def _run(self, encoding: Encoding, rows_np: np.ndarray = _NO_ROWS) -> None:
        """Encode an item and store its output in `rows_np`.

        Padding goes to other rows, which are never read. In warm-up, no rows are passed, so all output is padding.
        """
        self._recorder.saw(encoding.signature)
        pads_np = np.resize(self._pads_np, encoding.num_rows - len(rows_np))
        rows_N = self._upload(torch.from_numpy(np.concatenate((rows_np, pads_np))))
        names, tensors = tuple(encoding.inputs), tuple(map(self._upload, encoding.inputs.values()))
        self._run_encode(encoding.modality, names, tensors, rows_N)

    def _encode(
        self, modality: str, names: tuple[str, ...], tensors: tuple[torch.Tensor, ...], rows_N: torch.Tensor
    ) -> None:
        found_NW = self._encoders.run(modality, dict(zip(names, tensors, strict=True)))
        self.rows_SW.index_copy_(0, rows_N, found_NW.to(self.rows_SW.dtype))

    def free(self, mm_hash: str) -> None:
        if (rows_np := self._rows_np.pop(mm_hash, None)) is not None:
            self._free_np = np.concatenate((self._free_np, rows_np))

    def reset(self) -> None:
        for mm_hash in list(self._rows_np):
            self.free(mm_hash)

    # --- prompt chunks ---

    def find_rows(self, batch: Batch, features: dict[str, list[MultiModalFeatureSpec]]) -> torch.Tensor:
        """Return each token's store row or `NO_MEDIA` for a padded batch, int64 [T]. `features` maps requests to
        items."""
        rows_np = np.full(batch.shape.tokens, NO_MEDIA, dtype=np.int64)
        for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=True)):
            chunk_np = rows_np[row * batch.shape.queries :][:count]
            self._put(chunk_np, request.num_computed, features[request.req_id])
        return self._upload(torch.from_numpy(rows_np))

    def _put(self, chunk_np: np.ndarray, start: int, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Fill in the store rows of a chunk's tokens, which begin at position `start`."""
        end = start + len(chunk_np)
        begin, stop = get_mm_features_in_window(list(features), start=start, end=end)
        for feature in features[begin:stop]:
            span = feature.mm_position
            first, last = max(start - span.offset, 0), min(end - span.offset, span.length)
            used = slice(*span.get_embeds_indices_in_range(first, last))
            if used.start == used.stop:  # the chunk contains only the text around the image
                continue
            part_np = chunk_np[span.offset + first - start : span.offset + last - start]
            is_media: Any = slice(None) if span.is_embed is None else span.is_embed[first:last].numpy()
            part_np[is_media] = self._rows_np[feature.identifier][used]
