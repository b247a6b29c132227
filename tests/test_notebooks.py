"""Every lesson runs from top to bottom in a fresh kernel with FAST=1, and the checks of its exercises say what they should.
Its solution is the same notebook with the answers filled in: they are tried in the lesson's kernel, which trains the models
once. Two kernels run at a time, one thread each."""
import json
import os
import re
import symtable
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
LESSONS, SOLUTIONS = sorted(FOLDER.glob("*.ipynb")), sorted(FOLDER.glob("solutions/*.ipynb"))
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
each_notebook = pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=lambda path: str(path.relative_to(FOLDER)))

# Stands in for what notebook 04's `measure` would have found, for the checks of its exercise 6.
MEASURED = ("MEASURED = {(seed, lambda_0, ()): {'accuracy': 0.5 - lambda_0 + seed / 100, 'scale': 50.0 * seed - lambda_0}"
            " for seed in (1, 2) for lambda_0 in (0, 0.3)}; ")

# Typical wrong answers, {notebook: [(exercise, code, a word of the reason that the check gives)]}.
WRONG = {
    "01_readout_blind_spot": [
        (1, "answer_1 = lambda g, h: (g * h).sum(-1) / (g.norm(dim=-1) * h.norm(dim=-1))", "negative"),
        (1, "answer_1 = lambda g, h: (g * h).sum(-1).abs()", "divide"),
        (1, "answer_1 = lambda g, h: (g * h).sum()", "shape"),
        (1, "answer_1 = lambda g: 1 / 0", "TypeError"),
        (1, "answer_1 = lambda g, h: None", "needs a `return`"),
        (1, "answer_1 = lambda g, h: (g * h).sum(2).abs() / (g.norm(dim=2) * h.norm(dim=2))", "IndexError"),
        (1, "answer_1 = lambda g, h: (g * h).sum(-1).abs() / (g.norm(dim=-1) * h.norm(dim=-1) + 1e-4)", "add nothing"),
        (1, "answer_1 = lambda g, h: torch.nn.functional.cosine_similarity(g, h, dim=-1) ** 2", "square of the fraction"),
        (1, "answer_1 = lambda g, h: torch.nn.functional.cosine_similarity(g, h, dim=-1).relu()", "should be"),
        (2, "answer_2 = lambda s, a, c, K: (s + K * a, K * c / s)", "first s"),
        (2, "answer_2 = lambda s, a, c, K: (s + K * a, sum(c / (s + k * a) for k in range(1, K + 1)))", "before"),
        (2, "answer_2 = lambda s, a, c, K: (sum(c / (s + k * a) for k in range(K)), s + K * a)", "wrong order"),
        (2, "answer_2 = lambda s, a, c, K: (s + K * a, c / a * math.log(1 + K * a / s))", "yours sum to 0.881680"),
        (2, "answer_2 = lambda s, a, c, K: (18.0, 3 / 10 + 3 / 12 + 3 / 14 + 3 / 16)", "expected 6"),
        (2, "answer_2 = lambda s, a, c, K: (s + K * a, (c / np.arange(s, s + K * a, a)).sum())", "for 1, 0.1, 1, 3"),
        (2, "answer_2 = lambda s, a, c, K: s + K * a", "two numbers"),
        (3, "answer_3 = lambda model, idx, targets, lam: model.loss(idx, targets)[0]", "without any penalty"),
        (3, "answer_3 = lambda model, idx, targets, lam: model.loss(idx, targets)[0]"
            " + lam * sum(H.square().sum(-1).mean() for H in model.states(idx)) / 4", "too large"),
        (3, "answer_3 = lambda model, idx, targets, lam: (model.loss(idx, targets)[0]"
            " + lam * torch.stack(model.states(idx)).square().mean()).item()", "no gradient"),
        (3, "answer_3 = lambda model, idx, targets, lam: model.loss(idx, targets)[0]"
            " + lam * torch.stack(model.states(idx)).square().mean().item()", "its gradient is not"),
        (3, "answer_3 = lambda model, idx, targets, lam: model.loss(idx, targets)", "tuple"),
        (3, "answer_3 = lambda model, idx, targets, lam: model.loss(idx, targets)[0]"
            " + 0.01 * torch.stack(model.states(idx)).square().mean()", "not for lambda = 1"),
        (3, "answer_3 = lambda model, idx, targets, lam: model.loss(idx, targets)[0]"
            " + lam * torch.stack(model.states(targets)).square().mean()", "yours adds"),
        (4, "answer_4 = lambda H, H_1: H * (H_1.norm() / H.norm())", "own norm"),
        (4, "answer_4 = lambda H, H_1: H_1", "direction"),
        (4, "answer_4 = lambda H, H_1: H * (H_1.norm(dim=-1, keepdim=True) / H.norm(dim=-1, keepdim=True)).clamp(max=1)", "shorter"),
        (5, "answer_5 = lambda margins, threshold: ((margins >= threshold).int().argmax(0) + 1).float().mean()", "argmax"),
        (5, "answer_5 = lambda margins, threshold: (torch.cat([margins > threshold, margins[:1] < 9]).int().argmax(0) + 1.0).mean()",
         "equal to the threshold"),
        (5, "answer_5 = lambda margins, threshold: torch.where((margins >= threshold).any(0), (margins >= threshold).int()"
            ".argmax(0) + 1.0, 4.0).mean()", "one more than the rows"),
        (5, "answer_5 = lambda margins, threshold: ((torch.cat([margins, 0 * margins[:1] + 1]) >= threshold).int().argmax(0)"
            " + 1.0).mean()", "threshold of 1.5"),
        (6, "answer_6 = dict(supervision='per_loop', readout='rmsnorm')", "drifts"),
        (6, "answer_6 = dict(norm_penalty=1e-5)", "drifts"),  # with FAST as weak as 1e-4 in a full run
        (6, "answer_6 = dict(inter_loop_norm=True)", "not good enough"),
        (6, "answer_6 = dict(supervision='terminal', readout='raw')", "exit 1 is not good enough"),
        (6, "answer_6 = dict(readout='rms')", "UserError"),
        (6, "answer_6 = dict(width=3)", "keys"),
    ],
    "02_stars_addition": [
        (1, "answer_1 = lambda a, b: f'{a}+{b}= {a + b}§'", "backwards"),
        (1, "answer_1 = lambda a, b: f'{a}+{b}={str(a + b)[::-1]}§'", "space"),
        (1, "answer_1 = lambda a, b: f'{a}+{b}= {str(a + b)[::-1]}'", "end mark"),
        (1, "answer_1 = lambda a, b: f'{a}+{b}= {int(str(a + b)[::-1])}§'", "the model reads"),
        (2, "answer_2 = [[2.0, 0.0], [0.0, 0.5]]", "normal"),
        (2, "answer_2 = [[0.5, 1.0], [0.0, 0.5]]", "stretch"),
        (2, "answer_2 = [[0.5, float('inf')], [0.0, 0.8]]", "finite"),
        (3, "answer_3 = lambda step, h, v, eps=1e-5: (step(h + eps * v) - step(h)) / eps", "one-sided"),
        (3, "answer_3 = lambda step, h, v, eps=1e-5: (step(h + eps * v) - step(h - eps * v)) / eps", "twice"),
        (3, "answer_3 = lambda step, h, v, eps=1e-6: (step(h + eps * v) - step(h)) / eps", "one-sided"),
        (3, "answer_3 = lambda step, h, v, eps=1e-5: (step(h + eps * v) - step(h - eps * v)) / 2 * eps", "in brackets"),
        (3, "def answer_3(step, h, v, eps=1e-5):\n    v = v / v.flatten(1).norm(dim=1)[:, None, None]\n"
            "    return (step(h + eps * v) - step(h - eps * v)) / (2 * eps)", "unit v only"),
        (4, "answer_4 = (3.85, 1.2, 1.5)", "sum of the squares"),
        (4, "answer_4 = (0.9625 ** 0.5, 1.2, 1.5)", "root of the mean square"),
        (4, "answer_4 = (0.4, 1.2, 1.5)", "off the diagonal"),
        (4, "answer_4 = (0.775, 1.2, 1.5)", "squares"),
        (4, "answer_4 = (0.9625, 1.5, 1.5)", "two steps"),
        (4, "answer_4 = (0.9625, 1.5, 1.2)", "another order"),
        (4, "answer_4 = (0.9625, 1.6, 1.5)", "on the diagonal"),
        (4, "answer_4 = (0.9625, 1.2, 1.2)", "fourth axis"),
        (5, "answer_5 = lambda steps: (steps[:-1] / steps[1:]).mean()", "upside down"),
        (5, "answer_5 = lambda steps: (steps[1:] / steps[:-1]).mean()", "geometric"),
        (5, "answer_5 = lambda steps: np.exp(np.polyfit(range(len(steps)), steps.log(), 1)[0])", "all four ratios"),
        (5, "answer_5 = lambda steps: (steps[1:] / steps[:-1]).log().median().exp()", "all four ratios"),
        (5, "answer_5 = lambda steps: (steps[-1] / steps[-3]).sqrt()", "all four ratios"),
        (6, "answer_6 = 1.0", "not below 1"),
        (5, "answer_5 = lambda steps: (steps[-1] / steps[0]) ** (1 / len(steps))", "root of that order"),
        (6, "answer_6 = 0.05", "a larger"),
        (6, "answer_6 = 0.22", "a smaller"),
        (6, "answer_6 = 0.2", "a larger"),
    ],
    "03_full_bandwidth": [
        (1, "answer_1 = 16 * c.n_embd / c.vocab_size", "divided by V"),
        (1, "answer_1 = 16 * c.n_embd / math.log(c.vocab_size)", "natural logarithm"),
        (1, "answer_1 = c.n_embd / math.log2(c.vocab_size)", "16 bits"),
        (1, "answer_1 = math.log2(c.vocab_size) / (16 * c.n_embd)", "share of a state"),
        (1, "answer_1 = 16 * c.n_embd // math.log2(c.vocab_size)", "the state has 12,288"),
        (2, "answer_2 = lambda t, L, plain: L", "without feedback"),
        (2, "answer_2 = lambda t, L, plain: t * L", "no layers of its own"),
        (2, "answer_2 = lambda t, L, plain: L * (t - max(s for s in plain if s <= t) + 1)", "cut the chain"),
        (2, "answer_2 = lambda t, L, plain: (t - 1) * L", "first position runs"),
        (3, "answer_3 = lambda model, h, idx: model.stack(model.fuse(model.embed(idx), h))", "its own state"),
        (3, "answer_3 = lambda model, h, idx: model.stack(model.fuse(model.embed(idx), h.roll(1, 1)))", "keeps the plain"),
        (3, "answer_3 = lambda model, h, idx: torch.cat([model.embed(idx)[:, :1], model.fuse(model.embed(idx)[:, 1:], h[:, :-1])], 1)",
         "run the stack"),
        (3, "answer_3 = lambda model, h, idx: model.stack(torch.cat([model.embed(idx)[:, :1], model.fuse(model.embed(idx)[:, 1:],"
            " torch.cat([h[:, 2:], 0 * h[:, :1]], 1))], 1))", "future"),
        (3, "answer_3 = lambda model, h, idx: model.stack(model.feedback(h, model.embed(idx), model.plain(idx)))", "by hand"),
        (3, "def answer_3(model, h, idx):\n    e = model.embed(idx)\n    h = model.stack(e)\n"
            "    return model.stack(torch.cat([e[:, :1], model.fuse(e[:, 1:], h[:, :-1])], 1))", "the argument h"),
        (3, "answer_3 = lambda model, h, idx: model.stack(torch.cat([model.embed(idx)[:, :1], model.fuse(model.embed(idx), h)[:, 1:]],"
            " 1))", "its own state"),
        (4, "answer_4 = lambda n: n", "one too many"),
        (4, "answer_4 = lambda n: 1", "still off"),
        (4, "answer_4 = lambda n: n / 2", "whole number"),
        (5, "answer_5 = lambda h, bits: (h * 2 ** bits / h.abs().max()).round() * h.abs().max() / 2 ** bits",
         "different values"),
        (5, "answer_5 = lambda h, bits: h", "different values"),
        (5, "answer_5 = lambda h, bits: 0 * h", "end points"),
        (5, "def answer_5(h, bits):\n    low, gap = h.min(), (h.max() - h.min()) / (2 ** bits - 1)\n"
            "    return ((h - low) / gap).round() * gap + low", "spread evenly"),
        (5, "answer_5 = lambda h, bits: (h / h.abs().max() * max(1, 2 ** (bits - 1) - 1)).round() * h.abs().max()"
            " / max(1, 2 ** (bits - 1) - 1)", "different values"),
        (6, "answer_6 = dict(change=dict(fusion='add'), seeds=(1,), claim='worse')", "at least three"),
        (6, "answer_6 = dict(change=dict(fusion='add'), seeds=(1, 1, 1), claim='worse')", "at least three"),
        (6, "answer_6 = dict(change=dict(fusion='add'), seeds=(1, 2, 3), claim='much worse')", "none of"),
        (6, "answer_6 = dict(change=dict(jitter=0.02), seeds=(1, 2, 3), claim='not shown')", "changes nothing"),
        (6, "answer_6 = dict(change=dict(fusion='sum'), seeds=(1, 2, 3), claim='worse')", "UserError"),
        (6, "answer_6 = dict(base=[0.9, 0.8, 0.85], changed=[0.4, 0.3, 0.2], claim='worse')", "the keys"),
        (6, "runs = [[measure(seed, **change) for seed in (1, 2, 3)] for change in ({}, dict(fusion='add'))]\n"
            "claim = 'worse' if max(runs[1]) >= min(runs[0]) else 'better'\n"
            "answer_6 = dict(change=dict(fusion='add'), seeds=(1, 2, 3), claim=claim)", "base"),
    ],
    "04_one_map": [
        (1, "answer_1 = lambda h, after: (((after - h) * h).sum(-1), (after - h).norm(dim=-1))", "divide by the length"),
        (1, "answer_1 = lambda h, after: (after.norm(dim=-1) - h.norm(dim=-1), (after - h).norm(dim=-1))", "Pythagoras"),
        (1, "answer_1 = lambda h, after: (((after - h) * h).sum(-1) / h.norm(dim=-1), (after - h).norm(dim=-1))", "whole update"),
        (1, "answer_1 = lambda h, after: (((after - h) * h).sum(-1).abs() / h.norm(dim=-1), 0 * h[..., 0])", "sign"),
        (1, "answer_1 = lambda h, after: ((after * h).sum(-1) / h.norm(dim=-1), 0 * h[..., 0])", "not the update"),
        (1, "answer_1 = lambda h, after: (((after - h) * h).sum() / h.norm(), (after - h).norm())", "one number per token"),
        (1, "answer_1 = lambda h, after: (((after - h) * h).sum(-1) / h.norm(dim=-1),"
            " (after / after.norm(dim=-1, keepdim=True) - h / h.norm(dim=-1, keepdim=True)).norm(dim=-1))", "angular step"),
        (2, "answer_2 = lambda J, draws: (J.norm(), J.norm())", "Frobenius"),
        (2, "answer_2 = lambda J, draws: (J.norm() / len(J) ** 0.5, (J @ torch.randn(len(J), draws)).square().sum(0).mean()"
            ".sqrt())", "not unit"),
        (2, "answer_2 = lambda J, draws: (J.norm() / len(J) ** 0.5, (J @ torch.nn.functional.normalize(torch.randn(len(J), draws)"
            ", dim=0)).norm(dim=0).mean())", "mean of the norms"),
        (2, "answer_2 = lambda J, draws: (torch.linalg.matrix_norm(J, 2), 0)", "largest singular"),
        (2, "answer_2 = lambda J, draws: (torch.linalg.eigvals(J).abs().square().mean().sqrt(), 0)", "eigenvalues"),
        (2, "answer_2 = lambda J, draws: (J.diag().square().mean().sqrt(), 0)", "diagonal"),
        (2, "answer_2 = lambda J, draws: (J.norm() / len(J) ** 0.5, (J @ torch.nn.functional.normalize(torch.rand(len(J), draws)"
            ", dim=0)).square().sum(0).mean().sqrt())", "both signs"),
        (2, "answer_2 = lambda J, draws: (J.norm() / len(J) ** 0.5, (J @ torch.randn(len(J), draws)).square().sum(0).mean()"
            ".div(len(J)).sqrt())", "not on average"),
        (2, "answer_2 = lambda J, draws: (J.norm() / len(J) ** 0.5,) * 2", "the exact one"),
        (3, "answer_3 = 1", "does not make J = 0"),
        (3, "answer_3 = T - 1", "one step more"),
        (3, "answer_3 = T * D", "whole blocks"),
        (3, "answer_3 = T + 2", "0 before"),
        (3, "answer_3 = 0", "how many moves"),
        (3, "answer_3 = 5", "measured"),
        (4, "answer_4 = lambda loss, h: torch.tensor(0.0)", "parallel to h"),
        (4, "answer_4 = lambda loss, h: (lambda h: (lambda g: (g * h).sum(-1) / g.norm(dim=-1) / h.norm(dim=-1))"
            "(torch.autograd.grad(loss(h), h)[0]).mean().abs())(h.detach().requires_grad_())", "absolute value comes before"),
        (4, "def answer_4(loss, h):\n    u = (h / h.norm(dim=-1, keepdim=True)).requires_grad_()\n    g, = torch.autograd.grad(loss(u), u)\n"
            "    return torch.nn.functional.cosine_similarity(g, u, dim=-1).abs().mean()", "at h itself"),
        (5, "answer_5 = lambda f, h, v: torch.func.vjp(f, h)[1](v)[0].square().sum()", "mean over rows"),
        (5, "answer_5 = lambda f, h, v: torch.func.vjp(f, h)[1](v)[0].square().mean()", "all N coordinates"),
        (5, "answer_5 = lambda f, h, v: (torch.func.vjp(f, h)[1](v)[0].square().sum() / len(h)).detach()", "no graph"),
        (5, "answer_5 = lambda f, h, v: torch.func.vjp(f, h)[1](v)[0].square()", "one number"),
        (5, "answer_5 = lambda f, h, v: torch.func.vjp(f, h)[1](v)[0].square().sum() / 4", "times the right one"),
        (5, "answer_5 = lambda f, h, v: (torch.func.vjp(f, h)[1](v)[0].square().sum() / len(h)).item()", "plain number"),
        (6, "answer_6 = dict(without=[50.0, 40.0], with_jsrr=[20.0, 10.0], claim='lower')", "kept by measure"),
        (6, "answer_6 = dict(quantity='scale', seeds=[1], lambda_0=0.3, claim='lower')", "one seed"),
        (6, "answer_6 = dict(quantity='scale', seeds=[1, 1], lambda_0=0.3, claim='lower')", "one seed"),
        (6, "answer_6 = dict(quantity='scale', seeds=[1, 2], lambda_0=0.3, claim='lower')", "has not been measured"),
        (6, MEASURED + "answer_6 = dict(quantity='scale', seeds=[1, 2], lambda_0=0.3, claim='lower')", "overlap"),
        (6, MEASURED + "answer_6 = dict(quantity='accuracy', seeds=[1, 2], lambda_0=0.3, claim='higher')", "say 'lower'"),
        (6, MEASURED + "answer_6 = dict(quantity='scale', seeds=[1, 2], lambda_0=0, claim='not shown')", "without JSRR"),
    ],
}

