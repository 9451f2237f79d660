from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import files
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InfeasibleProblemError, InvalidInputError
from routepack_opt.problem import Cluster, Problem
from routepack_opt.rows import RowCount

MLA = CostModel((OperatorClass("mla", Fraction(1, 3), Fraction(5, 7)), OperatorClass("kda", Fraction(2), Fraction(0))))


def counts_for(lengths: list[int], num_layers: int = 2, num_experts: int = 4) -> np.ndarray:
    """Every token to experts 0 and 1 + (layer % 3)."""
    counts = np.zeros((len(lengths), num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        counts[:, layer, 0] = lengths
        counts[:, layer, 1 + layer % 3] = lengths
    return counts


def make(lengths: list[int] | None = None, **changes: Any) -> Problem:
    lengths = [3, 5, 6, 2] if lengths is None else lengths
    values: dict[str, Any] = {"capacity": 8, "ep_size": 2, "cost": MLA, "counts": counts_for(lengths)} | changes
    return Problem.from_arrays(lengths, values.pop("counts"), **values)


class TestCluster:
    def test_sizes(self) -> None:
        cluster = Cluster.from_sizes(ep_size=4, dp_size=8, num_shards=2)
        assert (cluster.dp_size, cluster.num_shards, cluster.shard_size) == (8, 2, 4)
        assert cluster.shard_of_slot.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        assert Cluster.from_sizes(ep_size=4, num_shards=3).dp_size == 12

    @pytest.mark.parametrize(
        ("shards", "message"),
        [
            (((0, 1), (1, 2)), "DP slot 1 stands in shards 0, 1"),
            (((0, 1), (2,)), "one size"),
            (((0, 1), (3, 4)), "missing \\[2\\]"),
            ((), "at least one EDP shard"),
            (((),), "above 0"),
            (((-1, 0),), "out of range \\[-1\\]"),
            ("ab", "shard 0 holds 'a'"),
            (3, "must be lists"),
            (((0.9,), (1.2,)), "shard 0 holds 0.9"),
            (((False,), (True,)), "shard 0 holds False"),
        ],
    )
    def test_bad_shards(self, shards: Any, message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            Cluster(2, shards)

    def test_divisibility_names_both_numbers(self) -> None:
        with pytest.raises(InvalidInputError, match="dp_size 6 is not divisible by num_shards 4"):
            Cluster.from_sizes(ep_size=2, dp_size=6, num_shards=4)
        with pytest.raises(InvalidInputError, match="ep_size is 0"):
            Cluster.from_sizes(ep_size=0)

    def test_parallel_sizes(self) -> None:
        # 64 devices, TP 2, CP 2 -> 16 DP slots; EP 8 -> groups of 8 devices = 2 slots -> 8 shards.
        cluster = Cluster.from_parallel_sizes(64, tp=2, cp=2, ep=8)
        assert (cluster.dp_size, cluster.num_shards, cluster.shard_size, cluster.ep_size) == (16, 8, 2, 8)
        assert cluster.ep_size * 1 == cluster.shard_size * 2 * 2  # P·ETP = |D_g|·TP·CP
        with_pp = Cluster.from_parallel_sizes(64, pp=4, ep=8, etp=2)
        assert (with_pp.dp_size, with_pp.num_shards) == (16, 1)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"world_size": 10, "tp": 4}, "world_size 10 is not divisible by tp"),
            ({"world_size": 16, "ep": 3}, "not divisible by ep"),
            ({"world_size": 16, "tp": 4, "ep": 2}, "does not hold whole DP slots"),
            ({"world_size": 16, "tp": 0}, "tp is 0"),
        ],
    )
    def test_bad_parallel_sizes(self, sizes: dict[str, int], message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            Cluster.from_parallel_sizes(sizes.pop("world_size"), **sizes)


def test_work_is_exact() -> None:
    problem = make()
    for s, operator in enumerate(MLA.attention):
        for i, t in enumerate(problem.lengths.tolist()):
            cost = operator.alpha * Fraction(t, 8) + operator.beta * Fraction(t * t, 64)
            assert problem.attention_work[s, i] == cost * problem.unit_denominator
    assert Fraction(problem.expert_unit, problem.unit_denominator) == Fraction(1, 8)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.integers(50, 70),
    st.lists(st.tuples(st.fractions(0, 9, max_denominator=12), st.fractions(0, 9, max_denominator=12)), max_size=3),
)
def test_units_reproduce_rational_cost(lengths: list[int], capacity: int, classes: list[Any]) -> None:
    cost = CostModel(tuple(OperatorClass(f"s{k}", a, b) for k, (a, b) in enumerate(classes)))
    problem = make(lengths, capacity=capacity, cost=cost)
    for s, operator in enumerate(cost.attention):
        for i, t in enumerate(lengths):
            exact = operator.alpha * Fraction(t, capacity) + operator.beta * Fraction(t * t, capacity**2)
            assert Fraction(int(problem.attention_work[s, i]), problem.unit_denominator) == exact
    assert Fraction(problem.expert_unit, problem.unit_denominator) == Fraction(1, capacity)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 5}, "sample 2: length 6 is above the capacity C = 5"),
        ({"capacity": 7, "length_alignment": 4}, "length 5 \\(aligned to 4: 8\\)"),
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 8.0}, "capacity is 8.0"),
        ({"ep_size": 3}, "4 experts are not divisible by ep_size 3"),
        ({"dp_size": 3, "num_shards": 2}, "dp_size 3 is not divisible by num_shards 2"),
        ({"num_rows": 1, "dp_size": 1}, "num_rows = 1 is too few: 16 tokens are above the 8"),
        ({"num_rows": 0}, "num_rows is 0"),
        ({"num_rows": True}, "num_rows is True"),
        ({"length_alignment": 0}, "length_alignment is 0"),
        ({"min_samples_per_cell": 2}, "min_samples_per_cell is 2"),
        ({"min_samples_per_cell": 1, "dp_size": 8}, "4 samples for 8 cells"),
        ({"equal_samples_per_slot": True, "dp_size": 3}, "4 is not divisible by 3"),
        ({"cost": "ling-3.0-tiny"}, "counts have 2 MoE layers, the preset 'ling-3.0-tiny' has 23"),
        ({"cost": "olmo"}, "unknown cost preset"),
        ({"cost": 3}, "cost is 3"),
        ({"counts": None, "cost": None}, "nothing to balance"),
        ({"shards": [[0, 1]], "dp_size": 2}, "shards stands beside dp_size"),
        ({"prove_rows": -1}, "prove_rows is -1"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make(**changes)


def test_faults_of_batch_and_cluster_come_together() -> None:
    with pytest.raises(InvalidInputError) as caught:
        make([3, 0, 6, 2], ep_size=2, dp_size=5, num_shards=2)
    text = str(caught.value)
    assert "sample 1: length 0" in text
    assert "dp_size 5" in text


def test_infeasible_is_a_proof() -> None:
    for changes in ({"capacity": 5}, {"num_rows": 1, "dp_size": 1}):
        with pytest.raises(InfeasibleProblemError):
            make(**changes)
    # 3 samples of 5 need 3 cells of 8 though their sum fits 2.
    with pytest.raises(InfeasibleProblemError, match="need at least 3 cells"):
        make([5, 5, 5], num_rows=1, dp_size=2)


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_capacities_around_a_power_of_two(offset: int) -> None:
    capacity = 1024 + offset
    problem = make([capacity, capacity, 1], capacity=capacity, dp_size=1)
    assert problem.num_rows == 3
    assert problem.rows.proven


def test_overflow_is_refused_before_it_happens() -> None:
    fine = CostModel((OperatorClass("a", Fraction(1, 2**30 - 35), Fraction(1, 2**29 - 3)),))
    with pytest.raises(InvalidInputError, match=r"reaches 2\^62"):
        make([2**20, 2**20], capacity=2**20 + 7, cost=fine)


def test_alignment_counts_for_rows_and_not_for_work() -> None:
    plain, aligned = make(dp_size=1), make(dp_size=1, length_alignment=8)
    assert plain.num_rows == 2
    assert aligned.num_rows == 4
    assert np.array_equal(plain.attention_work, aligned.attention_work)
    assert aligned.aligned_lengths.tolist() == [8, 8, 8, 8]


def test_round_trip_and_fingerprint(tmp_path: Path) -> None:
    problem = make(sample_ids=["a", "b", "c", "d"], group_ids=[0, 0, 1, 1], num_shards=2, length_alignment=2)
    path = tmp_path / "p.npz"
    problem.save(path)
    back = Problem.load(path)
    assert back.fingerprint == problem.fingerprint
    assert back.batch.sample_ids == ("a", "b", "c", "d")
    assert np.array_equal(back.counts, problem.counts)
    assert back.cost.attention == problem.cost.attention
    assert repr(back) == repr(problem).replace("given", back.rows.method)
    path2 = tmp_path / "q.npz"
    back.save(path2)
    assert Problem.load(path2).fingerprint == problem.fingerprint


def rewrite(path: Path, **arrays: Any) -> None:
    """Change arrays of a problem file; None drops one."""
    with np.load(path) as archive:
        kept = {name: archive[name] for name in archive.files}
    kept |= {name: value if isinstance(value, np.ndarray) else np.array(value) for name, value in arrays.items()}
    files.write_npz(path, {name: array for name, array in kept.items() if array.dtype != object})


def test_fingerprint_sees_what_matters() -> None:
    problem = make()
    same = make(counts=counts_for([3, 5, 6, 2]).astype(np.uint32), sample_ids=list("abcd"))
    assert same.fingerprint == problem.fingerprint
    others = [
        make([3, 5, 6, 3]),
        make(capacity=9),
        make(num_rows=7),
        make(cost=None),
        make(num_shards=2, dp_size=2),
        make(length_alignment=2),
        make(min_samples_per_cell=1),
        make(equal_samples_per_slot=True),
    ]
    assert len({other.fingerprint for other in [problem, *others]}) == len(others) + 1


def test_null_rows_and_absent_options_are_resolved_when_read(tmp_path: Path) -> None:
    problem = make()
    arrays = {
        "lengths": problem.lengths,
        "counts": problem.counts,
        "spec": np.array(
            json.dumps(
                {
                    "schema": "routepack-problem/1",
                    "capacity": 8,
                    "num_rows": None,
                    "ep_size": 2,
                    "shards": [[0, 1]],
                    "attention": [
                        {"name": "mla", "alpha": "1/3", "beta": "5/7"},
                        {"name": "kda", "alpha": "2", "beta": "0"},
                    ],
                }
            )
        ),
    }
    files.write_npz(tmp_path / "p.npz", arrays)
    assert Problem.load(tmp_path / "p.npz").fingerprint == problem.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "routepack-problem/2"}, "routepack-problem/2"),
        ({"capacity": "8"}, r"spec\.capacity"),
        ({"capcity": 8}, r"spec\.capcity"),
        ({"shards": [[0, 0]]}, "stands in shards|missing"),
        ({"attention": [{"name": "x", "alpha": "1/0", "beta": "0"}]}, "alpha '1/0'"),
        ({"attention": [{"name": "x", "alpha": "nan", "beta": "0"}]}, "alpha 'nan'"),
        ({"attention": [{"name": "x", "alpha": "-1", "beta": "0"}]}, "at least 0"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.npz"
    make().save(path)
    with np.load(path) as archive:
        spec = json.loads(str(archive["spec"]))
    rewrite(path, spec=json.dumps(spec | change), row_count=None)
    with pytest.raises(InvalidInputError, match=message):
        Problem.load(path)


#: Five bins of ten are enough by every simple bound, six are needed.
SHORT_OF_A_BOUND = [4] * 7 + [3] * 7


def short_of_a_bound(**changes: Any) -> Problem:
    return make(SHORT_OF_A_BOUND, capacity=10, dp_size=1, **changes)


def test_a_row_proof_survives_the_file(tmp_path: Path) -> None:
    proven = short_of_a_bound(prove_rows=20.0)
    assert (proven.rows.num_rows, proven.rows.bound, proven.rows.stored) == (6, 6, False)
    path, again = tmp_path / "p.npz", tmp_path / "q.npz"
    proven.save(path)
    back = Problem.load(path)
    assert back.rows == RowCount(6, 6, proven.rows.method, proven.rows.bound_method, stored=True)
    assert back.rows.proven
    assert "as stored" in repr(back.rows)
    assert back.fingerprint == proven.fingerprint
    back.save(again)
    assert again.read_bytes() == path.read_bytes()
    assert back.replace(min_samples_per_cell=1).rows == back.rows
    assert Problem.load(path, prove_rows=20.0).rows == proven.rows
    rewrite(path, row_count=None)
    bare = Problem.load(path)
    assert (bare.rows.num_rows, bare.rows.bound, bare.rows.method, bare.rows.proven) == (6, 5, "given", False)
    assert bare.fingerprint == proven.fingerprint
    assert Problem.load(path, prove_rows=20.0).rows.bound == 6


def test_what_the_simple_bounds_show_is_no_matter_of_belief(tmp_path: Path) -> None:
    problem, path = make(), tmp_path / "p.npz"
    problem.save(path)
    assert Problem.load(path).rows == problem.rows
    stated = {"num_rows": problem.num_rows, "bound": 0, "method": "hearsay", "bound_method": "none"}
    with np.load(path) as archive:
        stated["proves"] = json.loads(str(archive["row_count"]))["proves"]
    rewrite(path, row_count=json.dumps(stated))
    weaker = Problem.load(path).rows
    assert weaker == RowCount(problem.num_rows, problem.rows.bound, "hearsay", problem.rows.bound_method)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bound": 7}, "row bound 7 above the rows found 6"),
        ({"bound": -1}, "bound is -1"),
        ({"bound": "6"}, r"row_count\.bound"),
        ({"bound": 6.0}, r"row_count\.bound"),
        ({"bound": True}, r"row_count\.bound"),
        ({"num_rows": 7}, "row_count is about 7 rows, spec.num_rows is 6"),
        ({"proves": "sha256:0"}, "belongs to other lengths"),
        ({"witness": 1}, r"row_count\.witness"),
        ({"method": "x" * 1000}, r"row_count\.method"),
    ],
)
def test_row_counts_that_contradict_the_file_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.npz"
    short_of_a_bound(num_rows=6).save(path)
    with np.load(path) as archive:
        stated = json.loads(str(archive["row_count"]))
    rewrite(path, row_count=json.dumps(stated | change))
    with pytest.raises(InvalidInputError, match=message):
        Problem.load(path)


