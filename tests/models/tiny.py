"""Tiny random Hugging Face folders of every family, made by transformers itself.

`tiny_folder("mixtral")` makes the folder once a session and returns it. Of ranks only the first can make one, since
transformers saves on no other: a test makes it before they look for it.
Biases, norms and padding-sensitive parts are random too, so that no mistake hides behind zeros and ones.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "HYBRIDRL_TEST_MODELS"
"""Where this session's models are; tests/conftest.py sets it before any rank is started."""

BASE: Mapping[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "pad_token_id": None,
}
MOE: Mapping[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 24}
SIGMOID: Mapping[str, Any] = {
    **MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "initializer_range": 0.15,
    "head_dim": None,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_experts": 8}),
    "qwen3_moe_tied": ("qwen3_moe", {**MOE, "num_experts": 8, "tie_word_embeddings": True}),
    "qwen3_moe_mixed": ("qwen3_moe", {**MOE, "num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"head_dim": None, "hidden_size": 64}),
    "qwen2_tied": ("qwen2", {"head_dim": None, "hidden_size": 64, "tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "glm4_moe": ("glm4_moe", {**SIGMOID, "attention_bias": True}),
    "glm4_moe_qk_norm": (
        "glm4_moe",
        {**SIGMOID, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "head_dim": 16},
    ),
    "deepseek_moe": ("deepseek_v3", {**SIGMOID, **LATENT, "q_lora_rank": 20, "rope_parameters": YARN}),
    "moonlight_moe": (
        "deepseek_v3",
        {**SIGMOID, **LATENT, "q_lora_rank": None, "n_group": 2, "topk_group": 1, "rms_norm_eps": 1e-3},
    ),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
}
"""Name of a variant → model_type and the settings that differ from `BASE`."""

FAMILY_NAMES = ("qwen3_moe", "mixtral", "qwen3", "qwen2", "llama")
"""One plain variant of each family."""

NULLS = ("pad_token_id", "q_lora_rank")
"""Settings that None is a value of; for the others it leaves the default."""


@cache
def tiny_folder(variant: str, dtype: str = "float32", **changes: Any) -> Path:
    """The Hugging Face folder of a variant, with these settings changed: config, generation config, safetensors.

    `changes` are settings of the configuration class, such as `num_hidden_layers=8`.
    """
    key = "-".join([variant, dtype, *(f"{k}={v}" for k, v in sorted(changes.items()))])
    root = Path(os.environ[FOLDER_VARIABLE])
    folder = root / key
    if not folder.is_dir():
        aside = Path(tempfile.mkdtemp(dir=root))
        make_folder(aside, variant, dtype, **changes)
        try:
            aside.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def make_folder(
    folder: Path, variant: str, dtype: str = "float32", max_shard_size: str = "5GB", **changes: Any
) -> None:
    """Writes a variant to an existing folder. The same values each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = VARIANTS[variant]
    chosen = {k: v for k, v in {**BASE, **settings, **changes}.items() if v is not None or k in NULLS}
    config = AutoConfig.for_model(model_type, **chosen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.05)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
