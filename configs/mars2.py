"""MARS2 and its ablations, a variant each, on two models of 1.5 and 1.7 billion weights:

    python -m mars2_jax.train --config=configs/mars2.py:no_shaping --workdir=runs/no_shaping

| variant | |
|---|---|
| `mars2` | the paper's |
| `plus` | MARS2+: sequence ratio, rollout correction, overlong penalty |
| `no_shaping` | raw rewards in the group advantage |
| `beta`, `gaussian` | the posterior of Thompson sampling |
| `node_first` | the node is drawn before the agent |
| `agent_group` | advantages within an agent's nodes of a tree |
| `flat_multi` | no tree: independent answers of all agents |
| `rs2` | the tree with one agent |
| `grpo` | one agent, independent answers |

The settings are the paper's (mars2_jax/paper.py) with shorter responses and smaller batches: for one host with 8
accelerators of 32 GB, or fewer and larger ones. Another team is two more lines, or an override:

    --config.agents.qwen.model.path=~/models/mine
"""

from ml_collections import ConfigDict

from mars2_jax.paper import ablate, paper_config


def get_config(variant: str = "mars2") -> ConfigDict:
    config = paper_config({"coder": "hub:Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen": "hub:Qwen/Qwen3-1.7B"})
    config.data.problems_per_step = 16
    config.rollout.update(max_prompt_tokens=2048, max_new_tokens=4096, prompt_memory=0)
    config.learning.update(train_batch_size=64, micro_batch_size=8, remat="layer", scan_unroll=1)
    config.eval.search_nodes = 16
    return ablate(config, variant)
