"""The phase switch as a machine of states: its order, what it refuses, and what an exception leaves."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.memory.arena import Arena
from hybridrl.memory.lane import Pair, make_lane
from hybridrl.memory.ledger import Ledger
from hybridrl.memory.parcel import Parcel, planned_bytes
from hybridrl.memory.phases import HybridEngine, Phase, PhaseError
from hybridrl.memory.residence import Gradients, ModelResidence, OptimizerState
from hybridrl.memory.weights import KeptWeights, OffloadedWeights, parcel_bytes, unshared

CPU = torch.device("cpu")


class Engine:
    """Notes what is called; its weights and cache are tensors that sleep frees."""

    def __init__(self, log: list[str], weights: int, cache: int) -> None:
        self.log = log
        self.weights, self._cache = torch.zeros(weights), cache
        self._nbytes = self.weights.nbytes
        self._awake = True

    @property
    def cache_bytes(self) -> int:
        return self._cache if self._awake else 0

    def abort(self, which: Any = None) -> list[Any]:
        self.log.append("abort")
        return []

    def sleep(self) -> None:
        self.log.append("sleep")
        self.weights.untyped_storage().resize_(0)
        self._awake = False

    def wake_weights(self) -> None:
        self.log.append("wake weights")
        self.weights.untyped_storage().resize_(self._nbytes)

    def wake_cache(self) -> None:
        self.log.append("wake cache")
        self._awake = True

    def publish(self, version: int) -> None:
        self.log.append(f"publish {version}")


class Adam:
    """The parts of Megatron's optimizer that memory looks at, over one master weight."""

    def __init__(self, master: Tensor) -> None:
        self.is_stub_optimizer = False
        self.optimizer = self
        self.param_groups = [{"params": [master]}]
        moments = {"exp_avg": master * 2, "exp_avg_sq": master * 3, "step": torch.tensor(7.0)}
        self.state: dict[Tensor, dict[str, Tensor]] = {master: moments}
        self._hooks: list[Callable[..., None]] = []

    def register_step_pre_hook(self, hook: Callable[..., None]) -> None:
        self._hooks.append(hook)

    def step(self) -> None:
        for hook in self._hooks:
            hook(self, (), {})


class Chunk:
    """The parts of Megatron's DistributedDataParallel that memory looks at."""

    def __init__(self, size: int) -> None:
        self.grad_data = torch.zeros(size)
        self.buffers, self.expert_parallel_buffers = [self], []


class World:
    """One trainer and one engine, by sizes in elements."""

    def __init__(self, *, parameters: int = 1000, engine: int = 800, cache: int = 2000, offload: bool = False) -> None:
        self.log: list[str] = []
        self.parameter = torch.arange(float(parameters)).bfloat16()
        self.optimizer = Adam(torch.arange(float(parameters)))
        self.chunk = Chunk(parameters)
        self.engine = Engine(self.log, engine, cache)
        state = OptimizerState(self.optimizer, lambda: [self.parameter])
        gradients = Gradients([self.chunk], self.optimizer)
        self.ledger = Ledger(CPU)
        self.ledger.own("parameters", lambda: [self.parameter])
        self.ledger.own("gradients", gradients.tensors)
        self.ledger.own("optimizer", lambda: [t for group in state.groups() for t in group])
        self.ledger.own("engine weights", lambda: [self.engine.weights])
        self.ledger.own("KV cache", lambda: self.engine.cache_bytes)
        self.lane, self.arena = make_lane(CPU), Arena(1 << 16)
        planned = state.planned_bytes(2)
        self.parcel = Parcel("optimizer", self.arena.section("optimizer", planned), self.lane, join=True, verify=True)
        weights: Any = KeptWeights(self.sync)
        if offload:
            leaving = unshared([self.parameter], [self.engine.weights])
            section = self.arena.section("parameters", parcel_bytes(leaving))
            weights = OffloadedWeights(self.sync, Parcel("parameters", section, self.lane, join=False), leaving)
        self.hybrid = HybridEngine(self.engine, weights, self.ledger, barrier=lambda: self.log.append("barrier"))
        self.residence = self.hybrid.attach("policy", state, gradients, self.parcel, prefetch=True)

    def sync(self, version: int) -> dict[str, float]:
        assert self.parameter.equal(torch.arange(float(self.parameter.numel())).bfloat16())
        self.log.append(f"sync {version}")
        return {"sync/received_bytes": 5.0}

    def update(self) -> None:
        self.residence.before_forward()
        self.residence.before_gradients()
        self.chunk.grad_data += 1
        self.residence.before_step()
        self.optimizer.step()
        (master,) = self.optimizer.state
        moments = self.optimizer.state[master]
        assert master.equal(torch.arange(float(master.numel())))
        assert moments["exp_avg"].equal(master * 2)
        assert moments["exp_avg_sq"].equal(master * 3)
        master.grad = self.chunk.grad_data.clone()

    def bytes_of(self, *owners: str) -> int:
        counted = self.ledger.count()
        return sum(counted[owner] for owner in owners)


