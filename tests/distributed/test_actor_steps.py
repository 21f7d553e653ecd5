"""What one step promises: the true norm, skipping together, masters, temperature, empty batches, repetition."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import actor_runs
from tests.models.tiny import tiny_folder

TP2_EP2 = {"tp": 2, "ep": 2}


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    ("layout", "world", "parallel"),
    [
        ("megatron", 2, {}),
        ("megatron", 2, {"tp": 2, "ep": 2}),
        ("engine", 2, {"tp": 2, "ep": 2}),
        ("engine", 2, {"tp": 2}),
        ("engine", 4, {"tp": 4}),
        ("engine", 2, {"pp": 2}),
    ],
)
def test_the_norm_counts_each_parameter_once(pool, layout, world, parallel, distributed):
    check_norm(pool, "qwen3_moe", layout, world, parallel, distributed)


@pytest.mark.full
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_moe_tied", "mixtral"])
@pytest.mark.parametrize("layout", ["engine", "megatron"])
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"ep": 2},
        {"ep": 4},
        {"tp": 2, "etp": 2},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "etp": 2},
        {"tp": 2, "ep": 4},
        {"tp": 4, "ep": 2},
        {"tp": 4, "ep": 4},
        {"tp": 2, "pp": 2, "ep": 2},
        {"pp": 2, "ep": 2},
        {"pp": 2},
        {"pp": 4},
        {"pp": 2, "vpp": 2},
        {"tp": 2},
        {"tp": 4},
        {"tp": 4, "etp": 4},
        {"tp": 4, "ep": 2, "etp": 2},
        {"etp": 2},
        {"etp": 2, "ep": 2},
        {"tp": 2, "pp": 2},
    ],
)
def test_the_norm_counts_each_parameter_once_on_four_ranks(pool, layout, variant, parallel, distributed):
    if layout == "megatron" and "ep" not in parallel and parallel.get("tp", 1) != parallel.get("etp", 1):
        pytest.skip("Megatron's own experts would be counted wrongly, and are refused")
    check_norm(pool, variant, layout, 4, parallel, distributed)


def check_norm(pool, variant, layout, world, parallel, distributed):
    # Every replica's gradient is 1 already, and nothing is summed again: the distributed optimizer reads its shard.
    results = pool.run(
        actor_runs.norm_of_ones,
        world=world,
        folder=tiny_folder(variant),
        parallel=parallel,
        optimizer={"distributed": distributed},
        model={"parameter_layout": layout, "vocab_multiple": 8},
    )
    for norm, parameters in results:
        assert norm == pytest.approx(math.sqrt(parameters), rel=1e-6)


@pytest.mark.parametrize(("parallel", "distributed"), [({}, True), ({}, False), (TP2_EP2, False), ({"pp": 2}, False)])
def test_a_bad_gradient_on_one_rank_holds_back_all_and_leaves_no_trace(pool, parallel, distributed):
    options = {"parallel": parallel, "optimizer": {"distributed": distributed, "warmup_steps": 5}}
    run = {"folder": tiny_folder("qwen3_moe"), "world": 2, "steps": 4, **options}
    results = pool.run(actor_runs.poisoned, bad_steps=(1, 2), **run)
    for found in results:
        assert [m["update/skipped"] for m in found["metrics"]] == [0, 1, 1, 0]
        assert [m["lr"] for m in found["metrics"]] == pytest.approx([2e-4, 4e-4, 4e-4, 4e-4])
        assert found["skipped"] == 2
        before, after, again, still, moved = found["weights"]
        for name, weight in after.items():
            assert torch.equal(weight, again[name])
            assert torch.equal(weight, still[name])
        assert any(not torch.equal(after[name], moved[name]) for name in after)
        assert any(not torch.equal(before[name], after[name]) for name in after)
        assert all(torch.isfinite(weight).all() for weight in moved.values())
    clean = pool.run(actor_runs.poisoned, bad_steps=(), **{**run, "steps": 2})
    for name, weight in clean[0]["weights"][2].items():
        assert torch.equal(weight, results[0]["weights"][4][name])


def test_bad_gradients_in_a_row_end_the_run_on_all_ranks(pool):
    results = pool.run(
        actor_runs.poisoned,
        world=2,
        folder=tiny_folder("qwen3_moe"),
        bad_steps=(0, 2, 3, 4),
        steps=6,
        trainer={"max_nonfinite_steps": 2},
    )
    for found in results:
        assert [m["update/skipped"] for m in found["metrics"]] == [1, 0, 1]
        assert "2 updates in a row, the last one update 2 (trainer.max_nonfinite_steps=2)" in found["error"]


def test_the_error_names_the_first_bad_parameter(pool):
    errors = pool.run(
        actor_runs.broken_weights,
        world=2,
        folder=tiny_folder("qwen3_moe"),
        steps=3,
        parallel={"pp": 2},
    )
    assert errors[0] == errors[1]
    assert "rank 0: embedding.word_embeddings.weight; rank 1: decoder.layers.0.input_layernorm.weight" in errors[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world", "distributed"), [(1, False), (2, True)])
def test_a_learning_rate_of_zero_changes_no_bit(pool, dtype, world, distributed):
    options = {"optimizer": {"lr": 0.0, "distributed": distributed}, "model": {"dtype": dtype}}
    (found, *_) = pool.run(
        actor_runs.poisoned, world=world, folder=tiny_folder("qwen3_moe", dtype), bad_steps=(), steps=2, **options
    )
    for name, weight in found["weights"][0].items():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, found["weights"][2][name]), name


def test_bfloat16_learns_by_its_float32_masters(pool):
    """Steps far below bfloat16's resolution add up: weights of 0.2 have a spacing of 1e-3."""
    options = {"optimizer": {"lr": 5e-5, "distributed": True}, "model": {"dtype": "bfloat16"}}
    folder = tiny_folder("qwen3_moe", "bfloat16")
    for found in pool.run(actor_runs.poisoned, world=2, folder=folder, bad_steps=(), steps=12, **options):
        first, last = found["weights"][0], found["weights"][12]
        moved = torch.cat([(last[n] != first[n]).flatten() for n in first]).float().mean()
        assert moved > 0.2
        assert found["metrics"][-1]["loss/total"] < found["metrics"][0]["loss/total"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("parallel", [{}, TP2_EP2])
def test_every_score_is_taken_at_the_rollouts_temperature(pool, temperature, parallel):
    from transformers import AutoModelForCausalLM

    folder, rows = tiny_folder("qwen3_moe"), actor_runs.make_rows()
    options = {"parallel": parallel, "rollout": {"temperature": temperature}, "trainer": {"logprob_chunk": 5}}
    results = pool.run(actor_runs.scored, world=2, folder=folder, rows=rows, **options)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for scores, (changed, reference) in results:
        for i, row in enumerate(rows):
            with torch.no_grad():
                logits = model(torch.tensor(row.token_ids)[None]).logits[0, :-1] / temperature
            log_p = logits.log_softmax(-1)
            expected = log_p.gather(-1, torch.tensor(row.token_ids[1:])[:, None])[:, 0].numpy()
            np.testing.assert_allclose(scores.log_probs[i][1:], expected, atol=1e-5)
            np.testing.assert_allclose(scores.entropy[i][1:], -(log_p.exp() * log_p).sum(-1).numpy(), atol=1e-5)
            assert scores.log_probs[i][0] == 0
            np.testing.assert_array_equal(reference[i], scores.log_probs[i])
        assert any(not np.array_equal(a, b) for a, b in zip(changed, scores.log_probs, strict=True))


@pytest.mark.parametrize("lengths", [(5, 4, 3), (4,), (1, 2)])
@pytest.mark.parametrize("parallel", [{}, {"pp": 2}])
def test_a_batch_that_trains_nothing_has_zero_loss_and_gradient(pool, lengths, parallel):
    options = {"parallel": parallel, "trainer": {"micro_batch_size": 1}}
    folder = tiny_folder("qwen3_moe")
    for metrics, any_gradient in pool.run(actor_runs.masked_out, world=2, folder=folder, lengths=lengths, **options):
        assert not any_gradient
        assert metrics["loss/total"] == metrics["grad_norm"] == metrics["entropy"] == metrics["tokens/trained"] == 0
        assert metrics["update/skipped"] == 0


def test_rows_that_ranks_do_not_divide_count_once(pool):
    """Five rows on four ranks: every number is that of one rank."""
    run = {"folder": tiny_folder("qwen3_moe"), "steps": 1, "trainer": {"max_tokens_per_micro_batch": 12}}
    (alone,) = pool.run(actor_runs.updates, world=1, **run)
    spread = pool.run(actor_runs.updates, world=4, parallel={"ep": 4}, **run)
    for found in spread:
        for name, value in alone["metrics"][0].items():
            if name != "micro_batches":
                assert found["metrics"][0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_two_runs_are_identical(pool):
    run = {"folder": tiny_folder("qwen3_moe"), "world": 2, "steps": 3, "parallel": TP2_EP2}
    first, second = (pool.run(actor_runs.updates, **run)[0] for _ in range(2))
    assert first["metrics"] == second["metrics"]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])


