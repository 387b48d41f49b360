"""The way of a policy's weights from the mesh where they are trained to the one where they decode.

Both meshes have the same devices; of several processes, the second has those of its own process. Weights are cast,
quantized where that is asked for, and moved by compiled programs, from device to device: the host sees none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mars2_jax.models.decoder import Decoder
from mars2_jax.models.quantize import quantize, quantized_decoder
from mars2_jax.parallel.mesh import hosts_mesh, param_shardings, replicated

__all__ = ["Handover"]


class Handover:
    """Gives an engine the weights of a policy, see the module.

    Args:
      decoder: the policy, of shapes only; its `dtype` is what the engine's weights are cast to.
      source: the mesh on which its weights lie.
      target: the mesh on which they decode, of the same devices in the same order, or of those of this process.
      int8: whether they decode in eight bits, see `models.quantize`. Adapters never do.

    Attributes:
      decoder: the engine's decoder, of shapes only.
      mesh: the target.
      copies: whether the engine's weights are others than the policy's in the same type: where not, arrays that have
        the type are handed through.
    """

    def __init__(self, decoder: Decoder, source: Mesh, target: Mesh, *, int8: bool = False):
        self._dtype, self._int8, self._moves = decoder.dtype, int8, source != target
        self._programs: dict[Hashable, Callable[[nnx.State], nnx.State]] = {}
        self.decoder = quantized_decoder(decoder) if int8 else decoder
        self.mesh = target
        # Over the devices of the source, whatever processes they belong to.
        self._everywhere = target if target.size == source.size else hosts_mesh(target, source)
        self.copies = int8 or self._moves

    def convert(self, params: nnx.State) -> nnx.State:
        """What becomes of weights, or a part of them such as adapters, but for their places."""
        params = jax.tree.map(lambda x: x.astype(self._dtype), params)
        return quantize(params) if self._int8 else params

    def shardings(self, params: nnx.State) -> nnx.State:
        """Where on the target the result for `params` lies, which may be abstract."""
        return self._shardings(self.mesh, params)

    def _shardings(self, mesh: Mesh, params: nnx.State) -> nnx.State:
        return param_shardings(mesh, jax.eval_shape(self.convert, params))

    def __call__(self, params: nnx.State) -> nnx.State:
        """The weights, or a part of them, as the engine's decoder has them, on its mesh."""
        if not self.copies:
            return self.convert(params)
        # One by one: those of a shape share a program, and of what a move needs on its way only one is there at a time.
        moved = []
        for path, variable in nnx.to_flat_state(params):
            part = nnx.from_flat_state([(path[-1:], variable)])
            key = (path[-1], variable.shape, variable.get_metadata("axes"))
            if key not in self._programs:
                self._programs[key] = jax.jit(
                    self._convert_and_move, out_shardings=self._shardings(self._everywhere, part)
                )
            result = self._on_target(self._programs[key](part))
            moved += [((*path[:-1], *name), x) for name, x in nnx.to_flat_state(result)]
        return nnx.from_flat_state(moved)

    def _convert_and_move(self, params: nnx.State) -> nnx.State:
        converted = self.convert(params)
        if not self._moves:
            return converted
        # By way of a whole copy on every device, of the converted type. XLA knows no shorter way between most pairs of
        # meshes, and would complain of this one.
        whole = functools.partial(jax.lax.with_sharding_constraint, shardings=replicated(self._everywhere))
        return jax.tree.map(whole, converted)

    def _on_target(self, params: nnx.State) -> nnx.State:
        """What every process has whole, as arrays of the target alone: the very buffers."""
        if self._everywhere == self.mesh:
            return params

        def own(x: jax.Array) -> jax.Array:
            place = NamedSharding(self.mesh, x.sharding.spec)  # type: ignore[attr-defined]
            return jax.make_array_from_single_device_arrays(x.shape, place, [s.data for s in x.addressable_shards])

        return jax.tree.map(own, params)
