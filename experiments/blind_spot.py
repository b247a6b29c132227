"""What the paper of looped_gpt.py (arXiv 2606.24898) measures: its tables and figures.

    python experiments/blind_spot.py table1 --max_steps=300            # the seven conditions
    python experiments/blind_spot.py leap --max_steps=300 --eval_interval=20
    python experiments/blind_spot.py table1 --preset=44m --dataset=wikitext-103 --seeds=42,101,202
    python experiments/blind_spot.py out/looped_gpt-tiny               # every diagnostic of one run

table1: {terminal, per_loop} supervision x {RMSNorm, raw} readout, the final_only readout, and the
norm penalty: perplexity at every exit, and the norm that the state ends with.
leap: what the norm does in training, and what does not make it do so.
A run: Lemma 1 and Lemma 2 in numbers, which loop's loss sees the scale of which state, token norms,
interventions, and variable depth, that is the exits as a frontier of perplexity and speed, and
halting sequence by sequence.
"""
import copy
import functools
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import looped_gpt
import train
from experiments import sweeps
from experiments.sweeps import Sweep, tabulate
from looped_gpt import (lemma2_prediction, loss_per_loop, radial_cosine, scale_and_direction,
                        token_loss)


# --------------------------------------------------------------------------------------------------
# Table 1: what each loss does to the scale.

TABLE1 = {
    "terminal+rmsnorm": dict(supervision="terminal", readout="rmsnorm"),
    "terminal+raw": dict(supervision="terminal", readout="raw"),
    "terminal+rmsnorm+penalty": dict(supervision="terminal", readout="rmsnorm", norm_penalty=0.01),
    "per_loop+rmsnorm": dict(supervision="per_loop", readout="rmsnorm"),
    "per_loop+raw": dict(supervision="per_loop", readout="raw"),
    "per_loop+final_only": dict(supervision="per_loop", readout="final_only"),
    "per_loop+rmsnorm+penalty": dict(supervision="per_loop", readout="rmsnorm", norm_penalty=0.01),
}


PPL = "validation perplexity at loop"
NORM = "mean ||H_K|| at step"
AXES = {PPL: ("linear", "log", "Dense supervision trains exits"),
        NORM: ("linear", "log", "Only a visible scale stays controlled")}


def evaluations(run):
    """The rows of a run's log that hold an evaluation."""
    return [row for row in train.read_csv(run / "log.csv") if "val_final_norm" in row]


def leap(run):
    """The norm of the last state over training, from the run's log."""
    log = evaluations(run)
    yield NORM, [row["step"] for row in log], "", [row["val_final_norm"] for row in log]


def table1(run):
    """The same, and perplexity after each loop; then what the run's checkpoint gives: what each
    loss sees, what the state does, and what of it an intervention or an early exit needs."""
    yield from leap(run)
    model, options, tokenizer = train.load_model(run, "looped_gpt", looped_gpt.LoopedGPT)
    loops = range(1, model.config.num_loops + 1)
    last = evaluations(run)[-1]
    yield PPL, loops, "", [train.perplexity(last[f"val_ce_{k}"]) for k in loops]

    _, batches = train.validation_batches(options, tokenizer, model, options.eval_batches)
    fraction, cosine = radial_gradient_matrix(model, batches)
    yield "radial gradient fraction at loop", loops, "", fraction.diagonal()
    yield "radial fraction of CE_K's gradient at loop", loops, "", fraction[-1]
    yield "radial cosine of CE_K's gradient at loop", loops, "", cosine[-1]
    quantiles = looped_gpt.norm_quantiles(model, batches)
    yield "||H_K|| over tokens", quantiles, "", list(quantiles.values())
    dynamics = looped_gpt.scale_dynamics(model, batches)
    far = (1, 2, 4, 8, 16, 29)
    for name, column in (("scale s", 0), ("angular step", 2), ("angular step * s", 3)):
        yield f"{name} at loop", far, "", [dynamics[k - 1, column] for k in far]
    yield "change of CE under clamp", CLAMPS, "", clamp_changes(model, batches)
    halted = calibrated_halting(model, batches)
    yield "calibrated halting", ("loops", "PPL"), "", [halted["loops"], halted["ppl"]]


