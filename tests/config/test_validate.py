"""Every impossible combination is found, with its keys and numbers, and no possible one is refused."""

from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hybridrl.config.compose import compose
from hybridrl.config.defaults import resolve_defaults
from hybridrl.config.folders import RECIPES
from hybridrl.config.schema import Config
from hybridrl.config.strict import build
from hybridrl.config.validate import validate
from hybridrl.config.validate.bounds import BOUNDS, CHOICES, get
from hybridrl.parallel.sizes import ParallelSizes
from tests.config.models import DENSE, MIXED, MOE, Moe, Sizes

BASE = [
    *("model.path=builtin:tiny_moe", "data.path=builtin:tiny_sums", "rewards.judges=[{name: exact}]"),
    *("rollout.n=8", "rollout.max_prompt_length=16", "rollout.max_response_length=8"),
    *("trainer.prompts_per_step=32", "trainer.steps=60", "warm_start.steps=60", "optimizer.lr=1e-3"),
]

MEGATRON = "model.parameter_layout=megatron"
DYNAMIC = "algorithm.dynamic_sampling.enabled=true"


def tiny(ranks: int, *overrides: str) -> Config:
    """As `compose`, but without hydra's search for files where no group is chosen: much quicker."""
    words = [*BASE, f"trainer.ranks_per_node={ranks}", *overrides]
    if any("." not in word.partition("=")[0] for word in words):
        return compose(words)
    tree = OmegaConf.create(asdict(Config()))
    for override in OverridesParser.create().parse_overrides(words):
        OmegaConf.update(tree, override.key_or_group, override.value())
    config, wrong = build(Config, OmegaConf.to_container(tree, resolve=True))
    assert not wrong
    return resolve_defaults(config)


def found(*overrides: str, spec: Sizes | None = None, ranks: int = 1) -> str:
    return "\n".join(validate(tiny(ranks, *overrides), spec))


