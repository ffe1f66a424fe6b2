"""Private methods of vLLM that our classes override, with their parameters.

A release of vLLM may rename them or change their parameters, and ours would then be ignored without an error.
tests/unit/upstream/test_overrides.py compares this table with vLLM and with our classes. Whether vLLM still calls them,
only the tests of what they do can tell.
"""

from vllm_gaudi_spec.upstream.release import FROM_0_33

OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "LRUCacheWorkerLoRAManager._load_adapter": ("lora_request",),
    "MoERunner._maybe_apply_routed_scale_to_output": ("shared_output", "fused_output"),
    "MoERunner._select_forward": (),
    "Platform._align_hybrid_block_size": ("vllm_config", "backend_cls"),
    "RayExecutorV2._get_actor_resource_kwargs": (),
    "RayExecutorV2._init_executor": (),
    "Scheduler._free_request": ("request", "delay_free_blocks"),
    "Scheduler._get_local_prefix_cache_hit": ("request", *(["max_cache_hit_length"] if FROM_0_33 else [])),
    "Scheduler._mamba_block_aligned_split": (
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ),
    "Scheduler._try_schedule_encoder_inputs": (
        "request",
        "num_computed_tokens",
        "num_new_tokens",
        "encoder_compute_budget",
        "shift_computed_tokens",
    ),
}
"""By the class of vLLM from which ours derives."""
