"""A wheel in an environment that has nothing else, as a user installs it: the demo, and a server."""

import json
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.full_tests.server import Running, serve_environment
from tests.pages import README, commands_for
from tests.support.ports import free_port

# Minutes of pip, and more where the machine has other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
WHERE = "from vllm_gaudi_spec.tools.compare.tasks import DEMO; print(DEMO / 'tiny')"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def output(command: list[str], folder: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    environment = serve_environment(PYTHONPATH="")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def commands() -> list[str]:
    """The README's: an environment, the installation, the demo."""
    return commands_for("tests/full_tests/test_wheel.py::test_wheel_runs_the_demo", README)


def index_answers() -> bool:
    try:
        with urllib.request.urlopen(f"{TORCH_INDEX}/torchvision/", timeout=30):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pack = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *pack], check=True)
    make, install, _ = commands()
    asked, reachable = install.partition(" --extra-index-url ")[0], index_answers()
    assert asked != install
    if not reachable:  # pip would try it for minutes for each package
        install = asked
    for command in (make.replace("python3", shlex.quote(sys.executable), 1), install):
        done = output(["bash", "-c", command], folder)
        assert done.returncode == 0, done.stderr
    return folder / "env" / "bin"


def test_doctor_finds_no_problem_in_a_wheel(binaries: Path) -> None:
    """Without PyTorch's index, as behind a mirror of PyPI alone, torchvision is of another build than torch."""
    done = output([str(binaries / "gaudi-spec"), "doctor"])
    assert done.returncode == 0, done.stdout


def test_wheel_runs_the_demo(binaries: Path, tmp_path: Path) -> None:
    assert commands()[-1] == "env/bin/gaudi-spec demo"
    short = ["--output-len", "12", "--num-prompts", "1", "--turns", "1"]
    done = output([str(binaries / "gaudi-spec"), "demo", *short], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tasks = json.loads((tmp_path / ".demo" / "run.json").read_text())["tasks"]
    assert set(tasks) == {"baseline", "ngram", "draft_model", "universal_draft"}
    assert (tmp_path / ".demo" / "report.html").stat().st_size > 10_000


def test_wheel_serves(binaries: Path, tmp_path: Path) -> None:
    """The command `vllm` starts, although no package has that name; drafts with a head out of the wheel."""
    models = output([str(binaries / "python"), "-c", WHERE]).stdout.strip()
    port = free_port()
    drafts = {"method": "eagle3", "model": f"{models}/eagle3", "num_speculative_tokens": 3}
    options = ["--port", str(port), "--dtype", "float32", "--speculative-config", json.dumps(drafts)]
    command = [str(binaries / "vllm"), "serve", f"{models}/target", *options]
    with Running(command, port, tmp_path / "serve.log", serve_environment(PYTHONPATH=""), tmp_path) as server:
        answer = server.complete(model=f"{models}/target", prompt="The quick", max_tokens=24, temperature=0)
        assert answer["usage"]["completion_tokens"] > 0
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
