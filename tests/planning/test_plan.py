"""The command line of the dry run, and its figures against numbers reckoned by hand."""

import json
from pathlib import Path

import pytest

from hybridrl.config.compose import compose
from hybridrl.config.schema import Config
from hybridrl.plan import FITS, TOO_LARGE, WRONG, main, prepare
from hybridrl.planning.activations import activations, micro_batches
from hybridrl.planning.communication import Group, communication_seconds
from hybridrl.planning.compute import weight_bytes, work_of
from hybridrl.planning.estimate import Estimate, estimate
from hybridrl.planning.hardware import find_hardware
from hybridrl.planning.layouts import Layouts, trained_weights, training_shard
from hybridrl.planning.memory import trained
from hybridrl.planning.search import search
from hybridrl.planning.work import params_of
from hybridrl.reshard.explain import find_model
from hybridrl.rollout.sglang.options import kv_token_bytes

QWEN = "recipe=grpo_qwen3_30b_a3b"


def planned(*overrides: str) -> Estimate:
    found = prepare([*overrides])
    assert found.errors == []
    assert found.spec is not None
    assert found.hardware is not None
    return estimate(found.config, trained_weights(found.spec, found.config), found.hardware)


def test_a_recipe_that_fits_exits_with_0_and_writes_what_programs_read(tmp_path: Path) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert main([QWEN, "trainer.nodes=4", "--json", str(file), "--html", str(page)]) == FITS == 0
    found = json.loads(file.read_text())
    assert found["fits"] is True
    assert found["errors"] == []
    assert found["world"] == 32
    assert {"to_rollout", "to_training"} == set(found["switches"])
    assert found["batch"]["samples"] == 128 * 8
    assert found["batch"]["samples_per_rank"] == 128
    assert found["step_seconds"]["total"] == pytest.approx(
        sum(seconds for name, seconds in found["step_seconds"].items() if name != "total")
    )
    for phase in found["memory"].values():
        assert phase["total"] == sum(size for owner, size in phase.items() if owner != "total")
    html = page.read_text()
    assert html.count("data:image/png;base64,") == 4
    assert "http" not in html.replace("http-equiv", "")


def test_all_mistakes_are_told_at_once_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    wrong = ["parallel.tp=3", "rollout.ep=7", "optimizer.lrr=1", "plan.hardware=h10", "algorithm.policy_loss=ppoclip"]
    assert main([QWEN, *wrong, "--json", str(file)]) == WRONG == 2
    found = json.loads(file.read_text())
    assert found["fits"] is False
    text = "\n".join(found["errors"])
    for part in (
        "parallel.tp=3",
        "rollout.ep=7",
        "optimizer.lrr",
        "plan.hardware=h10",
        "algorithm.policy_loss=ppoclip",
    ):
        assert part in text, part
        assert part in capsys.readouterr().out or part != "parallel.tp=3"


def test_too_many_ranks_for_a_node_is_a_mistake() -> None:
    found = prepare([QWEN, "trainer.ranks_per_node=16"])
    assert any("trainer.ranks_per_node=16" in text and "8 devices" in text for text in found.errors)


def test_a_model_that_is_nowhere_is_a_mistake() -> None:
    assert any("model.facts" in text for text in prepare([QWEN, "model.facts=null"]).errors)
    assert any("model.facts=qwen9" in text for text in prepare([QWEN, "model.facts=qwen9"]).errors)


