"""Several users of one engine: their requests decode together, and each gets its own completions back."""

from __future__ import annotations

import dataclasses
import itertools

from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Completion, Request

__all__ = ["Port", "SharedEngine"]


class SharedEngine:
    """Hands out ports to one engine, through which all its requests must go."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._ids = itertools.count()
        self._open: dict[int, tuple[Port, int]] = {}
        self.round = 0

    def port(self) -> Port:
        """One more user's way to the engine."""
        return Port(self)

    def _submit(self, port: Port, request: Request) -> None:
        number = next(self._ids)
        self.engine.submit(dataclasses.replace(request, id=number))
        self._open[number] = (port, request.id)

    def _step(self) -> None:
        self.round += 1
        for completion in self.engine.step():
            port, name = self._open.pop(completion.id)
            port.arrived.append(dataclasses.replace(completion, id=name))


class Port:
    """One user's way to a shared engine: what goes in here comes out here. Ids need to differ within a port only.

    Where every port with open requests is stepped in turn, the engine decodes once a turn, by the first of them; the
    others then only take what is theirs.
    """

    def __init__(self, shared: SharedEngine):
        self._shared = shared
        self._seen = shared.round
        self.pending = 0
        self.arrived: list[Completion] = []

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        self._shared._submit(self, request)
        if not self.pending:
            # The rounds that it sat out are none that it has not seen yet.
            self._seen = self._shared.round
        self.pending += 1

    def step(self) -> list[Completion]:
        """The completions of its own requests, in order of submission, after a chunk of decoding by this port or, since
        its last step, by another."""
        if self._seen == self._shared.round:
            self._shared._step()
        self._seen = self._shared.round
        arrived, self.arrived = self.arrived, []
        self.pending -= len(arrived)
        return arrived
