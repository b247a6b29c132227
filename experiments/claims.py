"""What the three papers claim, in their order, and how a run here would bear it out: the rows of
ledger.py, which prints them.

A claim is a function of the runs of one sweep. runs(condition, table, column) is the array of one
single value for every seed; the function gives (whether it holds, for each seed; our figures). What
the papers report is from their text; no number of ours is typed. Where it holds for no seed the
claim is `not seen`, if nothing of the effect shows, or CONTRADICTED, if its opposite does.
"""
from dataclasses import dataclass
from typing import Callable

import numpy as np


@dataclass
class Claim:
    paper: str  # its arXiv number
    text: str  # what is claimed, and where
    theirs: str  # the paper's number, and its scale
    sweep: str = ""
    figures: Callable = None
    yes: str = "reproduced in kind"  # the verdict where it holds for every seed
    no: str = "not seen at this scale"  # and where it holds for none
    instead: str = ""  # what stands in the place of figures
    ours: bool = False  # a question of ours, which the paper leaves open


CONTRADICTED = "contradicted at this scale"
CLAIMS = []
paper = ""  # the one that the claims below are of


def claim(text, theirs, sweep, **verdicts):
    """A decorator: the function below it is the claim's."""
    def add(function):
        CLAIMS.append(Claim(paper, text, theirs, sweep, function, **verdicts))
        return function
    return add


def question(text, sweep):
    """A decorator like `claim`, for a question of ours."""
    return claim(text, "", sweep, ours=True, yes="yes", no="no")


def by_test(text, theirs, test):
    """A claim that holds by construction or by a proof: a test shows it."""
    CLAIMS.append(Claim(paper, text, theirs, instead=f"`tests/{test}`", yes="reproduced"))


def out_of_reach(text, theirs, needs):
    CLAIMS.append(Claim(paper, text, theirs, instead=f"needs {needs}", yes="out of reach here"))