def test_the_order_of_a_switch() -> None:
    world = World()
    assert world.log == ["sleep"]
    with world.hybrid.training_phase():
        world.update()
    world.log.clear()
    with world.hybrid.rollout_phase(3) as moved:
        assert moved == {"sync/received_bytes": 5.0}
        assert world.log == ["wake weights", "sync 3", "barrier", "wake cache", "publish 3"]
        assert world.bytes_of("gradients", "optimizer") == 0
        world.hybrid.end_rollout()
        world.hybrid.end_rollout()
        assert world.log[-1:] == ["sleep"]
    assert world.log.count("sleep") == 1
    with world.hybrid.training_phase():
        world.update()
    assert world.bytes_of("optimizer") >= 3 * 4000
    with world.hybrid.rollout_phase(4):
        pass
    assert world.log[-1] == "sleep"


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("engine", [100, 3500, 40_000])
def test_at_most_what_training_or_the_rollout_holds_is_there(engine: int, offload: bool) -> None:
    world = World(engine=engine, cache=3000, offload=offload)
    with world.hybrid.training_phase():
        world.update()
    world.ledger.take()
    for version in range(3):
        with world.hybrid.rollout_phase(version):
            pass
        with world.hybrid.training_phase():
            world.update()
        trained, woken, synced, rollout, generated, asleep = world.ledger.take()
        both = max(trained.total, rollout.total) + world.parameter.nbytes * offload  # the copy that the sync reads
        assert max(e.total for e in (trained, woken, synced, rollout, generated, asleep)) <= both
        assert rollout.owners["KV cache"] == 3000
        assert (rollout.owners["parameters"] == 0) is offload


def test_the_cache_wakes_when_the_optimizer_has_left() -> None:
    world = World()
    seen: list[int] = []
    wake = world.engine.wake_cache
    world.engine.wake_cache = lambda: (seen.append(world.bytes_of("gradients", "optimizer")), wake())[1]
    for version in range(2):
        with world.hybrid.training_phase():
            world.update()
        with world.hybrid.rollout_phase(version):
            pass
    assert seen == [0, 0]


def test_released_gradients_are_gone_for_every_view_and_come_back_as_zeros_to_all() -> None:
    chunk = Chunk(1000)
    main_grad, bucket = chunk.grad_data[10:20].view(2, 5), chunk.grad_data[5:]
    master = torch.zeros(10)
    master.grad = main_grad.view(-1)
    gradients = Gradients([chunk], Adam(master))
    for _ in range(3):
        chunk.grad_data += 1
        gradients.release()
        assert [t.untyped_storage().nbytes() for t in (chunk.grad_data, main_grad, bucket)] == [0, 0, 0]
        assert master.grad is None
        gradients.restore()
        gradients.restore()
        assert not chunk.grad_data.any()
        main_grad += 3
        assert bucket[5:15].tolist() == [3.0] * 10
        assert int(chunk.grad_data.sum()) == 30


def test_phases_do_not_nest_and_work_out_of_turn_is_refused() -> None:
    world = World()
    for work in (world.residence.before_forward, world.residence.before_gradients, world.residence.before_step):
        with pytest.raises(PhaseError, match="in between phases: enter training_phase"):
            work()
    with world.hybrid.rollout_phase(0):
        with pytest.raises(PhaseError, match="the training phase cannot begin inside the rollout phase"):
            world.hybrid.training_phase().__enter__()
        with pytest.raises(PhaseError, match="a save cannot begin inside the rollout phase"):
            world.hybrid.saving().__enter__()
        with pytest.raises(PhaseError, match="an update in the rollout phase"):
            world.residence.before_gradients()
    with (
        world.hybrid.training_phase(),
        pytest.raises(PhaseError, match="the rollout phase cannot begin inside the training phase"),
    ):
        world.hybrid.rollout_phase(1).__enter__()
    with pytest.raises(PhaseError, match="state cannot be lent in between phases"):
        world.hybrid.lend()
    with pytest.raises(PhaseError, match="a rollout cannot end in between phases"):
        world.hybrid.end_rollout()
    assert world.hybrid.phase is Phase.BETWEEN


@pytest.mark.parametrize("inside", [True, False])
def test_a_save_finds_everything_and_changes_nothing_of_the_next_offload(inside: bool) -> None:
    world = World(offload=True)
    with world.hybrid.training_phase():
        world.update()
    for version in range(5):
        with world.hybrid.rollout_phase(version):
            pass
        if not inside:
            with world.hybrid.saving():
                assert world.bytes_of("optimizer") >= 3 * 4000
        with world.hybrid.training_phase():
            if inside:
                with world.hybrid.saving():
                    assert world.bytes_of("optimizer") >= 3 * 4000
            world.update()
        resident = [entry.total for entry in world.ledger.take() if entry.event == "rollout"]
        with world.hybrid.rollout_phase(version):
            pass
        again = [entry.total for entry in world.ledger.take() if entry.event == "rollout"]
        assert resident == again
        with world.hybrid.training_phase():
            world.update()


