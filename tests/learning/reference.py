"""The formulas of `mars2_jax.learning` again, as loops over Python floats: slow, and plain enough to check by eye."""

from __future__ import annotations

import math

import numpy as np


def shaped(reward, parent, graded, gamma, lam):
    """Shaped rewards of one tree, [N]."""
    out = np.zeros(len(reward))
    for v in range(len(reward)):
        if not graded[v] or parent[v] < 0:
            continue
        siblings = [reward[u] for u in range(len(reward)) if u != v and graded[u] and parent[u] == parent[v]]
        p = parent[v]
        above = reward[p] if p > 0 and graded[p] else None
        if above is not None and siblings:
            base = (1 - lam) * above + lam * sum(siblings) / len(siblings)
        elif siblings:
            base = sum(siblings) / len(siblings)
        elif above is not None:
            base = above
        else:
            base = reward[v]
        out[v] = reward[v] + gamma * (reward[v] - base)
    return out


def group_advantages(reward, graded, group, scale, baseline, ddof=1, eps=1e-6):
    """Group advantages of one tree, [N]. Groups whose rewards differ by rounding only give zeros."""
    out = np.zeros(len(reward))
    for v in range(len(reward)):
        if not graded[v]:
            continue
        members = [u for u in range(len(reward)) if graded[u] and group[u] == group[v]]
        values = [float(reward[u]) for u in members]
        if max(values) - min(values) < 1e-9:
            continue
        mean = sum(values) / len(values)
        if baseline == "mean":
            out[v] = reward[v] - mean
        else:
            out[v] = reward[v] - sum(float(reward[u]) for u in members if u != v) / (len(values) - 1)
        if scale == "std":
            out[v] /= math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - ddof)) + eps
    return out


def overlong(length, budget, buffer, factor):
    """Penalty of one response."""
    return -min(max(length - (budget - buffer), 0), buffer) / buffer * factor


def policy_loss(lp, lp_old, lp_roll, lp_ref, entropy, advantage, mask, config, budget):
    """Loss of a whole batch of rows [B, R] (lists or arrays), as one number."""
    arrays = (lp, lp_old, lp_roll, lp_ref, entropy, advantage)
    lp, lp_old, lp_roll, lp_ref, entropy, advantage = (np.asarray(x, np.float64).tolist() for x in arrays)
    rows = [b for b in range(len(lp)) if any(mask[b])]
    loss = {}
    for b in rows:
        steps = [t for t in range(len(lp[b])) if mask[b][t]]
        n = len(steps)
        mean_log = sum(lp[b][t] - lp_old[b][t] for t in steps) / n
        gap = {t: lp_old[b][t] - lp_roll[b][t] for t in steps}
        vetoed = bool(config.tis_veto) and any(math.exp(d) < config.tis_veto for d in gap.values())
        for t in steps:
            log_w = lp[b][t] - lp_old[b][t] if config.ratio == "ppo" else mean_log
            w = math.exp(log_w)
            a = advantage[b]
            objective = min(w * a, min(max(w, 1 - config.clip_low), 1 + config.clip_high) * a)
            if config.dual_clip and a < 0:
                objective = max(objective, config.dual_clip * a)
            total = {
                "off": 0.0,
                "token": gap[t],
                "sequence": sum(gap.values()),
                "geometric": sum(gap.values()) / n,
            }[config.tis]
            weight = math.exp(total)
            if weight > config.tis_cap:
                weight = config.tis_cap if config.tis_mode == "truncate" else 0.0
            if vetoed:
                weight = 0.0
            value = -weight * objective - config.entropy_coef * entropy[b][t]
            if config.kl_coef:
                d = lp_ref[b][t] - lp[b][t]
                value += config.kl_coef * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.kl]
            loss[b, t] = value
    if config.aggregation == "token_mean":
        return sum(loss.values()) / len(loss)
    per_row = []
    for b in rows:
        values = [value for (row, _), value in loss.items() if row == b]
        per_row.append(sum(values) / (len(values) if config.aggregation == "seq_mean" else budget))
    return sum(per_row) / len(per_row)


def log_softmax(logits):
    """Over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