# Right answers in an unusual form, {notebook: [(exercise, code)]}: the check must say Right.
RIGHT = {
    "01_readout_blind_spot": [
        (1, "answer_1 = lambda g, h: torch.nn.functional.cosine_similarity(g, h, dim=-1).abs()"),
        (1, "answer_1 = lambda g, h: np.abs((g * h).sum(-1).numpy()) / (g.norm(dim=-1) * h.norm(dim=-1)).numpy()"),
        (1, "def answer_1(g, h):\n    g /= g.norm(dim=-1, keepdim=True)\n    h /= h.norm(dim=-1, keepdim=True)\n"
            "    return (g * h).sum(-1).abs()"),
        (2, "answer_2 = lambda s, a, c, K: (s + K * a, (c / (s + a * torch.arange(K))).sum())"),
        (2, "answer_2 = lambda s, a, c, K: np.array([s + K * a, sum(c / (s + k * a) for k in range(K))])"),
        (3, "def answer_3(model, idx, targets, lam):\n    model.config.norm_penalty = lam\n    return model.loss(idx, targets)[0]"),
        (3, "answer_3 = lambda model, idx, targets, lam: model.loss(idx, targets)[0]"
            " + lam * torch.stack(model.states(idx)).pow(2).mean()"),
        (4, "answer_4 = lambda H, H_1: normalize(H, dim=-1) * H_1.norm(dim=-1)[..., None]"),
        (4, "answer_4 = lambda H, H_1: H.mul_(H_1.norm(dim=-1, keepdim=True)).div_(H.norm(dim=-1, keepdim=True)"
            " / H_1.norm(dim=-1, keepdim=True))"),
        (4, "answer_4 = looped_gpt.freeze_loop1"),
        (4, "answer_4 = lambda H, H_1: (H.double() * H_1.norm(dim=-1, keepdim=True) / H.norm(dim=-1, keepdim=True)).numpy()"),
        (5, "answer_5 = lambda margins, threshold: 1 + (margins < threshold).cumprod(0).sum() / margins.shape[1]"),
        (5, "answer_5 = lambda margins, threshold: np.mean([next((k for k, m in enumerate(column, 1) if m >= threshold),"
            " len(column) + 1) for column in margins.T.tolist()])"),
        (6, "answer_6 = dict(inter_loop_norm=False, norm_penalty=0.01)"),
    ],
    "03_full_bandwidth": [
        (1, "answer_1 = math.ceil(16 * c.n_embd / math.log2(c.vocab_size))"),
        (1, "answer_1 = torch.tensor(c.n_embd) * 16 / torch.tensor(c.vocab_size).log2()"),
        (2, "answer_2 = lambda t, L, plain: L * (1 + t - sum(s <= t for s in plain))"),
        (2, "def answer_2(t, L, plain):\n    plain.discard(1)\n    return float(L * (t - len([s for s in plain if s <= t])))"),
        (3, "def answer_3(model, h, idx):\n    e = model.embed(idx)\n    h[:, 1:] = h[:, :-1].clone()\n"
            "    x = model.fuse(e, h)\n    x[:, 0] = e[:, 0]\n    return model.stack(x)"),
        (3, "answer_3 = lambda model, h, idx: model.stack(torch.where((torch.arange(idx.shape[1]) == 0)[:, None],"
            " model.embed(idx), model.fuse(model.embed(idx), h.roll(1, 1))))"),
        (4, "answer_4 = lambda n: torch.tensor(n) - 1"),
        (4, "answer_4 = lambda n: max(0.0, n - 1.0)"),
        (5, "def answer_5(h, bits):\n    values = torch.linspace(-h.abs().max(), h.abs().max(), 2 ** bits)\n"
            "    return values[(h[..., None] - values).abs().argmin(-1)]"),
        (5, "def answer_5(h, bits):\n    m = h.abs().max()\n    gap = 2 * m / (2 ** bits - 1)\n"
            "    return h.add_(m).div_(gap).round_().mul_(gap).sub_(m)"),
        (6, "runs = [[measure(seed, **change) for seed in (4, 5, 6)] for change in ({}, dict(input_norm=False))]\n"
            "claim = 'better' if min(runs[1]) > max(runs[0]) else 'worse' if max(runs[1]) < min(runs[0]) else 'not shown'\n"
            "answer_6 = dict(change=dict(input_norm=False), seeds=[4, 5, 6], claim=claim)"),
    ],
    "02_stars_addition": [
        (1, "answer_1 = lambda a, b: ''.join([str(a), '+', str(b), '=', ' ', *reversed(str(a + b)), '§'])"),
        (2, "answer_2 = np.array([[0.0, 10.0], [0.0, 0.0]])"),
        (2, "answer_2 = [torch.tensor([0.5, 9.0]), torch.tensor([0.0, 0.5])]"),
        (2, "answer_2 = [[0.5, 0.0], [-4.0, 0.5]]"),
        (3, "def answer_3(step, h, v, eps=1e-5):\n    h += eps * v\n    after = step(h)\n    h -= 2 * eps * v\n"
            "    return (after - step(h)) / 2 / eps"),
        (3, "answer_3 = lambda step, h, v: torch.func.jvp(step, (h,), (v,))[1]"),
        (4, "answer_4 = torch.tensor([3.85 / 4, 1.2, 1.5], dtype=torch.float64)"),
        (4, "answer_4 = [0.96, 1.2, 1.5]"),
        (5, "answer_5 = lambda steps: float((steps[-1] / steps[0]) ** (1 / (len(steps) - 1)))"),
        (5, "answer_5 = lambda steps: np.exp(np.diff(np.log(steps.numpy())).mean())"),
        (6, "answer_6 = 0.2124"),
        (6, "answer_6 = torch.tensor(0.21)"),
    ],
    "04_one_map": [
        (1, "def answer_1(h, after):\n    r = torch.nn.functional.cosine_similarity(after - h, h, dim=-1) * (after - h).norm(dim=-1)\n"
            "    return r, ((after - h).square().sum(-1) - r.square()).sqrt()"),
        (2, "answer_2 = lambda J, draws: (torch.linalg.svdvals(J).square().mean().sqrt(),"
            " sum((J @ unit(torch.randn(1, len(J), 1))[0]).square().sum() for _ in range(draws)).div(draws).sqrt())"),
        (3, "answer_3 = 12.0"),
        (4, "def answer_4(loss, h):\n    h.requires_grad_()\n    loss(h).backward()\n"
            "    return torch.nn.functional.cosine_similarity(h.grad, h, dim=-1).abs().mean().item()"),
        (5, "def answer_5(f, h, v):\n    h.requires_grad_()\n    JTv, = torch.autograd.grad(f(h), h, v, create_graph=True)\n"
            "    return JTv.flatten(1).square().sum(1).mean()"),
        (6, MEASURED + "answer_6 = dict(quantity='scale', seeds=(2, 1), lambda_0=0.3, claim='not shown')"),
    ],
}


