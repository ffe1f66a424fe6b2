"""Properties of operations that determine how the device handles them. They are computed once for each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from card_emulator import kernels


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Composite operations that run as a single kernel or only create views. All other composite operations are decomposed,
# so that host reads and dynamic shapes inside them are detected.
_WHOLE = names(
    "linear matmul reshape contiguous flatten unflatten softmax log_softmax chunk narrow split movedim swapaxes "
    "numpy_T mT einsum layer_norm rms_norm group_norm square pad conv1d conv2d scaled_dot_product_attention "
    "expand_as view_as where type_as dropout to.dtype repeat_interleave.self_int tensor_split.sections"
)
# Operations that return either a view of their first argument or new memory.
_MAYBE_VIEWS = names("reshape contiguous flatten type_as to einsum dropout positive real")
# Operations whose result shares memory with the argument and covers all of it.
_SAME = names("detach alias lift_fresh detach_")
# Operations whose result size depends on values and must be read on the host: nonzero, and everything based on it.
_DYNAMIC = names(
    "nonzero nonzero_numpy masked_select _unique _unique2 unique_dim unique_consecutive bincount"
    " repeat_interleave.Tensor where.default"
)
# Operations that return a Python value.
_READS = names("_local_scalar_dense equal item is_nonzero")
# Operations that change a tensor's shape or strides in place.
_RESHAPES_IN_PLACE = names("resize_ resize_as_ set_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ as_strided_ swapdims_")
_RANDOM = names(
    "uniform_ normal_ random_ exponential_ bernoulli_ bernoulli geometric_ cauchy_ log_normal_ multinomial randperm"
)
INT_ARITHMETIC = names(
    "add sub mul rsub pow sum cumsum prod cumprod neg __lshift__ bitwise_left_shift add_ sub_ mul_ pow_ neg_ dot "
    "__ilshift__ bitwise_left_shift_ addcmul"
)
_GATHERS = names("index_select gather embedding index")
_SORTS = names("sort argsort topk msort")


def _flops_of_product(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    result: int = 2 * out.numel() * args[0].shape[-1]
    return result


def _flops_of_addmm(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    result: int = 2 * out.numel() * args[1].shape[-1]
    return result


def _flops_of_attention(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    query, key = args[0], args[1]
    result: int = 4 * query.numel() * key.shape[-2]
    return result


def _flops_of_experts(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the number of floating-point operations in the experts that the router selects."""
    lists = [list_ for list_ in args if isinstance(list_, (list, tuple)) and list_ and list_[0].dim() == 2]
    result: int = 2 * args[1].numel() * sum(weights[0].numel() for weights in lists)
    return result


# Maps the name of a packet to a function of the arguments and the first result that returns the number of
# floating-point operations.
FLOPS: dict[str, Callable[[Sequence[Any], dict[str, Any], Any], int]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "linear", "mv", "dot"), _flops_of_product),
    **dict.fromkeys(("addmm", "baddbmm", "_scaled_mm"), _flops_of_addmm),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "sdpa_fwd", "sdpa_recomp_fwd", "fp8_sdpa_recomp_fwd"), _flops_of_attention
    ),
    "fp8_gemm_v2": _flops_of_product,
    "mixture_of_experts": _flops_of_experts,
}


@dataclass(slots=True, eq=False)
class OpInfo:
    func: Any
    """The `OpOverload`, whose `decompose` method splits composite operations."""
    name: str
    """The name without its namespace, such as `index.Tensor`."""
    packet: str
    overload: str
    run: Callable[..., Any]
    """A function that runs the operation on CPU tensors. Captured graphs replay this function."""
    writes: tuple[int | str, ...]
    """The positions or names of the arguments that are changed in place."""
    view: bool
    maybe_view: bool
    same: bool
    fresh: bool
    """Whether the results always have new memory."""
    decompose: bool
    special: bool
    """Whether the operation must be counted or checked before it runs."""
    dynamic: bool
    reads: bool
    on_host: bool
    reshapes: bool
    random: bool
    int_arithmetic: bool
    gathers: bool
    sorts: bool
    flops: Callable[[Sequence[Any], dict[str, Any], Any], int] | None
    handler: Callable[..., Any] | None = None
    """A function that handles this operation instead of `tensor.execute`."""

    def computes(self, new: Sequence[Any]) -> bool:
        """Whether the operation does work instead of only creating a view."""
        return not (self.view or (self.maybe_view and (not new or new[0].part)))


def classify(func: Any, lacks: Callable[[str, str], bool]) -> OpInfo:
    schema = func._schema
    namespace, _, packet = schema.name.partition("::")
    name = f"{packet}.{schema.overload_name or 'default'}"
    writes = tuple(
        arg.name if arg.kwarg_only else position
        for position, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )
    aliases = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
    maybe_view = packet in _MAYBE_VIEWS
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    # The sets above contain only torch's own operations.
    ours = namespace == "aten"

    def among(names: frozenset[str]) -> bool:
        return ours and (packet in names or name in names)

    info = OpInfo(
        func=func,
        name=name,
        packet=packet,
        overload=schema.overload_name,
        run=kernels.KERNELS.get(name if ours else f"{namespace}::{name}", func._op),
        writes=writes,
        view=aliases and not maybe_view,
        maybe_view=maybe_view,
        same=packet in _SAME,
        fresh=not (writes or aliases or maybe_view),
        decompose=ours and composite and not (among(_WHOLE) or among(_READS) or writes),
        special=False,
        dynamic=among(_DYNAMIC),
        reads=among(_READS),
        on_host=ours and lacks(packet, name),
        reshapes=among(_RESHAPES_IN_PLACE),
        random=among(_RANDOM),
        sorts=among(_SORTS),
        int_arithmetic=among(INT_ARITHMETIC),
        gathers=packet in _GATHERS,
        flops=FLOPS.get(packet),
    )
    info.special = info.dynamic or info.reads or info.on_host or info.random or info.sorts
    return info