def test_a_row_count_of_another_batch_or_no_json_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "p.npz", tmp_path / "q.npz"
    short_of_a_bound(num_rows=6).save(path)
    make([4] * 6 + [3] * 8, capacity=10, dp_size=1, num_rows=6).save(other)
    with np.load(other) as archive:
        foreign = archive["row_count"]
    rewrite(path, row_count=foreign)
    with pytest.raises(InvalidInputError, match="belongs to other lengths"):
        Problem.load(path)
    for value in (np.array("{"), np.array([1, 2])):
        rewrite(path, row_count=value)
        with pytest.raises(InvalidInputError, match="row_count is no JSON"):
            Problem.load(path)


def test_a_given_row_count_is_held_against_the_lengths() -> None:
    with pytest.raises(InfeasibleProblemError, match="num_rows = 1 is too few"):
        make(num_rows=RowCount(1, 1, "a", "b"), dp_size=1)
    with pytest.raises(InfeasibleProblemError, match="at least 6 cells"):
        short_of_a_bound(num_rows=5, prove_rows=20.0)
    with pytest.raises(InvalidInputError, match="limit of 10000000 cells"):
        make(num_rows=RowCount(10**9, 2, "a", "b"))
    with pytest.raises(InvalidInputError, match="num_rows is 0"):
        RowCount(0, 0, "a", "b")


