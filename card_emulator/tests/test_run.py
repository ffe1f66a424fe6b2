"""`card-emulator run` gives a program, and what it starts, an emulated card."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from card_emulator import cli, door

ADD = "import torch; print((torch.ones(2, device='hpu') + 1).tolist(), torch.hpu.get_device_name())"
LAZY = "import habana_frameworks.torch as htorch; print(htorch.utils.internal.is_lazy())"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ADD!r}], check=True)"
LAST_ROW = "import torch; print(torch.arange(3).to('hpu')[torch.tensor([-1]).to('hpu')].tolist())"
PLUGIN = "from importlib.metadata import version; print(version('habana-torch-plugin'))"
DOWNLOADS = "import torch, card_emulator; print(card_emulator.device().hostile)"


def run(*options: str, script: str) -> str:
    command = [sys.executable, "-c", "from card_emulator.cli import main; main()", "run", *options]
    done = subprocess.run([*command, "--", sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("options", "script", "printed"),
    [
        ((), ADD, "[2.0, 2.0] GAUDI2"),
        (("--card", "gaudi3"), CHILD, "[2.0, 2.0] GAUDI3"),
        (("--lazy",), LAZY, "True"),
        (("--compiled",), LAZY, "False"),
        ((), LAST_ROW, "[2]"),
        ((), PLUGIN, "1.24.0.400"),
        ((), DOWNLOADS, "True"),
        (("--kind",), DOWNLOADS, "False"),
    ],
)
def test_a_program_has_the_card(options: tuple[str, ...], script: str, printed: str) -> None:
    assert run(*options, script=script) == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "ascend910b", "--lazy", "--", "true"], "apply only to a Gaudi"),
        (["--torch-npu", "folder", "--", "true"], "applies only to --card ascend910b"),
        (["--", "/nonexistent"], "/nonexistent: No such file or directory"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_exit_status_is_the_programs() -> None:
    command = [sys.executable, "-c", "from card_emulator.cli import main; main()", "run", "--", "false"]
    assert subprocess.run(command, check=False).returncode == 1


def test_an_npu_needs_torch_npu(tmp_path: Path) -> None:
    chosen = door.variables(door.cached_door("ascend910b"), "ascend910b", torch_npu=tmp_path)
    environment = os.environ | chosen
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"not in {tmp_path}. " in done.stderr
