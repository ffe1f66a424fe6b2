"""When the drafter runs, for which rows, and where its drafts are stored."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import make_requests, make_sampling, make_speculation, new_request, step
from tests.support.warm_up import listed
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.drafting.base import DrafterKVSync, DraftingContext
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.drafting.history import RequestHistory
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting, DeviceRowLimits
from vllm_gaudi_spec.drafting.on_host import HostDrafting
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.records import Context, DraftRequest, Drafts, SampledRows, SampleShape, StepResult, Verification
from vllm_gaudi_spec.runner.planning import make_sample_batch
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.sampling.branches import Branch
from vllm_gaudi_spec.sampling.params import Sampling

K = 3
VOCAB = 100


def on_one_rank(drafts: Mapping[str, Sequence[int]] | None) -> bool:
    return drafts is not None


class Counts:
    """A host proposer that counts up from the last token, with one draft more than requested."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, list[int], int]]] = []
        self.forgotten: list[str] = []

    def propose(self, contexts: list[Context]) -> list[Sequence[int]]:
        self.calls.append([(c.req_id, c.tokens_np.tolist(), c.max_drafts) for c in contexts])
        return [[int(c.tokens_np[-1]) + 1 + i for i in range(c.max_drafts)] for c in contexts]

    def forget(self, req_ids: Iterable[str]) -> None:
        self.forgotten += req_ids


class CountsOnDevice:
    drafts_one_by_one = False

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_drafts: set[int] = set()

    def propose(self, request: DraftRequest) -> Drafts:
        self.num_calls += 1
        self.num_drafts.add(request.num_drafts)
        last_B = request.history_RM.view(-1)[request.rows_B * request.history_RM.shape[1] + request.lengths_B - 1]
        tokens_BK = last_B[:, None] + 1 + torch.arange(request.num_drafts)
        return Drafts(tokens_BK.int(), request.max_drafts_B)


class CountsOneByOne(CountsOnDevice):
    drafts_one_by_one = True


def make_context(
    speculation: Speculation,
    requests: Requests,
    recorder: StepRecorder,
    shapes: Shapes,
    sampling: Sampling,
    max_model_len: int,
    hidden_states: Any = None,
) -> DraftingContext:
    """Return the context of a drafter of one layer, with states of size 1, that does not need the target's model."""
    nothing: Any = None
    model_config = SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: sampling.vocab_size)
    spec_config = SimpleNamespace(draft_model_config=SimpleNamespace(get_hidden_size=lambda: 1))
    return DraftingContext(
        speculation=speculation,
        vllm_config=SimpleNamespace(model_config=model_config, speculative_config=spec_config),
        requests=requests,
        recorder=recorder,
        shapes=shapes,
        kv_cache=SimpleNamespace(num_blocks=200, layer_groups=[["layer"]]),
        hidden_states=hidden_states,
        target=nothing,
        drafter=SimpleNamespace(layer_names=["layer"]),
        sampling=sampling,
    )


class HasKV(DrafterKVSync):
    has_kv = True


def on_device(
    proposer: CountsOnDevice, row_limits: DeviceRowLimits, requests: Requests, kv_sync: DrafterKVSync
) -> tuple[DeviceDrafting, StepRecorder]:
    recorder = StepRecorder()
    step_shapes = shapes(max_num_seqs=4, max_tokens=64, max_len=64, drafts=K)
    context = make_context(
        make_speculation(K, smaller_widths=(1,)), requests, recorder, step_shapes, make_sampling(), max_model_len=64
    )
    guard = Guard(independent=True)
    drafting = DeviceDrafting(context, proposer=proposer, row_limits=row_limits, guard=guard, kv_sync=kv_sync)
    recorder.expect(listed(drafting.jobs()))
    return drafting, recorder


def started(drafter_max_len: int | None = None) -> tuple[Requests, DeviceRowLimits, list[str]]:
    """Return three rows with contexts of 2, 6 and 3 tokens; speculation is off for the third."""
    requests = make_requests(max_rows=4)
    off = SamplingParams(max_tokens=50, extra_args={"num_speculative_tokens": 0})
    on = SamplingParams(max_tokens=50)
    new = [
        new_request("a", [10, 11], [1], params=on),
        new_request("b", [20, 21, 22, 23, 24, 25], [2], params=on),
        new_request("c", [30, 31, 32], [3], params=off),
    ]
    requests.apply(step({"a": 2, "b": 6, "c": 3}, new=new))
    row_limits = DeviceRowLimits(requests.backend, 4, make_speculation(K, drafter_max_len, smaller_widths=(1,)), 64)
    return requests, row_limits, ["a", "b", "c"]


