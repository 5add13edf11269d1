"""The tiny models of the interop tests, by the fields of their transformers config. Needs nothing installed."""

VOCAB, BATCH, TOKENS = 67, 2, 24
COMMON = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
COMMON |= dict(max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e3, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=12)
NEOX = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25))
NEOX |= COMMON | dict(hidden_size=64)  # heads of 16, of which 4 turn

OPT = dict(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4)
OPT |= dict(word_embed_proj_dim=32, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=1)
STABLELM = NEOX  # heads of 16, of which 4 turn
YARN = dict(rope_type="yarn", rope_theta=1e3, factor=4.0, original_max_position_embeddings=16)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=64)
LONGROPE |= dict(short_factor=[1.0, 1.1, 1.7, 2.5], long_factor=[1.0, 2.0, 3.0, 4.0])
SHORTER = {"phi3_longrope": 64}  # the context that it is read with
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = COMMON | dict(num_key_value_heads=2, head_dim=12)
GEMMA3_ROPE = {
    FULL: dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    SLIDING: dict(rope_type="default", rope_theta=1e4),
}
QWEN3_MOE = COMMON | dict(num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=3)
QWEN3_MOE |= dict(moe_intermediate_size=20)
GRANITE = COMMON | dict(num_key_value_heads=2, embedding_multiplier=6.0, attention_multiplier=0.2)
GRANITE |= dict(residual_multiplier=0.3, logits_scaling=4.0)
BERT = {name: value for name, value in COMMON.items() if "token_id" not in name}

# case: (family, fields of its config)
CASES = {
    "llama": ("Llama", COMMON | dict(num_key_value_heads=2, rms_norm_eps=1e-5)),
    "llama3_rope_tied": (
        "Llama",
        COMMON | dict(num_key_value_heads=1, tie_word_embeddings=True, head_dim=12, rope_parameters=LLAMA3),
    ),
    "llama_biases": ("Llama", COMMON | dict(attention_bias=True, mlp_bias=True)),
    "llama_bfloat16": ("Llama", COMMON | dict(num_key_value_heads=2)),
    "smollm": (
        "Llama",
        COMMON
        | dict(hidden_size=36, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
        | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
    ),
    "mistral": ("Mistral", COMMON | dict(num_key_value_heads=2, sliding_window=5, head_dim=16)),
    "qwen2": ("Qwen2", COMMON | dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", COMMON | dict(num_key_value_heads=2, head_dim=16)),
    "olmo2": ("Olmo2", COMMON | dict(num_key_value_heads=2)),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox_in_turn": ("GPTNeoX", NEOX | dict(use_parallel_residual=False, hidden_act="gelu_new")),
    "gpt2": (
        "GPT2",
        dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None),
    ),
    "qwen3_yarn": ("Qwen3", COMMON | dict(num_key_value_heads=2, head_dim=16, rope_parameters=YARN)),
    "llama_yarn": (
        "Llama",
        COMMON | dict(rope_parameters=YARN | dict(beta_fast=8, beta_slow=2, mscale=0.7, mscale_all_dim=0.2)),
    ),
    "qwen2_windows": (
        "Qwen2",
        COMMON | dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    ),
    "smollm3": ("SmolLM3", COMMON | dict(num_hidden_layers=5, num_key_value_heads=2)),
    "smollm3_windows": (
        "SmolLM3",
        COMMON | dict(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=6, num_key_value_heads=4),
    ),
    "gemma": ("Gemma", GEMMA),
    "gemma_untied": ("Gemma", GEMMA | dict(tie_word_embeddings=False, attention_bias=True, head_dim=8)),
    "gemma2": (
        "Gemma2",
        GEMMA
        | dict(sliding_window=5, query_pre_attn_scalar=20, attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
    ),
    "gemma3": ("Gemma3Text", GEMMA | dict(num_hidden_layers=7, sliding_window=5, rope_parameters=GEMMA3_ROPE)),
    "gemma3_scalar": (
        "Gemma3Text",
        GEMMA | dict(layer_types=[FULL, SLIDING, FULL], sliding_window=99, query_pre_attn_scalar=20),
    ),
    "mixtral": (
        "Mixtral",
        COMMON | dict(num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, sliding_window=9),
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE | dict(norm_topk_prob=True)),
    "qwen3_moe_scores": ("Qwen3Moe", QWEN3_MOE | dict(head_dim=8, tie_word_embeddings=True)),
    "gemma3_images": (
        "Gemma3",
        dict(
            text_config=GEMMA | dict(sliding_window=5, rope_parameters=GEMMA3_ROPE),
            vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
            | dict(image_size=8, patch_size=4),
            mm_tokens_per_image=4,
        )
        | dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index"), VOCAB - 1),
    ),
    "opt": ("OPT", OPT),
    "gptj": (
        "GPTJ",
        dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=2, rotary_dim=8, n_inner=48)
        | dict(bos_token_id=None, eos_token_id=None),
    ),
    "phi": ("Phi", COMMON | dict(num_key_value_heads=2, partial_rotary_factor=0.5)),
    "olmo": ("Olmo", COMMON | dict(num_key_value_heads=2)),
    "granite": ("Granite", GRANITE),
    "granite_tied_biases": ("Granite", GRANITE | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "phi3": ("Phi3", COMMON | dict(num_key_value_heads=2, sliding_window=7)),
    "phi4_mini": (
        "Phi3",
        COMMON
        | dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75)),
    ),
    "phi3_longrope": (
        "Phi3",
        COMMON
        | dict(num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=64)
        | dict(rope_parameters=LONGROPE),
    ),
    "starcoder2": ("Starcoder2", COMMON | dict(num_key_value_heads=2, sliding_window=9)),
    "starcoder2_no_biases": ("Starcoder2", COMMON | dict(num_key_value_heads=2, use_bias=False, hidden_act="gelu")),
    "stablelm": ("StableLm", STABLELM | dict(use_qkv_bias=True, num_key_value_heads=2)),
    "stablelm_parallel": ("StableLm", STABLELM | dict(use_parallel_residual=True, num_key_value_heads=4)),
    "bert": ("Bert", BERT),
    "bert_untied": ("Bert", BERT | dict(tie_word_embeddings=False, hidden_act="gelu_new", layer_norm_eps=1e-6)),
    "roberta": ("Roberta", BERT | dict(pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5)),
    "roberta_padding": ("Roberta", BERT | dict(pad_token_id=4, type_vocab_size=1, layer_norm_eps=1e-5)),
    "xlm_roberta": ("XLMRoberta", BERT | dict(pad_token_id=1, tie_word_embeddings=False)),
}
SHARDED = {"mistral": "20KB"}
