from __future__ import annotations

import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.data.schedule import PlanSchedule
from hvd_hetero.errors import BatchAccountingError, ConfigurationError
from hvd_hetero.planning.plan import Plan


def plan(version: int) -> Plan:
    return Plan(version, (version + 1, 1), "made up")


def draw(schedule: PlanSchedule) -> int:
    """Draw once; returns the version of the plan that applied."""
    return schedule.draw(schedule.drawn).version


def test_a_plan_applies_from_its_cursor_on() -> None:
    """S48: sizes follow the plan by the documented delay, here one draw that a peer is ahead."""
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    assert [draw(schedule) for _ in range(2)] == [0, 0]
    schedule.install(plan(1), (0, 3))
    assert schedule.latest.version == 1
    assert [draw(schedule) for _ in range(3)] == [0, 1, 1]


def test_a_plan_may_start_in_a_later_pass() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    schedule.install(plan(1), (1, 1))
    assert [draw(schedule) for _ in range(5)] == [0] * 5
    assert schedule.begin_pass() == (1, 0)
    assert [draw(schedule) for _ in range(2)] == [0, 1]


def test_a_second_plan_at_the_same_cursor_replaces_the_first() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    schedule.install(plan(1), (0, 1))
    schedule.install(plan(2), (0, 1))
    assert [draw(schedule) for _ in range(2)] == [0, 2]


def test_what_is_drawn_cannot_change_any_more() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    draw(schedule)
    draw(schedule)
    with pytest.raises(ConfigurationError, match=r"plan 1 .*\(0, 1\).*\(0, 2\).*maximum"):
        schedule.install(plan(1), (0, 1))
    schedule.install(plan(1), (0, 5))
    with pytest.raises(ConfigurationError, match=r"\(0, 5\)"):
        schedule.install(plan(2), (0, 4))


def test_only_the_newest_pass_draws() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    schedule.begin_pass()
    with pytest.raises(BatchAccountingError, match=r"pass 0 .* pass 1"):
        schedule.draw((0, 0))
    assert schedule.drawn == (1, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.just("draw"), st.just("pass"), st.integers(0, 4)), max_size=60))
def test_against_a_plain_table(actions: list[str | int]) -> None:
    """Pruned entries never matter, and only few are kept."""
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    table = [((0, 0), 0)]
    for version, action in enumerate(actions, start=1):
        if action == "pass":
            schedule.begin_pass()
        elif action == "draw":
            cursor = schedule.drawn
            expected = [v for effective, v in table if effective <= cursor][-1]
            assert draw(schedule) == expected
        else:
            number, step = schedule.drawn
            effective = max((number, step + int(action)), table[-1][0])
            table.append((effective, version))
            schedule.install(plan(version), effective)
            assert schedule.latest.version == version
    ahead = {effective for effective, _ in table if effective > schedule.drawn}
    assert len(schedule._entries) <= len(ahead) + 1


def test_a_forgotten_plan_is_an_error() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    schedule.install(plan(1), (0, 1))
    draw(schedule)
    draw(schedule)
    with pytest.raises(LookupError, match=r"\(0, 0\)"):
        schedule.plan_at((0, 0))


def test_nobody_draws_during_an_agreement() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    drawn: list[int] = []
    thread = threading.Thread(target=lambda: drawn.append(draw(schedule)))
    with schedule.agreement() as held:
        thread.start()
        thread.join(timeout=0.1)
        assert thread.is_alive() and not drawn
        held.install(plan(1), held.drawn)
    thread.join(timeout=10)
    assert drawn == [1]


def test_a_copy_in_another_process_has_its_own_lock() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.begin_pass()
    draw(schedule)
    schedule.install(plan(1), (0, 2))
    with schedule.agreement():
        copy = pickle.loads(pickle.dumps(schedule))
        thread = threading.Thread(target=draw, args=(copy,))
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert (copy.drawn, schedule.drawn) == ((0, 2), (0, 1))
    assert draw(copy) == 1


# ---- replay and resume --------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 12), max_size=4, unique=True).map(sorted),
    st.data(),
)
def test_foreseen_plans_apply_to_the_same_draws_however_late_they_come(
    cursors: list[int], data: st.DataObject
) -> None:
    """A rank that runs further ahead than in the recorded run draws what was drawn there."""
    plans = [((0, cursor), plan(version)) for version, cursor in enumerate(cursors, start=1)]
    schedule = PlanSchedule(plan(0))
    schedule.foresee(plans)
    schedule.begin_pass()
    drawn = []
    left = list(plans)
    while len(drawn) < 15:
        if left and data.draw(st.booleans()):
            effective, next_plan = left.pop(0)
            schedule.install(next_plan, effective)
            assert schedule.latest == next_plan
        drawn.append(draw(schedule))
    assert drawn == [sum(cursor <= step for cursor in cursors) for step in range(15)]


def test_a_foreseen_plan_is_the_latest_once_it_is_installed() -> None:
    schedule = PlanSchedule(plan(0))
    schedule.foresee([((0, 1), plan(1)), ((0, 2), plan(2))])
    schedule.begin_pass()
    assert [draw(schedule) for _ in range(4)] == [0, 1, 2, 2]
    assert schedule.latest.version == 0
    with pytest.raises(ConfigurationError, match="drawn up to"):
        schedule.install(plan(2), (0, 2))  # not the next one
    schedule.install(plan(1), (0, 1))
    assert schedule.latest.version == 1
    assert draw(schedule) == 2
    schedule.install(plan(2), (0, 2))
    assert (schedule.latest.version, draw(schedule)) == (2, 2)
    copy = pickle.loads(pickle.dumps(schedule))
    assert (copy.entries, draw(copy)) == (schedule.entries, 2)


def test_plans_for_loaders_of_ones_own_are_not_drawn_before_their_time() -> None:
    """Where nothing is drawn by a sampler all plans apply from the first draw on."""
    schedule = PlanSchedule(plan(0))
    schedule.foresee([((0, 0), plan(1)), ((0, 0), plan(2))])
    assert schedule.plan_at(schedule.drawn).version == 0
    for version in (1, 2):
        schedule.install(plan(version), (0, 0))
        assert schedule.plan_at(schedule.drawn).version == version


def test_what_cannot_be_foreseen_is_refused() -> None:
    schedule = PlanSchedule(plan(0))
    with pytest.raises(ConfigurationError, match="order"):
        schedule.foresee([((0, 2), plan(1)), ((0, 1), plan(2))])
    schedule.begin_pass()
    draw(schedule)
    draw(schedule)
    schedule.foresee([((0, 0), plan(0)), ((0, 2), plan(1))])
    with pytest.raises(ConfigurationError, match=r"from \(0, 1\).*drawn up to \(0, 2\)"):
        schedule.foresee([((0, 1), plan(1))])


@pytest.mark.parametrize(("goes_on", "first"), [(True, (3, 4)), (False, (4, 0))])
def test_cursors_are_counted_on_from_those_of_an_earlier_job(
    goes_on: bool, first: tuple[int, int]
) -> None:
    schedule = PlanSchedule(plan(0))
    schedule.go_on_from((3, 4))
    schedule.install(plan(1), (3, 4))
    schedule.go_on_from((3, 4))  # loaded again
    assert schedule.begin_pass(goes_on=goes_on) == first
    assert draw(schedule) == 1
    assert schedule.begin_pass() == (first[0] + 1, 0)
    with pytest.raises(ConfigurationError, match="before the first pass"):
        schedule.go_on_from((3, 4))
