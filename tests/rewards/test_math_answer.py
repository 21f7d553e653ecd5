"""The math judge's verdicts, right answers beside wrong ones of the same kind."""

import time

import pytest

from hybridrl.rewards.judges.boxes import final_answer
from hybridrl.rewards.judges.math_answer import math_answer
from hybridrl.rewards.pool import Job, JudgePool


def boxed(answer: str) -> str:
    return f"Adding up we get $\\boxed{{{answer}}}$, as was asked."


WHOLE_RESPONSES = [
    ("42", r"first \boxed{41}, wait, \boxed{42}", 1),
    ("42", r"first \boxed{42}, wait, \boxed{41}", 0),
    ("1", r"\boxed{1} ... the reason why the answer is \boxed{1}", 1),
    ("42", r"\boxed{42} then garbage \boxed{", 0),
    ("42", r"\boxed{42} then \boxed{\frac{42}{1}", 0),
    ("42", r"\boxed{42} and \boxed", 0),
    ("42", r"\fbox{42}", 1),
    ("42", r"\framebox{42}", 1),
    ("42", r"\boxed 42", 1),
    ("42", r"\boxed 42.", 1),
    ("42", r"$\boxed42$", 1),
    (r"\frac{1}{2}", r"\boxed \frac{1}{2}", 1),
    ("42", r"\boxed {42}", 1),
    ("42", r"\boxed{\boxed{42}}", 1),
    ("42", r"\boxed{42}" + " and so on" * 500, 1),
    ("0", r"\boxed{}", 0),
    ("42", "the answer is 42.", 1),
    ("42", "The answer is $42$, since 6 times 7 is not 43.", 1),
    ("42", "Answer: 41", 0),
    ("3.5", "So the final answer is: 3.5. It is not 7.", 1),
    ("42", "", 0),
    ("42", "no idea", 0),
    ("1,2", r"\boxed{\{1,2\}", 0),
]

