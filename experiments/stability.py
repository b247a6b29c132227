"""What makes the loops of stars.py stable, after arXiv 2605.26733: norms, random loop counts, JSRR;
and the numbers by which it shows.

    python experiments/stability.py addition       # STARS in two precisions, and the baseline
    python experiments/stability.py normalization  # 4 placements x 3 types of norm
    python experiments/stability.py ablation       # what random loops and JSRR do; other remedies
    python experiments/stability.py optimizer      # the default against AdamW as in the paper
    python experiments/stability.py out/stars-addition  # a run: accuracy, convergence, spectra

A sweep takes --preset, --seeds=42,101,202 and every field of stars.py and train.py. It trains what
is not trained yet into out/stars-PRESET-SWEEP, and leaves its table and its figure there; a run's
figure is RUN/diagnostics.png.
"""
import copy
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import stars
import train
from experiments import sweeps
from experiments.sweeps import Sweep, csv_cells, tabulate, update_csv
from stars import LOOPS


# --------------------------------------------------------------------------------------------------
# The sweeps: conditions, each the fields that it sets

SUMS = dict(dataset="addition")  # what `accuracy` is measured on
PLAIN = SUMS | dict(loop_sampling="fixed", jsrr_lambda=0.0)  # without STARS: fixed loops, no JSRR

NORMALIZATION = {}
for placement in ("pre", "pre_sandwich", "post", "post_sandwich"):
    for norm in ("layernorm", "rmsnorm", "simple"):
        NORMALIZATION[f"{placement}+{norm}"] = PLAIN | dict(placement=placement, norm=norm)

ABLATION = {
    "fixed": PLAIN,
    "prelude+coda": PLAIN | dict(n_prelude=1, n_coda=1),
    "l2": PLAIN | dict(l2_penalty=0.01),
    "random": SUMS | dict(jsrr_lambda=0.0),
    "jsrr": SUMS | dict(loop_sampling="fixed"),
    "random+jsrr": SUMS,
}

ADDITION = {
    "bf16": SUMS | dict(dtype="bfloat16"),
    "fp32": SUMS | dict(dtype="float32"),
    "baseline": PLAIN,
}

OPTIMIZER = {
    "muon": {},
    "adamw-paper": dict(optimizer="adamw", lr=1e-4, warmup_steps=2000, schedule="cosine",
                        max_steps=10_000),
}


# --------------------------------------------------------------------------------------------------
# Reports on all runs of a sweep, {(condition, seed): path}

EXACT = "exact match at loop"
NORM = "mean ||h^(t)|| at loop"
STEP = "relative step at loop"
AXES = {EXACT: ("log", "linear", "Who is still right?"),
        NORM: ("log", "log", "External norms bound the state"),
        STEP: ("log", "log", "Who converges?")}


@torch.no_grad()
def accuracy(run, n=1000):
    """Exact match, norm of h^(t) and relative step ||h^(t) - h^(t-1)|| / ||h^(t-1)|| at every loop
    count t, on n held-out sums; the spectrum of J at the last one."""
    model, options = stars.load_run(run)
    idx, targets = stars.held_out_sums(model, options, n)
    steps, norms = stars.convergence(model, idx[:250], max(LOOPS)).T  # [0]: of loop 1
    yield EXACT, LOOPS, "", list(stars.exact_match(model, idx, targets, LOOPS).values())
    yield NORM, LOOPS, "", [norms[t - 1] for t in LOOPS]
    yield STEP, LOOPS, "", [steps[t - 1] for t in LOOPS]
    model = copy.deepcopy(model).cpu().double()
    *_, settled = stars.trajectory(model, idx[:8].cpu(), max(LOOPS))
    figures = spectrum(model, settled)
    yield f"J at loop {max(LOOPS)}", figures, "", list(figures.values())


def addition(run):
    """The same on 5,000 held-out sums."""
    return accuracy(run, 5000)


def learning_curve(path):
    """[(step, seconds of training, exact match), ..], one for each evaluation in a run's log. It
    has the tokens per second of every interval, from which evaluations are left out."""
    seconds, tokens = 0.0, 0
    points = []
    for row in train.read_csv(path / "log.csv"):
        if "tokens_per_sec" in row:
            seconds += (row["tokens"] - tokens) / row["tokens_per_sec"]
            tokens = row["tokens"]
        if "val_exact" in row:
            points.append((row["step"], seconds, row["val_exact"]))
    return points


def race(runs, out):
    """Print when each run first has every evaluated sum right; write exact match against steps
    into race.csv, and draw it against steps and seconds of training."""
    figure, axes = train.new_figure(2)
    csv_rows = []
    for (condition, seed), path in runs.items():
        steps, times, exact = zip(*learning_curve(path))
        csv_rows += csv_cells(condition, seed, "exact match at step", "", steps, exact)
        reached = "never"
        if 1 in exact:
            first = exact.index(1)
            reached = f"at step {steps[first]}, {times[first]:.0f} s"
        print(f"{condition}, seed {seed}: all sums right {reached}; {exact[-1]:.2%} at step "
              f"{steps[-1]}, {times[-1]:.0f} s")
        axes[0].plot(steps, exact, "o-", markersize=3, label=f"{condition}, seed {seed}")
        axes[1].plot(times, exact, "o-", markersize=3)
    axes[0].set(xlabel="step", ylabel="exact match")
    axes[1].set(xlabel="seconds of training")
    axes[0].legend(fontsize="x-small")
    update_csv(out / "race.csv", csv_rows)
    figure.savefig(out / "race.png", dpi=120)
    print(f"written to {out}/race.csv, drawn in {out}/race.png")


