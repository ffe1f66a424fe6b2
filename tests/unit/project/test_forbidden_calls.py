"""Nothing in this repository runs text or unpickles files: read from the sources, tests and scripts included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("vllm_gaudi_spec", "calibration", "benchmarks", "demo", "docker", "requirements", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

_BUILTINS = ("eval", "exec", "compile", "__import__")
# Reading what these wrote runs it.
_MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle")
_FUNCTIONS = (
    *("os.system", "os.popen", "tempfile.mktemp", "pty.spawn"),
    *("subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.jit.load", "torch.package.PackageImporter"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "pandas.read_pickle"),
)
# Safe with one value of an argument only: for torch it has to be said, for the others, whatever is called, it is the
# default.
_MUST_SAY = {"torch.load": ("weights_only", True)}
_MUST_NOT_SAY = {"allow_pickle": False, "shell": False}
# Called with more by position, or with `**`, these may be told what may not be said.
_BY_NAME = {"numpy.load": 2} | dict.fromkeys(
    (f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen")), 1
)

# File and what is found there -> why it is no danger.
ALLOWED = {
    ("tests/full_tests/abuse/folders.py", "import pickle"): "writes pickles that would do harm, and reads none",
    ("tests/full_tests/test_library.py", "import pickle"): "writes a pickle that is to be refused, and reads none",
    (
        "vllm_gaudi_spec/tools/cli/completion.py",
        "shtab.complete(shell)",
    ): "names the shell whose script is printed, and starts none",
    ("tests/unit/compat/test_configuration.py", "import pickle"): "sends a configuration as vLLM does",
    (
        "tests/unit/scheduling/test_real_drafts.py",
        "import pickle",
    ): "sends a step's output as vLLM does, between processes",
    (
        "tests/unit/compat/test_loading.py",
        "import pickle",
    ): "writes pickles that may not be read, and shows that they run",
    ("tests/unit/scheduling/test_health.py", "import pickle"): "sends a step's word as vLLM does, between processes",
    (
        "tests/unit/emulator/test_emulator.py",
        "import pickle",
    ): "a tensor travels as vLLM sends it between processes",
    ("tests/integrations/test_vllm_ascend_patches.py", "import pickle"): "sends a configuration as vLLM does",
    (
        "tests/unit/quantization/test_quant_files.py",
        "numpy.load(allow_pickle)",
    ): "reads, as INC does, what the test wrote",
}


def found(source: str) -> Iterator[str]:
    """What is forbidden in a file, in words."""
    tree = ast.parse(source)
    names = _imported(tree)
    yield from (f"import {name}" for name in set(names.values()) if name.split(".")[0] in _MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _forbidden(node, _called(node.func, names))


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _called(function: ast.expr, names: dict[str, str]) -> str:
    """`numpy.load` for np.load; a bare name where it is no module's."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    return ".".join([names.get(function.id, function.id), *parts])


def _forbidden(call: ast.Call, name: str) -> Iterator[str]:
    if name.removeprefix("builtins.") in _BUILTINS or name in _FUNCTIONS:
        yield name
    given = {word.arg: word.value.value if isinstance(word.value, ast.Constant) else ... for word in call.keywords}
    if name in _MUST_SAY:
        argument, value = _MUST_SAY[name]
        if given.get(argument) is not value:
            yield f"{name}({argument})"
    for argument, value in _MUST_NOT_SAY.items():
        if given.get(argument, value) is not value:
            yield f"{name}({argument})"
    if name in _BY_NAME:
        if len(call.args) > _BY_NAME[name] or any(isinstance(argument, ast.Starred) for argument in call.args):
            yield f"{name}(by position)"
        if None in given:
            yield f"{name}(**)"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_forbidden(path: Path) -> None:
    place = str(path.relative_to(ROOT))
    bad = [what for what in found(path.read_text()) if (place, what) not in ALLOWED]
    assert not bad, f"{place} has {bad}; do without, or say in ALLOWED why it is no danger"


def test_each_exception_is_still_needed() -> None:
    for place, what in ALLOWED:
        assert what in set(found((ROOT / place).read_text())), f"{place} has no {what} any more"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("eval('1')", "eval"),
        ("import builtins as b\nb.exec('1')", "builtins.exec"),
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle.loads"),
        ("import torch\ntorch.load(path)", "torch.load(weights_only)"),
        ("import torch\ntorch.load(path, weights_only=False)", "torch.load(weights_only)"),
        ("import torch\ntorch.load(path, weights_only=safe)", "torch.load(weights_only)"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "numpy.load(allow_pickle)"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("import subprocess as s\ns.run(line, shell=True)", "subprocess.run(shell)"),
        ("from subprocess import run\nrun(line, shell=True)", "subprocess.run(shell)"),
        ("from tempfile import mktemp\nmktemp()", "tempfile.mktemp"),
        ("import os\nos.system('ls')", "os.system"),
        ("import numpy as np\nnp.load(path, None, True)", "numpy.load(by position)"),
        ("import numpy as np\nnp.load(*given)", "numpy.load(by position)"),
        ("import numpy as np\nnp.load(path, **given)", "numpy.load(**)"),
        (
            "import numpy\nnumpy.lib.format.read_array(f, allow_pickle=True)",
            "numpy.lib.format.read_array(allow_pickle)",
        ),
        ("read(f, allow_pickle=told)", "read(allow_pickle)"),
        ("import torch\ntorch.jit.load(path)", "torch.jit.load"),
        ("import torch\ntorch.package.PackageImporter(path)", "torch.package.PackageImporter"),
        ("import subprocess\nsubprocess.run(x, **given)", "subprocess.run(**)"),
        ("import subprocess\nsubprocess.run(x, -1, None)", "subprocess.run(by position)"),
    ],
)
def test_the_search_finds_it(source: str, words: str) -> None:
    assert list(found(source)) == [words]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "model.eval()",
        "import re\nre.compile('a')",
        "import numpy as np\nnp.load(path)",
        "import yaml\nyaml.safe_load(text)",
        "import subprocess\nsubprocess.run(words)",
    ],
)
def test_the_search_leaves_the_rest_alone(source: str) -> None:
    assert not list(found(source))
