"""requirements/install.py, without pip."""

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("image", [None, "/usr/lib/vendor"])
def test_the_build_of_vllm_sees_its_tools_and_what_the_image_has_on_its_path(
    image: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if image is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", image)
    install = runpy.run_path(str(ROOT / "requirements" / "install.py"))["install_card"]
    paths, tools = [], []

    def pip(progress: Any, *arguments: str, **environment: str) -> None:
        if "--target" in arguments:
            tools.append(arguments[arguments.index("--target") + 1])
        if "vllm" in arguments:
            paths.append(environment["PYTHONPATH"].split(os.pathsep))

    install.__globals__["pip"] = pip
    install()
    assert paths == [[*tools, *([image] if image else [])]]
    assert len(tools) == 1
