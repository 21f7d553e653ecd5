"""What is lent to a save stays as it was, whatever becomes of what it is a copy of."""

import threading

import pytest
import torch
from torch import Tensor

from hybridrl.checkpoint.files import HostCopies
from hybridrl.memory.arena import Arena
from hybridrl.memory.lane import make_lane
from hybridrl.memory.parcel import Parcel, ParcelError, Where, planned_bytes
from tests.memory.test_phases import World


def lending(*groups: list[Tensor]) -> Parcel:
    needed = planned_bytes([[t.nbytes for t in group] for group in groups])
    return Parcel("state", Arena(needed).section("state", needed), make_lane(torch.device("cpu")), join=True)


def state() -> tuple[list[Tensor], list[Tensor]]:
    return [torch.arange(9_000_000.0), torch.arange(60.0)], [torch.arange(48.0).bfloat16()]


def test_copies_are_exact_for_every_view_and_outlive_the_next_update() -> None:
    masters, moments = state()
    parcel = lending(masters, moments)
    for turn in range(4):  # first from torch's storages, then from blocks
        if turn > 1:
            parcel.left()
        parcel.wait()
        loan = parcel.lend([masters, moments])
        views = [masters[0], masters[1].view(5, 12)[1:4, 2:7], masters[1].view(12, 5).t(), moments[0][7:]]
        expected = [view.clone() for view in views]
        copies = [loan.of(view) for view in views]
        parcel.wait()
        for tensor in masters + moments:
            tensor += 1
        for copy, value, view in zip(copies, expected, views, strict=True):
            assert copy is not None
            assert copy.dtype == view.dtype
            assert copy.equal(value)
            assert copy.data_ptr() != view.data_ptr()
        assert loan.of(torch.zeros(3)) is None
        loan.end()


def test_the_arena_is_written_again_only_after_the_end() -> None:
    masters, moments = state()
    parcel = lending(masters, moments)
    loan = parcel.lend([masters, moments])
    before = masters[0].clone()
    parcel.wait()
    masters[0] += 1
    leaving = threading.Thread(target=parcel.leave, args=([masters, moments],))
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    copy = loan.of(masters[0])
    assert copy is not None
    assert copy.equal(before)
    loan.end()
    leaving.join(60)
    assert not leaving.is_alive()
    parcel.left()
    parcel.wait()
    assert masters[0].equal(before + 1)


def test_what_is_lent_leaves_without_another_copy() -> None:
    masters, moments = state()
    parcel = lending(masters, moments)
    expected = masters[0].clone()
    parcel.lend([masters, moments])  # and never ended: nothing is written
    parcel.out.take()
    parcel.leave([masters, moments])
    parcel.left()
    assert parcel.out.take()["bytes"] == 0
    assert masters[0].untyped_storage().nbytes() == 0
    with pytest.raises(ParcelError, match="has left the device"):
        parcel.lend([masters, moments])
    parcel.wait()
    assert parcel.where is Where.HERE
    assert masters[0].equal(expected)


def test_a_save_takes_what_is_lent_and_copies_the_rest() -> None:
    world, other = World(), torch.arange(5.0)
    ended = []
    with world.hybrid.saving():
        copies = HostCopies(world.hybrid.lend)
        (master,) = world.optimizer.state
        tensors = {"master": master, "moment": world.optimizer.state[master]["exp_avg"], "other": other}
        held = copies.take(tensors)
    section = world.parcel.section
    for name, copy in held.items():
        assert copy.equal(tensors[name])
        inside = section.data_ptr() <= copy.data_ptr() < section.data_ptr() + section.numel()
        assert inside == (name != "other")
    expected = {name: copy.clone() for name, copy in held.items()}
    with world.hybrid.rollout_phase(1):
        assert all(copy.equal(expected[name]) for name, copy in held.items())
    with world.hybrid.training_phase():
        world.update()

    def end() -> None:
        ended.append(all(copy.equal(expected[name]) for name, copy in held.items()))
        copies.end()

    threading.Timer(0.3, end).start()
    with world.hybrid.rollout_phase(2):
        assert ended == [True]  # it waited
    with world.hybrid.training_phase():
        world.update()