LEAP = {  # why the norm leaps, and then sinks
    "default": {},
    "cut-gradient": dict(cut_gradient=True),
    "no-weight-decay": dict(weight_decay=0.0),
    "a-tenth-of-the-rate": dict(lr=3e-4),
}
SWEEPS = {"table1": Sweep(TABLE1, functools.partial(tabulate, table1, AXES)),
          "leap": Sweep(LEAP, functools.partial(tabulate, leap, AXES))}


# --------------------------------------------------------------------------------------------------
# Lemma 1 across loops: which cross-entropy sees the scale of which state

def radial_gradient_matrix(model, batches):
    """(fraction, cosine), each (K, K): what CE_j, row j, sees of the scale of H_k, column k <= j.

    With g the gradient of CE_j with respect to H_k, through loops k + 1 .. j and the readout of
    loop j, fraction is the mean over tokens of |<g, H_k>| / (||g|| ||H_k||) and cosine is the same
    mean without the absolute value. Where it is positive, CE_j would fall if H_k were shorter.
    NaN above the diagonal. batches: a list of (idx, targets), each (B, T).

    The diagonal of fraction is looped_gpt.radial_gradient_fraction, which is about 0 behind RMSNorm
    (Lemma 1 of arXiv 2606.24898). Lemma 1 does not speak of what is below it: the recurrence adds
    to H_k, and how much that turns the state depends on the scale of H_k (Lemma 2).
    """
    K = model.config.num_loops
    total = 0.0
    for idx, targets in batches:
        with torch.no_grad():
            states = model.states(idx)
        means = torch.full((2, K, K), math.nan, dtype=states[0].dtype, device=idx.device)
        for k in range(1, K + 1):
            start = states[k - 1].detach().requires_grad_()  # H_k
            h = start
            for j in range(k, K + 1):
                if j > k:
                    h = model.loop(model.loop_norm(h))  # H_j
                logits = model.readout(h, final=j == K)
                ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                g, = torch.autograd.grad(ce, start, retain_graph=True)
                cosine = radial_cosine(g, start.detach())  # (B, T)
                means[0, j - 1, k - 1] = cosine.abs().nanmean()
                means[1, j - 1, k - 1] = cosine.nanmean()
        total = total + means
    fraction, cosine = total / len(batches)
    return fraction, cosine


# --------------------------------------------------------------------------------------------------
# Lemma 2 against measurement

FACTORS = (1, 10, 100, 1000)


@torch.no_grad()
def lemma2_remainders(model, h, factors=FACTORS):
    """What Lemma 2 leaves out for one loop from a * H, in float64: (factors, 5).

    Per factor a, the means over tokens of s, the radial increment and |increment - a_rad| = O(1/s),
    the angular step and |step - ||b_perp|| / s| = O(1/s^2).
    """
    model = copy.deepcopy(model).cpu().double()  # some devices have no float64
    h = h.cpu().double()
    rows = []
    for a in factors:
        state = a * h
        s, radial, angular = scale_and_direction(state, model.loop(state))
        a_rad, step = lemma2_prediction(model, state)
        columns = [s, radial, (radial - a_rad).abs(), angular, (angular - step).abs()]
        rows.append(torch.stack([x.mean() for x in columns]))
    return torch.stack(rows)


CLAMPS = ("freeze_loop1", "remove_radial")


def clamp_changes(model, batches):
    """By how much each of CLAMPS changes the CE of the last loop."""
    ce = loss_per_loop(model, batches)[-1]
    return [(loss_per_loop(model, batches, clamp=clamp)[-1] - ce).item() for clamp in CLAMPS]


# --------------------------------------------------------------------------------------------------
# Variable depth: one checkpoint, several speeds. `batches`: a list of (idx, targets), each (B, T).