CASES: list[tuple[int, str, Sizes | None, list[str]]] = [
    # ranks, overrides, model, words
    (8, "parallel.tp=3", None, ["TP·CP·PP·DP", "world=8", "tp=3", "trainer.nodes=1", "trainer.ranks_per_node=8"]),
    (6, "parallel.tp=2 parallel.cp=2", None, ["world=6", "tp=2 · cp=2 · pp=1 = 4"]),
    (1, "model.router_bias_rate=0.001", MOE, ["model.router_bias_rate=0.001", "no correction bias"]),
    (1, "model.router_bias_rate=-1", None, ["model.router_bias_rate=-1"]),
    (8, "parallel.ep=3", None, ["ETP·EP·PP·EDP", "parallel.ep=3", "parallel.etp=1", "each defaults to 1"]),
    (8, "parallel.ep=4 parallel.etp=4 parallel.tp=4", None, ["etp=4 · ep=4 · pp=1 = 16"]),
    (1, "checkpoint.keep_every=4", None, ["checkpoint.keep_every=4", "checkpoint.every=null"]),
    (1, "checkpoint.every=3 checkpoint.keep_every=4", None, ["checkpoint.keep_every=4", "checkpoint.every=3"]),
    (1, "checkpoint.load=weights", None, ["checkpoint.load=weights", "trainer.resume=auto"]),
    (1, "memory.parameters=single reshard.verify=true", None, ["memory.parameters=single", "reshard.verify=true"]),
    (
        *(1, "memory.parameters=single rollout.engine=sglang rollout.sglang.hosting=subprocess", None),
        ["memory.parameters=single", "rollout.sglang.hosting=subprocess", "hosting=in_process"],
    ),
    (1, "trainer.resume=not/there", None, ["trainer.resume=not/there", "no such folder"]),
    (1, "memory.arena_dir=/nvme", None, ["memory.arena_dir=/nvme", "memory.arena=disk"]),
    (1, "parallel.vpp=2", None, ["parallel.vpp=2", "parallel.pp=1"]),
    (1, "parallel.first_stage_layers=2", None, ["parallel.first_stage_layers=2", "parallel.pp=1"]),
    (1, "parallel.sequence_parallel=true", None, ["parallel.sequence_parallel=true", "parallel.tp=1"]),
    (2, "parallel.tp=2 parallel.etp=2 parallel.sequence_parallel=false", MOE, ["sequence_parallel=false", "experts"]),
    (2, "parallel.tp=2 parallel.ep=2 parallel.sequence_parallel=false", None, ["sequence_parallel=false", "experts"]),
    (
        2,
        f"parallel.tp=2 {MEGATRON}",
        MOE,
        ["parallel.etp=1 with parallel.tp=2 and parallel.ep=1", "silently wrong", "etp=2"],
    ),
    (2, f"parallel.etp=2 {MEGATRON}", MOE, ["parallel.etp=2 with parallel.tp=1 and parallel.ep=1", "silently wrong"]),
    (4, "parallel.pp=4", DENSE, ["6 layers", "parallel.pp=4", "do not divide", "2 would be dropped"]),
    (2, "parallel.pp=2 parallel.vpp=2", DENSE, ["other stages: 3", "parallel.vpp=2"]),
    (3, "parallel.pp=3 parallel.first_stage_layers=1", DENSE, ["5 layers do not divide into 2", "1 would be dropped"]),
    (2, "parallel.pp=2 parallel.first_stage_layers=4 parallel.last_stage_layers=1", DENSE, ["1 layers would be left"]),
    (3, "parallel.pp=3 parallel.first_stage_layers=3 parallel.last_stage_layers=3", DENSE, ["0 layers would be left"]),
    (2, "parallel.pp=2 parallel.first_stage_layers=7", DENSE, ["-1 layers would be left"]),
    (3, "parallel.pp=3 parallel.vpp=2 parallel.first_stage_layers=1 parallel.last_stage_layers=3", DENSE, ["vpp=2"]),
    (5, "parallel.tp=5", DENSE, ["parallel.tp=5", "12 attention heads"]),
    (6, "parallel.tp=6", DENSE, ["parallel.tp=6", "neither a divisor nor a multiple", "4 key-value heads"]),
    (9, "parallel.tp=9", replace(DENSE, num_heads=9, num_kv_heads=3), ["parallel.tp=9", "intermediate size of 96"]),
    (3, "parallel.ep=3", MOE, ["parallel.ep=3", "8 experts"]),
    (5, "parallel.ep=1 parallel.etp=5 parallel.tp=5", MOE, ["parallel.etp=5", "intermediate size of 96"]),
    (8, "parallel.tp=8 parallel.ep=8", MIXED, ["parallel.tp=8", "shared experts' size of 36"]),
    (2, "parallel.ep=2", DENSE, ["parallel.ep=2", "no experts"]),
    (2, "parallel.etp=2", DENSE, ["parallel.etp=2", "no experts"]),
    (1, "rollout.max_response_length=4000 rollout.max_prompt_length=97", DENSE, ["4097 tokens", "4096 positions"]),
    (
        1,
        "trainer.mini_batch_prompts=12",
        None,
        ["trainer.prompts_per_step=32", "mini_batch_prompts=12", "8 prompts left"],
    ),
    (
        1,
        "trainer.mini_batch_prompts=64",
        None,
        ["trainer.mini_batch_prompts=64 is more than trainer.prompts_per_step=32"],
    ),
    (3, "", None, ["256 samples", "rollout.n=8", "3 data-parallel ranks", "samples a rank an update"]),
    (1, "trainer.micro_batch_size=512", None, ["trainer.micro_batch_size=512", "256 samples"]),
    (2, "parallel.pp=2 parallel.vpp=3 trainer.micro_batch_size=256", DENSE, ["multiples of parallel.pp=2"]),
    (2, "warm_start.batch_size=33", None, ["warm_start.batch_size=33", "2 data-parallel ranks"]),
    (
        1,
        "trainer.max_tokens_per_micro_batch=20",
        None,
        ["max_tokens_per_micro_batch=20", "max_prompt_length=16", "= 24"],
    ),
    (4, "parallel.tp=4 trainer.max_tokens_per_micro_batch=25 rollout.max_prompt_length=17", None, ["padded to 28"]),
    (1, "rollout.tp=2 rollout.engine=sglang", None, ["rollout.tp=2 does not divide the world=1"]),
    (4, "rollout.tp=4 rollout.dp=3 rollout.engine=sglang", None, ["rollout.dp=3 does not divide rollout.tp=4"]),
    (4, "rollout.tp=4 rollout.ep=3 rollout.engine=sglang", None, ["rollout.ep=3 does not divide rollout.tp=4"]),
    (2, "rollout.tp=2", None, ["rollout.tp=2", "rollout.engine=transformers"]),
    (8, "rollout.tp=8 rollout.engine=sglang parallel.ep=8", MOE, ["rollout.tp=8", "12 attention heads"]),
    (16, "rollout.tp=16 rollout.dp=8 rollout.ep=16 rollout.engine=sglang", MOE, ["rollout.ep=16", "8 experts"]),
    (2, "rollout.tp=2 rollout.ep=2 rollout.engine=sglang", DENSE, ["rollout.ep=2", "no experts"]),
    (1, "rollout.engine=sglang", replace(DENSE, rope_scaling={"attention_factor": 0.8}), ["attention_factor=0.8"]),
    (
        2,
        "rollout.tp=2 rollout.dp=2 rollout.engine=sglang",
        replace(DENSE, family="llama"),
        ["rollout.dp=2", "llama has no data-parallel attention"],
    ),
    (
        2,
        "rollout.tp=2 rollout.dp=2 rollout.engine=sglang rollout.sglang.max_running_requests=1",
        DENSE,
        ["max_running_requests=1", "rollout.dp=2"],
    ),
    (
        1,
        "rollout.engine=sglang",
        replace(MOE, family="mixtral", head_dim=16),
        ["mixtral heeds no head_dim", "12 heads of 16", "hidden size of 96"],
    ),
    (
        1,
        "rollout.engine=sglang",
        replace(MIXED, family="qwen3_moe"),
        ["qwen3_moe builds experts in every layer", "has 1 without"],
    ),
    (8, "rollout.tp=8 rollout.engine=sglang", MIXED, ["shared experts' intermediate size of 36", "rollout.tp=8"]),
    (8, "rollout.tp=8 rollout.engine=sglang", replace(DENSE, ffn_size=92), ["intermediate size of 92"]),
    (
        1,
        "rollout.engine=sglang rollout.sglang.kv_tokens=23",
        None,
        ["kv_tokens=23", "max_prompt_length=16", "= 24"],
    ),
    (1, "rollout.sglang.hosting=process", None, ["rollout.sglang.hosting=process", "in_process, subprocess"]),
    (
        2,
        "rollout.engine=sglang rollout.tp=2 rollout.dp=2 rollout.sglang.hosting=subprocess reshard.placement=auto "
        "+rollout.sglang.server_args.tp_size=2",
        None,
        ["server_args.tp_size: decided by rollout.tp", "rollout.dp=2", "hosting=subprocess", "reshard.placement=auto"],
    ),
    (1, "reshard.placement=auto", None, ["reshard.placement=auto", "rollout.engine=transformers", "identity"]),
    (1, "reshard.placement=atuo", None, ["reshard.placement=atuo", "did you mean 'auto'?"]),
    (1, "reshard.bucket_bytes=0", None, ["reshard.bucket_bytes=0: must be at least 1"]),
    (1, "rollout.temperature=0", None, ["rollout.temperature=0", "over 0"]),
    (1, "rollout.temperature=-1", None, ["rollout.temperature=-1", "at least 0"]),
    (1, "rollout.top_p=0.9", None, ["rollout.top_p=0.9", "log-probs", "set rollout.top_p=1.0"]),
    (1, "rollout.top_k=50", None, ["rollout.top_k=50", "set rollout.top_k=0"]),
    (1, "rollout.stop=['END','']", None, ["rollout.stop=['END', '']", "an empty string"]),
    (1, "rollout.stop=['\ufffd']", None, ["rollout.stop=", "U+FFFD"]),
    (1, "rollout.routed_experts=true", DENSE, ["rollout.routed_experts=true", "no experts"]),
    (1, "rollout.n=1", None, ["rollout.n=1", "algorithm.advantage=grpo", "2 or more"]),
    (1, "algorithm.kl.where=loss algorithm.kl.coef=0", None, ["algorithm.kl.coef=0", "algorithm.kl.where=loss"]),
    (1, "rollout.n=1 algorithm.advantage=rloo", None, ["rollout.n=1 with algorithm.advantage=rloo", "2 or more"]),
    (1, "algorithm.advantage=rloo algorithm.normalize=none", None, ["normalize=none has no effect", "advantage=rloo"]),
    (1, "algorithm.pass_k=4", None, ["algorithm.pass_k=4 has no effect with algorithm.advantage=grpo"]),
    (1, "algorithm.advantage=pass_at_k", None, ["algorithm.pass_k is missing", "from 1 to rollout.n"]),
    (1, "algorithm.advantage=pass_at_k algorithm.pass_k=9", None, ["algorithm.pass_k=9 is more than rollout.n=8"]),
    (1, "algorithm.policy_loss=gspo algorithm.dual_clip=3", None, ["dual_clip=3.0 has no effect", "policy_loss=gspo"]),
    (1, "algorithm.policy_loss=kl_cov algorithm.clip_high=0.3", None, ["clip_high=0.3 has no effect", "one update"]),
    (1, "algorithm.covariance.fraction=0.1", None, ["covariance.fraction=0.1 has no effect", "policy_loss=ppo_clip"]),
    (1, "algorithm.policy_loss=clip_cov algorithm.covariance.low=6", None, ["low=6.0 is more than", "high=5.0"]),
    (
        1,
        "algorithm.policy_loss=policy_gradient trainer.update_epochs=2",
        None,
        ["policy_gradient with 2 updates a step", "trainer.mini_batch_prompts=32 and trainer.update_epochs=1"],
    ),
    (1, "algorithm.kl.target=3", None, ["algorithm.kl.target=3.0 has no effect with algorithm.kl.where=none"]),
    (
        1,
        "algorithm.kl.where=loss algorithm.kl.gain=0.2",
        None,
        ["kl.gain=0.2 has no effect", "kl.target"],
    ),
    (1, "algorithm.kl.where=loss algorithm.kl.estimator=k1", None, ["does not see the reference", "k2 or k3"]),
    (1, "algorithm.overlong.factor=2", None, ["overlong.factor=2.0 has no effect without algorithm.overlong.cache"]),
    (1, "algorithm.overlong.cache=9", None, ["algorithm.overlong.cache=9 is more than the maximal length of 8"]),
    (
        1,
        "algorithm.overlong.cache=2 algorithm.overlong.max_length=10",
        None,
        ["max_length=10 - algorithm.overlong.cache=2 = 8 tokens", "rollout.max_response_length=8", "punished"],
    ),
    (1, "algorithm.dynamic_sampling.surplus=keep", None, ["surplus=keep has no effect", "enabled=true"]),
    (1, "algorithm.dynamic_sampling.surplus=toss", None, ["surplus=toss", "known: drop, keep"]),
    (1, f"{DYNAMIC} algorithm.dynamic_sampling.surplus=keep", None, ["older weights", "correction.weight=token"]),
    (1, f"{DYNAMIC} rollout.n=1 algorithm.advantage=reinforce", None, ["rollout.n=1", "every group would be dropped"]),
    (
        1,
        f"{DYNAMIC} algorithm.dynamic_sampling.generation_prompts=3",
        None,
        ["max_generation_batches=10", "generation_prompts=3 = 30 prompts cannot fill", "prompts_per_step=32"],
    ),
    (4, f"{DYNAMIC} algorithm.dynamic_sampling.generation_prompts=3", None, ["leaves 1 of the 4 replicas", "idle"]),
    (1, f"{DYNAMIC} algorithm.dynamic_sampling.judge=math", None, ["judge=math is no judge", "there are exact"]),
    (
        1,
        "algorithm.correction.weight_high=3",
        None,
        ["weight_high=3.0 has no effect", "weight=none"],
    ),
    (
        1,
        "algorithm.correction.reject=token algorithm.correction.reject_low=3",
        None,
        ["algorithm.correction.reject_low=3.0 is more than algorithm.correction.reject_high=2.0"],
    ),
    (
        1,
        "algorithm.correction.weight=token algorithm.correction.weight_high=0.9",
        None,
        ["weight_low=0.0 to algorithm.correction.weight_high=0.9 leaves out 1"],
    ),
    (1, "algorithm.correction.weight=word", None, ["algorithm.correction.weight=word", "sequence, geometric"]),
    (1, "algorithm.old_log_probs=engine algorithm.correction.weight=token", None, ["weight=token", "are not computed"]),
    (1, "algorithm.old_log_probs=engine mismatch.warn.kl=1", None, ["mismatch.warn.kl=1.0 has no effect"]),
    (1, "mismatch.stop.ess=1.5", None, ["mismatch.stop.ess=1.5: must be in (0, 1]"]),
    (1, "trainer.update_epochs=0", None, ["trainer.update_epochs=0: must be at least 1"]),
    (1, "algorithm.kl.where=both", None, ["algorithm.kl.where=both", "known: none, loss, reward"]),
    (1, "algorithm.dual_clip=1", None, ["algorithm.dual_clip=1.0: must be more than 1"]),
    (1, "algorithm.clip_low=1.5", None, ["algorithm.clip_low=1.5: must be in (0, 1]"]),
    (1, "algorithm.clip_high=0", None, ["algorithm.clip_high=0.0: must be more than 0"]),
    (1, "algorithm.aggregate=token_men", None, ["algorithm.aggregate=token_men", "did you mean 'token_mean'"]),
    (1, "rewards.judges=[]", None, ["rewards.judges is empty"]),
    (1, "rewards.judges.0.weight=0", None, ["every weight is 0"]),
    (1, "rewards.judges.0.weight=inf", None, ["rewards.judges[0].weight=inf: must be a finite number"]),
    (1, "rewards.judges.0.name=exat", None, ["rewards.judges[0].name=exat", "module:function"]),
    (1, "rewards.judges.0.name=nowhere.judges:f", None, ["nowhere.judges:f: there is no module", "PYTHONPATH"]),
    (1, "rollout.stop_token_ids=[3,-1]", None, ["rollout.stop_token_ids", "[-1]"]),
    (1, "trainer.output_dir=pyproject.toml/run", None, ["trainer.output_dir=pyproject.toml/run", "is a file"]),
    (1, "trainer.output_dir=.", None, ["trainer.output_dir='.' names no folder of its own"]),
    (1, "trainer.output_dir=''", None, ["trainer.output_dir='' names no folder of its own"]),
    (1, "checkpoint.dir=pyproject.toml", None, ["checkpoint.dir=pyproject.toml:", "is a file"]),
    (
        1,
        "memory.arena=disk memory.arena_dir=pyproject.toml/a",
        None,
        ["memory.arena_dir=pyproject.toml/a:", "is a file"],
    ),
    (1, "trainer.resume=tests", None, ["trainer.resume=tests holds no checkpoint", "step-…"]),
    (1, "evaluation.path=x evaluation.n=4", None, ["evaluation.path=x has no effect without", "evaluation.n=4 has no"]),
    (1, "evaluation.every=2", None, ["evaluation.path is missing"]),
    (1, "evaluation.every=2 evaluation.path=nowhere", None, ["evaluation.path=nowhere: no such file"]),
    (1, "evaluation.every=2 evaluation.path=builtin:sums", None, ["evaluation.path=builtin:sums: unknown"]),
    (1, "evaluation.every=2 evaluation.n=2", None, ["evaluation.n=2 with evaluation.temperature=0"]),
    (1, "evaluation.every=2 evaluation.split=test", None, ["evaluation.split=test has no effect"]),
    (1, "evaluation.every=2 algorithm.name=sft", None, ["evaluation.every=2 has no effect with algorithm.name=sft"]),
    (1, "data.size=5 data.task_args.a=1", None, ["data.size=5 has no effect", "data.task_args={'a': 1} has no effect"]),
    (1, "optimizer.lr=inf", None, ["optimizer.lr=inf: must be at least 0 and finite"]),
    (1, "rewards.batch_timeout_s=1", None, ["rewards.batch_timeout_s=1.0", "rewards.timeout_s=10.0"]),
    (1, "optimizer.name=sgd", None, ["optimizer.name=sgd", "optimizer.distributed=true"]),
    (1, "optimizer.momentum=0.9", None, ["optimizer.momentum=0.9", "optimizer.beta1"]),
    (1, "optimizer.schedule=linear optimizer.min_lr=1", None, ["optimizer.min_lr=1.0", "optimizer.lr=0.001"]),
    (1, "optimizer.min_lr=1e-5", None, ["optimizer.min_lr=1e-05", "optimizer.schedule=constant"]),
    (1, "optimizer.warmup_steps=61", None, ["optimizer.warmup_steps=61", "trainer.steps=60"]),
    (1, "optimizer.lr=nan", None, ["optimizer.lr=nan: must be at least 0"]),
    (1, "trainer.steps=0", None, ["trainer.steps=0: must be at least 1"]),
    (1, "algorithm=sft algorithm.kl.where=loss", None, ["algorithm.kl.where=loss", "sft"]),
    (1, "algorithm=sft", None, ["warm_start.steps=60", "algorithm.name=sft"]),
    (1, "data.path=null", None, ["data.path is missing"]),
    (1, "data.path=nowhere.jsonl", None, ["data.path=nowhere.jsonl: no such file"]),
    (1, "data.path=builtin:sums", None, ["data.path=builtin:sums: unknown", "builtin:tiny_sums"]),
    (1, "data.source=reasoning_gym data.path=null", None, ["data.task"]),
    (1, "data.source=reasoning_gym data.task=chain_sum", None, ["data.path=builtin:tiny_sums has no effect"]),
    (
        1,
        "data.source=reasoning_gym data.path=null data.task=a data.size=9",
        None,
        ["data.size=9", "prompts_per_step=32"],
    ),
    (1, "data.task=chain_sum", None, ["data.task=chain_sum has no effect"]),
    (1, "data.split=train", None, ["data.split=train has no effect"]),
    (1, "model.path=nowhere", None, ["model.path=nowhere: is no folder", "Hugging Face"]),
    (1, "model.path=tests", None, ["model.path=tests: has no config.json"]),
    (1, "model.path=builtin:huge", None, ["model.path=builtin:huge: unknown", "builtin:tiny_moe"]),
    (1, "model.tokenizer=nowhere", None, ["model.tokenizer=nowhere: no such folder"]),
]


