"""Several ranks say what one says: tensor parallel, data parallel, experts spread over ranks, and Ray.

Texts are held against those of one rank without drafts, greedy and seeded. Ranks round differently, since each adds up
a part of every sum, so a tie may go the other way: those are counted.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from vllm import RequestOutput, SamplingParams
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear

from tests.full_tests import heads, mtp_checkpoints
from tests.full_tests.engines import Job, data_parallel, engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.faults.broken import BreaksOnDevice
from tests.full_tests.prompts import random_prompts
from tests.full_tests.ranks import ranks_agree
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import accounts, custom, ngram, speculating, suffix
from tests.full_tests.tiny_models import VOCAB, save_untrained_head
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.drafting.ngram import DeviceNgramProposer

NUM_TOKENS = 32
LENGTHS = [3, 17, 32, 33, 64, 90, 150, 200]
# A few rows: the machine has fewer cores than ranks.
SIZES: dict[str, Any] = dict(max_num_seqs=12, max_num_batched_tokens=128)


class Work(NamedTuple):
    """Every prompt greedy and seeded, all at once."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @classmethod
    def of(cls, prompts: list[list[int]]) -> "Work":
        greedy = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True) for _ in prompts]
        seeded = [
            SamplingParams(temperature=0.8, seed=100 + index, max_tokens=NUM_TOKENS, ignore_eos=True)
            for index in range(len(prompts))
        ]
        return cls([*prompts, *prompts], [*greedy, *seeded])


NOISE = Work.of(random_prompts(LENGTHS, VOCAB))
PROSE = Work.of([heads.text(length, first) for first, length in enumerate(LENGTHS)])


