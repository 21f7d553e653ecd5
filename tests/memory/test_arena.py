"""The arena: one block, cut once, and too little room found at the start."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.memory import arena as module
from hybridrl.memory.arena import Arena, ArenaError, section_bytes
from hybridrl.memory.pages import PAGE, available_bytes, disk_bytes, resident_bytes
from tests.memory.kernel import present_bytes


def test_sections_lie_apart_in_one_block_that_stays_where_it_is() -> None:
    arena = Arena(section_bytes(10) + section_bytes(PAGE + 1))
    address = arena.address
    first, second = arena.section("a", 10), arena.section("b", PAGE + 1)
    first.fill_(1)
    second.fill_(2)
    assert (first.sum(), second.sum()) == (10, 2 * (PAGE + 1))
    assert second.data_ptr() - first.data_ptr() == PAGE
    assert arena.address == address == first.data_ptr()
    with pytest.raises(ArenaError, match=r"0 of 12288 bytes left, c needs 1: \{'a': 10, 'b': 4097\}"):
        arena.section("c", 1)
    with pytest.raises(ValueError, match="a section a already"):
        arena.section("a", 10)


def test_the_pages_are_there_before_the_first_step_and_go_with_the_arena() -> None:
    gc.collect()  # what earlier tests have left does not go in between
    arena = Arena(64 * 2**20)
    arena.wait()
    assert present_bytes(arena.address, arena.nbytes) == 64 * 2**20
    held = resident_bytes()
    arena.close()
    del arena
    gc.collect()
    assert held - resident_bytes() > 48 * 2**20


def test_a_file_holds_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    arena = Arena(5 * PAGE, file=tmp_path / "of" / "rank0.arena")
    section = arena.section("a", 3 * PAGE)
    section.copy_(torch.arange(3 * PAGE) % 251)
    assert section.equal((torch.arange(3 * PAGE) % 251).to(torch.uint8))
    assert not list((tmp_path / "of").iterdir())


def test_a_full_disk_is_found_at_the_start(tmp_path: Path) -> None:
    much = disk_bytes(tmp_path) * 2
    with pytest.raises(ArenaError, match=rf"rank0.arena: no room for {section_bytes(much)} bytes"):
        Arena(much, file=tmp_path / "rank0.arena")


@pytest.mark.parametrize(("status", "problem"), [(0, None), (2, "could not lock 4096 bytes")])
def test_pages_are_locked_once_in_parts(monkeypatch: pytest.MonkeyPatch, status: int, problem: str | None) -> None:
    calls: list[Any] = []

    class Cudart:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            calls.append((address, nbytes))
            return status if nbytes == PAGE else 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            calls.append(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(module, "PART", 4 * PAGE)
    arena = Arena(9 * PAGE, pin=True)
    if problem is None:
        arena.section("a", 1)
    else:
        with pytest.raises(ArenaError, match=problem):
            arena.section("a", 1)
    starts = [arena.address + i * PAGE for i in (0, 4, 8)]
    assert calls == list(zip(starts, (4 * PAGE, 4 * PAGE, PAGE), strict=True))
    calls.clear()
    arena.close()
    assert calls == starts[: 3 if problem is None else 2]


def test_available_memory_is_what_the_machine_has() -> None:
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 0 < available_bytes() <= total
