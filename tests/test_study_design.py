"""A design is refused as a whole, with the nearest names, before anything runs; or it is a list of distinct jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from routepack_opt.errors import InvalidInputError
from routepack_opt.problem import Problem
from routepack_opt.study.design import Design
from routepack_opt.testing import tiny_problem

HEAD = 'schema = "routepack-study/1"\nname = "s"\niteration_limit = 100\n'
SYNTHETIC = """
[[problems]]
synthetic = true
num_samples = 8
capacity = 4096
ep_size = 2
routing = { num_layers = 2, num_experts = 4, top_k = 2, num_blocks = 2 }
lengths = { mean = 500, most = 2000 }
"""
FFD = '\n[[planners]]\nspec = "contiguous+ffd"\n'


def load(tmp_path: Path, text: str) -> Design:
    path = tmp_path / "design.toml"
    path.write_text(text, encoding="utf-8")
    return Design.load(path)


def faults_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(InvalidInputError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_lists_are_crossed_and_labelled(tmp_path: Path) -> None:
    text = SYNTHETIC.replace("num_samples = 8", "num_samples = [8, 12]").replace("top_k = 2", "top_k = [1, 2]")
    design = load(tmp_path, HEAD + "seeds = 3\n" + text + FFD)
    assert [case.label for case in design.cases] == [
        "synthetic, num samples 8, top k 1",
        "synthetic, num samples 8, top k 2",
        "synthetic, num samples 12, top k 1",
        "synthetic, num samples 12, top k 2",
    ]
    assert len(design.jobs) == 4 * 3
    assert len({job.key for job in design.jobs}) == 12
    problems = [case.build()[0] for case in design.cases]
    assert [(problem.num_samples, problem.top_k) for problem in problems] == [(8, 1), (8, 2), (12, 1), (12, 2)]


def test_keys_depend_on_what_decides_a_run_and_on_nothing_else(tmp_path: Path) -> None:
    base = load(tmp_path, HEAD + SYNTHETIC + FFD).jobs[0].key
    renamed = HEAD.replace('"s"', '"t"') + SYNTHETIC + "name = 'other'\n" + FFD + 'name = "label"\n'
    assert load(tmp_path, renamed).jobs[0].key == base
    for changed in (
        HEAD.replace("100", "101") + SYNTHETIC + FFD,
        HEAD + "num_threads = 2\n" + SYNTHETIC + FFD,
        HEAD + "seeds = [1]\n" + SYNTHETIC + FFD,
        HEAD + SYNTHETIC.replace("4096", "4097") + FFD,
        HEAD + SYNTHETIC + FFD.replace("ffd", "round_robin"),
    ):
        assert load(tmp_path, changed).jobs[0].key != base


def test_vary_crosses_component_parameters(tmp_path: Path) -> None:
    planner = """
