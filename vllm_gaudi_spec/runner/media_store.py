"""What encoders make of images on devices that capture: a row of one tensor for each token, which prompt chunks read.

Each image is encoded by itself, in a graph of its shape. Rows are numbered as KV slots are: the host says which of them
an image has, and a prompt chunk gets one number for each of its tokens, so that its graph knows nothing of images.

    S  rows of the store        N  rows of an encoder's output
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import get_mm_features_in_window, group_and_batch_mm_kwargs

from vllm_gaudi_spec.runner.graphs import Job

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Batch
    from vllm_gaudi_spec.runner.graphs import StepRecorder

NO_MEDIA = 0
"""In place of the row of a token that is none of an image. Row 0 and those after it are written by warm-up alone."""


class Item(NamedTuple):
    """An image, a clip or a sound."""

    modality: str
    data: MultiModalKwargsItem
    num_rows: int
    """Tokens that it stands for."""


class MediaSizes(NamedTuple):
    """Known before the first request."""

    num_rows: int
    """Tokens of images that vLLM's scheduler keeps at most."""
    largest: tuple[Item, ...]
    """Of each modality one of the largest size, by the processor or by `--limit-mm-per-prompt`."""
    width: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> MediaSizes:
        budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
        largest = []
        for modality in budget.mm_max_toks_per_item:
            made = budget.processor.get_dummy_mm_inputs({modality: 1}, cache=None)
            (place,) = made["mm_placeholders"][modality]
            largest.append(Item(modality, made["mm_kwargs"][modality][0], place.get_num_embeds()))
        width = vllm_config.model_config.get_inputs_embeds_size()
        return cls(budget.encoder_cache_size, tuple(largest), width)

    @property
    def num_pads(self) -> int:
        """Rows that no request has, and that warm-up writes to."""
        return max((item.num_rows for item in self.largest), default=1)

    def num_bytes(self, dtype: torch.dtype) -> int:
        return (self.num_pads + self.num_rows) * self.width * dtype.itemsize


class Encoding(NamedTuple):
    """What an encoder takes of one item."""

    modality: str
    names: tuple[str, ...]
    values: tuple[Any, ...]
    """A tensor, on the device once it is uploaded, or what the host reads of one: nested tuples of numbers."""

    @classmethod
    def of(cls, item: Item) -> Encoding:
        ((_, _, named),) = group_and_batch_mm_kwargs([(item.modality, item.data)])
        on_host = {name for name, part in item.data.items() if part.field.keep_on_cpu}
        names = tuple(sorted(named))
        return cls(item.modality, names, tuple(_value(named[name], name in on_host) for name in names))

    @property
    def signature(self) -> Hashable:
        return ("encoder", self.modality, *zip(self.names, map(_form, self.values), strict=True))


class _OnHost(NamedTuple):
    """A tensor that decides about shapes: a part of what a graph is made for."""

    numbers: Any
    is_float: bool

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.numbers, dtype=torch.float32 if self.is_float else torch.int64)


def _value(value: Any, is_on_host: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_value(part, is_on_host) for part in value)
    if isinstance(value, torch.Tensor) and is_on_host:
        return _OnHost(_nested(value.tolist()), value.is_floating_point())
    return value


def _nested(numbers: Any) -> Any:
    return tuple(map(_nested, numbers)) if isinstance(numbers, list) else numbers


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, tuple) and not isinstance(value, _OnHost):
        return tuple(map(_form, value))
    return value


def _with_tensors(value: Any, make: Any) -> Any:
    """The same with `make` of its tensors."""
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, tuple) and not isinstance(value, _OnHost):
        return tuple(_with_tensors(part, make) for part in value)
    return value


def _as_arguments(value: Any) -> Any:
    """As vLLM's classes take it."""
    if isinstance(value, _OnHost):
        return value.tensor()
    return [_as_arguments(part) for part in value] if isinstance(value, tuple) else value