def timed(function):
    """(result, seconds) of a function whose result is on the CPU: the best of 3 calls."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def exit_loss(model, batches, K):
    """Cross-entropy in nats when every sequence leaves after loop K; later loops are not run."""
    total = 0.0
    for idx, targets in batches:
        h = model.states(idx, K)[-1]
        total = total + token_loss(model, h, K, targets).mean()
    return (total / len(batches)).item()


@torch.no_grad()
def frontier(model, batches):
    """[(K, PPL, tokens/s)] for exits after K = 1 .. num_loops."""
    tokens = sum(idx.numel() for idx, _ in batches)
    points = []
    for K in range(1, model.config.num_loops + 1):
        ce, seconds = timed(lambda: exit_loss(model, batches, K))
        points.append((K, train.perplexity(ce), tokens / seconds))
    return points


def sequence_margin(model, h, k):
    """How sure each sequence's logits are after loop k, (B,): the mean over tokens of the largest
    minus the second largest."""
    logits = model.readout(h, final=k >= model.config.num_loops)
    top = logits.topk(2, dim=-1).values  # (B, T, 2)
    return (top[..., 0] - top[..., 1]).mean(-1).float()


@torch.no_grad()
def calibrate_halting(model, batches, tolerance=1.01):
    """The lowest margin at which sequences may leave early, such that PPL stays within `tolerance`
    times the full depth's on these batches. math.inf if there is none."""
    margins, losses = [], []
    for idx, targets in batches:
        states = list(enumerate(model.states(idx), start=1))
        margins.append(torch.stack([sequence_margin(model, h, k) for k, h in states]))
        losses.append(torch.stack([token_loss(model, h, k, targets).mean(1) for k, h in states]))
    margins = torch.cat(margins, dim=1)  # (K, N), of N sequences
    losses = torch.cat(losses, dim=1)
    limit = losses[-1].mean() + math.log(tolerance)
    margins[-1] = math.inf  # sequences that never reach the threshold leave at the last loop
    for threshold in margins[:-1].flatten().sort().values:
        passes = (margins >= threshold).int()
        exit_loop = passes.argmax(0, keepdim=True)  # (1, N): the first loop that passes
        if losses.gather(0, exit_loop).mean() <= limit:
            return threshold.item()
    return math.inf


@torch.no_grad()
def halting_states(model, idx, threshold):
    """The state of each sequence after the loop at which it left, (B, T, D), and that loop, (B,).
    Later loops run only for the sequences that are left."""
    K = model.config.num_loops
    h = model.embed(idx)
    result = torch.empty_like(h)
    loops = torch.full((len(idx),), K, device=idx.device)
    active = torch.arange(len(idx), device=idx.device)  # which sequences the rows of h are
    for k in range(1, K + 1):
        if k > 1:
            h = model.loop_norm(h)
        h = model.loop(h)
        result[active] = h
        if k == K:
            break
        leaves = sequence_margin(model, h, k) >= threshold
        loops[active[leaves]] = k
        h = h[~leaves]
        active = active[~leaves]
        if len(active) == 0:
            break
    return result, loops


@torch.no_grad()
def halting(model, batches, threshold):
    """{average loops, PPL, tokens/s} of halting at a calibrated threshold, with real skipping."""
    def halt():
        results = [halting_states(model, idx, threshold) for idx, _ in batches]
        loops = torch.cat([loops for _, loops in results])
        return results, loops.float().mean().item()  # .item() waits for the device

    (results, average_loops), seconds = timed(halt)
    losses = []
    for (h, loops), (_, targets) in zip(results, batches):
        for k in loops.unique().tolist():
            left = loops == k
            losses.append(token_loss(model, h[left], k, targets[left]).mean(1))
    tokens = sum(idx.numel() for idx, _ in batches)
    return {"loops": average_loops, "ppl": train.perplexity(torch.cat(losses).mean().item()),
            "tokens_per_sec": tokens / seconds}


def calibrated_halting(model, batches):
    """`halting` of every other sequence, and the threshold, calibrated on the rest."""
    even = [(idx[0::2], targets[0::2]) for idx, targets in batches]
    odd = [(idx[1::2], targets[1::2]) for idx, targets in batches if len(idx) > 1]
    threshold = calibrate_halting(model, even)
    return halting(model, odd or even, threshold) | {"threshold": threshold}


# --------------------------------------------------------------------------------------------------
# Every diagnostic of one run

