"""All in-memory patches to vLLM and related libraries.

The docstring of each patch states the reason for the patch and the condition under which it can be removed. If upstream
code that a patch depends on changes, the tests in tests/unit/upstream/ fail. The modules in this folder that are not
imported here contain no patches. They collect the vLLM names that this plugin imports, by topic.
"""

from collections.abc import Iterable

from vllm_gaudi_spec.upstream.attention import make_mla_layers, return_attention_outputs
from vllm_gaudi_spec.upstream.configuration import (
    admit_features_of_second_runner,
    admit_min_p_and_logit_bias,
    admit_suffix_without_arctic,
    describe_drafters,
    keep_layer_types_of_step_mtp,
    leave_async_scheduling_to_the_platform,
    name_nearest_methods,
    raise_refusals_unchanged,
    read_inc_from_quant_config,
    read_positions_of_xlm_roberta,
    widen_speculative_options,
)
from vllm_gaudi_spec.upstream.distribution import answer_for_vllm_distribution
from vllm_gaudi_spec.upstream.domain_libraries import admit_domain_libraries_of_other_builds
from vllm_gaudi_spec.upstream.example_connector import recompute_resumed_requests
from vllm_gaudi_spec.upstream.experts import assign_cpu_experts, score_cpu_experts_by_sigmoid
from vllm_gaudi_spec.upstream.loading import (
    answer_accelerator_calls,
    choose_cpu_linears,
    construct_olmo_hybrid_without_triton,
    device_type_while_loading,
    list_unloaded_matrices,
    load_convolutions_of_olmo_hybrid,
    read_weights,
    refuse_pickled_weights,
    take_kimi_linear_of_plain_layers,
)
from vllm_gaudi_spec.upstream.messages import (
    end_errors_with_their_message,
    name_the_cause_of_a_failed_start,
    quiet_our_scheduler,
    share_vllm_logging,
)
from vllm_gaudi_spec.upstream.metrics import carry_metrics, list_metrics_of_ours
from vllm_gaudi_spec.upstream.ranks import (
    end_reads_from_other_machines,
    name_dead_ranks,
    pipeline_group,
    ray_workers,
    tensor_parallel_group,
)
from vllm_gaudi_spec.upstream.server import (
    answer_bad_media,
    end_engines_with_their_server,
    end_engines_with_their_threads,
    fail_with_the_engine,
    guard_every_path,
    leave_idle_work_at_shutdown,
    let_engine_finish,
    mend_adapter_loading,
    raise_when_the_engine_is_gone,
    refuse_params_before_verification,
    refuse_streamed_inputs,
    refuse_tokenized_params,
    take_drafts_from_outputs,
)
from vllm_gaudi_spec.upstream.speculators_format import mend_speculators_format
from vllm_gaudi_spec.upstream.views import (
    add_positions_in_siglip,
    add_to_states_of_gemma3n,
    convolve_blocks_of_dflash2,
    embed_tokens_by_layer_in_gemma3n,
    join_keys_of_minicpm3,
    scale_gates_of_falcon_h1,
    suppress_tokens_by_bias,
    take_tokens_in_gemma3n,
)


def apply() -> None:
    """Apply the patches that every vLLM process needs. This function may be called repeatedly."""
    share_vllm_logging()
    quiet_our_scheduler()
    name_the_cause_of_a_failed_start()
    let_engine_finish()
    end_engines_with_their_server()
    end_engines_with_their_threads()
    raise_when_the_engine_is_gone()
    end_reads_from_other_machines()
    name_dead_ranks()
    take_drafts_from_outputs()
    leave_idle_work_at_shutdown()
    guard_every_path()
    refuse_streamed_inputs()
    describe_drafters()
    refuse_pickled_weights()
    widen_speculative_options()
    raise_refusals_unchanged()  # after `widen`, which replaces the constructor
    admit_min_p_and_logit_bias()
    admit_suffix_without_arctic()
    admit_features_of_second_runner()
    mend_speculators_format()
    leave_async_scheduling_to_the_platform()
    name_nearest_methods()
    read_inc_from_quant_config()
    read_positions_of_xlm_roberta()
    keep_layer_types_of_step_mtp()
    carry_metrics()
    list_metrics_of_ours()


_GEMMA3N = (add_to_states_of_gemma3n, embed_tokens_by_layer_in_gemma3n)
_BY_ARCHITECTURE = {
    "DFlash2DraftModel": (convolve_blocks_of_dflash2,),
    "FalconH1ForCausalLM": (scale_gates_of_falcon_h1,),
    "Gemma3ForConditionalGeneration": (add_positions_in_siglip,),
    "KimiLinearForCausalLM": (take_kimi_linear_of_plain_layers,),
    "LlavaForConditionalGeneration": (add_positions_in_siglip,),
    "MiniCPM3ForCausalLM": (join_keys_of_minicpm3,),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": (*_GEMMA3N, take_tokens_in_gemma3n),
    "OlmoHybridForCausalLM": (construct_olmo_hybrid_without_triton, load_convolutions_of_olmo_hybrid),
}


def apply_to_models(architectures: Iterable[str]) -> None:
    """Import the classes of these models and apply the patches for them. This function may be called repeatedly."""
    for name in architectures:
        for patch in _BY_ARCHITECTURE.get(name, ()):
            patch()
