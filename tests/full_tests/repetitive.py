"""The repetitive prompts: texts to copy, lists and tables to go on with, code to edit."""

from pathlib import Path

from vllm_gaudi_spec.tools.io.prompts import load_prompts

FOLDER = Path(__file__).parent / "prompts"


def repetitive_prompts() -> list[str]:
    return load_prompts(str(FOLDER))
