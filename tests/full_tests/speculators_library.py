"""Block drafters in the format of the library speculators, and what the library itself computes with them.

The library is not installed with the tests, so its logits are recorded: where it is,
`python -m tests.full_tests.speculators_library` writes speculators_logits.json. Release 0.9.0 wrote the recorded ones.
"""

import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.full_tests.block_drafters import CANDIDATES, KINDS, Kind, make_drafter
from tests.full_tests.heads import target, text

RECORDED = Path(__file__).with_name("speculators_logits.json")
TARGET = target("dflash")
K = 4
NUM_BEST = CANDIDATES - 1
"""Recorded logits of a place. In training, the library may replace the last candidate of DFlash2."""
LENGTHS = {
    "dflash": (12, 65),
    "dflash windows": (12,),
    "dflash mixed windows": (12,),
    "dflash reduced vocabulary": (12, 65),
    "dflash2": (12, 65),
    "dspark": (12, 65),
    "dspark fill-in": (12, 65),
    "dspark windows": (12,),
    "dspark reduced vocabulary": (12, 65),
}
"""Kinds that the library has -> lengths of texts. There a window is counted from the anchor for the whole block, in
vLLM and here from each query, so texts of those kinds are shorter than the window."""
_NOT_OF_THE_LAYERS = ("architectures", "dflash_config", "draft_vocab_size", "block_size", "is_causal")
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def rewrite_drafter(source: str, folder: Path, kind: Kind, num_drafts: int, verifier: str = TARGET) -> str:
    """Write the drafter in `source`, of `make_drafter`, as the library saves its own."""
    config = json.loads((Path(source) / "config.json").read_text())
    options = config.pop("dflash_config", None) or {
        name: config.pop(name) for name in ("mask_token_id", "target_layer_ids", "markov_rank")
    }
    weights = load_file(Path(source) / "model.safetensors")
    vocab, theta = config["vocab_size"], config.pop("rope_theta")
    sample_from_anchor = config.pop("sample_from_anchor", kind.family == "dspark")
    written: dict[str, Any] = {
        "architectures": [{"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind.family] + "DraftModel"],
        "speculators_model_type": kind.family,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in options["target_layer_ids"]],
        "block_size": num_drafts + (0 if sample_from_anchor else 1),
        "draft_vocab_size": kind.draft_vocab or vocab,
        "dtype": config["dtype"],
        "mask_token_id": options["mask_token_id"],
        "sample_from_anchor": sample_from_anchor,
        "sliding_window_non_causal": not config.get("is_causal", True),
        "speculators_config": {
            "algorithm": kind.family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {name: config[name] for name in config if name not in _NOT_OF_THE_LAYERS}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
    }
    if kind.family == "dflash2":
        written |= {name: options[name] for name in _SELECTOR}
    if kind.family == "dspark":
        written |= dict(
            markov_rank=options["markov_rank"],
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        )
        weights["confidence_head.proj.weight"] = torch.ones(1, config["hidden_size"] + options["markov_rank"])
        weights["confidence_head.proj.bias"] = torch.zeros(1)
    if kind.draft_vocab is not None:
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        weights["t2d"][weights["d2t"] + torch.arange(kind.draft_vocab)] = True
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def split_text(length: int) -> tuple[list[int], list[int]]:
    """Return a text of `length` tokens and K tokens to stand for its drafts."""
    tokens = text(length + K)
    return tokens[:length], tokens[length:]


# --- recording, where the library is installed ---


class _Library:
    def __init__(self, folder: str, kind: Kind) -> None:
        import speculators
        from transformers import AutoModelForCausalLM

        config = speculators.SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        self._model = speculators.SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        self._core = import_module(f"speculators.models.{kind.family}.core")
        self._target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()

    @torch.no_grad()
    def best(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens of each place and their logits, [K, NUM_BEST], of the model's training pass."""
        tokens, drafts = split_text(length)
        block_size, first = self._model.block_size, 0 if self._model.config.sample_from_anchor else 1
        tokens_1T = torch.tensor([tokens + drafts + [0] * block_size])
        states = self._target(tokens_1T, output_hidden_states=True).hidden_states
        is_anchor_1T = torch.zeros_like(tokens_1T)
        is_anchor_1T[0, length - 1] = 1
        metrics: dict[str, Any] = {}
        compute = self._core.compute_metrics

        def keep(*args: Any, **named: Any) -> tuple[Tensor, dict[str, Any]]:
            metrics.update(named, **({"logits": args[0]} if args else {}))
            return torch.zeros(()), {}

        self._core.compute_metrics = keep
        try:
            self._model(
                hidden_states=torch.cat([states[layer] for layer in self._model.target_layer_ids], dim=-1),
                input_ids=tokens_1T,
                loss_mask=is_anchor_1T,
                verifier_last_hidden_states=states[-1],
                document_ids=torch.zeros_like(tokens_1T),
                max_anchors=1,
            )
        finally:
            self._core.compute_metrics = compute
        if "candidate_logits" in metrics:
            ids_KN, logits_KN = metrics["training_candidate_ids"][0], metrics["candidate_logits"][0]
        else:
            logits_KN, ids_KN = metrics["logits"][0].topk(NUM_BEST)
            if self._model.d2t is not None:
                ids_KN = ids_KN + self._model.d2t[ids_KN]
        return ids_KN[first : first + K, :NUM_BEST], logits_KN[first : first + K, :NUM_BEST]


def main() -> None:
    recorded: dict[str, Any] = {"speculators": version("speculators"), "rounds": []}
    with TemporaryDirectory() as folder:
        for name, lengths in LENGTHS.items():
            source = make_drafter(Path(folder) / f"{name} source", KINDS[name], TARGET)
            library = _Library(rewrite_drafter(source, Path(folder) / name, KINDS[name], K), KINDS[name])
            for length in lengths:
                ids_KN, logits_KN = library.best(length)
                logits = [[round(value, 6) for value in logits_N] for logits_N in logits_KN.tolist()]
                recorded["rounds"].append(dict(kind=name, length=length, ids=ids_KN.tolist(), logits=logits))
    RECORDED.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
