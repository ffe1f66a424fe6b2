"""Fetches vLLM's tests, and writes a model hub's cache in which names that they use stand for tiny models."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.models import checkpoints
from tests.models.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".verify" / "upstream"
SOURCE, PACKAGES, BUILD = (
    ROOT / "requirements" / f"{name}.txt" for name in ("card-source", "vllm-tests", "card-build")
)
DEMO = ROOT / "demo" / "tiny"
MAX_LEN = 8192
LORA_RANK = 8


def prepare(models: dict[str, list[str]]) -> None:
    """Fetch the tests and what they import, and write the stand-ins. What is there and current stays."""
    stand_ins = json.dumps(models).encode() + Path(__file__).read_bytes()
    for name, made_of, make in (
        ("site", PACKAGES.read_bytes(), install),
        ("source", SOURCE.read_bytes(), unpack),
        ("home", stand_ins, partial(write_hub, models)),
    ):
        folder, stamp = STATE / name, STATE / f"{name}.made-of"
        digest = hashlib.sha256(made_of).hexdigest()
        if not stamp.exists() or stamp.read_text() != digest:
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder)
            stamp.write_text(digest)


def pip(*arguments: str | Path, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--disable-pip-version-check"], env=os.environ | environment, check=True)


def install(folder: Path) -> None:
    """The few packages that their tests import, and the name by which vLLM's processes find the adapter."""
    pip("install", "--target", folder, "-r", PACKAGES)
    package = folder / "verify_upstream-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: verify-upstream\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nverify_upstream = adapter:register\n")


def unpack(folder: Path) -> None:
    """pip asks a source for its metadata, so it needs what builds vLLM."""
    print("fetching vLLM's source distribution", flush=True)
    tools = folder / "build"
    pip("install", "--target", tools, "-r", BUILD)
    options = ("--no-build-isolation", "--no-binary", "vllm", "--dest", folder, "-r", SOURCE)
    pip("download", *options, PYTHONPATH=str(tools), VLLM_TARGET_DEVICE="empty", VLLM_SKIP_VERSION_SUFFIX="1")
    [archive] = folder.glob("vllm-*.tar.gz")
    with tarfile.open(archive) as source:
        top = source.getnames()[0].split("/")[0]
        parts = tuple(f"{top}/{part}" for part in ("tests/", "examples/", "pyproject.toml"))
        source.extractall(folder, [m for m in source.getmembers() if m.name.startswith(parts)], filter="data")
    for path in (folder / top).iterdir():
        path.rename(folder / path.name)
    (folder / top).rmdir()
    archive.unlink()
    shutil.rmtree(tools)


def write_hub(names: dict[str, list[str]], folder: Path) -> None:
    """`names`: kind of stand-in -> names that mean it. A kind is a folder of demo/tiny, `lora`, or a case of
    tests/models, with the fields of its configuration that differ (`bert hidden_size=384`)."""
    shutil.rmtree(folder, ignore_errors=True)
    for kind, meant in names.items():
        model = folder / "stand-ins" / kind.replace(" ", "-")
        if kind == "lora":
            _write_adapter(model)
        elif (DEMO / kind).is_dir():
            _copy_demo(DEMO / kind, model)
        else:
            case, *fields = kind.split()
            recipe = ARCHITECTURES[case]
            config = recipe.config | {name: json.loads(value) for name, value in (one.split("=") for one in fields)}
            cache = ROOT / ".verify" / "models" / "checkpoints"
            shutil.copytree(checkpoints.make(case, replace(recipe, config=config), cache), model)
            if recipe.pooling == "embed":
                _write_modules(model, config["hidden_size"])
        for name in meant:
            _link(name, model, folder / "hub")


def _link(name: str, model: Path, hub: Path) -> None:
    revision = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / revision).symlink_to(model)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)


def _copy_demo(model: Path, folder: Path) -> None:
    """In float32, where a tie does not decide a token; long enough for the tests; and with an end to each answer,
    since tests that set none rely on the end token of a real model."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    for part in (config, config.get("transformer_layer_config", {})):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = "float32"
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = MAX_LEN
    path.write_text(json.dumps(config))
    path = folder / "tokenizer_config.json"
    if path.exists():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": MAX_LEN}))
        generation = {"bos_token_id": 0, "eos_token_id": 0, "max_new_tokens": 64}
        (folder / "generation_config.json").write_text(json.dumps(generation))


def _write_modules(folder: Path, hidden: int) -> None:
    """Write what sentence-transformers and vLLM read: the vector of a text is the mean of its tokens', normalized."""
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Normalize").mkdir()


def _write_adapter(folder: Path) -> None:
    """A random adapter for the attention of the demo's target."""
    config = json.loads((DEMO / "target" / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"A": (LORA_RANK, hidden), "B": (count * config["head_dim"], LORA_RANK)}
            for side, shape in shapes.items():
                weights[f"{prefix}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.1
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "bias": "none",
    }
    adapter |= {"target_modules": list(heads), "base_model_name_or_path": "demo/tiny/target"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
