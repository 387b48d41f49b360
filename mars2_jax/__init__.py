"""mars2_jax: several language models learn to program in one shared search tree (MARS2, arXiv 2604.14564), on JAX.

Importing this package imports neither JAX nor Flax: the grading service is a process of its own that must stay
small and must never hold a JAX runtime.
"""

__version__ = "0.1.0"
