"""The architectures: NAME -> class of transformers, configuration, and what a published checkpoint has besides."""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.full_tests import tiny_models
from tests.models.media import ASKED
from vllm_gaudi_spec.recurrent.table import SERVED

WINDOW = 16


@dataclass(frozen=True)
class Recipe:
    """How one tiny checkpoint is made, and run."""

    architecture: str
    """The class of transformers that makes it and, unless `published` names another, the class of vLLM's registry."""
    config: dict[str, Any]
    """Keyword arguments of its configuration class."""
    published: dict[str, Any] = field(default_factory=dict)
    """What the config.json of published checkpoints has and the configuration class does not write."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of names of weights as transformers writes them, and what published checkpoints have there. Those of one
    name are joined."""
    transposed: str | None = None
    """A pattern of names of weights that published checkpoints have with inputs before outputs."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of `LLM`."""
    embedding: float | None = None
    """Standard deviation of the embedding; it decides how much of the next token follows from the last one alone."""
    final_norm: float = 0.0
    """Added to the weight of the last norm: logits spread where a tied embedding is small."""
    suppressed: tuple[int, ...] = ()
    """Tokens that its generation_config.json forbids."""
    pooling: str | None = None
    """What a pooling model is asked for: `embed`, `classify`, `token_embed` or `token_classify`."""
    vision: bool = False
    """Whether its class cannot be imported without torchvision."""
    media: str | None = None
    """Of media.py: its processor, and the images, video or sound that it is asked about."""
    format: str | None = None
    """Of formats.py: what its weights are rounded to."""
    tolerance: float = 0.02
    """How far a token's log-probability may be off: rounding in the worst of the models, and some."""


def shape(**overrides: Any) -> dict[str, Any]:
    """The sizes that most configuration classes name alike. None as a value leaves one out."""
    found = tiny_models.common(**overrides)
    del found["initializer_range"]  # weights are drawn in checkpoints.py
    return {name: value for name, value in found.items() if value is not None}


# ---- parts that several have -----------------------------------------------------------------------------

# Of models that scale up what they read from a tied embedding, which would drown everything else.
SMALL_EMBEDDING: dict[str, Any] = dict(embedding=0.02, final_norm=3.0)
ALTERNATING = ["sliding_attention", "full_attention"]
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]
ONE_WINDOW: dict[str, Any] = dict(layer_types=ALTERNATING, sliding_window=WINDOW)
THREE_WINDOWS: dict[str, Any] = dict(num_hidden_layers=4, layer_types=THREE_TO_ONE, sliding_window=WINDOW)
GPT2 = dict(vocab_size=400, n_positions=512, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
ROUTED = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=32,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
)
ONE_GROUP = dict(n_group=1, topk_group=1)
# Every size another, so that one taken for another shows.
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4,
    head_dim=None,
    q_lora_rank=48,
    kv_lora_rank=40,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=20,
)
# Many heads: where all of them are below zero, keys have equal scores, of which transformers selects any.
SPARSE = dict(index_topk=16, index_head_dim=32, index_n_heads=16)
# Multipliers of Granite and its kin, each away from one.
SCALES = dict(embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=0.5, attention_multiplier=0.1)
YARN = dict(
    rope_type="yarn",
    rope_theta=10_000.0,
    factor=4.0,
    original_max_position_embeddings=1024,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
QWEN_YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=1024)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# transformers cuts every step off at the least that it initializes, and vLLM does not: so low that none is cut off.
LOW_STEPS = dict(time_step_min=1e-6, time_step_floor=1e-2)
MAMBA = dict(mamba_n_heads=8, mamba_d_state=16, mamba_d_head=32, mamba_n_groups=1, mamba_chunk_size=16)
LINEAR = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    layer_types=["linear_attention", "full_attention"],
)
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
TEXT_ONLY = dict(language_model_only=True)


def rope(share: float) -> dict[str, Any]:
    """Plain rotary embeddings of a share of each head."""
    return dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=share)


def text(model_type: str, **overrides: Any) -> dict[str, Any]:
    """The text part of a configuration with several."""
    return dict(model_type=model_type, **shape(**overrides))


def plain(architecture: str, **overrides: Any) -> Recipe:
    """A recipe of nothing but these sizes."""
    return Recipe(architecture, shape(**overrides))


def alias(architecture: str, made_by: str, config: dict[str, Any], **published: Any) -> Recipe:
    return Recipe(made_by, config, published=dict(architectures=[architecture], **published))


def gemma3n(**overrides: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=ALTERNATING * 2,
        sliding_window=WINDOW,
        vocab_size_per_layer_input=tiny_models.VOCAB,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.9, 0.9, 0.0, 0.0],
        intermediate_size=[256] * 4,
        tie_word_embeddings=True,
    )
    return shape(**found | overrides)