ANSWERS = [
    (r"\frac{1}{2}", r"\frac{1}{2}", 1),
    (r"\frac{1}{3}", r"\frac{1}{2}", 0),
    # decimals are exact
    (r"\frac{1}{3}", "0.333", 0),
    ("0.333333", r"\frac13", 0),
    (r"\pi", "3.14", 0),
    ("3.14", r"\pi", 0),
    ("5", "5.0000001", 0),
    ("1000000", "1000001", 0),
    ("0.0000001", "0.0000002", 0),
    ("18.90", r"\$18.9", 1),
    ("0.5", ".5", 1),
    ("0.5", "½", 1),
    ("0", "0.0", 1),
    # thousands separators
    ("1000", r"1\,000", 1),
    ("1000000", r"1\,000\,000", 1),
    ("1000", "1{,}000", 1),
    ("1000", r"1\ 000", 1),
    ("8000", "8,000", 1),
    ("0", "8,000", 0),
    ("1234567", "1,234,567", 1),
    ("1234.5", r"\$1,234.50", 1),
    ("12", "1,2", 0),
    ("12", r"1\,2", 0),
    ("12", "3 4", 0),
    ("1000", "1.000", 0),
    ("100, 200", "100,200", 1),
    (r"0.\overline{3}", r"\frac{1}{3}", 1),
    (r"\frac{1}{6}", r"0.1\overline6", 1),
    (r"-\frac{41}{33}", r"-1.\overline{24}", 1),
    (r"0.\overline{3}", "0.333", 0),
    # rows of a matrix, with blanks or without
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}", 0),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", 1),
    # lists, sets, tuples, intervals
    ("[2,5)", "[2,5)", 1),
    ("[2,5)", "(2,5)", 0),
    ("[2,5)", r"\left[2,5\right)", 1),
    (r"\{1,2,3\}", r"\{3,1,2\}", 1),
    (r"\{1,2,3\}", r"\{1,2\}", 0),
    ("(1,2)", r"\{1,2\}", 0),
    ("(1,2)", "(2,1)", 0),
    ("1,2", "2,1", 1),
    ("7", "7 or 8", 0),
    ("7", r"7\text{ or }8", 0),
    ("7", "7, 8", 0),
    ("x=1, x=2", "1,2", 1),
    (r"(-\infty,3]", r"x\le 3", 1),
    (r"x\le 3", r"(-\infty,3]", 1),
    (r"(2,5)\cup(7,8)", r"(7,8)\cup(2,5)", 1),
    (r"(2,5)\cup(7,8)", r"(2,5)\cup[7,8)", 0),
    # two signs
    (r"\pm 2021", "2021", 0),
    ("2021", r"\pm 2021", 0),
    (r"\pm 2", "-2, 2", 1),
    (r"3\pm\sqrt{2}", r"3+\sqrt2, 3-\sqrt2", 1),
    (r"3\pm\sqrt{2}", r"3+\sqrt2", 0),
    # percent
    ("0.5", r"50\%", 1),
    (r"50\%", "0.5", 1),
    (r"50\%", "50", 1),
    ("50", r"50\%", 1),
    ("0.5", r"0.5\%", 0),
    (r"12.5\%", r"\frac18", 1),
    ("25", "25 percent", 1),
    ("100", r"1\%", 0),
    # units are not compared, variables are
    ("35", r"35\text{ cm}", 1),
    ("35", "35 cm", 1),
    ("35", r"35\ \mathrm{cm}^2", 1),
    ("90", r"90^\circ", 1),
    ("5", "5 dollars", 1),
    (r"35\text{ cm}", "35", 1),
    ("2d", "2c", 0),
    ("x+2t", "x+2h", 0),
    ("5m", "5", 0),
    # equations
    ("5", "x=5", 1),
    ("x=5", "5", 1),
    ("x=5", "y=5", 0),
    ("y=2x+3", "2x-y=-3", 1),
    ("1=2", "3=4", 0),
    # tiny and huge differences
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0),
    (r"\frac{1}{30!}", r"\frac{1}{31!}", 0),
    ("10^{-20}", "10^{-30}", 0),
    ("0", "10^{-40}", 0),
    ("x+10^{-20}", "x+10^{-30}", 0),
    ("(10^{-20},1)", "(10^{-30},1)", 0),
    (r"\{10^{-20},1\}", r"\{10^{-30},1\}", 0),
    ("[0,10^{-20}]", "[0,10^{-30}]", 0),
    ("x=10^{-20}", "x=10^{-30}", 0),
    # forms
    (r"\sqrt{8}", r"2\sqrt{2}", 1),
    (r"2\sqrt3", "√12", 1),
    ("2^{10}", "1024", 1),
    ("1024", "2^10", 1),
    ("1000", "1e3", 1),
    ("1500", r"1.5 \times 10^3", 1),
    ("7/2", "3 1/2", 1),
    (r"\frac72", r"3\frac12", 1),
    ("3", "-3", 0),
    ("-3", "\u22123", 1),
    ("x^2-1", "(x-1)(x+1)", 1),
    (r"\sqrt{x^2}", "x", 0),
    ("3+4i", "4i+3", 1),
    ("3+4i", "3-4i", 0),
    ("-1", "i^2", 1),
    (r"e^{i\pi}", "-1", 1),
    (r"\log_2 8", "3", 1),
    ("5050", r"\sum_{k=1}^{100} k", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0),
    (r"\infty", r"-\infty", 0),
    # bases
    ("1011_2", "1011_{2}", 1),
    ("1011_2", "1011_3", 0),
    ("1011_2", "102_3", 1),
    (r"\varnothing", r"\emptyset", 1),
    # text
    ("12:00", "1:00", 0),
    ("12:00", "12:00", 1),
    ("2:3", "3:2", 0),
    (r"\text{(C)}", "C", 1),
    (r"\text{(C)}", "B", 0),
    ("C", r"\textbf{(C)}\ 12", 1),
    (r"\text{even}", "Even", 1),
    ("stop", "pots", 0),
    ("abc", "cab", 1),
    ("no", "on", 0),
]  # fmt: skip

