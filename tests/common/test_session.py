"""The session with the allocator: nothing before the welcome, nothing lost, and whose silence it is."""

from __future__ import annotations

import logging

import pytest

from common.errors import ConfigError, PeerLost, ProtocolError
from common.messages import Bye, Durable, InspectFailed, Received, Revoke
from common.nouns import LeaseId
from common.session import RESEND_S, Timing
from tests.common.session_sides import PATIENT, Side, numbered, opened, talking, welcome, word

# --- what may be said ----------------------------------------------------------------------------------------


def test_hello_goes_first_and_everything_else_waits_for_the_welcome() -> None:
    side = opened(sends=2)
    side.session.post(side.session.encode(Bye(0, "x")))
    assert side.written() == ["Hello"]
    assert side.session.tick(1.0) and side.session.tick(2.0)
    assert side.written() == ["Hello"], "one at a time, as long as nothing gets through"
    side.session.heard(word(welcome()), 2.5)
    assert side.written() == [0, 1]
    side.send(2.5)
    assert side.written() == [2] and side.welcomes == [True]


def test_with_a_welcome_all_that_is_not_durable_goes_again_in_order() -> None:
    side = talking(sends=4)
    side.session.heard(word(Received([numbered(0), numbered(1)])), 0.5)
    side.session.heard(word(Durable([numbered(1)])), 0.5)
    side.session.open(1.0)
    side.send(1.0)
    assert side.written() == ["Hello"]
    side.session.heard(word(welcome()), 1.5)
    assert side.written() == [0, 2, 3, 4]
    assert side.session.undelivered == 4


def test_another_welcome_in_the_same_session_is_told_and_nothing_goes_again() -> None:
    side = talking(sends=2)
    side.session.greet()
    side.session.greet()
    assert side.written() == ["Hello"]
    side.session.heard(word(welcome()), 0.5)
    assert side.written() == [] and side.welcomes == [True, False]


def test_nothing_is_sent_to_an_allocator_whose_welcome_is_refused() -> None:
    side = opened(sends=2)
    side.written()
    side.refusal = ConfigError("other settings")
    with pytest.raises(ConfigError):
        side.session.heard(word(welcome()), 0.5)
    assert side.written() == [] and not side.session.welcomed


@pytest.mark.parametrize("role", ["actor", "learner"])
def test_another_run_is_refused_in_one_sentence_with_the_remedy(role: str) -> None:
    side = opened(run="mine", role=role, sends=1)
    side.written()
    sentence = (
        f"the allocator at tcp://there:1 now serves run 'another', this {role} belongs to 'mine'; "
        f"start a new {role} for the new run"
    )
    with pytest.raises(ProtocolError) as caught:
        side.session.heard(word(welcome("another")), 0.5)
    assert str(caught.value) == sentence
    assert side.written() == [] and side.welcomes == []


def test_an_allocator_of_another_release_is_refused_and_not_waited_for() -> None:
    """What it says cannot be read, and breaks the silence all the same."""
    side = opened(sends=1)
    with pytest.raises(ProtocolError) as caught:
        side.session.heard([b"TW\x00\x02", *word(welcome())[1:]], 0.5)
    assert str(caught.value) == (
        "the allocator at tcp://there:1: the peer speaks protocol 2, this process speaks 1: "
        "run the same release everywhere"
    )
    assert caught.value.exit_code == 5


def test_whoever_belongs_to_no_run_joins_the_first_and_stays_with_it() -> None:
    side = talking()
    assert side.session.run == "run"
    side.session.open(1.0)
    with pytest.raises(ProtocolError, match="belongs to 'run'"):
        side.session.heard(word(welcome("another"), "allocator/2"), 1.5)


def test_another_process_of_the_allocator_is_told_hello_and_then_everything() -> None:
    side = talking(sends=3)
    side.session.heard(word(Received([numbered(0)])), 0.25)
    side.send(0.25)
    side.session.heard(word(Received([]), "allocator/2"), 0.5)
    side.send(0.5)
    assert side.written() == ["Hello"], "what was still queued waits too"
    side.session.heard(word(welcome(), "allocator/2"), 0.75)
    assert side.written() == [0, 1, 2, 3, 4]
    side.session.heard(word(Durable([]), "allocator/2"), 1.0)
    assert side.written() == [] and side.session.sessions == 1


def test_a_caller_that_the_allocator_takes_for_a_stranger_begins_anew_and_once() -> None:
    side = talking(sends=2)
    side.session.heard(word(Received([])), 0.5)
    side.session.heard(word(Received([])), 0.5)
    side.send(0.5)
    assert side.written() == ["Hello"], "an answer to each message that was under way"
    side.session.heard(word(welcome()), 0.75)
    assert side.written() == [0, 1, 2] and side.welcomes == [True, True]


def test_a_welcome_that_bears_another_name_begins_the_session_by_itself() -> None:
    side = talking(sends=2)
    side.session.heard(word(welcome(), "allocator/2"), 0.5)
    assert side.written() == ["Hello", 0, 1] and side.welcomes == [True, True]