def sampled(requests: Requests, names: list[str], tokens: list[list[int]]) -> tuple[StepResult, torch.Tensor]:
    """Return a step in which each row got its tokens, padded by one row, and the new lengths."""
    members = [requests.by_id[name] for name in names]
    width = max(map(len, tokens))
    tokens_BQ = torch.tensor([[*row, *[0] * (width - len(row))] for row in [*tokens, []]], dtype=torch.int32)
    verification = Verification(tokens_BQ, torch.tensor([*map(len, tokens), 1], dtype=torch.int32))
    last = torch.tensor([*(len(member.all_token_ids) - 1 for member in members), -1], dtype=torch.int32)
    rows = torch.tensor([*(member.row for member in members), requests.pad_row])
    requests.advance(rows, last, verification)
    return StepResult(members, verification), last + 1 + verification.num_sampled_B


def waiting(requests: Requests, name: str, length: int) -> list[int]:
    """Return the drafts after a row's last token."""
    row = requests.by_id[name].row
    return requests.history_RM[row, length : length + int(requests.num_drafts_R[row])].tolist()


def after_a_step(drafter_max_len: int) -> tuple[Requests, Counts, HostDrafting, StepResult]:
    """Return a host drafter that ran after a step of all three rows."""
    requests, row_limits, names = started(drafter_max_len)
    proposer = Counts()
    drafting = HostDrafting(proposer, RequestHistory(row_limits, requests, K), VOCAB, on_one_rank)
    drafting.apply(requests)
    step_, _ = sampled(requests, names, [[12, 13], [26], [33]])
    drafting.propose_on_host(step_, K)
    rows_B = torch.tensor([request.row for request in step_.requests])
    requests.put_host_drafts(rows_B, torch.from_numpy(drafting.host_drafts(step_.requests)))  # as the next step does
    return requests, proposer, drafting, step_


def test_host_drafter_gets_only_rows_that_can_use_drafts() -> None:
    requests, proposer, drafting, step_ = after_a_step(drafter_max_len=8)
    # "b" has 7 tokens and room for one more; "c" has speculation off.
    assert proposer.calls == [[("a", [10, 11, 12, 13], 3), ("b", [20, 21, 22, 23, 24, 25, 26], 1)]]
    assert [waiting(requests, *row) for row in (("a", 4), ("b", 7), ("c", 4))] == [[14, 15, 16], [27], []]
    reported = drafting.get_draft_token_ids(step_)
    assert dict(zip(reported.req_ids, reported.draft_token_ids, strict=True)) == {"a": [14, 15, 16], "b": [27], "c": []}


def test_no_drafts_after_stop_token() -> None:
    """The scheduler ends the request there, whatever was accepted after it."""
    requests, row_limits, names = started()
    requests.by_id["a"].params = SamplingParams(max_tokens=50, stop_token_ids=[12])
    # As set by vLLM's front end: min_tokens also masks an ignored end token.
    ignores = requests.by_id["b"].params = SamplingParams(max_tokens=50, ignore_eos=True)
    ignores.update_from_generation_config({}, eos_token_id=26)
    assert 26 in ignores.all_stop_token_ids
    proposer = Counts()
    drafting = HostDrafting(proposer, RequestHistory(row_limits, requests, K), VOCAB, on_one_rank)
    drafting.apply(requests)
    step_, _ = sampled(requests, names, [[12, 13], [26], [33]])
    drafting.propose_on_host(step_, K)
    assert [req_id for req_id, _, _ in proposer.calls[0]] == ["b"]