def gemma4(**overrides: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(
        num_hidden_layers=4,
        layer_types=ALTERNATING * 2,
        sliding_window=WINDOW,
        global_head_dim=64,
        vocab_size_per_layer_input=tiny_models.VOCAB,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=True,
    )
    return shape(**found | overrides)


def llama4(**overrides: Any) -> dict[str, Any]:
    # A chunk is smaller than the longest text; blocks have to fit into it.
    found: dict[str, Any] = dict(
        num_hidden_layers=4,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=64,
        floor_scale=16,
    )
    return shape(**found | overrides)


# ---- text ------------------------------------------------------------------------------------------------

TEXT: dict[str, Recipe] = {
    "llama": plain("LlamaForCausalLM"),
    "llama-tied": plain("LlamaForCausalLM", tie_word_embeddings=True),
    "llama31-rope": plain("LlamaForCausalLM", rope_parameters=LLAMA3),
    "llama-bias": plain("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "llama-hd24": plain("LlamaForCausalLM", hidden_size=96, head_dim=24),
    "qwen2": plain("Qwen2ForCausalLM"),
    "qwen2-tied": plain("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2-yarn": plain("Qwen2ForCausalLM", rope_parameters=QWEN_YARN),
    "qwen3": plain("Qwen3ForCausalLM"),
    "qwen3-tied": plain("Qwen3ForCausalLM", tie_word_embeddings=True),
    "qwen2-moe": plain("Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3-moe": plain("Qwen3MoeForCausalLM", **EXPERTS, norm_topk_prob=True),
    "mistral": plain("MistralForCausalLM", sliding_window=WINDOW),
    "ministral3": plain("Ministral3ForCausalLM", rope_parameters=YARN | dict(llama_4_scaling_beta=0.1)),
    "mixtral": plain("MixtralForCausalLM", **LOCAL_EXPERTS),
    "gemma": Recipe("GemmaForCausalLM", shape(tie_word_embeddings=True), **SMALL_EMBEDDING),
    "gemma2": Recipe(
        "Gemma2ForCausalLM",
        shape(
            num_hidden_layers=4,
            layer_types=ALTERNATING * 2,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            tie_word_embeddings=True,
        ),
        **SMALL_EMBEDDING,
    ),
    "gemma3": Recipe(
        "Gemma3ForCausalLM",
        shape(**THREE_WINDOWS, query_pre_attn_scalar=32, tie_word_embeddings=True),
        **SMALL_EMBEDDING,
    ),
    "gemma3n": Recipe("Gemma3nForCausalLM", gemma3n(), **SMALL_EMBEDDING),
    "gemma3n-unshared": Recipe("Gemma3nForCausalLM", gemma3n(num_kv_shared_layers=0), **SMALL_EMBEDDING),
    "gemma4-dense": Recipe("Gemma4ForCausalLM", gemma4(), **SMALL_EMBEDDING),
    "gemma4-k-eq-v": Recipe(
        "Gemma4ForCausalLM", gemma4(attention_k_eq_v=True, num_global_key_value_heads=1), **SMALL_EMBEDDING
    ),
    "gemma4-shared-kv": Recipe(
        "Gemma4ForCausalLM",
        gemma4(num_kv_shared_layers=2, hidden_size_per_layer_input=16, use_double_wide_mlp=True),
        **SMALL_EMBEDDING,
    ),
    "gemma4-moe": Recipe(
        "Gemma4ForCausalLM",
        gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64),
        **SMALL_EMBEDDING,
    ),
    "phi": plain("PhiForCausalLM", num_key_value_heads=4, head_dim=None),
    "phi3": plain("Phi3ForCausalLM"),
    "phi4-mini": plain(
        "Phi3ForCausalLM",
        original_max_position_embeddings=1024,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10_000.0,
            short_factor=[1.0 + 0.05 * at for at in range(12)],
            long_factor=[2.0 + 0.1 * at for at in range(12)],
            partial_rotary_factor=0.75,
            original_max_position_embeddings=1024,
        ),
    ),
    "phimoe": Recipe(
        "PhimoeForCausalLM",
        shape(
            **LOCAL_EXPERTS,
            attention_bias=True,
            lm_head_bias=True,
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
        ),
        published=dict(architectures=["PhiMoEForCausalLM"]),
    ),
    "olmo": plain("OlmoForCausalLM", clip_qkv=8.0),
    "olmo2": plain("Olmo2ForCausalLM"),
    "olmo3": plain("Olmo3ForCausalLM", **THREE_WINDOWS),
    "olmoe": plain("OlmoeForCausalLM", num_experts=8, num_experts_per_tok=2, intermediate_size=64),
    "flex-olmo": plain("FlexOlmoForCausalLM", num_experts=4, num_experts_per_tok=2, intermediate_size=64),
    "glm": plain("GlmForCausalLM"),
    # What GLM-4 was before transformers had a class of it, and ChatGLM 2 and 3.
    "chatglm": Recipe(
        "GlmForCausalLM",
        shape(rms_norm_eps=1e-5),
        published=dict(
            architectures=["ChatGLMModel"],
            model_type="chatglm",
            num_layers=2,
            padded_vocab_size=tiny_models.VOCAB,
            ffn_hidden_size=256,
            kv_channels=32,
            seq_length=4096,
            layernorm_epsilon=1e-5,
            add_qkv_bias=True,
            multi_query_attention=True,
            multi_query_group_num=2,
            original_rope=True,
        ),
        renamed=(
            (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
            (r"^model\.norm", "transformer.encoder.final_layernorm"),
            (r"^model\.layers", "transformer.encoder.layers"),
            (r"^lm_head", "transformer.output_layer"),
            (r"self_attn\.[qkv]_proj", "self_attention.query_key_value"),
            (r"self_attn\.o_proj", "self_attention.dense"),
            (r"gate_up_proj", "dense_h_to_4h"),
            (r"down_proj", "dense_4h_to_h"),
        ),
    ),
    "glm4": plain("Glm4ForCausalLM"),
    "glm4-moe": plain("Glm4MoeForCausalLM", num_hidden_layers=3, **ROUTED, use_qk_norm=True),
    "glm4-moe-lite": Recipe(
        "Glm4MoeLiteForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED | ONE_GROUP),
        published=dict(first_k_dense_replace=1, topk_method="noaux_tc", scoring_func="sigmoid"),
    ),
    "deepseek-v2-lite": Recipe(
        "DeepseekV2ForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED | ONE_GROUP) | dict(q_lora_rank=None),
        published=dict(scoring_func="softmax"),
    ),
    "deepseek-v2": Recipe(
        "DeepseekV2ForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED, topk_method="group_limited_greedy", rope_parameters=YARN),
        published=dict(scoring_func="softmax"),
    ),
    "deepseek-v3": Recipe(
        "DeepseekV3ForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED, norm_topk_prob=True, rope_parameters=YARN),
        published=dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    ),
    "kimi-k2": Recipe(
        "DeepseekV3ForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED | ONE_GROUP, norm_topk_prob=True, rope_parameters=YARN),
        published=dict(model_type="kimi_k2", topk_method="noaux_tc", scoring_func="sigmoid"),
    ),
    "deepseek-v32": Recipe(
        "DeepseekV32ForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED, **SPARSE, rope_parameters=YARN),
        published=dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    ),
    "glm-moe-dsa": Recipe(
        "GlmMoeDsaForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED | ONE_GROUP, **SPARSE),
        published=dict(topk_method="noaux_tc", scoring_func="sigmoid", indexer_rope_interleave=True),
    ),
    # The second layer reads what the first selected.
    "glm-moe-dsa-shared": Recipe(
        "GlmMoeDsaForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED | ONE_GROUP, **SPARSE, index_topk_pattern="FSF"),
        published=dict(
            topk_method="noaux_tc", scoring_func="sigmoid", indexer_rope_interleave=True, index_topk_pattern="FSF"
        ),
    ),
    "mistral4": plain(
        "Mistral4ForCausalLM",
        num_hidden_layers=3,
        **LATENT,
        **ROUTED | ONE_GROUP,
        rope_parameters=YARN | dict(llama_4_scaling_beta=0.1),
    ),
    "axk1": Recipe(
        "AXK1ForCausalLM",
        shape(num_hidden_layers=3, **LATENT, **ROUTED),
        published=dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    ),
    "youtu": plain("YoutuForCausalLM", **LATENT),
    "longcat-flash": plain(
        "LongcatFlashForCausalLM",
        **LATENT | dict(head_dim=16),
        num_layers=2,
        num_hidden_layers=None,
        ffn_hidden_size=128,
        expert_ffn_hidden_size=32,
        moe_topk=2,
        n_routed_experts=8,
        zero_expert_num=2,
    ),
    "minicpm3": plain("MiniCPM3ForCausalLM", **LATENT | dict(qk_nope_head_dim=24, v_head_dim=32), dim_model_base=64),
    "dots1": Recipe(
        "Dots1ForCausalLM",
        shape(num_hidden_layers=3, **ROUTED | ONE_GROUP, norm_topk_prob=True),
        published=dict(scoring_func="sigmoid", topk_method="noaux_tc"),
    ),
    "gpt-oss": plain("GptOssForCausalLM", **LOCAL_EXPERTS, intermediate_size=64, **ONE_WINDOW),
    "llama4": Recipe("Llama4ForCausalLM", llama4(), engine=dict(block_size=32)),
    "granite": Recipe("GraniteForCausalLM", shape(**SCALES), embedding=0.15),
    "granitemoe": Recipe(
        "GraniteMoeForCausalLM", shape(**SCALES, **LOCAL_EXPERTS, intermediate_size=64), embedding=0.15
    ),
    "granitemoeshared": Recipe(
        "GraniteMoeSharedForCausalLM",
        shape(**SCALES, **LOCAL_EXPERTS, intermediate_size=64, shared_intermediate_size=64),
        embedding=0.15,
    ),
    "granite-swa": Recipe("GraniteSWAForCausalLM", shape(**SCALES, **ONE_WINDOW), embedding=0.15),
    "granite4-attention": Recipe(
        "GraniteMoeHybridForCausalLM",
        shape(
            **SCALES,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=256,
            position_embedding_type="rope",
            layer_types=["attention"] * 2,
            **MAMBA,
        ),
        embedding=0.15,
    ),
    "granite4-hybrid": Recipe(
        "GraniteMoeHybridForCausalLM",
        shape(
            **SCALES,
            **LOCAL_EXPERTS,
            intermediate_size=64,
            shared_intermediate_size=64,
            layer_types=["mamba", "attention"],
            **MAMBA,
        ),
        embedding=0.15,
    ),
    "nemotron": plain("NemotronForCausalLM", rope_parameters=rope(0.5)),
    "ernie4.5": plain("Ernie4_5ForCausalLM"),
    "ernie4.5-moe": plain(
        "Ernie4_5_MoeForCausalLM", moe_num_experts=8, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=1
    ),
    "hunyuan-dense": plain("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Recipe(
        "HunYuanMoEV1ForCausalLM",
        shape(num_experts=4, moe_topk=[2, 2], intermediate_size=64),
        published=dict(
            use_qk_norm=True,
            use_cla=False,
            num_shared_expert=[1, 1],
            moe_intermediate_size=[64, 64],
            use_mixed_mlp_moe=True,
        ),
    ),
    "hy-v3": Recipe(
        "HYV3ForCausalLM",
        shape(**EXPERTS, num_shared_experts=1, mlp_layer_types=["dense", "sparse"]),
        published=dict(first_k_dense_replace=1, route_norm=True, expert_hidden_dim=64, qk_norm=True),
    ),
    "seed-oss": plain("SeedOssForCausalLM", attention_bias=True),
    "smollm3": plain("SmolLM3ForCausalLM", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
    "exaone4": plain("Exaone4ForCausalLM", **THREE_WINDOWS),
    "exaone-moe": plain(
        "ExaoneMoeForCausalLM",
        **THREE_WINDOWS,
        **EXPERTS,
        num_shared_experts=1,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    ),
    "starcoder2": plain("Starcoder2ForCausalLM", sliding_window=WINDOW, tie_word_embeddings=True),
    "gpt-neox": plain("GPTNeoXForCausalLM", num_key_value_heads=None, head_dim=None, rope_parameters=rope(0.25)),
    "gpt2": Recipe("GPT2LMHeadModel", GPT2),
    "gpt-bigcode": Recipe("GPTBigCodeForCausalLM", GPT2),
    "gptj": Recipe(
        "GPTJForCausalLM",
        dict(
            vocab_size=400,
            n_positions=512,
            n_embd=128,
            n_layer=2,
            n_head=4,
            rotary_dim=16,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        ),
    ),
    "opt": plain(
        "OPTForCausalLM", ffn_dim=256, word_embed_proj_dim=128, intermediate_size=None, tie_word_embeddings=True
    ),
    "bloom": Recipe(
        "BloomForCausalLM",
        dict(vocab_size=400, hidden_size=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1, pad_token_id=1),
    ),
    "falcon": plain(
        "FalconForCausalLM",
        head_dim=None,
        num_kv_heads=2,
        new_decoder_architecture=True,
        intermediate_size=None,
        tie_word_embeddings=True,
    ),
    "falcon-alibi": plain(
        "FalconForCausalLM",
        head_dim=None,
        alibi=True,
        intermediate_size=None,
        multi_query=False,
        num_kv_heads=4,
        tie_word_embeddings=True,
        parallel_attn=False,
        bias=True,
    ),
    "cohere": plain("CohereForCausalLM", logit_scale=0.5, use_qk_norm=True, tie_word_embeddings=True),
    "cohere2": plain("Cohere2ForCausalLM", **THREE_WINDOWS, logit_scale=0.5, tie_word_embeddings=True),
    "cohere2-moe": Recipe(
        architecture="Cohere2MoeForCausalLM",
        config=shape(
            **THREE_WINDOWS,
            logit_scale=0.5,
            tie_word_embeddings=True,
            num_experts=4,
            num_experts_per_tok=2,
            intermediate_size=64,
            prefix_dense_intermediate_size=128,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        # vLLM's window has one token more than the configuration says.
        published=dict(first_k_dense_replace=1, sliding_window=WINDOW - 1),
    ),
    "stablelm": plain("StableLmForCausalLM", use_qkv_bias=True, rope_parameters=rope(0.25)),
    "apertus": plain("ApertusForCausalLM"),
    "arcee": plain("ArceeForCausalLM"),
    "afmoe": Recipe(
        "AfmoeForCausalLM",
        shape(**THREE_WINDOWS, **EXPERTS, num_shared_experts=1, num_dense_layers=1, route_scale=1.5, mup_enabled=True),
        published=dict(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    ),
    "hyperclovax": plain("HyperCLOVAXForCausalLM", **SCALES),
    "jais2": plain("Jais2ForCausalLM"),
    "helium": plain("HeliumForCausalLM"),
    "vaultgemma": Recipe(
        "VaultGemmaForCausalLM",
        shape(**ONE_WINDOW, query_pre_attn_scalar=32, tie_word_embeddings=True),
        **SMALL_EMBEDDING,
    ),
    "cwm": plain("CwmForCausalLM", **ONE_WINDOW),
    "ministral": plain("MinistralForCausalLM", **ONE_WINDOW),
    "nanochat": plain("NanoChatForCausalLM"),
    "solar-open": plain("SolarOpenForCausalLM", **ROUTED | ONE_GROUP),
    "mellum": plain("MellumForCausalLM", **EXPERTS, **ONE_WINDOW, norm_topk_prob=True),
    "dbrx": Recipe(
        "DbrxForCausalLM",
        dict(
            d_model=128,
            n_heads=4,
            n_layers=2,
            max_seq_len=512,
            vocab_size=400,
            attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=10_000.0),
            ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2, ffn_act_fn=dict(name="silu")),
            bos_token_id=0,
            eos_token_id=1,
        ),
    ),
    "mimo-v2-flash": plain(
        "MiMoV2FlashForCausalLM", **ROUTED | ONE_GROUP, v_head_dim=16, **ONE_WINDOW, mlp_layer_types=["dense", "sparse"]
    ),
    "minimax-m2": Recipe(
        "MiniMaxM2ForCausalLM",
        shape(**LOCAL_EXPERTS, intermediate_size=64, use_qk_norm=True, rope_parameters=rope(0.5)),
        published=dict(rotary_dim=16, use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True),
    ),
    "laguna": plain(
        "LagunaForCausalLM",
        **EXPERTS,
        shared_expert_intermediate_size=64,
        **ONE_WINDOW,
        num_attention_heads_per_layer=[4, 4],
        mlp_layer_types=["dense", "sparse"],
    ),
    "deepseek-v4": plain(
        "DeepseekV4ForCausalLM",
        num_hidden_layers=3,
        num_key_value_heads=1,
        q_lora_rank=48,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        sliding_window=WINDOW,
        **SPARSE,
    ),
    "hrm-text": plain("HrmTextForCausalLM", num_key_value_heads=None),
    "granitemoe-swa": Recipe(
        "GraniteMoeSWAForCausalLM", shape(**SCALES, **LOCAL_EXPERTS, intermediate_size=64, **ONE_WINDOW), embedding=0.15
    ),
    # Of these transformers has no class, but another one that computes the same and names weights alike.
    "internlm3": alias("InternLM3ForCausalLM", "LlamaForCausalLM", shape(attention_bias=True, mlp_bias=True)),
    "iquest-coder": alias("IQuestCoderForCausalLM", "LlamaForCausalLM", shape()),
    "telechat3": alias("TeleChat3ForCausalLM", "LlamaForCausalLM", shape()),
    "teleflm": alias("TeleFLMForCausalLM", "LlamaForCausalLM", shape(), use_mup=False),
    "pangu-embedded": alias("PanguEmbeddedForCausalLM", "LlamaForCausalLM", shape(attention_bias=True)),
    "solar": alias(
        "SolarForCausalLM",
        "LlamaForCausalLM",
        shape(),
        bskcn_1=[],
        bskcn_2=[],
        bskcn_3=[],
        bskcn_4=[],
        bskcn_tv=[0.9, 0.8],
    ),
    "mimo": alias("MiMoForCausalLM", "Qwen2ForCausalLM", shape()),
    "orion": alias("OrionForCausalLM", "StableLmForCausalLM", shape(rope_parameters=rope(1.0)), rms_norm_eps=1e-5),
    "minicpm": replace(
        alias(
            "MiniCPMForCausalLM",
            "GraniteForCausalLM",
            shape(**SCALES | dict(attention_multiplier=32**-0.5)),
            scale_emb=3.0,
            scale_depth=0.5 * 2**0.5,
            dim_model_base=256,
        ),
        embedding=0.15,
    ),
}

# ---- with layers that keep a state -----------------------------------------------------------------------

NEMOTRON_H = shape(
    num_hidden_layers=None,
    layers_block_type=["mamba", "attention", "mlp"],
    mamba_num_heads=8,
    mamba_head_dim=32,
    ssm_state_size=16,
    n_groups=2,
    chunk_size=16,
    **LOW_STEPS,
)
NEMOTRON_H_PUBLISHED: dict[str, Any] = dict(hybrid_override_pattern="M*-", num_hidden_layers=3)
STATEFUL: dict[str, Recipe] = {
    "qwen3-next": plain("Qwen3NextForCausalLM", **EXPERTS, **LINEAR, shared_expert_intermediate_size=64),
    "qwen3.5-text": Recipe(
        "Qwen3_5ForCausalLM",
        shape(
            **LINEAR,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=10_000.0,
                partial_rotary_factor=0.5,
                mrope_section=[3, 3, 2],
                mrope_interleaved=True,
            ),
        ),
        vision=True,
    ),
    "qwen3.5-moe-text": Recipe(
        "Qwen3_5MoeForCausalLM",
        shape(
            **EXPERTS,
            **LINEAR,
            shared_expert_intermediate_size=64,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=10_000.0,
                partial_rotary_factor=0.5,
                mrope_section=[3, 3, 2],
                mrope_interleaved=True,
            ),
        ),
        vision=True,
    ),
    "nemotron-h": Recipe("NemotronHForCausalLM", NEMOTRON_H, published=NEMOTRON_H_PUBLISHED),
    # With blocks that are alike.
    "nemotron-h-puzzle": Recipe(
        "NemotronHForCausalLM",
        NEMOTRON_H,
        published=NEMOTRON_H_PUBLISHED | dict(architectures=["NemotronHPuzzleForCausalLM"]),
    ),
    "falcon-h1": plain("FalconH1ForCausalLM", **MAMBA, mamba_d_ssm=256, mamba_rms_norm=False),
    "jamba": plain(
        "JambaForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_dt_rank=8,
        head_dim=None,
    ),
    "mamba": Recipe(
        "MambaForCausalLM",
        dict(vocab_size=400, hidden_size=128, num_hidden_layers=2, state_size=16, bos_token_id=0, eos_token_id=1),
    ),
    "falcon-mamba": Recipe(
        "FalconMambaForCausalLM",
        dict(vocab_size=400, hidden_size=128, num_hidden_layers=2, state_size=16, bos_token_id=0, eos_token_id=1),
    ),
    "mamba2": Recipe(
        "Mamba2ForCausalLM",
        dict(
            vocab_size=400,
            hidden_size=128,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=32,
            state_size=16,
            n_groups=1,
            chunk_size=16,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        ),
    ),
    "zamba2": plain(
        "Zamba2ForCausalLM",
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        n_mamba_heads=8,
        mamba_d_state=16,
        chunk_size=16,
        num_key_value_heads=4,
        use_mamba_kernels=False,
        use_mem_rope=True,
        head_dim=None,
        tie_word_embeddings=True,
        **LOW_STEPS,
    ),
    "lfm2": Recipe(
        "Lfm2ForCausalLM",
        shape(layer_types=["conv", "full_attention"], head_dim=None, block_multiple_of=64, tie_word_embeddings=True),
        published=dict(conv_dim=128, conv_dim_out=128, block_dim=128),
    ),
    "lfm2-moe": Recipe(
        "Lfm2MoeForCausalLM",
        shape(
            **EXPERTS,
            layer_types=["conv", "full_attention"],
            num_dense_layers=1,
            head_dim=None,
            tie_word_embeddings=True,
        ),
        published=dict(conv_dim=128),
    ),
    "olmo-hybrid": Recipe(
        "OlmoHybridForCausalLM",
        shape(**LINEAR | dict(linear_num_value_heads=4), linear_allow_neg_eigval=True),
        renamed=(
            ("attention_layer_norm", "input_layernorm"),
            (r"\.feedforward_layer_norm", ".post_attention_layernorm"),
        ),
    ),
    "kimi-linear": Recipe(
        "KimiLinearForCausalLM",
        shape(
            **LATENT | dict(q_lora_rank=None),
            num_hidden_layers=3,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_head_dim=16,
            linear_num_heads=4,
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        published=dict(
            layer_types=None,
            linear_attn_config=dict(
                kda_layers=[1, 3], full_attn_layers=[2], head_dim=16, num_heads=4, short_conv_kernel_size=4
            ),
            mla_use_nope=True,
            first_k_dense_replace=1,
            moe_router_activation_func="sigmoid",
        ),
        renamed=((r"(layers\.0\.)block_sparse_moe", r"\1mlp"),),
    ),
}

# Chunked prompts, and fewer KV blocks than three requests take: one is preempted, and its states are computed again.
BUSY = dict(max_num_batched_tokens=32, block_size=32, num_gpu_blocks_override=8)
STATEFUL |= {f"{name}@busy": replace(STATEFUL[name], engine=BUSY) for name in ("qwen3.5-text", "qwen3.5-moe-text")}
# The prompts are asked twice. vLLM's default for models without attention is no prefix cache.
CACHED = dict(enable_prefix_caching=True, block_size=16)
STATEFUL |= {
    f"{name}@again": replace(recipe, engine=recipe.engine | CACHED)
    for name, recipe in (TEXT | STATEFUL).items()
    if recipe.architecture in SERVED and "@" not in name
}

# ---- with images or sound --------------------------------------------------------------------------------

MROPE = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[4, 6, 6])
MIXED_MROPE = MROPE | dict(mrope_interleaved=True)
# What the third layer makes of an image goes to the text model's second.
DEEP_VISION = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    out_hidden_size=128,
    deepstack_visual_indexes=[0, 2],
    num_position_embeddings=16,
)
QWEN35_VISION = dict(
    depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=128, num_position_embeddings=16
)
# The least that Gemma 4 scales an image to are 70 tokens.
GEMMA4_VISION = dict(
    **VISION,
    num_key_value_heads=2,
    head_dim=16,
    model_type="gemma4_vision",
    patch_size=4,
    position_embedding_size=256,
    default_output_length=70,
)
GEMMA4_IDS = dict(
    image_token_id=300,
    boi_token_id=301,
    eoi_token_id=302,
    audio_token_id=303,
    boa_token_id=304,
    eoa_token_index=305,
    video_token_id=306,
)
LARGE_IMAGES = dict(max_model_len=384, num_gpu_blocks_override=100, limit_mm_per_prompt=dict(video=0))
GLM_MROPE = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 3, 3], partial_rotary_factor=0.5)
GLM_VISION = dict(
    depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=128, image_size=56, patch_size=14
)
GLM_IDS = dict(
    image_token_id=300,
    video_token_id=301,
    image_start_token_id=302,
    image_end_token_id=303,
    video_start_token_id=304,
    video_end_token_id=305,
)
QWEN_IDS = dict(image_token_id=300, video_token_id=301, vision_start_token_id=302, vision_end_token_id=303)


