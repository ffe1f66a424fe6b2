"""Engine configurations drawn at random: drafters, numbers of drafts, schedules, and always too little memory."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.full_tests import heads
from tests.full_tests.speculation import ngram, suffix

MAX_LEN = 384
MOST_DRAFTS = {"medusa": 4, "mtp": 8, "eagle": 8, "eagle3": 8}
"""The largest number of drafts of the methods that allow fewer than 16."""
METHODS = (
    *("ngram", "ngram_gpu", "suffix", "draft_model", "map", "retokenize", "slem"),
    *("eagle", "eagle3", "mtp", "medusa"),
)
_ONE_HOT = [{}, dict(rejection_sample_method="strict")]
_COUPLED = dict(draft_sample_method="coupled", rejection_sample_method="strict")
_PROBABILISTIC = [
    dict(draft_sample_method="probabilistic", rejection_sample_method=rule) for rule in ("standard", "block")
]


@dataclass(frozen=True)
class Configuration:
    """An engine that speculates."""

    method: str
    seed: str
    speculative: dict[str, Any]
    """`--speculative-config`, except the drafter's model where it is a fixture."""
    options: tuple[str, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    """`--additional-config`'s `gaudi_spec`."""

    def __str__(self) -> str:
        return f"{self.method}-{self.seed}"

    @property
    def num_drafts(self) -> int:
        return int(self.speculative["num_speculative_tokens"])

    @property
    def has_priorities(self) -> bool:
        return "priority" in self.options

    @property
    def promises_seeds(self) -> bool:
        """Whether a seed gives the same tokens with drafts as without; otherwise only greedy requests do."""
        return self.speculative.get("draft_sample_method") != "probabilistic"

    @property
    def drafter(self) -> str | None:
        """The fixture with the drafter's model."""
        return {"draft_model": "close_relative", "map": "twin", "retokenize": "twin", "slem": "twin"}.get(self.method)

    @property
    def target(self) -> str | None:
        """The target's folder; None for the looping Llama."""
        return heads.target(self.method) if self.method in heads.METHODS else None


def draw(method: str, seed: str) -> Configuration:
    """Return the configuration that `method` and `seed` stand for."""
    rng = random.Random(f"{method}/{seed}")
    k = rng.randint(1, MOST_DRAFTS.get(method, 16))
    rules = [*_ONE_HOT]
    if method not in ("ngram", "ngram_gpu", "suffix", "slem"):
        rules += [_COUPLED, _COUPLED, rng.choice(_PROBABILISTIC)]
    speculative = _SPECULATIVE.get(method, heads.head)(method, k) | rng.choice(rules)
    if method in ("draft_model", "map") and rng.random() < 0.3:
        speculative["max_model_len"] = rng.choice([64, 128])
    block_size = rng.choice([16, 32])
    # Room for little more than one of the longest requests, of up to 24 that may run.
    num_blocks = 1 + round(rng.uniform(1.05, 1.5) * MAX_LEN / block_size)
    options = [
        *("--max-model-len", str(MAX_LEN), "--block-size", str(block_size)),
        *("--num-gpu-blocks-override", str(num_blocks)),
        *("--max-num-seqs", str(rng.choice([8, 16, 24]))),
        *("--max-num-batched-tokens", str(rng.choice([96, 96, 256, 1024]))),
        rng.choice(["--async-scheduling", "--no-async-scheduling"]),
        rng.choice(["--enable-prefix-caching", "--no-enable-prefix-caching"]),
        *("--scheduling-policy", rng.choice(["fcfs", "priority"])),
    ]
    speculative["enable_adaptive_verification"] = rng.random() < 0.4
    extra: dict[str, Any] = dict(audit_every=rng.choice([0, 0, 1, 3]))
    if method in ("retokenize", "slem"):
        extra |= dict(universal_context="retokenize", universal_match="slem" if method == "slem" else "tli")
    return Configuration(method, seed, speculative, tuple(options), extra)


_SPECULATIVE: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "ngram": lambda method, k: ngram(k),
    "ngram_gpu": lambda method, k: ngram(k) | dict(method=method),
    "suffix": lambda method, k: suffix(k),
    "draft_model": lambda method, k: dict(method=method, num_speculative_tokens=k),
    **dict.fromkeys(
        ("map", "retokenize", "slem"), lambda method, k: dict(method="universal_draft", num_speculative_tokens=k)
    ),
}
