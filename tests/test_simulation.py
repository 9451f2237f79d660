"""Simulated step times by hand, admission schedules against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate
from routepack_opt.simulation import JointStages, Stages, Trainer, sensitivity, simulate

seconds = st.one_of(st.integers(0, 10).map(float), st.floats(0, 100, allow_nan=False))


def hand_problem() -> Problem:
    """Capacity 10, P = 2, two shards of one slot each, two rows; experts 0 and 1 on ranks 0 and 1; no attention.

    Sample 0 sends 6 and 4 tokens, sample 1 2 and 6, sample 2 5 and 0, sample 3 0 and 3.
    """
    counts = np.array([[[6, 4]], [[2, 6]], [[5, 0]], [[0, 3]]])
    return Problem.from_arrays([10, 8, 5, 3], counts, top_k=1, capacity=10, ep_size=2, dp_size=2, num_shards=2)


def hand_plan(problem: Problem) -> Plan:
    """Rows x shards: sample 0 | sample 1, sample 2 | sample 3: peaks 6 | 6, 5 | 3 tokens."""
    return Plan.from_arrays(problem, [0, 0, 1, 1], [0, 1, 0, 1])


def random_case(seed: int) -> tuple[Problem, Plan]:
    rng = np.random.default_rng(seed)
    num_shards, shard_size, ep_size = (int(rng.integers(1, 3)) for _ in range(3))
    num_samples, num_rows = 12, 3
    lengths = rng.integers(2, 40, num_samples)
    counts = np.zeros((num_samples, 2, 4), dtype=np.int64)
    for i, length in enumerate(lengths):
        for layer in range(2):
            counts[i, layer] = rng.multinomial(length, rng.dirichlet(np.ones(4)))
    problem = Problem.from_arrays(
        lengths,
        counts,
        top_k=1,
        capacity=1024,
        ep_size=ep_size,
        dp_size=num_shards * shard_size,
        num_shards=num_shards,
        num_rows=num_rows,
    )
    plan = Plan.from_arrays(
        problem, rng.integers(0, num_rows, num_samples), rng.integers(0, problem.dp_size, num_samples)
    )
    return problem, plan


# --- step time ------------------------------------------------------------------------------------------------------


def test_shards_accumulate_independently_and_meet_once() -> None:
    problem = hand_problem()
    timeline = simulate(problem, hand_plan(problem), Trainer(seconds_per_unit=10.0, fixed_seconds=2.0))
    # J = peak / C; shard 0: 6 + 5, shard 1: 6 + 3 tokens.
    assert timeline.step_time == pytest.approx(11 + 2)
    assert timeline.start.tolist() == pytest.approx(np.array([[0, 0], [6, 6]]))
    assert timeline.end.tolist() == pytest.approx(np.array([[6, 6], [11, 9]]))
    assert timeline.shard_time == pytest.approx([11, 9])
    assert timeline.throughput == pytest.approx(26 / 13)
    assert not timeline.approximate


def test_busy_and_waiting_time_of_every_rank_by_hand() -> None:
    problem = hand_problem()
    timeline = simulate(problem, hand_plan(problem), Trainer(seconds_per_unit=10.0))
    assert timeline.num_devices == 2
    assert timeline.rank_of_device.tolist() == [0, 1]
    assert timeline.slot_of_device.tolist() == [0, 0]
    assert timeline.expert_busy == pytest.approx(np.array([[[6, 4], [2, 6]], [[5, 0], [0, 3]]], dtype=float))
    assert not timeline.attention_busy.any()
    assert timeline.busy_share == pytest.approx(26 / (11 * 2 * 2))
    frame = timeline.to_frame()
    assert len(frame) == 8
    line = frame[(frame["shard"] == 1) & (frame["ep_rank"] == 1) & (frame["row"] == 1)].iloc[0]
    assert (line["start"], line["expert_busy"], line["end"]) == pytest.approx((6, 3, 9))


def test_row_lockstep_waits_for_the_slowest_shard_of_every_row() -> None:
    problem = hand_problem()
    # Rows 6 | 3 and 5 | 6: independent max(11, 9), lockstep 6 + 6.
    plan = Plan.from_arrays(problem, [0, 1, 1, 0], [0, 1, 0, 1])
    assert simulate(problem, plan, Trainer(seconds_per_unit=10.0)).step_time == pytest.approx(11)
    rows = simulate(problem, plan, Trainer(seconds_per_unit=10.0, synchronization="row"))
    assert rows.step_time == pytest.approx(12)
    assert rows.start.tolist() == pytest.approx(np.array([[0, 0], [6, 6]]))


def test_pipeline_bubble_is_the_proportionate_flow_shop() -> None:
    problem = hand_problem()
    plan = hand_plan(problem)
    timeline = simulate(problem, plan, Trainer(seconds_per_unit=10.0, pipeline_stages=2))
    # Shard 0: (6 + 5) / 2 + 1 * 6 / 2; shard 1: (6 + 3) / 2 + 6 / 2.
    assert timeline.bubble == pytest.approx([3, 3])
    assert timeline.shard_time == pytest.approx([8.5, 7.5])
    assert timeline.step_time == pytest.approx(8.5)
    assert timeline.approximate
    assert "approximation" in repr(timeline)

    def flow_shop(tasks: list[float], stages: int) -> float:
        done = [0.0] * (stages + 1)
        for task in tasks:
            for stage in range(stages):
                done[stage + 1] = max(done[stage + 1], done[stage] if stage else 0.0) + task
        return done[stages]

    for stages in (1, 2, 3, 5):
        step = simulate(problem, plan, Trainer(seconds_per_unit=10.0, pipeline_stages=stages)).step_time
        exact = max(flow_shop([6 / stages, 5 / stages], stages), flow_shop([6 / stages, 3 / stages], stages))
        assert step == pytest.approx(exact)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_step_time_is_the_first_level_and_lockstep_is_never_faster(seed: int) -> None:
    problem, plan = random_case(seed)
    score = evaluate(problem, plan)
    step = simulate(problem, plan)
    assert step.step_time == pytest.approx(score.values[0])
    assert step.shard_time.sum() == pytest.approx(score.values[1])
    assert (step.end - step.start).max() == pytest.approx(score.values[2])
    rows = simulate(problem, plan, Trainer(synchronization="row"))
    assert rows.step_time >= step.step_time - 1e-12
    # No device computes longer than its row lasts, and some device per row, shard and phase never waits per layer.
    assert (step.attention_busy <= (step.attention_end - step.start)[:, :, None] + 1e-12).all()
    assert (step.expert_busy <= (step.end - step.attention_end)[:, :, None] + 1e-12).all()
    assert 0 < step.busy_share <= 1 + 1e-12


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**16), st.floats(0.0, 0.95), st.floats(0.01, 1000.0))
def test_calibrated_trainer_gives_the_reference_its_time_and_its_fixed_share(
    seed: int, fixed_share: float, step_time: float
) -> None:
    problem, plan = random_case(seed)
    trainer = Trainer().calibrate(problem, plan, step_time=step_time, fixed_share=fixed_share)
    timeline = simulate(problem, plan, trainer)
    assert timeline.step_time == pytest.approx(step_time)
    assert timeline.fixed_seconds == pytest.approx(fixed_share * step_time)
    relative = Trainer().calibrate(problem, plan, fixed_share=fixed_share)
    assert relative.seconds_per_unit == 1.0
    again = simulate(problem, plan, relative)
    assert again.fixed_seconds == pytest.approx(fixed_share * again.step_time)


def test_fixed_time_dilutes_the_gain() -> None:
    problem = hand_problem()
    together = Plan.from_arrays(problem, [0, 0, 1, 1], [0, 1, 0, 0])  # shards 6 + 5 and 6 tokens
    reference = Plan.from_arrays(problem, [0, 1, 1, 0], [0, 0, 1, 1])  # shard 0: 6 + 6 = 12 tokens
    assert simulate(problem, together).gain_over(simulate(problem, reference)) == pytest.approx(12 / 11 - 1)
    half = Trainer().calibrate(problem, reference, fixed_share=0.5)
    assert simulate(problem, together, half).gain_over(simulate(problem, reference, half)) == pytest.approx(24 / 23 - 1)


def test_noise_is_seeded_shared_between_plans_and_has_mean_one() -> None:
    problem, plan = random_case(1)
    exact = simulate(problem, plan)
    noisy = simulate(problem, plan, noise=0.1, seed=3)
    assert noisy.step_time == simulate(problem, plan, noise=0.1, seed=3).step_time
    assert noisy.step_time != simulate(problem, plan, noise=0.1, seed=4).step_time
    assert noisy.step_time != exact.step_time
    used = (exact.end - exact.start) > 0
    factors = ((noisy.end - noisy.start)[used]) / ((exact.end - exact.start)[used])
    draws = np.random.default_rng(3).standard_normal(used.shape)[used]
    assert factors == pytest.approx(np.exp(0.1 * draws - 0.005))
    totals = [simulate(problem, plan, noise=0.3, seed=seed).shard_time.sum() for seed in range(400)]
    assert np.mean(totals) == pytest.approx(exact.shard_time.sum(), rel=0.03)


def test_devices_cover_slots_and_ranks_when_their_numbers_differ() -> None:
    lengths = [4, 6, 2]
    counts = np.array([[[1, 1, 1, 1]], [[3, 1, 1, 1]], [[0, 2, 0, 0]]])
    problem = Problem.from_arrays(lengths, counts, top_k=1, capacity=8, ep_size=2, dp_size=3, num_rows=1)
    timeline = simulate(problem, Plan.from_arrays(problem, [0, 0, 0], [0, 1, 2]))
    assert timeline.num_devices == 6
    assert timeline.slot_of_device.tolist() == [0, 0, 1, 1, 2, 2]
    assert timeline.rank_of_device.tolist() == [0, 0, 0, 1, 1, 1]


def test_bad_simulation_input_is_reported_at_once() -> None:
    problem = hand_problem()
    with pytest.raises(InvalidInputError) as caught:
        simulate(problem, Plan.from_arrays(problem, [0, 0, 0, 1], [0, 0, 1, 1]), noise=-1.0, seed=-2)
    text = str(caught.value)
    assert "noise is -1.0" in text
    assert "seed is -2" in text
    assert "above the capacity 10" in text
    with pytest.raises(InvalidInputError) as caught:
        Trainer(seconds_per_unit=0.0, fixed_seconds=math.nan, synchronization="rows", pipeline_stages=0)
    assert len(caught.value.faults) == 4
    assert "did you mean 'row'" in str(caught.value)
    with pytest.raises(InvalidInputError, match="below 1"):
        Trainer().calibrate(problem, hand_plan(problem), fixed_share=1.0)


# --- admission ------------------------------------------------------------------------------------------------------


def test_admission_by_hand_with_hidden_packing() -> None:
    stages = Stages(placement=1.0, packing=2.0, auxiliary=4.0, actor=3.0, admission=0.5)
    assert stages.target == 7.5
    assert stages.packing_hidden
    assert stages.slack == 4.0
    schedule = stages.schedule()
    assert schedule.total == 7.5
    assert schedule.critical_path == ("auxiliary", "actor", "admission")
    assert schedule.exposed == 0.0
    assert schedule.task("packing").slack == 4.0
    assert schedule.task("placement").slack == 3.0
    assert (schedule.task("actor").start, schedule.task("actor").end) == (4.0, 7.0)
    assert schedule.to_frame()["critical"].sum() == 3


def test_admission_by_hand_with_exposed_packing() -> None:
    stages = Stages(placement=1.0, packing=7.0, auxiliary=4.0, actor=3.0, admission=0.5)
    assert stages.target == 8.5
    assert not stages.packing_hidden
    assert stages.slack == -1.0
    assert stages.packing_budget == 6.0
    schedule = stages.schedule()
    assert schedule.critical_path == ("placement", "packing", "admission")
    assert schedule.exposed == 1.0
    assert schedule.task("actor").slack == 1.0


def test_joint_planning_holds_the_actor_up() -> None:
    joint = JointStages(planning=6.0, auxiliary=4.0, actor=3.0, admission=0.5)
    assert joint.target == 9.5
    assert joint.slack == -2.0
    assert joint.schedule().critical_path == ("planning", "actor", "admission")
    assert joint.schedule().exposed == 2.0


@settings(max_examples=100, deadline=None)
@given(seconds, seconds, seconds, seconds, seconds)
def test_graph_and_closed_form_agree(
    placement: float, packing: float, auxiliary: float, actor: float, admission: float
) -> None:
    stages = Stages(placement, packing, auxiliary, actor, admission)
    schedule = stages.schedule()
    assert schedule.total == pytest.approx(stages.target)
    durations = {"placement": placement, "packing": packing, "auxiliary": auxiliary} | {
        "actor": actor,
        "admission": admission,
    }
    assert sum(durations[name] for name in schedule.critical_path) == pytest.approx(schedule.total)
    # The sufficient condition keeps packing off the longest chain: only the placement can still delay admission.
    if stages.packing_hidden:
        assert schedule.total == pytest.approx(max(placement, auxiliary) + actor + admission)
    without = max(0.0, auxiliary) + actor + admission
    assert schedule.exposed == pytest.approx(schedule.total - without, abs=1e-9)
    assert schedule.task("packing").slack == pytest.approx(max(0.0, stages.slack), abs=1e-9)
    joint = JointStages(placement + packing, auxiliary, actor, admission)
    assert joint.schedule().total == pytest.approx(joint.target)
    # The same planning time spent jointly is never admitted earlier.
    assert joint.target >= stages.target - 1e-9


@settings(max_examples=50, deadline=None)
@given(seconds, seconds, seconds, seconds, seconds, st.floats(0.001, 10))
def test_a_task_late_by_its_slack_delays_nothing_and_by_more_does(
    placement: float, packing: float, auxiliary: float, actor: float, admission: float, late: float
) -> None:
    stages = Stages(placement, packing, auxiliary, actor, admission)
    schedule = stages.schedule()
    for task in schedule.tasks:
        duration = getattr(stages, task.name)
        on_time = sensitivity(stages, task.name, [duration + task.slack, duration + task.slack + late])
        assert on_time.total[0] == pytest.approx(schedule.total)
        assert on_time.total[1] == pytest.approx(schedule.total + late)


def test_sensitivity_to_packing_has_its_knee_at_the_budget() -> None:
    stages = Stages(placement=1.0, packing=2.0, auxiliary=4.0, actor=3.0, admission=0.5)
    result = sensitivity(stages, "packing", [0.0, 6.0, 7.0, 9.0])
    assert result.total.tolist() == [7.5, 7.5, 8.5, 10.5]
    assert result.exposed.tolist() == [0.0, 0.0, 1.0, 3.0]
    assert result.slack.tolist() == [6.0, 0.0, -1.0, -3.0]
    # A placement longer than the auxiliary work delays the actor although packing has slack.
    placement = sensitivity(stages, "placement", [0.0, 4.0, 5.0])
    assert placement.exposed.tolist() == [0.0, 0.0, 1.0]
    assert placement.slack.tolist() == [4.0, 0.0, -1.0]
    # Longer auxiliary work gives the placement room, up to where packing decides.
    auxiliary = sensitivity(stages, "auxiliary", [0.0, 1.0, 3.0])
    assert auxiliary.exposed.tolist() == [1.0, 0.0, 0.0]
    assert auxiliary.slack.tolist() == [-1.0, 0.0, 2.0]
    with pytest.raises(InvalidInputError, match="did you mean 'packing'"):
        sensitivity(stages, "packin", [1.0])


def test_measured_stages_feed_the_schedule_and_joint_runs_are_refused() -> None:
    stages = Stages.from_measured({"placement": 0.1, "packing": 1.9}, auxiliary=5.0, actor=1.0, admission=0.2)
    assert stages.target == pytest.approx(6.2)
    with pytest.raises(InvalidInputError, match="JointStages"):
        Stages.from_measured({"plan": 2.0}, auxiliary=5.0, actor=1.0, admission=0.2)


def test_bad_durations_are_reported_at_once() -> None:
    with pytest.raises(InvalidInputError) as caught:
        Stages(placement=-1.0, packing=math.inf, auxiliary=math.nan, actor="1", admission=0.0)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 4
