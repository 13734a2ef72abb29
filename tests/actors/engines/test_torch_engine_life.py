"""Turns that are aborted, engines that die, and the deterministic mode."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.base import Generation, StopReason
from actors.engines.packed_model import PackedModel
from actors.engines.torch_engine import TorchEngine
from common.errors import ConfigError, EngineError
from tests.actors.engines.tiny_models import (
    V0,
    V1,
    context_of,
    request,
    run,
    running,
    same,
    sampled,
)

# --------------------------------------------------------------------------- aborts, deaths, ends


def test_abort_answers_with_the_tokens_so_far_and_leaves_the_others_alone(llama: Path) -> None:
    async def scenario() -> None:
        context = context_of(10)
        async with running(llama) as engine:
            whole = await engine.generate(request("whole", context, 100, seed=7))
            victim = asyncio.create_task(engine.generate(request("victim", context, 100, seed=7)))
            other = asyncio.create_task(engine.generate(request("other", context_of(9, 1), 40)))
            await sampled(engine, 110)
            engine.abort("victim")
            engine.abort("nobody")
            cut = await victim
            assert cut.stop_reason is StopReason.ABORTED
            assert 0 < len(cut.ids) < 100
            assert cut.ids.tolist() == whole.ids[: len(cut.ids)].tolist()
            assert len(cut.logprobs) == len(cut.entropies) == len(cut.versions) == len(cut.ids)
            assert (await other).stop_reason is StopReason.LENGTH
            again = await engine.generate(request("victim", context, 100, seed=7))
            assert again.ids.tolist() == whole.ids.tolist()

    run(scenario())


def test_a_turn_waiting_for_a_place_can_be_aborted_or_released(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama, max_batch=1) as engine:
            long = asyncio.create_task(engine.generate(request("long", context_of(5), 120)))
            await sampled(engine, 1)
            aborted = asyncio.create_task(engine.generate(request("a", context_of(5))))
            released = asyncio.create_task(engine.generate(request("b", context_of(5))))
            await asyncio.sleep(0)
            engine.abort("a")
            engine.release("b")
            for turn in (await aborted, await released):
                assert turn.stop_reason is StopReason.ABORTED and len(turn.ids) == 0
            assert len((await long).ids) == 120

    run(scenario())


def test_cancelling_the_call_frees_the_session(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            turn = asyncio.create_task(engine.generate(request("s", context_of(5), 120)))
            await sampled(engine, 3)
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            assert len((await engine.generate(request("s", context_of(5), 4))).ids) == 4

    run(scenario())


def test_the_event_loop_goes_on_while_the_engine_works(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            turn = asyncio.create_task(engine.generate(request("s", context_of(5), 100)))
            beats = 0
            while not turn.done():
                await asyncio.sleep(0)
                beats += 1
        assert beats > 100

    run(scenario())


def test_a_dead_worker_fails_pending_and_later_calls_with_its_cause(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    forward = PackedModel.forward

    def failing(self: PackedModel, *args: Any) -> torch.Tensor:
        if next(calls) >= 5:
            raise MemoryError("no memory left for this test")
        return forward(self, *args)

    async def scenario() -> None:
        async with running(llama, max_batch=2) as engine:
            monkeypatch.setattr(PackedModel, "forward", failing)
            ends = await asyncio.gather(
                *(engine.generate(request(f"s{i}", context_of(5), 50)) for i in range(4)),
                engine.score(context_of(5), context_of(3)),
                return_exceptions=True,
            )
            later: list[Callable[[], Any]] = [
                lambda: engine.generate(request("later", context_of(5))),
                lambda: engine.features(context_of(5)),
                lambda: engine.load_weights(V1, llama),
            ]
            for call in later:
                with pytest.raises(EngineError, match="no memory left"):
                    await call()
            engine.abort("s0")
            engine.release("s0")
        for end in ends:
            assert isinstance(end, EngineError)
            assert "no memory left" in str(end) and isinstance(end.__cause__, MemoryError)

    run(scenario())


def test_logits_that_are_not_finite_fail_their_turn_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PackedModel.forward

    def poisoned(self: PackedModel, plan: Any, outputs: Any) -> torch.Tensor:
        logits = forward(self, plan, outputs)
        long_rows = np.diff(plan.ends, prepend=0) > 20
        logits[torch.from_numpy(long_rows)] = torch.nan
        return logits

    async def scenario() -> None:
        async with running(llama) as engine:
            monkeypatch.setattr(PackedModel, "forward", poisoned)
            fine, failed = await asyncio.gather(
                engine.generate(request("fine", context_of(5), 6)),
                engine.generate(request("failed", context_of(40), 6)),
                return_exceptions=True,
            )
        assert isinstance(fine, Generation) and len(fine.ids) == 6
        assert isinstance(failed, EngineError) and "not finite" in str(failed)

    run(scenario())


def test_closing_ends_pending_and_later_calls_and_may_be_repeated(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama) as engine:
            turn = asyncio.create_task(engine.generate(request("s", context_of(5), 120)))
            await sampled(engine, 1)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await turn
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(request("s", context_of(5)))
            with pytest.raises(EngineError):
                await engine.load_weights(V1, llama)
            await engine.close()

    run(scenario())


# ----------------------------------------------------------------------------- deterministic mode


def test_deterministic_results_do_not_depend_on_what_else_was_asked(any_model: Path) -> None:
    wanted = [request(f"s{i % 4}.{i}", context_of(6 + 3 * i, i % 3), 5, seed=i) for i in range(8)]

    async def answers(order: list[int], extra: bool) -> dict[int, Generation]:
        async with running(any_model, deterministic=True) as engine:
            assert engine.capabilities.reproducible
            tasks: dict[int, asyncio.Task[Generation]] = {}
            others: list[asyncio.Task[Any]] = []
            for index in order:
                tasks[index] = asyncio.create_task(engine.generate(wanted[index]))
                if extra:
                    asked = wanted[index]
                    others.append(asyncio.create_task(engine.score(asked.context, context_of(4))))
                    others.append(asyncio.create_task(engine.features(asked.context, asked.session)))
                await asyncio.sleep(0)
            await asyncio.gather(*others)
            return {index: await task for index, task in tasks.items()}

    first = run(answers(list(range(8)), extra=False))
    shuffled = list(range(8))
    random.Random(0).shuffle(shuffled)
    second = run(answers(shuffled, extra=True))
    assert all(same(first[index], second[index]) for index in range(8))


def test_deterministic_turns_reuse_nothing_and_belong_to_one_version(llama: Path, other_llama: Path) -> None:
    async def scenario() -> None:
        context = context_of(20)
        async with running(llama, deterministic=True) as engine:
            turn = asyncio.create_task(engine.generate(request("s", context, 60)))
            await sampled(engine, 2)
            swap = asyncio.create_task(engine.load_weights(V1, other_llama))
            first = await turn
            await swap
            longer = np.concatenate([context, first.ids, context_of(3, 1)])
            second = await engine.generate(request("s", longer, 5))
            assert engine.counters()["reused_tokens"] == 0
            assert engine.counters()["batch_mean"] == 1
        assert set(first.versions) == {V0} and set(second.versions) == {V1}

    run(scenario())


def test_equal_seeds_draw_equally_and_others_do_not(llama: Path) -> None:
    async def scenario() -> None:
        async with running(llama, deterministic=True) as engine:
            base = request("s", context_of(10), 20, seed=2**64 - 1)
            one = await engine.generate(base)
            other = await engine.generate(dataclasses.replace(base, session="t"))
            third = await engine.generate(dataclasses.replace(base, seed=2**64 - 2))
        assert same(one, other)
        assert one.ids.tolist() != third.ids.tolist()

    run(scenario())


@pytest.mark.parametrize(
    "options", [{"max_batch": 0}, {"max_batch": 4, "max_slots": 3}, {"threads": 2, "deterministic": True}]
)
def test_impossible_options_are_config_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TorchEngine(**options)