def is_solution(path):
    return path in SOLUTIONS


def solution_of(path):
    return path.parent / "solutions" / path.name


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def is_check(cell):
    """Whether it is the cell that checks an exercise; the answer stands in the one before it."""
    return "check" in cell.metadata.get("tags", [])


def checks(nb):
    return [cell for cell in nb.cells if is_check(cell)]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


# A warning that Python shows: the file that raised it, line, category, message, and, indented, the line itself.
OF_A_DEPENDENCY = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\].*:\d+: \w+: (?:.*\n)*?  .*\n?", re.M)


def our_stderr(nb):
    """What the notebook wrote to stderr, without the warnings that were raised inside an installed package."""
    outputs = [output for cell in nb.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"]
    return OF_A_DEPENDENCY.sub("", "".join(output.text for output in outputs))


# Around whatever an answer does: afterwards every name is what it was.
KEEP = "KEPT = dict(globals())"
RESTORE = "[globals().pop(name) for name in globals().keys() - KEPT.keys() - {'KEPT'}]\nglobals().update(KEPT)"


def with_answers(path):
    """The lesson. Each check is followed by itself on the wrong answers for it (tagged `wrong`), the unusual right ones and
    the solution's (tagged `right`); a later cell that looks at an answer is run with the solution's too."""
    nb = nbformat.read(path, as_version=4)
    solution = code_cells(solution_of(path))
    answers = [answer.source for answer, check in zip(solution, solution[1:]) if is_check(check)]
    cells, number = [], 0

    def insert(*sources, **metadata):
        new = [nbformat.v4.new_code_cell(source) for source in (KEEP, *sources, RESTORE)]
        new[-2].metadata.update(metadata)  # the check
        cells.extend(new)

    for cell in nb.cells:
        cells.append(cell)
        if is_check(cell):
            number += 1
            for n, code, reason in WRONG[path.stem]:
                if n == number:
                    insert(code, cell.source, tags=["wrong"], reason=reason)
            for code in [code for n, code in RIGHT[path.stem] if n == number] + [answers[number - 1]]:
                insert(code, cell.source, tags=["right"])
        elif cell.cell_type == "code":
            for n in range(number):
                if f"answer_{n + 1}" in cell.source:
                    insert(answers[n], cell.source)
    nb.cells = cells
    return nb


def run(path, ipython_folder):
    nb = with_answers(path)
    folder = solution_of(path).parent  # a path that is found from there is found from the lesson's folder
    client = NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=os.environ | {"FAST": "1", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(ipython_folder)})
    return nb