COMPARE = functools.partial(tabulate, accuracy, AXES)
SWEEPS = {
    "addition": Sweep(ADDITION, functools.partial(tabulate, addition, AXES)),
    "normalization": Sweep(NORMALIZATION, COMPARE, preset="small"),
    "ablation": Sweep(ABLATION, COMPARE, preset="small"),
    "optimizer": Sweep(OPTIMIZER, race, preset="small"),
}


# --------------------------------------------------------------------------------------------------
# The report on one run

def report(path):
    """Print accuracy and convergence against loops, then the spectrum of the Jacobian, of a trained
    run; draw RUN/diagnostics.png."""
    model, options = stars.load_run(path)
    idx, targets = stars.held_out_sums(model, options, 2000)
    accuracy, dynamics = stars.against_loops(model, idx, targets, LOOPS)

    model = copy.deepcopy(model).cpu().double()  # products of many Jacobians want float64
    few = idx[:8].cpu()
    print_spectra(model, few)
    answer = targets[0].cpu() >= 0
    figure = draw(accuracy, dynamics, principal_components(model, few, answer))
    out = train.run_directory(path) / "diagnostics.png"
    figure.savefig(out, dpi=120)
    print(f"\ndrawn in {out}")


def spectrum(model, h):
    """{name: mean over the rows of h}: the one-step gain that JSRR penalises, the mean gain, the
    largest singular value and the spectral radius; and the largest spectral radius of a row."""
    g = torch.Generator().manual_seed(0)
    rho = stars.spectral_radius_arnoldi(model, h, generator=g)
    return {
        "||J v||": stars.power_iteration(model, h, 1, "jvp", g).mean(),
        "||J||_F/rtN": stars.jacobian_gain(model, h, generator=g).mean(),
        "sigma_max": stars.sigma_max(model, h, generator=g).mean(),
        "rho, power": stars.spectral_radius_power(model, h, generator=g).mean(),
        "rho": rho.mean(),
        "largest rho": rho.max(),
    }


def print_spectra(model, idx):
    """The spectrum at the trained number of loops and far beyond; there also how power iteration
    goes to it."""
    c = model.config
    settled = max(LOOPS)
    print(f"\nthe Jacobian of one loop, N = {c.block_size * c.n_embd}, means over {len(idx)} sums; "
          f"rtN: sqrt(N); rho by Arnoldi iteration and by power iteration")
    for t, h in enumerate(stars.trajectory(model, idx, settled)):
        if t in (c.num_loops, settled):
            figures = spectrum(model, h)
            if t == c.num_loops:
                print("at loop t" + "".join(f"{name:>14}" for name in figures))
            print(f"{t:9d}" + "".join(f"{value:14.4f}" for value in figures.values()))

    steps = (1, 2, 4, 8, 16, 32, 64)
    print(f"\n||J v|| at loop {settled} after power steps  " + "".join(f"{n:9d}" for n in steps))
    modes = {"J v: to rho": "jvp", "J^T v: to rho": "vjp", "J^T J v: to sigma_max": "both"}
    for label, mode in modes.items():
        g = torch.Generator().manual_seed(1)
        gains = stars.power_iteration(model, h, max(steps), mode, g).mean(1)
        print(f"{label:34}" + "".join(f"{gains[n - 1]:9.4f}" for n in steps))


def principal_components(model, idx, answer):
    """(rows, loops, 2): the state at the answer's tokens, as one vector per loop and sum, in the
    plane in which these vary most."""
    states = [h[:, answer].flatten(1) for h in stars.trajectory(model, idx, 64)]
    states = torch.stack(states)  # (loops, rows, N)
    states = states - states.mean((0, 1))
    _, _, components = torch.linalg.svd(states.flatten(0, 1), full_matrices=False)
    return (states @ components[:2].T).transpose(0, 1)


def draw(accuracy, dynamics, paths):
    """The figure: accuracy, step and norm against loops; trajectories in two dimensions."""
    figure, axes = train.new_figure(3)
    axes[0].plot(accuracy.keys(), accuracy.values(), "o-")
    axes[0].set(xlabel="loops", xscale="log", ylabel="exact match", ylim=(-0.02, 1.02),
                title="Accuracy against loops")
    loops = range(len(dynamics))
    axes[1].plot(loops, dynamics[:, 0], label="||h^(t+1) - h^(t)|| / ||h^(t)||")
    axes[1].plot([t + 1 for t in loops], dynamics[:, 1], label="mean ||h^(t)||")
    axes[1].set(xlabel="loop t", xscale="symlog", yscale="log", title="Step and norm against loops")
    axes[1].legend()
    for path in paths:
        axes[2].plot(*path.T, ".-", alpha=0.7)
        axes[2].plot(*path[-1], "k*")
    axes[2].set(xlabel="PC 1", ylabel="PC 2",
                title=f"Trajectories of {len(paths)} sums, * at the end")
    return figure


def main(argv):
    sweeps.main(argv, stars, SWEEPS, report)


if __name__ == "__main__":
    train.command_line(main)
