"""A model's facts and a run's settings in Megatron's terms; what Megatron cannot do is refused, all at once."""

import dataclasses
from typing import Any

import pytest
import torch

from hybridrl.config.schema import Config, ModelConfig, ParallelConfig
from hybridrl.models.megatron.build import packed_seq_params, pad_multiple, padded_vocab
from hybridrl.models.megatron.config import transformer_config
from hybridrl.models.settings import UnsupportedModelError
from hybridrl.models.spec import MlaSpec, ModelSpec, MoeSpec
from hybridrl.parallel.sizes import ParallelSizes

MOE = MoeSpec(num_experts=8, top_k=2, ffn_size=24, norm_topk_prob=True, layers=(True, False, True, True))
SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    vocab_size=50,
    tied=False,
    norm_eps=1e-5,
    rope_theta=1e6,
    max_positions=128,
    qk_norm=True,
    moe=MOE,
)


def with_moe(**changes: Any) -> ModelSpec:
    return dataclasses.replace(SPEC, moe=dataclasses.replace(MOE, **changes))


def config_with(**parallel: Any) -> Config:
    return Config(parallel=ParallelConfig(**parallel))


def megatron(**parallel: Any) -> Config:
    return Config(model=ModelConfig(parameter_layout="megatron"), parallel=ParallelConfig(**parallel))


def test_all_that_changes_the_function_arrives() -> None:
    made = transformer_config(SPEC, Config(model=ModelConfig(dtype="bfloat16", aux_loss_coef=0.01)))
    expected = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 24,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_layer_freq": [1, 0, 1, 1],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_qkv_bias": False,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "calculate_per_token_loss": True,
    }
    assert {name: getattr(made, name) for name in expected} == expected


def test_sequence_parallelism_follows_tp_unless_set() -> None:
    dense = dataclasses.replace(SPEC, family="qwen3", moe=None)
    assert not transformer_config(dense, config_with()).sequence_parallel
    assert transformer_config(dense, config_with(tp=2)).sequence_parallel
    assert not transformer_config(dense, config_with(tp=2, sequence_parallel=False)).sequence_parallel


MLA = MlaSpec(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)


@pytest.mark.parametrize(
    ("spec", "config", "words"),
    [
        (dataclasses.replace(SPEC, family="gpt2"), Config(), "model_type='gpt2'"),
        (dataclasses.replace(SPEC, rope_scaling={"rope_type": "dynamic"}), Config(), "rope_type='dynamic'"),
        (dataclasses.replace(SPEC, mla=MLA), Config(), "latent attention with qkv_bias=False"),
        (dataclasses.replace(SPEC, mla=MLA, rope_scaling={"rope_type": "longrope"}), Config(), "rope_type='longrope'"),
        (dataclasses.replace(SPEC, mtp_layers=1), Config(), "mtp_layers=1"),
        (with_moe(correction_bias=True), Config(), "router score 'softmax' with correction_bias=True"),
        (with_moe(score_function="sigmoid", num_groups=8), Config(), "groups of 1"),
        (with_moe(score_function="sigmoid", num_groups=4, top_k=3), Config(), "num_experts_per_tok=3 experts"),
        (with_moe(shared_ffn_size=9), config_with(tp=2, ep=2), "the shared experts' size of 9"),
        (with_moe(top_k=1), Config(), "num_experts_per_tok=1 with norm_topk_prob=true"),
        (SPEC, Config(model=ModelConfig(dtype="float16")), "model.dtype='float16'"),
        (SPEC, Config(model=ModelConfig(recompute="some")), "model.recompute='some'"),
        (SPEC, config_with(tp=3, etp=3), "parallel.tp=3 does not divide num_attention_heads=8"),
        (with_moe(layers=(True,) * 4), config_with(tp=16, ep=2), "parallel.tp=16 does not divide"),
        (SPEC, config_with(ep=3), "parallel.ep=3 does not divide num_experts=8"),
        (SPEC, config_with(ep=2, etp=5), "parallel.etp=5 does not divide the experts' intermediate_size=24"),
        (SPEC, config_with(tp=2, ep=2, sequence_parallel=False), "with parallel.sequence_parallel=true"),
        (SPEC, megatron(tp=2), "silently wrong"),
        (SPEC, config_with(sequence_parallel=True), "supported: TP of at least 2"),
        (dataclasses.replace(SPEC, moe=None), config_with(ep=2), "parallel.ep=2 for a model without experts"),
        (dataclasses.replace(SPEC, num_heads=6, num_kv_heads=3), config_with(tp=2, ep=2), "multiple of the other"),
        (dataclasses.replace(SPEC, ffn_size=47), config_with(tp=2, ep=2), "intermediate_size=47"),
    ],
)
def test_what_megatron_cannot_honour_is_named(spec: ModelSpec, config: Config, words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        transformer_config(spec, config)
    assert any(words in problem for problem in caught.value.problems)


def test_context_parallelism_is_taken_on_a_cpu() -> None:
    assert transformer_config(SPEC, config_with(cp=2)).context_parallel_size == 2


def test_all_problems_are_told_at_once() -> None:
    config = Config(model=ModelConfig(dtype="int8", recompute="all"), parallel=ParallelConfig(ep=3))
    with pytest.raises(UnsupportedModelError) as caught:
        transformer_config(dataclasses.replace(SPEC, mtp_layers=2), config)
    assert len(caught.value.problems) == 4


def test_cuda_without_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrl.models.megatron.config.uses_transformer_engine", lambda: True)
    monkeypatch.setattr("hybridrl.models.megatron.config.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'hybridrl\[gpu\]'"):
        transformer_config(SPEC, Config())


@pytest.mark.parametrize(
    ("vocab", "multiple", "tp", "rows"), [(10, 4, 2, 16), (50, 16, 1, 64), (64, 16, 4, 64), (151936, 128, 8, 152576)]
)
def test_the_vocabulary_is_padded_alike_for_every_tp_rank(vocab: int, multiple: int, tp: int, rows: int) -> None:
    model = ModelConfig(vocab_multiple=multiple, parameter_layout="megatron")
    config = Config(model=model, parallel=ParallelConfig(tp=tp))
    assert padded_vocab(dataclasses.replace(SPEC, vocab_size=vocab), config) == rows


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(50, 1, 64), (50, 2, 64), (50, 3, 192), (151936, 8, 151936)])
def test_the_vocabulary_is_padded_as_the_engine_does(vocab: int, tp: int, rows: int) -> None:
    config = Config(model=ModelConfig(parameter_layout="engine"), parallel=ParallelConfig(tp=tp))
    assert padded_vocab(dataclasses.replace(SPEC, vocab_size=vocab), config) == rows


def test_pad_multiple_is_what_sequence_and_context_parallelism_cut_by() -> None:
    assert pad_multiple(ParallelSizes(world=8, ep=8)) == 1
    assert pad_multiple(ParallelSizes(world=8, tp=4, etp=4)) == 4
    assert pad_multiple(ParallelSizes(world=8, tp=2, cp=2)) == 8


@pytest.mark.parametrize("lengths", [[], [3, 0, 2]])
def test_empty_packed_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token each"):
        packed_seq_params(lengths)
