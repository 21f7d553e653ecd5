"""The embedded engine against transformers' own generation and against whole forward passes."""

from dataclasses import replace

import pytest
import torch

from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.samples import Finish, Prompt, Sample
from hybridrl.rollout.transformers_engine import TransformersEngine
from tests.models.tiny import FAMILY_NAMES, tiny_folder
from tests.rollout.common import loaded_engine, prompt, reference_log_probs, reference_model, requests

PROMPTS = [prompt(i) for i in range(6)]


def drawn(samples: list[Sample]) -> list[list[int]]:
    return [s.response_ids for s in samples]


@pytest.mark.parametrize("variant", [*FAMILY_NAMES, "qwen3_moe_mixed", "llama_biased"])
def test_cold_sampling_is_transformers_greedy_generation(variant: str) -> None:
    samples = loaded_engine(variant).generate(requests(PROMPTS, temperature=0.0))
    cold = loaded_engine(variant).generate(requests(PROMPTS, temperature=1e-4))
    model = reference_model(variant)
    for p, sample, near in zip(PROMPTS, samples, cold, strict=True):
        ids = torch.tensor([p.token_ids])
        greedy = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert sample.response_ids == greedy[0, len(p.token_ids) :].tolist() == near.response_ids
        assert sample.log_probs == [0.0] * 12


@pytest.mark.parametrize("variant", FAMILY_NAMES)
def test_log_probs_equal_those_of_a_whole_forward_pass(variant: str) -> None:
    asked = requests(PROMPTS, n=2, temperature=0.8)
    model = reference_model(variant)
    for request, sample in zip(asked, loaded_engine(variant).generate(asked), strict=True):
        expected = reference_log_probs(model, request, sample.response_ids)
        assert sample.log_probs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.9, "temperature": 1.7}])
def test_log_probs_are_renormalised_over_what_the_filters_keep(params: dict[str, float]) -> None:
    asked = requests(PROMPTS, n=2, **params)
    model = reference_model()
    for request, sample in zip(asked, loaded_engine().generate(asked), strict=True):
        assert sample.log_probs == pytest.approx(reference_log_probs(model, request, sample.response_ids), abs=1e-5)