def show(values, form=None):
    """Mean and sample standard deviation over the seeds; by default three digits, or whole numbers.
    """
    def text(value, form):
        return f"{value:{form or (',.0f' if abs(value) >= 100 else '.3g')}}"
    mean = text(values.mean(), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {text(values.std(ddof=1), form and form.strip('+'))}"


def percent(values):
    return show(100 * values, ".1f") + "%"


# --------------------------------------------------------------------------------------------------
paper = "2606.24898"
RMSNORM, RAW = "per_loop+rmsnorm", "per_loop+raw"
FINAL_ONLY, PENALTY = "per_loop+final_only", "per_loop+rmsnorm+penalty"
TERMINAL = "terminal+rmsnorm"
PPL = "validation perplexity at loop"


def last_norm(runs, condition):
    return runs(condition, "||H_K|| over tokens", "mean")


by_test("Lemma 1: if r(a H) = r(H) for all a > 0, the gradient of CE_k by H_k is orthogonal to H_k",
        "a proof", "test_looped_gpt.py")


@claim("Lemma 1: through RMSNorm the radial fraction of the gradient is nothing but rounding",
       "1e-9", "table1", yes="reproduced")
def radial_rmsnorm(runs):
    fraction = runs(RMSNORM, "radial gradient fraction at loop", 4)
    return fraction < 1e-5, show(fraction)


@claim("Lemma 1: a raw readout sees the scale", "1e-2", "table1", yes="reproduced")
def radial_raw(runs):
    fraction = runs(RAW, "radial gradient fraction at loop", 4)
    return fraction > 1e-3, show(fraction)


by_test("Lemma 2: one loop from s u changes the scale by a_rad + O(1/s) and turns the direction by "
        "||b_perp|| / s + O(1/s^2)", "a proof", "test_blind_spot.py")


@claim("Lemma 2: the scale keeps moving with further loops", "loops 1 to 30", "table1")
def scale_moves(runs):
    early, late = (runs(RMSNORM, "scale s at loop", k) for k in (4, 29))
    return abs(late / early - 1) > 0.5, f"s at loop 4: {show(early)}, at 29: {show(late)}"


@claim("Lemma 2: the angular step shrinks", "as 1 / s", "table1")
def angle_shrinks(runs):
    early, late = (runs(RMSNORM, "angular step at loop", k) for k in (1, 29))
    return late < early / 2, f"at loop 1: {show(early)}, at 29: {show(late)}"


@claim("Lemma 2: angular step times scale stays about constant along the loops", "about constant",
       "table1")
def product_constant(runs):
    early, late = (runs(RMSNORM, "angular step * s at loop", k) for k in (1, 29))
    ratio = late / early
    return (ratio > 0.5) & (ratio < 2), f"at loop 1: {show(early)}, at 29: {show(late)}"


@claim("Table 1: with dense supervision through RMSNorm the final norm is out of control",
       "39,207 against 17 to 83 where the loss sees the scale (44M, WikiText-103)", "table1")
def norm_uncontrolled(runs):
    norm = last_norm(runs, RMSNORM)
    largest = np.maximum.reduce([last_norm(runs, name) for name in (RAW, FINAL_ONLY, PENALTY)])
    return norm > 10 * largest, f"{show(norm)} against at most {show(largest)}"


out_of_reach("Table 1: the same at 129M", "56,051", "4 hours of an H200 for each run")


for condition, text in (
        (RAW, "a raw readout"),
        (FINAL_ONLY, "an RMSNorm of the last loop's readout only (final_only)"),
        (PENALTY, "a norm penalty of 0.01"),
        ("terminal+rmsnorm+penalty", "a norm penalty of 0.01 with terminal supervision")):
    @claim(f"Table 1: {text} controls the final norm", "17 to 83 (all that see the scale)",
           "table1")
    def norm_controlled(runs, condition=condition):
        norm = last_norm(runs, condition)
        return norm < last_norm(runs, RMSNORM) / 10, show(norm)


@claim("Table 1: visibility, not supervision, decides: terminal supervision through RMSNorm does "
       "not control the norm either", "terminal+rmsnorm against terminal+raw", "table1")
def norm_terminal(runs):
    hidden, seen = last_norm(runs, TERMINAL), last_norm(runs, "terminal+raw")
    return hidden > 10 * seen, f"{show(hidden)} against {show(seen)}"


@claim("With dense supervision through RMSNorm the norm drifts up in training",
       "to 39,207 at the end of 4 epochs", "table1", no=CONTRADICTED)
def norm_drifts(runs):
    norms = [runs(RMSNORM, "mean ||H_K|| at step", step) for step in range(0, 301, 20)]
    top, last = np.maximum.reduce(norms), norms[-1]
    return last > 0.95 * top, (f"it leaps from {show(norms[0])} to {show(top)} and sinks to "
                               f"{show(last)} at step 300")


@claim("Table 1: terminal supervision is better at full depth",
       "PPL 5.40 against 6.04 (44M), 4.88 against 5.35 (129M)", "table1")
def terminal_better(runs):
    terminal, dense = runs(TERMINAL, PPL, 4), runs(RMSNORM, PPL, 4)
    return terminal < dense, f"PPL {show(terminal)} against {show(dense)}"


@claim("Table 1: early exits of terminal supervision are unusable",
       "CE 5.52 at loop 1 against 1.54 at loop 4 (44M)", "table1")
def terminal_exits(runs):
    first, last = runs(TERMINAL, PPL, 1), runs(TERMINAL, PPL, 4)
    return first > 5 * last, f"PPL {show(first)} at loop 1, {show(last)} at loop 4"


@claim("Table 1: dense supervision makes every exit usable", "PPL about 6 at every loop (44M)",
       "table1")
def dense_exits(runs):
    worst_exit = np.maximum.reduce([runs(RMSNORM, PPL, k) for k in (1, 2, 3, 4)])
    best = runs(TERMINAL, PPL, 4)  # what a model of one exit reaches
    return worst_exit < 1.5 * best, f"worst exit PPL {show(worst_exit)}, terminal {show(best)}"


@claim("Norms of single tokens have a heavy tail", "mean, median, p99, max reported", "table1")
def heavy_tail(runs):
    median, p99, most = (runs(RMSNORM, "||H_K|| over tokens", k) for k in ("median", "p99", "max"))
    return p99 > 3 * median, f"median {show(median)}, p99 {show(p99)}, largest {show(most)}"


@claim("Freezing each token's norm at its value after loop 1 costs nothing",
       "CE +0.0004 to +0.0055", "table1", no=CONTRADICTED)
def clamp_freeze(runs):
    change = runs(RMSNORM, "change of CE under clamp", "freeze_loop1")
    return abs(change) < 0.02, f"CE {show(change, '+.4f')}"


@claim("Removing the radial part of each update costs nothing", "CE +0.0004 to +0.0055", "table1",
       no=CONTRADICTED)
def clamp_radial(runs):
    change = runs(RMSNORM, "change of CE under clamp", "remove_radial")
    return abs(change) < 0.02, f"CE {show(change, '+.4f')}"


@claim("Variable depth: with dense RMSNorm further loops change nothing (K-invariance)",
       "PPL +0.01 from loop 1 to 4 (129M)", "table1")
def k_invariance(runs):
    first, last = runs(RMSNORM, PPL, 1), runs(RMSNORM, PPL, 4)
    return abs(last / first - 1) < 0.01, f"PPL {show(last - first, '+.2f')} from loop 1 to 4"


for condition, theirs in ((RAW, "-0.20"), (FINAL_ONLY, "-0.20"), (PENALTY, "-0.22")):
    @claim(f"Variable depth: with {condition.removeprefix('per_loop+')} further loops help",
           f"PPL {theirs} from loop 1 to 4 (129M)", "table1", no=CONTRADICTED)
    def depth_helps(runs, condition=condition):
        change = runs(condition, PPL, 4) - runs(condition, PPL, 1)
        return change < 0, f"PPL {show(change, '+.2f')} from loop 1 to 4"


@claim("At equal throughput, that of all 4 loops, the models with a controlled scale are better",
       "a frontier of loops 1 to 4 (129M)", "table1")
def frontier(runs):
    hidden = runs(RMSNORM, PPL, 4)
    seen = [runs(name, PPL, 4) for name in (RAW, FINAL_ONLY, PENALTY)]
    figures = ", ".join(show(ppl) for ppl in seen)
    text = f"PPL {figures} (raw, final_only, penalty) against {show(hidden)}"
    return np.maximum.reduce(seen) < hidden, text


for condition, theirs in ((RAW, "2.16"), (FINAL_ONLY, "1.78"), (PENALTY, "2.60")):
    @claim(f"Calibrated halting leaves at once with dense RMSNorm, later with "
           f"{condition.removeprefix('per_loop+')}", f"1.00 loops, {theirs} (129M)", "table1")
    def halting(runs, condition=condition):
        hidden, seen = (runs(name, "calibrated halting", "loops") for name in (RMSNORM, condition))
        return (hidden < 1.1) & (seen > hidden), f"{show(hidden, '.2f')}, {show(seen, '.2f')} loops"


by_test("A norm between the loops takes the scale out of the recurrence", "the complementary fix",
        "test_blind_spot.py")


# --------------------------------------------------------------------------------------------------
paper = "2605.26733"
EXACT, NORM, STEP = "exact match at loop", "mean ||h^(t)|| at loop", "relative step at loop"
J = "J at loop 256"
PLACEMENTS = ("pre", "pre_sandwich", "post", "post_sandwich")
NORMS = ("layernorm", "rmsnorm", "simple")
MANY = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256)


