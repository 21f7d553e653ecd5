"""Everything of SGLang that hybridrl relies on, by name. No other module of hybridrl imports it.

Importing this module checks the release and imports SGLang, which takes about ten seconds. The scheduler is driven by
the rank that hosts it instead of by SGLang's process, so some of these names are internal to SGLang: its loop body, its
process groups, its sampler. `missing` compares them with the installed code; a test compares the sources of those
functions that are restated here.
"""
# ruff: noqa: E402 - the release is checked, and a CPU prepared, before SGLang is imported

import hashlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from hybridrl.rollout.sglang import cpu
from hybridrl.rollout.sglang.versions import UnsupportedSGLangError, require_supported

VERSION = require_supported()
ON_CPU = cpu.enable()

logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)  # it lists models whose kernels are absent

from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe import fused_moe_native as native_moe_module
from sglang.srt.layers.rotary_embedding import factory as rotary_factory
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers import tp_worker as tp_worker_module
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_MATCHED_TOKEN
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor import model_runner as model_runner_module
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, _dispatch_mla_subtype
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.state_capturer.routed_experts import destroy_global_experts_capturer, get_global_experts_capturer
from sglang.srt.utils import DynamicGradMode

dispatch_absorbed = _dispatch_mla_subtype
"""SGLang's choice among the ways to compute latent attention absorbed."""

__all__ = [
    "FINISH_ABORT",
    "FINISH_MATCHED_TOKEN",
    "ON_CPU",
    "SERVER_ARGS",
    "VERSION",
    "AbortReq",
    "AttentionBackendRegistry",
    "ContinueGenerationReqInput",
    "DeepseekV2AttentionMLA",
    "DynamicGradMode",
    "LogitsProcessorOutput",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PauseGenerationReqInput",
    "PortArgs",
    "Sampler",
    "SamplingParams",
    "Scheduler",
    "SchedulerBatchResultProcessor",
    "SchedulerIpcChannels",
    "ServerArgs",
    "SpawnRanks",
    "TokenizedGenerateReqInput",
    "TorchNativeAttnBackend",
    "bootstrap",
    "check",
    "destroy_global_experts_capturer",
    "digest",
    "dispatch_absorbed",
    "engine_class",
    "get_global_experts_capturer",
    "get_parallel",
    "missing",
    "model_runner_module",
    "native_moe_module",
    "parallel_state",
    "publish",
    "reset_context",
    "rotary_factory",
    "scheduler_module",
    "tp_worker_module",
]

SERVER_ARGS = frozenset(inspect.signature(ServerArgs).parameters)
"""Names of the fields of ServerArgs."""

ATTRIBUTES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        Scheduler,
        (
            "init_ipc_channels",
            "init_soft_watchdog",
            "process_input_requests",
            "get_next_batch_to_run",
            "run_batch",
            "process_batch_result",
            "on_idle",
            "is_fully_idle",
            "flush_cache",
            "pause_generation",
            "continue_generation",
            "abort_request",
        ),
    ),
    (bootstrap, ("_init_parallel_groups", "_bind_threads_if_cpu", "initialize_dp_attention")),
    (parallel_state.GroupCoordinator, ("reduce_scatterv", "_deterministic_reduce_scatterv")),
    (
        parallel_state,
        (
            "_WORLD",
            "_SELF_PP",
            "GroupCoordinator",
            "initialize_model_parallel",
            "destroy_model_parallel",
            "_tag_groups_for_flashinfer_allreduce_only",
        ),
    ),
    (SchedulerBatchResultProcessor, ("_maybe_collect_routed_experts",)),
    (scheduler_module, ("create_scheduler_watchdog",)),
    (tp_worker_module, ("broadcast_pyobj",)),
    (native_moe_module, ("moe_forward_native",)),
    (model_runner_module, ("adjust_config_with_unaligned_cpu_tp",)),
    (Sampler, ("forward", "_preprocess_logits")),
    (MHATokenToKVPool, ("_init_data_ptrs_and_strides",)),
    (AttentionBackendRegistry, ("register",)),
    (rotary_factory, ("get_rope", "get_rope_cpu")),
)
"""Attributes that are called, overridden or replaced."""

PARAMETERS: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (bootstrap._init_parallel_groups, ("backend", "dist_init_method", "server_args", "gpu_id")),
    (Sampler.forward, ("self", "logits_output", "sampling_info", "return_logprob")),
    (tp_worker_module.broadcast_pyobj, ("data", "rank", "dist_group", "src")),
    (Scheduler.get_next_batch_to_run, ("self", "running_batch", "last_batch")),
    (dispatch_absorbed, ("attn", "forward_batch")),
    (
        rotary_factory.get_rope_cpu,
        (
            "head_size",
            "rotary_dim",
            "max_position",
            "base",
            "is_neox_style",
            "rope_scaling",
            "dtype",
            "partial_rotary_factor",
            "device",
        ),
    ),
)
"""The first parameters of functions that are replaced, or called with these."""


def missing() -> list[str]:
    """What of the above the installed SGLang has not, each in words; empty if it is as expected."""
    found = [
        f"{getattr(owner, '__name__', owner)} has no {name}"
        for owner, names in ATTRIBUTES
        for name in names
        if not hasattr(owner, name)
    ]
    for function, expected in PARAMETERS:
        parameters = tuple(inspect.signature(function).parameters)
        if parameters[: len(expected)] != expected:
            found.append(f"{function.__qualname__} takes {parameters}, expected {expected} first")
    return found


def engine_class() -> type:
    """SGLang's own Engine, which is imported only where it is asked for."""
    from sglang.srt.entrypoints.engine import Engine

    return Engine


def check() -> None:
    """Raises UnsupportedSGLangError that lists what the installed SGLang lacks."""
    found = missing()
    if found:
        raise UnsupportedSGLangError(f"SGLang {VERSION} is not as published: {'; '.join(found)}")


def digest(function: Callable[..., Any]) -> str:
    """The first 16 hex digits of the SHA-256 of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
