"""The SGLang engine: what its hosting can do, and arguments of its own that follow from elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.schema import Config

OWN_ARGS: Mapping[str, str] = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "dtype": "model.dtype",
    "device": "trainer.device",
    "tp_size": "rollout.tp",
    "dp_size": "rollout.dp",
    "ep_size": "rollout.ep",
    "max_running_requests": "rollout.sglang.max_running_requests",
    "max_total_tokens": "rollout.sglang.kv_tokens",
    "enable_return_routed_experts": "rollout.routed_experts",
    "context_length": "the model's own context",
    "load_format": "the weight sync",
    "weight_version": "the weight sync",
    "random_seed": "trainer.seed (each request has a seed of its own)",
    "sampling_backend": "hybridrl's sampler, which draws by each request's seed",
    "skip_tokenizer_init": "hybridrl, which passes token ids",
    "disable_overlap_schedule": "the hosting",
    "disable_cuda_graph": "the hosting",
    "watchdog_timeout": "the hosting",
    "enable_memory_saver": "the hosting, which frees memory in sleep by itself",
    "enable_weights_cpu_backup": "the weight sync",
    "enable_dp_attention": "rollout.dp",
    "disaggregation_mode": "nothing: a replica both prefills and decodes",
    "nnodes": "the launcher",
    "node_rank": "the launcher",
    "dist_init_addr": "the launcher",
    "base_gpu_id": "the ranks of the replica",
    "pp_size": "nothing: the engine's layout has no pipeline stages",
}
"""Arguments that follow from elsewhere: name → what decides it."""


def sglang_problems(config: Config) -> Iterator[str]:
    """Mistakes in `rollout.sglang`, and in `rollout` for this engine."""
    rollout, sglang = config.rollout, config.rollout.sglang
    yield from own_args_problems(sglang.server_args)
    if config.reshard.placement == "auto" and sglang.hosting == "subprocess":
        yield (
            "reshard.placement=auto: rollout.sglang.hosting=subprocess starts a replica on consecutive devices; set "
            "reshard.placement=identity, or host in process"
        )
    if rollout.dp > 1 and sglang.hosting == "subprocess":
        yield (
            f"rollout.dp={rollout.dp}: rollout.sglang.hosting=subprocess has no data-parallel attention; host in "
            "process, or set rollout.dp=1"
        )
    if rollout.dp > sglang.max_running_requests:
        yield (
            f"rollout.sglang.max_running_requests={sglang.max_running_requests} leaves none to some of rollout.dp="
            f"{rollout.dp}, which share them: set it to {rollout.dp} at least"
        )
    longest = rollout.max_prompt_length + rollout.max_response_length
    if sglang.kv_tokens is not None and sglang.kv_tokens < longest:
        yield (
            f"rollout.sglang.kv_tokens={sglang.kv_tokens} cannot hold a sample of rollout.max_prompt_length="
            f"{rollout.max_prompt_length} + rollout.max_response_length={rollout.max_response_length} = {longest}"
        )


def own_args_problems(server_args: Mapping[str, Any]) -> list[str]:
    """Names that follow from elsewhere, where setting them again could only contradict."""
    return [
        f"rollout.sglang.server_args.{name}: decided by {OWN_ARGS[name]}; leave it out"
        for name in server_args
        if name in OWN_ARGS
    ]
