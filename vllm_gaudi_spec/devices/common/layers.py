"""Registers a device's kernels for vLLM's layers. Norms are registered in vLLM's IR, and rotary embeddings by class."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec.attention.metadata import AttentionCall
from vllm_gaudi_spec.upstream.attention_backend import get_forward_context, is_forward_context_available
from vllm_gaudi_spec.upstream.layers import (
    DeepseekScalingRotaryEmbedding,
    MRotaryEmbedding,
    RotaryEmbedding,
    RotaryEmbeddingBase,
    apply_interleaved_rope,
    ir,
)

logger = init_logger(__name__)


def find_kernel(module: str, name: str) -> Any:
    """Return a kernel from the device's software. If this build does not have it, log a message and return None."""
    kernel = getattr(pkgutil.resolve_name(module), name, None)
    if kernel is None:
        logger.info("This build of %s has no %s; using plain torch operations.", module.partition(".")[0], name)
    return kernel


# --- norms ---

Norm = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]
AddNorm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, float],
    tuple[torch.Tensor, torch.Tensor],
]


def register_norms(
    provider: str,
    norm: Norm,
    add_norm: AddNorm,
    *,
    available: bool,
    takes: Callable[[torch.Tensor], bool] = lambda x: True,
    in_place: bool = False,
) -> None:
    """Register kernels for RMS norms with and without a residual.

    The kernels are used only if the input and the weight have the same dtype.

    Args:
        takes: A function that returns whether the kernels support an input.
        in_place: Whether `add_norm` overwrites its inputs with its results.
    """

    def supports(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return variance_size is None and weight is not None and weight.dtype == x.dtype and takes(x)

    def supports_add(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        return supports(x, weight, epsilon, variance_size) and takes(x_residual)

    @ir.ops.rms_norm.register_impl(provider, supports_args=supports, supported=available)
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        return norm(x, weight, epsilon)

    @ir.ops.fused_add_rms_norm.register_impl(
        provider, supports_args=supports_add, supported=available, inplace=in_place
    )
    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(x, x_residual, weight, epsilon)


# --- rotary embeddings ---


class Turn(Protocol):
    """A device's rotary embedding kernel."""

    def __call__(
        self, heads_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, halves: bool
    ) -> torch.Tensor:
        """Rotate heads.

        The two elements of a rotated pair are half a head apart if `halves` is set, or else adjacent. `cos_T1R` and
        `sin_T1R` have an entry for each element of a head.
        """
        ...


def _make_rotary_mixin(turn: Turn) -> type:
    """Return a mixin for vLLM classes that rotate queries and keys in the same way as `RotaryEmbedding`."""

    class _Turning:
        def forward_oot(
            self: RotaryEmbeddingBase, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            # Keep the positions alive so that no other object gets the same `id`.
            cos, sin, _ = _compute_once_per_forward(
                ("rotary", id(self), id(positions), query.dtype),
                lambda: (*_look_up_tables(self, positions, query), positions),
            )

            def all_heads(heads: torch.Tensor) -> torch.Tensor:
                split = heads.view(cos.shape[0], -1, self.head_size)
                turned = turn(split[..., : self.rotary_dim], cos, sin, halves=self.is_neox_style)
                if self.rotary_dim < self.head_size:
                    turned = torch.cat((turned, split[..., self.rotary_dim :]), dim=-1)
                return turned.reshape(heads.shape)

            return all_heads(query), None if key is None else all_heads(key)

    return _Turning


def _look_up_tables(
    rotary: RotaryEmbeddingBase, positions: torch.Tensor, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosine and sine for each element of a head, [T, 1, R].

    `positions` is [T], or [D, T] for a multimodal embedding.
    """
    table = rotary._match_cos_sin_cache_dtype(query)
    # Indexing would split a compiled graph (quirk C16).
    found = table.index_select(0, positions.flatten())
    if positions.ndim == 2:
        assert isinstance(rotary, MRotaryEmbedding)
        found = torch.cat(
            [_select_sections(rotary, part) for part in found.unflatten(0, positions.shape).chunk(2, -1)], -1
        )
    cos, sin = found.unsqueeze(1).chunk(2, dim=-1)
    if rotary.is_neox_style:
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    cos, sin = (part.unsqueeze(-1).expand(*part.shape, 2).flatten(-2) for part in (cos, sin))
    return cos, sin


def _select_sections(rotary: MRotaryEmbedding, found_DTC: torch.Tensor) -> torch.Tensor:
    """Return the table entries [T, C]. Each channel uses the entries for one of the D position dimensions."""
    assert rotary.mrope_section is not None
    if rotary.mrope_interleaved:
        return apply_interleaved_rope(found_DTC, rotary.mrope_section)
    parts = found_DTC.split(rotary.mrope_section, dim=-1)
    return torch.cat([part_DTC[dimension] for dimension, part_DTC in enumerate(parts)], dim=-1)


def _compute_once_per_forward(key: Hashable, build: Callable[[], Any]) -> Any:
    """Return a value that all layers share, which is built only once in each forward pass. Building these values in
    each layer would increase the number of launches in a step by 10%."""
    metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
    calls = metadata.values() if isinstance(metadata, dict) else ()
    call = next((call for call in calls if isinstance(call, AttentionCall)), None)
    return build() if call is None else call.plan(key, build)


def register_rotary(prefix: str, turn: Turn) -> None:
    """Register a kernel for all vLLM classes that rotate queries and keys in the standard way."""
    for base in (RotaryEmbedding, DeepseekScalingRotaryEmbedding, MRotaryEmbedding):
        register_rotary_class(prefix, _make_rotary_mixin(turn), base)


def register_rotary_class(prefix: str, mixin: type, base: type[RotaryEmbeddingBase]) -> None:
    """Replace `base`, and each subclass that inherits its `forward_native`, with a class that also derives from
    `mixin`."""
    for cls in _list_subclasses(base):
        if cls.forward_native is base.forward_native:
            cls.register_oot(type(f"{prefix}{cls.__name__}", (mixin, cls), {}))


def _list_subclasses(cls: type[RotaryEmbeddingBase]) -> list[type[RotaryEmbeddingBase]]:
    return [cls, *(found for subclass in cls.__subclasses__() for found in _list_subclasses(subclass))]
