"""The command line without an engine: options, exit statuses, errors, and what each command starts."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run_code
from vllm_gaudi_spec import device_table, versions
from vllm_gaudi_spec.tools import cli, demo
from vllm_gaudi_spec.tools.io import output

HEAVY = ("vllm", "torch", "numpy", "transformers", "rich", "jinja2", "httpx")
COMMANDS: dict[str, argparse.ArgumentParser] = next(
    action.choices for action in cli.make_parser()._actions if isinstance(action, argparse._SubParsersAction)
)


class Started(Exception):
    """Raised in place of starting a module."""

    def __init__(self, module: str, variables: dict[str, str], arguments: list[str]) -> None:
        super().__init__(module)
        self.module, self.variables, self.arguments = module, variables, arguments


@pytest.fixture(autouse=True)
def no_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(module: str, variables: dict[str, str], arguments: list[str]) -> None:
        raise Started(module, variables, list(arguments))

    monkeypatch.setattr(output, "run_module", start)
    monkeypatch.setattr(demo, "run_module", start)
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(str(error.code))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        f"import sys\nfrom vllm_gaudi_spec.tools import cli\ntry: cli.main([*{command.split()}, '--help'])\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run_code(code, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"


def test_commands_report_missing_packages_with_the_standard_library_alone(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom vllm_gaudi_spec.tools import cli\n"
        "sys.exit(cli.main(['demo']) + 10 * cli.main(['doctor', '--json']))"
    )
    bare = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(bare, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 12, done.stderr
    assert "vLLM is not installed here" in done.stderr
    assert json.loads(done.stdout)["problems"] > 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["self-test"],
        ["doctor", "--modle", "m"],
        ["selftest", "--dtype", "int8"],
        ["selftest", "--json", "/no/such/folder/file.json"],
        ["graph-check", "--speculative-config", "{"],
        ["graph-check", "--max-model-len", "10"],
        ["graph-check", "--device", "tpu"],
        ["graph-check", "/no/such/model"],
        ["graph-check", "--speculative-config", '{"method": "draft_model", "model": "./no"}'],
        ["graph-check", "--json", "/tmp"],
        ["graph-check", "--device", "hpu"],
        ["demo", "--model", "/no/such"],
        ["demo", "--json", "/no/such/folder/run.json"],
        ["demo", "--report", "/no/such/folder/page.html"],
        ["demo", "--assert-accept-rate", "50"],
        ["top", "ftp://a"],
        ["top", "--interval", "0"],
        ["top", "--json", "/no/such/folder/top.json"],
        ["chat", "ftp://a"],
        ["report", "/no/such.json"],
    ],
    ids=" ".join,
)
def test_wrong_options_end_with_status_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_table, "find_spec", lambda name: None if name == "habana_frameworks" else object())
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert not words or error.startswith("gaudi-spec")
    assert not words or error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ngram --draft_model some/model", "needs no draft model"),
        ("ngram --acceptance strict block", "at most one rule"),
        ("eagle mtp", "no common target"),
        ("universal_draft --model some/model", "needs --draft"),
        ("baseline --assert-accept-rate 0.5", "drafts nothing"),
    ],
)
def test_demo_refuses_contradictory_options(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--task", *words.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["demo", "selftest", "graph-check"])
@pytest.mark.parametrize(
    ("release", "message"), [(None, "vLLM is not installed here"), ("0.31.2", "0.31.2 is installed")]
)
def test_commands_that_run_vllm_refuse_a_missing_or_other_release(
    command: str, release: str | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: release)
    assert run(command) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("habana_frameworks.torch", "use the image of the card's vendor"),
        ("card_emulator", "card"),
        ("jinja2", "run `make setup`"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    missing: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    assert output.guard("doctor", work) == 1
    error = capsys.readouterr().err
    assert f"{missing.partition('.')[0]} is not installed; " in error
    assert remedy in error
    with pytest.raises(ModuleNotFoundError):
        output.guard("graph-check", work, verbose=True)