[[planners]]
spec = "lpt+annealing"
name = "annealing"
vary = { routing_weight = [0, 1], "packer.num_chains" = [2, 4], refine = [true] }
"""
    jobs = load(tmp_path, HEAD + SYNTHETIC + planner).jobs
    assert len({job.planner for job in jobs}) == 4
    assert jobs[0].label == "annealing, routing weight 0, num chains 2"
    assert jobs[0].parameters["packer"]["num_chains"] == 2
    assert jobs[0].parameters["placer"]["refine"] is True
    assert jobs[3].parameters["packer"]["routing_weight"] == 1


def test_every_fault_is_named_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    text = HEAD + 'sedes = 3\n[[problems]]\nfamily = "tiny-low"\ncapcity = 3\n' + FFD + "vari = {}\n"
    message = faults_of(tmp_path, text)
    assert "'sedes'; did you mean 'seeds'" in message
    assert "problems[0]: unknown key 'capcity'; did you mean 'capacity'" in message
    assert "planners[0]: unknown key 'vari'; did you mean 'vary'" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + SYNTHETIC + '[[planners]]\nspec = "contigous+ffd"\n', "did you mean 'contiguous'"),
        (HEAD + SYNTHETIC + '[[planners]]\nspec = "lpt+annealing(num_chain=3)"\n', "did you mean 'num_chains'"),
        (HEAD + SYNTHETIC + FFD + "vary = { refin = [true] }\n", "unknown parameter of contiguous+ffd 'refin'"),
        (HEAD + SYNTHETIC + '[[planners]]\nspec = "lpt+annealing"\nvary = { num_chains = [0] }\n', "num_chains"),
        (HEAD + SYNTHETIC + '[[planners]]\nspec = "lpt+annealing"\nvary = { num_chains = [] }\n', "lists no value"),
        (HEAD + '[[problems]]\nfamily = "tinny-low"\n' + FFD, "did you mean 'tiny-low'"),
        (HEAD + '[[problems]]\nfamily = "tiny-low"\nrouting = { sampel_sd = 1 }\n' + FFD, "'sample_sd'"),
        (HEAD + '[[problems]]\nfamily = "tiny-low"\ntrace = true\n' + FFD, "family and trace; exactly one"),
        (HEAD + "[[problems]]\nnum_samples = 3\n" + FFD, "no source"),
        (HEAD + "[[problems]]\nsynthetic = true\n" + FFD, "capacity is needed"),
        (HEAD + '[[problems]]\nfile = "nowhere.npz"\n' + FFD, "nowhere.npz does not exist"),
        (HEAD + "[[problems]]\ntrace = true\nstep = 2\n" + FFD, "step changes nothing for the source trace"),
        (HEAD + "[[problems]]\ntrace = true\nmissing_share = 1\n" + FFD, "missing_share is 1"),
        (HEAD + "[[problems]]\ntrace = true\nextra_rows = -1\n" + FFD, "extra_rows is -1"),
        (HEAD + '[[problems]]\ntrace = true\nknowledge = "previous_step"\n' + FFD, "needs a generated source"),
        (HEAD + SYNTHETIC + 'knowledge = "previous_step"\n' + FFD, "needs step of at least 1"),
        (HEAD + SYNTHETIC + 'cost = "ling-3.0-flsh"\n' + FFD, "did you mean 'ling-3.0-flash'"),
        (HEAD + SYNTHETIC + 'cost = [{ name = "a", alpha = "1/0", beta = 1 }]\n' + FFD, "cost"),
        (HEAD + "[[problems]]\nplanted = { num_row = 3 }\n" + FFD, "did you mean 'num_rows'"),
        (HEAD + "seeds = 0\n" + SYNTHETIC + FFD, "seeds is 0"),
        (HEAD + "seeds = [1, 1]\n" + SYNTHETIC + FFD, "more than once"),
        (HEAD + "seeds = [-1]\n" + SYNTHETIC + FFD, "seeds are at least 0"),
        (HEAD + "num_threads = 0\n" + SYNTHETIC + FFD, "num_threads is 0"),
        (HEAD.replace("100", "0") + SYNTHETIC + FFD, "iteration_limit is 0"),
        (HEAD.replace("iteration_limit = 100", "time_limit = 0.0") + SYNTHETIC + FFD, "time_limit is 0.0"),
        (HEAD.replace("iteration_limit = 100", "") + SYNTHETIC + FFD, "neither time_limit nor iteration_limit"),
        (HEAD + SYNTHETIC + FFD + FFD, "stands 2 times"),
        (HEAD + SYNTHETIC + SYNTHETIC + FFD, "give names"),
        (HEAD + "problems = []\nplanners = []\n", "problems is empty"),
        (HEAD.replace("study/1", "study/2") + SYNTHETIC + FFD, "this reads 'routepack-study/1'"),
        (HEAD + "seeds = [1\n", "no TOML"),
        (HEAD + "seeds = 'x'\n" + SYNTHETIC + FFD, "study.seeds"),
    ],
)
def test_refusals(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in faults_of(tmp_path, text)


def test_a_missing_file_is_an_input_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        Design.load(tmp_path / "none.toml")


def test_file_source_is_identified_by_content_and_changed_on_request(tmp_path: Path) -> None:
    problem = tiny_problem(2, num_samples=6, num_shards=1, shard_size=2, ep_size=2, num_layers=2)
    problem.save(tmp_path / "one.npz")
    text = HEAD + '[[problems]]\nfile = "one.npz"\nextra_rows = [0, 2]\n' + FFD
    design = load(tmp_path, text)
    first, second = (case.build()[0] for case in design.cases)
    assert first.fingerprint == Problem.load(tmp_path / "one.npz").fingerprint
    assert second.num_rows == first.num_rows + 2
    assert [case.label for case in design.cases] == ["one, extra rows 0", "one, extra rows 2"]
    (tmp_path / "copy").mkdir()
    problem.save(tmp_path / "copy" / "two.npz")
    moved = load(tmp_path, text.replace("one.npz", "copy/two.npz"))
    assert [job.key for job in moved.jobs] == [job.key for job in design.jobs]


def test_cost_and_cluster_are_replaced(tmp_path: Path) -> None:
    cost = 'cost = [{ name = "mla", alpha = "3/2", beta = 4 }]\nnum_shards = 2\ndp_size = 4\n'
    (case,) = load(tmp_path, HEAD + SYNTHETIC + cost + FFD).cases
    problem, known = case.build()
    assert known is problem
    assert (problem.num_shards, problem.dp_size, problem.ep_size) == (2, 4, 2)
    (operator,) = problem.cost.attention
    assert (operator.name, float(operator.alpha), float(operator.beta)) == ("mla", 1.5, 4.0)
    (free,) = load(tmp_path, HEAD + SYNTHETIC + 'cost = "none"\n' + FFD).cases
    assert not free.build()[0].cost.attention


def test_knowledge_changes_what_the_planner_sees_and_not_the_truth(tmp_path: Path) -> None:
    text = SYNTHETIC + 'step = 1\nknowledge = ["exact", "previous_step"]\n'
    exact, stale = (case.build() for case in load(tmp_path, HEAD + text + FFD).cases)
    assert exact[0].fingerprint == exact[1].fingerprint == stale[0].fingerprint
    assert stale[1].fingerprint != stale[0].fingerprint
    np.testing.assert_array_equal(stale[1].lengths, stale[0].lengths)
    assert stale[1].num_rows == stale[0].num_rows


def test_planner_limits_replace_those_of_the_study(tmp_path: Path) -> None:
    design = load(tmp_path, HEAD + SYNTHETIC + FFD + "time_limit = [0.5, 1.0]\n")
    assert [(job.time_limit, job.iteration_limit) for job in design.jobs] == [(0.5, None), (1.0, None)]