def worst(runs, condition, loops=MANY):
    """The lowest exact match over these loop counts, for each seed."""
    return np.minimum.reduce([runs(condition, EXACT, t) for t in loops])


for placement in PLACEMENTS:
    internal = placement.startswith("pre")
    what = "lets the state explode" if internal else "bounds the state"

    @claim(f"Norms: {placement}, {'an internal' if internal else 'an external'} placement, {what}",
           "figures of the norm against loops", "normalization")
    def placement_norm(runs, placement=placement, internal=internal):
        growth = [runs(f"{placement}+{norm}", NORM, 256) / runs(f"{placement}+{norm}", NORM, 4)
                  for norm in NORMS]
        figures = ", ".join(show(g) for g in growth)
        holds = np.logical_and.reduce([(g > 3) == internal for g in growth])
        return holds, f"from loop 4 to 256 times {figures} ({', '.join(NORMS)})"


for t in (6, 8):
    @claim(f"Norms: the placement decides, the type hardly matters, for the answers of {t} loops",
           "4 placements x 3 types", "normalization")
    def norm_type(runs, t=t):
        exact = np.array([[runs(f"{placement}+{norm}", EXACT, t) for norm in NORMS]
                          for placement in PLACEMENTS])  # (placements, types, seeds)
        types = np.ptp(exact, axis=1).max(0)  # the largest range over the types of a placement
        placements = np.ptp(exact.mean(1), axis=0)  # the range of the means
        return types < placements / 2, (f"range over placements {percent(placements)}, over the "
                                        f"types of one at most {percent(types)} (trained with 4)")