def test_what_is_no_matter_of_the_session_is_returned_and_may_be_answered_before_any_welcome() -> None:
    side = opened()
    side.written()
    goodbye = word(Bye(2, "env.size differs"))
    envelope = side.session.heard(goodbye, 0.5)
    assert envelope is not None and envelope.message == Bye(2, "env.size differs")
    side.session.answer(Durable([envelope.id]))
    assert side.written() == ["Durable"]
    revoke = Revoke(LeaseId(1, 2, 3), "too old")
    envelope = side.session.heard(word(revoke), 0.5)
    assert envelope is not None and envelope.message == revoke
    for own in (welcome(), Received([]), Durable([])):
        assert side.session.heard(word(own), 0.5) is None


# --- what goes again, and when -------------------------------------------------------------------------------


def test_heartbeats_flow_once_a_beat_and_not_behind_what_does_not_get_through() -> None:
    side = talking()
    assert side.session.patience(0.25) == 0.75
    side.session.tick(0.75)
    assert side.written() == []
    side.session.tick(1.0)
    assert side.written() == ["Heartbeat"] and side.session.patience(1.0) == 1.0
    side.send(1.5)
    for now in (2.0, 3.0):
        side.session.tick(now)
    assert side.written() == [0]


def test_no_hello_is_said_into_a_silence_since_its_answer_would_end_that_with_nothing_sent_again() -> None:
    side = talking()
    for beat in (1.0, 2.0, 3.0, 4.0):
        side.session.tick(beat)
        assert side.written() == ["Heartbeat"]


def test_a_welcome_sets_the_beat_and_a_life_has_four_at_least() -> None:
    side = opened(Timing(60.0, 60.0, 60.0))
    assert side.session.patience(0.0) == 15.0
    side.session.heard(word(welcome(timing=Timing(2.0, 4.0, 0.0))), 0.0)
    assert side.session.patience(0.0) == 1.0
    side.session.heard(word(welcome(timing=Timing(2.0, 40.0, 0.0))), 0.0)
    assert side.session.patience(0.0) == 2.0


def test_a_message_that_was_not_received_is_due_again_on_the_same_line() -> None:
    side = talking(PATIENT, sends=2)
    side.session.heard(word(Received([numbered(0)])), 0.25)
    side.session.tick(1.5)
    side.written()
    assert side.session.patience(1.5) == RESEND_S - 1.5
    side.session.tick(RESEND_S)
    assert side.written() == [1]
    side.session.open(3.0)
    assert side.session.patience(3.0) == 1.0, "without a welcome only Hello is due"
    side.session.tick(20.0)
    assert side.written() == ["Hello"]


def test_damaged_messages_are_counted_said_once_and_are_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    side = talking(sends=1)
    good = word(Durable([numbered(0)]))
    damaged = ([good[0], good[1], good[2][:-1]], [b"noise"], word(InspectFailed(1, "x")))
    with caplog.at_level(logging.WARNING, "treeward.session"):
        for count, now in enumerate((3.0, 6.0, 9.0)):
            assert side.session.heard(damaged[count], now) is None
            assert side.session.tick(now)
    assert side.session.bad_frames == 3 and side.session.undelivered == 1
    assert [record.getMessage()[:27] for record in caplog.records] == ["ignored a damaged message: "]


# --- silence -------------------------------------------------------------------------------------------------


def live(side: Side, first: float, last: float) -> list[float]:
    """Tick twice a beat after `first` up to `last`, with a new socket where one is due; when those were made."""
    made = []
    for half in range(round(2 * first) + 1, round(2 * last) + 1):
        if not side.session.tick(half / 2):
            made.append(half / 2)
            side.session.open(half / 2)
    return made


def test_silence_makes_a_new_socket_which_has_the_whole_time_again_and_then_the_peer_is_lost() -> None:
    side = talking()
    side.session.heard(word(Durable([])), 0.5)
    assert live(side, 0.5, 10.5) == [5.0, 9.5]
    with pytest.raises(PeerLost) as caught:
        side.session.tick(11.0)
    assert str(caught.value) == (
        "no allocator has answered at tcp://there:1 for 10 s (cluster.connect_timeout_s); "
        "start one there, or correct cluster.allocator"
    )
    assert caught.value.exit_code == 6


def test_an_idle_line_that_answers_is_kept() -> None:
    side = talking()
    for half in range(1, 100):
        if half % 6 == 0:
            side.session.heard(word(Durable([])), half / 2)
        assert side.session.tick(half / 2)


@pytest.mark.parametrize("seconds", [5.0, 60.0, 86400.0])
def test_a_process_that_was_stopped_heard_nothing_and_that_is_nobodys_silence(seconds: float) -> None:
    side = talking()
    side.session.tick(1.0)
    assert side.session.tick(1.0 + seconds), "no new socket, and nobody is lost"
    assert live(side, 1.0 + seconds, 6.0 + seconds) == [2.5 + seconds], "1 s before, 2 beats of the pause"


def test_a_pause_between_two_sockets_is_forgiven_as_well() -> None:
    side = opened()
    assert live(side, 0.0, 4.0) == []
    assert not side.session.tick(4.5)
    side.session.open(100.0)
    assert live(side, 100.0, 103.0) == [], "6.5 s of silence until here"
    assert live(side, 103.0, 103.5) == []


def test_a_new_socket_keeps_its_time_when_the_process_is_stopped_right_after_it_was_made() -> None:
    side = opened()
    assert live(side, 0.0, 4.5) == [4.5]
    assert side.session.tick(50.0)


def test_a_word_after_a_pause_does_not_hide_the_silence_that_follows() -> None:
    side = talking()
    side.session.heard(word(Durable([])), 60.0)
    assert live(side, 60.0, 64.5) == [64.5]
