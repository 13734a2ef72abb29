import asyncio
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.evaluate import (
    EvalResult,
    evaluate_tasks,
    newest_model,
    run_eval,
    wilson,
)
from common.config import Config, EnvConfig, EvalConfig, ModelConfig, TrackingConfig
from common.errors import EngineError, StorageError
from common.nouns import TaskId, Version
from common.rundir import RunDir
from common.tokenizer import WordTokenizer
from envs.lake_map import Lake
from tests.actors.fakes import ACTIONS, FakeEngine, Policy, lake, make_tools, make_world, random_walk

CONFIG = lake(max_turns=12)
TOKENIZER = WordTokenizer.build(make_world(CONFIG).words)
EMPTY = Lake.open(4)


def read(context: list[int]) -> tuple[Lake, int]:
    """Map and square, from the tokens alone, as a trained model would have to."""
    words = TOKENIZER.decode(context).split()
    holes = {EMPTY.squares.index(word) for word in words[2 : words.index("goal")]}
    letters = ["H" if number in holes else letter for number, letter in enumerate("".join(EMPTY.rows))]
    text = "".join(letters)
    here = [word for word in words if word in EMPTY.squares][-1]
    return Lake(tuple(text[row * 4 : row * 4 + 4] for row in range(4))), EMPTY.squares.index(here)


def say(action: str) -> list[int]:
    return [*TOKENIZER.encode(action), TOKENIZER.end_id]


def trained_by_hand(context: list[int], seed: int) -> list[int]:
    """Always a shortest way."""
    board, square = read(context)
    return say(ACTIONS[board.best_actions(square)[0]])


def only_two_holes_or_fewer(context: list[int], seed: int) -> list[int]:
    """Plays maps with few holes well and stands still on the others."""
    board, _ = read(context)
    return trained_by_hand(context, seed) if len(board.holes) <= 2 else say("up")


def result_of(policy: Policy, count: int = 40, config: EnvConfig = CONFIG, seed: int = 0) -> EvalResult:
    tasks = [TaskId("frozenlake", "eval", index) for index in range(count)]
    return asyncio.run(evaluate_tasks(make_tools(FakeEngine(policy), config), tasks, seed))


def test_a_policy_that_knows_the_way_reaches_every_goal_in_as_few_turns_as_possible() -> None:
    result = result_of(trained_by_hand)
    assert result.success == 1.0 and [episode.task for episode in result.episodes] == list(range(40))
    world = make_world(CONFIG)
    for episode in result.episodes:
        world.reset(TaskId("frozenlake", "eval", episode.task))
        assert episode.turns == world._lake.distances[0]  # type: ignore[attr-defined]
        assert (episode.ending, episode.tokens) == ("terminated", 2 * episode.turns)


def test_a_policy_that_stands_still_is_truncated_everywhere() -> None:
    result = result_of(lambda context, seed: say("up"))
    assert result.success == 0.0
    assert {(episode.ending, episode.turns) for episode in result.episodes} == {("truncated", 12)}


def test_a_policy_that_knows_some_maps_succeeds_on_exactly_those() -> None:
    world = make_world(CONFIG)
    easy = []
    for index in range(40):
        world.reset(TaskId("frozenlake", "eval", index))
        if len(world._lake.holes) <= 2:  # type: ignore[attr-defined]
            easy.append(index)
    result = result_of(only_two_holes_or_fewer)
    assert 0 < len(easy) < 40
    assert [episode.task for episode in result.episodes if episode.success] == easy
    assert result.success == len(easy) / 40


def test_equal_seeds_give_equal_episodes_and_others_other_luck() -> None:
    walk, ice = random_walk(TOKENIZER), lake(is_slippery=True)
    assert result_of(walk, config=ice) == result_of(walk, config=ice)
    assert result_of(walk, config=ice) != result_of(walk, config=ice, seed=1)


def test_a_session_is_released_after_its_episode() -> None:
    engine = FakeEngine(trained_by_hand)
    tasks = [TaskId("frozenlake", "eval", index) for index in range(5)]
    asyncio.run(evaluate_tasks(make_tools(engine, CONFIG), tasks, 0))
    assert sorted(engine.released) == sorted(map(str, tasks))


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
    ):
        assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_stays_within_zero_and_one(case: tuple[int, int]) -> None:
    successes, trials = case
    low, high = wilson(successes, trials)
    assert 0.0 <= low <= successes / trials + 1e-12 and successes / trials - 1e-12 <= high <= 1.0


# -------------------------------------------------------------------------------------- files of a run


def put_model(folder: Path, mark: str = "m") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 256}')
    (folder / "model.safetensors").write_text(mark)
    (folder / "tokenizer.json").write_text(TOKENIZER.to_json())
    return folder


