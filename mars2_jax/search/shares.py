"""One search by several processes: each grows its share of the trees, and all have all of them in the end.

Which process grows a tree changes nothing in it but rounding: its keys come from its number in the whole search. (With
`in_tree_parallelism` above 1 what else is being written decides which verdicts a choice waits for, as it does with
other numbers of slots.)
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from ml_collections import ConfigDict

from mars2_jax.parallel.exchange import gather, share, to_host
from mars2_jax.parallel.mesh import make_mesh
from mars2_jax.search.explore import Exploration, Grader, Seconds, Suspended, explore
from mars2_jax.search.forest import Forest
from mars2_jax.search.saved import OpenNode, SavedSearch, UngradedNode, search_from_bytes, search_to_bytes
from mars2_jax.search.writer import Writer
from mars2_jax.tasks.problem import Problem

__all__ = ["explore_together", "join_searches", "part_of_search"]

_SECONDS = struct.Struct("<4d")


def explore_together(
    problems: Sequence[Problem],
    writers: Sequence[Writer],
    grader: Grader,
    config: ConfigDict,
    *,
    key: PRNGKeyArray,
    tree_ids: Sequence[int] | None = None,
    capacity: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    saved: SavedSearch | None = None,
    suspend: Callable[[], bool] | None = None,
    **pay: Any,
) -> Exploration:
    """`explore`, by all processes: of n, process i grows the trees i, i + n, ... with its own writers and grader.

    All are called with the same arguments, and have the same result: the trees of all in the order of the problems, and
    of the times each the longest. A search that is suspended in one is so in all, with all trees; the others may have
    finished theirs. It goes on with any number of processes. `progress` counts this process's nodes.

    Args and errors are those of `explore`.
    """
    if jax.process_count() == 1:
        options: dict[str, Any] = dict(progress=progress, saved=saved, suspend=suspend, **pay)
        return explore(problems, writers, grader, config, key=key, tree_ids=tree_ids, capacity=capacity, **options)
    numbers = list(range(len(problems)) if tree_ids is None else tree_ids)
    mine = share(len(problems))
    seconds, part = Seconds(), None
    if mine:
        # The search's own programs run on this process's devices, whatever mesh is in context: the others are at other
        # places of theirs.
        data = to_host(jax.random.key_data(key))
        with jax.set_mesh(make_mesh(dict(data=-1, fsdp=1, tensor=1), jax.local_devices())):
            seconds, part = _grow(
                [problems[i] for i in mine],
                writers,
                grader,
                config,
                key=jax.random.wrap_key_data(data),
                tree_ids=[numbers[i] for i in mine],
                capacity=None if capacity is None else -(-capacity // jax.process_count()),
                progress=progress,
                saved=None if saved is None else part_of_search(saved, mine),
                suspend=suspend,
                **pay,
            )
    packed = _SECONDS.pack(*dataclasses.astuple(seconds)) + (search_to_bytes(part) if part is not None else b"")
    received = gather(packed)
    times = [_SECONDS.unpack_from(data) for data in received]
    parts = [search_from_bytes(data[_SECONDS.size :]) for data in received if len(data) > _SECONDS.size]
    origin = {"problems": [problem.id for problem in problems], "trees": numbers}
    whole = join_searches(parts, origin)
    if whole.open or whole.ungraded:
        raise Suspended(whole)
    longest = Seconds(*map(max, zip(*times, strict=True)))
    return Exploration(whole.forest, list(map(dict, whole.attempts)), problems, longest, whole.origin)


def _grow(*arguments: Any, **options: Any) -> tuple[Seconds, SavedSearch]:
    """This process's trees, finished or not."""
    try:
        done = explore(*arguments, **options)
    except Suspended as search:
        return Seconds(), search.saved
    return done.seconds, done.to_saved()


def part_of_search(saved: SavedSearch, places: Sequence[int]) -> SavedSearch:
    """The search of some of the trees alone, which goes on as they would have in the whole.

    Args:
      saved: the whole.
      places: of the trees, from 0, in the order that they are to have.
    """
    index, wanted = np.asarray(places), {place: i for i, place in enumerate(places)}

    def of(nodes: Sequence[Any]) -> list[Any]:
        return [dataclasses.replace(n, tree=wanted[n.tree]) for n in nodes if n.tree in wanted]

    origin = dict(saved.origin)
    for name in ("problems", "trees"):
        origin[name] = [saved.origin[name][place] for place in places]
    return SavedSearch(
        origin=origin,
        forest=jax.tree.map(lambda x: np.asarray(x)[index], saved.forest),
        attempts=[saved.attempts[place] for place in places],
        open=of(saved.open),
        ungraded=of(saved.ungraded),
        ended=saved.ended[index],
    )


def join_searches(parts: Sequence[SavedSearch], whole: Mapping[str, Any]) -> SavedSearch:
    """The search whose parts these are.

    Args:
      parts: of each tree one.
      whole: "problems" and "trees" of the whole's `SavedSearch.origin`, which give the order; all else is equal.

    Raises:
      ValueError: the parts' trees are not those of the whole.
    """
    held = [(tree, p, i) for p, part in enumerate(parts) for i, tree in enumerate(part.origin["trees"])]
    where = {tree: (p, i) for tree, p, i in held}
    if len(held) != len(where) or where.keys() != set(whole["trees"]):
        raise ValueError(f"the parts have the trees {sorted(tree for tree, _, _ in held)}, not {list(whole['trees'])}")
    order = [where[tree] for tree in whole["trees"]]
    place = {at: i for i, at in enumerate(order)}
    starts = np.cumsum([0, *(len(part.attempts) for part in parts)])
    index = np.asarray([starts[p] + i for p, i in order])
    forest: Forest = jax.tree.map(lambda *xs: np.concatenate(xs)[index], *(part.forest for part in parts))

    def numbered(p: int, nodes: Sequence[Any]) -> list[Any]:
        return [dataclasses.replace(node, tree=place[p, node.tree]) for node in nodes]

    opened: list[OpenNode] = [node for p, part in enumerate(parts) for node in numbered(p, part.open)]
    ungraded: list[UngradedNode] = [node for p, part in enumerate(parts) for node in numbered(p, part.ungraded)]
    return SavedSearch(
        origin={**parts[0].origin, **whole},
        forest=forest,
        attempts=[parts[p].attempts[i] for p, i in order],
        open=opened,
        # In the order in which their verdicts are used.
        ungraded=sorted(ungraded, key=lambda node: node.ticks),
        ended=np.concatenate([part.ended for part in parts])[index],
    )
