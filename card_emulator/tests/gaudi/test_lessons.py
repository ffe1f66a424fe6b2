"""The emulated Gaudi does what others saw real Gaudis do. docs/contributing/quirks.md lists the lessons by number.

`refused` also checks that only a hostile card refuses.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from card_emulator.testing import graph, hpu, ids


def refused(card: Any, run: Callable[[], Any], words: str) -> None:
    """Check that a hostile card refuses to run something, and that a kind one runs it."""
    with pytest.raises(RuntimeError, match=words):
        run()
    card.hostile = False
    run()
    card.hostile = True


def falls_back(card: Any, run: Callable[[], Any]) -> None:
    """To the host: counted, and the end of a capture."""
    before = card.counters.fallbacks
    run()
    assert card.counters.fallbacks == before + 1
    with pytest.raises(RuntimeError, match="falls back to the CPU"):
        graph(lambda x: run())(hpu(1))
    card.blocked, card.hostile = None, False
    run()
    assert card.counters.fallbacks == before + 1
    card.hostile = True


def test_s12_properties_of_the_card_are_not_known(card: Any) -> None:
    with pytest.raises(NotImplementedError, match="mem_get_info"):
        torch.hpu.get_device_properties()


# Programs that a real card does not run, by lesson, and the words of the refusal.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "s19 o35": (lambda: torch.zeros(2, dtype=torch.complex64, device="hpu"), "does not exist"),
    "l27": (lambda: torch.ones(1, 1, 1, 2, 2, 3, device="hpu") @ torch.ones(1, 1, 1, 2, 3, 2, device="hpu"), "6 dim"),
    "o04": (
        lambda: torch.zeros(2, 1, device="hpu").index_reduce_(0, ids(0, 1), hpu(1, 2)[:, None], "amax"),
        "last dim",
    ),
    "o06": (lambda: torch.where(torch.ones(2, dtype=torch.uint8, device="hpu"), hpu(1, 2), hpu(3, 4)), "only boolean"),
    "o08": (lambda: hpu(3, 1, 2).topk(2, sorted=False), "unsorted output not supported"),
    "o12": (lambda: hpu(1, 2).index_put_((ids(0, 1, 0),), hpu(1, 2, 3)), "scatter_nd_onnx"),
    "o20": (lambda: hpu(0.5, 0.5, dtype=torch.bfloat16).multinomial(1), "samples inaccurately"),
    "o30": (lambda: torch.ops.hpu.cast_to_fp8_v2(hpu(1, dtype=torch.float16)), "supports float32, bfloat16 and FP8"),
    "o38": (lambda: ids(1, 2).gather(0, ids(1)), "gather of int64"),
}


@pytest.mark.parametrize("lesson", REFUSED)
def test_refused(card: Any, lesson: str) -> None:
    refused(card, *REFUSED[lesson])


# --- start-up ---


def test_h03_pinned_memory_needs_an_opened_card(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "pid", 0)
    refused(card, lambda: torch.empty(2, pin_memory=True), "before the device was opened")
    torch.zeros(1, device="hpu")
    assert torch.empty(2, pin_memory=True).is_pinned()


@pytest.mark.parametrize(
    "choose",
    [lambda: torch.hpu.stream(torch.hpu.Stream()).__enter__(), lambda: torch.hpu.set_stream(torch.hpu.Stream())],
)
def test_s18_l08_a_capture_stays_on_its_stream(card: Any, choose: Callable[[], Any]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        choose()
        return x + 1

    with pytest.raises(RuntimeError, match="another stream is chosen"):
        graph(forward)(hpu(1))


def test_s22_attention_computes_in_inference_mode(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q = torch.zeros(1, 1, 2, 8, device="hpu")

    def train() -> None:
        with torch.inference_mode(False):
            FusedSDPA.apply(q, q, q)

    refused(card, train, "recompute")
    FusedSDPA.apply(q, q, q)


def test_l19_copies_of_changing_lengths_are_recipes_each(card: Any) -> None:
    """Copies of whole rows share one recipe."""
    source, target = torch.zeros(8, device="hpu"), torch.zeros(8, device="hpu")
    card.mark_step()
    compiled = []
    for copy in (lambda n: target[:n].copy_(source[:n]), lambda n: target.copy_(source)):
        before = card.counters.lazy_compiles
        for length in range(2, 6):
            copy(length)
            card.mark_step()
        compiled.append(card.counters.lazy_compiles - before)
    assert compiled == [4, 1]


# --- lazy mode ---


def test_l27_o05_index_select_has_five_dimensions(card: Any) -> None:
    falls_back(card, lambda: torch.zeros(1, 1, 1, 1, 2, 1, device="hpu").index_select(4, ids_of_one()))
    before = card.counters.fallbacks
    torch.zeros(1, 1, 1, 2, 1, device="hpu").index_select(3, ids_of_one())
    assert card.counters.fallbacks == before


def ids_of_one() -> torch.Tensor:
    return torch.ones(1, dtype=torch.int64, device="hpu")


@pytest.mark.parametrize("how", ["tensors", "graphs"])
def test_l30_r08_r16_nothing_goes_on_without_memory(card: Any, how: str) -> None:
    """And of a graph's workspace the words are those of a card."""
    x = hpu(1, 2)
    if how == "tensors":
        too_much(card)
    else:
        card.graph_reserve = 4
        with pytest.raises(torch.OutOfMemoryError, match="PT_SYNHELPER workspace Allocation of size ::8 failed!"):
            graph(lambda x: x + 1)(x)
    with pytest.raises(RuntimeError, match="ran out of memory before"):
        x + 1
    card.blocked, card.hostile = None, False
    too_much(card)
    x + 1


