"""vllm-ascend's own code, and the vLLM it runs on, over the emulated CANN; `make verify` makes their environment.

Real are vLLM, vllm-ascend's platform, configuration, proposers and attention, the models, and Huawei's torch_npu. The
compiled parts of vllm-ascend are those of doubles/.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import card_emulator
from vllm_gaudi_spec.environment import cache_folder, set_torch_npu_defaults, torch_npu_folder

HERE = Path(__file__).parent


def prepare() -> None:
    """What a process of vllm-ascend's does before anything else, its plugins and ours included."""
    paths = [str(HERE / "engine"), str(torch_npu_folder()), str(HERE / "doubles")]
    sys.path[:0] = paths
    # Engines, and the processes in which vLLM inspects models, read these variables.
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(HERE.parents[1])])
    # vllm-ascend's own switch: memory that is mapped piece by piece is not emulated.
    os.environ["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:False"
    set_torch_npu_defaults()
    card_emulator.install_npu(torch_npu_folder(), cache_folder())
    import serve

    serve.prepare()


if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]  # the environment of our own platform
else:
    prepare()


# The drafter learns its tokens from this.
CORPUS = """A compile costs seconds; the decode step has one shape per bucket, whatever the fox says. Drafts are
proposed by a small model, verified by a large one, and forgotten when they were wrong. Nothing else changes, neither
what is written nor how probable it was: the lazy dog sleeps through all of it, every single night."""
PADDING = 8  # rows that a model has more than its tokenizer has tokens


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a drafter of which only some tokens are the target's, and a twin of the target; all with ids of their
    own."""
    from tests.full_tests import tiny_models

    folder, size = tmp_path_factory.mktemp, 460
    target = tiny_models.save(
        lambda: tiny_models.looping_llama(vocab_size=tiny_models.VOCAB + PADDING), folder("target")
    )
    other = tiny_models.save(lambda: tiny_models.llama(vocab_size=size + PADDING), folder("other"), size, corpus=CORPUS)
    renumbered = {
        name: tiny_models.save_renumbered(model, folder(name)) for name, model in (("drafter", other), ("twin", target))
    }
    return renumbered | {"target": target}
