"""Emulated HPU graphs: what is baked in at capture, what is replayed, and what a capture refuses."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import card_emulator
from card_emulator import report
from card_emulator.testing import graph, hpu

THIS_FILE = os.path.basename(__file__)


def compile_only() -> Any:
    from habana_frameworks.torch.internal.bridge_config import env_setting

    return env_setting("PT_COMPILE_ONLY_MODE", True)


def test_l09_l24_python_values_are_baked(card: Any) -> None:
    factor = [2.0]
    run = graph(lambda x: x * factor[0])
    assert run(hpu(1)).item() == 2.0
    factor[0] = 3.0
    assert run(hpu(1)).item() == 2.0


def test_l05_outputs_are_overwritten_by_the_next_replay(card: Any) -> None:
    run = graph(lambda x: x + 1)
    first = run(hpu(1))
    view = first[:1]
    second = run(hpu(5))
    assert first is second
    assert (first.item(), view.item()) == (6.0, 6.0)
    run(hpu(7))
    assert view.item() == 8.0


def test_l02_l03_a_new_geometry_or_value_is_a_new_graph(card: Any) -> None:
    run = graph(lambda x, flag, *rest: x + 1 if flag else x - 1)
    x = torch.zeros(4, 4, device="hpu")
    for args in ((x, True), (x[:2], True), (x.t(), True), (x[1:3], True), (x, False), (x, 2), (x, True, x)):
        run(*args)
    assert card.counters.graph_captures == 7
    run(x, True)
    assert card.counters.graph_captures == 7


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda x: (x, 1), lambda x: (x.int(), 1), "argument 0: torch.float32 and now torch.int32"),
        (lambda x: (x, -1), lambda x: (x, -2), "argument 1: -1 and now -2"),
        (lambda x: (x, 1), lambda x: (x, True), "argument 1: .*int.* and now .*bool"),
        # One tensor twice is another wiring.
        (lambda x: (x, x), lambda x: (x, x.clone()), "argument 1: 0 and now 1"),
    ],
)
def test_l01_l33_a_graph_is_found_by_a_hash(
    card: Any, first: Callable[..., Any], second: Callable[..., Any], words: str
) -> None:
    """Shapes, views and Python's hash of the rest, and nothing is compared."""
    x = torch.zeros(4, device="hpu")
    run = graph(lambda x, other: x * other)
    run(*first(x))
    with pytest.raises(RuntimeError, match=f"its key is a hash.*{words}"):
        run(*second(x))
    card.hostile = False
    run = graph(lambda x, other: x * other)
    run(*first(x))
    run(*second(x))
    assert card.counters.graph_captures == 3


def test_l01_a_graph_takes_what_is_stored_alike(card: Any) -> None:
    """int64 has 32 bits on the card, so a graph that was captured with int32 reads and writes it, and the other way."""
    table = hpu(0, 10, 20, 30)

    def look_up(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        positions.add_(1)
        return table.index_select(0, positions)

    for first, second in ((torch.int32, torch.int64), (torch.int64, torch.int32)):
        run = graph(look_up)
        run(table, positions=torch.tensor([0, 1], dtype=first, device="hpu"))
        positions = torch.tensor([1, 2], dtype=second, device="hpu")
        assert run(table, positions=positions).tolist() == [20.0, 30.0]
        assert (positions.tolist(), positions.dtype) == ([2, 3], second)
        with pytest.raises(RuntimeError, match=r"positions: torch\.int32 and now torch\.float32"):
            run(table, positions=positions.float())
    assert card.counters.graph_captures == 2


def test_l04_the_second_call_compiles_a_copy_of_what_is_not_read(card: Any) -> None:
    run = graph(lambda x, *unread: x + 1)
    compiled = []
    for number in range(4):
        run(hpu(number), hpu(number, 2), torch.zeros(3, device="hpu"))
        card.mark_step()
        compiled.append(card.counters.lazy_compiles)
    assert compiled[1] == compiled[0] + 1
    assert compiled[3] == compiled[2]  # the recipe of the inputs themselves came with the second call
    copied = [event.what for event in card.counters.events if event.kind == "copy of an unread input"]
    assert copied == ["1 of Graph", "2 of Graph"]
    card.hostile = False
    before = card.counters.lazy_compiles
    run = graph(lambda x, *unread: x + 1)
    for number in range(2):
        run(hpu(number), hpu(number, 2, 3, 4, 5))
    assert card.counters.lazy_compiles == before


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, given: x + 1,
        lambda x, given: (x + 1, given),
        lambda x, given: (given * 2, x + 1)[1],  # of what nobody keeps, a lazy graph has nothing
        lambda x, given: (given.view(-1), x + 1)[1],
    ],
)
def test_l32_an_argument_that_is_not_read_is_written_over(card: Any, forward: Callable[..., Any]) -> None:
    """That of the first call, by every later one's, compile-only mode apart."""
    run, kept = graph(forward), hpu(7)
    run(hpu(1), kept)
    with compile_only():
        run(hpu(1), hpu(8))
    assert kept.item() == 7.0
    run(hpu(2), hpu(9))
    assert kept.item() == 9.0
    card.hostile = False
    run(hpu(2), hpu(10))
    assert kept.item() == 9.0


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


