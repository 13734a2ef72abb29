"""Policy lag: a version counts as an ancestor exactly when its weights are one."""

from hypothesis import given
from hypothesis import strategies as st

from common.nouns import Version
from common.staleness import INFINITELY_STALE, policy_lag

RESTARTS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), max_size=5)
"""(how far into the weights so far a lineage resumes, updates that it makes)."""


def test_within_a_lineage_the_lag_is_the_number_of_updates_since() -> None:
    assert policy_lag(Version(0, 8), Version(0, 5)) == 3
    assert policy_lag(Version(0, 8), Version(0, 8)) == 0


def test_a_later_lineage_than_the_current_one_is_infinitely_stale() -> None:
    assert policy_lag(Version(0, 8), Version(1, 8)) == INFINITELY_STALE


def test_a_lineage_abandoned_at_the_restart_before_the_last_stays_abandoned() -> None:
    # Lineage 0 ran to 10, lineage 1 resumed at 5 and ran to 8, where lineage 2 resumed.
    resumed = (0, 5, 8)
    assert policy_lag(Version(2, 8), Version(0, 7), resumed) == INFINITELY_STALE
    assert policy_lag(Version(2, 8), Version(0, 5), resumed) == 3
    assert policy_lag(Version(2, 9), Version(1, 8), resumed) == 1
    assert policy_lag(Version(2, 9), Version(1, 9), resumed) == INFINITELY_STALE


def test_without_word_of_every_restart_older_lineages_are_infinitely_stale() -> None:
    assert policy_lag(Version(2, 8), Version(0, 3), (0, 5)) == INFINITELY_STALE
    assert policy_lag(Version(2, 8), Version(2, 8), (0, 5)) == 0


@given(st.integers(0, 6), RESTARTS)
def test_after_any_restarts_a_lag_is_finite_exactly_for_the_weights_in_the_current_ones_past(
    first: int, restarts: list[tuple[float, int]]
) -> None:
    past = ["start"]
    """Weights by step: what the current ones were made from, and they themselves."""
    made, resumed = dict[Version, str](), list[int]()
    for lineage, (share, updates) in enumerate([(0.0, first), *restarts]):
        resumed.append(int(share * (len(past) - 1)))
        past = past[: resumed[-1] + 1]
        past += [f"{lineage}.{len(past) + more}" for more in range(updates)]
        made |= {Version(lineage, step): past[step] for step in range(resumed[-1], len(past))}
    now = Version(len(restarts), len(past) - 1)
    for version, weights in made.items():
        expected = now.step - version.step if weights in past else INFINITELY_STALE
        assert policy_lag(now, version, resumed) == expected
