"""Every storage is counted once, with its owner."""

import gc

import pytest
import torch

from hybridrl.memory.ledger import Ledger

MIB = 2**20


def test_storages_are_counted_once_and_for_the_owner_named_first() -> None:
    shared, own = torch.zeros(100), torch.zeros(50, dtype=torch.bfloat16)
    ledger = Ledger(torch.device("cpu"))
    ledger.own("parameters", lambda: [shared, shared[10:20]])
    ledger.own("engine weights", lambda: [shared.view(10, 10), own])
    ledger.own("KV cache", lambda: 77)
    assert ledger.count() == {"parameters": 400, "engine weights": 100, "KV cache": 77}
    own.untyped_storage().resize_(0)
    assert ledger.mark("asleep").total == 477


def test_tensors_elsewhere_are_nobodys() -> None:
    ledger = Ledger(torch.device("cpu"))
    ledger.own("parameters", lambda: [torch.zeros(100, device="meta")])
    assert ledger.count() == {"parameters": 0}


def test_a_name_is_given_once() -> None:
    ledger = Ledger(torch.device("cpu"))
    ledger.own("parameters", list)
    with pytest.raises(ValueError, match="owner parameters already"):
        ledger.own("parameters", list)


def test_growth_that_nobody_owns_is_shown_and_the_peak_is_seen() -> None:
    gc.collect()  # what earlier tests have left does not go in between
    ledger = Ledger(torch.device("cpu"))  # blocks of 64 MiB are always mapped anew, smaller ones may be old pages
    owned: list[torch.Tensor] = []
    ledger.own("parameters", lambda: owned)
    ledger.mark("trained")
    owned.append(torch.ones(16 * MIB))
    entry = ledger.mark("trained")
    assert entry.owners == {"parameters": 64 * MIB}
    assert abs(ledger.growth) < 16 * MIB
    leak = torch.ones(16 * MIB)
    ledger.mark("trained")
    assert 48 * MIB < ledger.growth < 80 * MIB
    del leak
    entry = ledger.mark("trained")
    assert entry.peak - entry.used > 48 * MIB
    assert ledger.highest >= entry.peak
    assert [e.event for e in ledger.take()] == ["trained"] * 4
    assert ledger.take() == []
