"""The weights of a run's agent, or of any model, to a folder in Hugging Face layout."""

from __future__ import annotations

import os
import pathlib
from typing import Literal

import jax
from flax import nnx
from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.config import as_json
from mars2_jax.errors import ConfigError, DataError
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.export import check_destination, save_checkpoint
from mars2_jax.models.files import Checkpoint, find, open_checkpoint
from mars2_jax.models.lora import Lora, learned, merge_lora
from mars2_jax.models.tokenizer import load_tokenizer
from mars2_jax.models.weights import abstract_decoder, load
from mars2_jax.roster import is_served, weight_owner
from mars2_jax.training.checkpoint import Checkpointer

__all__ = ["export_agent", "export_model", "plain_weights"]


def export_model(path: str, out: str, *, dtype: str = "float32", console: Console | None = None) -> None:
    """Writes the model at a model path to the folder `out`.

    Args:
      path: as in `config.agents.<name>.model.path`.
      out: a folder that is not there, or empty.
      dtype: "float32" or "bfloat16".

    Raises:
      ModelError: the model cannot be read, or the folder not be written.
    """
    folder = pathlib.Path(os.path.expanduser(out))
    check_destination(folder)
    with open_checkpoint(path) as checkpoint, jax.default_device(_host()):
        tokenizer = load_tokenizer(checkpoint, str(find(path)))
        params = nnx.state(load(checkpoint, param_dtype=dtype))
        save_checkpoint(folder, params, checkpoint.config, tokenizer, dtype=dtype)
    _tell(console, f"wrote {path} to {folder}, {checkpoint.config.parameters:,} parameters in {dtype}")


def export_agent(
    config: FrozenConfigDict,
    workdir: str,
    agent: str,
    out: str,
    *,
    step: int | Literal["best"] | None = None,
    dtype: str = "float32",
    console: Console | None = None,
) -> None:
    """Writes the weights that an agent of a run has learned to the folder `out`.

    Args:
      config: the run's config.
      workdir: the folder of the run, of training or of fine-tuning.
      agent: the agent's name.
      out: a folder that is not there, or empty.
      step: the training step after which it was saved; "best" by `config.training.best_metric`; None is the newest
        whole checkpoint.
      dtype: "float32" or "bfloat16".

    Raises:
      ConfigError: no such agent, one without weights of its own or that never learns, or another config than the run's.
      DataError: no such checkpoint, or none that is whole.
      ModelError: the agent's model is gone, or the folder cannot be written.
    """
    folder = pathlib.Path(os.path.expanduser(out))
    check_destination(folder)
    if agent not in config.agents:
        raise ConfigError(f"--agent={agent} is not an agent of this config; it has {', '.join(config.agents)}")
    if is_served(config.agents[agent]):
        raise ConfigError(f"agent {agent!r} is served by an endpoint: there are no weights to export")
    if (owner := weight_owner(config.agents, agent)) != agent:
        raise ConfigError(f"agent {agent!r} has the weights of {owner!r}: export --agent={owner}")
    model = config.agents[agent].model
    if not config.agents[agent].trainable:
        raise ConfigError(f"agent {agent!r} never learns (trainable=False): export its model by --model={model.path}")
    # Fine-tuning gives each agent a folder of its own.
    run = next(
        (f for f in (workdir, os.path.join(workdir, agent)) if os.path.isdir(os.path.join(f, "checkpoints"))), ""
    )
    if not run:
        raise DataError(f"no checkpoints in {workdir}: give the workdir of a training run")
    with open_checkpoint(model.path, model.sha256) as checkpoint:
        shape: ModelConfig = checkpoint.config
        tokenizer = load_tokenizer(checkpoint, str(find(model.path)))
    # Only what this agent learned is read, and into host memory: neither the optimizer nor the devices matter here.
    place = jax.sharding.SingleDeviceSharding(_host())
    lora = Lora.from_config(model.lora)
    abstract = nnx.state(abstract_decoder(shape, lora=lora), learned(lora))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract)
    with Checkpointer(run, best_metric=config.training.best_metric, read_only=True) as checkpointer:
        step = checkpointer.best() if step == "best" else step
        saved = checkpointer.restore({agent: {"params": target}}, step=step, partial=True)
    if saved is None:
        raise DataError(f"no checkpoint in {workdir} yet: wait for the first training step to end")
    if saved.meta["config"]["agents"][agent]["model"] != as_json(config)["agents"][agent]["model"]:
        raise ConfigError(
            f"config.agents.{agent}.model differs from that of the run in {workdir}: export with the config that made "
            "it"
        )
    params = saved.state[agent]["params"]
    if lora is not None:
        with open_checkpoint(model.path) as checkpoint, jax.default_device(_host()):
            params = plain_weights(checkpoint, params, lora)
    save_checkpoint(folder, params, shape, tokenizer, dtype=dtype)
    made = f"{saved.step} {saved.meta.get('unit', 'training step')}s"
    _tell(console, f"wrote {agent} after {made} to {folder}, {shape.parameters:,} parameters in {dtype}")


def plain_weights(checkpoint: Checkpoint, adapters: nnx.State, lora: Lora) -> nnx.State:
    """All weights, in float32, of the decoder without adapters that computes what the checkpoint's does with these."""
    return merge_lora(nnx.merge_state(adapters, nnx.state(load(checkpoint))), lora)


def _host() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _tell(console: Console | None, line: str) -> None:
    (console or Console()).print(line, highlight=False, soft_wrap=True)