SLOW = [
    r"9^{9^{9^{9}}}",
    r"2^{2^{2^{2^{2^2}}}}",
    r"(10^8)!",
    r"\sum_{k=1}^{10^{12}} k^{-3}",
    r"10^{10^{10}}",
    "(" * 2000 + "1" + ")" * 2000,
    r"\frac{1}{" * 300 + "2" + "}" * 300,
    r"\prod_{k=1}^{10^9} k",
    r"((1000!)!)!",
    r"2^{99999999}",
    r"\sin(10^{10^{10}})",
    r"(x+y)^{10000}",
]


@pytest.mark.parametrize(("gold", "response", "right"), WHOLE_RESPONSES)
def test_which_text_is_the_answer(gold: str, response: str, right: int) -> None:
    assert math_answer(response, gold, {}) == right


@pytest.mark.parametrize(("gold", "answer", "right"), ANSWERS)
def test_verdict(gold: str, answer: str, right: int) -> None:
    assert math_answer(boxed(answer), gold, {}) == right


@pytest.mark.parametrize(("gold", "answer", "right"), ANSWERS)
def test_an_answer_equals_itself_and_a_boxed_reference_is_read(gold: str, answer: str, right: int) -> None:
    assert math_answer(boxed(gold), gold, {}) == 1
    assert math_answer(boxed(answer), boxed(gold), {}) == right


@pytest.mark.parametrize("gold", ["5", r"x^2", r"\{1,2\}", r"\text{yes}"])
@pytest.mark.parametrize("broken", [r"\sqrt", r"\frac", r"\frac{1}", "^", "x" * 100_000, r"\{", "}{", "\\", "\x00"])
def test_broken_latex_scores_zero(gold: str, broken: str) -> None:
    assert math_answer(boxed(broken), gold, {}) == 0
    assert math_answer(broken, gold, {}) == 0


@pytest.mark.parametrize("gold", [r"\sqrt", r"\frac", r"\frac{1}", "^"])
def test_a_broken_reference_raises_nothing(gold: str) -> None:
    assert math_answer(boxed("3"), gold, {}) == 0


@pytest.mark.parametrize("gold", [None, "", " "])
def test_no_reference_is_no_verdict(gold: str | None) -> None:
    assert math_answer(boxed("3"), gold, {}) is None


def test_a_box_can_be_required() -> None:
    assert math_answer("the answer is 42", "42", {}, require_box=True) == 0
    assert math_answer(boxed("42"), "42", {}, require_box=True) == 1


@pytest.mark.parametrize("answer", SLOW)
def test_values_that_cannot_be_computed_are_not_computed(answer: str) -> None:
    start = time.process_time()
    assert math_answer(boxed(answer), "3", {}) == 0
    assert math_answer(boxed("3"), answer, {}) == 0
    assert math_answer(boxed(answer), answer, {}) == 1
    assert time.process_time() - start < 5


def test_escaped_braces_do_not_close_a_box() -> None:
    assert final_answer(r"\boxed{\left\{ 1 \right.} }") == r"\left\{ 1 \right."


@pytest.mark.full
def test_slow_answers_in_the_pool_leave_the_next_sample_unharmed() -> None:
    with JudgePool([("math", {})], size=1, timeout_s=10, batch_timeout_s=300, memory_mb=2048) as pool:
        for answer in SLOW:
            start = time.monotonic()
            slow, good = pool.run([Job(0, boxed(answer), "3"), Job(0, boxed("3"), "3")])
            assert (slow.scores or {"score": 0.0})["score"] == 0.0
            assert good.scores == {"score": 1.0}
            assert time.monotonic() - start < 12
