"""The paper's 14B teams: Qwen3-14B and AReaL-boba-2-14B, or (`:trio`) with DeepCoder-14B-Preview too.

Settings are those of configs/mars2_8b.py. The mesh is for 64 chips of TPU v5p:

    python -m mars2_jax.plan --config=configs/mars2_14b.py:trio --topology=v5p:4x4x4
"""

from ml_collections import ConfigDict

from mars2_jax.paper import paper_config


def get_config(variant: str = "pair") -> ConfigDict:
    """Variants: "pair", "trio"."""
    models = {"qwen": "hub:Qwen/Qwen3-14B", "areal": "hub:inclusionAI/AReaL-boba-2-14B"}
    if variant == "trio":
        models["deepcoder"] = "hub:agentica-org/DeepCoder-14B-Preview"
    elif variant != "pair":
        raise ValueError(f"there is no variant {variant!r}; there are pair and trio")
    config = paper_config(models)
    config.mesh.update(data=1, fsdp=16, tensor=4)
    config.learning.update(micro_batch_size=16, remat="layer", scan_unroll=1)
    return config
