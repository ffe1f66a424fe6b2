"""vllm-ascend's own code, and the vLLM it runs on, in an environment of theirs on a CPU: `make verify` makes it.

Real are vLLM, vllm-ascend's platform, configuration, proposers and attention, and the models. torch_npu and the
compiled parts of vllm-ascend are those of doubles/. Tensors are the CPU's.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

DOUBLES = str(Path(__file__).parent / "doubles")


def prepare() -> None:
    """What a process of vllm-ascend's does before anything else, its plugins and ours included."""
    sys.path.insert(0, DOUBLES)
    # vLLM looks at models in a process of their own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [DOUBLES, os.environ.get("PYTHONPATH")]))
    from vllm_ascend.platform import NPUPlatform

    NPUPlatform.dispatch_key = "CPU"
    NPUPlatform.is_pin_memory_available = classmethod(lambda cls: False)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import without_images

    without_images.replace_torchvision()
    # The worker's module imports all others in the order in which they can be, its patches of vLLM included.
    import vllm_ascend.worker.worker  # noqa: F401


if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]  # the environment of our own platform
else:
    prepare()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a drafter with other tokens, and a twin of the target with other ids."""
    from tests.integrations import models

    saved = {name: models.save(name, tmp_path_factory.mktemp(name)) for name in models.SIZES}
    return saved | {"twin": models.save_twin(saved["target"], tmp_path_factory.mktemp("twin"))}
