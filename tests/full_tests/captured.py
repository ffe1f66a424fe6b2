"""What engines on devices that capture programs are held against: answers without speculation, and the manifest."""

from collections import Counter
from typing import Any

from vllm import LLM, SamplingParams

from tests.full_tests.engines import generate
from tests.full_tests.equality import Tally
from tests.full_tests.workload import Answer, Request, run_together
from vllm_gaudi_spec.device_table import load_backend


class Reference:
    """Answers without speculation, and after each of their beginnings the scores of all tokens, where they are raw."""

    def __init__(self, answers: list[list[Answer]], scores: dict[int, list[dict[int, float]]]) -> None:
        self.answers = answers
        self.scores = scores

    @classmethod
    def of(cls, llm: LLM, requests: list[Request]) -> "Reference":
        answers = run_together(llm, requests)
        return cls(answers, scores_of(llm, requests, answers))

    def check(self, requests: list[Request], ours: list[list[Answer]], only_greedy: bool = False) -> None:
        tally = Tally()
        for index, (request, own, base) in enumerate(zip(requests, ours, self.answers, strict=True)):
            if only_greedy and request.params.temperature > 0:
                continue
            for one, other in zip(own, base, strict=True):
                table = self.scores.get(index)
                scores_at = None if table is None else lambda i, table=table: table[i]
                tally.compare(request.name, one.token_ids, other.token_ids, scores_at)
        tally.check()


def scores_of(llm: LLM, requests: list[Request], answers: list[list[Answer]]) -> dict[int, list[dict[int, float]]]:
    """Greedy requests whose scores are the model's own: the likeliest tokens at every place of the answer."""
    plain = [i for i, r in enumerate(requests) if r.params.temperature == 0 and not r.params.presence_penalty]
    prompts = [requests[i].prompt + answers[i][0].token_ids for i in plain]
    outputs = generate(llm, prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20))
    found = {}
    for i, output in zip(plain, outputs, strict=True):
        scores = output.prompt_logprobs[len(requests[i].prompt) :]
        found[i] = [{token: value.logprob for token, value in place.items()} for place in scores]
    return found


# The functions that are captured, by the first word of a signature in the manifest.
PROGRAMS = {
    "prefill": "DeviceStep._forward",
    "decode": "DeviceStep._forward",
    "sample": "DeviceStep._finish",
    "draft": "DeviceDrafting._draft_on_device",
    "draft text": "TextDrafting._draft_on_device",
    "follow": "DraftModelKVSync._read_rows",
    "read": "TextDrafting._read_on_device",
    "head": "HeadKVSync._read_newest",
    "head chunk": "HeadKVSync._read_chunk",
    "report": "_pack",
    "drafts": "DeviceStep._drafts",
    "prompt logprobs": "PromptLogprobs._score_slice",
}


def signatures(llm: LLM) -> list[Any]:
    """The manifest: what the configuration lists."""
    return llm.collective_rpc(lambda worker: list(worker.model_runner.recorder.manifest))[0]


def captured() -> Counter[str]:
    """Programs of this process so far, by the function that each was made of. Not those of the self-test, which a
    process runs once, before its first engine loads a model."""
    counts = load_backend().graphs.counts()
    if "captured" in counts:
        found = Counter(counts["captured"])
    else:
        found = Counter(graph["name"] for graph in counts["emulator"]["graphs"])
    return Counter({name: number for name, number in found.items() if "self_test_" not in name})


def programs_are_the_manifest(llm: LLM, before: Counter[str]) -> None:
    """What was captured since, by name, is what the configuration lists, program by program."""
    made = Counter[str]()
    for name, number in (captured() - before).items():
        made[name.replace("BlockKVSync.", "HeadKVSync.")] += number  # which has its own form of the same programs
    listed = Counter(PROGRAMS[kind_of(signature)] for signature in signatures(llm))
    changes_of_state = {name: made[name] for name in made if name not in listed}
    assert {name: made[name] for name in listed} == listed
    # Copies of KV blocks, the drafter's reach, adapters: one program each. Starts of rows and the tables of sampling
    # parameters and of draft limits: one row at a time, and eight where there are as many.
    assert {"Requests._start_rows", "DeviceRows._put_rows", "_copy_blocks"} <= set(changes_of_state)
    others = {"DraftModelKVSync._put_reach", "Adapters._put_slots"}
    assert set(changes_of_state) <= {"Requests._start_rows", "DeviceRows._put_rows", "_copy_blocks", *others}
    num_starts = 1 if llm.llm_engine.vllm_config.scheduler_config.max_num_seqs < 8 else 2
    assert changes_of_state.pop("Requests._start_rows") == num_starts
    assert changes_of_state.pop("DeviceRows._put_rows") in {num_starts, 2 * num_starts}
    assert set(changes_of_state.values()) == {1}


def kind_of(signature: tuple[Any, ...]) -> str:
    if isinstance(signature[0], int):
        return "sample"
    if signature[0] == "draft":
        return {"prefill": "follow", "decode": "draft"}.get(signature[1], "draft text")
    return str(signature[0])
