"""The list of all in-memory patches of vLLM and its surroundings. Each one's docstring has its reason and its end.

tests/unit/compat/ fails when upstream changes what one of these patches.
"""

from vllm_gaudi_spec.compat.attention import make_mla_layers, return_attention_outputs
from vllm_gaudi_spec.compat.configuration import (
    admit_min_p_and_logit_bias,
    admit_suffix_without_arctic,
    describe_drafters,
    leave_async_scheduling_to_the_platform,
    name_a_missing_torchvision,
    raise_refusals_unchanged,
    read_inc_from_quant_config,
    widen_speculative_options,
)
from vllm_gaudi_spec.compat.distribution import answer_for_vllm_distribution
from vllm_gaudi_spec.compat.domain_libraries import admit_domain_libraries_of_other_builds
from vllm_gaudi_spec.compat.loading import (
    answer_accelerator_calls,
    choose_cpu_linears,
    device_type_while_loading,
    read_weights,
    refuse_pickled_weights,
)
from vllm_gaudi_spec.compat.messages import end_errors_with_their_message, quiet_our_scheduler, share_vllm_logging
from vllm_gaudi_spec.compat.metrics import carry_metrics, list_metrics_of_ours
from vllm_gaudi_spec.compat.ranks import assign_cpu_experts, ray_workers, tensor_parallel_group
from vllm_gaudi_spec.compat.server import (
    answer_bad_adapters,
    answer_bad_media,
    end_engines_with_their_server,
    fail_with_the_engine,
    leave_idle_work_at_shutdown,
    let_engine_finish,
)

# `apply`, and the patches that only some processes need, each called where it is needed.
__all__ = [
    "admit_domain_libraries_of_other_builds",
    "answer_accelerator_calls",
    "answer_bad_adapters",
    "answer_bad_media",
    "answer_for_vllm_distribution",
    "apply",
    "assign_cpu_experts",
    "choose_cpu_linears",
    "device_type_while_loading",
    "end_errors_with_their_message",
    "fail_with_the_engine",
    "make_mla_layers",
    "ray_workers",
    "read_weights",
    "return_attention_outputs",
    "tensor_parallel_group",
]


def apply() -> None:
    """Applies all patches that every vLLM process needs. Idempotent."""
    share_vllm_logging()
    quiet_our_scheduler()
    let_engine_finish()
    end_engines_with_their_server()
    leave_idle_work_at_shutdown()
    describe_drafters()
    refuse_pickled_weights()
    widen_speculative_options()
    raise_refusals_unchanged()  # after `widen`, which replaces the constructor
    admit_min_p_and_logit_bias()
    admit_suffix_without_arctic()
    leave_async_scheduling_to_the_platform()
    name_a_missing_torchvision()
    read_inc_from_quant_config()
    carry_metrics()
    list_metrics_of_ours()