def put_checkpoint(run: RunDir, step: int) -> Path:
    folder = put_model(run.checkpoints / f"step-{step:08d}", str(step))
    entries = {p.name: {"sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))
    return folder


def config_of(**changes: Any) -> Config:
    tracking = TrackingConfig(enabled=False)
    return Config(**{"env": CONFIG, "tracking": tracking, "eval": EvalConfig(tasks=20), **changes})


def test_the_newest_checkpoint_whose_bytes_are_right_is_taken_else_the_warm_start(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    with pytest.raises(StorageError, match="neither a checkpoint nor a warm start"):
        newest_model(config_of(), run)
    elsewhere = put_model(tmp_path / "elsewhere")
    assert newest_model(config_of(model=ModelConfig(path=str(elsewhere))), run) == elsewhere
    warm = put_model(run.warmstart / "model")
    assert newest_model(config_of(), run) == warm
    old, new, torn = (put_checkpoint(run, step) for step in (9, 10, 11))
    (torn / "model.safetensors").write_text("torn")
    assert newest_model(config_of(), run) == new
    (new / "manifest.json").unlink()
    assert newest_model(config_of(), run) == old


def test_an_evaluation_writes_its_results_and_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create(tmp_path, "r")
    checkpoint = put_checkpoint(run, 12)
    engines = {False: only_two_holes_or_fewer, True: trained_by_hand}
    monkeypatch.setattr(
        "actors.evaluate.build_engine", lambda config, folder, greedy: FakeEngine(engines[greedy])
    )
    faulty = config_of(env=lake(max_turns=12, faults=0.5))
    assert run_eval(faulty, run) == 0
    found = json.loads(run.eval_file("step-00000012").read_text())
    rate = found["sampled"]["success"]
    low, high = wilson(round(20 * rate), 20)
    assert found["greedy"]["success"] == 1.0 and 0 < rate < 1
    assert (found["sampled"]["low"], found["sampled"]["high"]) == pytest.approx((low, high))
    assert len(found["sampled"]["per_task"]) == found["sampled"]["tasks"] == 20
    assert capsys.readouterr().out == (
        f"held-out success sampled {rate:.2f} [{low:.2f}, {high:.2f}], greedy 1.00 [0.84, 1.00] "
        f"(20 tasks, {checkpoint})\n"
    )


def test_a_folder_without_a_model_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    folder = put_model(tmp_path / "half")
    (folder / "model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"lacks model\.safetensors"):
        run_eval(config_of(eval=EvalConfig(checkpoint=str(folder))), run)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_named_checkpoint_must_have_the_bytes_that_its_manifest_says(tmp_path: Path, name: str) -> None:
    run = RunDir.create(tmp_path, "r")
    folder = put_checkpoint(run, 12)
    with (folder / name).open("a") as file:
        file.write(" ")
    with pytest.raises(StorageError, match=r"step-00000012 is damaged: its files are not .*manifest\.json"):
        run_eval(config_of(eval=EvalConfig(checkpoint=str(folder))), run)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_is_no_model_is_a_fault_of_its_folder_and_not_a_bug(tmp_path: Path, name: str) -> None:
    folder = put_model(tmp_path / "odd")
    (folder / name).write_bytes(b"\x93 no such thing")
    with pytest.raises(StorageError, match=r"the model in \S+odd cannot be evaluated: ") as error:
        run_eval(config_of(eval=EvalConfig(checkpoint=str(folder))), RunDir.create(tmp_path, "r"))
    assert error.value.exit_code == 4


def test_a_model_of_another_size_than_its_weights_is_a_fault_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(FakeEngine):
        async def load_weights(self, version: Version, directory: Path) -> None:
            raise EngineError("tensor lm_head.weight has shape [8, 4]; expected [16, 4]")

    engine = Picky(trained_by_hand)
    monkeypatch.setattr("actors.evaluate.build_engine", lambda config, folder, greedy: engine)
    folder = put_model(tmp_path / "other")
    with pytest.raises(StorageError, match=r"other cannot be evaluated: tensor lm_head\.weight"):
        run_eval(config_of(eval=EvalConfig(checkpoint=str(folder))), RunDir.create(tmp_path, "r"))
    assert engine.dead, "it is closed all the same"


def test_success_on_tasks_of_training_is_not_called_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create(tmp_path, "r")
    put_checkpoint(run, 1)
    monkeypatch.setattr(
        "actors.evaluate.build_engine", lambda config, folder, greedy: FakeEngine(trained_by_hand)
    )
    assert run_eval(config_of(eval=EvalConfig(tasks=2, split="train")), run) == 0
    assert capsys.readouterr().out.startswith("success on the split train sampled 1.00")


def test_the_tasks_of_an_evaluation_are_not_those_of_training() -> None:
    world = make_world(CONFIG)
    rng = random.Random(0)
    trained = {world.map_of(TaskId("frozenlake", "train", rng.randrange(10**6))) for _ in range(300)}  # type: ignore[attr-defined]
    held_out = {world.map_of(TaskId("frozenlake", "eval", index)) for index in range(100)}  # type: ignore[attr-defined]
    assert not trained & held_out