@dataclasses.dataclass
class Metadata:
    pair: Pair
    sizes: list[int]


class Opaque:
    """With a hash like any object's, its identity, so that each is a graph of its own."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair


@dataclasses.dataclass(slots=True)
class Slotted:
    value: torch.Tensor


def test_l26_structures_of_arguments(card: Any) -> None:
    run = graph(lambda pair, sizes, extra: pair.left * sizes[0] + extra["x"])
    for number, size in ((1.0, 2), (3.0, 2), (3.0, 4)):
        out = run(Pair(hpu(number), None), [size], {"x": hpu(1)})
        assert out.item() == number * size + 1
    assert card.counters.graph_captures == 2
    run = graph(lambda meta: meta.pair.left * 2)
    for _ in range(2):
        run(Opaque(Pair(hpu(1), None)))
    assert card.counters.graph_captures == 4
    with pytest.raises(TypeError, match="hash"):
        run(Metadata(Pair(hpu(1), None), [1]))
    card.hostile = False
    run(Metadata(Pair(hpu(1), None), [1]))
    assert run(Metadata(Pair(hpu(2), None), [1])).item() == 4.0
    assert card.counters.graph_captures == 5


@dataclasses.dataclass(eq=False)
class Holder:
    value: torch.Tensor


def test_l26_tensors_in_other_objects_are_no_inputs(card: Any) -> None:
    """A graph goes on with those that it was made with."""
    for card.hostile, expected in ((True, 2.0), (False, 10.0)):
        run, holder = graph(lambda holder: holder.value * 2), Holder(hpu(1))
        run(holder)
        holder.value = hpu(5)
        assert run(holder).item() == expected


def test_l26_tensors_of_a_result_are_found_in_what_has_a_dict(card: Any) -> None:
    assert graph(lambda x: Opaque(Pair(x + 1, None)))(hpu(1)).pair.left.item() == 2.0
    run = graph(lambda x: [Slotted(x + 1)])
    with pytest.raises(RuntimeError, match="has slots"):
        run(hpu(1))
    card.hostile = False
    assert run(hpu(1))[0].value.item() == 2.0


def test_l28_state_is_kept_by_reference_and_updated_in_place(card: Any) -> None:
    state = torch.zeros(4, device="hpu")

    def forward(slot: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state.index_copy_(0, slot, value)
        return state.sum(0, keepdim=True)

    run = graph(forward)
    assert run(hpu(1).long(), hpu(5)).item() == 5.0
    assert run(hpu(2).long(), hpu(7)).item() == 12.0
    state.fill_(1)
    assert run(hpu(0).long(), hpu(2)).item() == 5.0
    assert state.tolist() == [2.0, 1.0, 1.0, 1.0]


def test_l09_l10_l29_bypass_limit_and_clearing(card: Any) -> None:
    run = graph(lambda x: x + 1, max_graphs=1)
    assert run(hpu(1), bypass_hpu_graphs=True).item() == 2.0
    assert card.counters.graph_captures == 0
    run(hpu(1))
    assert run(hpu(1, 2)).tolist() == [2.0, 3.0]
    assert card.counters.graph_captures == 1
    held = card.graph_bytes
    assert held > 0
    run.clear_cache()
    assert card.graph_bytes == 0
    run(hpu(1))
    assert (card.counters.graph_captures, card.graph_bytes) == (2, held)


def test_l29_r02_the_graph_reserve_ends(card: Any) -> None:
    card.graph_reserve = 4096
    run = graph(lambda x: x + 1)
    run(torch.zeros(512, device="hpu"))
    with pytest.raises(torch.OutOfMemoryError, match="reserve"):
        run(torch.zeros(1024, device="hpu"))


def test_l18_compile_only_then_replay(card: Any) -> None:
    state = torch.zeros(2, device="hpu")
    weight = hpu(2)

    def forward(x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        y = (x @ x.t()).float().sum().reshape(1) * weight
        state.index_copy_(0, slot, y)
        return y.topk(1).values

    run = graph(forward)
    with compile_only():
        run(torch.zeros(2, 3, device="hpu"), torch.zeros(1, dtype=torch.int64, device="hpu"))
        run(torch.zeros(2, 3, device="hpu"), torch.zeros(1, dtype=torch.int64, device="hpu"))
    assert (card.counters.graph_captures, card.counters.graph_replays, card.counters.flops) == (1, 0, 0)
    assert state.tolist() == [0.0, 0.0]
    out = run(torch.ones(2, 3, device="hpu"), hpu(1).long())
    assert (out.item(), state.tolist()) == (24.0, [0.0, 24.0])
    assert (card.counters.graph_captures, card.counters.graph_replays) == (1, 1)


def test_l16_l17_compile_only_computes_nothing(card: Any) -> None:
    x = hpu(1, 2)
    with compile_only():
        y = x * 2
        x.add_(1)
        assert y.cpu().shape == (2,)
        for read in (lambda: y[0].item(), lambda: bool(y[0]), y.tolist, y.nonzero):
            with pytest.raises(RuntimeError, match="compile-only"):
                read()
    assert x.tolist() == [1.0, 2.0]
    assert card.counters.garbage_reads == 0
    assert min(y.tolist()) > 1e9, "garbage, and not zeros, which pass for many a table"
    assert card.counters.garbage_reads == 1
    with compile_only():
        index = torch.zeros(1, dtype=torch.int64, device="hpu")
    with pytest.raises(IndexError, match="out of range"):
        x.index_select(0, index)
    card.hostile = False
    with compile_only():
        y = x * 2
    assert y.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x + x[0].item(),
        lambda x: x.cpu().to("hpu"),
        lambda x: x if bool(x[0] > 0) else -x,
        lambda x: [x, x.tolist()],
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_fill_(x > 0, 1).unique(),
        lambda x: torch.bincount(x.long()),
        lambda x: x.mode(),
        lambda x: x + torch.ones(2).to("hpu"),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: torch.hpu.synchronize(),
    ],
)
def test_l07_l09_l30_o17_a_capture_refuses(card: Any, run: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=f"graph capture.*{THIS_FILE}"):
        graph(run)(hpu(1, 2))
    assert card.capture is None
    with pytest.raises(RuntimeError, match="an exception interrupted the capture"):
        hpu(1)
    card.hostile, card.blocked = False, None
    with pytest.raises(RuntimeError, match="graph capture"):
        graph(run)(hpu(1, 2))
    assert graph(lambda x: x + 1)(hpu(1)).item() == 2.0


def test_l08_a_capture_refuses_another(card: Any) -> None:
    inner = graph(lambda x: x + 1)
    with pytest.raises(RuntimeError, match="while another graph is being captured"):
        graph(lambda x: inner(x) * 2)(hpu(1))
    card.blocked = None
    assert graph(lambda x: inner(x, bypass_hpu_graphs=True) * 2)(hpu(1)).item() == 4.0


def assign_column(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 1
    return x


@pytest.mark.parametrize(
    "run",
    [
        lambda x, state: state.view(-1).index_copy_(0, x[0, :1].long(), x[0, :1]),
        lambda x, state: state[0].add_(1),
        lambda x, state: assign_column(state),
        lambda x, state: assign_column(x),
        lambda x, state: x.view(-1).zero_(),
    ],
)
def test_l06_no_update_through_views(card: Any, run: Callable[..., Any]) -> None:
    state = torch.zeros(2, 2, device="hpu")
    with pytest.raises(RuntimeError, match=f"changes a view in place.*{THIS_FILE}"):
        graph(lambda x: run(x, state))(torch.zeros(2, 2, device="hpu"))
    card.blocked = None
    # Outside a graph it is an ordinary operation.
    run(torch.zeros(2, 2, device="hpu"), state)


def test_replays_repeat_the_counted_work(card: Any) -> None:
    kv = torch.zeros(16, 8, device="hpu")
    card_emulator.tag_kv(kv)
    run = graph(lambda blocks: kv.index_select(0, blocks) @ kv.t())
    run(hpu(0, 1).long())
    first = card.next_step()
    run(hpu(2, 3).long())
    second = card.next_step()
    assert second.kv_bytes_read == first.kv_bytes_read > 0
    assert second.flops == first.flops == 2 * 2 * 8 * 16
    assert (second.graph_captures, second.graph_replays) == (0, 1)
    assert report.as_json(card)["graphs"][0]["replays"] == 1


def fetch(x: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """As an asynchronous download: behind an event."""
    host.copy_(x, non_blocking=True)
    done = torch.hpu.Event()
    done.record()
    done.synchronize()
    return host


def test_h01_no_event_covers_a_download_into_memory_that_is_not_pinned(card: Any) -> None:
    """The bridge's copy goes through a staging buffer there."""
    x = hpu(1, 2)
    late = fetch(x, torch.empty(2))
    later = x.to("cpu", non_blocking=True)
    assert late.isnan().all()
    assert later.isnan().all()
    torch.hpu.synchronize()
    assert late.tolist() == later.tolist() == [1.0, 2.0]
    assert fetch(x, torch.empty(2, pin_memory=True)).tolist() == [1.0, 2.0]
    card.hostile = False
    assert fetch(x, torch.empty(2)).tolist() == [1.0, 2.0]


def test_l24_random_draws_differ_between_replays(card: Any) -> None:
    run = graph(lambda x: torch.rand_like(x))
    first = run(torch.zeros(8, device="hpu")).tolist()
    assert run(torch.zeros(8, device="hpu")).tolist() != first
