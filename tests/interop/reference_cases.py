"""The tiny models of the interop tests, by the fields of their transformers config. Needs nothing installed."""

VOCAB, BATCH, TOKENS = 67, 2, 24
COMMON = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
COMMON |= dict(max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e3, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=12)
NEOX = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25))
NEOX |= COMMON | dict(hidden_size=64)  # heads of 16, of which 4 turn

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
}
SHARDED = {"mistral": "20KB"}
