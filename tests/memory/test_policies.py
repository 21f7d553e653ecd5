"""What stays on the device: what was asked for, and with `auto` what fits."""

import pytest

from hybridrl.config.sections.memory import MemoryConfig
from hybridrl.memory.policies import Places, Sizes, cache_room, choose

SIZES = Sizes(parameters=20, engine=10, cache=30, staging=5, optimizer=60, reference=20, critic=40)


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (1000, Places("none", "none", "none")),
        (65 + 7 + 120, Places("none", "none", "none")),
        (65 + 7 + 119, Places("host", "none", "none")),
        (65 + 7 + 60, Places("host", "none", "none")),
        (65 + 7 + 59, Places("host", "none", "host")),
        (65 + 7 + 19, Places("host", "host", "host")),
        (1, Places("host", "host", "host")),
    ],
)
def test_auto_keeps_what_fits_beside_the_rollout(total: int, expected: Places) -> None:
    memory = MemoryConfig(margin_bytes=7)
    assert choose(memory, SIZES, device="cuda", device_bytes=total) == expected
    limited = MemoryConfig(margin_bytes=7, device_bytes=total)
    assert choose(limited, SIZES, device="cuda", device_bytes=10**6) == expected


def test_what_was_asked_for_is_done_and_what_stays_takes_room() -> None:
    memory = MemoryConfig(margin_bytes=0, optimizer="none", reference="disk", critic="auto", arena="disk")
    assert choose(memory, SIZES, device="cuda", device_bytes=105) == Places("none", "disk", "none")
    assert choose(memory, SIZES, device="cuda", device_bytes=104) == Places("none", "disk", "disk")


def test_on_a_cpu_nothing_is_won_by_moving_to_the_host() -> None:
    assert choose(MemoryConfig(), SIZES, device="cpu", device_bytes=None) == Places("none", "none", "none")
    disk = MemoryConfig(arena="disk")
    assert choose(disk, SIZES, device="cpu", device_bytes=None) == Places("disk", "disk", "disk")


def test_the_cache_gets_what_a_rollout_leaves() -> None:
    assert cache_room(MemoryConfig(margin_bytes=7), 30, 100) == 63
    assert cache_room(MemoryConfig(margin_bytes=7), 130, 100) == 0
    assert cache_room(MemoryConfig(margin_bytes=7, device_bytes=50), 30, 100) == 13
    assert cache_room(MemoryConfig(), 30, None) is None
