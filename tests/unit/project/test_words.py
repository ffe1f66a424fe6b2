"""One idea has one word, the trade's: words that nobody would search for, and what stands for each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
# Text to measure with.
PROMPTS = ("builtin_prompts.py", "training_prompts.py")
PACKAGE = sorted(path for path in (ROOT / "vllm_gaudi_spec").rglob("*.py") if path.name not in PROMPTS)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"])


class Word(NamedTuple):
    pattern: str
    instead: str


# In text and code of the package, and in the documentation.
EVERYWHERE = [
    Word(r"(?<![a-z])laws?(?![a-z])", "distribution, probs"),
    Word(r"(?<![a-z])slabs?(?![a-z])", "drafter KV region"),
    Word(r"verdicts?|(?<![a-z])judged(?![a-z])", "verification, accepted under"),
    Word(r"(?<![a-z])behind(?![a-z])", "after, at the end of"),
    Word(r"(?<![a-z])(?:hear|hears|heard|told|tells?|said|says?)(?![a-z])", "observe, report, output, show"),
    Word(r"(?<![a-z])spare[sd]?(?![a-z])", "skipped drafting"),
    Word(r"scheduler's word|drafter_word", "drafter_status, decision"),
    Word(r"host reads?(?![a-z])", "device-to-host sync"),
    Word(r"steps (?:that )?overlap|overlapping steps", "async scheduling"),
    Word(r"can not", "cannot"),
    Word(r"\banew\b|next token but one", "again; MTP layer"),
    Word(r"\bLanding\b|\bFollowed\b|\bInStep\b|\bspoilt\b|\bHostTold\b", "see docs/architecture.md"),
    # Not "in place", "placeholder" and "replace".
    Word(r"(?<![a-z])(?<!in )(?<!in-)(?<!in_)places?(?![a-z])(?!holder)", "index, position, slot, step"),
]
# Where nothing but graphs can be meant.
STEP_ROOMS = ("attention", "devices", "drafting", "runner", "sampling", "scheduling")
OF_THE_STEP = [Word(r"(?<![a-z])programs?(?![a-z])", "graph")]
# Adjectives and participles that name things.
IDENTIFIERS = {
    **dict.fromkeys(("given", "_given"), "spec_config, quant_config, requested: name the thing"),
    **dict.fromkeys(("most", "able", "wanted", "own", "kept", "known"), "max_drafts, can_draft, num_requested: a noun"),
    **dict.fromkeys(("settle", "missed", "welcome"), "a verb of the event, such as on_verified"),
    "word": "what it is: a status, a message",
}
# Names of vLLM, Triton and Habana, and of metrics that dashboards read: a line may hold them.
OF_OTHERS = re.compile(r'bad_words|behind_schedule|"spared_steps"|program_id|PT_HPU_PLACE_ON_CPU')


# What a serving engineer searches for, and a page that has it: where the thing is explained, measured or shown.
SEARCHED = {
    "TTFT": "metrics",
    "ITL": "metrics",
    "throughput": "performance",
    "concurrency": "performance",
    "speedup": "performance",
    "acceptance length": "metrics",
    "tool calling": "as_in_vllm",
    "reasoning parser": "as_in_vllm",
    "tracing": "as_in_vllm",
    "guidellm": "clients",
    "Kubernetes": "kubernetes",
}


@pytest.mark.parametrize(("word", "page"), SEARCHED.items())
def test_words_that_are_searched_for(word: str, page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert re.search(rf"\b{word}", text, re.IGNORECASE), f"docs/{page}.md has no {word!r}"


def found(text: str, words: list[Word]) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        for word in words:
            if (hit := re.search(word.pattern, OF_OTHERS.sub("", line), re.IGNORECASE)) is not None:
                yield f"{number}: {hit[0]!r}, say {word.instead}: {line.strip()[:90]}"


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.Attribute(attr=name):
                yield node.lineno, name


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_package_speaks_the_words_of_the_trade(path: Path) -> None:
    text = path.read_text()
    words = EVERYWHERE + (OF_THE_STEP if path.relative_to(ROOT).parts[1] in STEP_ROOMS else [])
    bad = list(found(text, words))
    bad += [
        f"{at}: {name}, say {IDENTIFIERS[name]}" for at, name in identifiers(ast.parse(text)) if name in IDENTIFIERS
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_speak_the_words_of_the_trade(path: Path) -> None:
    bad = list(found(path.read_text(), EVERYWHERE))
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("word", EVERYWHERE, ids=lambda word: word.instead)
def test_each_word_is_found(word: Word) -> None:
    """A pattern that finds nothing would forbid nothing."""
    old = ["the law of it", "a slab", "verdict", "behind it", "it says", "spared", "drafter_word", "host read"]
    old += ["steps overlap", "can not", "made anew", "Landing", "its place"]
    assert any(re.search(word.pattern, text, re.IGNORECASE) for text in old)
    kept = ["in place", "in-place", "placeholder", "replaced", "essays", "outlaw", "flawed"]
    assert not any(re.search(word.pattern, text, re.IGNORECASE) for text in kept)