def too_much(card: Any) -> None:
    card.compile_only = True  # so that the host allocates nothing
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 << 30, dtype=torch.uint8, device="hpu")
    card.compile_only = False


@pytest.mark.parametrize(("generation", "gib"), [("gaudi2", 94.62), ("gaudi3", 126.5)])
def test_r03_what_the_allocator_offers(card: Any, generation: str, gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from card_emulator.gaudi.models import MODELS

    monkeypatch.setattr(card, "model", MODELS[generation])
    assert torch.hpu.mem_get_info()[1] == int(gib * 2**30)


# --- operators ---


@pytest.mark.parametrize(
    "run",
    [
        lambda x, rows: x.index_reduce_(0, rows, x.clone(), "mean"),
        lambda x, rows: x.index_reduce_(1, rows, x.clone(), "amax"),
        lambda x, rows: x.index_reduce(0, rows, x, "amax", include_self=False),
    ],
)
def test_o03_index_reduce_in_one_form(card: Any, run: Callable[..., Any]) -> None:
    falls_back(card, lambda: run(torch.zeros(2, 2, device="hpu"), torch.arange(2, device="hpu")))
    torch.zeros(2, 2, device="hpu").index_reduce_(0, ids(0, 1), torch.ones(2, 2, device="hpu"), "amax")
    assert card.counters.fallbacks == 1


@pytest.mark.parametrize(("shape", "dim"), [((40, 2), 0), ((2, 37), 1)])
def test_o07_stable_sorts(card: Any, shape: tuple[int, int], dim: int) -> None:
    falls_back(card, lambda: torch.zeros(shape, device="hpu").sort(dim=dim, stable=True))
    before = card.counters.fallbacks
    torch.zeros(2, 38, device="hpu").sort(dim=1, stable=True)
    assert card.counters.fallbacks == before


def test_o09_which_of_equal_values_is_found_is_not_promised(card: Any) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 1.0, 2.0, 3.0]]).to("hpu")
    assert x.argmax(-1).tolist() == [2, 0]
    assert x.argmax(-1, keepdim=True).tolist() == [[2], [0]]
    card.hostile = False
    assert x.argmax(-1).tolist() == [1, 0]


@pytest.mark.parametrize(
    "write",
    [
        lambda x, index, values: x.index_copy_(0, index, values),
        lambda x, index, values: x.scatter_(0, index, values),
        lambda x, index, values: x.index_put_((index,), values),
    ],
)
def test_o13_of_several_writers_any_may_come_last(card: Any, write: Callable[..., Any]) -> None:
    x = hpu(0, 0, 0, 0)
    write(x, ids(1, 1, 2), hpu(5, 6, 7))
    assert x.tolist() == [0.0, 5.0, 7.0, 0.0]
    card.hostile = False
    write(x, ids(1, 1, 2), hpu(5, 6, 7))
    assert x.tolist() == [0.0, 6.0, 7.0, 0.0]


