"""An upcycled mixture of experts computes the dense model's function, whatever its routers choose."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.upcycle import moe_config, upcycle


def dense_folder(folder: Path, *, tied: bool, max_shard_size: str = "5GB") -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=4,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.mark.parametrize(("tied", "shard"), [(True, "5GB"), (False, "20KB")])
def test_the_function_is_kept(tmp_path: Path, tied: bool, shard: str) -> None:
    source = dense_folder(tmp_path / "dense", tied=tied, max_shard_size=shard)
    upcycle(source, tmp_path / "moe", experts=4, top_k=2)
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    moe, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = torch.randint(0, 48, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(moe(tokens).logits, dense(tokens).logits, rtol=0, atol=1e-5)


def test_experts_and_head_are_parameters_of_their_own(tmp_path: Path) -> None:
    source = dense_folder(tmp_path / "dense", tied=True)
    upcycle(source, tmp_path / "moe", experts=3, top_k=2)
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["num_local_experts"], config["head_dim"]) == (False, 3, 4)
    names = json.loads((tmp_path / "moe" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum(".experts." in name for name in names) == 3 * 3 * 3
    assert "lm_head.weight" in names


def test_what_mixtral_cannot_express_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="attention_bias") as error:
        moe_config({"model_type": "qwen3", "attention_bias": True, "mlp_bias": True}, experts=2, top_k=3)
    for word in ("qwen3", "mlp_bias", "top_k=3"):
        assert word in str(error.value)
