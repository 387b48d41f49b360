"""The paper's 8B team: Qwen3-8B and AReaL-boba-2-8B in one tree (MARS2, arXiv 2604.14564).

The paper trains it on 8 nodes of 8 GPUs. The mesh is for 64 chips of TPU v5p:

    python -m mars2_jax.plan --config=configs/mars2_8b.py --topology=v5p:4x4x4

It trains on DeepCoder-Preview and evaluates on five months of LiveCodeBench, which you download and name:

    --config.data.source=deepcoder:DeepCoder-Preview-Dataset --config.eval.source=livecodebench:code_generation_lite
    --config.eval.date_from=2025-01-01 --config.eval.date_to=2025-05-31

The paper's settings are `default_config()`'s where nothing is said here. Not yet to be had, and so not here: its choice
of 7,992 of the DeepCoder problems, replacing trees whose mean reward is 0 or 1 by more sampling, and depth guidance in
test-time search alone (`config.search.guidance` is for training, too).
"""

from ml_collections import ConfigDict

from mars2_jax.config import agent_config, default_config


def paper_config(paths: dict[str, str]) -> ConfigDict:
    """The paper's run of the models at these paths, on 64 devices of 95 GiB; shared with configs/mars2_14b.py."""
    config = default_config()
    for name, path in paths.items():
        agent = agent_config()
        agent.model.path = path
        config.agents[name] = agent
    config.mesh.update(data=1, fsdp=16, tensor=4)
    # A rollout batch of 512 nodes: 64 problems, one tree of 8 nodes each.
    config.data.problems_per_step = 64
    config.search.nodes = 8
    config.rollout.update(
        slots=64,
        chunk=64,
        # Thirty-two of the longest prompts; most are a tenth as long.
        prompt_memory=131_072,
        max_prompt_tokens=4096,
        max_new_tokens=32_768,
    )
    config.prompts.feedback = "summary"
    config.learning.update(
        train_batch_size=256,
        # One row for each part of the mesh that holds rows.
        micro_batch_size=16,
        remat="layer",
        scan_unroll=1,
    )
    config.training.update(steps=200, checkpoint_every=10)
    config.eval.update(temperature=1.0, search_nodes=60)
    return config


def get_config(variant: str = "mars2") -> ConfigDict:
    """Variants: "mars2" (token ratio), "mars2_plus" (sequence ratio, rollout correction, overlong penalty)."""
    config = paper_config({"qwen": "hub:Qwen/Qwen3-8B", "areal": "hub:inclusionAI/AReaL-boba-2-8B"})
    if variant == "mars2_plus":
        config.learning.update(ratio="gspo", tis="token", tis_cap=2.0, overlong_buffer=2048, overlong_factor=1.0)
    elif variant != "mars2":
        raise ValueError(f"there is no variant {variant!r}; there are mars2 and mars2_plus")
    return config
