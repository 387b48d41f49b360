"""The terms of the policy loss, one formula a function.

Shapes: a micro-batch has `rows` of `response` tokens each. A row holds the tokens of one response or, packed, of
several `samples`; `member[b, s, t]` says that token t of row b was sampled as a part of its response s. A token is of
one response at most, and padding of none. What is of a whole response (a sequence ratio, a mean over its tokens) is
taken over its own tokens, whatever else its row holds.

Log-probabilities are those at the sampling temperature, under four sets of weights: `lp` the ones being trained,
`lp_old` the trainer's at the start of the step, `lp_roll` the engine's when it sampled, `lp_ref` the reference's.

A loss is returned as a numerator and a denominator. Micro-batches add up both, and the gradient of the whole batch is
Σ gradient of numerators / Σ denominators whatever the split; a mean of micro-batch means is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.models.buckets import bucket

__all__ = [
    "Member",
    "Objective",
    "PolicyTerms",
    "aggregate",
    "cispo_objective",
    "clipped_objective",
    "kl_estimate",
    "log_ratio",
    "policy_loss",
    "response_kl",
    "rollout_weights",
]

Member = Bool[Array, "rows samples response"]
"""Which tokens of a row are of which of its responses; see the head of this file."""

# Differences of log-probabilities are held within these nats before exp: exp(20) is far outside every clip range, and
# an infinite ratio times a zero advantage would be NaN.
_MAX_LOG = 20.0


def _exp(x: Array) -> Array:
    return jnp.exp(jnp.clip(x, -_MAX_LOG, _MAX_LOG))


def _sum(x: Float[Array, "rows response"], member: Member) -> Float[Array, "rows samples"]:
    """Over the tokens of each response."""
    return jnp.where(member, x[:, None], 0.0).sum(-1)


def _mean(x: Float[Array, "rows response"], member: Member) -> Float[Array, "rows samples"]:
    return _sum(x, member) / jnp.maximum(member.sum(-1), 1)


def _on_tokens(x: Float[Array, "rows samples"], member: Member) -> Float[Array, "rows response"]:
    """What each response has, on all of its tokens; 0 on padding."""
    return jnp.where(member, x[..., None], 0.0).sum(1)


def log_ratio(
    lp: Float[Array, "rows response"],
    lp_old: Float[Array, "rows response"],
    member: Member,
    kind: str,
) -> Float[Array, "rows response"]:
    """Logarithm of the importance ratio of each token.

    ppo (arXiv 1707.06347):            log w_t = lp_t - lp_old_t
    gspo (arXiv 2507.18071, eq. 14):   log s   = mean over the response of (lp - lp_old)
                                       log s_t = stop(log s) + lp_t - stop(lp_t)

    The value of the second is that of the sequence ratio on every token, and its gradient that of the token's own
    log-probability (GSPO-token).

    Raises:
      ConfigError: unknown kind.
    """
    if kind == "ppo":
        return lp - lp_old
    if kind == "gspo":
        sequence = _on_tokens(_mean(lp - lp_old, member), member)
        return jax.lax.stop_gradient(sequence) + (lp - jax.lax.stop_gradient(lp))
    raise ConfigError(f"learning.ratio={kind!r} is unknown; use 'ppo' or 'gspo'")


class Objective(NamedTuple):
    """Of each token.

    Attributes:
      value: what is to be maximised.
      ratio: the importance ratio.
      clipped: where clipping changed something: took the gradient away, or (CISPO) bounded its weight.
    """

    value: Float[Array, "rows response"]
    ratio: Float[Array, "rows response"]
    clipped: Bool[Array, "rows response"]


def clipped_objective(
    log_ratio: Float[Array, "rows response"],
    advantage: Float[Array, "rows response"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Objective:
    """The clipped surrogate with its two bounds apart (PPO; clip-higher of DAPO, arXiv 2503.14476, eq. 10).

        J_t = min(w_t A, clip(w_t, 1 - clip_low, 1 + clip_high) A)
        J_t = max(J_t, dual_clip · A) where A < 0 and dual_clip > 0     (dual clip, arXiv 1912.09729, eq. 5)

    Args:
      log_ratio: log w.
      advantage: A, of each token.
      clip_low: how far below 1 the ratio counts.
      clip_high: how far above 1 the ratio counts.
      dual_clip: bound of the ratio where A < 0, above 1 + clip_high; 0 is off.

    Raises:
      ConfigError: 0 < dual_clip <= 1 + clip_high, which would turn the surrogate into a constant.
    """
    if dual_clip and dual_clip <= 1 + clip_high:
        raise ConfigError(f"learning.dual_clip={dual_clip} must be 0 (off) or above 1 + clip_high = {1 + clip_high}")
    ratio = _exp(log_ratio)
    free = ratio * advantage
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage
    objective = jnp.minimum(free, bounded)
    clipped = bounded < free
    if dual_clip:
        floor = dual_clip * advantage
        below = (advantage < 0) & (objective < floor)
        objective = jnp.where(below, floor, objective)
        clipped |= below
    return Objective(objective, ratio, clipped)


def cispo_objective(
    lp: Float[Array, "rows response"],
    log_ratio: Float[Array, "rows response"],
    advantage: Float[Array, "rows response"],
    *,
    clip_low: float,
    clip_high: float,
) -> Objective:
    """REINFORCE with a clipped importance weight (CISPO of MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5).

        J_t = stop(clip(w_t, 1 - clip_low, 1 + clip_high)) · A · lp_t

    Every token keeps its gradient; clipping bounds only how much it counts. The authors clip above alone: clip_low=1.

    Args:
      lp: log-probabilities under the weights being trained.
      log_ratio: log w.
      advantage: A, of each token.
      clip_low: how far below 1 the weight may be.
      clip_high: how far above 1 the weight may be.
    """
    ratio = jax.lax.stop_gradient(_exp(log_ratio))
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return Objective(weight * advantage * lp, ratio, weight != ratio)


def rollout_weights(
    lp_old: Float[Array, "rows response"],
    lp_roll: Float[Array, "rows response"],
    member: Member,
    *,
    level: str,
    cap: float,
    mode: str = "truncate",
    veto: float = 0.0,
) -> Float[Array, "rows response"]:
    """Importance weights that correct for a sampler which is not quite the policy the trainer holds. No gradient.

    With d = lp_old - lp_roll:
        token:      w_t = exp(d_t)            sequence: w = exp(Σ_t d_t)            geometric: w = exp(mean_t d_t)
        truncate:   min(w, cap)   (TIS, fengyao.notion.site/off-policy-rl)
        mask:       w where w <= cap, else 0   (MIS)
        veto:       0 on the whole response if any of its tokens has exp(d_t) < veto

    Args:
      lp_old: log-probabilities in the trainer.
      lp_roll: log-probabilities in the sampler.
      member: which tokens are of which response.
      level: "token", "sequence" or "geometric", or "off": all weights are 1.
      cap: largest weight.
      mode: what happens above the cap.
      veto: smallest token weight that a response survives; 0 is off.

    Raises:
      ConfigError: unknown level or mode, or a veto with level "off".
    """
    if level == "off":
        if veto:
            raise ConfigError("learning.tis_veto needs learning.tis = 'token', 'sequence' or 'geometric'")
        return jnp.ones_like(lp_old)
    difference = jnp.where(member.any(1), lp_old - lp_roll, 0.0)
    if level == "token":
        log_weight = difference
    elif level == "sequence":
        log_weight = _on_tokens(_sum(difference, member), member)
    elif level == "geometric":
        log_weight = _on_tokens(_mean(difference, member), member)
    else:
        raise ConfigError(f"learning.tis={level!r} is unknown; use 'off', 'token', 'sequence' or 'geometric'")
    weight = _exp(log_weight)
    if mode == "truncate":
        weight = jnp.minimum(weight, cap)
    elif mode == "mask":
        weight = jnp.where(weight <= cap, weight, 0.0)
    else:
        raise ConfigError(f"learning.tis_mode={mode!r} is unknown; use 'truncate' or 'mask'")
    if veto:
        vetoed = (member & (_exp(difference) < veto)[:, None]).any(-1)
        weight = jnp.where((member & vetoed[..., None]).any(1), 0.0, weight)
    return jax.lax.stop_gradient(weight)


def kl_estimate(lp: Float[Array, "*tokens"], lp_ref: Float[Array, "*tokens"], kind: str) -> Float[Array, "*tokens"]:
    """Estimates of KL(policy || reference) at each sampled token (Schulman, joschu.net/blog/kl-approx.html).

    With d = lp_ref - lp:   k1 = -d      k2 = d²/2      k3 = exp(d) - 1 - d

    k3 is computed with expm1: exp(d) - 1 rounds to a negative KL near d = 0.

    Raises:
      ConfigError: unknown kind.
    """
    d = jnp.clip(lp_ref - lp, -_MAX_LOG, _MAX_LOG)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return jnp.expm1(d) - d
    raise ConfigError(f"learning.kl={kind!r} is unknown; use 'k1', 'k2' or 'k3'")


def response_kl(lp: Sequence[np.ndarray], lp_ref: Sequence[np.ndarray], kind: str) -> list[float]:
    """The estimated KL of whole responses, Σ over the tokens of each, for the reward (RLOO, arXiv 2402.14740):

        reward - kl_coef · Σ_t KL_t

    There it is a number like any other that came of the response: it enters baselines and advantages, and has no
    gradient of its own.

    Args:
      lp: float32[R] of each response, under the weights that wrote it.
      lp_ref: the same under the reference.
      kind: as in `kl_estimate`.
    """
    if not lp:
        return []
    ends = np.cumsum([len(x) for x in lp])
    # One array of few sizes: what runs op by op is compiled for every shape.
    joined = [np.pad(np.concatenate(xs), (0, bucket(int(ends[-1]), 1024) - int(ends[-1]))) for xs in (lp, lp_ref)]
    tokens = np.asarray(kl_estimate(jnp.asarray(joined[0]), jnp.asarray(joined[1]), kind), np.float64)
    return [float(part.sum()) for part in np.split(tokens, ends)[:-1]]


def aggregate(
    values: Float[Array, "rows response"], member: Member, kind: str, *, budget: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Numerator and denominator of the batch mean of a value of each token.

    token_mean (DAPO, arXiv 2503.14476, eq. 8):      Σ over all tokens                                / number of tokens
    seq_mean (GRPO, arXiv 2402.03300, eq. 3):        Σ over responses of the mean over the response   / their number
    seq_mean_token_sum_norm (Dr. GRPO, 2503.20783):  Σ over responses of the sum / budget             / their number

    Args:
      values: one value a token.
      member: which tokens are of which response; one without tokens is no response.
      kind: one of the above.
      budget: most tokens a response may have: a constant of the run, so that neither padding nor the lengths of the
        others change a response's weight.

    Raises:
      ConfigError: unknown kind.
    """
    mask = member.any(1)
    values = jnp.where(mask, values, 0.0)
    responses = member.any(-1).sum().astype(jnp.float32)
    if kind == "token_mean":
        return values.sum(), mask.sum().astype(jnp.float32)
    if kind == "seq_mean":
        return _mean(values, member).sum(), responses
    if kind == "seq_mean_token_sum_norm":
        return values.sum() / budget, responses
    raise ConfigError(
        f"learning.aggregation={kind!r} is unknown; use 'token_mean', 'seq_mean' or 'seq_mean_token_sum_norm'"
    )


