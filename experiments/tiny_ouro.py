"""What STARS does for a model of Ouro's form (arXiv 2605.26733), small enough to be trained here.

Ouro-1.4B is pretrained with 4 loops and gets worse with more. The paper tunes it on problems and
solutions in two ways: with 4 loops (SFT), which leaves that as it is, and with STARS, random loops
and JSRR, which mends most of it. Here the base model learns 2-digit sums from scratch with 4 loops;
then four copies of it learn a second task, differences, with and without each of STARS' two parts:

              base                    fixed, random, jsrr, random+jsrr
    15+73= 88§                        15-73= 24§  (100 + 15 - 73 = 42, reversed)

    python experiments/tiny_ouro.py scratch --seeds=42,101,202
    python experiments/tiny_ouro.py out/tiny_ouro-sums-scratch/fixed-seed42  # the table of one run

Model, loss and measures are ouro.py's, with STARS' settings for Ouro-1.4B: t from a log-normal with
mu 1.7 and sigma 0.4, 1 to 16, and lambda 0.1.
"""
import functools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import stars
import train
from experiments import ouro, sweeps
from experiments.ouro import Config, Ouro
from train import UserError


# --------------------------------------------------------------------------------------------------
# Two tasks in one vocabulary: the base model's, and the one that it is tuned on

class Sums(stars.AdditionData):
    vocab = [*"0123456789+-= §_"]

    def __init__(self, options, config):
        super().__init__(options, stars.Config(digits=2))


class Differences(Sums):
    symbol = "-"

    @staticmethod
    def result(a, b):
        return 100 + a - b  # which is never negative, and as long as a sum


ouro.DATA |= {"sums": Sums, "differences": Differences}


# --------------------------------------------------------------------------------------------------
# Training, as train.py's launch asks for it

PRESETS = {
    "sums": dict(dataset="sums", n_layer=1, n_head=4, n_embd=64, mlp_width=176,
                 loop_sampling="fixed", jsrr_lambda=0.0, checkpointing=False, dtype="float32",
                 optimizer="muon", muon_lr=0.008, lr=2e-3, max_steps=600, batch_size=64,
                 schedule="wsd", decay_share=0.4, warmup_steps=20, log_interval=25,
                 eval_interval=100, eval_batches=4),
}
SHOW = ouro.SHOW
CURVES = ouro.CURVES


def train_model(run):
    """From random weights, or from those of the condition that init_from names, of the same seed,
    which the sweep has trained before."""
    c, o = run.config, run.options
    model = Ouro(c)
    if c.init_from and not run.resumes:
        base = run.out.parent / f"{c.init_from}-seed{o.seed}"
        if not (base / "ckpt.pt").exists():
            raise UserError(f"{base} is not there to start from: train {c.init_from} first, in the "
                            f"same sweep")
        ckpt = train.load_checkpoint(base, run.name)
        if ckpt["step"] < ckpt["max_steps"]:
            raise UserError(f"{base} is not trained to its end: train {c.init_from} first, in the "
                            f"same sweep")
        with train.restoring(f"{base} does not fit the model that is to start from it"):
            model.load_state_dict(ckpt["weights"])
    model = run.prepare(model)
    while run.step < run.max_steps:
        run.begin_step()
        rng = np.random.default_rng([o.seed, run.step, 1])
        t = int(stars.sample_loops(c, rng)[0])
        for idx, targets, num_targets in run.micro_batches():
            with run.autocast():
                loss, metrics = model.loss(idx, targets, t, num_targets)
            run.backward(loss, metrics)
        run.average_gradients()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm)
        run.optimizer_step(grad_norm)
        run.end_step()
    run.finish()


# --------------------------------------------------------------------------------------------------
# The sweep

TUNED = dict(dataset="differences", init_from="base", lr=1e-3, muon_lr=0.004, max_steps=150)
SCRATCH = {
    "base": {},  # first: the others start from it
    "fixed": TUNED,
    "random": TUNED | dict(loop_sampling="lognormal"),
    "jsrr": TUNED | dict(jsrr_lambda=0.1),
    "random+jsrr": TUNED | dict(loop_sampling="lognormal", jsrr_lambda=0.1),
}

LOOPS = (*ouro.ANSWER_LOOPS, 32, 64)  # 1 to 16, and more than any step of training draws
CE = "CE at loop"
RIGHT = "right tokens at loop"
STEP = "relative step at loop"
GAIN = "one-step ||J v|| at loop"
AXES = {CE: ("log", "log", "Which losses stay low?"),
        RIGHT: ("log", "linear", "Who is still right?"),
        STEP: ("log", "log", "Who converges?")}


def load(path):
    """A trained model, and held-out rows of the task that it was trained on, in batches."""
    model, options, tokenizer = train.load_model(path, "tiny_ouro", Ouro)
    _, batches = train.validation_batches(options, tokenizer, model)
    return model, batches


def scratch(run):
    """CE, right tokens, relative step and gain at each loop count; rho of J at loop 16."""
    model, batches = load(run)
    table = ouro.answer_means(model, batches, LOOPS)
    for title, values in zip((CE, RIGHT, STEP, GAIN), table.T):
        yield title, LOOPS, "", values
    model = model.cpu().double()  # products of many Jacobians want float64
    idx, _ = batches[0]
    h = model.final(idx[:16].cpu(), 16).detach()
    rho = stars.spectral_radius_arnoldi(model, h, generator=torch.Generator().manual_seed(0))
    yield "J at loop 16", ("rho", "largest rho"), "", [rho.mean(), rho.max()]


SWEEPS = {"scratch": sweeps.Sweep(SCRATCH, functools.partial(sweeps.tabulate, scratch, AXES))}


def report(path):
    """The same table of one run, without rho."""
    ouro.diagnose_answers(*load(path), LOOPS)


def main(argv):
    module = sys.modules[__name__]
    if argv[:1] == ["train"]:  # as a run that was stopped says
        usage = "python experiments/tiny_ouro.py train --out_dir=RUN --resume"
        given = train.training_parser(usage, module).parse(argv[1:])
        return train.launch("tiny_ouro", module, given.pop("preset"), given)
    sweeps.main(argv, module, SWEEPS, report)


if __name__ == "__main__":
    from experiments import tiny_ouro  # the module that others import, not a second copy, __main__
    train.command_line(tiny_ouro.main)
