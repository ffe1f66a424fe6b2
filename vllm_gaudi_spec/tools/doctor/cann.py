"""Explanations of CANN's error codes for users. Names and numbers are those in `acl/error_codes`."""

from __future__ import annotations

import re
from typing import NamedTuple


class Explanation(NamedTuple):
    meaning: str
    remedy: str


_FEWER_GRAPHS = (
    "list fewer sizes in batch_buckets and prefill_buckets in additional_config.gaudi_spec, or lower --max-num-seqs"
)
_NEWER_DRIVER = "install the driver of HDK 25.5.1 or newer"
_FIRST = "look for the first error in the log, and run gaudi-spec selftest"

CODES = {
    107025: Explanation(
        "a stream was used in a captured graph and not joined again; on some releases, it is one of HCCL's",
        "unset HCCL_OP_EXPANSION_MODE, or try another release of torch_npu",
    ),
    107027: Explanation(
        "a value was read on the host while a graph was captured: an operator without a kernel of its own in this CANN",
        "install CANN 9.1 or newer",
    ),
    107030: Explanation(
        "an operator, or the allocator when it ran short of memory, waited while a graph was captured",
        "lower --gpu-memory-utilization, or install CANN 9.1 or newer",
    ),
    207000: Explanation(
        "the driver does not have this feature; updates of a graph's tasks need HDK 25.0.RC1", _NEWER_DRIVER
    ),
    207001: Explanation("the card ran out of memory", "lower --gpu-memory-utilization, or --max-num-seqs"),
    207005: Explanation(
        "captured graphs use all of the card's streams, queues or events",
        f"{_NEWER_DRIVER}; or {_FEWER_GRAPHS}",
    ),
    207007: Explanation("captured graphs use all of the card's events", f"{_NEWER_DRIVER}; or {_FEWER_GRAPHS}"),
    207008: Explanation("captured graphs use all of the card's streams", f"{_NEWER_DRIVER}; or {_FEWER_GRAPHS}"),
    207018: Explanation("the card ran out of memory", "lower --gpu-memory-utilization, or --max-num-seqs"),
    507009: Explanation(
        "a kind of task that captured graphs do not support: collectives with HCCL_OP_EXPANSION_MODE=AIV next to "
        "tasks that are updated",
        "unset HCCL_OP_EXPANSION_MODE",
    ),
    507011: Explanation("a captured graph failed; the kernel that is named need not be the cause", _FIRST),
    507014: Explanation("a kernel timed out", _FIRST),
    507015: Explanation("a kernel failed: an index or an address out of range, most often", _FIRST),
    507018: Explanation("a kernel on the card's own host processor failed", _FIRST),
    507046: Explanation("a stream timed out: ranks wait for each other, or an update waits for its graph", _FIRST),
    561002: Explanation(
        "an operator does not support these arguments; the fused attention rejects rows that together have more KV "
        "blocks than exist",
        "run gaudi-spec selftest, which tries it, and report the line before the error",
    ),
}


def find_codes(text: str) -> list[int]:
    """Return the codes in a message that this module can explain, without duplicates."""
    found = dict.fromkeys(int(code) for code in re.findall(r"(?<![\d.])\d{6}(?![\d.]\d|\d)", text))
    return [code for code in found if code in CODES]
