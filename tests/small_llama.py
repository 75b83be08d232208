"""A LLaMA of a few hundred numbers, made with numpy alone: what a process imports that starts or forks many others."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}


def llama(dtype: str = "BF16", hidden: int = 8) -> dict[str, np.ndarray]:
    """The tensors of CONFIG, or of its like with another hidden size."""
    random = np.random.default_rng(0)
    layer, key = "model.layers.0.", hidden // 2
    shapes = {
        "model.embed_tokens.weight": (16, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (16, hidden),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (hidden, hidden),
        f"{layer}self_attn.k_proj.weight": (key, hidden),
        f"{layer}self_attn.v_proj.weight": (key, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}mlp.gate_proj.weight": (12, hidden),
        f"{layer}mlp.up_proj.weight": (12, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, 12),
    }
    return {name: random.standard_normal(shape).astype(TYPES[dtype]) for name, shape in shapes.items()}