def report(path):
    """Print every diagnostic of a trained run on its validation split; draw RUN/diagnostics.png."""
    model, options, tokenizer = train.load_model(path, "looped_gpt", looped_gpt.LoopedGPT)
    _, batches = train.validation_batches(options, tokenizer, model, options.eval_batches)
    looped_gpt.print_loops(model, batches)
    print_radial_gradients(*radial_gradient_matrix(model, batches))
    dynamics = looped_gpt.scale_dynamics(model, batches).cpu()
    print_lemma2(dynamics, lemma2_remainders(model, model.states(batches[0][0])[-1]))
    print_interventions(model, batches)
    points = frontier(model, batches)
    halted = print_exits(model, batches, points)
    figure_path = train.run_directory(path) / "diagnostics.png"
    draw_report(model.config.num_loops, dynamics, points, halted, figure_path)
    print(f"\ndrawn in {figure_path}")


def print_radial_gradients(fraction, cosine):
    print("\nradial gradient fraction of CE_j at H_k, with the mean cosine in brackets "
          "(+: CE_j would fall if H_k were shorter)")
    K = len(fraction)
    titles = [f"H_{k}" for k in range(1, K + 1)]
    print(f"{'':6}" + "".join(f"{title:>20}" for title in titles))
    for j in range(1, K + 1):
        cells = [f"{fraction[j - 1, k]:.1e} ({cosine[j - 1, k]:+.1e})" for k in range(j)]
        print(f"CE_{j:<3}" + "".join(f"{cell:>20}" for cell in cells))


def print_lemma2(dynamics, remainders):
    print("\nloop   scale s   radial increment   angular step   angular step * s (Lemma 2)")
    for k in (1, 2, 3, 4, 6, 8, 12, 16, 20, 29):
        s, radial, angular, product = dynamics[k - 1].tolist()
        print(f"{k:4d}  {s:8.2f}   {radial:16.3f}   {angular:12.5f}   {product:16.3f}")
    print("\none loop from a * H_K: scale s   radial increment   its remainder   angular step   "
          "its remainder (Lemma 2)")
    for a, row in zip(FACTORS, remainders.tolist()):
        s, radial, radial_rest, angular, angular_rest = row
        print(f"{a:15d} {s:14.2f}   {radial:16.4f}   {radial_rest:13.1e}   {angular:12.3e}   "
              f"{angular_rest:13.1e}")


def print_interventions(model, batches):
    quantiles = looped_gpt.norm_quantiles(model, batches)
    listed = ", ".join(f"{name} {value:.2f}" for name, value in quantiles.items())
    print(f"\n||H_K|| over tokens: {listed}")
    for clamp, change in zip(CLAMPS, clamp_changes(model, batches)):
        print(f"clamp {clamp}: change in CE {change:+.4f}")


def print_exits(model, batches, points):
    """Print the frontier, and what calibrated halting, which is returned, adds to it."""
    print("\nexit after loop      PPL    tokens/s")
    for K, ppl, speed in points:
        print(f"{K:15d}  {ppl:7.3f}  {speed:10,.0f}")
    halted = calibrated_halting(model, batches)
    print(f"halting at margin {halted['threshold']:.3f} (calibrated on every other sequence, "
          f"measured on the rest): {halted['loops']:.2f} loops on average, "
          f"PPL {halted['ppl']:.3f}, {halted['tokens_per_sec']:,.0f} tokens/s")
    return halted


def draw_report(num_loops, dynamics, points, halted, path):
    figure, (lemma2_axis, depth_axis) = train.new_figure(2)
    loops = range(1, len(dynamics) + 1)
    for column, label in ((0, "scale s"), (2, "angular step"), (3, "angular step * s")):
        lemma2_axis.plot(loops, dynamics[:, column], label=label)
    lemma2_axis.axvline(num_loops, color="gray", linestyle=":", label="trained K")
    lemma2_axis.set(xlabel="loop", yscale="log", title="Lemma 2: scale and direction")
    lemma2_axis.legend()
    depth_axis.plot([speed for _, _, speed in points], [ppl for _, ppl, _ in points], "o-")
    for K, ppl, speed in points:
        depth_axis.annotate(f" K={K}", (speed, ppl))
    depth_axis.plot(halted["tokens_per_sec"], halted["ppl"], "s",
                    label=f"halting, {halted['loops']:.2f} loops")
    depth_axis.set(xlabel="tokens/s", ylabel="perplexity", title="Variable depth")
    depth_axis.legend()
    figure.savefig(path, dpi=120)


def main(argv):
    sweeps.main(argv, looped_gpt, SWEEPS, report)


if __name__ == "__main__":
    train.command_line(main)