@pytest.fixture(scope="module")
def executed(request, tmp_path_factory):
    """{path: future of the executed notebook} of those that the selected tests want."""
    wanted = dict.fromkeys(item.callspec.params["path"] for item in request.session.items
                           if "executed" in getattr(item, "fixturenames", ()))
    pool, folder = ThreadPoolExecutor(2), tmp_path_factory.mktemp("ipython")
    yield {path: pool.submit(run, path, folder) for path in wanted}
    pool.shutdown(cancel_futures=True)


def test_each_lesson_has_its_solution():
    assert LESSONS and [solution_of(path) for path in LESSONS] == SOLUTIONS


def names_set(source):
    symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def names_read(table):
    """The global names that a cell, or a function in it, looks up."""
    outside = {s.get_name() for s in table.get_symbols() if table.get_type() == "module" or s.is_global()}
    return outside.union(*map(names_read, table.get_children()))


@each_lesson
def test_a_solution_is_its_lesson_with_the_answers_filled_in(path):
    """What runs in the one then runs in the other: code differs in the answers only, and no later cell takes a name from
    one of them, except for answer_1, answer_2, .."""
    lesson, solution = code_cells(path), code_cells(solution_of(path))
    answers = [i for i in range(len(lesson) - 1) if is_check(lesson[i + 1])]
    assert [i for i, (a, b) in enumerate(zip(lesson, solution, strict=True)) if a.source != b.source] == answers
    for i in answers:
        given = names_set(lesson[i].source) | names_set(solution[i].source)
        for earlier in solution[:i]:  # whose functions would find another value
            functions = symtable.symtable(earlier.source, path.name, "exec").get_children()
            assert not given & set().union(*map(names_read, functions)), (given, earlier.source)
        for later in solution[i + 2:]:
            given -= names_set(later.source)
            taken = names_read(symtable.symtable(later.source, path.name, "exec"))
            assert all(name.startswith("answer_") for name in given & taken), (given & taken, later.source)


