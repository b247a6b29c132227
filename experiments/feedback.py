"""What feeding states back does to loss, running sums and decoding (arXiv 2608.08888).

    python experiments/feedback.py passes --seeds=42,101,202    # mixes of passes: figures 3 and 10
    python experiments/feedback.py stabilisers                  # without each of the stabilisers
    python experiments/feedback.py fusion                       # gated, additive, concatenated
    python experiments/feedback.py running-sum                  # counting beyond the trained length
    python experiments/feedback.py sum-fusion                   # the same with each fusion
    python experiments/feedback.py tokens --dataset=FILE --stride=64  # how many tokens it saves
    python experiments/feedback.py out/fullbandwidth-tiny       # every table of one run

A sweep trains models of one size on the same data, and writes its tables as MEASURE.csv and its
figures as MEASURE.png into its folder; a run's go into the run's own. The baselines have a single
pass: one trains for equal steps, one for equal compute.

A measure takes a run directory and yields the rows of its tables: see sweeps.py.
"""
import functools, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fullbandwidth, train
from experiments import sweeps
from experiments.sweeps import Sweep, tabulate
from fullbandwidth import PASSES

LOSS = "validation loss at pass"
UPDATE = "||h^(k) - h^(k-1)|| at pass"
PATHS = "norm of path at step"
AXES = {LOSS: ("log", "linear", "The loss of passes beyond those of training"),
        UPDATE: ("log", "log", "Does the update die out?"),
        PATHS: ("linear", "linear", "The two paths of the fusion")}


# --------------------------------------------------------------------------------------------------
# Measures of a run

def passes(run):
    """Loss and update size over passes, pass k being k - 1 fused prefill passes; the loss of the
    token path alone."""
    model, _, _, batches = fullbandwidth.load_run(run)
    losses, updates = fullbandwidth.pass_curve(model, batches).T
    yield LOSS, PASSES, "", losses
    yield UPDATE, PASSES, "", updates
    if model.W_U is not None:
        yield "loss of pass 2", ["with h = 0"], "", [fullbandwidth.zeroed_loss(model, batches)]


def fusion(run):
    """As `passes`; and the mean norms of the fusion's two paths over training."""
    yield from passes(run)
    log = [row for row in train.read_csv(run / "log.csv") if "val_state_path" in row]
    if log:
        steps = [row["step"] for row in log]
        for name in ("state", "token"):
            yield PATHS, steps, f", {name}", [row[f"val_{name}_path"] for row in log]


