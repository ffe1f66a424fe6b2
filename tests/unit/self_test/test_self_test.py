"""A card that is right passes every check; one that is wrong in one thing fails the check of that thing alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.cards import CardAttention, CardGraphs, CardMemory, Ranks, ThreadGroup, make_card
from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.metadata import AttentionCall
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.devices.base import DeviceBackend
from vllm_gaudi_spec.devices.cpu.backend import CpuWeights
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.filters import ROUNDING
from vllm_gaudi_spec.sampling.rules.registry import TORCH
from vllm_gaudi_spec.self_test import run
from vllm_gaudi_spec.self_test.attention import check_fp8_kv
from vllm_gaudi_spec.self_test.result import FAILED, NOT_CHECKED, PASSED, CheckResult, Result, SelfTestError
from vllm_gaudi_spec.self_test.run import CHECKS, self_test
from vllm_gaudi_spec.self_test.subject import Failed, Subject

NEEDS_RANKS = {run.COLLECTIVES}
# Of the card in these tests, which keeps KV in the model's dtype.
HAS_NOT = {run.FP8_KV}
EVERY_FEATURE = {check.needed_by for check in CHECKS}


def statuses(result: Result, status: str) -> set[str]:
    return {check.name for check in result.checks if check.status == status}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_correct_device_passes(dtype: torch.dtype) -> None:
    result = self_test(make_card(), dtype)
    assert not result.failed, result.failed
    assert statuses(result, NOT_CHECKED) == NEEDS_RANKS | HAS_NOT
    result.refuse(EVERY_FEATURE)
    assert result.summarize().startswith("13 checks passed in ")
    assert result.summarize().endswith("; collectives not checked: there is one rank")
    assert all(result.passed(check.name) == (check.name not in NEEDS_RANKS | HAS_NOT) for check in CHECKS)


def plain_cast(arithmetic: HostArithmetic, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return HostArithmetic.cast(arithmetic, x, inverse)


def lose_small_numbers(arithmetic: HostArithmetic, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Lose numbers below 2**-6, where e4m3 numbers lose their bits one by one."""
    found = plain_cast(arithmetic, x, inverse)
    return found.masked_fill(found.abs() < 2.0**-6, 0.0)


def overflow(arithmetic: HostArithmetic, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Overflow as older releases of torch do, and a card may (quirk Q01)."""
    return plain_cast(arithmetic, x, inverse).masked_fill((x * inverse).abs() > 464.0, torch.nan)


def casting(cast: Callable[..., torch.Tensor]) -> Callable[[float], HostArithmetic]:
    return type("Arithmetic", (HostArithmetic,), {"cast": cast})


@pytest.mark.parametrize(
    ("arithmetic", "found"),
    [
        # This cast multiplies by the scale itself (quirk Q05).
        (casting(lambda own, x, inverse: plain_cast(own, x, 1 / inverse)), r"and not as .* in a chunk, by scale 0\.25"),
        (lambda largest: HostArithmetic(240.0), r"reads as -?60 and not as -?64 in a chunk, by scale 0\.25"),
        (casting(overflow), r"reads as nan and not as .* in a chunk, by scale 0\.25"),
        (casting(lose_small_numbers), r"reads as -?0 and not as -?0\.00.* in a chunk, by scale 0\.25"),
        (casting(lambda own, x, inverse: plain_cast(own, x, inverse.flatten()[0])), r"in a chunk, by scale 0\.5"),
    ],
    ids=["multiplies", "cuts at 240", "overflows", "no small numbers", "one scale"],
)
def test_wrong_fp8_kv_fails(arithmetic: Callable[[float], HostArithmetic], found: str) -> None:
    class Wrong(CpuWeights):
        fp8_arithmetic = staticmethod(arithmetic)

    wrong = replace(load_backend("cpu"), weights=Wrong())
    with pytest.raises(Failed, match=found):
        check_fp8_kv(Subject(backend=wrong, dtype=torch.float32, group=None, seconds=1.0))


def test_fp8_kv_that_decodes_misread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of their own reads it for one query a row, and on a Gaudi over lists of blocks."""
    original = torch_ops.attend

    def wrong(query_THD: torch.Tensor, kv_cache: torch.Tensor, call: AttentionCall, *more: Any) -> torch.Tensor:
        return original(query_THD, kv_cache, call, *more) * (2 if call.num_queries == 1 else 1)

    monkeypatch.setattr(torch_ops, "attend", wrong)
    with pytest.raises(Failed, match=r"reads as .* and not as .* in decodes, by scale 0\.25"):
        check_fp8_kv(Subject(backend=load_backend("cpu"), dtype=torch.float32, group=None, seconds=1.0))


def on_each_rank(test: Callable[[ThreadGroup], Result], size: int = 2) -> list[Result]:
    ranks = Ranks(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(test, [ranks.group(rank) for rank in range(size)]))


class SharedMemory(CardMemory):
    """Of threads, which cannot count what is theirs."""

    def free_bytes(self) -> int | None:
        return None


def on_card_of(group: ThreadGroup) -> Result:
    card = make_card(memory=SharedMemory(torch.device("cpu"), CardGraphs()))
    return self_test(card, torch.bfloat16, group, seconds=0.2)


def test_ranks_pass_together() -> None:
    for result in on_each_rank(on_card_of, size=3):
        assert statuses(result, PASSED) == {check.name for check in CHECKS} - {run.MEMORY, *HAS_NOT}


# ---- faults --------------------------------------------------------------------------------------------------


class Computes(TorchFunctionMode):
    """Some functions of torch, as a card has them."""

    def __init__(self, functions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions
        self.is_on = False

    def __enter__(self) -> Any:
        self.is_on = True
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.is_on = False
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))