def balance_twin(folder, batches, coef):
    """The mean over tokens and layers of E · Σ over experts of (share of choices)·(mean probability), each taken over a
    micro-batch of rows; and the gradients of `coef` times its sum over layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    k, layers = model.config.num_experts_per_tok, model.config.num_hidden_layers
    everything = sum(len(row) for batch in batches for row in batch)
    loss = torch.zeros(())
    for batch in batches:
        seen = [model(torch.tensor(row)[None], output_router_logits=True).router_logits for row in batch]
        for logits in (torch.cat(parts) for parts in zip(*seen, strict=True)):
            tokens, experts = logits.shape
            chosen = torch.zeros_like(logits).scatter_(1, logits.topk(k).indices, 1.0)
            balance = experts * (chosen.sum(0) / (k * tokens) * logits.softmax(-1).mean(0)).sum()
            loss = loss + tokens / everything * balance
    (coef * loss).backward()
    return loss.item() / layers, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


BALANCED = [
    (1, {}, {}),
    (1, {}, {"recompute": "full"}),
    (2, {}, {}),
    (2, {"tp": 2, "ep": 2}, {}),
    (2, {"pp": 2}, {}),
    (2, {"cp": 2, "ep": 2}, {}),
    (4, {"tp": 2, "pp": 2, "ep": 2}, {}),
]


def balanced():
    """Each world with rows alone and together, packed and padded: the quick ones in turns. Where replicas have rows of
    their own, which are together depends on the ranks."""
    found = []
    for number, case in enumerate(BALANCED):
        for packing, alone in product((True, False), (True, False)):
            replicated = case == (2, {}, {})
            if alone or not replicated:
                quick = replicated or (packing == alone) == (number % 2 == 0)
                found.append(pytest.param(*case, packing, alone, marks=() if quick else pytest.mark.full))
    return found


@pytest.mark.parametrize(("world", "parallel", "model", "packing", "alone"), balanced())
def test_the_load_balancing_loss_is_a_mean_over_real_tokens(pool, world, parallel, model, packing, alone):
    """Rows of different lengths in micro-batches of one or of all, so there is padding in rows, packs and whole
    micro-batches."""
    folder, coef = tiny_folder("qwen3_moe"), 0.3
    rows = actor_runs.make_rows(lengths=(8, 3, 5))
    batches = [[row.token_ids] for row in rows] if alone else [[row.token_ids for row in rows]]
    value, expected = balance_twin(folder, batches, coef)
    found = pool.run(
        actor_runs.balance_gradients,
        world=world,
        folder=folder,
        rows=rows,
        parallel=parallel,
        trainer={"packing": packing, "micro_batch_size": 1 if alone else None},
        model={"aux_loss_coef": coef, **model},
        optimizer={"lr": 0.0, "clip_grad": 0.0},
    )
    for metric, gradients in found:
        assert metric == pytest.approx(value, rel=1e-5)
        names = [name for name in expected if "experts" not in name and name in gradients]
        assert len(names) >= 36
        for name in names:
            error = (gradients[name] - expected[name]).norm()
            assert error <= 1e-4 * expected[name].norm(), name


def moved_biases(folder, rows, rate, steps):
    """The correction biases after each step, by transformers' own choice of experts for every token of every row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    gates = {n: m for n, m in model.named_modules() if n.endswith("mlp.gate")}
    loads = {}

    def count(name):
        def hook(gate, inputs, output):
            loads[name] += torch.bincount(output[2].flatten(), minlength=8)

        return hook

    for name, gate in gates.items():
        gate.register_forward_hook(count(name))
    found = []
    for _ in range(steps):
        loads.update({name: torch.zeros(8) for name in gates})
        for row in rows:
            model(torch.tensor(row.token_ids)[None])
        for name, gate in gates.items():
            assert loads[name].sum() == 2 * sum(map(len, rows))
            gate.e_score_correction_bias += rate * torch.sign(loads[name].mean() - loads[name])
        biases = {f"{n}.e_score_correction_bias": gate.e_score_correction_bias.clone() for n, gate in gates.items()}
        found.append(biases)
    return found