def collapses(runs, condition):
    """(whether the sums learned with 4 loops are lost by loop 256, for each seed; figures)"""
    peak, far = runs(condition, EXACT, 4), runs(condition, EXACT, 256)
    learned = peak > 0.98
    figures = f"{percent(peak)} at 4 loops, {percent(far)} at 256"
    if not learned.all():
        figures += f"; only {learned.sum()} of {len(learned)} seeds had learned the task"
    return learned & (far < 0.9 * peak), figures


for condition, text in (
        ("fixed", "fixed loops peak where they were trained, and collapse beyond"),
        ("prelude+coda", "prelude and coda blocks do not prevent the collapse"),
        ("l2", "an L2 penalty on the last update does not prevent the collapse"),
        ("random", "random loop counts alone do not prevent the collapse")):
    @claim(f"3-digit addition: {text}", "accuracy against loops (4 digits, width 512)", "ablation",
           no=CONTRADICTED)
    def collapse(runs, condition=condition):
        return collapses(runs, condition)


@claim("3-digit addition: STARS is right at the ten counts measured from 2 to 256",
       "100% (4 digits, width 512)", "ablation")
def stars_small(runs):
    lowest = worst(runs, "random+jsrr")
    return lowest > 0.995, f"lowest {percent(lowest)}"


@claim("Beside random loops, JSRR makes the iteration converge sooner", "step size against loops",
       "ablation")
def convergence(runs):
    without, with_jsrr = (runs(name, STEP, 32) for name in ("random", "random+jsrr"))
    return with_jsrr < without / 10, (f"relative step at loop 32: {show(with_jsrr)} with JSRR, "
                                      f"{show(without)} without")


@claim("Beside random loops, JSRR lowers the spectral radius at the limit",
       "rho < 1 is Lyapunov's condition", "ablation")
def radius(runs):
    with_jsrr, without = (runs(name, J, "rho") for name in ("random+jsrr", "random"))
    return (with_jsrr < 1) & (with_jsrr < without), (f"rho {show(with_jsrr)} with JSRR, "
                                                     f"{show(without)} without")


@claim("JSRR needs random loop counts: with 4 fixed loops the answers collapse", "STARS is both",
       "ablation")
def jsrr_alone(runs):
    return collapses(runs, "jsrr")


@claim("One power step from a random v estimates rho", "||J v|| after one step", "ablation",
       no=CONTRADICTED)
def one_step(runs):
    gain, rho = runs("random+jsrr", J, "||J v||"), runs("random+jsrr", J, "rho")
    return (gain > rho / 2) & (gain < 2 * rho), f"||J v|| {show(gain)}, rho {show(rho)}"


for condition, name in (("bf16", "bfloat16"), ("fp32", "float32")):
    theirs = "100% at every loop count (width 512, 10,000 steps)"

    @claim(f"4-digit addition: STARS is right at the ten counts measured from 2 to 256 ({name})",
           theirs, "addition")
    def stars_addition(runs, condition=condition):
        lowest = worst(runs, condition)
        return lowest > 0.9995, f"lowest {show(100 * lowest, '.2f')}% (width 128, 1,800 steps)"

    @claim(f"4-digit addition: also at one loop ({name})", theirs, "addition")
    def one_loop(runs, condition=condition):
        exact = runs(condition, EXACT, 1)
        return exact > 0.9995, percent(exact)


@claim("4-digit addition: the baseline peaks and collapses", "figure of accuracy against loops",
       "addition")
def baseline(runs):
    return collapses(runs, "baseline")


@claim("4-digit addition: random loop counts alone do not keep it right at 2 to 256 loops",
       "accuracy against loops", "random", no=CONTRADICTED)
def random_alone(runs):
    lowest = worst(runs, "random")
    return lowest < 0.98, f"lowest {percent(lowest)}, at 256 {percent(runs('random', EXACT, 256))}"


@claim("4-digit addition: STARS ends at a stable fixed point", "rho < 1", "addition")
def stable(runs):
    rho, step = runs("bf16", J, "largest rho"), runs("bf16", STEP, 256)
    return (rho < 1) & (step < 1e-5), f"largest rho {show(rho)}, step at loop 256 {show(step)}"