def test_a_recipe_that_does_not_fit_exits_with_3_and_names_a_change_that_does(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    tight = [QWEN, "model.recompute=none", "trainer.max_tokens_per_micro_batch=32768"]
    assert main([*tight, "--json", str(file)]) == TOO_LARGE == 3
    found = json.loads(file.read_text())
    assert any("update" in text and "GiB" in text for text in found["shortages"])
    assert found["advice"]
    assert main([*tight, *found["advice"].split()]) == FITS


def test_the_search_only_shows_layouts_that_fit_and_the_shortest_step_first() -> None:
    found = planned("recipe=grpo_mixtral_8x7b", "plan.search_results=4")
    choices = search(found)
    assert choices
    assert all(one.estimate.fits for one in choices)
    seconds = [one.estimate.step.total for one in choices]
    assert seconds == sorted(seconds)
    assert seconds[0] <= found.step.total * 1.001


def test_parameters_are_the_published_ones() -> None:
    for name, total, active in (
        ("qwen3_30b_a3b", 30.5e9, 3.3e9),
        ("qwen3_235b_a22b", 235e9, 22e9),
        ("deepseek_v3", 671e9, 37e9),
        ("mixtral_8x7b", 46.7e9, 12.9e9),
    ):
        weights = trained_weights(find_model(name), Config())
        found = params_of(weights)
        assert found[0] == pytest.approx(total, rel=0.01), name
        assert found[1] == pytest.approx(active, rel=0.03), name


def test_the_bytes_of_a_cached_token() -> None:
    qwen, deepseek = (find_model(name) for name in ("qwen3_30b_a3b", "deepseek_v3"))
    assert kv_token_bytes(qwen, 1, 2) == 48 * 2 * 4 * 128 * 2
    assert kv_token_bytes(qwen, 4, 2) == 48 * 2 * 1 * 128 * 2
    assert kv_token_bytes(qwen, 8, 2) == kv_token_bytes(qwen, 4, 2)  # heads are replicated
    assert kv_token_bytes(deepseek, 8, 2) == 61 * (512 + 64) * 2


def test_optimizer_state_is_cut_over_its_own_replicas() -> None:
    config = compose([QWEN, "trainer.nodes=4"])
    layouts = Layouts(config, trained_weights(find_model("qwen3_30b_a3b"), config), transformer_engine=True)
    shard = training_shard(layouts, 0)
    experts = 48 * 128 * 3 * 2048 * 768
    assert shard.expert == experts // 8
    found = trained(config, layouts, shard)
    assert found.gradients == 4 * (shard.dense + shard.expert)
    assert found.masters == 4 * (-(-shard.dense // 8) + shard.expert // 4)
    assert found.moments == 2 * found.masters
    whole = compose([QWEN, "trainer.nodes=4", "optimizer.distributed=false", "model.dtype=float32"])
    other = trained(whole, Layouts(whole, layouts.weights, transformer_engine=True), shard)
    assert other.masters == 0
    assert other.moments == 8 * (shard.dense + shard.expert)


def test_every_expert_is_read_where_many_sequences_decode_together() -> None:
    config = compose([QWEN])
    layouts = Layouts(config, trained_weights(find_model("qwen3_30b_a3b"), config), transformer_engine=True)
    one, many = weight_bytes(layouts, 1), weight_bytes(layouts, 10_000)
    experts = 48 * 128 * 3 * 2048 * 768 * 2 / 4
    assert many - one == pytest.approx(experts * (1 - 8 / 128), rel=1e-6)


def test_operations_of_a_token_are_twice_the_weights_it_meets() -> None:
    weights = trained_weights(find_model("qwen3_30b_a3b"), Config())
    spec, work = weights.spec, work_of(weights)
    assert work.token == pytest.approx(2 * (params_of(weights)[1] - spec.vocab_size * spec.hidden_size))
    assert work.pair == 2 * 48 * 32 * 256


def test_pipeline_stages_hold_as_many_micro_batches_as_are_in_flight() -> None:
    config = compose([QWEN, "parallel.pp=4", "parallel.tp=2", "model.recompute=none"])
    spec = find_model("qwen3_30b_a3b")
    assert micro_batches(config) == 1024
    kept = [activations(config, spec, stage, fused=True).layers for stage in range(4)]
    assert [size / kept[3] for size in kept] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("change", "phase", "owner"),
    [
        ("model.recompute=none", "update", "activations"),
        ("trainer.max_tokens_per_micro_batch=9216", "update", "activations"),
        ("parallel.tp=2", "update", "parameters"),
        ("parallel.ep=4", "update", "gradients"),
        ("optimizer.distributed=false", "update", "moments"),
        ("memory.parameters=keep", "rollout", "parameters"),
        ("memory.optimizer=none", "rollout", "masters"),
        ("memory.gradients=keep", "rollout", "gradients"),
        ("rollout.tp=8", "rollout", "engine"),
        ("rollout.max_response_length=4096", "rollout", "kv_cache"),
    ],
)
def test_every_choice_moves_the_owner_that_it_is_about(change: str, phase: str, owner: str) -> None:
    before, after = planned(QWEN).memory, planned(QWEN, change).memory
    assert before.phases[phase].get(owner, 0) != after.phases[phase].get(owner, 0)


def test_hardware_files_are_whole() -> None:
    for name in ("a100", "h100", "h200", "h800"):
        assert find_hardware(name).memory_bytes > 70 * 2**30


def test_facts_of_another_model_are_refused() -> None:
    found = prepare(["recipe=grpo_tiny_moe", "model.facts=qwen3_30b_a3b"])
    assert any("model.facts=qwen3_30b_a3b is another model" in t and "num_layers=" in t for t in found.errors)


def test_a_critic_takes_its_share_in_its_own_layout() -> None:
    plain, sharded = planned("recipe=ppo_qwen3_8b"), planned("recipe=ppo_qwen3_8b", "critic.parallel.tp=8")
    for phase in ("logprob", "update"):
        assert plain.memory.phases[phase]["critic"] > 1.2 * sharded.memory.phases[phase]["critic"]
    assert "critic" not in plain.memory.phases["rollout"]
    assert 0 < plain.memory.host["critic"] < plain.memory.phases["update"]["critic"]  # gradients are released
    stays = planned("recipe=ppo_qwen3_8b", "memory.critic=none").memory
    assert stays.phases["rollout"]["critic"] == plain.memory.phases["update"]["critic"]


def test_passes_over_the_samples_cost_updates_and_the_engines_log_probs_spare_a_pass() -> None:
    usual = planned(QWEN, "trainer.nodes=4").step
    twice = planned(QWEN, "trainer.nodes=4", "trainer.update_epochs=2").step
    assert twice.update == 2 * usual.update
    assert twice.logprob == usual.logprob > 0
    assert planned(QWEN, "trainer.nodes=4", "algorithm.old_log_probs=engine").step.logprob == 0


def test_a_group_has_as_much_from_each_peer_over_the_link_between_them() -> None:
    link = find_hardware("h100").link  # nodes of 8, 450 GB/s within, 50 GB/s between
    assert Group(1, 1).seconds(1e9, link) == 0
    assert Group(8, 1).seconds(1e9, link) == pytest.approx(7 / 450)
    assert Group(4, 8).seconds(1e9, link) == pytest.approx(3 / 50)
    assert Group(16, 1).seconds(1e9, link) == pytest.approx(max(7 / 450, 8 / 50))
    assert Group(4, 4).seconds(1e9, link) == pytest.approx(max(1 / 450, 2 / 50))


def test_collectives_of_training_by_hand() -> None:
    sizes = ["parallel.tp=4", "parallel.ep=8", "parallel.etp=1", "parallel.pp=1", "parallel.cp=1"]
    found = planned(QWEN, "trainer.nodes=4", *sizes, "model.recompute=none", "algorithm.kl.where=none")
    config, weights, layouts = found.config, found.layouts.weights, found.layouts
    tokens = 2.0**20
    own = tokens / 8 / 4 * 2048 * 2  # a rank's share of its TP group's tokens, bfloat16
    node, network = 450e9, 50e9
    gather = 3 * own / node
    layer = 2 * gather + 2 * 7 * 8 * own / 8 / node  # attention, and tokens to 8 experts each and back
    dense, experts = (
        sum(k.size * len(t) for k, t in weights.kinds.items() if k.role.startswith("expert") is e and k.role != "embed")
        for e in (False, True)
    )
    replicas, expert_replicas = 6 / 4 / 8 * dense, 6 / 8 / 4 * experts
    near = max(1 * replicas / node, 6 * replicas / network) + 3 * expert_replicas / network
    expected = 3 * 48 * layer + near
    got = communication_seconds(config, weights, layouts.sizes, found.hardware, tokens=tokens, forwards=1)
    assert got == pytest.approx(expected)


def test_experts_across_nodes_cost_more_than_within_one() -> None:
    near, far = (planned(QWEN, "trainer.nodes=4", f"parallel.ep={ep}").step.communication for ep in (8, 32))
    assert far > 2 * near
    assert planned(QWEN, "trainer.nodes=4", "parallel.tp=1", "parallel.ep=8").step.communication < near


@pytest.mark.parametrize("name", ["--json", "--html"])
def test_a_place_that_cannot_be_written_to_is_told_before_any_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "plan"):
        with pytest.raises(SystemExit, match="2"):
            main([QWEN, name, str(path)])
        printed = capsys.readouterr()
        assert f"{name}={path}: cannot be written" in printed.err
        assert printed.out == ""


def test_a_folder_of_recipes_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([QWEN, "--config-dir", "nowhere"])
    assert "--config-dir=nowhere: no such folder" in capsys.readouterr().err


def test_more_ranks_than_can_be_held_in_memory_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([QWEN, "trainer.nodes=2000", "trainer.prompts_per_step=32000"]) == WRONG
    assert "16,000 ranks" in capsys.readouterr().out


def test_a_page_shows_no_secrets(tmp_path: Path) -> None:
    words = ["rewards.judges=[{name: 'm:f', args: {api_key: word-1}}]", "+rewards.judges.0.args.auth_token=word-2"]
    assert main(["recipe=grpo_tiny_moe", *words, "--html", str(tmp_path / "a.html")]) == FITS
    html = (tmp_path / "a.html").read_text()
    assert "recipe=grpo_tiny_moe rewards.judges={…} +rewards.judges.0.args.auth_token=&lt;hidden&gt;" in html
    assert "word-" not in html
