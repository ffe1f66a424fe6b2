"""torchvision, in a folder of its own: only tests of multimodal models have it on their path, as it makes every start
longer. `requirements/install.py dev` fills the folder.

The file is made for CUDA, as is what users of PyPI get; see `upstream.admit_domain_libraries_of_other_builds`.
"""

import sys
from pathlib import Path

from vllm_gaudi_spec import upstream

FOLDER = Path(sys.prefix) / "torchvision"


def make_importable(folder: Path = FOLDER) -> None:
    """Before transformers or vLLM is imported."""
    sys.path.append(str(folder))
    upstream.admit_domain_libraries_of_other_builds()
    import torchvision  # noqa: F401