@claim("Addition: AdamW with the paper's rate and schedule learns the task",
       "100% after 10,000 steps (width 512, batch 512)", "optimizer")
def adamw(runs):
    exact = runs("adamw-paper", "exact match at step", 10_000)
    return exact > 0.99, f"{percent(exact)} after 10,000 steps (3 digits, width 64, batch 128)"


OURO = "the weights of Ouro-1.4B and one 80 GB GPU: `python experiments/harness.py`"
# 400,000 samples of at most 2,048 tokens, 1.23e9 looped weights, 5.9 loops in the mean, 8 FLOPs for
# each (with checkpointing): 4.8e19; at half of an H200's 790 TFLOP/s
TUNE = "the same, and at most 33 hours of an H200: `python experiments/ouro.py train`"
out_of_reach("Ouro-1.4B loses with loops beyond the 4 that it was trained with",
             "GSM8K 75.21 at 4 loops, 58.23 at 8; mean of five 67.41, 55.09", OURO)
out_of_reach("Ouro-1.4B: plain fine-tuning (SFT) does not prevent the loss at 8 loops",
             "mean of five 70.46 at 4 loops, 52.97 at 8, where it was 55.09 (GSM8K 60.05, 58.23)",
             TUNE)
out_of_reach("Ouro-1.4B: STARS keeps most of its accuracy at 8 loops",
             "GSM8K 81.96 at 4 loops, 74.45 at 8; mean of five 74.18, 65.55", TUNE)
out_of_reach("Ouro-1.4B: STARS is best at 4 loops too", "mean of five 74.18 against 70.46 with SFT",
             TUNE)
out_of_reach("Ouro-1.4B: at 8 loops STARS is best on MATH500, ASDiv and SVAMP too, not on AMC23",
             "STARS 54.80, 82.52, 81.00, 35.0; SFT 39.20, 75.10, 68.00, 22.5; before tuning 40.80, "
             "70.07, 66.33, 40.0", TUNE)


# The same in small: a model of Ouro's form, pretrained on sums and tuned on differences, both here.
# The paper's own figures are for 4 and 8 loops: SFT keeps 0.75 of its accuracy, STARS 0.91.
RIGHT, TOKEN_CE, SETTLED = "right tokens at loop", "CE at loop", "J at loop 16"


def kept(runs, condition):
    """(the share of its right tokens that a condition keeps from 4 to 8 loops, figures)"""
    right = [runs(condition, RIGHT, t) for t in (4, 8, 16)]
    return right[1] / right[0], (f"right tokens {percent(right[0])} at 4 loops, "
                                 f"{percent(right[1])} at 8, {percent(right[2])} at 16")


for condition, text, theirs in (
        ("base", "the base model loses with loops beyond the 4 that it was trained with",
         "GSM8K 75.21 at 4 loops, 58.23 at 8 (1.4B)"),
        ("fixed", "after fine-tuning with fixed loops (SFT) it loses too",
         "GSM8K 80.06 at 4 loops, 60.05 at 8 (1.4B)")):
    @claim(f"Tiny Ouro from scratch: {text}", theirs, "scratch", no=CONTRADICTED)
    def tiny_loses(runs, condition=condition):
        share, figures = kept(runs, condition)
        return share < 0.9, figures


@claim("Tiny Ouro from scratch: STARS keeps most of its accuracy at 8 loops",
       "GSM8K 81.96 at 4 loops, 74.45 at 8 (1.4B)", "scratch")
def tiny_stars(runs):
    share, figures = kept(runs, "random+jsrr")
    return share > 0.9, figures


for condition, text in (("jsrr", "does JSRR with fixed loops"),
                        ("random", "do random loops without JSRR")):
    @question(f"Tiny Ouro from scratch: {text} keep it, too?", "scratch")
    def tiny_parts(runs, condition=condition):
        share, figures = kept(runs, condition)
        return share > 0.9, figures


@claim("Tiny Ouro from scratch: STARS is better than SFT at the trained 4 loops too",
       "mean 74.18 against 70.46 (1.4B)", "scratch", no=CONTRADICTED)
def tiny_at_4(runs):
    stars, sft = (runs(name, TOKEN_CE, 4) for name in ("random+jsrr", "fixed"))
    return stars < sft, f"CE {show(stars)} against {show(sft)}"


