"""SGLang's process groups inside the trainer's world: one set a replica, made by all ranks together.

SGLang takes an existing world if it is exactly one replica (world = TP). Here ranks [0, tp), [tp, 2·tp), … are
replicas: SGLang's own WORLD becomes the replica's ranks, and its function that makes the groups, which already loops
over the world in steps of TP, is let past its check of the two sizes. Where ranks are placed otherwise, what it takes
for ranks are slots, and each group it makes is of the ranks in these slots, in their order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.replaced import replaced

_COMMUNICATORS = (
    "use_pynccl",
    "use_mscclpp",
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
    "use_hpu_communicator",
    "use_xpu_communicator",
)


class _ManyReplicas(int):
    """A world size that SGLang's check of `world == tp · pp` takes for equal; in all else the number it is."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


@contextmanager
def adopted_world(tp: int, ranks: Sequence[int]) -> Iterator[None]:
    """While this lasts, a Scheduler that is built makes its groups of replicas of `tp` ranks in the present world.

    `ranks` has the world rank in each slot: slots [0, tp), [tp, 2·tp), … are replicas, and a rank's place in its groups
    is its slot's. Every rank of the world must build one at the same time. `torch.distributed` must be initialised.
    """

    def placed(slots: list[list[int]]) -> list[list[int]]:
        return [[ranks[slot] for slot in group] for group in slots]

    def init_groups(*, backend: str, dist_init_method: str, server_args: Any, gpu_id: int) -> None:
        world = dist.get_world_size()
        sg.parallel_state._WORLD = sg.parallel_state.GroupCoordinator(
            group_ranks=placed([list(range(first, first + tp)) for first in range(0, world, tp)]),
            local_rank=gpu_id,
            torch_distributed_backend=backend,
            group_name="world",
            **dict.fromkeys(_COMMUNICATORS, False),
        )
        sg.get_parallel().override_permanently(world_group=sg.parallel_state._WORLD)
        size = dist.get_world_size

        def world_size(group: dist.ProcessGroup | None = None) -> int:
            return size(group) if group is not None else _ManyReplicas(world)

        make = sg.parallel_state.init_model_parallel_group

        def make_placed(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            return make(placed(group_ranks), *args, **kwargs)

        with (
            replaced(dist, get_world_size=world_size),
            replaced(sg.parallel_state, init_model_parallel_group=make_placed),
        ):
            sg.parallel_state.initialize_model_parallel()
        sg.parallel_state._tag_groups_for_flashinfer_allreduce_only()
        sg.bootstrap.initialize_dp_attention(server_args=server_args)

    broadcast = sg.tp_worker_module.broadcast_pyobj

    def broadcast_global(data: Any, rank: int, *args: Any, **kwargs: Any) -> Any:
        # SGLang names the caller by its rank in the replica and the source by its rank in the world
        return broadcast(data, dist.get_rank(), *args, **kwargs)

    with (
        replaced(dist, new_group=partial(dist.new_group, sort_ranks=False)),
        replaced(sg.bootstrap, _init_parallel_groups=init_groups),
        replaced(sg.tp_worker_module, broadcast_pyobj=broadcast_global),
    ):
        yield


def leave_world() -> None:
    """Destroys SGLang's groups and lets another Scheduler be built in this process. All ranks call it together.

    The trainer's groups are left as they are (SGLang's own shutdown would abort them).
    """
    state = sg.parallel_state
    state.destroy_model_parallel()
    for name in ("_SELF_PP", "_WORLD"):
        group = getattr(state, name)
        if group is not None:
            group.destroy()
        setattr(state, name, None)
    sg.reset_context()