@pytest.mark.parametrize(
    "write", [lambda x: x.index_copy_(0, ids(1, 2), x[:2]), lambda x: x.scatter_(0, ids(1, 2), x[:2])]
)
def test_o14_o38_a_source_in_the_memory_that_is_written(card: Any, write: Callable[..., Any]) -> None:
    x = hpu(1, 2, 3)
    with pytest.raises(RuntimeError, match="part of the tensor itself"):
        write(x)
    x.index_copy_(0, ids(1, 2), x.index_select(0, ids(0, 1)))  # gathered first, as copies of blocks are
    assert x.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "run",
    [
        lambda: F.unfold(torch.zeros(1, 1, 4, 4, device="hpu"), 2),
        lambda: torch.linalg.svd(torch.zeros(2, 2, device="hpu")),
    ],
)
def test_o18_operations_of_the_host(card: Any, run: Callable[[], Any]) -> None:
    run()
    assert card.counters.fallbacks >= 1


def test_o22_a_generator_of_the_card(card: Any) -> None:
    """vllm-gaudi v0.26.0 makes one for each seeded request (hpu_model_runner.py); vllm-fork, 924, crashed with it."""
    first, second = (torch.Generator(device="hpu").manual_seed(3) for _ in range(2))
    assert (first.device, torch.Generator().device) == (torch.device("hpu", 0), torch.device("cpu"))
    assert isinstance(first, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    drawn = [torch.empty(4, device="hpu").exponential_(generator=generator).tolist() for generator in (first, second)]
    assert drawn[0] == drawn[1]
    assert torch.empty(4, device="hpu").exponential_(generator=first).tolist() != drawn[0]


def test_o24_a_quotient_is_not_exact(card: Any) -> None:
    x = torch.arange(1.0, 200.0)
    ours = x.to("hpu")
    assert (ours / ours).cpu().ne(1).any()
    torch.testing.assert_close((ours / ours).cpu(), torch.ones(199))
    card.hostile = False
    assert torch.equal((ours / ours).cpu(), torch.ones(199))


def test_o25_gelu_is_the_tanh_form(card: Any) -> None:
    x = torch.linspace(-3, 3, 50)
    assert torch.equal(F.gelu(x.to("hpu")).cpu(), F.gelu(x, approximate="tanh"))
    card.hostile = False
    assert torch.equal(F.gelu(x.to("hpu")).cpu(), F.gelu(x))


def test_o39_a_view_as_another_dtype_converts_numbers(card: Any) -> None:
    x = torch.tensor([1.0, -2.5])
    assert x.to("hpu").view(torch.int32).cpu().tolist() == [1, -2]
    assert graph(lambda y: y.view(torch.int32) + 1)(x.to("hpu")).cpu().tolist() == [2, -1]
    card.hostile = False
    assert torch.equal(x.to("hpu").view(torch.int32).cpu(), x.view(torch.int32))


def test_o33_sums_come_in_no_fixed_order(card: Any) -> None:
    values = hpu(1e8, 1, -1e8, 0.25)
    found = []
    for card.hostile in (True, False):
        x = hpu(0)
        x.scatter_add_(0, ids(0, 0, 0, 0), values)
        found.append(x.item())
    assert found[0] != found[1]
    counts = hpu(0, 0)
    card.hostile = True
    assert counts.scatter_add_(0, ids(0, 1, 0, 0), hpu(1, 1, 1, 1)).tolist() == [3.0, 1.0]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: torch.zeros(2, 1 << 16, 1 << 16, dtype=torch.int8, device="hpu") + 1, "TPC can address only"),
        (lambda: torch.zeros(1, (1 << 31) + 8, dtype=torch.int8, device="hpu").mT + 1, None),
        (lambda: torch.zeros(1 << 16, 1 << 16, dtype=torch.int8, device="hpu") + 1, None),
        (lambda: flat(1 << 17, 1 << 15, torch.float32) @ flat(1 << 15, 1, torch.float32), "MME can address only"),
        (lambda: flat(1 << 16, 1 << 15, torch.bfloat16) @ flat(1 << 15, 1, torch.bfloat16), None),
        (lambda: flat(1 << 17, 1 << 15, torch.bfloat16) @ flat(1 << 15, 1, torch.bfloat16), None),
        (lambda: flat(3 << 16, 1 << 15, torch.bfloat16) @ flat(1 << 15, 1, torch.bfloat16), "MME can address only"),
        (lambda: flat(1 << 16, 1 << 15, torch.float32)[:, ::2].clone(), "DMA can address only"),
        (lambda: flat(1 << 16, 1 << 15, torch.float32).clone(), None),
    ],
)
def test_o40_offsets_end_at_what_registers_hold(card: Any, run: Callable[[], Any], words: str | None) -> None:
    card.compile_only = True  # so that the host allocates nothing
    if words is None:
        run()
    else:
        refused(card, run, words)