@pytest.mark.parametrize(("proposer", "num_drafted"), [(CountsOnDevice(), K), (CountsOneByOne(), 1)])
def test_round_is_as_long_as_fewer_drafts_need(proposer: CountsOnDevice, num_drafted: int) -> None:
    """A drafter whose tokens come one by one stops early. For others a shorter round would be one more graph."""
    requests, row_limits, names = started()
    drafting, recorder = on_device(proposer, row_limits, requests, HasKV())
    drafting.apply(requests)
    step_, _ = sampled(requests, names, [[12, 13], [26], [33]])
    batch = SampledRows(requests=step_.requests, ends=[16] * 3, num_queries=2, decode=None)
    proposer.num_drafts.clear()  # warm-up runs every length
    assert drafting.propose(batch, Branch(), 1)
    assert proposer.num_drafts == {num_drafted}
    assert [waiting(requests, *row) for row in (("a", 4), ("b", 7), ("c", 4))] == [[14], [27], []]
    assert not recorder.unexpected


def test_drafts_beyond_device_limit_are_not_verified() -> None:
    """With async scheduling the host schedules slots, but has no drafts beyond a row's limit."""
    requests, row_limits, _ = started(drafter_max_len=8)
    drafting, _ = on_device(CountsOnDevice(), row_limits, requests, DrafterKVSync())
    drafting.apply(requests)
    row = requests.by_id["a"]
    max_drafts = {}
    for length in range(6, 14):
        row.num_computed = length - 1  # if all drafts of the step in flight are accepted
        (max_drafts[length],) = drafting.cap_scheduled_drafts([row], [K])
    # Up to K tokens of the length may be rejected; 8 is certainly reached only without them.
    assert max_drafts == {6: 3, 7: 3, 8: 3, 9: 2, 10: 1, 11: 0, 12: 0, 13: 0}
    row.num_computed = 5
    assert drafting.cap_scheduled_drafts([requests.by_id["c"], row], [K, 2]).tolist() == [0, 2]


def test_error_while_a_pass_drafts_is_reported_for_its_requests() -> None:
    requests, row_limits, names = started()
    proposer = CountsOnDevice()
    drafting, _ = on_device(proposer, row_limits, requests, DrafterKVSync())
    drafting.apply(requests)
    step_, _ = sampled(requests, names, [[12, 13], [26], [33]])
    batch = SampledRows(requests=step_.requests, ends=[16] * 3, num_queries=2, decode=None)
    rows_B = torch.tensor([request.row for request in step_.requests])
    limits_B = torch.full((3,), K, dtype=torch.int32)

    def fail(request: DraftRequest) -> Drafts:
        raise RuntimeError("broken")

    proposer.propose, working = fail, proposer.propose  # type: ignore[method-assign]
    drafting.draft_in_pass(rows_B, limits_B, Branch(), K)
    assert not drafting.propose(batch, Branch(), K)
    assert [done.faulty for done in drafting.take_rounds()] == [tuple(names)]
    assert waiting(requests, "a", 4) == []
    proposer.propose = working  # type: ignore[method-assign]
    drafting.draft_in_pass(rows_B, limits_B, Branch(), K)
    assert not drafting.propose(batch, Branch(), K)
    assert drafting.take_rounds() == []
    assert waiting(requests, "a", 4) == [14, 15, 16]
    drafting.update_drafter_state([], [], disabled=True)
    proposer.propose = fail  # type: ignore[method-assign]
    drafting.draft_in_pass(rows_B, limits_B, Branch(), K)
    assert not drafting.propose(batch, Branch(), K)
    assert drafting.take_rounds() == [], "a drafter that is off has no faults"


def test_pass_makes_as_many_drafts_as_the_step_wants() -> None:
    requests, row_limits, names = started()
    drafting, _ = on_device(CountsOnDevice(), row_limits, requests, DrafterKVSync())
    drafting.apply(requests)
    step_, _ = sampled(requests, names, [[12, 13], [26], [33]])
    batch = make_sample_batch(requests, SampleShape(4, 1), step_.requests)
    for wanted in (0, 1, K):
        sample_pass = make_sampling().make_pass(batch, Branch(), {}, *drafting.choose_pass_drafts(wanted))
        assert sample_pass.num_drafts == (K if wanted else 0)
        assert sample_pass.split()[1].tolist() == [wanted, wanted, wanted, 0], "padding keeps none"
    drafting.update_drafter_state([], [], disabled=True)
    assert drafting.choose_pass_drafts(K) == (0, 0)
