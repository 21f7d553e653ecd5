"""From hybridrl's options to SGLang's own arguments. Pure: it imports neither torch nor SGLang."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.config.suggest import hint
from hybridrl.models.spec import ModelSpec

HOSTINGS = ("in_process", "subprocess")

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

UNPUBLISHED = "unpublished"
"""SGLang's weight version before the first `publish`."""

CONTEXT_SLACK = 8
"""SGLang keeps a few positions to itself; it is told of so many more than the model has, and requests are cut by us."""
KV_SLACK = 64
"""The same for the tokens of the KV cache, page alignment included."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine is built from, whichever way it is hosted."""

    folder: Path
    """Hugging Face folder: `config.json` is read, weights are not."""
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    max_positions: int
    """Tokens of prompt and response together."""
    kv_tokens: int
    """Tokens that a replica's KV cache holds."""
    tp: int = 1
    ep: int = 1
    max_running_requests: int = 64
    routed_experts: bool = False
    tokenizer: Path | None = None
    """The folder whose tokenizer says what text tokens are, for requests with stop strings."""
    server_args: Mapping[str, Any] | None = None
    """Further fields of SGLang's ServerArgs."""
    ranks: tuple[int, ...] | None = None
    """World rank in each slot, replica by replica; None: in order. Only in process."""

    def __post_init__(self) -> None:
        found = [
            f"rollout.{key}={value} must be at least 1"
            for key, value in {
                "tp": self.tp,
                "ep": self.ep,
                "sglang.max_running_requests": self.max_running_requests,
                "sglang.kv_tokens": self.kv_tokens,
            }.items()
            if value < 1
        ]
        found += own_args_problems(self.server_args or {})
        if found:
            raise ValueError("; ".join(found))


def common_args(options: EngineOptions) -> dict[str, Any]:
    """ServerArgs for either hosting."""
    args: dict[str, Any] = {
        "model_path": str(options.folder),
        "tokenizer_path": str(options.folder),
        "dtype": options.dtype,
        "device": options.device,
        "tp_size": options.tp,
        "ep_size": options.ep,
        "max_running_requests": options.max_running_requests,
        "max_total_tokens": options.kv_tokens + KV_SLACK,
        "context_length": options.max_positions + CONTEXT_SLACK,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "enable_return_routed_experts": options.routed_experts,
        "grammar_backend": "none",
        "log_level": "error",
    }
    if options.device == "cpu":
        args |= {"attention_backend": "torch_native", "disable_custom_all_reduce": True}
    return {**args, **(options.server_args or {})}


def in_process_args(options: EngineOptions) -> dict[str, Any]:
    """ServerArgs for a scheduler hosted by the rank: steps are not overlapped, and addresses may move."""
    return common_args(options) | {
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "watchdog_timeout": 1e9,
    }


def subprocess_args(options: EngineOptions, first_gpu: int) -> dict[str, Any]:
    """ServerArgs for SGLang's own Engine on the devices from `first_gpu` on. Its KV memory moves as well."""
    return common_args(options) | {
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "base_gpu_id": first_gpu,
        "weight_version": UNPUBLISHED,
    }


def field_problems(server_args: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Names that the installed ServerArgs has not."""
    return [
        f"rollout.sglang.server_args.{name}: SGLang's ServerArgs has no such field; {_suggest(name, known)}"
        for name in server_args
        if name not in known
    ]


def _suggest(name: str, known: Collection[str]) -> str:
    suggestion = hint(name, known)
    return suggestion if suggestion.startswith("did") else "`python -m sglang.launch_server --help` lists them"


def own_args_problems(server_args: Mapping[str, Any]) -> list[str]:
    """Names that follow from elsewhere, where setting them again could only contradict."""
    return [
        f"rollout.sglang.server_args.{name}: decided by {OWN_ARGS[name]}; leave it out"
        for name in server_args
        if name in OWN_ARGS
    ]


def from_config(
    config: Config, folder: Path, spec: ModelSpec, device: str, tokenizer: Path | None = None
) -> EngineOptions:
    """The engine that a configuration asks for, over the model in `folder`. Raises ValueError with all `problems`."""
    if found := problems(config):
        raise ValueError("; ".join(found))
    rollout = config.rollout
    return EngineOptions(
        folder=folder,
        dtype=config.model.dtype,
        device=device,
        max_positions=spec.max_positions,
        kv_tokens=kv_tokens(config),
        tp=rollout.tp,
        ep=rollout.ep,
        max_running_requests=rollout.sglang.max_running_requests,
        routed_experts=rollout.routed_experts,
        tokenizer=tokenizer if rollout.stop else None,
        server_args=rollout.sglang.server_args,
    )


def kv_tokens(config: Config) -> int:
    """Tokens of a replica's KV cache: as configured, else room for the longest of all requests that run at once."""
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_response_length
    return rollout.sglang.kv_tokens or rollout.sglang.max_running_requests * longest


def kv_token_bytes(spec: ModelSpec, tp: int, item: int) -> int:
    """Bytes of one token in one rank's KV pool, where an element has `item`; heads that TP exceeds are on several."""
    if spec.mla is not None:
        return spec.num_layers * (spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim) * item
    return 2 * spec.num_layers * max(1, spec.num_kv_heads // tp) * spec.head_dim * item


def problems(config: Config) -> list[str]:
    """What is wrong with `rollout.sglang`, and with `rollout` for this engine; empty for other engines."""
    rollout, sglang = config.rollout, config.rollout.sglang
    if rollout.engine != "sglang":
        return []
    found = own_args_problems(sglang.server_args)
    if sglang.hosting not in HOSTINGS:
        found.append(f"rollout.sglang.hosting={sglang.hosting!r}: {hint(sglang.hosting, HOSTINGS)}")
    if config.reshard.placement == "auto" and sglang.hosting == "subprocess":
        found.append(
            "reshard.placement=auto: rollout.sglang.hosting=subprocess starts a replica on consecutive devices; set "
            "reshard.placement=identity, or host in process"
        )
    if rollout.dp > 1:
        found.append(
            f"rollout.dp={rollout.dp}: data-parallel attention steps all its ranks in lockstep, which replicas here do "
            "not; set rollout.dp=1 and let replicas (world / rollout.tp) share the requests"
        )
    longest = rollout.max_prompt_length + rollout.max_response_length
    if sglang.kv_tokens is not None and sglang.kv_tokens < longest:
        found.append(
            f"rollout.sglang.kv_tokens={sglang.kv_tokens} does not hold one request of rollout.max_prompt_length="
            f"{rollout.max_prompt_length} and rollout.max_response_length={rollout.max_response_length}; set at least "
            f"{longest}"
        )
    if sglang.max_running_requests < 1:
        found.append(f"rollout.sglang.max_running_requests={sglang.max_running_requests} must be at least 1")
    return found
