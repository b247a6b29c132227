"""Draw readme.png, a panel for each paper, from the trained runs in notebooks/runs:

    python notebooks/figures/readme.py
"""
import dataclasses
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs"
sys.path.insert(0, str(HERE.parent.parent))
import fullbandwidth
import stars
import train

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#666666"


def norms_over_training(axis):
    """Paper 1: what a loss sees of the scale decides what becomes of it."""
    for name, label, colour in (("looped_gpt", "read through RMSNorm", ORANGE),
                                ("looped_gpt-raw", "read as it is", BLUE)):
        log = [row for row in train.read_csv(RUNS / name / "log.csv") if "final_norm" in row]
        axis.plot([row["step"] for row in log], [row["final_norm"] for row in log], color=colour, label=label)
    axis.set(xlabel="training step", ylabel="mean norm of the last state", yscale="log",
             title="A loss cannot hold\na scale that it cannot see")


def accuracy_over_loops(axis, rows=200):
    """Paper 2: exact match of held-out sums at every loop count."""
    for name, label, colour in (("stars", "STARS", BLUE), ("stars-baseline", "always 4 loops", ORANGE)):
        model, options = stars.load_run(RUNS / name)
        idx, targets = stars.held_out_sums(model, options, rows)
        exact = stars.exact_match(model, idx, targets, stars.LOOPS)
        axis.plot(exact.keys(), exact.values(), "o-", markersize=4, color=colour, label=label)
    axis.set(xlabel="loops at test time", ylabel="sums exactly right", xscale="log",
             title="Trained to converge,\nmore loops never hurt")
    axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    axis.minorticks_off()


def counting_past_the_trained_length(axis, rows=512):
    """Paper 3: running sums modulo 3, position by position."""
    model, options, _ = fullbandwidth.load_model(RUNS / "running-sum")
    idx, targets = fullbandwidth.long_sums(model, dataclasses.replace(options, batch_size=rows))
    curves = {"attention alone, pass 1": (model.states(idx, 1)[0], ORANGE),
              "state fed back at every token": (model.recurrent(idx), BLUE)}
    for label, (h, colour) in curves.items():
        right = (model.readout(h).argmax(-1) == targets).double().mean(0)  # of each position
        axis.plot(range(1, len(right) + 1), right, color=colour, label=label)
    axis.axvline(model.config.block_size + 0.5, color=GREY, linestyle=":")
    axis.text(model.config.block_size + 6, 0.6, "longer than trained", color=GREY)
    axis.set(xlabel="position", ylabel="running sums right", ylim=(-0.04, 1.04),
             title="A state fed back\ncounts past the trained length")


@torch.no_grad()
def main(argv):
    figure, axes = train.new_figure(3)
    for axis, draw in zip(axes, (norms_over_training, accuracy_over_loops, counting_past_the_trained_length)):
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(edgecolor="none", framealpha=1, loc="lower left" if axis is axes[2] else "best")
    figure.set_size_inches(12, 3.8)
    figure.savefig(HERE / "readme.png", dpi=110)


if __name__ == "__main__":
    train.command_line(main)