for t, text in ((16, "16 loops"), (64, "64 loops, beyond all of training")):
    @question(f"Tiny Ouro from scratch: beside random loops, does JSRR lower the loss at {text}?",
              "scratch")
    def tiny_jsrr(runs, t=t):
        with_jsrr, without = (runs(name, TOKEN_CE, t) for name in ("random+jsrr", "random"))
        figures = f"CE {show(with_jsrr)} with JSRR, {show(without)} without"
        return with_jsrr < 0.95 * without, figures  # less than 5% is no difference


@question("Tiny Ouro from scratch: and the spectral radius at loop 16?", "scratch")
def tiny_radius(runs):
    with_jsrr, without = (runs(name, SETTLED, "rho") for name in ("random+jsrr", "random"))
    return with_jsrr < without, f"rho {show(with_jsrr)} with JSRR, {show(without)} without"


# --------------------------------------------------------------------------------------------------
paper = "2608.08888"
LOSS, UPDATE = "validation loss at pass", "||h^(k) - h^(k-1)|| at pass"
DEFAULT, PAPERS_MIX = "0+70+30", "75+22+3"  # ours: feedback in every step, from the first one on
by_test("Eqs. 10-12: position t is exact after t passes", "a Jacobi iteration",
        "test_fullbandwidth.py")
by_test("Eq. 4: with the gated fusion, dropping the state drops the input", "by construction",
        "test_fullbandwidth.py")


for mix, text in ((DEFAULT, "feedback in every training step"), (PAPERS_MIX, "the paper's mix")):
    @claim(f"The first fused prefill pass improves the loss ({mix}, {text})",
           "most of the gain comes with it", "passes", no=CONTRADICTED)
    def second_pass(runs, mix=mix):
        first, second = runs(mix, LOSS, 1), runs(mix, LOSS, 2)
        return second < first, (f"{show(first, '.3f')} after pass 1, {show(second, '.3f')} after "
                                f"pass 2")


@claim("Further passes change little (0+70+30)", "most of the gain comes with the first", "passes",
       no=CONTRADICTED)
def third_pass(runs):
    second, third = runs(DEFAULT, LOSS, 2), runs(DEFAULT, LOSS, 3)
    return abs(third - second) < 0.02, (f"{show(second, '.3f')} after pass 2, {show(third, '.3f')} "
                                        f"after pass 3")


for k, text, theirs in ((2, "after one fused pass", "67.55 (fused)"),
                        (1000, "in soft decoding, which pass 1000 is", "67.93 (soft)")):
    @claim(f"Full bandwidth beats a standard model of equal steps {text} (0+70+30)",
           f"GSM8K {theirs} against 62.93, 200B tokens", "passes", no=CONTRADICTED)
    def equal_steps(runs, k=k):
        ours, standard = runs(DEFAULT, LOSS, k), runs("standard", LOSS, 1)
        return ours < standard, f"loss {show(ours, '.3f')} against {show(standard, '.3f')}"


def times_the_tokens(runs, seed, k):
    """With how many times the tokens a standard model reaches the loss of pass k, by interpolation
    between 1, 1.5, 2 and 3 times. At the ends the nearest of these; below 1, no more is known."""
    times = (1, 1.5, 2, 3)
    losses = [runs(f"standard-x{n:g}", LOSS, 1)[seed] for n in times]
    return np.interp(-runs("feedback", LOSS, k)[seed], -np.array(losses), times)


for k in (1, 2, 3, 1000):
    @claim(f"Data efficiency of pass {k}: a standard model needs more tokens for its loss",
           "2 times, with one fused pass: 100B tokens reach 200B", "tokens", no=CONTRADICTED)
    def data_efficiency(runs, k=k):
        ours, standard = runs("feedback", LOSS, k), runs("standard-x1", LOSS, 1)
        if (ours > standard).all():
            return ours < standard, f"fewer: {show(ours, '.3f')} against {show(standard, '.3f')}"
        factor = np.array([times_the_tokens(runs, seed, k) for seed in range(len(ours))])
        return factor > 1.05, f"{show(factor)} times the tokens"


@question("At equal compute, is full bandwidth better than a standard model?", "passes")
def equal_compute(runs):
    second, standard = runs(DEFAULT, LOSS, 2), runs("standard-equal-compute", LOSS, 1)
    return second < standard, (f"loss {show(second, '.3f')} against {show(standard, '.3f')} of a "
                               f"standard model with 2.3 times the tokens")