@pytest.mark.parametrize("when", ["sync", "wake_cache", "publish", "generate", "sleep"])
@pytest.mark.parametrize("offload", [False, True])
def test_after_an_exception_the_next_phases_are_whole(when: str, offload: bool) -> None:
    world = World(offload=offload)
    with world.hybrid.training_phase():
        world.update()

    def fail(*_: Any) -> Any:
        raise OSError("broken")

    target: Any = world if when == "sync" else world.engine
    if when == "sync":
        world.hybrid._weights._sync = fail  # type: ignore[attr-defined]
    elif when != "generate":
        setattr(target, when, fail)
    work = fail if when == "generate" else list
    with pytest.raises(OSError, match="broken"), world.hybrid.rollout_phase(0):
        work()
    assert world.hybrid.phase is Phase.BETWEEN
    if when == "sync":
        world.hybrid._weights._sync = world.sync  # type: ignore[attr-defined]
    elif when != "generate":
        delattr(target, when)
    world.log.clear()
    with world.hybrid.training_phase():
        assert world.log == ["abort", "sleep"]
        world.update()
    with world.hybrid.rollout_phase(1):
        assert world.log[-1] == "publish 1"
    with world.hybrid.training_phase():
        world.update()


def test_two_rollouts_in_a_row_each_get_the_weights() -> None:
    world = World(offload=True)
    for version in range(2):
        with world.hybrid.rollout_phase(version):
            pass
    assert [line for line in world.log if line.startswith("sync")] == ["sync 0", "sync 1"]


def test_state_comes_back_once_a_phase_and_after_the_last_backward_pass_where_it_is_asked_to() -> None:
    world = World()
    world.residence._prefetch = False
    with world.hybrid.training_phase():
        world.update()
    with world.hybrid.rollout_phase(0):
        pass
    world.hybrid.take_metrics()
    with world.hybrid.training_phase():
        for _ in range(4):  # micro-batches
            world.residence.before_forward()
        world.residence.before_gradients()
        assert world.bytes_of("optimizer") == 0
        world.residence.before_step()
        assert world.bytes_of("optimizer") >= 3 * 4000
        world.update()
    assert world.hybrid.take_metrics()["memory/in_bytes"] == 3 * 4000


def test_a_part_of_a_chained_optimizer_steps_when_its_own_state_is_there() -> None:
    dense, experts = Adam(torch.arange(1000.0)), Adam(torch.arange(500.0))
    state = OptimizerState(SimpleNamespace(chained_optimizers=[dense, experts]), list)
    lane = HeldLane()
    planned = state.planned_bytes(2)
    moved = Parcel("optimizer", Arena(planned).section("optimizer", planned), lane, join=True)
    residence = ModelResidence(state, moved, None, prefetch=True, allowed=lambda what: None)
    for _ in range(3):
        residence.release()
        lane.run(3 * 2)
        residence.released()
        residence.before_gradients()
        residence.before_step()
        assert len(lane.waiting) == 6  # masters and two moments of each part
        for part in (dense, experts):
            with pytest.raises(TimeoutError):
                part.step()
            lane.run(3)
            part.step()
            (master,) = part.state
            assert master.equal(torch.arange(float(master.numel())))
            assert part.state[master]["exp_avg_sq"].equal(master * 3)


class HeldLane:
    """Copies that happen when they are told to; to wait for one that has not is an error."""

    def __init__(self) -> None:
        self.waiting: list[tuple[list[Pair], list[bool]]] = []

    def copy(self, pairs: Sequence[Pair]) -> Any:
        done: list[bool] = []
        self.waiting += [([pair], done) for pair in pairs]
        count = len(pairs)

        def wait() -> None:
            if len(done) < count:
                raise TimeoutError

        return SimpleNamespace(wait=wait, seconds=0.0, exposed=0.0)

    def run(self, count: int) -> None:
        """The next so many copies."""
        for pairs, done in self.waiting[:count]:
            for target, source in pairs:
                target.copy_(source)
            done.append(True)
        del self.waiting[:count]

    def close(self) -> None:
        pass


def test_a_storage_that_the_engine_shares_stays() -> None:
    one, two = torch.zeros(10), torch.zeros(10)
    engine: Iterable[Tensor] = [one[5:]]
    assert [t.data_ptr() for t in unshared([one, one[2:], two, two[1:]], engine)] == [two[1:].data_ptr()]
    assert planned_bytes([[1], [513]]) == 512 + 512 + 512 + 1024