@pytest.mark.parametrize(("ranks", "overrides", "spec", "words"), CASES, ids=[f"{c[0]}:{c[1]}" for c in CASES])
def test_an_impossible_combination_is_named(
    ranks: int, overrides: str, spec: Sizes | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parent.parent.parent)
    texts = found(*overrides.split(), spec=spec, ranks=ranks)
    for word in words:
        assert word in texts


POSSIBLE = [
    (1, "", None),
    (1, "", MOE),
    (2, "parallel.ep=2", MOE),
    (4, "parallel.tp=4 parallel.ep=4", MOE),
    (4, "parallel.tp=2 parallel.ep=2 parallel.pp=2 parallel.vpp=3", MOE),
    (2, "parallel.tp=2 parallel.etp=2", MOE),
    (2, f"parallel.tp=2 parallel.etp=2 {MEGATRON}", MOE),
    (2, "parallel.tp=2", MOE),
    (2, "parallel.etp=2", MOE),
    (12, "parallel.tp=12 rollout.max_prompt_length=20 trainer.prompts_per_step=36", DENSE),
    (3, "parallel.pp=3 parallel.first_stage_layers=1 parallel.last_stage_layers=3", DENSE),
    (3, "parallel.pp=3 parallel.first_stage_layers=2", DENSE),
    (2, "parallel.pp=2 parallel.first_stage_layers=4 parallel.last_stage_layers=2 parallel.vpp=2", DENSE),
    (1, "model.router_bias_rate=0.001", replace(MOE, moe=Moe(correction_bias=True))),
    (2, "parallel.cp=2 trainer.device=cpu", DENSE),
    (2, "parallel.cp=2 trainer.device=cuda", DENSE),
    (1, "optimizer=sgd optimizer.momentum=0.9 optimizer.clip_grad=0", None),
    (1, "algorithm.kl.where=reward algorithm.dual_clip=3 algorithm.clip_high=0.28", None),
    (1, "rewards.judges=[{name: 'tests.rewards.bad_judges:obey'}]", None),
    (1, "rollout.n=1 algorithm.advantage=remax algorithm.policy_loss=policy_gradient", None),
    (1, "algorithm.advantage=pass_at_k algorithm.pass_k=8", None),
    (1, "algorithm.policy_loss=kl_cov trainer.update_epochs=2 algorithm.covariance.coef=2", None),
    (1, "algorithm.policy_loss=clip_cov algorithm.covariance.low=2 algorithm.dual_clip=3", None),
    (1, "algorithm.kl.where=reward algorithm.kl.estimator=k1 algorithm.kl.target=6 algorithm.kl.gain=0.2", None),
    (1, "algorithm.overlong.filter=true algorithm.overlong.cache=8", None),
    (1, f"{DYNAMIC} algorithm.dynamic_sampling.max_generation_batches=0 rollout.n=2", None),
    (1, f"{DYNAMIC} algorithm.dynamic_sampling.surplus=keep algorithm.old_log_probs=engine", None),
    (1, f"{DYNAMIC} algorithm.dynamic_sampling.judge=exact", None),
    (1, "algorithm.correction.weight=token algorithm.correction.reject=geometric", None),
    (1, "mismatch.warn.mean=0.1 mismatch.stop.ess=0.5", None),
    (1, "optimizer.warmup_steps=61 trainer.update_epochs=2", None),
    (1, "rollout.n=1 algorithm.advantage=reinforce", None),
    (1, "optimizer.schedule=cosine optimizer.min_lr=1e-5 optimizer.warmup_steps=60", None),
    (1, "optimizer.warmup_steps=61 trainer.mini_batch_prompts=1", None),
]