def computing(functions: dict[Any, Callable[..., Any]]) -> DeviceBackend:
    """In graphs and outside of them; what runs on the host does not."""
    card = Computes(functions)

    def on_card(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if card.is_on:  # a rule within a graph
                return function(*args, **named)
            with card:
                return function(*args, **named)

        return call

    class Graphs(CardGraphs):
        def graph(self, function: Any) -> Any:
            return on_card(super().graph(function))

    return make_card(graphs=Graphs(), rules=TORCH._replace(strict_random=on_card(TORCH.strict_random)))


def with_memory(**methods: Any) -> DeviceBackend:
    return make_card(memory=type("Memory", (CardMemory,), methods)(torch.device("cpu"), CardGraphs()))


def with_graphs(wrap: Callable[[CardGraphs, Any, Any], Any]) -> DeviceBackend:
    """Wrap each graph; `wrap` gets its function as well."""

    class Graphs(CardGraphs):
        def graph(self, function: Any) -> Any:
            return wrap(self, function, super().graph(function))

    return make_card(graphs=Graphs())


def invert_bools(memory: CardMemory, host: torch.Tensor) -> torch.Tensor:
    return ~host if host.dtype == torch.bool else CardMemory.upload(memory, host)


def shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift, but with an error of a bit in one case."""
    return (x >> bits) ^ (1 if bits == 15 else 0)


def logarithms_are_coarse() -> DeviceBackend:
    """All of them, by the last three bits."""

    def coarse(function: Any) -> Any:
        return lambda x: function(x).mul_(1 + 2.0**-20)

    tensor = torch.Tensor
    return computing({name: coarse(name) for name in (tensor.log, tensor.log_, tensor.log1p, tensor.log1p_)})


def keep_too_many(logits: torch.Tensor, min_p: Any, top_k: torch.Tensor, top_p: torch.Tensor, *rest: Any) -> Any:
    """Shift thresholds by 2 % of the probability, as rounding them would."""
    return TORCH.filter_logits(logits, min_p, top_k, top_p * 1.02, *rest)


def share_noise(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, positions: Any) -> torch.Tensor:
    return TORCH.sample_random(logits, temperature, keys, torch.zeros_like(positions))


class WritesPadding(CardAttention):
    """Writes padding, which has the slots of block 0, to a row's block."""

    def write_kv(self, key_TKD: Any, value_TKD: Any, kv_cache: Any, slots_T: Any, spec: Any) -> None:
        slots_T = torch.where(slots_T < spec.block_size, slots_T + spec.block_size, slots_T)
        super().write_kv(key_TKD, value_TKD, kv_cache, slots_T, spec)


class LosesGroups(CardAttention):
    """Spoils the groups after the first in long chunks, as a Gaudi 3 was seen to: quirk A31."""

    def attend(self, query_THD: Any, kv_cache: Any, call: Any, spec: Any) -> torch.Tensor:
        attended = super().attend(query_THD, kv_cache, call, spec)
        if call.num_queries >= 1024:
            attended.view(len(query_THD), spec.num_heads, -1)[:, spec.num_heads // spec.num_kv_heads :] *= 2
        return attended


class Sees(CardAttention):
    """Attention that is changed for calls of some number of queries."""

    def __init__(self, num_queries: int, change: Callable[[AttentionCall, Any], tuple[AttentionCall, Any]]) -> None:
        super().__init__()
        self._num_queries, self._change = num_queries, change

    def attend(self, query_THD: Any, kv_cache: Any, call: Any, spec: Any) -> torch.Tensor:
        if call.num_queries == self._num_queries:
            call, spec = self._change(call, spec)
        return super().attend(query_THD, kv_cache, call, spec)


def sees_padding(num_queries: int) -> DeviceBackend:
    """See the key after a query's own: padding, at the end of a row."""
    moved = lambda call, spec: (replace(call, starts_B=call.starts_B + 1, _plans={}), spec)  # noqa: E731
    return make_card(attention=Sees(num_queries, moved))


def ends_after_512_keys(num_queries: int) -> DeviceBackend:
    """Ignore keys after the first 512, as an NPU does (quirk A01)."""

    def change(call: AttentionCall, spec: Any) -> tuple[AttentionCall, Any]:
        return replace(call, starts_B=call.starts_B.clamp(max=512 - num_queries), _plans={}), spec

    return make_card(attention=Sees(num_queries, change))


def has_window(num_queries: int, size: int | None) -> DeviceBackend:
    def change(call: AttentionCall, spec: Any) -> tuple[AttentionCall, Any]:
        return call, replace(spec, sliding_window=size) if spec.sliding_window is not None else spec

    return make_card(attention=Sees(num_queries, change))


def lose_shared_prefix(call: AttentionCall, spec: Any) -> tuple[AttentionCall, Any]:
    """Let each block belong to one row only."""
    table_BW, flat = call.block_table_BW.clone(), call.flat
    owner = {int(block): row for row, blocks in enumerate(table_BW) for block in blocks}
    for row, blocks in enumerate(table_BW):
        blocks[torch.tensor([owner[int(block)] != row for block in blocks])] = 0
    if flat is not None:
        entries = flat.ids.unflatten(0, (len(flat.rows_N), -1)).tolist()
        pairs = zip(entries, flat.rows_N.tolist(), strict=True)
        lost = torch.tensor([any(block and owner[block] != row for block in blocks) for blocks, row in pairs])
        flat = replace(flat, rows_N=flat.rows_N.masked_fill(lost, call.num_rows))
    return replace(call, block_table_BW=table_BW, flat=flat, _plans={}), spec


def repeat_first_lengths(graphs: CardGraphs, function: Any, run: Any) -> Any:
    first: list[torch.Tensor] = []

    def call(*args: Any) -> Any:
        if function.__name__ != "self_test_attend":
            return run(*args)
        first.append(args[0].clone())
        return run(first[0], *args[1:])

    return call


def repeat_first_counts(graphs: CardGraphs, function: Any, run: Any) -> Any:
    first: dict[str, torch.Tensor] = {}

    def call(*args: Any) -> Any:
        result = run(*args)
        if not isinstance(result, Verification):
            return result
        return result._replace(num_sampled_B=first.setdefault("call", result.num_sampled_B.clone()))

    return call


def compile_each_call(graphs: CardGraphs, function: Any, run: Any) -> Any:
    def call(*args: Any) -> Any:
        graphs.num_compiled += 1
        return run(*args)

    return call


# A device, the check that fails on it, and what is measured. Prompts have 32 queries here, verify steps 4.
FAULTS: dict[str, tuple[Callable[[], DeviceBackend], str, str]] = {
    "bools arrive inverted": (lambda: with_memory(upload=invert_bools), run.COPIES, "5 of 5 numbers of bool changed"),
    "a shift is off by a bit": (lambda: computing({torch.Tensor.__rshift__: shift}), run.HASH, "(noise of tokens)"),
    "logarithms are coarse": (logarithms_are_coarse, run.NOISE, "ulp from float64's"),
    "top-p keeps too many tokens": (
        lambda: make_card(rules=TORCH._replace(filter_logits=keep_too_many)),
        run.SAMPLING,
        "top-p 0.9) kept",
    ),
    "positions share their noise": (
        lambda: make_card(rules=TORCH._replace(sample_random=share_noise)),
        run.SAMPLING,
        "a token of probability",
    ),
    "padding is written": (lambda: make_card(attention=WritesPadding()), run.KV_WRITES, "do not read as they were"),
    "decodes see padding": (lambda: sees_padding(1), run.ATTENTION, "decodes differ by up to"),
    "verify steps see padding": (
        lambda: sees_padding(4),
        run.VERIFY_ATTENTION,
        "verify steps of 4 positions differ by up to",
    ),
    "prompts see padding": (lambda: sees_padding(32), run.PROMPT_ATTENTION, "prompt chunks differ by up to"),
    "long decodes end": (lambda: ends_after_512_keys(1), run.ATTENTION, "long decodes with a shared prefix differ"),
    "long verify steps end": (lambda: ends_after_512_keys(4), run.VERIFY_ATTENTION, "long verify steps of 4 positions"),
    "a key before a window": (lambda: has_window(1, 301), run.ATTENTION, "long decodes under a window of 300"),
    "verify without a window": (
        lambda: has_window(4, None),
        run.VERIFY_ATTENTION,
        "under a window of 300 differ by up to",
    ),
    "prompts without a window": (lambda: has_window(32, None), run.PROMPT_ATTENTION, "prompt chunks under a window"),
    "long chunks lose groups": (
        lambda: make_card(attention=LosesGroups()),
        run.PROMPT_ATTENTION,
        "prompt chunks of 1024 differ by up to",
    ),
    "verify steps lose a shared prefix": (
        lambda: make_card(attention=Sees(4, lose_shared_prefix)),
        run.VERIFY_ATTENTION,
        "with a shared prefix differ by up to",
    ),
    "a replay has the first lengths": (
        lambda: with_graphs(repeat_first_lengths),
        run.REPLAYED_ATTENTION,
        "run 2 of a graph of 1 queries per row differs by up to",
    ),
    "a replay has the first counts": (
        lambda: with_graphs(repeat_first_counts),
        run.CAPTURED_STEP,
        "in run 2 of a captured verify step",
    ),
    "each call compiles": (lambda: with_graphs(compile_each_call), run.SECOND_CALL, "compiled 2 more"),
    "downloads leave late": (
        lambda: with_memory(start_download=lambda memory, tensor: tensor.clone),
        run.DOWNLOADS,
        "returned another step's values, the first 8 at step 1",
    ),
    "free memory stays the same": (
        lambda: with_memory(free_bytes=lambda memory: 1 << 30),
        run.MEMORY,
        "free memory fell by 0.0 KiB when 128.0 MiB",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_only_its_check(fault: str) -> None:
    make, name, measured = FAULTS[fault]
    assert_only_fails(self_test(make(), torch.float32, seconds=0.2), name, measured)


def assert_only_fails(result: Result, name: str, measured: str) -> None:
    assert statuses(result, FAILED) == {name}, result.failed
    assert not result.passed(name)
    with pytest.raises(SelfTestError) as error:
        result.refuse(EVERY_FEATURE)
    message = str(error.value)
    assert message.startswith(f"The self-test of card failed. {name}: ")
    assert measured in message
    assert next(check.advice for check in CHECKS if check.name == name) in message
    assert message.endswith("Set VGS_SELF_TEST=0 to skip the self-test.")
    assert "\n" not in message


class Forgetful(ThreadGroup):
    """Its sums are of other ranks."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(input_) - input_


class Crossed(ThreadGroup):
    """Its parts are in another order."""

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(input_)[::-1], dim=dim)


@pytest.mark.parametrize(
    ("group", "measured"),
    [
        (Forgetful, "all_reduce of 2 ranks in a captured graph returned"),
        (Crossed, "all_gather of 2 ranks in a captured graph"),
    ],
)
def test_wrong_collectives_fail(group: type[ThreadGroup], measured: str) -> None:
    for result in on_each_rank(lambda given: on_card_of(group(given._ranks, given.rank_in_group))):
        assert_only_fails(result, run.COLLECTIVES, measured)


def test_every_check_has_a_fault() -> None:
    """Those of FP8 have a test of their own."""
    assert {name for _, name, _ in FAULTS.values()} | NEEDS_RANKS | HAS_NOT == {check.name for check in CHECKS}


def test_exception_fails_one_check_and_others_still_run() -> None:
    def fail(memory: CardMemory, tensor: torch.Tensor) -> Any:
        raise RuntimeError("synStatus 26\n[Generic failure]")

    result = self_test(with_memory(start_download=fail), torch.float32, seconds=0.2)
    (failed,) = result.failed
    assert (failed.name, failed.detail) == (run.DOWNLOADS, "RuntimeError: synStatus 26 [Generic failure]")
    assert statuses(result, NOT_CHECKED) == NEEDS_RANKS | HAS_NOT


def test_failed_check_of_unused_feature_is_not_fatal() -> None:
    def failed(needed_by: str) -> Result:
        check = CheckResult(name="c", status=FAILED, detail="d", advice="a", needed_by=needed_by, seconds=0.0)
        return Result(device="card", mode="eager", dtype="float32", checks=(check,))

    failed("async scheduling").refuse(EVERY_FEATURE - {"async scheduling"})
    for needed_by, features in (("async scheduling", {"async scheduling"}), ("", set[str]())):
        with pytest.raises(SelfTestError):
            failed(needed_by).refuse(features)


def test_tokens_of_captured_step_are_not_near_ties() -> None:
    """Kernels that round otherwise when captured choose the same tokens."""
    from vllm_gaudi_spec.sampling.noise import Stream, gumbel
    from vllm_gaudi_spec.self_test import graphs

    numbers: set[int] = set()
    for seed in range(graphs._STEPS):
        step = graphs._step(make_card(), seed)
        tokens_V = torch.arange(step.logits_BQV.shape[-1], dtype=torch.int32)
        noise = gumbel(step.keys_B2, step.positions_BQ, Stream.TARGET, tokens_V)
        scores = step.logits_BQV + noise * (step.temperature_B > 0)[:, None, None]
        first, second = scores.topk(2).values.unbind(-1)
        assert (first - second).min() > 1e-3
        numbers |= set(TORCH.strict_random(*step).num_sampled_B.tolist())
    assert numbers == {1, 2, 3, 4}, "0 to 3 drafts are accepted"


def test_sums_of_checked_filters_are_not_near_p() -> None:
    """Sums that round otherwise keep the same tokens."""
    from vllm_gaudi_spec.self_test import sampling

    logits, (min_p, top_k, top_p) = sampling.make_filter_inputs()
    kept = sampling.keep_by_sort(logits, min_p, top_k, top_p)
    for change in (1 - 4 * ROUNDING, 1 + 4 * ROUNDING):
        assert torch.equal(sampling.keep_by_sort(logits, min_p * change, top_k, top_p * change), kept)
