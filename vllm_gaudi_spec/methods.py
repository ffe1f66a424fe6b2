"""Tables of drafting methods and acceptance rules, with the properties that are needed before PyTorch is imported.

The drafter for a method is a class in `drafting/`, which `drafting/load.py` imports. A rule is the function `verify` in
the module of the same name in `sampling/rules/`, which `sampling/rules/registry.py` imports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    proposer: str
    """Module in `drafting/` and class name. The class must have a class method `build`."""
    parallel_proposer: str = ""
    """Module and class name for `parallel_drafting`, if it uses a different class."""
    about: str
    """Description in plain words of how the method drafts."""
    on_device: bool
    """Whether the method drafts on the device and therefore supports async scheduling.

    Other methods draft on the host, after the device-to-host sync of a step.
    """
    has_model: bool = False
    """Whether the drafter is a model. Other drafters look up tokens or are user-defined classes."""
    has_kv: bool = False
    """Whether the drafter has its own KV, whether or not it is stored in the target's blocks."""
    reads_hidden_states: bool = False
    """Whether the drafter reads the target's hidden states."""
    model_class: str = "models.LoadedHead"
    """Module in `drafting/` and class name for a loaded model that uses the target's hidden states."""
    architectures: tuple[str, ...] = ()
    """Checkpoint architectures that are used only by this method. Empty if the method accepts any architecture."""
    fills_block: bool = False
    """Whether one forward pass fills a block of tokens that starts with the newest token."""
    predicts_from_newest: bool = False
    """Whether the newest token's position in a block also predicts a draft token, unless the checkpoint disables it."""
    reads_layers: bool = False
    """Whether the drafter reads hidden states from several target layers, unless the checkpoint disables this."""
    in_target: bool = False
    """Whether the target's checkpoint contains the drafter's layers. If so, users do not have to name a model."""
    remembers_requests: bool = False
    """Whether the drafter also uses the tokens of finished requests."""
    runs_on_last_stage: bool = False
    """Whether the method was tested with pipeline parallelism."""
    options: tuple[str, ...] = ()
    """Options in `speculative_config` that are rejected with other methods, unless those methods list them too."""
    in_vllm: bool = False
    """Whether vLLM itself accepts this value of `method`. If not, `upstream/` adds support for it."""

    @property
    def is_head(self) -> bool:
        """Whether the drafter is a head, a small model that reads the target's hidden states and has its own KV."""
        return self.reads_hidden_states and self.has_kv


_HEAD = Method(
    proposer="head.HeadProposer",
    about="a head drafts from the model's hidden states",
    on_device=True,
    has_model=True,
    has_kv=True,
    reads_hidden_states=True,
    in_vllm=True,
)
_NGRAM = Method(
    proposer="ngram.NgramProposer",
    about="drafts what followed the same words earlier",
    on_device=False,
    runs_on_last_stage=True,
    options=("prompt_lookup_max", "prompt_lookup_min"),
    in_vllm=True,
)
_BLOCK = replace(
    _HEAD,
    proposer="block.BlockProposer",
    options=("parallel_drafting",),  # set by vLLM
    model_class="block.BlockModel",
    architectures=("DFlashDraftModel", "DFlash2DraftModel", "DFlashMuseGlimmerAssistantModel"),
    fills_block=True,
    reads_layers=True,
    about="drafts a block of tokens in one pass",
)
DFLASH, DRAFT_MODEL, EAGLE3, MEDUSA = "dflash", "draft_model", "eagle3", "medusa"
NGRAM, NGRAM_GPU, SUFFIX = "ngram", "ngram_gpu", "suffix"
METHODS = {
    NGRAM: _NGRAM,
    NGRAM_GPU: replace(_NGRAM, proposer="ngram.DeviceNgramProposer", on_device=True),
    SUFFIX: Method(
        proposer="suffix.SuffixProposer",
        about="drafts the most likely continuation of words seen before",
        on_device=False,
        remembers_requests=True,
        runs_on_last_stage=True,
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
        about="drafts with the user's own class",
        on_device=False,
        options=("model",),
        in_vllm=True,
    ),
    DRAFT_MODEL: Method(
        proposer="draft_model.AutoregressiveProposer",
        parallel_proposer="parallel.ParallelModelProposer",
        about="a smaller model with the same vocabulary drafts",
        on_device=True,
        has_model=True,
        has_kv=True,
        runs_on_last_stage=True,
        options=("parallel_drafting",),
        in_vllm=True,
    ),
    "eagle": replace(_HEAD, runs_on_last_stage=True),
    EAGLE3: replace(
        _HEAD,
        reads_layers=True,
        parallel_proposer="parallel.ParallelHeadProposer",
        options=("parallel_drafting",),
    ),
    "mtp": replace(
        _HEAD,
        proposer="mtp.ChainedProposer",
        model_class="mtp.MTPModel",
        about="the model's own MTP layers draft",
        in_target=True,
    ),
    DFLASH: _BLOCK,
    "dspark": replace(
        _BLOCK,
        architectures=("Qwen3DSparkModel", "Qwen3OmniDSparkModel"),
        predicts_from_newest=True,
        about="drafts a block of tokens in one pass, each based also on the one before it",
    ),
    MEDUSA: Method(  # with vLLM 0.32 only
        proposer="medusa.MedusaProposer",
        about="several heads draft at once",
        on_device=True,
        has_model=True,
        reads_hidden_states=True,
        model_class="medusa.LoadedMedusa",
        in_vllm=True,
    ),
}


def has_model(method: str | None) -> bool:
    """Return whether the drafter of a method is a model.

    This is also true of vLLM methods that are not in the table, because vLLM loads a model before we can reject them.
    """
    return method not in METHODS or METHODS[method].has_model


# --- acceptance rules ---

STRICT, SYNTHETIC = "strict", "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRule:
    about: str
    """Short description of the rule's purpose."""
    needs_probs: bool = False
    """Whether the rule reads the distributions from which drafts were sampled.

    Without them (in greedy or coupled drafting), the strict rule runs and samples the same distribution.
    """
    in_vllm: bool = False
    """Whether vLLM itself accepts this value of `rejection_sample_method`. If not, `upstream/` adds support for it."""


RULES = {
    STRICT: AcceptanceRule(about="the output is the same as without drafts, token for token"),
    "standard": AcceptanceRule(about="rejection sampling: exact in distribution", needs_probs=True, in_vllm=True),
    "block": AcceptanceRule(about="exact in distribution, and accepts more", needs_probs=True, in_vllm=True),
    SYNTHETIC: AcceptanceRule(about="for benchmarks: accepts at given rates, regardless of the models", in_vllm=True),
}