@each_lesson
def test_runs_in_a_fresh_kernel_and_its_checks_say_what_they_should(path, executed):
    nb = executed[path].result()
    assert not our_stderr(nb)
    assert 4 <= len(checks(nb)) <= 6
    for number, cell in enumerate(checks(nb), 1):
        assert printed(cell).startswith(f"Not yet: exercise {number} still holds `...`. Write your answer in the cell")
    tagged = lambda tag: [cell for cell in nb.cells if tag in cell.metadata.get("tags", [])]
    for cell in tagged("wrong"):
        text = printed(cell)
        assert text.startswith("Not yet: ") and cell.metadata.reason in text, (cell.source, text)
    for cell in tagged("right"):
        assert printed(cell).startswith("Right: "), (cell.source, printed(cell))
    assert len(tagged("right")) == len(checks(nb)) + len(RIGHT[path.stem])


def test_a_dependencys_warning_is_forgiven_and_ours_is_not():
    theirs = "/usr/lib/python3/site-packages/torch/jit/_script.py:1491: FutureWarning: it is deprecated\n  warnings.warn(\n"
    long = "C:\\Python Files\\Lib\\site-packages\\numpy\\a.py:7: UserWarning: in two\nlines\n  f(x)\n"
    ours = "/home/me/notebooks/teaching.py:12: RuntimeWarning: divide by zero\n  return a / b\n"
    for text, left in ((theirs, ""), (ours, ours), (theirs + ours + long, ours), ("stopped\n" + long + "lost\n", "stopped\nlost\n")):
        output = nbformat.v4.new_output("stream", name="stderr", text=text)
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])])
        assert our_stderr(nb) == left


