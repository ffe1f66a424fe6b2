"""LoRA adapters made on the fly, in the files that PEFT writes, the same weights as a model of their own, and requests
that name adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.full_tests.equality import Tally
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import Request, mixed_requests

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
BOTH_ENDS = ("embed_tokens", "lm_head")
EVERYTHING = (*ATTENTION, *MLP, *BOTH_ENDS)
# As large beside a model's weights
STRENGTH = 0.3
# Some of them are longer than blocks that the prefix cache shares.
PROMPTS = random_prompts([3, 40, 70, 150], VOCAB, seed=5)


@dataclass(frozen=True)
class Adapter:
    folder: Path
    number: int

    def request(self) -> LoRARequest:
        return LoRARequest(self.folder.name, self.number, str(self.folder))


def make(
    model: str, folder: Path, number: int, rank: int = 4, modules: Sequence[str] = EVERYTHING, alpha: int = 8
) -> Adapter:
    """Random, and so strong that a text is another with it. `number` seeds it and is its number in the engine."""
    torch.manual_seed(1000 + number)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _weights(model, modules).items():
        num_outputs, num_inputs = weight.shape
        first, second = torch.randn(rank, num_inputs), torch.randn(num_outputs, rank)
        second *= STRENGTH * weight.std() / (rank**0.5 * alpha / rank)
        if name.endswith("embed_tokens"):
            # PEFT has a table's transposed.
            first, second = torch.randn(rank, num_outputs), torch.randn(num_inputs, rank) * second.std()
            tensors |= {f"base_model.model.{name}.lora_embedding_A": first}
            tensors |= {f"base_model.model.{name}.lora_embedding_B": second}
        else:
            tensors |= {f"base_model.model.{name}.lora_A.weight": first}
            tensors |= {f"base_model.model.{name}.lora_B.weight": second}
    return write(folder, number, tensors, r=rank, lora_alpha=alpha, target_modules=list(modules))


def various(model: str, folder: Path) -> list[Adapter]:
    """Of both ranks, of all modules and of few."""
    return [
        make(model, folder / "a", 1, rank=4),
        make(model, folder / "b", 2, rank=8, alpha=16),
        make(model, folder / "c", 3, rank=8, modules=("q_proj", "v_proj", "down_proj")),
        make(model, folder / "d", 4, rank=4, modules=BOTH_ENDS),
    ]


def write(folder: Path, number: int, tensors: Mapping[str, torch.Tensor], **config: Any) -> Adapter:
    folder.mkdir(parents=True)
    described = dict(peft_type="LORA", task_type="CAUSAL_LM", bias="none") | config
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return Adapter(folder, number)


def read(adapter: Adapter) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    config = json.loads((adapter.folder / "adapter_config.json").read_text())
    return load_file(adapter.folder / "adapter_model.safetensors"), config


def merged(model: str, adapter: Adapter, folder: Path) -> str:
    """W + scale * B @ A, as a checkpoint like any other."""
    tensors, config = read(adapter)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    scale = config["lora_alpha"] / config["r"]
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, first in tensors.items():
            place = name.removeprefix("base_model.model.")
            if place.endswith("lora_embedding_A"):
                second = tensors[name.replace("embedding_A", "embedding_B")]
                weights[place.replace("lora_embedding_A", "weight")].add_(scale * (second @ first).T)
            elif place.endswith("lora_A.weight"):
                second = tensors[name.replace("lora_A", "lora_B")]
                weights[place.replace("lora_A.weight", "weight")].add_(scale * (second @ first))
    whole.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


def _weights(model: str, modules: Sequence[str]) -> dict[str, torch.Tensor]:
    """By module, those of a checkpoint that an adapter is for."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {
        name.removesuffix(".weight"): weight.detach()
        for name, weight in whole.named_parameters()
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in modules
    }


class Merged:
    """transformers on the model that has the adapter's weights in it; on the model itself without one."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._references: dict[Adapter | None, Reference] = {}

    def of(self, adapter: Adapter | None) -> Reference:
        if adapter not in self._references:
            name = "nothing" if adapter is None else adapter.folder.name
            path = self._model if adapter is None else merged(self._model, adapter, self._folder / f"{name} merged")
            self._references[adapter] = Reference(path)
        return self._references[adapter]

    def check(self, jobs: list[Job], outputs: list[Tokens]) -> None:
        tally = Tally()
        for job, output in zip(jobs, outputs, strict=True):
            logits_TV = self.of(job.adapter).logits_after(job.request.prompt, output)
            tally.greedy(f"{job.request.name}, {job.adapter and job.adapter.folder.name}", output, logits_TV)
        tally.check()


LORA: dict[str, Any] = dict(enable_lora=True, max_loras=2, max_lora_rank=8)
Tokens = list[int]


@dataclass(frozen=True)
class Job:
    request: Request
    adapter: Adapter | None


def run(llm: LLM, jobs: list[Job]) -> list[Tokens]:
    outputs = llm.generate(
        [{"prompt_token_ids": job.request.prompt} for job in jobs],
        [job.request.params for job in jobs],
        lora_request=[None if job.adapter is None else job.adapter.request() for job in jobs],
        use_tqdm=False,
    )
    return [[token for completion in output.outputs for token in completion.token_ids] for output in outputs]


def mixed(count: int, *found: Adapter | None) -> list[Job]:
    """Requests of all kinds, each with one of these."""
    return [Job(request, found[index % len(found)]) for index, request in enumerate(mixed_requests(count))]


def greedy(prompts: list[Tokens], adapter: Adapter | None, num_tokens: int = 16) -> list[Job]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [Job(Request(str(prompt[:3]), prompt, params), adapter) for prompt in prompts]


def check_same(jobs: list[Job], ours: list[Tokens], expected: list[Tokens]) -> None:
    different = [
        f"{job.request.name}, {job.adapter and job.adapter.folder.name}:\n  {one}\n  {other}"
        for job, one, other in zip(jobs, ours, expected, strict=True)
        if one != other
    ]
    assert not different, f"{len(different)} of {len(jobs)} differ\n" + "\n".join(different[:5])
