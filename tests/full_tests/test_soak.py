"""Two minutes of mixed load through a server that drafts leave nothing behind. `make soak` runs ten."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full_tests.server import end_with_parent


def soak(seconds: int, method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    figures = folder / "figures.json"
    command = [sys.executable, "-m", "tests.full_tests.soak"]
    command += [*("--seconds", str(seconds), "--method", method, "--json", str(figures))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 900, preexec_fn=end_with_parent, check=False
    )
    print(done.stdout)
    return done


@pytest.mark.slow  # what a server keeps, tests/full_tests/abuse looks at as well
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["draft_model", "universal_draft", "retokenize", "suffix", "ngram_gpu", "ngram"])
def test_nothing_is_left_behind(method: str, tmp_path: Path) -> None:
    done = soak(300, method, tmp_path)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-3000:]}"
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["load_compared"] > 50
    assert figures["steps"] > 500
