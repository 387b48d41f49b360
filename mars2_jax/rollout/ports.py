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
        self.round = 0
        self._ids = itertools.count()
        self._open: dict[int, tuple[Port, int]] = {}

    def port(self) -> Port:
        """One more user's way to the engine."""
        return Port(self)

    def submit(self, port: Port, request: Request) -> int:
        """Queues a port's request under an id that no other port has, and returns that."""
        number = next(self._ids)
        self.engine.submit(dataclasses.replace(request, id=number))
        self._open[number] = port, request.id
        return number

    def step(self) -> None:
        """A chunk of decoding, whose completions go to the ports that they belong to."""
        self.round += 1
        for completion in self.engine.step():
            port, name = self._open.pop(completion.id)
            port.arrived.append(dataclasses.replace(completion, id=name))

    def abort(self, number: int) -> Completion | None:
        """Takes a request out of the engine; see `Engine.abort`."""
        _, name = self._open.pop(number)
        completion = self.engine.abort(number)
        return completion and dataclasses.replace(completion, id=name)


class Port:
    """One user's way to a shared engine: what goes in here comes out here. Ids need to differ within a port only.

    Where every port with open requests is stepped in turn, the engine decodes once a turn, by the first of them; the
    others then only take what is theirs.
    """

    def __init__(self, shared: SharedEngine):
        self._shared = shared
        self._seen = shared.round
        self._numbers: dict[int, int] = {}
        self.arrived: list[Completion] = []

    @property
    def pending(self) -> int:
        """Requests submitted here and not returned."""
        return len(self._numbers)

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        if request.id in self._numbers:
            raise ValueError(f"request {request.id} is open already")
        number = self._shared.submit(self, request)
        if not self.pending:
            # The rounds that it sat out are none that it has not seen yet.
            self._seen = self._shared.round
        self._numbers[request.id] = number

    def dispatch(self) -> None:
        """See `Engine.dispatch`. Starts nothing where this turn's chunk has been decoded already."""
        if self._seen == self._shared.round:
            self._shared.engine.dispatch()

    def step(self) -> list[Completion]:
        """The completions of its own requests, in order of submission, after a chunk of decoding by this port or, since
        its last step, by another."""
        if self._seen == self._shared.round:
            self._shared.step()
        self._seen = self._shared.round
        arrived, self.arrived = self.arrived, []
        for completion in arrived:
            del self._numbers[completion.id]
        return arrived

    def abort(self, id: int) -> Completion | None:
        """See `Engine.abort`, of a request of this port."""
        number = self._numbers.pop(id, None)
        if number is None:
            return None
        for index, completion in enumerate(self.arrived):
            if completion.id == id:
                return self.arrived.pop(index)
        return self._shared.abort(number)