MULTIMODAL: dict[str, Recipe] = {
    "qwen2-vl": Recipe(
        "Qwen2VLForConditionalGeneration",
        dict(
            text_config=text("qwen2_vl_text", rope_parameters=MROPE),
            vision_config=dict(depth=1, embed_dim=32, hidden_size=128, num_heads=2),
            **QWEN_IDS,
        ),
    ),
    "qwen2.5-vl": Recipe(
        "Qwen2_5_VLForConditionalGeneration",
        dict(
            text_config=text("qwen2_5_vl_text", rope_parameters=MROPE),
            vision_config=dict(
                depth=1,
                hidden_size=32,
                intermediate_size=64,
                num_heads=2,
                out_hidden_size=128,
                fullatt_block_indexes=[0],
            ),
            **QWEN_IDS,
        ),
    ),
    "qwen3-vl": Recipe(
        "Qwen3VLForConditionalGeneration",
        dict(text_config=text("qwen3_vl_text", rope_parameters=MIXED_MROPE), vision_config=DEEP_VISION, **QWEN_IDS),
    ),
    "qwen3-vl-moe": Recipe(
        "Qwen3VLMoeForConditionalGeneration",
        dict(
            text_config=text(
                "qwen3_vl_moe_text",
                **EXPERTS | dict(moe_intermediate_size=48),
                norm_topk_prob=True,
                rope_parameters=MIXED_MROPE,
            ),
            vision_config=DEEP_VISION,
            **QWEN_IDS,
        ),
        transposed=r"\.experts\.(gate_up|down)_proj$",
    ),
    "gemma3-mm": Recipe(
        "Gemma3ForConditionalGeneration",
        dict(
            text_config=text("gemma3_text", **THREE_WINDOWS, query_pre_attn_scalar=32, tie_word_embeddings=True),
            vision_config=dict(**VISION, model_type="siglip_vision_model", image_size=42, patch_size=14),
            mm_tokens_per_image=9,
            image_token_index=300,
            boi_token_index=301,
            eoi_token_index=302,
        ),
        **SMALL_EMBEDDING,
    ),
    "gemma4-mm": Recipe(
        "Gemma4ForConditionalGeneration",
        dict(
            text_config=dict(model_type="gemma4_text", **gemma4()),
            vision_config=GEMMA4_VISION,
            audio_config=None,
            **GEMMA4_IDS,
        ),
        **SMALL_EMBEDDING,
        engine=LARGE_IMAGES,
    ),
    # The smaller ones as published: embeddings of each layer, which images have none of.
    "gemma4-ple": Recipe(
        "Gemma4ForConditionalGeneration",
        dict(
            text_config=dict(
                model_type="gemma4_text",
                **gemma4(num_kv_shared_layers=2, hidden_size_per_layer_input=16, pad_token_id=0),
            ),
            vision_config=GEMMA4_VISION,
            audio_config=None,
            **GEMMA4_IDS,
        ),
        **SMALL_EMBEDDING,
        engine=LARGE_IMAGES,
    ),
    # The larger ones: an image is seen in both directions, in layers with a window alone.
    "gemma4-both-ways": Recipe(
        "Gemma4ForConditionalGeneration",
        dict(
            text_config=dict(
                model_type="gemma4_text", **gemma4(sliding_window=72, use_bidirectional_attention="vision")
            ),
            vision_config=GEMMA4_VISION,
            audio_config=None,
            **GEMMA4_IDS,
        ),
        **SMALL_EMBEDDING,
        engine=LARGE_IMAGES,
    ),
    "llava": Recipe(
        "LlavaForConditionalGeneration",
        dict(
            text_config=text("llama"),
            vision_config=dict(
                **VISION, model_type="clip_vision_model", image_size=28, patch_size=14, projection_dim=32
            ),
            image_token_index=300,
            image_token_id=300,
            vision_feature_layer=-1,
        ),
    ),
    # Tiles of the grid that fits an image best, without what pads it, and a token at the end of each line.
    "llava-next": Recipe(
        "LlavaNextForConditionalGeneration",
        dict(
            text_config=text("llama"),
            vision_config=dict(
                **VISION, model_type="clip_vision_model", image_size=28, patch_size=14, projection_dim=32
            ),
            image_token_index=300,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        ),
    ),
    "pixtral": Recipe(
        "LlavaForConditionalGeneration",
        dict(
            text_config=text("mistral"),
            vision_config=dict(**VISION, head_dim=16, model_type="pixtral", image_size=84, patch_size=14),
            image_token_index=300,
            image_token_id=300,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        engine=dict(max_model_len=192),
    ),
    "cohere2-vision": Recipe(
        architecture="Cohere2VisionForConditionalGeneration",
        config=dict(
            # Longer than the texts: vLLM's window has one token more than that of transformers.
            text_config=dict(model_type="cohere2", **TEXT["cohere2"].config | dict(sliding_window=128)),
            vision_config=dict(**VISION, model_type="siglip_vision_model", image_size=56, patch_size=14),
            alignment_intermediate_size=64,
            image_token_id=300,
        ),
    ),
    "mistral3": Recipe(
        "Mistral3ForConditionalGeneration",
        dict(
            text_config=text("mistral"),
            vision_config=dict(**VISION, head_dim=16, model_type="pixtral", image_size=28, patch_size=14),
            image_token_index=300,
            image_token_id=300,
        ),
    ),
    "idefics3": Recipe(
        "Idefics3ForConditionalGeneration",
        dict(
            text_config=text("llama"),
            vision_config=dict(**VISION, image_size=56, patch_size=14),
            image_token_id=300,
            pad_token_id=1,
        ),
    ),
    "glm4v": Recipe(
        "Glm4vForConditionalGeneration",
        dict(text_config=text("glm4v_text", rope_parameters=GLM_MROPE), vision_config=GLM_VISION, **GLM_IDS),
    ),
    "internvl": Recipe(
        "InternVLForConditionalGeneration",
        dict(
            text_config=text("qwen2"),
            vision_config=dict(**VISION, image_size=[28, 28], patch_size=[14, 14]),
            image_token_id=300,
        ),
    ),
    "llama4-mm": Recipe(
        architecture="Llama4ForConditionalGeneration",
        config=dict(
            text_config=dict(model_type="llama4_text", **llama4()),
            vision_config=VISION
            | dict(
                intermediate_size=128,  # of four patches
                image_size=28,
                patch_size=14,
                vision_output_dim=32,
                projector_input_dim=32,
                projector_output_dim=32,
            ),
            image_token_index=300,
            boi_token_index=301,
            eoi_token_index=302,
        ),
        engine=dict(block_size=32),
    ),
    "smolvlm": Recipe(
        "SmolVLMForConditionalGeneration",
        dict(text_config=text("llama"), vision_config=dict(**VISION, image_size=28, patch_size=14), image_token_id=300),
    ),
    "qwen3.5-mm": Recipe(
        "Qwen3_5ForConditionalGeneration",
        dict(
            text_config=dict(model_type="qwen3_5_text", **STATEFUL["qwen3.5-text"].config),
            vision_config=QWEN35_VISION,
            **QWEN_IDS,
        ),
    ),
    "qwen3.5-moe-mm": Recipe(
        "Qwen3_5MoeForConditionalGeneration",
        dict(
            text_config=dict(model_type="qwen3_5_moe_text", **STATEFUL["qwen3.5-moe-text"].config),
            vision_config=QWEN35_VISION,
            **QWEN_IDS,
        ),
    ),
    "qwen2-audio": Recipe(
        architecture="Qwen2AudioForConditionalGeneration",
        config=dict(
            text_config=text("qwen2"),
            audio_config=dict(
                d_model=32,
                encoder_layers=1,
                encoder_attention_heads=2,
                encoder_ffn_dim=64,
                max_source_positions=1500,  # of 30 seconds: vLLM takes no other number
                num_mel_bins=16,
            ),
            audio_token_index=300,
        ),
    ),
}
# Classes that import nothing of torchvision.
_WITHOUT_VISION = ("smolvlm", "qwen2-audio")
MULTIMODAL = {name: replace(recipe, vision=name not in _WITHOUT_VISION) for name, recipe in MULTIMODAL.items()}
MULTIMODAL |= {name: replace(MULTIMODAL[name.rpartition("-")[0]], media=name) for name in ASKED}


def otherwise(suffix: str, *names: str, **engine: Any) -> dict[str, Recipe]:
    """Those cases, run in another way."""
    return {name + suffix: replace(MULTIMODAL[name], engine=MULTIMODAL[name].engine | engine) for name in names}


MULTIMODAL |= (
    # Borders of chunks lie within items, but for images of Gemma, of which a chunk has all or nothing. Qwen3-VL adds to
    # states of image tokens in its first layers too.
    otherwise(
        "@chunks",
        *("qwen2.5-vl-images", "qwen3-vl-images", "mistral3-images", "gemma3-mm-images"),
        "idefics3-images",
        *("qwen2-vl-video", "qwen2.5-vl-video", "qwen3-vl-video", "qwen2-audio-sound"),
        *("qwen3-vl-moe-images", "qwen3.5-mm-images", "pixtral-images", "llava-next-images"),
        *("cohere2-vision-images", "gemma4-ple-images"),
        max_num_batched_tokens=16,
    )
    # Room for one image and not for two.
    | otherwise("@chunks", "gemma4-both-ways-images", max_num_batched_tokens=96)
    # Less KV than the prompts and answers take, so that a request waits, and its items are encoded again.
    | otherwise(
        "@busy",
        *("qwen2.5-vl-images", "qwen3.5-mm-images", "qwen2.5-vl-video", "qwen2-audio-sound"),
        num_gpu_blocks_override=7,
        enable_prefix_caching=False,
    )
    # With a block for each of four kinds of layers.
    | otherwise(
        "@busy", "gemma3-mm-images", num_gpu_blocks_override=22, max_num_batched_tokens=32, enable_prefix_caching=False
    )
    # The prompts are asked twice, after the same with other items in them.
    | otherwise(
        "@again",
        *("qwen2.5-vl-images", "gemma3-mm-images", "qwen3-vl-video", "qwen2-audio-sound"),
        *("qwen3.5-mm-images", "pixtral-images"),
        num_gpu_blocks_override=100,
        block_size=16,
    )
    # Its layers and its drafter's are of three kinds, which share the blocks.
    | otherwise("@again", "gemma4-both-ways-images", num_gpu_blocks_override=200, block_size=16)
)
# The same with every other modality switched off, by either of vLLM's options: what is left is a text model.
MULTIMODAL |= {
    f"{name}@text": replace(recipe, engine=recipe.engine | TEXT_ONLY)
    for name, recipe in MULTIMODAL.items()
    if recipe.media is None
} | {
    f"{name}@limits": replace(MULTIMODAL[name], engine=dict(limit_mm_per_prompt=limits))
    for name, limits in {
        "qwen2.5-vl": dict(image=0, video=0),
        "gemma3-mm": dict(image=0),
        "mistral3": dict(image=0),
    }.items()
}
# The published checkpoint suppresses its placeholders. Here they are ids that no prompt has, since transformers embeds
# placeholders differently.
_PLACEHOLDERS = dict(zip(GEMMA4_IDS, range(294, 301), strict=True))
MULTIMODAL["gemma4-mm@suppressed"] = replace(
    MULTIMODAL["gemma4-mm@text"],
    config=MULTIMODAL["gemma4-mm@text"].config | _PLACEHOLDERS,
    suppressed=(*range(3, 256, 2), *_PLACEHOLDERS.values()),
)

# ---- pooling ---------------------------------------------------------------------------------------------

ENCODER = dict(
    vocab_size=400,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=512,
    pad_token_id=1,
)
# The prompts are longer than the window of its second layer.
MODERN_ENCODER = ENCODER | dict(
    bos_token_id=0, eos_token_id=1, cls_token_id=0, sep_token_id=1, local_attention=WINDOW, num_hidden_layers=4
)

POOLING: dict[str, Recipe] = {
    "qwen3-embedding": Recipe("Qwen3Model", shape(), pooling="embed"),
    "qwen3-generate-as-pooling": Recipe("Qwen3ForCausalLM", shape(), pooling="embed", engine=dict(runner="pooling")),
    "qwen3-classify": Recipe("Qwen3ForSequenceClassification", shape(num_labels=3, pad_token_id=1), pooling="classify"),
    "llama-classify": Recipe("LlamaForSequenceClassification", shape(num_labels=3, pad_token_id=1), pooling="classify"),
    "jamba-classify": Recipe(
        architecture="JambaForSequenceClassification",
        config=STATEFUL["jamba"].config | dict(num_labels=3),
        pooling="classify",
        # vLLM gives what the probabilities are made of, unless it is asked for these.
        engine=dict(pooler_config=dict(use_activation=True)),
    ),
    "colbert-lfm2": Recipe(
        "Lfm2Model",
        STATEFUL["lfm2"].config,
        published=STATEFUL["lfm2"].published | dict(architectures=["ColBERTLfm2Model"]),
        pooling="token_embed",
    ),
    "gpt2-classify": Recipe(
        "GPT2ForSequenceClassification", GPT2 | dict(num_labels=3, pad_token_id=1), pooling="classify"
    ),
    "gemma3-both-ways": Recipe(
        "Gemma3TextModel",
        shape(**ONE_WINDOW, query_pre_attn_scalar=32, use_bidirectional_attention=True),
        **SMALL_EMBEDDING,
        pooling="embed",
    ),
    "bert": Recipe("BertModel", ENCODER, pooling="embed"),
    "bert-classify": Recipe("BertForSequenceClassification", ENCODER | dict(num_labels=3), pooling="classify"),
    "bert-tokens": Recipe("BertForTokenClassification", ENCODER | dict(num_labels=3), pooling="token_classify"),
    "roberta": Recipe("RobertaModel", ENCODER, pooling="embed"),
    "roberta-classify": Recipe("RobertaForSequenceClassification", ENCODER | dict(num_labels=3), pooling="classify"),
    "xlm-roberta-classify": Recipe(
        "XLMRobertaForSequenceClassification", ENCODER | dict(num_labels=3), pooling="classify"
    ),
    "xlm-roberta-tokens": Recipe(
        "XLMRobertaForTokenClassification", ENCODER | dict(num_labels=3), pooling="token_classify"
    ),
    "modernbert": Recipe("ModernBertModel", MODERN_ENCODER, pooling="embed"),
    "modernbert-classify": Recipe(
        "ModernBertForSequenceClassification", MODERN_ENCODER | dict(num_labels=3), pooling="classify"
    ),
    "modernbert-tokens": Recipe(
        "ModernBertForTokenClassification", MODERN_ENCODER | dict(num_labels=3), pooling="token_classify"
    ),
}

ARCHITECTURES: dict[str, Recipe] = TEXT | STATEFUL | MULTIMODAL | POOLING
