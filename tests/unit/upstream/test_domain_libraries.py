"""torchvision, torchaudio and torchcodec of other builds than torch: the first can be imported once two schemas are
defined, and the others count as missing."""

from pathlib import Path

import pytest

from tests.models import vision
from tests.support.processes import run_code

ADMITTED = "from vllm_gaudi_spec import upstream; upstream.admit_domain_libraries_of_other_builds()"
IMPORT = f"""
import sys; sys.path.append({str(vision.FOLDER)!r})
{{first}}
import torch, torchvision.transforms.v2.functional as functional
print(functional.resize(torch.zeros(3, 5, 7), [2, 2]).shape)
"""


@pytest.mark.parametrize(
    ("first", "imports"),
    [
        # fails when torchvision asks for its operators: then `upstream/domain_libraries.py` can go
        ("import torch", False),
        (ADMITTED, True),
    ],
    ids=["alone", "with schemas"],
)
def test_its_import(first: str, imports: bool) -> None:
    done = run_code(IMPORT.format(first=first))
    assert done.stdout == ("torch.Size([3, 2, 2])\n" if imports else ""), done.stderr
    assert imports or "operator torchvision::nms does not exist" in done.stderr


def test_what_cannot_be_loaded_counts_as_missing(tmp_path: Path) -> None:
    for library in ("torchaudio/lib/libtorchaudio.abi3.so", "torchcodec/libtorchcodec_image.so"):
        (tmp_path / library).parent.mkdir(parents=True)
        (tmp_path / library.partition("/")[0] / "__init__.py").touch()
        (tmp_path / library).write_text("not for this torch")
    code = f"""
import sys; sys.path.append({str(tmp_path)!r})
from importlib.util import find_spec
find = lambda: [find_spec(package) is not None for package in ("torchaudio", "torchcodec")]
print(find())
{ADMITTED}
print(find())
"""
    done = run_code(code, check=True)
    assert done.stdout.splitlines()[-2:] == ["[True, True]", "[False, False]"]