class Setup(NamedTuple):
    target: str
    drafter: dict[str, Any]
    work: Work
    options: dict[str, Any]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mtp_checkpoints.save("deepseek-v3", tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A model of the trained tiny family that two ranks can share."""

    @cache
    def path(name: str) -> str:
        return heads.with_four_heads(str(heads.TINY / name), tmp_path_factory.mktemp(name) / name)

    return path


UNIVERSAL: dict[str, dict[str, Any]] = {
    "universal_draft": {},
    "universal_draft, retokenize": dict(universal_context="retokenize"),
    "universal_draft, slem": dict(universal_context="retokenize", universal_match="slem"),
}
WITHOUT_MODEL: dict[str, dict[str, Any]] = {
    "ngram": ngram(3),
    "ngram_gpu": ngram(3) | dict(method="ngram_gpu"),
    "suffix": suffix(3),
    "custom_class": custom("Repeating"),
}
WITH_MODEL = ("draft_model", *UNIVERSAL, "eagle", "eagle3", "medusa", "mtp")


@pytest.fixture
def setup_of(looping_llama: str, twin: str, even: Callable[[str], str], deepseek: str) -> Callable[..., Setup]:
    """`experts`: whether the model with a predicting layer may have some."""

    def of(method: str, experts: bool = True) -> Setup:
        if method in WITHOUT_MODEL:
            return Setup(looping_llama, WITHOUT_MODEL[method], NOISE, {})
        k: dict[str, Any] = dict(num_speculative_tokens=3)
        if method == "draft_model":  # the target once more: one that is cut, or not, as it is not
            return Setup(looping_llama, dict(method=method, model=looping_llama, **k), NOISE, {})
        if method in UNIVERSAL:
            options = dict(additional_config=dict(gaudi_spec=UNIVERSAL[method]))
            return Setup(looping_llama, dict(method="universal_draft", model=twin, **k), NOISE, options)
        if method == "mtp":
            return Setup(deepseek if experts else heads.target("mtp"), heads.head("mtp", 3), PROSE_OF[experts], {})
        model = str(heads.TINY / method) if method == "medusa" else even(method)
        return Setup(even("target"), dict(method=method, model=model, **k), PROSE, {})

    return of


# The tiny DeepSeek knows fewer tokens than the trained family.
PROSE_OF = {True: NOISE, False: PROSE}

Said = Callable[[str, Work], list[list[int]]]


@pytest.fixture(scope="module")
def said() -> Said:
    """What one rank says without drafts, asked once."""
    known: dict[tuple[str, int], list[list[int]]] = {}

    def of(target: str, work: Work) -> list[list[int]]:
        if (target, id(work)) not in known:
            with engine(target, **SIZES) as llm:
                known[target, id(work)] = first_tokens(generate(llm, *work))
        return known[target, id(work)]

    return of


def check(setup: Setup, outputs: list[RequestOutput], said: Said, what: str, least_accepted: int = 10) -> None:
    """Every text is the one rank's; ties are counted, and shown."""
    work, tally, reference = setup.work, Tally(), cache(Reference)
    expected = said(setup.target, work)
    for index, (output, other) in enumerate(zip(first_tokens(outputs), expected, strict=True)):

        def scores(place: int, index: int = index, other: list[int] = other) -> torch.Tensor:
            return reference(setup.target).scores(work.prompts[index] + other[:place], work.params[index])

        tally.compare(f"{what}, request {index}", output, other, scores)
    steps = accounts(outputs)
    drafted, right = (sum(sum(getattr(one, name)) for one in steps) for name in ("drafted", "accepted"))
    print(f"{what}: {right} of {drafted} drafts accepted, ", end="")
    tally.check()
    assert drafted > 4 * least_accepted, "too little was drafted for this to show anything"
    assert right >= least_accepted, "too little was accepted for this to show anything"


# --- tensor parallel ---


def cuts(worker: Any) -> set[int]:
    """Over how many ranks the drafter's linear layers are cut."""
    layers = worker.model_runner.drafter.model.modules() if worker.model_runner.drafter is not None else ()
    # The output matrix is the target's at times.
    return {
        layer.tp_size for layer in layers if isinstance(layer, LinearBase) and not isinstance(layer, ReplicatedLinear)
    }


QUICK_TP = [("draft_model", 1)]
TP = [*((method, None) for method in WITHOUT_MODEL), *((method, size) for method in WITH_MODEL for size in (1, 2))]


@pytest.mark.parametrize(("method", "size"), quick_and_slow(QUICK_TP, TP))
def test_tensor_parallel(method: str, size: int | None, setup_of: Callable[[str], Setup], said: Said) -> None:
    """`size`: over how many ranks the drafter is cut."""
    given = setup_of(method)
    alone = {} if size is None else dict(draft_tensor_parallel_size=size)
    # Sampled without a seed: nothing to compare with, save the other rank.
    unseeded = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with speculating(given.target, given.drafter | alone, tensor_parallel_size=2, **SIZES, **given.options) as llm:
        work = given.work
        outputs = generate(llm, [*work.prompts, *work.prompts[:4]], [*work.params, *[unseeded] * 4])
        ranks_agree(llm, 2)
        assert {max(found, default=size) for found in llm.collective_rpc(cuts)} == {size}
    check(given, outputs[: len(work.prompts)], said, f"TP 2, {method}, drafter TP {size}")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3", "medusa"])
def test_four_ranks_decide_alike(method: str, setup_of: Callable[[str], Setup], said: Said) -> None:
    """Of more than two numbers it matters in which order they are added: what whole drafters read on each rank has to
    be the same bits all the same."""
    given = setup_of(method)
    alone = {} if method == "ngram" else dict(draft_tensor_parallel_size=1)
    with speculating(given.target, given.drafter | alone, tensor_parallel_size=4, **SIZES) as llm:
        outputs = generate(llm, given.work.prompts, given.work.params)
        ranks_agree(llm, 4)
    check(given, outputs, said, f"TP 4, {method}")


# --- data parallel ---


def spread(work: Work) -> Job:
    return Job(work.prompts, work.params, [index % 2 for index in range(len(work.prompts))])


ACCOUNTS: dict[str, Any] = dict(per_request_spec_decode_metrics="detailed")


@pytest.mark.slow
@pytest.mark.parametrize("method", [*WITHOUT_MODEL, *WITH_MODEL])
def test_data_parallel(method: str, setup_of: Callable[..., Setup], said: Said) -> None:
    given = setup_of(method, experts=False)
    options = dict(speculative_config=given.drafter, **ACCOUNTS, **SIZES, **given.options)
    [outputs] = data_parallel(given.target, [spread(given.work)], **options)
    check(given, outputs, said, f"DP 2, {method}")


# --- experts ---

EXPERTS = dict(enable_expert_parallel=True)
SPREAD: dict[str, dict[str, Any]] = {
    "one by one": dict(async_scheduling=False),
    "overlapping": {},
    "short steps": dict(max_num_batched_tokens=32, enable_prefix_caching=True),
    "each on two ranks": dict(tensor_parallel_size=2),
}
FAMILIES = ("qwen3-moe", "mixtral", "deepseek-v3")
QUICK_MOE = [("qwen3-moe", "ngram_gpu", "overlapping")]
MOE = [
    *((family, "ngram_gpu", how) for family in FAMILIES for how in SPREAD),
    *(("qwen3-moe", method, how) for method in ("ngram", "draft_model", "eagle") for how in SPREAD),
]


@pytest.mark.parametrize(("family", "method", "how"), quick_and_slow(QUICK_MOE, MOE))
def test_experts_of_data_parallel_ranks(
    family: str, method: str, how: str, made: Callable[[str], str], cousin: str, said: Said, tmp_path: Path
) -> None:
    """First with a rank that has nothing to do but to take part; then with work of its own on each."""
    model = save_untrained_head(tmp_path) if method == "eagle" else cousin
    stranger = dict(method=method, model=model, num_speculative_tokens=3)
    drafter = WITHOUT_MODEL.get(method, stranger)
    given = Setup(made(family), drafter, NOISE, {})
    options = dict(speculative_config=drafter, **ACCOUNTS, **EXPERTS, **(SIZES | SPREAD[how]))
    idle = Job(NOISE.prompts, NOISE.params, [0] * len(NOISE.prompts))
    uneven = Job(NOISE.prompts, NOISE.params, [int(index % 5 == 0) for index in range(len(NOISE.prompts))])
    for outputs, what in zip(data_parallel(given.target, [idle, uneven], **options), ("idle", "uneven"), strict=True):
        least = 0 if drafter is stranger else 10
        check(given, outputs, said, f"DP 2, experts of {family}, {method}, {how}, {what}", least)


@pytest.mark.slow
def test_drafter_that_raises_does_not_block_ranks_that_share_experts(
    made: Callable[[str], str], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it in the drafter: each engine drafts for itself."""
    given = Setup(made("qwen3-moe"), WITHOUT_MODEL["ngram_gpu"], NOISE, {})
    said(given.target, given.work)
    fault = BreaksOnDevice("raises", lambda call: call % 5 == 2)
    monkeypatch.setattr(DeviceNgramProposer, "propose", fault.around(DeviceNgramProposer.propose))
    options = dict(speculative_config=given.drafter, **ACCOUNTS, **EXPERTS, **SIZES)
    [outputs] = data_parallel(given.target, [spread(given.work)], **options)
    check(given, outputs, said, "DP 2, experts, a drafter that raises")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_tensor_parallel_ranks(family: str, made: Callable[[str], str], said: Said) -> None:
    given = Setup(made(family), ngram(3), NOISE, {})
    with speculating(given.target, given.drafter, tensor_parallel_size=2, **EXPERTS, **SIZES) as llm:
        outputs = generate(llm, NOISE.prompts, NOISE.params)
        ranks_agree(llm, 2)
    check(given, outputs, said, f"TP 2, experts of {family}")


# --- Ray ---

# The least that its object store takes.
STORE_BYTES = 80 << 20


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes of Ray with a CPU each, on this machine. They listen on 127.0.0.1 and tell nobody."""
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }.items():
        monkeypatch.setenv(name, value)
    node = dict(num_cpus=1, node_ip_address="127.0.0.1", object_store_memory=STORE_BYTES, include_dashboard=False)
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1", object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def node(worker: Any) -> str:
    return ray.get_runtime_context().get_node_id()


@pytest.mark.slow
def test_two_nodes_of_ray(two_nodes: None, setup_of: Callable[[str], Setup], said: Said) -> None:
    """A rank on each, with the drafter whole on both."""
    given = setup_of("draft_model")
    drafter = given.drafter | dict(draft_tensor_parallel_size=1)
    options = dict(tensor_parallel_size=2, distributed_executor_backend="ray", **SIZES)
    said(given.target, given.work)  # before Ray takes both cores
    with speculating(given.target, drafter, **options) as llm:
        outputs = generate(llm, given.work.prompts, given.work.params)
        ranks_agree(llm, 2)
        assert len(set(llm.collective_rpc(node))) == 2
    check(given, outputs, said, "TP 2 under Ray, a rank on each of two nodes")
