"""The paper's 14B teams: Qwen3-14B and AReaL-boba-2-14B, or (`:trio`) with DeepCoder-14B-Preview too.

Settings are those of configs/mars2_8b.py, which also says what of the paper is missing. The mesh is for 64 chips of
TPU v5p:

    python -m mars2_jax.plan --config=configs/mars2_14b.py:trio --topology=v5p:4x4x4
"""

import pathlib
import runpy

from ml_collections import ConfigDict

paper_config = runpy.run_path(str(pathlib.Path(__file__).with_name("mars2_8b.py")))["paper_config"]


def get_config(variant: str = "pair") -> ConfigDict:
    """Variants: "pair", "trio"."""
    models = {"qwen": "hub:Qwen/Qwen3-14B", "areal": "hub:inclusionAI/AReaL-boba-2-14B"}
    if variant == "trio":
        models["deepcoder"] = "hub:agentica-org/DeepCoder-14B-Preview"
    elif variant != "pair":
        raise ValueError(f"there is no variant {variant!r}; there are pair and trio")
    return paper_config(models)