def flat(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype, device="hpu")


# --- fused kernels ---


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ("a04", {"mask": True, "causal": True}, "not both"),
        ("a04", {"lengths": True}, "is_causal only"),
        ("a05", {"mode": "slow"}, "does not support softmax"),
        ("a05", {"side": "middle"}, "does not support softmax"),
        ("a09", {"queries": 65537}, "65537 queries"),
        ("a12", {"queries": 40000, "mask": True}, "a mask of"),
    ],
)
def test_a04_a05_a09_a12_what_fused_attention_takes(card: Any, row: str, changes: dict[str, Any], words: str) -> None:
    card.compile_only = True  # so that the host allocates nothing
    queries = changes.get("queries", 2)
    q = torch.zeros(1, 1, queries, 1, dtype=torch.bfloat16, device="hpu")
    k = torch.zeros(1, 1, 65536 if changes.get("queries") == 40000 else 2, 1, dtype=torch.bfloat16, device="hpu")
    mask = torch.zeros(1, 1, queries, k.shape[2], dtype=torch.bfloat16, device="hpu") if changes.get("mask") else None
    lengths = ids(1) if changes.get("lengths") else None
    arguments = (mask, 0.0, 1.0, changes.get("causal", False), changes.get("mode", "fast"), lengths)
    refused(card, lambda: torch.ops.hpu.sdpa_fwd(q, k, k, *arguments, changes.get("side", "right"), [-1, -1]), words)


def test_a11_its_exponentials_are_bfloat16(card: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    exact = F.scaled_dot_product_attention(q, k, v, scale=1.0)

    def error(mode: str) -> float:
        ours = (part.to("hpu") for part in (q, k, v))
        out = torch.ops.hpu.sdpa_fwd(*ours, None, 0.0, 1.0, False, mode, None, "left", [-1, -1])
        return float((out.cpu() - exact).abs().max())

    assert error("fast") > 1e-4 > error("fp32")
    card.hostile = False
    assert error("fast") < 1e-5


def test_a05_padding_is_left_by_default(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    q, v = torch.zeros(1, 1, 4, 1, device="hpu"), torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 4, 1).to("hpu")
    means = [
        FusedSDPA.apply(q, q, v, None, 0.0, True, 1.0, "fast", True, ids(2), *side)[0, 0, -1, 0].item()
        for side in ((), ("right",))
    ]
    assert means == [6.0, 1.5]


@pytest.mark.parametrize(("generation", "read"), [("gaudi2", [240.0, None]), ("gaudi3", [240.0, 256.0])])
def test_q02_q03_bytes_past_240_are_no_numbers(
    card: Any, generation: str, read: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Gaudi 2 reads numbers of a checkpoint that was made for other cards as NaN."""
    from card_emulator.gaudi.models import MODELS

    monkeypatch.setattr(card, "model", MODELS[generation])
    weight = torch.tensor([240.0, 256.0]).to(torch.float8_e4m3fn)
    found = weight.to("hpu").float().tolist()
    assert [None if number != number else number for number in found] == read
    card.hostile = False
    assert weight.to("hpu").float().tolist() == [240.0, 256.0]


def test_q04_a22_scales_are_float32(card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

    fp8, scale = torch.zeros(2, 2, dtype=torch.float8_e4m3fn, device="hpu"), hpu(1, dtype=torch.bfloat16)
    attended = torch.zeros(1, 1, 2, 8, dtype=torch.float8_e4m3fn, device="hpu")
    torch.ops.hpu.cast_to_fp8_v2(hpu(1, 2), scale)  # vllm-gaudi v0.26.0, extension/ops.py, dynamic_quant
    for run in (
        lambda: torch.ops.hpu.cast_to_fp8_v2(hpu(1, 2), scale.half()),
        lambda: torch.ops.hpu.cast_from_fp8(fp8, scale, torch.float32),
        lambda: fp8_fused_sdpa(attended, attended, attended, d_scale_q=scale),
        lambda: torch.ops.hpu.fp8_gemm_v2(fp8, False, fp8, False, None, torch.bfloat16, scale, scale),
    ):
        refused(card, run, "scales must be float32")
