"""Makes the plan of a run: from a config and a topology to the verdict."""

from __future__ import annotations

import json

from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.files import write_atomically
from mars2_jax.parallel.mesh import make_mesh
from mars2_jax.planning.compiled import compile_program
from mars2_jax.planning.models import model_shape
from mars2_jax.planning.programs import team_programs
from mars2_jax.planning.report import Plan
from mars2_jax.planning.topology import topology_devices
from mars2_jax.roster import weight_owner, weight_owners
from mars2_jax.training.policy import check_length, longest_sequence
from mars2_jax.training.setup import check_rows, check_trainable

__all__ = ["make_plan"]


def make_plan(
    config: FrozenConfigDict, topology: str, json_path: str | None = None, console: Console | None = None
) -> Plan:
    """Compiles what a run would compile, and prints what it needs and costs.

    Args:
      config: of the run.
      topology: such as "v5p:4x4x4".
      json_path: where to write the plan too; None does not.
      console: where to print.

    Raises:
      UserError: a topology, a mesh or a model that cannot be planned for.
    """
    console = console or Console()
    check_trainable(config)
    chip, devices = topology_devices(topology)
    mesh = make_mesh(config.mesh, devices)
    check_rows(config, mesh)
    paths = {name: agent.model.path for name, agent in weight_owners(config.agents).items()}
    shapes = {path: model_shape(path) for path in dict.fromkeys(paths.values())}
    for path, (shape, _) in shapes.items():
        check_length(path, shape, longest_sequence(config))
    programs, residents = team_programs(config, {name: shapes[path][0] for name, path in paths.items()}, mesh)
    outcomes = []
    with console.status("compiling") as status:
        for program in programs:
            status.update(f"compiling {program.kind} of {', '.join(program.agents)}: {program.size}")
            outcomes.append(compile_program(program))
    models = {name: (path, shapes[path][1]) for name, path in paths.items()}
    for name in config.agents:
        if (owner := weight_owner(config.agents, name)) != name:
            models[name] = (paths[owner], f"{owner}, whose weights it has")
    plan = Plan(topology, chip, dict(mesh.shape), models, residents, outcomes)
    plan.show(console)
    if json_path is not None:
        write_atomically(json_path, json.dumps(plan.to_json(), indent=2) + "\n")
    return plan
