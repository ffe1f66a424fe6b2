"""Drafting methods by name, with the facts that are needed before PyTorch is there."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    proposer: str
    """Module of this folder and class, which has a constructor `build`. It is imported when it is used."""
    about: str
    """How it drafts, for readers who do not know it."""
    on_device: bool
    """It drafts on the device, between two steps, and so runs with async scheduling. Others draft on the host, after
    the one device-to-host sync of a step."""
    has_model: bool = False
    """The drafter is a model, loaded beside the target. Others look tokens up, or are a class of the user's."""
    has_kv: bool = False
    """The drafter keeps KV beside the target's."""
    reads_hidden_states: bool = False
    """The drafter reads the target's hidden states."""
    in_target: bool = False
    """The drafter's layers come with the target's checkpoint, so that no model needs to be named."""
    remembers_requests: bool = False
    """The drafter drafts from requests that have ended as well."""
    options: tuple[str, ...] = ()
    """vLLM's options for this method, in `speculative_config`; with other methods they are refused."""
    in_vllm: bool = False
    """vLLM has this value of `method`; others are added to its closed list."""

    @property
    def is_head(self) -> bool:
        """Whether the drafter is a small model on the target's hidden states, with KV of its own."""
        return self.reads_hidden_states and self.has_kv


_HEAD = Method(
    proposer="head.HeadProposer",
    about="a head on the model's inner states drafts",
    on_device=True,
    has_model=True,
    has_kv=True,
    reads_hidden_states=True,
    in_vllm=True,
)
_NGRAM = Method(
    proposer="ngram.NgramProposer",
    about="drafts what came after the same words before",
    on_device=False,
    options=("prompt_lookup_max", "prompt_lookup_min"),
    in_vllm=True,
)
DRAFT_MODEL, EAGLE3, MEDUSA = "draft_model", "eagle3", "medusa"
METHODS = {
    "ngram": _NGRAM,
    "ngram_gpu": replace(_NGRAM, proposer="ngram.DeviceNgramProposer", on_device=True),
    "suffix": Method(
        proposer="suffix.SuffixProposer",
        about="drafts the likeliest continuation of words seen before",
        on_device=False,
        remembers_requests=True,
        options=(
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        in_vllm=True,
    ),
    "custom_class": Method(
        proposer="custom.CustomProposer",
        about="a class of the user's drafts",
        on_device=False,
        options=("model",),
        in_vllm=True,
    ),
    DRAFT_MODEL: Method(
        proposer="draft_model.AutoregressiveProposer",
        about="a smaller model with the same tokens drafts",
        on_device=True,
        has_model=True,
        has_kv=True,
        in_vllm=True,
    ),
    "eagle": _HEAD,
    EAGLE3: _HEAD,
    "mtp": replace(_HEAD, about="a layer of the model itself drafts", in_target=True),
    MEDUSA: Method(
        proposer="medusa.MedusaProposer",
        about="several heads draft at once",
        on_device=True,
        has_model=True,
        reads_hidden_states=True,
        in_vllm=True,
    ),
}


def has_model(method: str | None) -> bool:
    """True also for a method of vLLM's without a row here, for which vLLM loads one; it is refused by name."""
    return method not in METHODS or METHODS[method].has_model
