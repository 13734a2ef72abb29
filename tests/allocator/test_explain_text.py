"""What a person reads: the table of a decision, of a prompt, and how odd cases are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allocator.explain_text import ROWS, lines, number
from allocator.explanation import Allowance, Candidate, Draw, Explanation, Extra, News, Owner, Sight, Weighed
from tests.allocator.journaled import Journalled
from tests.allocator.test_explain import searched, why


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Journalled:
    return searched(tmp_path_factory.mktemp("search"))


def told(explanation: Explanation) -> str:
    return "\n".join(lines(explanation))


NODE_8 = """\
node 8 of tree 0 (frozenlake/train/0, wave 0) is turn 2 of 2 of continuation 4
continuation 4 started from node 0 (depth 0): decision 3 of rule greedy

   node  depth  in flight  won/tried      predicted   value    crowd   total
*     0      0          0        1/2  0.500 ± 0.289  0.5000   0.0000  0.5000  chosen for continuation 4
      3      1          1        1/1  0.500 ± 0.289  0.6667  -0.2000  0.4667
      1      1          1        0/1  0.500 ± 0.289  0.3333  -0.2000  0.1333

  in flight   continuation 2 from node 1, 0 turns so far (running)
              continuation 3 from node 3, 0 turns so far (running)
  staleness   stamp 6, age 4 when decided, 4 when it started, at most D = 4: speculative
  fixed       weight 0.2000, baseline 0.5000 by predictor version 0, to the end
  budget      fixed: 4 of 5 continuations were spent before
  news        continuation 1 ended since the decision before; without that, the choice would have been node 3
  came of it  finished, reward 1.0000"""

NODE_2 = """\
node 2 of tree 0 (frozenlake/train/0, wave 0) is turn 2 of 2 of continuation 0
continuation 0 started from node 0 (depth 0): decision 0 of rule greedy, with continuation 1

   node  depth  in flight  won/tried      predicted