@torch.no_grad()
def decoding(run, n=1000):
    """Of n tokens sampled in modes standard and soft: mean ||h|| in their first and last tenth, and
    the share of their 4-grams that are not repeated. A drift or a loop would show here."""
    model, _, _, batches = fullbandwidth.load_run(run)
    prompt = batches[0][0][0, :8].tolist()
    for mode in model.modes()[:2]:
        (new,) = model.generate([prompt], n, mode, seed=42)
        idx = torch.tensor([prompt + new], device=model.wte.weight.device)
        if mode == "standard":
            h = model.stack(model.embed(idx))
        else:
            h = model.recurrent(idx, len(prompt))
        norms = h[0, len(prompt):].norm(dim=-1)
        first, last = norms[:n // 10].mean(), norms[-(n // 10):].mean()
        grams = [tuple(new[i:i + 4]) for i in range(n - 3)]
        columns = ("first ||h||", "last ||h||", "new")
        yield "1,000 tokens", columns, f", {mode}", [first, last, len(set(grams)) / len(grams)]


@torch.no_grad()
def running_sum(run):
    """Share of right sums on the trained length T and on the T positions behind it, which no window
    has reached."""
    model, options, _, _ = fullbandwidth.load_run(run)
    idx, targets = fullbandwidth.long_sums(model, options)
    if model.W_U is None:
        states = model.states(idx, 1)
    else:
        states = [*model.states(idx, 3), model.recurrent(idx)]
    shares = [fullbandwidth.right_shares(model, h, targets) for h in states]
    within, beyond = torch.stack(shares).T
    columns = ("pass 1", "pass 2", "pass 3", "soft")
    yield "right sums at 1 .. T", columns, "", within
    yield "right sums at T + 1 .. 2 T", columns, "", beyond


def report(path, task=None):
    """Print every table of one run and draw its passes. task: the measure of its data, by default
    that of running sums or of decoding."""
    model, options, _, batches = fullbandwidth.load_run(path)
    if task is None:
        task = running_sum if options.dataset == "running-sum" else decoding
    out = train.run_directory(path)
    runs = {("this run", options.seed): path}
    print(f"{path}: mix {model.config.mix}, fusion {model.config.fusion}")
    tabulate(passes, AXES, runs, out)
    if model.W_U is not None and model.config.block_size > 1:  # one position is fed back to none
        steps = min(16, model.config.block_size // 2)
        gains = fullbandwidth.feedback_gains(model, batches[0][0], steps)
        rate = gains.log().mean(0).exp()  # (B,), the geometric mean over steps
        print(f"\nlocal contraction rate at the exact states: {rate.mean():.3f}, "
              f"in the worst row {rate.max():.3f}")
    tabulate(task, AXES, runs, out)


# --------------------------------------------------------------------------------------------------
# Sweeps: {name: (conditions, report)}

MIXES = {"75+25": "0.75,0.25", "75+22+3": "0.75,0.22,0.03",  # the paper's
         "0+100": "0,1", "0+97+3": "0,0.97,0.03", "0+70+30": "0,0.7,0.3"}


def with_baselines(mixes, **fields):
    """Conditions: a standard model at equal steps, one at the compute of the last mix, and the
    mixes {name: mix} themselves."""
    last = list(mixes.values())[-1]
    conditions = {"standard": dict(mix="1"),
                  "standard-equal-compute": dict(mix="1", compute_of=last)}
    for name, mix in mixes.items():
        conditions[name] = dict(mix=mix)
    return {name: condition | fields for name, condition in conditions.items()}


def without_each():
    """Conditions: all stabilisers on, each one off, all off; under mixes of two passes with and
    without a few steps of three."""
    off = {"no-depth-scale": dict(depth_scale=False), "no-input-norm": dict(input_norm=False),
           "no-jitter": dict(jitter=0.0), "no-prefix-mix": dict(prefix_mix=False),
           "no-tying": dict(tied=False)}
    all_off = {}
    for fields in off.values():
        all_off |= fields
    conditions = {}
    for name, fields in {"all-on": {}, **off, "none": all_off}.items():
        for mix in ("0+100", "0+97+3"):
            conditions[f"{name}-{mix}"] = dict(prefix_mix=True) | fields | dict(mix=MIXES[mix])
    return conditions


FUSIONS = {name: dict(fusion=name) for name in ("gated", "add", "concat")}
TOKENS = {"feedback": {}}  # standard models with so many times its tokens
for times, mix in {"1": "1", "1.5": "0.5,0.5", "2": "0,1", "3": "0,0,1"}.items():
    TOKENS[f"standard-x{times}"] = dict(mix="1", compute_of=mix)
RUNNING_SUM = with_baselines({"feedback": "0.5,0.4,0.1"}, dataset="running-sum")
SWEEPS = {
    "passes": Sweep(with_baselines(MIXES), functools.partial(tabulate, passes, AXES)),
    "stabilisers": Sweep(without_each(), functools.partial(tabulate, passes, AXES)),
    "fusion": Sweep(FUSIONS, functools.partial(tabulate, fusion, AXES)),
    "tokens": Sweep(TOKENS, functools.partial(tabulate, passes, AXES)),
    "sum-fusion": Sweep({name: FUSIONS[name] | dict(dataset="running-sum") for name in FUSIONS},
                        functools.partial(tabulate, running_sum, AXES), preset="running-sum"),
    "running-sum": Sweep(RUNNING_SUM, functools.partial(tabulate, running_sum, AXES),
                         preset="running-sum"),
}


def main(argv):
    sweeps.main(argv, fullbandwidth, SWEEPS, report)


if __name__ == "__main__":
    train.command_line(main)
