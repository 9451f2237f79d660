"""HiGHS stays silent and leaves standard output usable."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from routepack_opt.highs import silent_highs
import highspy
first = silent_highs()
second = highspy.Highs()
second.setOptionValue("output_flag", False)
for solver in (first, second):
    solver.addVar(1.0, 5.0)
    solver.changeColCost(0, 2.0)
    solver.run()
print(first.getInfo().objective_function_value)
"""


def test_only_the_callers_own_output_reaches_standard_output():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "2.0\n"


def test_works_without_standard_output():
    script = "import os; os.close(1)\n" + SCRIPT.replace("print(", "assert 2.0 == (")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