@pytest.mark.parametrize(
    ("world", "parallel", "model", "packing"),
    [
        (1, {}, {"recompute": "full"}, True),
        (2, {}, {}, False),
        (2, {"tp": 2, "ep": 2}, {}, True),
        (2, {"cp": 2, "ep": 2}, {}, True),
        (4, {"tp": 2, "pp": 2, "ep": 2}, {}, False),
    ],
)
def test_correction_biases_move_towards_an_even_load_of_the_whole_batch(pool, world, parallel, model, packing):
    folder, rate = tiny_folder("deepseek_moe"), 0.03
    rows = actor_runs.make_rows()
    expected = moved_biases(folder, rows, rate, steps=3)
    ranks = pool.run(
        actor_runs.biases,
        world=world,
        folder=folder,
        rows=rows,
        steps=3,
        parallel=parallel,
        trainer={"packing": packing, "micro_batch_size": 2},
        model={"router_bias_rate": rate, **model},
        optimizer={"lr": 0.0, "clip_grad": 0.0},
    )
    for found in ranks:
        for ours, theirs in zip(found, expected, strict=True):
            assert len(theirs) == 3
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-7, msg=name)
    assert not torch.equal(expected[0][name], expected[2][name])


def test_correction_biases_stay_as_they_were_unless_asked(pool):
    folder = tiny_folder("deepseek_moe")
    (found,) = pool.run(actor_runs.biases, world=1, folder=folder, rows=actor_runs.make_rows(), steps=2)
    source = load_file(folder / "model.safetensors")
    for step in found:
        assert len(step) == 3
        assert all(torch.equal(bias, source[name]) for name, bias in step.items())


@pytest.mark.parametrize("distributed", [False, True])
def test_forgotten_steps_outside_the_schedule_leave_no_trace(pool, distributed):
    run = {"folder": tiny_folder("qwen3_moe"), "optimizer": {"distributed": distributed, "warmup_steps": 5}}
    plain, detour = (pool.run(actor_runs.after_a_detour, world=2, detour=n, **run)[0] for n in (0, 2))
    assert plain["metrics"] == detour["metrics"]
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, detour["weights"][name]), name