def rise(runs, mix):
    """How much the loss rises from pass 2 to pass 1,000, and the two losses as figures."""
    second, far = runs(mix, LOSS, 2), runs(mix, LOSS, 1000)
    return far - second, f"{show(second, '.2f')} after pass 2, {show(far, '.2f')} after 1,000"


@claim("Figs. 3 and 10: trained on at most two passes, more passes make the loss much worse",
       "75+25 diverges", "passes")
def two_pass_diverges(runs):
    by, figures = rise(runs, "75+25")
    return (by > 0.2) & (by > 2 * rise(runs, PAPERS_MIX)[0]), figures


@claim("Figs. 3 and 10: with 3% of three-pass steps the loss stays flat for 30 and 1,000 passes",
       "75+22+3 is flat", "passes", no=CONTRADICTED)
def three_pass_flat(runs):
    by, figures = rise(runs, PAPERS_MIX)
    return by < 0.05, figures


@claim("A few three-pass steps lower what the loss of many passes ends at", "75+25 against 75+22+3",
       "passes")
def three_pass_lower(runs):
    two, three = runs("75+25", LOSS, 1000), runs(PAPERS_MIX, LOSS, 1000)
    return three < two, f"{show(two, '.2f')} without, {show(three, '.2f')} with them"


@claim("Figs. 3 and 10: the update ||h^(k) - h^(k-1)|| dies out", "75+22+3: to a small plateau",
       "passes")
def update_shrinks(runs):
    early, late = runs(PAPERS_MIX, UPDATE, 2), runs(PAPERS_MIX, UPDATE, 30)
    return late < 0.05 * early, (f"{show(early)} at pass 2, {show(late)} at pass 30; of 75+25 "
                                 f"{show(runs('75+25', UPDATE, 30))} at pass 30")


for off, text in (("no-input-norm", "the shared input norm"), ("no-jitter", "jitter"),
                  ("no-prefix-mix", "the prefix mix-in"), ("no-depth-scale", "depth scaling"),
                  ("no-tying", "tied embeddings")):
    @claim(f"Recipe: many passes end lower with {text}", "part of the recipe", "stabilisers")
    def stabiliser(runs, off=off):
        on, without = (runs(f"{name}-0+97+3", LOSS, 1000) for name in ("all-on", off))
        figures = f"loss of pass 1,000: {show(on, '.2f')} with, {show(without, '.2f')} without"
        return on < 0.98 * without, figures  # less than 2% is no difference


@claim("In training the state's path through the fusion grows with the gate, not when it is added",
       "the additive fusion leaves a shortcut", "fusion")
def shortcut(runs):
    paths = "norm of path at step"
    gated = runs("gated", paths, 800, "state") / runs("gated", paths, 0, "state")
    added = runs("add", paths, 800, "state") / runs("add", paths, 0, "state")
    return (gated > 2) & (added < 1.1), f"times {show(gated)} gated, times {show(added)} added"


for k, text in ((2, "after one fused pass"), (1000, "in soft decoding, which pass 1000 is")):
    @claim(f"The gated fusion is better than the additive one {text}", "the reason for the gate",
           "fusion", no=CONTRADICTED)
    def gate_better(runs, k=k):
        gated, added = runs("gated", LOSS, k), runs("add", LOSS, k)
        return gated < added, f"loss {show(gated, '.3f')} gated, {show(added, '.3f')} added"


@claim("The state fed back carries on beyond the trained length", "state carried across tokens",
       "running-sum")
def beyond(runs):
    soft = runs("feedback", "right sums at T + 1 .. 2 T", "soft")
    standard = runs("standard", "right sums at T + 1 .. 2 T", "pass 1")
    return soft > 0.95, (f"running sums at positions 33 to 64: {percent(soft)}, standard "
                         f"{percent(standard)}")


@claim("Only a gated state is not bypassed: the additive fusion does not carry beyond it",
       "the reason for the gate", "sum-fusion", no=CONTRADICTED)
def additive_sum(runs):
    gated, added = (runs(name, "right sums at T + 1 .. 2 T", "soft") for name in ("gated", "add"))
    return added < gated - 0.1, f"{percent(gated)} gated, {percent(added)} added"


@claim("Within the trained length a fused pass improves on the first", "pass 2 against pass 1",
       "running-sum")
