"""The emulated card refuses what a Gaudi cannot do and counts what it does slowly, with the line to blame."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import card_emulator
from card_emulator.gaudi.models import MODELS
from card_emulator.testing import hpu, ids

THIS_FILE = os.path.basename(__file__)


# -- a tensor like any other --


def test_o21_random_factories_have_their_own_generator(card: Any) -> None:
    torch.hpu.manual_seed(3)
    first = torch.randn(4, device="hpu").cpu()
    host = torch.get_rng_state()
    torch.hpu.manual_seed(3)
    assert torch.equal(torch.randn(4, device="hpu").cpu(), first)
    assert torch.equal(torch.get_rng_state(), host)


def test_s16_devices_do_not_mix(card: Any) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        hpu(1, 2) + torch.ones(2)
    assert (hpu(1, 2) + torch.tensor(1.0)).tolist() == [2.0, 3.0]


# -- reads by the host --


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.tolist(),
        lambda x: bool(x[0]),
        lambda x: int(x[0]),
        lambda x: repr(x),
        lambda x: torch.equal(x, x),
        lambda x: torch.empty(2).copy_(x),
    ],
)
def test_host_reads_are_counted_with_their_line(card: Any, read: Callable[[torch.Tensor], Any]) -> None:
    x = hpu(1, 2)
    read(x)
    assert card.counters.host_reads == 1
    assert THIS_FILE in card.counters.lines("device-to-host sync")[0]


def test_a_read_cuts_the_pending_graph(card: Any) -> None:
    x = hpu(1, 2)
    (x + 1).tolist()
    assert card.counters.implicit_markers == 1
    x.tolist()  # nothing pending
    assert card.counters.implicit_markers == 1


def test_l20_upload_onto_a_pending_tensor_is_a_marker(card: Any) -> None:
    x = hpu(1, 2)
    y = x + 1
    y.copy_(torch.zeros(2))
    assert card.counters.implicit_markers == 1
    assert "upload" in next(event.what for event in card.counters.events if event.kind == "implicit marker")
    assert y.tolist() == [0.0, 0.0]


# -- dynamic shapes --


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 1),
        lambda x: torch.unique(x),
        lambda x: torch.argwhere(x),
        lambda x: torch.where(x > 1),
        lambda x: x[x > 1],
        lambda x: x.clone().index_put_((x > 1,), hpu(0)[0]),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: F.one_hot(x.long()),
    ],
)
def test_o17_dynamic_shapes_are_counted(card: Any, run: Callable[[torch.Tensor], Any]) -> None:
    run(hpu(1, 2))
    assert card.counters.dynamic_ops >= 1
    assert THIS_FILE in card.counters.lines("dynamic op")[0]


# -- indices and number formats --


@pytest.mark.parametrize(
    "run",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i),
        lambda x, i: x.index_copy_(0, i, hpu(0)),
        lambda x, i: x.index_put_((i,), hpu(0)),
        lambda x, i: x.scatter_(0, i, 0.0),
        lambda x, i: x.scatter_(0, i, hpu(0), reduce="add"),
        lambda x, i: x.scatter_(0, i, 2.0, reduce="multiply"),
        lambda x, i: x.scatter_add(0, i, hpu(0)),
        lambda x, i: x.scatter_add_(0, i, hpu(0)),
        lambda x, i: x.scatter_reduce(0, i, hpu(0), "amax"),
        lambda x, i: x.scatter_reduce_(0, i, hpu(0), "amax"),
        lambda x, i: x.index_reduce(0, i, hpu(0), "amax"),
        lambda x, i: x.index_reduce_(0, i, hpu(0), "amax"),
        lambda x, i: x.index_add_(0, i, hpu(0)),
        lambda x, i: x.index_fill(0, i, 1.0),
        lambda x, i: x.index_fill_(0, i, hpu(1)[0]),
        lambda x, i: torch.gather(x, 0, i, out=hpu(0)),
        lambda x, i: torch.index_select(x, 0, i, out=hpu(0)),
        lambda x, i: x.take(i),
        lambda x, i: x.put_(i, hpu(0)),
        lambda x, i: F.embedding(i, x.view(2, 1)),
    ],
)
def test_o11_indices_are_checked(card: Any, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def check_refused(*indices: int) -> None:
        for index in indices:
            with pytest.raises(IndexError, match=f"index {index} is out of range for a dimension of size 2"):
                run(hpu(1, 2), ids(index))

    check_refused(-3, -1, 2)
    # As for the software of others.
    monkeypatch.setattr(card, "model", dataclasses.replace(card.model, counts_from_the_end=True))
    check_refused(-3, 2)
    last, by_minus_one = hpu(1, 2), hpu(1, 2)
    expected = run(last, ids(1))
    assert card.counters.negative_indices == 0
    assert run(by_minus_one, ids(-1)).tolist() == expected.tolist()
    assert by_minus_one.tolist() == last.tolist()
    assert card.counters.negative_indices == 1


def test_o10_one_hot_of_minus_one_is_zero(card: Any) -> None:
    assert F.one_hot(ids(-1, 1), 3).tolist() == [[0, 0, 0], [0, 1, 0]]
    assert card.counters.dynamic_ops == 0


def test_o01_int64_has_32_bits(card: Any) -> None:
    with pytest.raises(RuntimeError, match="32 bits"):
        ids(1 << 31)
    with pytest.raises(RuntimeError, match="32 bits"):
        ids(1 << 30) * 2
    assert (hpu(2**31 - 1, dtype=torch.int32) + 1).tolist() == [-(2**31)]


def test_o02_float64_has_the_precision_of_float32(card: Any) -> None:
    third = hpu(1, dtype=torch.float64) / 3
    assert third.dtype is torch.float64
    assert third.item() == (torch.ones(()) / 3).double().item()
    assert card.counters.float64_ops >= 1


@pytest.mark.parametrize(("generation", "largest"), [("gaudi2", 240.0), ("gaudi3", 448.0)])
def test_q01_e4m3_saturates(card: Any, monkeypatch: pytest.MonkeyPatch, generation: str, largest: float) -> None:
    monkeypatch.setattr(card, "model", MODELS[generation])
    x = hpu(1000, -1000, 1)
    expected = [largest, -largest, 1.0]
    assert x.to(torch.float8_e4m3fn).float().tolist() == expected
    assert torch.empty(3, dtype=torch.float8_e4m3fn, device="hpu").copy_(x).float().tolist() == expected
    assert torch.hpu.get_device_name() == generation.upper()


@pytest.mark.parametrize("log1p", [torch.log1p, torch.Tensor.log1p_])
def test_o23_log1p_is_wrong_near_zero(card: Any, log1p: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert log1p(hpu(1e-9, 1.0)).cpu().tolist() == [0.0, pytest.approx(0.6931472)]
    card.hostile = False
    assert log1p(hpu(1e-9)).item() == pytest.approx(1e-9)


def test_l07_h14_fallbacks_are_counted_and_can_be_forbidden(card: Any) -> None:
    hpu(1, 1).mode()
    assert card.counters.fallbacks == 1
    card.allow_fallbacks = False
    with pytest.raises(RuntimeError, match="fallbacks are forbidden"):
        hpu(1, 1).mode()


# -- lazy graphs --


def compiles_of(card: Any, run: Callable[[], Any]) -> int:
    before = card.counters.lazy_compiles
    run()
    card.mark_step()
    return card.counters.lazy_compiles - before


def test_a_graph_is_compiled_once(card: Any) -> None:
    x = hpu(1, 2)
    card.mark_step()
    assert [compiles_of(card, lambda: (x + 1) * x) for _ in range(3)] == [1, 0, 0]


def test_what_makes_a_new_recipe(card: Any) -> None:
    x = torch.zeros(4, 4, device="hpu")
    card.mark_step()
    x + 1
    card.mark_step()
    assert compiles_of(card, lambda: x + 1) == 0
    assert compiles_of(card, lambda: x + 2) == 1  # a number folded in
    assert compiles_of(card, lambda: x[:2] + 1) == 1  # a shape
    assert compiles_of(card, lambda: x[2:] + 1) == 1  # an offset
    assert compiles_of(card, lambda: x.t() + 1) == 1  # strides
    assert compiles_of(card, lambda: x.bfloat16() + 1) == 1  # a type
    y = x.clone()
    card.mark_step()
    assert compiles_of(card, lambda: x * x) == 1  # one tensor twice
    assert compiles_of(card, lambda: x * y) == 1  # or two


def test_a_compile_names_the_line_that_differs(card: Any) -> None:
    x = hpu(1, 2)

    def step(number: int) -> None:
        y = x * 3
        y - number  # the culprit
        card.mark_step()

    step(1)
    step(2)
    line = step.__code__.co_firstlineno + 2
    assert sum(f"{THIS_FILE}:{line}" in where for where in card.counters.lines("lazy compile")) == 1


def test_eager_mode_compiles_each_op_and_ignores_markers(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "lazy", False)
    x = hpu(1, 2)
    before = card.counters.compiles
    x + 1
    x + 1
    x * 2
    card.mark_step()
    assert card.counters.compiles - before == 2
    assert card.counters.mark_steps == 0


def test_c32_compiles_after_warm_up(card: Any) -> None:
    x = hpu(1, 2)
    x + 1
    card.seal()
    x + 1
    card.mark_step()
    assert card.counters.late_compiles == 0
    x + 2
    card.mark_step()
    assert card.counters.late_compiles == 1
    card.strict = True
    x + 3
    with pytest.raises(RuntimeError, match="after warm-up"):
        card.mark_step()


# -- the card --


def test_memory_falls_and_returns(card: Any) -> None:
    free, limit = torch.hpu.mem_get_info()
    assert limit == int(94.62 * 2**30)
    kv = torch.zeros(1 << 20, dtype=torch.bfloat16, device="hpu")
    view = kv.view(2, -1)[1]
    assert torch.hpu.mem_get_info()[0] == free - (2 << 20)
    del kv
    assert torch.hpu.mem_get_info()[0] == free - (2 << 20)
    del view
    assert torch.hpu.mem_get_info()[0] == free


def test_second_device_is_refused(card: Any) -> None:
    for use in (
        lambda: torch.hpu.set_device(1),
        lambda: torch.ones(1).to("hpu:1"),
        lambda: torch.zeros(1, device="hpu:1"),
    ):
        with pytest.raises(RuntimeError, match="one device"):
            use()


def test_s10_a_forked_process_may_not_use_it(card: Any) -> None:
    x = hpu(1)
    child = os.fork()
    if child == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Operands are float32, so 4 bytes an element, and indices int64.
@pytest.mark.parametrize(
    ("run", "read", "moved"),
    [
        (lambda kv, x: kv + 1, 32, 64),
        (lambda kv, x: kv.mul_(2), 32, 64),
        (lambda kv, x: kv.add_(x), 32, 96),
        (lambda kv, x: kv.add_(kv), 64, 96),  # the target, and an operand of the same memory
        (lambda kv, x: x.add_(kv), 32, 96),
        (lambda kv, x: kv[1:].mul_(2), 24, 48),
        (lambda kv, x: kv.copy_(x), 0, 64),
        (lambda kv, x: kv.fill_(1), 0, 32),
        (lambda kv, x: kv.zero_(), 0, 32),
        (lambda kv, x: kv.normal_(), 0, 32),
        (lambda kv, x: torch.add(x, 1, out=kv), 0, 64),
        (lambda kv, x: torch._foreach_mul_([kv, x], 2), 32, 128),
        # Of a target with indices, the elements that they name: 1 row of 2, and 8 bytes of index.
        (lambda kv, x: kv.index_copy_(0, ids(3), x[:1]), 0, 8 + 8 + 8),
        (lambda kv, x: kv.index_fill_(0, ids(3), 1.0), 0, 8 + 8),
        (lambda kv, x: kv.index_add_(0, ids(3), x[:1]), 8, 8 + 8 + 16),
        (lambda kv, x: kv.index_reduce_(0, ids(3), x[:1], "amax"), 8, 8 + 8 + 16),
        (lambda kv, x: kv.index_put_((ids(3),), x[:1]), 0, 8 + 8 + 8),
        (lambda kv, x: kv.index_put_((ids(3),), x[:1], accumulate=True), 8, 8 + 8 + 16),
        (lambda kv, x: kv.__setitem__((slice(None), ids(1)), x[:, :1]), 0, 8 + 16 + 16),
        (lambda kv, x: kv.scatter_(0, ids(3, 3).view(1, 2), x[:1]), 0, 16 + 8 + 8),
        (lambda kv, x: kv.scatter_add_(0, ids(3, 3).view(1, 2), x[:1]), 8, 16 + 8 + 16),
        (lambda kv, x: kv.scatter_reduce_(0, ids(3, 3).view(1, 2), x[:1], "amax"), 8, 16 + 8 + 16),
        (lambda kv, x: kv.put_(ids(3), x[0, :1]), 0, 8 + 4 + 4),
        # Never more than the target has, however often an index comes.
        (lambda kv, x: kv[:1].index_add_(0, ids(0, 0, 0), x[:3]), 8, 24 + 24 + 16),
        # Expanded operands, and windows that overlap, count once; results are whole.
        (lambda kv, x: kv.expand(4, 4, 2) * 1, 32, 32 + 128),
        (lambda kv, x: kv.expand(4, 4, 2).clone(), 32, 32 + 128),
        (lambda kv, x: kv.view(8).unfold(0, 4, 1) * 1, 32, 32 + 80),
        (lambda kv, x: kv[:, :1] * 1, 16, 32),
        (lambda kv, x: kv.expand(4, 4, 2).index_select(1, ids(0, 2)), 16, 16 + 16 + 64),
        # A gather reads what it returns.
        (lambda kv, x: kv.index_select(0, ids(0, 0)), 16, 16 + 16 + 16),
    ],
)
@pytest.mark.parametrize("compile_only", [False, True])
def test_bytes(card: Any, run: Callable[..., Any], read: int, moved: int, compile_only: bool) -> None:
    kv, x = (torch.zeros(4, 2, device="hpu") for _ in range(2))
    card_emulator.tag_kv(kv)
    card.compile_only = compile_only
    card.next_step()
    run(kv, x)
    step = card.next_step()
    assert (step.kv_bytes_read, step.bytes_moved) == (read, moved)