def test_replace_derives_again() -> None:
    lengths = [30, 50, 60, 20]
    counts = np.zeros((4, 16, 64), dtype=np.uint16)
    counts[:, :, :8] = np.array(lengths)[:, None, None]
    problem = Problem.from_arrays(lengths, counts, capacity=64, ep_size=8, dp_size=2, cost="olmoe-1b-7b")
    wide = problem.replace(capacity=128)
    assert wide.cost.attention[0].beta == 2 * problem.cost.attention[0].beta
    assert wide.num_rows <= problem.num_rows
    assert problem.replace(num_rows=9).num_rows == 9
    assert problem.replace(min_samples_per_cell=1).num_rows == problem.num_rows
    with pytest.raises(InvalidInputError, match="depend on the capacity"):
        make().replace(capacity=16)
    assert make().replace(capacity=16, cost=MLA).capacity == 16


def test_window_of_micro_steps() -> None:
    load = np.array([[[3, 1, 0, 0], [1, 1, 1, 1]], [[0, 0, 0, 0], [0, 0, 0, 0]], [[2, 2, 2, 2], [8, 0, 0, 0]]])
    problem = Problem.from_window(load, ep_size=2)
    assert (problem.num_samples, problem.num_rows, problem.num_layers) == (2, 2, 2)
    with pytest.raises(InvalidInputError, match="micro-step 0: layer 1 routed 5"):
        Problem.from_window(load + np.eye(4, dtype=int)[0] * np.array([0, 1])[:, None], ep_size=2)
    with pytest.raises(InvalidInputError, match="no routed token"):
        Problem.from_window(load * 0, ep_size=2)
    with pytest.raises(InvalidInputError, match="< 0"):
        Problem.from_window(-load, ep_size=2)


def test_packing_only_problem() -> None:
    problem = make(counts=None)
    assert (problem.num_layers, problem.num_experts) == (0, 0)
    assert problem.attention_work.shape == (2, 4)


def test_construction_without_validation_is_refused() -> None:
    problem = make()
    with pytest.raises(TypeError, match="from_arrays"):
        Problem(problem.batch, problem.cluster, problem.cost, 8, problem.rows)
