"""Makes the checkpoints of the table, with what transformers answers beside each: `REFERENCE`.

Seeded, kept in a cache, and written as a whole or not at all. Weights are drawn so that the text is lively (it comes
round, and deviates: n-grams are accepted in part) and logits are not flat: nearly equal ones would make every
comparison of tokens a comparison of rounding errors.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.full_tests import tiny_models
from tests.full_tests.prompts import random_prompts
from tests.models import formats, media, processors
from tests.models.architectures import Recipe

transformers.utils.logging.disable_progress_bar()

PROMPT_LENGTHS = (25, 73, 11)
NUM_TOKENS = 40
SEED = 1
REFERENCE, ROUNDED, ROUNDED_GAUDI2 = "reference.json", "reference_rounded.json", "reference_rounded_gaudi2.json"
"""The others where a format rounds activations: as native kernels compute, and as they do where e4m3 ends at 240, if
that is another rounding."""
DRAFTER = "drafter"
"""A model that drafts for it, in a folder of its own."""
UNTIED, TIED = 0.7, 0.08
_NORM_OR_SCALE = re.compile(r"norm|ln_|layernorm|\bln\b")
_STATE = ("A_log", "dt_bias", ".D")

# What decides how it is made, as it was when this process began.
_MADE_BY = b"".join(
    Path(name).read_bytes() for name in (__file__, formats.__file__, media.__file__, processors.__file__)
)
_MADE_BY += f"{transformers.__version__} {torch.__version__}".encode()
_NOT_MADE_BY = ("engine", "vision", "tolerance")


def folder_of(case: str, recipe: Recipe, cache: Path) -> Path:
    """One for each way to make it. Cases that differ after an @ are one checkpoint, run in different ways."""
    name = case.split("@")[0]
    parts = {key: value for key, value in asdict(recipe).items() if key not in _NOT_MADE_BY}
    digest = hashlib.sha256(_MADE_BY + json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return cache / f"{name}-{digest}" / name


def make(case: str, recipe: Recipe, cache: Path) -> Path:
    """Its folder, made unless it is there."""
    folder = folder_of(case, recipe, cache)
    if folder.exists():
        return folder
    torch.set_num_threads(1)  # the models are too small for more
    temporary = folder.parent.with_name(f"{folder.parent.name}.{os.getpid()}")
    try:
        if recipe.media is not None:  # needs torchvision
            made_by = [sys.executable, "-m", "tests.models.media", case, str(temporary / folder.name)]
            subprocess.run(made_by, check=True, cwd=Path(__file__).parents[2])
        else:
            write(recipe, temporary / folder.name)
        for old in cache.glob(f"{folder.name}-????????????"):
            shutil.rmtree(old)
        os.replace(temporary, folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def write(recipe: Recipe, folder: Path) -> None:
    model = build(recipe)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    if recipe.renamed:
        rename(model, recipe.renamed, folder)
    if recipe.transposed is not None:
        transpose(recipe.transposed, folder)
    tiny_models.byte_tokenizer().save_pretrained(folder)
    if recipe.format is not None:
        plain = folder.parent / "plain"
        formats.rewrite(folder, recipe.format, plain)
        model = type(model).from_pretrained(plain, dtype=torch.float32).eval()
    if recipe.published:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | recipe.published, indent=1))
    if recipe.pooling == "token_embed":
        write_projection(projection_of(model), folder)
    if recipe.pooling is not None:
        (folder / REFERENCE).write_text(json.dumps({"vectors": pooled(model, recipe)}))
    else:
        answers = reference(model)
        (folder / REFERENCE).write_text(json.dumps(answers))
        write_drafter(answers, folder)
        rounding = None if recipe.format is None else formats.FORMATS[recipe.format].activations
        on_gaudi2 = formats.FP8_TOKENS_GAUDI2 if rounding is formats.FP8_TOKENS else None
        for name, rounds in ((ROUNDED, rounding), (ROUNDED_GAUDI2, on_gaudi2)):
            if rounds is not None:
                with formats.rounded_activations(model, rounds):
                    (folder / name).write_text(json.dumps(reference(model)))


def rename(model: nn.Module, patterns: Sequence[tuple[str, str]], folder: Path) -> None:
    """Writes the weights again, by other names; those that get the same one are joined, in the order of the model."""
    saved, found = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    places = {name: place for place, name in enumerate(model.state_dict())}
    for name, tensor in sorted(saved.items(), key=lambda item: places.get(item[0], len(places))):
        for pattern, theirs in patterns:
            name = re.sub(pattern, theirs, name)
        found[name] = torch.cat((found[name], tensor)) if name in found else tensor
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def transpose(pattern: str, folder: Path) -> None:
    """Writes the weights again, those of such names with their last two dimensions exchanged."""
    saved = load_file(folder / "model.safetensors")
    found = {name: tensor.mT.contiguous() if re.search(pattern, name) else tensor for name, tensor in saved.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


# ---- weights ---------------------------------------------------------------------------------------------


def build(recipe: Recipe) -> transformers.PreTrainedModel:
    made_by = getattr(transformers, recipe.architecture)
    torch.manual_seed(SEED)
    model = made_by(made_by.config_class(**recipe.config)).float().eval()
    with torch.no_grad():
        draw(model, recipe.embedding)
        for name, parameter in model.named_parameters():
            if name.endswith(".norm.weight") and ".layers." not in name:
                parameter.add_(recipe.final_norm)
    if model.can_generate():
        model.generation_config.do_sample = False
        model.generation_config.suppress_tokens = list(recipe.suppressed) or None
    return model


def draw(model: transformers.PreTrainedModel, embedding: float | None) -> None:
    text = model.config.get_text_config()
    tied = bool(text.tie_word_embeddings)
    if embedding is None:
        embedding = TIED if tied else UNTIED
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            parameter.normal_(std=embedding)
        elif parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        elif name.endswith(_STATE) or parameter.numel() == 1:
            continue
        elif name.endswith("weight") or (_NORM_OR_SCALE.search(name) and not name.endswith("bias")):
            parameter.add_(0.1 * torch.randn_like(parameter))  # norms: where they begin, forgetting them would not show
        else:
            parameter.normal_(std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    output, read = model.get_output_embeddings(), model.get_input_embeddings()
    if output is not None and read is not None and not tied:
        follow(output.weight, read.weight)


def follow(output_VH: torch.Tensor, embedding_VH: torch.Tensor) -> None:
    """Each token makes the next of its cycle of 3 to 7 likely; the noise leaves the rest of the model a say."""
    following = cycles(len(embedding_VH))
    scale = output_VH.shape[1] ** -0.5
    output_VH.normal_(std=0.9 * scale)
    if embedding_VH.shape == output_VH.shape:
        output_VH[following] += 0.38 * scale * embedding_VH / embedding_VH.std()


def cycles(size: int) -> torch.Tensor:
    """A permutation in short cycles: token -> the token after it."""
    order, following = torch.randperm(size), torch.empty(size, dtype=torch.long)
    start = 0
    while start < size:
        length = int(torch.randint(3, 8, ()))
        cycle = order[start : start + length]
        following[cycle] = cycle.roll(-1)
        start += length
    return following


def write_drafter(answers: dict[str, Any], folder: Path) -> None:
    drafter(answers).save_pretrained(folder / DRAFTER)
    # As programs load the target's: the classes of some models add tokens to what its file has.
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder / DRAFTER)


@torch.no_grad()
def drafter(answers: dict[str, Any]) -> transformers.PreTrainedModel:
    """A Llama that knows which token follows another in `answers`, where it mostly is the same one; what it attends to
    puts in a mistake now and then."""
    followers: dict[int, Counter[int]] = {}
    for prompt, text in zip(answers["prompts"], answers["tokens"], strict=True):
        for token, following in pairwise([prompt[-1], *text]):
            followers.setdefault(token, Counter())[following] += 1
    torch.manual_seed(SEED)
    model = tiny_models.llama(num_hidden_layers=1)
    embedding_VH, output_VH = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding_VH.normal_()
    output_VH.normal_(std=0.05)
    for token, found in followers.items():
        output_VH[found.most_common(1)[0][0]] += embedding_VH[token]
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.dim() > 1:
            parameter.normal_(std=0.6 * parameter.shape[-1] ** -0.5)
    return model.float().eval()


# ---- reference -------------------------------------------------------------------------------------------


def prompts(vocab: int = tiny_models.VOCAB) -> list[list[int]]:
    return random_prompts(PROMPT_LENGTHS, vocab, seed=SEED)


@torch.no_grad()
def pooled(model: transformers.PreTrainedModel, recipe: Recipe) -> list[list[float]]:
    """Of each prompt: the probabilities of classes, or the state that vLLM takes for the text, made of length 1, or
    those of its tokens, projected before."""
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        if recipe.pooling in ("classify", "token_classify"):
            found.append(model(input_ids=ids).logits[0].softmax(-1).flatten().tolist())
            continue
        states_TH = model.base_model(input_ids=ids).last_hidden_state[0]
        if recipe.pooling == "token_embed":
            projected = projection_of(model)(states_TH)
            found.append(torch.nn.functional.normalize(projected, dim=-1).flatten().tolist())
            continue
        chosen_H = states_TH[0 if "bert" in recipe.architecture.lower() else -1]
        found.append(torch.nn.functional.normalize(chosen_H, dim=-1).tolist())
    return found


def projection_of(model: transformers.PreTrainedModel) -> nn.Linear:
    """To the smaller embeddings of late interaction."""
    torch.manual_seed(SEED)
    return nn.Linear(model.config.hidden_size, 32, bias=False)


def write_projection(projection: nn.Linear, folder: Path) -> None:
    """As sentence-transformers has it, in a folder of its own."""
    sizes = dict(in_features=projection.in_features, out_features=projection.out_features, bias=False)
    inner = folder / "1_Dense"
    inner.mkdir()
    (inner / "config.json").write_text(json.dumps(sizes | {"activation_function": "torch.nn.modules.linear.Identity"}))
    save_file({"linear.weight": projection.weight.detach()}, inner / "model.safetensors")
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 1, "name": "1", "path": inner.name, "type": "sentence_transformers.models.Dense"}])
    )


NUM_NEXT = 8
"""Candidates that the reference keeps at each position: one of them may win a tie, no other token may."""


@torch.no_grad()
def reference(model: nn.Module, asked: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
    """Greedy tokens, each one's log-probability, how far its logit is above the next best, and which are next: their
    log-probabilities by token."""
    found, suppressed = no_answers(), torch.tensor(model.generation_config.suppress_tokens or [], dtype=torch.int64)
    for prompt in asked or prompts():
        context, logits = list(prompt), []
        for _ in range(NUM_TOKENS):
            logits_V = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1].float()
            logits.append(logits_V.index_fill(0, suppressed, -torch.inf))
            context.append(int(logits[-1].argmax()))
        add_answer(found, prompt, logits)
    return found


def no_answers() -> dict[str, list[Any]]:
    return {"prompts": [], "tokens": [], "logprobs": [], "margins": [], "next": []}


def add_answer(found: dict[str, list[Any]], prompt: Sequence[int], logits: list[torch.Tensor]) -> None:
    """`logits`: of each token of a greedy answer."""
    found["prompts"].append(list(prompt))
    for name in ("tokens", "logprobs", "margins", "next"):
        found[name].append([])
    for logits_V in logits:
        best = logits_V.log_softmax(-1).topk(NUM_NEXT)
        found["tokens"][-1].append(int(best.indices[0]))
        found["logprobs"][-1].append(float(best.values[0]))
        found["margins"][-1].append(float(best.values[0] - best.values[1]))
        found["next"][-1].append(dict(zip(best.indices.tolist()[1:], best.values.tolist()[1:], strict=True)))