class PolicyTerms(NamedTuple):
    """A micro-batch's share of the loss.

    Attributes:
      numerator: of the loss; the only part with a gradient.
      denominator: of the loss; 0 for a micro-batch of padding.
      sums: sums over the sampled tokens, by metric: "kl", "entropy", "clip_fraction", "ratio", "rollout_weight",
        "logprob_gap", and their number under "tokens".
    """

    numerator: Float[Array, ""]
    denominator: Float[Array, ""]
    sums: dict[str, Float[Array, ""]]


def policy_loss(
    lp: Float[Array, "rows response"],
    entropy: Float[Array, "rows response"],
    *,
    lp_old: Float[Array, "rows response"],
    lp_roll: Float[Array, "rows response"],
    lp_ref: Float[Array, "rows response"] | None,
    advantage: Float[Array, "rows samples"],
    member: Member,
    config: ConfigDict,
    budget: int,
) -> PolicyTerms:
    """The loss of one micro-batch: -w_roll · J + kl_coef · KL - entropy_coef · H, aggregated.

    MARS2 is ratio=ppo with clip-higher and k3; MARS2+ is ratio=gspo with tis=token, the overlong penalty and k3.
    With kl_in=reward the KL is in the advantages already, see `response_kl`, and here only a metric.

    Args:
      lp: log-probabilities under the weights being trained.
      entropy: entropy of the distribution each token was drawn from, under the same weights.
      lp_old: as described above; no gradient, like the next two.
      lp_roll: as described above.
      lp_ref: as described above; None where kl_coef is 0.
      advantage: of each response.
      member: which tokens are of which response.
      config: the `learning` section.
      budget: most tokens a response may have.

    Raises:
      ConfigError: an unknown option.
      ValueError: kl_coef is not 0 and there is no lp_ref.
    """
    log_w, on_tokens = log_ratio(lp, lp_old, member, config.ratio), _on_tokens(advantage, member)
    bounds = dict(clip_low=config.clip_low, clip_high=config.clip_high)
    if config.objective == "clip":
        objective = clipped_objective(log_w, on_tokens, **bounds, dual_clip=config.dual_clip)
    elif config.objective == "cispo":
        objective = cispo_objective(lp, log_w, on_tokens, **bounds)
    else:
        raise ConfigError(f"learning.objective={config.objective!r} is unknown; use 'clip' or 'cispo'")
    weight = rollout_weights(
        lp_old, lp_roll, member, level=config.tis, cap=config.tis_cap, mode=config.tis_mode, veto=config.tis_veto
    )
    loss = -weight * objective.value
    kl = jnp.zeros_like(lp)
    if config.kl_coef:
        if lp_ref is None:
            raise ValueError("learning.kl_coef is not 0, but the batch has no reference log-probabilities")
        kl = kl_estimate(lp, lp_ref, config.kl)
        if config.kl_in == "loss":
            loss += config.kl_coef * kl
    if config.entropy_coef:
        loss -= config.entropy_coef * entropy

    numerator, denominator = aggregate(loss, member, config.aggregation, budget=budget)
    per_token = {
        "kl": kl,
        "entropy": entropy,
        "clip_fraction": objective.clipped,
        "ratio": objective.ratio,
        "rollout_weight": weight,
        "logprob_gap": jnp.abs(lp_old - lp_roll),
        "tokens": jnp.ones_like(lp),
    }
    mask = member.any(1)
    sums = {name: jnp.where(mask, value, 0.0).sum() for name, value in per_token.items()}
    return PolicyTerms(numerator, denominator, jax.lax.stop_gradient(sums))
