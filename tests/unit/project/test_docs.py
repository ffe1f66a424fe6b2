"""What pages say is looked at: commands are run or say why not, configurations are ours, links lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from vllm.config import SpeculativeConfig

from tests.pages import NEEDS, ROOT, Block, blocks, pages, text_for
from tests.support.releases import only_0_32
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.config import MAX_DRAFTS, UNIVERSAL_DRAFT, Options
from vllm_gaudi_spec.methods import METHODS

PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks(page)]
# Another spelling of vLLM's, and methods of the vllm-ascend guide, which its page says to be refused.
OTHER_METHODS = {"deepseek_mtp", "extract_hidden_states"}
SPECULATIVE, ADDITIONAL = re.compile(r"\{\"method\".*?\}(?=[`'])"), re.compile(r"\{\"gaudi_spec\".*?\}(?=[`'])")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_block_of_commands_says_what_becomes_of_it(block: Block) -> None:
    assert block.mark is not None, "put `<!-- run -->`, `<!-- needs: WHAT -->` or `<!-- test: FILE::NAME -->` above it"
    assert block.runs or block.needs or block.test or block.is_for_ci, f"unknown mark: {block.mark}"
    assert block.needs <= NEEDS
    if block.runs:
        assert block.num_servers <= 1, "one server a block"
        last = re.sub(r"\\\n", "", block.text).strip().splitlines()[-1]
        assert not block.num_servers or " serve " in f"{last} ", "its last command"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.test], ids=lambda block: block.name)
def test_a_named_test_takes_its_commands_from_the_page(block: Block) -> None:
    file, _, _ = block.test.partition("::")
    assert f'"{block.test}"' in (ROOT / file).read_text(), "nothing in that file asks the page for them"


@pytest.mark.slow
def test_a_pickle_is_converted(tmp_path: Path) -> None:
    text = text_for("tests/unit/project/test_docs.py::test_a_pickle_is_converted", ROOT / "SECURITY.md")
    assert text.startswith(".venv/bin/python - pytorch_model.bin ")
    halves = torch.arange(6.0).view(2, 3)
    torch.save({"plain": halves, "turned": halves.t()}, tmp_path / "pytorch_model.bin")
    subprocess.run(["bash", "-euc", text.replace(".venv/bin/python", sys.executable, 1)], cwd=tmp_path, check=True)
    found = load_file(tmp_path / "model.safetensors")
    assert found["plain"].equal(halves)
    assert found["turned"].equal(halves.t())


def written(pattern: re.Pattern[str]) -> list[Any]:
    found = {(text, page) for page in PAGES for text in pattern.findall(page.read_text())}
    return [pytest.param(text, id=f"{page.name}-{text}") for text, page in sorted(found)]


@pytest.mark.parametrize("text", written(SPECULATIVE))
def test_speculative_configurations(text: str) -> None:
    """Names and values as vLLM's door reads them, widened by ours. What engines make of them, other tests run."""
    upstream.widen_speculative_options()
    config = json.loads(text)
    known = SpeculativeConfig.__dataclass_fields__
    for name, value in config.items():
        if name != "draft_model_config":
            assert name in known, f"{name} is no option of vLLM's"
            TypeAdapter(known[name].type).validate_python(value)
    assert config["method"] in {*METHODS, UNIVERSAL_DRAFT, *OTHER_METHODS}
    assert 1 <= config.get("num_speculative_tokens", 1) <= MAX_DRAFTS


@pytest.mark.parametrize("text", written(ADDITIONAL))
def test_options_of_ours(text: str) -> None:
    Options.from_vllm(SimpleNamespace(additional_config=json.loads(text)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        found = page.parent / path if path else page
        assert found.is_file(), f"{target}: pages and pictures are linked; code is named"
        assert not anchor or anchor in anchors(found), target


def anchors(page: Path) -> set[str]:
    """As code hosts and the site make them of headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_files_that_pages_about_the_code_name_exist(name: str) -> None:
    files = [path.as_posix() for folder in ("vllm_gaudi_spec", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / name).read_text()))
    assert named
    assert not {one for one in named if not any(path.endswith(f"/{one}") for path in files)}


@only_0_32  # from which they are generated
def test_generated_parts_are_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