class MediaStore:
    def __init__(
        self,
        sizes: MediaSizes,
        model: nn.Module,
        backend: DeviceBackend,
        recorder: StepRecorder,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._upload = backend.memory.upload
        self._sizes = sizes
        num_rows = sizes.num_pads + sizes.num_rows
        self.rows_SH = torch.zeros(num_rows, sizes.width, dtype=dtype, device=backend.traits.torch_device)
        self._run_encode = backend.graphs.graph(self._encode)
        self._rows_np: dict[str, np.ndarray] = {}
        """int64: the rows of each item, by its hash."""
        self._free_np = np.arange(sizes.num_pads, num_rows, dtype=np.int64)

    # --- encoders ---

    def jobs(self) -> Iterator[Job]:
        for item in self._sizes.largest:
            encoding, pads_np = Encoding.of(item), np.arange(item.num_rows, dtype=np.int64)
            yield Job("encoders", partial(self._run, encoding, pads_np), (encoding.signature,), item.num_rows)

    def encode(self, mm_hash: str, item: Item) -> None:
        """A no-op for what is in the store."""
        if mm_hash in self._rows_np:
            return
        assert item.num_rows <= len(self._free_np), "vLLM's scheduler keeps more tokens of images than it has room for"
        rows_np, self._free_np = np.split(self._free_np, [item.num_rows])
        self._rows_np[mm_hash] = rows_np
        self._run(Encoding.of(item), rows_np)

    def _run(self, encoding: Encoding, rows_np: np.ndarray) -> None:
        self._recorder.saw(encoding.signature)
        values = tuple(_with_tensors(value, self._upload) for value in encoding.values)
        self._run_encode(encoding.names, values, self._upload(torch.from_numpy(rows_np)))

    def _encode(self, names: tuple[str, ...], values: tuple[Any, ...], rows_N: torch.Tensor) -> None:
        named = dict(zip(names, map(_as_arguments, values), strict=True))
        outputs = [output.flatten(0, -2) for output in self._model.embed_multimodal(**named)]
        found_NH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        self.rows_SH.index_copy_(0, rows_N, found_NH.to(self.rows_SH.dtype))

    def free(self, mm_hash: str) -> None:
        if (rows_np := self._rows_np.pop(mm_hash, None)) is not None:
            self._free_np = np.concatenate((self._free_np, rows_np))

    def reset(self) -> None:
        for mm_hash in list(self._rows_np):
            self.free(mm_hash)

    # --- prompt chunks ---

    def rows_of(self, batch: Batch, features: dict[str, list[MultiModalFeatureSpec]]) -> torch.Tensor:
        """int64 [T]: the row of each token of a rectangle, or `NO_MEDIA`. `features`: by request."""
        rows_np = np.full(batch.shape.tokens, NO_MEDIA, dtype=np.int64)
        for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=True)):
            start = request.num_computed
            chunk_np = rows_np[row * batch.shape.queries :][:count]
            self._put(chunk_np, start, features[request.req_id])
        return self._upload(torch.from_numpy(rows_np))

    def _put(self, chunk_np: np.ndarray, start: int, features: Sequence[MultiModalFeatureSpec]) -> None:
        """`chunk_np`: of tokens from position `start` on."""
        end = start + len(chunk_np)
        begin, stop = get_mm_features_in_window(features, start=start, end=end)
        for feature in features[begin:stop]:
            place = feature.mm_position
            first, last = max(start - place.offset, 0), min(end - place.offset, place.length)
            used = slice(*place.get_embeds_indices_in_range(first, last))
            if used.start == used.stop:  # of the words around an image alone
                continue
            part_np = chunk_np[place.offset + first - start : place.offset + last - start]
            is_media: Any = slice(None) if place.is_embed is None else place.is_embed[first:last].numpy()
            part_np[is_media] = self._rows_np[feature.identifier][used]
