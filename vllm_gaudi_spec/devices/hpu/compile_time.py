"""How long a Gaudi compiles: an estimate from what others published."""

# vllm-gaudi's documentation: Llama-3.1-8B in BF16 warms up in 66 s without a recipe cache and in 23 s with one, and 72
# buckets took 49 s elsewhere in it. Taken as one graph each, which is inferred.
COMPILE_SECONDS = 49 / 72
CACHED_COMPILE_SECONDS = COMPILE_SECONDS * 23 / 66


def warmup_seconds(num_graphs: int, recipe_cache: bool = False) -> float:
    """Estimate of compiling this many graphs, for either card: of Gaudi 3 no times are published."""
    return num_graphs * (CACHED_COMPILE_SECONDS if recipe_cache else COMPILE_SECONDS)
