"""Properties of the emulated Gaudi 2 and Gaudi 3."""

from __future__ import annotations

import torch

from card_emulator.card import GIB, Model
from card_emulator.gaudi.lazy_graph import LazyGraph
from card_emulator.gaudi.reach import check_reach
from card_emulator.names import GAUDI2, GAUDI3
from card_emulator.ops import names

# Operations that have a CPU kernel in torch but no kernel in Habana's bridge 1.19, the newest version with public
# sources: neither scripts/hpu_op.yaml nor the manual registrations list them. Newer versions may support more
# operations.
_ON_HOST = names(
    "mode histc histogram cummax cummin _cummax_helper _cummin_helper unique_consecutive unique_dim_consecutive "
    "nonzero_static nanmedian renorm triangular_solve geqrf ormqr cholesky_inverse im2col col2im lcm digamma polygamma "
    "igamma igammac i0 mvlgamma binomial cauchy_ view_as_complex view_as_real _embedding_bag _int_mm"
)
_ON_HOST_PREFIXES = ("linalg_", "_linalg_", "_fft_", "special_")
_NOT_ON_HOST = names("linalg_cholesky_ex linalg_cross linalg_vector_norm special_entr special_erfcx special_xlog1py")


# Sources: Habana's documentation of data types, and the error "Complex datatype is not supported on HPU device".
_NO_DTYPES = frozenset((torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128))


def _lacks(packet: str, name: str) -> bool:
    if packet in _ON_HOST or name in _ON_HOST:
        return True
    return packet.startswith(_ON_HOST_PREFIXES) and packet not in _NOT_ON_HOST


def _model(name: str, memory: int, e4m3_max: float) -> Model:
    return Model(
        name=name,
        device_type="hpu",
        dispatch_key="HPU",
        guard_slot=15,
        count=1,
        memory=memory,
        # vllm-gaudi's calibration guide quotes this message.
        out_of_memory="[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::{nbytes} ({mib})MB",
        e4m3_max=e4m3_max,
        lacks_dtypes=_NO_DTYPES,
        lacks=_lacks,
        check_reach=check_reach,
        negative_index="negative indices are disabled on this device",
        # A real card accepts negative indices, and vllm-gaudi uses -1 as padding in every step. In most programs,
        # however, a negative index is a mistake, so only `card-emulator run` accepts them.
        counts_from_the_end=False,
        downloads_late=True,
        queue=LazyGraph,
    )


_E4M3_MAX = {GAUDI2: 240.0, GAUDI3: 448.0}
# The number of bytes that programs can allocate, from logs in vllm-gaudi's documentation and in vllm-gaudi#1736.
_MEMORY = {GAUDI2: int(94.62 * GIB), GAUDI3: int(126.5 * GIB)}
MODELS = {name: _model(name, memory, _E4M3_MAX[name]) for name, memory in _MEMORY.items()}
