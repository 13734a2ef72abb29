"""What is sampled, scored and described: always compared with transformers' plain forward pass."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines import batch as batch_module
from actors.engines.base import Generation, Ids, StopReason
from actors.engines.sampling import projection, uniforms
from actors.engines.torch_engine import TorchEngine
from common.errors import ConfigError, EngineError
from tests.actors.engines.tiny_models import (
    VOCAB,
    context_of,
    expected,
    plain_logprobs,
    request,
    run,
    running,
)

TOLERANCE = 1e-5


async def play(engine: TorchEngine, index: int, num_turns: int = 4) -> list[tuple[Ids, Generation]]:
    """One session of several turns with observations between them."""
    rng = np.random.default_rng(index)
    context, turns = context_of(int(rng.integers(3, 40)), index), []
    for turn in range(num_turns):
        wanted = request(f"s{index}", context, int(rng.integers(1, 6)), seed=100 * index + turn)
        generation = await engine.generate(wanted)
        turns.append((context, generation))
        observation = context_of(int(rng.integers(1, 8)), 1000 * index + turn)
        context = np.concatenate([context, generation.ids, observation])
    engine.release(f"s{index}")
    return turns


def check_turns(folder: Path, turns: list[tuple[Ids, Generation]]) -> None:
    for context, generation in turns:
        rows = plain_logprobs(folder, context, generation.ids)
        entropies = -(rows.exp() * rows).sum(-1).numpy()
        np.testing.assert_allclose(
            generation.logprobs, expected(folder, context, generation.ids), atol=TOLERANCE
        )
        np.testing.assert_allclose(generation.entropies, entropies, atol=TOLERANCE)
        assert len(generation.versions) == len(generation.ids)


def test_log_probabilities_over_ragged_turns_equal_a_plain_forward_pass(any_model: Path) -> None:
    async def scenario() -> None:
        async with running(any_model) as engine:
            sessions = await asyncio.gather(*(play(engine, index) for index in range(12)))
            counters = engine.counters()
        for turns in sessions:
            check_turns(any_model, turns)
        context_tokens = sum(len(context) for turns in sessions for context, _ in turns)
        assert counters["reused_tokens"] > context_tokens / 2
        assert counters["batch_mean"] > 2

    run(scenario())


def test_more_sessions_than_slots_evict_each_other_and_stay_exact(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama, max_batch=3, max_slots=4) as engine:
            sessions = await asyncio.gather(*(play(engine, index, num_turns=3) for index in range(9)))
        for turns in sessions:
            check_turns(llama, turns)

    run(scenario())


def test_a_step_limit_splits_work_and_changes_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "STEP_TOKENS", 20)

    async def scenario() -> None:
        async with running(llama) as engine:
            sessions = await asyncio.gather(*(play(engine, index, num_turns=2) for index in range(6)))
        for turns in sessions:
            check_turns(llama, turns)

    run(scenario())


def test_only_new_tokens_are_computed_in_the_second_turn(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            context = context_of(30)
            first = await engine.generate(request("s", context, 3))
            before = engine.counters()
            await engine.generate(request("s", np.concatenate([context, first.ids, context_of(5, 1)]), 1))
            after = engine.counters()
        # The last sampled token was never fed; with the observation that makes six.
        assert after["prefill_tokens"] - before["prefill_tokens"] == 6
        assert after["reused_tokens"] - before["reused_tokens"] == 32

    run(scenario())


def test_a_context_that_diverges_from_the_cache_is_computed_anew_from_there(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            context = context_of(30)
            await engine.generate(request("s", context))
            changed = context.copy()
            changed[10] = (changed[10] + 1) % VOCAB
            generation = await engine.generate(request("s", changed))
            assert engine.counters()["reused_tokens"] == 10
        check_turns(llama, [(changed, generation)])

    run(scenario())


def test_identical_contexts_are_prefilled_once(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            context = context_of(50)
            turns = await asyncio.gather(
                *(engine.generate(request(f"s{i}", context, 3, seed=i)) for i in range(8))
            )
            assert engine.counters()["prefill_tokens"] == 50 + 7
        check_turns(llama, [(context, turn) for turn in turns])

    run(scenario())


def test_a_sibling_starts_from_the_prefix_another_session_computed(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            context = context_of(40)
            first = await engine.generate(request("owner", context, 4))
            longer = np.concatenate([context, first.ids, context_of(6, 1)])
            await engine.generate(request("owner", longer, 4))
            before = engine.counters()["reused_tokens"]
            sibling = await engine.generate(request("sibling", context, 4, seed=5))
            assert engine.counters()["reused_tokens"] - before == 39
            branch = np.concatenate([context, first.ids, context_of(9, 2)])
            other = await engine.generate(request("late", branch, 4, seed=6))
        check_turns(llama, [(context, sibling), (branch, other)])

    run(scenario())


def test_greedy_takes_the_likeliest_token_at_any_temperature(any_model: Path) -> None:
    async def scenario() -> None:
        async with running(any_model, greedy=True) as engine:
            context = context_of(12)
            generation = await engine.generate(request("s", context, 8, temperature=0.0))
        best = plain_logprobs(any_model, context, generation.ids).argmax(-1)
        assert generation.ids.tolist() == best.tolist()
        check_turns(any_model, [(context, generation)])

    run(scenario())


def test_temperature_divides_logits_before_the_softmax(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            context = context_of(12)
            generation = await engine.generate(request("s", context, 8, temperature=0.5))
        want = expected(llama, context, generation.ids, temperature=0.5)
        np.testing.assert_allclose(generation.logprobs, want, atol=TOLERANCE)
        assert np.abs(want - expected(llama, context, generation.ids)).max() > 0.05

    run(scenario())


def test_a_stop_token_ends_the_turn_and_is_its_last_token(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            context = context_of(12)
            free = await engine.generate(request("a", context, 12, seed=3))
            assert free.stop_reason is StopReason.LENGTH and len(free.ids) == 12
            stop = int(free.ids[5])
            first = free.ids.tolist().index(stop)
            stopped = await engine.generate(request("b", context, 12, seed=3, stop_ids=(stop, 999)))
            assert stopped.stop_reason is StopReason.STOP
            assert stopped.ids.tolist() == free.ids[: first + 1].tolist()

    run(scenario())


def test_draws_do_not_depend_on_the_neighbours_in_the_batch(llama: Path) -> None:
    async def scenario() -> None:
        wanted = [request(f"s{i}", context_of(5 + 2 * i, i), 8, seed=i) for i in range(16)]
        async with running(llama) as engine:
            together = await asyncio.gather(*(engine.generate(one) for one in wanted))
        async with running(llama, max_batch=1) as engine:
            alone = [await engine.generate(one) for one in wanted]
        for one, other in zip(together, alone, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)

    run(scenario())


def test_each_token_inverts_the_cumulative_distribution_at_the_uniform_of_its_index(llama: Path) -> None:
    async def scenario() -> None:
        context, seed = context_of(12), 77
        async with running(llama) as engine:
            generation = await engine.generate(request("s", context, 10, seed=seed))
        rows = plain_logprobs(llama, context, generation.ids).double().exp().numpy()
        for index, (token, probs) in enumerate(zip(generation.ids.tolist(), rows, strict=True)):
            uniform = uniforms(np.array([seed], np.uint64), np.array([index], np.uint64))[0]
            assert probs[:token].sum() <= uniform + TOLERANCE
            assert probs[: token + 1].sum() > uniform - TOLERANCE

    run(scenario())


def test_drawn_tokens_follow_the_softmax(llama: Path) -> None:
    draws = 3000

    async def scenario() -> None:
        context = context_of(12)
        async with running(llama, max_batch=64, max_slots=128) as engine:
            turns = await asyncio.gather(
                *(engine.generate(request(f"s{i % 40}.{i}", context, 1, seed=i)) for i in range(draws))
            )
        counts = np.bincount([int(turn.ids[0]) for turn in turns], minlength=VOCAB)
        probs = plain_logprobs(llama, context, turns[0].ids)[0].exp().double().numpy()
        often = probs * draws >= 5
        observed = np.append(counts[often], counts[~often].sum())
        wanted = np.append(probs[often], probs[~often].sum()) * draws
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        freedom = len(wanted) - 1
        # Mean and variance of chi-square are k and 2k: four standard deviations with fixed seeds.
        assert statistic < freedom + 4 * np.sqrt(2 * freedom)

    run(scenario())


def test_scores_are_those_of_temperature_one_and_alter_no_session(any_model: Path) -> None:
    async def scenario() -> None:
        context, targets = context_of(20), context_of(7, 1)
        async with running(any_model) as engine:
            plain = await engine.generate(request("s", context, 4))
            follow = np.concatenate([context, plain.ids, context_of(3, 2)])
            scores, _, short = await asyncio.gather(
                engine.score(follow, targets),
                engine.generate(request("other", context_of(9, 3), 6)),
                engine.score(follow[:1], targets[:1]),
            )
            probed = await engine.generate(request("s", follow, 4, seed=1))
            assert (await engine.score(context, np.zeros(0, np.int32))).shape == (0,)
        async with running(any_model) as engine:
            await engine.generate(request("s", context, 4))
            unprobed = await engine.generate(request("s", follow, 4, seed=1))
        np.testing.assert_allclose(scores, expected(any_model, follow, targets), atol=TOLERANCE)
        np.testing.assert_allclose(short, expected(any_model, follow[:1], targets[:1]), atol=TOLERANCE)
        assert probed.ids.tolist() == unprobed.ids.tolist()
        check_turns(any_model, [(follow, probed)])

    run(scenario())


def test_features_are_the_projected_last_hidden_state_with_and_without_a_session(any_model: Path) -> None:
    hidden: dict[str, torch.Tensor] = {}

    def keep(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden["last"] = inputs[0][0, -1]

    async def scenario() -> None:
        from transformers import AutoModelForCausalLM

        context = context_of(20)
        async with running(any_model, features=6) as engine:
            first = await engine.generate(request("s", context, 3))
            longer = np.concatenate([context, first.ids, context_of(5, 1)])
            bare = await engine.features(longer)
            vector = await engine.features(longer, "s")
            before = engine.counters()["prefill_tokens"]
            again = await engine.generate(request("s", longer, 3))
            assert engine.counters()["prefill_tokens"] - before == 1
        model = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32).eval()
        model.get_output_embeddings().register_forward_pre_hook(keep)
        with torch.no_grad():
            model(torch.from_numpy(longer.astype(np.int64))[None])
        want = (hidden["last"] @ projection(32, 6)).numpy()
        assert bare is not None and vector is not None
        np.testing.assert_allclose(bare, want, atol=TOLERANCE)
        np.testing.assert_allclose(vector, want, atol=TOLERANCE)
        check_turns(any_model, [(longer, again)])

    run(scenario())


def test_an_engine_without_features_answers_none(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama, features=0) as engine:
            assert engine.capabilities.features == 0
            assert await engine.features(context_of(5)) is None

    run(scenario())


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"temperature": 0.0}, ConfigError, "temperature"),
        ({"temperature": float("nan")}, ConfigError, "temperature"),
        ({"new": 0}, ConfigError, "max_new_tokens"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"new": 120}, EngineError, "max_context"),
        ({"context": np.zeros(0, np.int32)}, EngineError, "non-empty"),
        ({"context": np.array([3, VOCAB], np.int32)}, EngineError, "ids from 0"),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone(
    llama: Path, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            good = request("good", context_of(10), 8)
            bad = request("bad", **{"context": context_of(10), **change})
            fine, failed = await asyncio.gather(
                engine.generate(good), engine.generate(bad), return_exceptions=True
            )
        assert isinstance(fine, Generation) and len(fine.ids) == 8
        assert isinstance(failed, error) and said in str(failed)

    run(scenario())


def test_a_second_turn_of_a_running_session_is_refused(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            first, second = await asyncio.gather(
                engine.generate(request("s", context_of(10), 20)),
                engine.generate(request("s", context_of(10), 20)),
                return_exceptions=True,
            )
        assert isinstance(first, Generation)
        assert isinstance(second, EngineError) and "one at a time" in str(second)

    run(scenario())
