"""From hybridrl's options to SGLang's own arguments. Pure: it imports neither torch nor SGLang."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.config.suggest import hint
from hybridrl.config.validate.sglang import own_args_problems
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import ITEM_BYTES
from hybridrl.rollout.sglang.settings import completed
from hybridrl.rollout.sglang.versions import UnsupportedSGLangError, require_supported, server_arg_names

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
    """Tokens that the KV cache of a replica holds; of each group of ranks with attention of its own, if `dp` > 1."""
    tp: int = 1
    dp: int = 1
    """Groups among the `tp` ranks with attention, and requests, of their own (SGLang's `dp_size`)."""
    ep: int = 1
    max_running_requests: int = 64
    """Of the `tp` ranks together."""
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
                "dp": self.dp,
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
        "dp_size": options.dp,
        "enable_dp_attention": options.dp > 1,
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
    own = options.server_args or {}
    return {**args, **own, **completed(options.folder, own)}


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


def installed_problems(server_args: Mapping[str, Any]) -> list[str]:
    """What the installed SGLang has against running with these arguments: its release, or names that it has not."""
    try:
        require_supported()
    except UnsupportedSGLangError as error:
        return [f"rollout.engine=sglang: {error}"]
    return field_problems(server_args, server_arg_names())


def from_config(
    config: Config, folder: Path, spec: ModelSpec, device: str, tokenizer: Path | None = None
) -> EngineOptions:
    """The engine that a configuration asks for, over the model in `folder`; `validate` has found it possible."""
    rollout = config.rollout
    return EngineOptions(
        folder=folder,
        dtype=config.model.dtype,
        device=device,
        max_positions=spec.max_positions,
        kv_tokens=kv_tokens(config),
        tp=rollout.tp,
        dp=rollout.dp,
        ep=rollout.ep,
        max_running_requests=rollout.sglang.max_running_requests,
        routed_experts=rollout.routed_experts,
        tokenizer=tokenizer if rollout.stop else None,
        server_args=rollout.sglang.server_args,
    )


def kv_tokens(config: Config) -> int:
    """Tokens of a KV cache: as configured, else room for the longest of all requests that run at once over it."""
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_response_length
    return rollout.sglang.kv_tokens or -(-rollout.sglang.max_running_requests // rollout.dp) * longest


def kv_token_bytes(spec: ModelSpec, tp: int, item: int) -> int:
    """Bytes of one token in one rank's KV pool, where an element has `item`; `tp` ranks share a request's attention.

    Heads that these exceed are on several; latents are on all.
    """
    if spec.mla is not None:
        return spec.num_layers * (spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim) * item
    return 2 * spec.num_layers * max(1, spec.num_kv_heads // tp) * spec.head_dim * item


def with_room(options: EngineOptions, spec: ModelSpec, room: int, longest: int) -> EngineOptions:
    """The options with no more KV tokens than fit into `room` bytes of a rank.

    Raises ValueError where not even one request of `longest` tokens fits.
    """
    each = kv_token_bytes(spec, options.tp // options.dp, ITEM_BYTES[options.dtype])
    tokens = min(options.kv_tokens, room // each - KV_SLACK)
    if tokens < longest:
        raise ValueError(
            f"a rollout leaves {room} bytes of the device for the KV cache, a request of {longest} tokens needs "
            f"{(longest + KV_SLACK) * each} ({each} a token): offload more (memory.optimizer, memory.parameters), "
            "lower memory.margin_bytes, or cut the model over more ranks (rollout.tp)"
        )
    return replace(options, kv_tokens=tokens)
