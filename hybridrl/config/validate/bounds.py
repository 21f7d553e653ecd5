"""What a single value may be: a range for every number, a list for every name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, isfinite
from typing import Any

from hybridrl.config.folders import CONF
from hybridrl.config.schema import Config
from hybridrl.config.strict import Problem
from hybridrl.config.suggest import closest


@dataclass(frozen=True)
class Bound:
    """An interval of finite numbers; an open end leaves its number out."""

    low: float = -inf
    high: float = inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return isfinite(value) and above and below

    def __str__(self) -> str:
        if self.high < inf:
            return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"
        if self.low == -inf:
            return "a finite number"
        return f"more than {self.low:g}" if self.open_low else f"at least {self.low:g}"


FINITE, COUNT, NATURAL, POSITIVE = Bound(), Bound(1), Bound(0), Bound(0, open_low=True)
_UNIT = Bound(0, 1, open_high=True)
_WEIGHT = Bound(0, 1e8)
"""Importance weights are computed up to e^20."""

BOUNDS: Mapping[str, Bound] = {
    "model.aux_loss_coef": NATURAL,
    "model.router_bias_rate": NATURAL,
    "model.vocab_multiple": COUNT,
    **{
        f"parallel.{k}": COUNT
        for k in ("tp", "cp", "pp", "vpp", "ep", "etp", "first_stage_layers", "last_stage_layers")
    },
    **{f"rollout.{k}": COUNT for k in ("tp", "dp", "ep", "n", "max_batch_size")},
    **{f"rollout.{k}": COUNT for k in ("max_prompt_length", "max_response_length")},
    "rollout.temperature": NATURAL,
    "rollout.max_imbalance": NATURAL,
    "rollout.top_p": Bound(0, 1, open_low=True),
    "rollout.top_k": NATURAL,
    "rollout.sglang.max_running_requests": COUNT,
    "rollout.sglang.kv_tokens": COUNT,
    "reshard.bucket_bytes": COUNT,
    "memory.device_bytes": COUNT,
    "memory.margin_bytes": NATURAL,
    "data.seed": NATURAL,
    "data.size": COUNT,
    **{f"evaluation.{k}": COUNT for k in ("every", "size", "n")},
    "evaluation.temperature": NATURAL,
    "evaluation.top_p": Bound(0, 1, open_low=True),
    "rewards.workers": COUNT,
    "rewards.timeout_s": POSITIVE,
    "rewards.batch_timeout_s": POSITIVE,
    "rewards.memory_mb": COUNT,
    "rewards.default": FINITE,
    "algorithm.clip_low": Bound(0, 1, open_low=True),
    "algorithm.clip_high": POSITIVE,
    "algorithm.dual_clip": Bound(1, open_low=True),
    "algorithm.aggregate_length": COUNT,
    "algorithm.entropy_coef": NATURAL,
    "algorithm.pass_k": COUNT,
    "algorithm.kl.coef": NATURAL,
    **{f"critic.parallel.{k}": COUNT for k in ("tp", "pp", "ep", "etp")},
    **{f"critic.{k}": NATURAL for k in ("lr", "min_lr", "lr_warmup_steps", "warmup_steps")},
    "critic.clip": POSITIVE,
    **{f"critic.{k}": Bound(0, 1) for k in ("gamma", "lam")},
    "preference.beta": POSITIVE,
    "preference.label_smoothing": Bound(0, 0.5, open_high=True),
    **{f"preference.{k}": NATURAL for k in ("target_margin", "desirable_weight", "undesirable_weight", "holdout")},
    "preference.holdout_every": COUNT,
    "teacher.discount": Bound(0, 1),
    "algorithm.kl.target": POSITIVE,
    "algorithm.kl.gain": Bound(0, 1, open_low=True),
    "algorithm.overlong.cache": COUNT,
    "algorithm.overlong.max_length": COUNT,
    "algorithm.overlong.factor": POSITIVE,
    "algorithm.covariance.fraction": Bound(0, 1, open_low=True),
    "algorithm.covariance.low": FINITE,
    "algorithm.covariance.high": FINITE,
    "algorithm.covariance.coef": POSITIVE,
    "algorithm.dynamic_sampling.max_generation_batches": NATURAL,
    "algorithm.dynamic_sampling.generation_prompts": COUNT,
    "algorithm.dynamic_sampling.tolerance": NATURAL,
    **{f"algorithm.correction.{k}": _WEIGHT for k in ("weight_low", "weight_high", "reject_low", "reject_high")},
    **{f"mismatch.{w}.{k}": POSITIVE for w in ("warn", "stop") for k in ("mean", "max", "kl")},
    **{f"mismatch.{w}.ess": Bound(0, 1, open_low=True) for w in ("warn", "stop")},
    "optimizer.lr": NATURAL,
    "optimizer.min_lr": NATURAL,
    "optimizer.warmup_steps": NATURAL,
    "optimizer.weight_decay": NATURAL,
    "optimizer.beta1": _UNIT,
    "optimizer.beta2": _UNIT,
    "optimizer.eps": POSITIVE,
    "optimizer.momentum": _UNIT,
    "optimizer.clip_grad": NATURAL,
    "warm_start.steps": NATURAL,
    "warm_start.batch_size": COUNT,
    "warm_start.lr": NATURAL,
    **{f"trainer.{k}": COUNT for k in ("nodes", "ranks_per_node", "steps", "prompts_per_step", "mini_batch_prompts")},
    "trainer.update_epochs": COUNT,
    **{f"trainer.{k}": COUNT for k in ("max_tokens_per_micro_batch", "micro_batch_size", "logprob_chunk")},
    "plan.mean_response_length": COUNT,
    "plan.search_results": COUNT,
    "trainer.seed": NATURAL,
    "trainer.max_nonfinite_steps": COUNT,
    "trainer.stall_timeout_s": POSITIVE,
    "trainer.rollout_records": NATURAL,
    **{f"checkpoint.{k}": COUNT for k in ("every", "keep_last", "keep_every", "hf_every")},
    **{f"checkpoint.{k}": NATURAL for k in ("retries", "retry_wait_s")},
    "checkpoint.grace_s": POSITIVE,
}
"""Every number of the schema."""

CHOICES: Mapping[str, Sequence[str]] = {
    "model.dtype": ("float32", "bfloat16"),
    "model.recompute": ("none", "selective", "full"),
    "model.parameter_layout": ("engine", "megatron"),
    "rollout.engine": ("transformers", "sglang"),
    "rollout.sglang.hosting": ("in_process", "subprocess"),
    "reshard.placement": ("identity", "auto"),
    "memory.parameters": ("keep", "offload", "single"),
    **{f"memory.{k}": ("auto", "host", "disk", "none") for k in ("optimizer", "reference", "critic")},
    "memory.gradients": ("release", "keep"),
    "memory.arena": ("host", "disk"),
    "data.source": ("jsonl", "parquet", "dataset", "reasoning_gym"),
    "data.overlong": ("drop", "error"),
    "rewards.pool": ("process", "ray"),
    "rewards.on_error": ("default", "mask"),
    "algorithm.name": ("grpo", "ppo", "distill", "sft", "preference", "reward_model"),
    "algorithm.normalize": ("sample_std", "population_std", "batch_std", "none"),
    "algorithm.old_log_probs": ("trainer", "engine"),
    "algorithm.dynamic_sampling.surplus": ("drop", "keep"),
    "algorithm.correction.weight": ("none", "token", "sequence", "geometric"),
    "algorithm.correction.reject": ("none", "token", "sequence", "geometric"),
    "algorithm.routing_replay": ("none", "r2", "r3"),
    "algorithm.aggregate": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    "algorithm.kl.where": ("none", "loss", "reward", "return"),
    "algorithm.kl.estimator": ("k1", "k2", "k3"),
    "preference.loss": ("dpo", "cdpo", "ipo", "simpo", "kto"),
    "preference.reference": ("precomputed", "on_the_fly"),
    "optimizer.name": ("adam", "sgd"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "checkpoint.best_mode": ("max", "min"),
    "checkpoint.load": ("all", "weights"),
    "plan.hardware": tuple(sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.export_dtype": ("source", "parameters", "float32", "bfloat16"),
}
"""Every name of the schema that is not an open registry's."""


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def value_problems(config: Config, names: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Numbers out of range and names that are not known; `names` adds the registered ones of further keys."""
    for key, bound in BOUNDS.items():
        value = get(config, key)
        if value is not None and value not in bound:
            finite = "" if isfinite(value) or bound is FINITE else " and finite"
            yield Problem((key,), f"{key}={value}: must be {bound}{finite}")
    for key, known in {**CHOICES, **names}.items():
        value = get(config, key)
        if value not in known:
            near = closest(value, known)
            advice = f"did you mean '{near}'? " if near else ""
            yield Problem((key,), f"{key}={value}: unknown; {advice}known: {', '.join(known)}")
    for i, judge in enumerate(config.rewards.judges):
        if judge.weight not in FINITE:
            yield Problem(
                (f"rewards.judges[{i}].weight",), f"rewards.judges[{i}].weight={judge.weight}: must be {FINITE}"
            )