def test_a_sample_does_not_depend_on_the_batch_around_it() -> None:
    asked = requests([prompt(i) for i in range(9)], n=4, stop_token_ids=(1, 2, 3, 4, 5, 6))
    asked[5] = replace(asked[5], params=replace(asked[5].params, max_new_tokens=3, top_k=4))
    together = loaded_engine().generate(asked)
    single = loaded_engine(max_batch_size=1)
    alone = [single.generate([request])[0] for request in asked]
    narrow = loaded_engine(max_batch_size=5).generate(asked[::-1])[::-1]
    assert drawn(together) == drawn(alone) == drawn(narrow)
    assert len({s.finish for s in together}) == 2
    for one, other in zip(together, alone, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_generation_repeats_and_global_random_states_do_not_matter() -> None:
    engine = loaded_engine()
    asked = requests(PROMPTS, n=3)
    torch.manual_seed(1)
    first = engine.generate(asked)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert engine.generate(asked) == first
    assert torch.equal(torch.random.get_rng_state(), before)


def test_samples_of_one_prompt_differ() -> None:
    samples = loaded_engine().generate(requests([prompt(1)], n=8, temperature=1.5))
    assert len(set(map(tuple, drawn(samples)))) == 8


def test_any_of_several_stop_ids_ends_a_response_and_is_its_last_token() -> None:
    engine = loaded_engine()
    free = engine.generate(requests(PROMPTS, n=4))
    for position in (0, 3):
        stops = {s.response_ids[position] for s in free[:3]}
        asked = requests(PROMPTS, n=4, stop_token_ids=tuple(stops))
        for sample, whole in zip(engine.generate(asked), free, strict=True):
            end = next((i + 1 for i, token in enumerate(whole.response_ids) if token in stops), None)
            assert sample.response_ids == whole.response_ids[:end]
            assert sample.finish is (Finish.LENGTH if end is None else Finish.STOP)
            assert sample.mask == [True] * len(sample.response_ids)


def test_a_stop_token_at_the_last_allowed_place_is_a_stop() -> None:
    engine = loaded_engine()
    whole = engine.generate(requests([prompt(2)], max_new_tokens=1))[0]
    assert whole.finish is Finish.LENGTH
    stopped = engine.generate(requests([prompt(2)], max_new_tokens=1, stop_token_ids=tuple(whole.response_ids)))[0]
    assert stopped.finish is Finish.STOP


def test_length_cuts_without_appending() -> None:
    engine = loaded_engine()
    long, short = (engine.generate(requests(PROMPTS, max_new_tokens=n)) for n in (12, 5))
    for one, other in zip(long, short, strict=True):
        assert other.response_ids == one.response_ids[:5]
        assert other.finish is Finish.LENGTH


@pytest.mark.parametrize(("length", "tokens"), [(120, 8), (127, 1), (128, 0), (150, 0)])
def test_a_full_context_cuts_and_never_asks_for_less_than_one_token(length: int, tokens: int) -> None:
    engine = loaded_engine()  # its context is 128
    sample, other = engine.generate(requests([prompt(3, length), prompt(4, 5)], max_new_tokens=20))
    assert len(sample.response_ids) == tokens
    assert sample.finish is Finish.LENGTH
    assert len(other.response_ids) == 20


def test_no_room_for_new_tokens_means_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded_engine()
    monkeypatch.setattr(engine._model, "forward", None)
    samples = engine.generate([*requests([prompt(3, 128)]), *requests([prompt(4)], max_new_tokens=0)])
    assert [(s.response_ids, s.finish) for s in samples] == [([], Finish.LENGTH)] * 2
    assert engine.generate([]) == []


def test_requests_are_not_changed() -> None:
    asked = requests(PROMPTS, n=2, stop_token_ids=(1,))
    kept = [replace(r, prompt=replace(r.prompt), params=replace(r.params)) for r in asked]
    loaded_engine().generate(asked)
    assert asked == kept


def test_padding_ids_are_never_sampled_where_the_tokenizer_is_shorter() -> None:
    samples = loaded_engine(vocab_limit=5).generate(requests(PROMPTS, n=4, temperature=5.0))
    assert max(max(s.response_ids) for s in samples) == 4


def test_long_prompts_and_growing_caches_match_whole_forward_passes() -> None:
    asked = requests([prompt(1, 60), prompt(2, 3), prompt(3, 61), prompt(2, 3)], max_new_tokens=60)
    model = reference_model()
    for request, sample in zip(asked, loaded_engine(max_batch_size=2).generate(asked), strict=True):
        assert sample.log_probs == pytest.approx(reference_log_probs(model, request, sample.response_ids), abs=1e-5)


def test_a_prefill_is_cut_by_its_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(PROMPTS, n=3)
    whole = loaded_engine().generate(asked)
    monkeypatch.setattr("hybridrl.rollout.decoder.PREFILL_TOKENS", 1)
    assert drawn(loaded_engine().generate(asked)) == drawn(whole)


def test_bad_requests_are_all_reported() -> None:
    bad = [Prompt(id=4, token_ids=()), Prompt(id=5, token_ids=(3, 50)), Prompt(id=6, token_ids=(-1,))]
    with pytest.raises(ValueError, match=r"prompt 4 has no tokens.*prompt 5 .* 3 to 50.*prompt 6"):
        loaded_engine().generate(requests(bad))
    with pytest.raises(ValueError, match=r"top_p=1\.5"):
        loaded_engine().generate(requests(PROMPTS, top_p=1.5))


def test_broken_weights_are_an_error_that_names_the_sample() -> None:
    engine = loaded_engine()
    engine.parameters()["model.norm.weight"][0] = float("nan")
    with pytest.raises(FloatingPointError, match="prompt 3 sample 0 token 0"):
        engine.generate(requests([prompt(3)]))


def test_bfloat16_generates() -> None:
    engine = loaded_engine(dtype=torch.bfloat16)
    assert {t.dtype for t in engine.parameters().values()} == {torch.bfloat16}
    samples = engine.generate(requests(PROMPTS))
    assert all(len(s.response_ids) == 12 for s in samples)


def test_prompts_longer_than_a_sliding_window_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="sliding_window=16"):
        TransformersEngine(tiny_folder("mixtral", sliding_window=16))


def test_building_leaves_global_settings_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    engine = TransformersEngine(tiny_folder("qwen3_moe"), dtype=torch.bfloat16)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not any(t.requires_grad for t in engine.parameters().values())


def test_states_refuse_generation_until_weights_are_published() -> None:
    engine = TransformersEngine(tiny_folder("qwen3_moe"), load=True)
    asked = requests(PROMPTS)
    with pytest.raises(EngineStateError, match="publish"):
        engine.generate(asked)
    engine.publish(3)
    assert {v for s in engine.generate(asked) for v in s.versions} == {3}
    engine.sleep()
    engine.sleep()
    assert engine.version is None
    with pytest.raises(EngineStateError, match="asleep"):
        engine.generate(asked)
    with pytest.raises(EngineStateError, match="asleep"):
        engine.publish(4)
    with pytest.raises(EngineStateError, match="wake_weights before wake_cache"):
        engine.wake_cache()
    engine.wake_weights()
    engine.publish(4)
    with pytest.raises(EngineStateError, match="asleep"):
        engine.generate(asked)
    engine.sleep()
    engine.wake()
    with pytest.raises(EngineStateError, match="publish"):
        engine.generate(asked)
    engine.publish(4)
    assert {v for s in engine.generate(asked) for v in s.versions} == {4}
