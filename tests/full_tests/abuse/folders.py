"""Folders that would run code of their own, were they trusted: pickled weights, Python beside the model, and a chat
template that does not end."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    pass


class OwnModel(LlamaForCausalLM):
    pass


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
_CLASSES = {
    "config.json": dict(AutoConfig="own_code.OwnConfig", AutoModelForCausalLM="own_code.OwnModel"),
    "tokenizer_config.json": dict(AutoTokenizer=["own_code.OwnTokenizer", "own_code.OwnTokenizer"]),
}


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def hostile_copy(model: str, folder: Path) -> Path:
    """A model that works, in a folder that leaves a file behind as soon as anything of its own is run."""
    shutil.copytree(model, folder)
    for name, classes in _CLASSES.items():
        described = json.loads((folder / name).read_text()) | {"auto_map": classes}
        (folder / name).write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(ENDLESS)
    (folder / "own_code.py").write_text(CODE.format(marker=str(folder / "ran-code")))
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin", "adapter_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(folder / "ran-pickle")))
    return folder


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ran-*"))
