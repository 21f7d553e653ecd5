"""A run on a Ray cluster: `python -m hybridrl.launch.ray recipe=grpo_tiny_moe`.

One placement group holds the recipe's nodes, a bundle each; one worker a rank starts the rank as a process with
torchrun's environment. What ranks print is brought here. When one fails, all are ended, and the error that came first
is printed last. SIGTERM and Ctrl-C are passed on to the ranks, which save and end. The cluster is the one of
RAY_ADDRESS or `--address`; `--address local` starts one on this machine.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.config.compose import compose
from hybridrl.config.load import ConfigError
from hybridrl.config.schema import Config
from hybridrl.launch.rank import End, Rank, environment, first_failure, free_port

TRAIN = "hybridrl.train"
PLACEMENT_S = 600.0
"""The cluster has the nodes free within this time, or the launch ends."""
GRACE_S = 5.0
"""After the first failure, the others' errors are awaited this long: one of them may be the earlier."""


class Worker:
    """Hosts one rank."""

    def __init__(self) -> None:
        self._rank: Rank | None = None

    def meet(self) -> tuple[str, int]:
        """An address of this node and a free port on it, for the ranks' rendezvous."""
        return ray.util.get_node_ip_address(), free_port()

    def run(self, module: str, arguments: list[str], env: dict[str, str], folder: str) -> End:
        """Runs the rank to its end, and passes on what it prints."""
        self._rank = Rank(module, arguments, env, folder)
        for line in self._rank.output:
            print(f"[rank {env['RANK']}] {line}" if env["RANK"] != "0" else line, end="", flush=True)
        return self._rank.wait()

    def ask_to_end(self) -> None:
        """Asks the rank to save and end."""
        if self._rank is not None:
            self._rank.ask_to_end()

    def stop(self) -> None:
        """Ends the rank at once."""
        if self._rank is not None:
            self._rank.kill()


def launch(
    config: Config, arguments: Sequence[str], *, module: str = TRAIN, told: threading.Event | None = None
) -> list[End]:
    """Runs `module` with these arguments on all ranks of the configuration; the ends of those that ended by themselves.

    Once `told` is set the ranks are asked to save and end. Needs an initialised Ray. Raises RuntimeError where the
    cluster does not have the resources in time.
    """
    trainer = config.trainer
    gpus = 0 if trainer.device == "cpu" or (trainer.device == "auto" and not _cluster_has_gpus()) else 1
    group = _place(trainer.nodes, trainer.ranks_per_node, gpus)
    workers = []
    try:
        workers = [_worker(group, node, gpus) for node in range(trainer.nodes) for _ in range(trainer.ranks_per_node)]
        address, port = ray.get(workers[0].meet.remote())
        world = len(workers)
        runs = [
            worker.run.remote(
                module,
                list(arguments),
                environment(
                    rank=rank,
                    local_rank=rank % trainer.ranks_per_node,
                    world=world,
                    local_world=trainer.ranks_per_node,
                    address=address,
                    port=port,
                )
                | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
                os.getcwd(),
            )
            for rank, worker in enumerate(workers)
        ]
        return _await(runs, workers, told)
    finally:
        for worker in workers:
            ray.kill(worker)
        remove_placement_group(group)


def _cluster_has_gpus() -> bool:
    return bool(ray.cluster_resources().get("GPU"))


def _place(nodes: int, ranks: int, gpus: int) -> PlacementGroup:
    """One bundle a node, on nodes of their own."""
    bundle = {"CPU": float(ranks)} | ({"GPU": float(ranks)} if gpus else {})
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "STRICT_PACK")
    if not group.wait(PLACEMENT_S):
        there = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        remove_placement_group(group)
        raise RuntimeError(
            f"the Ray cluster did not free {nodes} nodes with {bundle} each within {PLACEMENT_S:g} s; in all it has "
            f"{there} on {len(ray.nodes())} nodes"
        )
    return group


def _worker(group: PlacementGroup, node: int, gpus: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node)
    # All of a node's devices stay visible, and LOCAL_RANK chooses, as under torchrun.
    runtime = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy, "runtime_env": runtime}
    return ray.remote(Worker).options(max_concurrency=2, **options).remote()  # `stop` and `run` at once


def _await(runs: list[Any], workers: list[Any], told: threading.Event | None) -> list[End]:
    """The ends of all ranks, or of those up to the first failure and its grace."""
    ends: list[End] = []
    left, deadline = list(runs), float("inf")
    while left and time.monotonic() < deadline:
        if told is not None and told.is_set():
            told = None  # once: the ranks end by themselves, within checkpoint.grace_s
            ray.wait([worker.ask_to_end.remote() for worker in workers], num_returns=len(workers), timeout=GRACE_S)
        done, left = ray.wait(left, timeout=1.0)
        ends += [_end(reference, runs.index(reference)) for reference in done]
        if any(end.failed for end in ends):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if left:
        ray.wait([worker.stop.remote() for worker in workers], num_returns=len(workers), timeout=GRACE_S)
    return ends


def _end(reference: Any, rank: int) -> End:
    try:
        end: End = ray.get(reference)
    except ray.exceptions.RayError as error:  # the worker or its node is gone
        return End(rank, 1, f"the worker of rank {rank} was lost: {error}", time.time())
    return end


def _told_to_end() -> threading.Event:
    """Is set by SIGTERM, and by the first Ctrl-C: a second one ends the launcher, and the ranks with it."""
    told = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        told.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status of the first rank that failed, or 0."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.launch.ray", description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of the cluster; default RAY_ADDRESS, else the cluster that runs here")
    parser.add_argument("--config-dir", help="folder with recipes of your own (DIR/recipe/NAME.yaml), on every node")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for hybridrl.train")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = compose(options.overrides, options.config_dir)
    except ConfigError as error:
        print(f"hybridrl: the configuration has mistakes\n{error}", file=sys.stderr)
        return 2
    ray.init(address=options.address or "auto", log_to_driver=True, logging_level="warning")
    own = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    told = _told_to_end()
    try:
        ends = launch(config, [*own, *options.overrides], told=told)
    except RuntimeError as error:
        print(f"hybridrl: {error}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    if not any(end.failed for end in ends):
        return 0
    first = first_failure(ends)
    if told.is_set() and not first.error:
        print("\nhybridrl: ended as it was told to", file=sys.stderr, flush=True)
    else:
        why = first.error or "it left no error; see its output above"
        print(
            f"\nhybridrl: rank {first.rank} failed first (exit status {first.code}):\n{why}",
            file=sys.stderr,
            flush=True,
        )
    return first.code if first.code > 0 else 128 - first.code


if __name__ == "__main__":
    sys.exit(main())