@each_notebook
def test_is_committed_with_small_outputs_of_a_complete_run(path):
    nb = nbformat.read(path, as_version=4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "FAST = False" in printed(code[-1])
    for output in (output for cell in code for output in cell.outputs):
        assert output.output_type in ("stream", "display_data") and output.get("name") != "stderr", output
        data = output.get("data", {})
        assert len(json.dumps(data.get("image/png", ""))) < 400_000
        assert len(data.get("text/html", "")) < 1_500_000  # a moving picture
        others = {kind: v for kind, v in data.items() if kind not in ("image/png", "text/html")}
        assert len(json.dumps(others) + output.get("text", "")) < 200_000
    for number, cell in enumerate(checks(nb), 1):
        assert printed(cell).startswith("Right: " if is_solution(path) else f"Not yet: exercise {number} ")


def test_a_check_never_raises_and_says_why(capsys):
    sys.path.insert(0, str(FOLDER))
    try:
        from teaching import check
    finally:
        sys.path.remove(str(FOLDER))
    test = lambda f: ... if f(2) is ... else None if f(2) == 4 else f"for 2 it gives {f(2)}"
    for answer in (..., lambda x: ..., lambda x: 1 / 0, lambda x: x + 1, lambda x: x * x):
        check(7, answer, test, "a square")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Not yet"] * 4 + ["Right"]
    assert lines[0] == lines[1] and "exercise 7 still holds" in lines[0]
    assert "ZeroDivisionError" in lines[2] and "for 2 it gives 3" in lines[3]