*     0      0          0        0/0  0.500 ± 0.289  chosen for continuations 0, 1
  rule greedy weighs nothing here: these anchors have no scores

  in flight   nothing else in this tree
  staleness   stamp 0, age 0 when decided, 0 when it started, at most D = 4: nothing it reads was outstanding
  fixed       weight 0.2000, baseline 0.5000 by predictor version 0, to the end
  budget      fixed: 0 of 5 continuations were spent before
  news        no outcome since the decision before
  came of it  finished, reward 0.0000"""

NODE_0 = """\
node 0 of tree 0 (frozenlake/train/0, wave 0) is its prompt
  budget      fixed gave it 5 continuations when its root was known
  predicted   success 0.500 ± 0.289, by predictor version 0
  spent       5 of 5, of weight 0.2000 each"""


@pytest.mark.parametrize("node, text", [(8, NODE_8), (2, NODE_2), (0, NODE_0)])
def test_a_node_is_told_on_one_page(node: int, text: str, search: Journalled) -> None:
    assert told(why(search, node)) == text


def row(node: int, **changes: object) -> Weighed:
    plain = Weighed(node, 1, 0, 0.0, 0, 0.25, 0.125, None, {}, [], [])
    return replace(plain, **changes)  # type: ignore[arg-type]


OWNER = Owner(7, 3, 1, 1, 0, 5, 2, 0.25, None, 4, 9, False, None, ["failed", "finished"], "horizon", None)
SIGHT = Sight(
    decision=2, weighs=True, draws=[Draw(3, 1, 0.5), Draw(4, 0, 0.25)], running=[], stamp=9, age=0, predictor_version=4, allowance=4,
    spent=4, news=News([1, 2], [], changed=True),
    anchors=[row(3, total=0.5, terms={"gain": 2e-9, "heirs": 2}, started=[7, 8]), row(4, total=0.25, stopped=[5]),
             row(0, total=float("inf"), started=[6])],
)  # fmt: skip
EXPLANATION = Explanation(1, 9, "t", 0, "igrpo", ["node", "outcome"], "fixed", 0, owner=OWNER, sight=SIGHT)


def test_a_round_with_heirs_draws_stops_and_odd_numbers() -> None:
    text = told(EXPLANATION)
    assert (
        "continuation 7, an heir of continuation 2, goes on from node 3 (depth 1): decision 2 of rule igrpo, with continuations 6, 8"
        in text
    )
    rows = text.splitlines()[3:7]
    assert rows[0].split()[-3:] == ["gain", "heirs", "probability"]
    assert (
        rows[1].startswith("*")
        and "2e-09" in rows[1]
        and rows[1].endswith("0.5000  chosen for continuations 7, 8")
    )
    assert (
        rows[2].startswith(" ") and rows[2].endswith("stops continuation 5") and rows[2].count("  -  ") == 2
    )
    assert rows[3].startswith("+") and "inf" in rows[3]
    assert "  drawn       2 of 3 at 0.5000, 1 of 4\n" in text, "the probability where it was not uniform"
    assert "baseline none by predictor version 4, at most 5 turns" in text
    assert (
        "continuations 1, 2 ended since the decision before; without that, nothing would have been started"
        in text
    )
    assert text.endswith("came of it  horizon after 2 attempts")


def test_a_long_table_is_cut_and_what_was_chosen_is_always_in_it() -> None:
    anchors = [row(node, total=1.0 / (node + 1)) for node in range(ROWS + 9)]
    anchors[-1] = replace(anchors[-1], started=[7])
    text = told(
        replace(EXPLANATION, sight=replace(SIGHT, anchors=anchors), owner=replace(OWNER, anchor=ROWS + 8))
    )
    assert "and 8 more, none of them chosen" in text and f"* {ROWS + 8:>5}" in text


def test_a_rule_that_reads_nothing_or_no_outcomes_says_so() -> None:
    text = told(replace(EXPLANATION, reads=[], sight=replace(SIGHT, news=None)))
    assert (
        "rule igrpo reads nothing, so no score can be stale" in text and "the rule reads no outcomes" in text
    )
    assert "no outcome since" in told(replace(EXPLANATION, sight=replace(SIGHT, news=None)))
    same = replace(SIGHT, news=News([1], [3], changed=False))
    assert "the decision would have been the same without that" in told(replace(EXPLANATION, sight=same))


def test_a_prompt_out_of_a_pool_is_shown_among_the_others() -> None:
    pool = [Candidate(4, 0.25, 0.125, 0), Candidate(1, 0.5, 0.125, 3), Candidate(2, 0.75, 0.125, 1)]
    allowance = Allowance(3, 0.5, 0.125, 2, pool, {"pool": 3.0}, [Extra(5, 2, 0.0, 3)], 5, [0.25, 0.25, 0.5])
    text = told(replace(EXPLANATION, owner=None, sight=None, allowance=allowance, node=0))
    assert text.splitlines()[1:6] == [
        "  budget      fixed gave it 3 continuations when its root was known",
        "  predicted   success 0.500 ± 0.125, by predictor version 2",
        "  added       2 continuations before decision 5, 0 of 3 won",
        "  spent       5 of 5, of weight 0.2500, 0.2500, 0.5000",
        "  it knew     pool=3.0000",
    ]
    assert text.splitlines()[7:] == [
        "3 prompts got their continuations together:",
        "   tree      predicted  continuations",
        "*     1  0.500 ± 0.125              3",
        "      2  0.750 ± 0.125              1",
        "      4  0.250 ± 0.125              0",
    ]


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0.0000"), (-0.0, "0.0000"), (3, "3"), (1e-5, "1e-05"), (1e7, "1e+07"), (float("inf"), "inf"), (2 / 3, "0.6667")],
)  # fmt: skip
def test_numbers_are_short_and_lose_no_magnitude(value: float, text: str) -> None:
    assert number(value) == text


def test_every_line_of_the_example_fits_a_wide_terminal(search: Journalled) -> None:
    assert max(len(line) for node in range(9) for line in lines(why(search, node))) <= 120
