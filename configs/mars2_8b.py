"""The paper's 8B team: Qwen3-8B and AReaL-boba-2-8B in one tree (MARS2, arXiv 2604.14564).

The paper trains it on 8 nodes of 8 GPUs. The mesh is for 64 chips of TPU v5p:

    python -m mars2_jax.plan --config=configs/mars2_8b.py --topology=v5p:4x4x4

It trains on DeepCoder-Preview and evaluates on five months of LiveCodeBench, which you download and name:

    --config.data.source=deepcoder:DeepCoder-Preview-Dataset --config.eval.source=livecodebench:code_generation_lite
    --config.eval.date_from=2025-01-01 --config.eval.date_to=2025-05-31

Variants, such as `configs/mars2_8b.py:plus`, are those of configs/mars2.py. Not here yet: the paper's choice of 7,992
of the DeepCoder problems, replacing trees whose mean reward is 0 or 1 by more sampling, and depth guidance in test-time
search alone (`config.search.guidance` is for training, too).
"""

from ml_collections import ConfigDict

from mars2_jax.paper import ablate, paper_config


def get_config(variant: str = "mars2") -> ConfigDict:
    config = ablate(paper_config({"qwen": "hub:Qwen/Qwen3-8B", "areal": "hub:inclusionAI/AReaL-boba-2-8B"}), variant)
    config.mesh.update(data=1, fsdp=16, tensor=4)
    # One row for each part of the mesh that holds rows.
    config.learning.update(micro_batch_size=16, remat="layer", scan_unroll=1)
    return config