def within(runs):
    one, two = (runs("feedback", "right sums at 1 .. T", f"pass {k}") for k in (1, 2))
    return two > one, f"{percent(one)} after pass 1, {percent(two)} after pass 2"


SIZES = (0, 8, 32)  # no-ops between the state and the question


def probed(runs, task, size, prefill, who=""):
    """What a probe at depth 0, the input of the stack at the last token, reads."""
    return runs("feedback", f"{task}, size {size}: probes", "depth 0", f"{who}{prefill}")


def probed_sizes(runs, task, prefill, who=""):
    """(the same for each of SIZES, (sizes, seeds); figures)"""
    read = np.array([probed(runs, task, n, prefill, who) for n in SIZES])
    shares = ", ".join(percent(of_seeds) for of_seeds in read)
    return read, f"{shares} ({', '.join(map(str, SIZES))} no-ops)"


by_test("Sec. 4.4: after a standard prefill a probe at depth 0 reads nothing, since all programs "
        "end in the same token", "chance", "test_state_tracking.py")
for task in ("completion", "memory"):
    @claim(f"Sec. 4.4, {task}: after one recurrent step a probe reads the answer at depth 0",
           "99.6%" if task == "completion" else "100%", "statetrack", yes="reproduced")
    def one_recurrent_step(runs, task=task):
        read, figures = probed_sizes(runs, task, "last 1 recurrent")
        return read.min(0) > 0.95, figures

    @question(f"Sec. 4.4, {task}: is it training that makes it readable there?", "statetrack")
    def by_training(runs, task=task):
        read, _ = probed_sizes(runs, task, "last 1 recurrent")
        before, figures = probed_sizes(runs, task, "last 1 recurrent", "untrained, ")
        return (read - before).min(0) > 0.05, f"untrained {figures}"

    @claim(f"Sec. 4.4, {task}: after the full recurrence it is read there too", "compared",
           "statetrack")
    def full_recurrence(runs, task=task):
        read, figures = probed_sizes(runs, task, "recurrence")
        return read.min(0) > 0.95, figures


out_of_reach("Sec. 4.4: the same with 128 and 256 no-ops", "completion, memory",
             "a window of over 1,000 tokens, 6 times ours: hours on a GPU")


def falls(shares):
    """Whether each share is lower than the one before, for each seed."""
    return np.logical_and.reduce([b < a for a, b in zip(shares, shares[1:])])


REGISTERS = (1, 2, 4, 8)


@claim("Appendix F: the more registers, the less a probe reads at depth 0 after one recurrent step",
       "1, 2, 4, 8 registers", "statetrack")
def registers_read(runs):
    read = [probed(runs, "registers", f"{m}, 16 writes", "last 1 recurrent") for m in REGISTERS]
    return falls(read), ", ".join(percent(share) for share in read)


@question("Appendix F: the more registers, the fewer right answers?", "statetrack")
def registers_answered(runs):
    right = [runs("feedback", f"registers, size {m}, 16 writes: right answers", "soft")
             for m in REGISTERS]
    return falls(right), ", ".join(percent(share) for share in right)


by_test("Decoding: a token costs two D x D products more; the KV cache and the attention stay the "
        "same", "by construction", "test_fullbandwidth.py")


# 6 FLOPs for each of 1e9 weights and 2e11 tokens, at half of an H200's 790 TFLOP/s
PRETRAIN = "a 1B model on 200B tokens: over 800 hours of an H200"
out_of_reach("Soft and fused decoding are better than standard decoding after instruction tuning",
             "GSM8K 64.52, 67.93, 67.55; MATH-500 43.80, 45.60, 45.60 (standard, soft, fused)",
             PRETRAIN)
out_of_reach("Soft and fused decoding are better than standard decoding on code too",
             "HumanEval 42.54, 45.06, 45.92; MBPP 38.39, 39.80, 41.22", PRETRAIN)
out_of_reach("The model is better than a plain transformer even when decoded without the states",
             "GSM8K 64.52 against 62.93, MATH-500 43.80 against 42.40, HumanEval 42.54 against "
             "37.16; not on MBPP, 38.39 against 38.61", PRETRAIN)
out_of_reach("Base models answer in fewer tokens under soft decoding at equal or better accuracy",
             "an effect on length", PRETRAIN)
out_of_reach("The effect on length goes away after instruction tuning", "gone", PRETRAIN)
