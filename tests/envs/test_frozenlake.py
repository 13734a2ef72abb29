"""FrozenLake: forks are exact and independent, tasks are stable, splits share no map, endings stay apart."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, EnvironmentFault
from common.nouns import TaskId
from common.tokenizer import WordTokenizer
from envs.base import Step
from envs.frozenlake import ACTIONS, FrozenLake
from envs.lake_map import MOVES, Lake

ROOT = Path(__file__).parents[2]


def task(index: int, split: str = "train") -> TaskId:
    return TaskId(env="frozenlake", split=split, index=index)


def walk(env: FrozenLake, rng: random.Random, turns: int) -> list[Step]:
    """Up to `turns` random steps, some of them nonsense; stops at the end of the episode."""
    steps: list[Step] = []
    while len(steps) < turns and not (steps and steps[-1].is_over):
        steps.append(env.step(rng.choice((*ACTIONS, "nonsense")), rng.getrandbits(64)))
    return steps


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.integers(0, 6))
def test_a_restored_lake_equals_the_forked_one_and_both_go_on_alike(
    seed: int, slippery: bool, turns: int
) -> None:
    origin, fork = (FrozenLake(is_slippery=slippery, max_turns=8) for _ in range(2))
    origin.reset(task(seed % 50))
    walk(origin, random.Random(seed), turns)
    fork.reset(task(seed % 7))
    fork.restore(origin.snapshot())
    assert fork.state_hash() == origin.state_hash()
    for _ in range(4):
        if origin.expert_action() is None:
            break
        assert walk(origin, random.Random(seed), 1) == walk(fork, random.Random(seed), 1)
        assert fork.state_hash() == origin.state_hash()


def test_interleaved_forks_each_behave_as_if_they_were_alone() -> None:
    def alone(snapshot: bytes, seed: int) -> list[Step]:
        env = FrozenLake(is_slippery=True, max_turns=30)
        env.restore(snapshot)
        return walk(env, random.Random(seed), 10)

    root = FrozenLake(is_slippery=True, max_turns=30)
    root.reset(task(1))
    snapshot = root.snapshot()
    forks = [FrozenLake(is_slippery=True, max_turns=30) for _ in range(2)]
    rngs = [random.Random(seed) for seed in (0, 1)]
    found: list[list[Step]] = [[], []]
    for fork in forks:
        fork.restore(snapshot)
    for _ in range(10):
        for fork, rng, steps in zip(forks, rngs, found, strict=True):
            if not (steps and steps[-1].is_over):
                steps.extend(walk(fork, rng, 1))
    assert found == [alone(snapshot, 0), alone(snapshot, 1)]
    assert root.snapshot() == snapshot


def test_the_seed_of_a_step_decides_a_slip_and_slips_have_gymnasiums_odds() -> None:
    env = FrozenLake(size=3, hole_probability=0.0, is_slippery=True)
    env.reset(task(0))
    env.restore(env.snapshot())
    start = env.snapshot()
    ends: Counter[str] = Counter()
    for seed in range(3000):
        env.restore(start)
        first = env.step("down", seed)
        env.restore(start)
        assert env.step("down", seed) == first
        ends[first.observation] += 1
    assert set(ends) == {"at a1", "at a2", "at b1"}  # left into the wall, down, right
    assert all(abs(count / 3000 - 1 / 3) < 0.04 for count in ends.values())


def test_without_slipping_every_move_goes_where_the_map_says() -> None:
    env = FrozenLake(size=4, hole_probability=0.0, max_turns=100)
    env.reset(task(0))
    lake, square, rng, step = Lake.open(4), 0, random.Random(0), None
    while square != lake.goal:
        action = rng.randrange(len(MOVES))
        square = lake.move(square, action)
        step = env.step(ACTIONS[action], rng.getrandbits(64))
        assert step.observation.split()[1] == lake.squares[square]
    assert step == Step("goal d4", 1.0, True, False)


@pytest.mark.parametrize("size", [3, 4, 6])
def test_no_map_is_in_both_splits(size: int) -> None:
    env = FrozenLake(size=size, hole_probability=0.3)
    train, held_out = ({env.map_of(task(i, split)) for i in range(1000)} for split in ("train", "eval"))
    assert train and held_out and not train & held_out


@pytest.mark.parametrize(("size", "hole_probability"), [(3, 0.3), (4, 0.3), (6, 0.4)])
def test_every_map_has_a_way_to_the_goal_and_the_expert_takes_a_shortest(
    size: int, hole_probability: float
) -> None:
    env = FrozenLake(size=size, hole_probability=hole_probability, max_turns=size * size)
    for index in range(100):
        env.reset(task(index, ("train", "eval")[index % 2]))
        lake = env.map_of(task(index, ("train", "eval")[index % 2]))
        steps = []
        while (action := env.expert_action(seed=index)) is not None:
            steps.append(env.step(action, index))
        assert steps[-1].terminated and steps[-1].reward == 1.0
        assert len(steps) == literal_distance(lake)


def literal_distance(lake: Lake) -> int:
    """Fewest moves from start to goal, found by spreading over the rows, as slow as it is plain."""
    size, reached, moves = len(lake.rows), {(0, 0)}, 0
    while (size - 1, size - 1) not in reached:
        spread = {(r + dr, c + dc) for r, c in reached for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        inside = {(r, c) for r, c in spread if 0 <= r < size and 0 <= c < size and lake.rows[r][c] != "H"}
        assert not inside <= reached, "no way to the goal"
        reached |= inside
        moves += 1
    return moves


def test_the_experts_choice_between_equal_ways_is_decided_by_its_seed() -> None:
    env = FrozenLake(hole_probability=0.0)
    env.reset(task(0))
    assert {env.expert_action(seed) for seed in range(20)} == {"down", "right"}
    assert env.expert_action(7) == env.expert_action(7)


def test_the_same_task_is_rebuilt_in_a_fresh_process_with_another_hash_seed() -> None:
    program = (
        "from common.nouns import TaskId; from envs.frozenlake import FrozenLake; env = FrozenLake(size=5)\n"
        "for i in range(5):\n"
        "    print(env.reset(TaskId(env='frozenlake', split='eval', index=i)), env.state_hash())\n"
        "    print(env.step('right', i), env.state_hash(), env.expert_action(i))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True, cwd=ROOT, timeout=60,
        ).stdout
        for hash_seed in ("0", "1")
    }  # fmt: skip
    assert len(answers) == 1 and len(answers.pop().splitlines()) == 10


def test_the_turn_limit_truncates_and_a_hole_or_the_goal_terminates_even_on_the_last_turn() -> None:
    env = FrozenLake(hole_probability=0.0, max_turns=6)
    env.reset(task(0))
    ends = [env.step("left", turn) for turn in range(6)]
    assert [step.truncated for step in ends] == [False] * 5 + [True]
    assert not any(step.terminated for step in ends) and ends[-1].observation == "late a1"
    env.reset(task(0))
    last = [env.step(action, 0) for action in ("down", "down", "down", "right", "right", "right")][-1]
    assert last == Step("goal d4", 1.0, True, False)


def test_falling_into_a_hole_terminates_without_reward_and_keeps_the_last_observation() -> None:
    env = FrozenLake(hole_probability=0.4)
    index = next(i for i in range(100) if env.map_of(task(i)).rows[0][1] == "H")
    env.reset(task(index))
    assert env.step("right", 0) == Step("fell b1", 0.0, True, False)
    assert env.process_score() == 0.0 and env.expert_action() is None


@pytest.mark.parametrize("text", ["", "jump", "right right", "rightdown", "<unk>", "<pad> right"])
def test_text_that_is_no_action_wastes_the_turn_and_moves_nothing(text: str) -> None:
    env = FrozenLake(hole_probability=0.0, max_turns=2)
    env.reset(task(0))
    assert env.step(text, 0) == Step("what at a1", 0.0, False, False)
    assert env.step(text, 0) == Step("what late a1", 0.0, False, True)


def test_an_action_is_understood_in_any_case_and_with_spaces_around_it() -> None:
    env = FrozenLake(hole_probability=0.0)
    env.reset(task(0))
    assert env.step("  Right\n", 0).observation == "at b1"


def test_a_finished_episode_takes_no_further_step_even_after_being_restored() -> None:
    env, fork = FrozenLake(max_turns=1), FrozenLake(max_turns=1)
    env.reset(task(0))
    env.step("nonsense", 0)
    fork.restore(env.snapshot())
    for finished in (env, fork):
        with pytest.raises(EnvironmentFault, match="without a running episode"):
            finished.step("down", 0)


def test_the_turn_is_part_of_the_state_because_it_decides_when_the_episode_is_cut() -> None:
    env = FrozenLake(hole_probability=0.0)
    env.reset(task(0))
    before = env.state_hash()
    env.step("left", 0)
    assert env.state_hash() != before


def test_the_progress_score_rises_along_the_experts_way_and_is_one_only_on_the_goal() -> None:
    env = FrozenLake(size=5, max_turns=30)
    env.reset(task(3))
    scores = [env.process_score()]
    while (action := env.expert_action()) is not None:
        env.step(action, 0)
        scores.append(env.process_score())
    numbers = [score for score in scores if score is not None]
    assert len(numbers) == len(scores) and numbers == sorted(set(numbers))
    assert numbers[0] >= 0.0 and numbers[-1] == 1.0


@pytest.mark.parametrize("slippery", [False, True])
def test_every_text_the_lake_can_say_is_in_its_own_vocabulary(slippery: bool) -> None:
    env = FrozenLake(size=5, is_slippery=slippery, max_turns=9)
    tokenizer = WordTokenizer.build(env.words)
    rng = random.Random(0)
    for index in range(100):
        texts = [env.reset(task(index)), *(step.observation for step in walk(env, rng, 20))]
        assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def test_a_snapshot_taken_under_other_rules_or_of_no_lake_is_refused() -> None:
    env = FrozenLake(is_slippery=True)
    env.reset(task(0))
    with pytest.raises(EnvironmentFault, match="is_slippery"):
        FrozenLake(is_slippery=False).restore(env.snapshot())
    with pytest.raises(EnvironmentFault, match="is not a lake"):
        env.restore(env.snapshot().replace(b"S", b"G", 1))
    with pytest.raises(EnvironmentFault, match="not one of its snapshots"):
        env.restore(b"\x00")


@pytest.mark.parametrize("options", [{"size": 2}, {"hole_probability": 0.9}, {"max_turns": 0}])
def test_options_that_make_no_lake_are_refused_with_the_key_and_the_rule(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"env.{next(iter(options))}="):
        FrozenLake(**options)  # type: ignore[arg-type]


def test_an_unknown_split_or_a_task_of_another_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="train, eval"):
        FrozenLake().reset(task(0, "test"))
    with pytest.raises(ConfigError, match="no task of frozenlake"):
        FrozenLake().reset(TaskId(env="maze", split="train", index=0))


def test_a_split_without_any_map_is_an_error_that_names_the_cause() -> None:
    env = FrozenLake(size=3, hole_probability=0.0)
    empty = "eval" if env.map_of(task(0)).rows == Lake.open(3).rows else "train"
    with pytest.raises(ConfigError, match="too few different maps"):
        env.reset(task(0, empty))
