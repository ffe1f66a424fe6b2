"""The emulator knows nothing of the engines that run on it."""

from pathlib import Path

import pytest

import card_emulator

SOURCES = sorted(
    path for path in Path(card_emulator.__file__).parent.rglob("*") if path.suffix in (".py", ".cpp", ".h")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_file_imports_an_engine_or_reads_its_variables(path: Path) -> None:
    text = path.read_text()
    assert not [name for name in ("vllm_gaudi_spec", "VGS_", "import vllm", "from vllm") if name in text]
