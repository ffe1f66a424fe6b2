"""The NPU that is emulated: an Ascend 910B of 64 GB."""

from __future__ import annotations

from vllm_gaudi_spec.emulator.ascend.streams import NpuQueue
from vllm_gaudi_spec.emulator.card import GIB, Model
from vllm_gaudi_spec.emulator.ops import names

# Torch has a CPU kernel for these, and neither npu_native_functions.yaml of Ascend/pytorch nor op_plugin_functions.yaml
# of Ascend/op-plugin (both of August 2026) names them; torch_npu runs such operations on the host.
_ON_HOST = names(
    "_assert_async _functional_assert_async _int_mm _logcumsumexp binomial cauchy cholesky_inverse conj_physical "
    "copysign digamma fmax fmin frexp geometric geqrf heaviside histogram huber_loss hypot i0 igamma igammac "
    "index_reduce lcm lgamma log_normal lu_unpack mode mvlgamma narrow_copy nextafter nonzero_static ormqr poisson "
    "polygamma unique_dim_consecutive"
)
_ON_HOST_PREFIXES = ("linalg_", "_linalg_", "special_")
_NOT_ON_HOST = names("linalg_cholesky linalg_cross linalg_qr linalg_solve_triangular linalg_vector_norm _linalg_svd")


def _lacks(packet: str, name: str) -> bool:
    function = packet if packet.startswith("_") else packet.rstrip("_")
    return function in _ON_HOST or (function.startswith(_ON_HOST_PREFIXES) and function not in _NOT_ON_HOST)


ASCEND_910B = Model(
    name="Ascend910B3",
    device_type="npu",
    dispatch_key="PrivateUse1",
    guard_slot=20,
    count=8,
    # As messages about memory that ran out print it for a card of 64 GB.
    memory=int(60.97 * GIB),
    out_of_memory="NPU out of memory. Tried to allocate {mib} MiB",
    e4m3_max=448.0,
    float64_on_host=True,
    lacks_dtypes=frozenset(),
    lacks=_lacks,
    negative_index="none is known to count from the end here",
    counts_from_the_end=False,
    dies_without_memory=False,
    downloads_late=False,  # what races is refused by its streams
    queue=NpuQueue,
)
