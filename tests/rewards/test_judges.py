"""The other built-in judges."""

import pytest

from hybridrl.data.tasks import problems
from hybridrl.rewards.judges import BUILTIN, resolve
from hybridrl.rewards.judges.exact import exact
from hybridrl.rewards.judges.numeric import numeric
from hybridrl.rewards.judges.reasoning import extract_answer, reasoning_gym_score


@pytest.mark.parametrize("name", BUILTIN)
def test_every_builtin_judge_can_be_had(name: str) -> None:
    assert callable(resolve(name, {}))


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("8", "8", 1), ("8", " 8\n", 1), ("8", "8.", 1), ("8", "88", 0), ("8", "", 0), ("Blue Sky", "blue   sky", 1),
        ("é", "e\u0301", 1), ("2", "²", 0), (None, "8", None), (" ", "8", None),
    ],
)  # fmt: skip
def test_exact(answer: str | None, response: str, right: int | None) -> None:
    assert exact(response, answer, {}) == right


def test_exact_can_mind_the_case() -> None:
    assert exact("blue", "Blue", {}, case_sensitive=True) == 0
    assert exact("Blue ", "Blue", {}, case_sensitive=True) == 1


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("42", "#### $42.", 1),
        ("42", "#### 42" + " and a long story with 7 dwarfs" * 50, 1),
        ("42", "#### 41\nno: #### 42", 1),
        ("42", "#### 42 apples, of 50", 1),
        ("42", "42 ####", 0),
        ("42", "the answer is 42.", 1),
        ("42", "41 or 42", 1),
        ("42", "42 or 41", 0),
        ("42", "", 0),
        ("she has 12 + 30 = 42\n#### 42", "It is 42", 1),
        ("1234", "1,234", 1), ("1234", "1{,}234", 1), ("1234", r"1\,234", 1), ("1234", r"1\ 234", 1),
        ("1234", "1\u202f234", 1), ("1000000", "1,000,000.00 dollars", 1), ("8000", "8,000", 1), ("0", "8,000", 0),
        ("12", "1,2", 0), ("2", "1,2", 1), ("1,234", "1234", 1), ("56", "12,34,56", 1),
        ("18.9", "$18.90", 1), ("-5", "-$5", 1), ("-5", "$-5", 1), ("-5", "\u22125", 1), ("3", "10-3", 1),
        ("-3", "x=-3", 1), ("0.5", ".5", 1), ("3.14", "3.14.", 1), ("0.75", "3/4", 1), ("0.75", r"\frac{3}{4}", 1),
        ("0.333", "1/3", 0), ("1500", "1.5e3", 1),
        ("1500", r"1.5 \times 10^{3}", 1), ("50", "50%", 1), ("35", "35cm", 1),
        ("7", "1/0", 0), ("7", "1e999999999", 0), ("7", "9" * 100_000, 0), ("42", r"\boxed{42}", 1),
        ("none", "42", None), (None, "42", None),
    ],
)  # fmt: skip
def test_numeric(answer: str | None, response: str, right: int | None) -> None:
    assert numeric(response, answer, {}) == right


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 7 ", "7"), ("x <answer>7</answer> y", "7"), ("<answer>6</answer><answer> 7</answer>", "7"),
        ("<answer>6</answer> <answer>7", None), ("<ANSWER>7</ANSWER>", "7"),
    ],
)  # fmt: skip
def test_the_scored_part_of_a_response(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


def test_a_reasoning_gym_task_scores_by_its_own_rule() -> None:
    (row,) = problems("countdown", {"min_numbers": 3, "max_numbers": 3}, seed=5, size=1)
    solution = row["answer"]
    assert reasoning_gym_score(f"I say <answer>{solution}</answer>", None, row) == 1.0
    assert reasoning_gym_score("<answer>1+1</answer>", None, row) < 1.0
    assert reasoning_gym_score("<answer>", None, row) == 0.0
    assert reasoning_gym_score(solution, None, {}) is None


@pytest.mark.full
def test_every_reasoning_gym_task_gives_its_own_answers_full_marks() -> None:
    from reasoning_gym.factory import DATASETS

    for task in sorted(set(DATASETS) - {"composite"}):
        for row in problems(task, {}, seed=1, size=2):
            if row["answer"] is not None:
                assert reasoning_gym_score(str(row["answer"]), None, row) == 1.0, task
