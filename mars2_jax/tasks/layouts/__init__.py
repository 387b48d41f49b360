"""From a record of a problem file to a problem: one function for each layout, one file for each family."""

from mars2_jax.tasks.layouts.apps import apps_problem
from mars2_jax.tasks.layouts.deepcoder import deepcoder_problem
from mars2_jax.tasks.layouts.entry import Entry, Layout, Origin
from mars2_jax.tasks.layouts.fields import DIFFICULTIES
from mars2_jax.tasks.layouts.human_eval import human_eval_problem
from mars2_jax.tasks.layouts.livecodebench import livecodebench_problem
from mars2_jax.tasks.layouts.mbpp import mbpp_problem
from mars2_jax.tasks.layouts.own import own_problem

__all__ = ["DIFFICULTIES", "LAYOUTS", "Entry", "Layout", "Origin"]

LAYOUTS: dict[str, Layout] = {
    "own": own_problem,
    "human_eval": human_eval_problem,
    "mbpp": mbpp_problem,
    "livecodebench": livecodebench_problem,
    "deepcoder": deepcoder_problem,
    "apps": apps_problem,
    "taco": apps_problem,
}
"""Layouts by the name that a source is written with, such as "livecodebench:~/data/lcb"."""
