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


def _answers(v, parent, graded):
    """The graded nodes of v's subtree, v among them."""
    children = [u for u in range(len(parent)) if parent[u] == v]
    return [v] * bool(graded[v]) + [u for child in children for u in _answers(child, parent, graded)]


def _above(v, parent):
    """The nodes above v, the root last."""
    return [] if parent[v] < 0 else [parent[v], *_above(parent[v], parent)]


def _all_equal(reward, graded):
    values = [float(reward[v]) for v in range(len(reward)) if graded[v]]
    return not values or max(values) - min(values) < 1e-9


def treerl(reward, parent, graded):
    """Advantages of one tree, [N]."""
    out = np.zeros(len(reward))
    if _all_equal(reward, graded):
        return out

    def value(v):
        return sum(float(reward[u]) for u in _answers(v, parent, graded)) / len(_answers(v, parent, graded))

    for v in range(1, len(reward)):
        if graded[v]:
            global_, local = value(v) - value(0), value(v) - value(parent[v])
            out[v] = (global_ + local) / math.sqrt(len(_answers(v, parent, graded)))
    return out


def treepo(reward, parent, graded):
    """Advantages of one tree, [N]."""
    out = np.zeros(len(reward))
    if _all_equal(reward, graded):
        return out
    for v in range(1, len(reward)):
        if graded[v]:
            groups = [_answers(a, parent, graded) for a in _above(v, parent)]
            over = [g for g in groups[:-1] if len(g) >= 2] + groups[-1:]
            out[v] = sum(reward[v] - sum(float(reward[u]) for u in g) / len(g) for g in over) / len(over)
    return out


def tree_advantages(reward, parent, agent, graded, problem, estimator, group="tree"):
    """Rewards used and advantages of a forest, [T, N] each; the arguments are [T, N], and `problem` is [T]."""
    shaped, out = np.array(reward, np.float64), np.zeros(np.shape(reward))
    for t in range(len(reward)):
        key = agent[t] if group == "tree_agent" else np.zeros(len(agent[t]))
        if estimator == "mars2":
            shaped[t] = shaped_tree(reward[t], parent[t], graded[t])
            out[t] = group_advantages(shaped[t], graded[t], key, "std", "mean")
        elif estimator in ("grpo", "tree_grpo"):
            out[t] = group_advantages(reward[t], graded[t], key, "std", "mean")
        elif estimator == "rloo":
            out[t] = group_advantages(reward[t], graded[t], key, "none", "leave_one_out")
        elif estimator == "treerl":
            out[t] = treerl(reward[t], parent[t], graded[t])
        elif estimator == "treepo":
            out[t] = treepo(reward[t], parent[t], graded[t])
        else:
            assert estimator == "sibling"
            out[t] = group_advantages(reward[t], graded[t], parent[t], "std", "mean")
    if estimator == "tree_grpo":
        for p in set(problem):
            mine = [t for t in range(len(reward)) if problem[t] == p]
            flat = np.concatenate([reward[t] for t in mine]), np.concatenate([graded[t] for t in mine])
            across = group_advantages(*flat, np.zeros(len(flat[0])), "std", "mean")
            for t, part in zip(mine, np.split(across, len(mine)), strict=True):
                out[t] += part
    return shaped, out


def shaped_tree(reward, parent, graded):
    """With the default γ and λ."""
    return shaped(reward, parent, graded, 0.5, 0.5)


def overlong(length, budget, buffer, factor):
    """Penalty of one response."""
    return -min(max(length - (budget - buffer), 0), buffer) / buffer * factor


def policy_loss(lp, lp_old, lp_roll, lp_ref, entropy, advantage, mask, config, budget, weights_at=None):
    """Loss of a whole batch of rows [B, R] (lists or arrays), one response each, as one number. `weights_at`: where
    what has no gradient is taken, CISPO's weights and the sequence ratio of GSPO-token; None is `lp`."""
    fixed = np.asarray(lp if weights_at is None else weights_at, np.float64)
    arrays = (lp, lp_old, lp_roll, lp_ref, entropy, advantage)
    lp, lp_old, lp_roll, lp_ref, entropy, advantage = (np.asarray(x, np.float64).tolist() for x in arrays)
    rows = [b for b in range(len(lp)) if any(mask[b])]
    loss = {}
    for b in rows:
        steps = [t for t in range(len(lp[b])) if mask[b][t]]
        n = len(steps)
        mean_log = sum(fixed[b][t] - lp_old[b][t] for t in steps) / n
        gap = {t: lp_old[b][t] - lp_roll[b][t] for t in steps}
        vetoed = bool(config.tis_veto) and any(math.exp(d) < config.tis_veto for d in gap.values())
        for t in steps:
            log_w = lp[b][t] - lp_old[b][t] if config.ratio == "ppo" else mean_log + lp[b][t] - fixed[b][t]
            w = math.exp(log_w)
            a = advantage[b]
            objective = min(w * a, min(max(w, 1 - config.clip_low), 1 + config.clip_high) * a)
            if config.objective == "cispo":
                w = math.exp(fixed[b][t] - lp_old[b][t])
                objective = min(max(w, 1 - config.clip_low), 1 + config.clip_high) * a * lp[b][t]
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
            if config.kl_coef and config.kl_in == "loss":
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


def response_kl(lp, lp_ref, kind):
    """Estimated KL of one response."""
    return sum({"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kind] for d in np.subtract(lp_ref, lp).tolist())


def log_softmax(logits):
    """Over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