@pytest.mark.parametrize(("ranks", "overrides", "spec"), POSSIBLE, ids=[f"{c[0]}:{c[1]}" for c in POSSIBLE])
def test_a_possible_combination_passes(ranks: int, overrides: str, spec: Sizes | None) -> None:
    words = overrides.replace(": '", ":'").split()
    assert found(*(w.replace(":'", ": '") for w in words), spec=spec, ranks=ranks) == ""


def test_many_impossible_combinations_are_reported_together() -> None:
    texts = validate(tiny(2, "parallel.pp=4", "rollout.top_p=0.5", "rollout.temperature=0", "optimizer.beta1=2"), MOE)
    for word in ("optimizer.beta1=2.0", "TP·CP·PP·DP", "6 layers", "rollout.top_p", "rollout.temperature"):
        assert sum(word in text for text in texts) == 1


def test_a_wrong_value_is_reported_once_and_not_again_in_combinations() -> None:
    texts = validate(tiny(1, "rollout.n=0", "trainer.prompts_per_step=-4"))
    assert sorted(texts) == [
        "rollout.n=0: must be at least 1",
        "trainer.mini_batch_prompts=-4: must be at least 1",
        "trainer.prompts_per_step=-4: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("world", "local", "word"),
    [(1, 1, "--nproc-per-node 2"), (4, 2, "world=4 was started"), (2, 1, "1 ranks were started on this node")],
)
def test_the_ranks_that_were_started_must_be_those_stated(world: int, local: int, word: str) -> None:
    config = tiny(2)
    (text,) = validate(config, world=world, local_world=local)
    assert word in text
    assert validate(config, world=2, local_world=2) == []


