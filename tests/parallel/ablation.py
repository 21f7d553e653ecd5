"""Small Megatron jobs, each run in forked processes with all patches and again with one left out.

`python -m tests.parallel.ablation NAME ...` prints a JSON object: for each patch the last line of the error with all
patches (null: none) and without that one. Forking after the imports makes a job cost a second, not a start.
"""

import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.config.schema import Config, ModelConfig, ParallelConfig
from hybridrl.models.megatron.build import build_model, forward
from hybridrl.models.spec import MlaSpec, ModelSpec, MoeSpec
from hybridrl.parallel import compat
from hybridrl.parallel.groups import initialize
from hybridrl.parallel.sizes import ParallelSizes

LIMIT_S = 100.0


def _spec(moe: bool, tied: bool = False) -> ModelSpec:
    experts = MoeSpec(num_experts=4, top_k=1, ffn_size=16, norm_topk_prob=False, layers=(True, True))
    return ModelSpec(
        family="qwen3_moe" if moe else "qwen3",
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=16,
        vocab_size=16,
        tied=tied,
        norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=16,
        qk_norm=True,
        moe=experts if moe else None,
    )


def _build(moe: bool = False, tied: bool = False, dtype: str = "float32", **parallel: int) -> list[Any]:
    sizes = {name: size for name, size in parallel.items() if name != "vpp"}
    initialize(ParallelSizes(world=dist.get_world_size(), **sizes))
    config = Config(model=ModelConfig(dtype=dtype, vocab_multiple=1), parallel=ParallelConfig(**parallel))
    chunks = build_model(_spec(moe, tied), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in chunks[0].parameters():
            weight.normal_()  # so that ranks send unequal numbers of tokens to the experts
    return chunks


def _train(distributed_optimizer: bool = False, dtype: str = "float32", **build: Any) -> Any:
    """One optimizer step; returns the optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    (model,) = _build(dtype=dtype, **build)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        clip_grad=1e-6,
        bf16=dtype == "bfloat16",
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss

    def step(data: Any, chunk: Any) -> Any:
        def loss(output: torch.Tensor) -> Any:
            return output.float().square().sum() + output.float().sum(), torch.tensor(1, dtype=torch.int), {}

        return forward(chunk, torch.arange(8)[None]), loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=None,
        model=[ddp],
        num_microbatches=2,
        seq_length=8,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    return optimizer


def _seed() -> None:
    initialize(ParallelSizes(world=1))


def _latent_attention() -> None:
    mla = MlaSpec(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    initialize(ParallelSizes(world=1))
    build_model(dataclasses.replace(_spec(moe=False), mla=mla, qk_norm=False), Config())


def _gate() -> None:
    """The router's product alone."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    router_gating_linear(torch.ones(2, 4), torch.ones(3, 4), None, torch.float32)


def _set_states_without_step() -> None:
    optimizer = _train(distributed_optimizer=True).chained_optimizers[0]
    parameter = next(iter(optimizer.model_param_group_index_map))
    states = dict(optimizer._get_main_param_and_optimizer_states(parameter))
    states.pop("step")
    with torch.no_grad():
        optimizer._set_main_param_and_optimizer_states(parameter, states)


def _load_own_steps() -> None:
    optimizer = _train(distributed_optimizer=True).chained_optimizers[0]
    optimizer.load_state_dict(optimizer.state_dict())
    steps = {id(state["step"]) for state in optimizer.optimizer.state.values()}
    if len(steps) != len(optimizer.optimizer.state):
        raise ValueError(f"{len(optimizer.optimizer.state)} parameters share {len(steps)} step tensors")


JOBS: dict[str, tuple[str, int, Callable[[], Any], str]] = {
    "current_device": ("current_device", 1, _build, "not compiled with CUDA"),
    "rng_tracker": ("rng_tracker", 1, _seed, "CUDA"),
    "device_literals": ("device_literals", 1, _train, "not compiled with CUDA"),
    "types_clip_grads": ("types_clip_grads", 1, _train, "AssertionError"),
    "types_distributed_optimizer": (
        "types_distributed_optimizer",
        1,
        lambda: _train(distributed_optimizer=True),
        "must be one of torch.cuda.FloatTensor",
    ),
    "types_mixed_precision_optimizer": (
        "types_mixed_precision_optimizer",
        1,
        lambda: _train(dtype="bfloat16"),
        "must be one of torch.cuda.FloatTensor",
    ),
    "dispatcher_stream": ("dispatcher_stream", 1, lambda: _build(moe=True), "CUDA"),
    "router_without_te": ("router_without_te", 1, _gate, "te_general_gemm"),
    "latent_attention_without_te": ("latent_attention_without_te", 1, _latent_attention, "isinstance() arg 2"),
    "torch_adam_checkpoints, states": ("torch_adam_checkpoints", 1, _set_states_without_step, "step"),
    "torch_adam_checkpoints, steps": ("torch_adam_checkpoints", 1, _load_own_steps, "share 1 step tensors"),
    "tensor_cuda": ("tensor_cuda", 2, lambda: _build(tied=True, pp=2), "not compiled with CUDA"),
    "synchronize": ("synchronize", 2, lambda: _train(pp=2), "not compiled with CUDA"),
    "uneven_collectives": ("uneven_collectives", 4, lambda: _train(moe=True, tp=2, ep=2, etp=2), "invalid tensor size"),
}
"""By name: the patch, the ranks, the job, and a part of the error that it ends with where the patch is missing."""


def _rank(job: Callable[[], Any], skip: str | None, rank: int, world: int, store: str, pipe: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        compat.install(skip=[skip] if skip else [])
        installed = compat.install
        compat.install = lambda: None  # type: ignore[assignment, misc]  # initialize() must not make up for it
        try:
            job()
        finally:
            compat.install = installed  # type: ignore[assignment]
        pipe.send(None)
    except BaseException as error:  # noqa: BLE001 - it is what the job is run for
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def run(job: Callable[[], Any], world: int, skip: str | None) -> str | None:
    """The first rank's error, None if all ranks went through."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(job, skip, rank, world, f"{folder}/store", theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _first_error(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _first_error(pipes: list[Connection]) -> str | None:
    left = list(pipes)
    while left:
        ready = wait(left, LIMIT_S)
        if not ready:
            return "no answer in time"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                error = pipe.recv()
            except EOFError:
                return "the process died"
            if error is not None:
                return str(error)
            left.remove(pipe)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(JOBS)
    print(json.dumps({n: [run(JOBS[n][2], JOBS[n][1], skip) for skip in (None, JOBS[n][0])] for n in names}))