def test_expandable_segments_are_refused_where_another_process_must_open_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options, word = (
        ("rollout.engine=sglang", "rollout.sglang.hosting=subprocess"),
        "cannot be opened by another process",
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    assert word in "\n".join(validate(tiny(1, *options), device="cuda"))
    assert word not in "\n".join(validate(tiny(1, *options), device="cpu"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert word not in "\n".join(validate(tiny(1, *options), device="cuda"))


def test_registered_names_are_checked_where_they_are_given() -> None:
    config = tiny(1, "algorithm.policy_loss=ppo_clp")
    assert validate(config) == []
    (text,) = validate(config, names={"algorithm.policy_loss": {"ppo_clip", "gspo"}})
    assert "did you mean 'ppo_clip'? known: gspo, ppo_clip" in text


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrl.config.validate.inputs.find_spec", lambda name: None)
    config = tiny(1, "rollout.engine=sglang")
    assert "SGLang is not installed" in validate(config)[0]
    assert validate(config, files=False) == []


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrl.config.validate.inputs.find_spec", lambda name: None)
    assert validate(tiny(1, "trainer.wandb_project=p")) == [
        "trainer.wandb_project=p: wandb is not installed here; pip install wandb"
    ]


@pytest.mark.parametrize("kind", ["file", "folder", "glob"])
def test_data_may_be_a_file_a_folder_or_a_glob(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    path = {"file": tmp_path / "a.jsonl", "folder": tmp_path, "glob": tmp_path / "*.jsonl"}[kind]
    assert found(f"data.path='{path}'") == ""


def numbers_and_names(kind: type[Any], prefix: str = "") -> tuple[set[str], set[str]]:
    numbers: set[str] = set()
    names: set[str] = set()
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint, key = hints[field.name], prefix + field.name
        if is_dataclass(hint) and isinstance(hint, type):
            inner = numbers_and_names(hint, f"{key}.")
            numbers, names = numbers | inner[0], names | inner[1]
        elif hint in (int, float, int | None, float | None):
            numbers.add(key)
        elif hint is str:
            names.add(key)
    return numbers, names


EXAMPLE_KEYS = {"data.chosen_key", "data.rejected_key", "data.completion_key", "data.label_key"}


def test_every_number_has_a_bound_and_every_name_its_choices() -> None:
    numbers, names = numbers_and_names(Config)
    free = {"model.path", "data.prompt_key", "data.answer_key", "trainer.output_dir", "trainer.name", "trainer.resume"}
    free |= EXAMPLE_KEYS
    registered = {"algorithm.advantage", "algorithm.policy_loss"}
    assert numbers == set(BOUNDS)
    assert names - free - registered == set(CHOICES)


def test_the_schemas_own_defaults_are_within_bounds() -> None:
    config = Config()
    for key, bound in BOUNDS.items():
        value = get(config, key)
        assert value is None or value in bound, key


@settings(deadline=None, max_examples=50)
@given(st.fixed_dictionaries({k: st.integers(1, 8) for k in ("tp", "cp", "pp", "ep", "etp")}), st.integers(1, 64))
def test_the_world_is_refused_exactly_where_there_are_no_such_sizes(sizes: dict[str, int], world: int) -> None:
    config = tiny(world, *(f"parallel.{k}={v}" for k, v in sizes.items()))
    refused = any("·DP" in text or "·EDP" in text for text in validate(config))
    try:
        ParallelSizes(world=world, **sizes)
    except ValueError:
        assert refused
    else:
        assert not refused


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(1, 4), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))
def test_stages_that_pass_hold_every_layer_once(pp: int, vpp: int, first: int | None, last: int | None) -> None:
    keys = {"pp": pp, "vpp": vpp, "first_stage_layers": first, "last_stage_layers": last}
    words = [f"parallel.{k}={'null' if v is None else v}" for k, v in keys.items()]
    texts = found(*words, spec=replace(DENSE, num_layers=12), ranks=pp)
    if not texts:
        inner = pp - (first is not None) - (last is not None)
        each = (12 - (first or 0) - (last or 0)) // max(1, inner)
        stages = [first] * (first is not None) + [each] * inner + [last] * (last is not None)
        assert len(stages) == pp
        assert sum(s or 0 for s in stages) == 12
        assert all(s and s % vpp == 0 for s in stages)


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_can_run_on_the_hardware_it_states(recipe: str) -> None:
    assert validate(compose([f"recipe={recipe}"]), files=False) == []
