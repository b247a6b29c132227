"""What the notebooks share and a reader may skip: the look of the pictures, a progress line, and the checking of exercises.

A notebook's first cell finds the repository, puts it and this folder on sys.path, and then does `from teaching import *`.
"""
import time

import matplotlib.pyplot as plt
import torch
from IPython.display import Pretty, display
from matplotlib_inline.backend_inline import set_matplotlib_formats

__all__ = ["plt", "COLOURS", "BLUE", "ORANGE", "GREEN", "PINK", "SKY", "RED", "YELLOW", "GREY", "progress", "check",
           "elapsed"]

# Okabe and Ito's palette, told apart by colour-blind readers and in print (with the line styles that go round with it).
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800"
COLOURS, GREY = [BLUE, ORANGE, GREEN, PINK, SKY, RED], "#666666"
START = time.perf_counter()

set_matplotlib_formats("retina")
plt.rcParams.update({
    "figure.figsize": (9, 3.8), "figure.dpi": 72, "figure.constrained_layout.use": True, "font.size": 13,
    "axes.titlesize": 14, "axes.labelsize": 13, "legend.fontsize": 11, "lines.linewidth": 2.2, "lines.markersize": 6,
    "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=COLOURS, linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2))]),
})


class progress:
    """Yield step = 1 .. steps and keep one line on the screen up to date, with whatever is in .note at its end.

    for step in (bar := progress(100, "training")): ...; bar.note = f"loss {loss:.2f}"
    """

    def __init__(self, steps, label=""):
        self.steps, self.label, self.note = steps, label, ""

    def __iter__(self):
        line, start, shown = display(Pretty(self.label), display_id=True), time.perf_counter(), 0.0
        for step in range(1, self.steps + 1):
            yield step
            seconds = time.perf_counter() - start
            if step == self.steps or seconds - shown > 0.5:
                shown, done = seconds, 20 * step // self.steps
                bar = "█" * done + "·" * (20 - done)
                line.update(Pretty(f"{self.label:24} {bar} {step:5}/{self.steps}  {seconds:4.0f} s  {self.note}"))


def check(number, answer, test, right):
    """Print 'Right: ...' or 'Not yet: ...' with the reason for exercise `number`; never raises.

    test(answer) returns None when the answer is right, else a sentence that says why it is not. An answer of `...`, also
    as what an unfinished function returns (test should then return `...`), counts as not yet given.
    """
    try:
        why = ... if answer is ... else test(answer)
    except Exception as error:  # whatever the student's code raises
        why = f"trying your answer raised {type(error).__name__}: {error}"
    if why is ...:
        why = f"exercise {number} still holds `...`. Write your answer in the cell above, run it, then run this cell again."
    print(f"Not yet: {why}" if why else f"Right: {right}")


def elapsed(fast):
    """Print how long the notebook has run, and how much of that it computed (on a busy machine it also waits)."""
    wall, cpu = (f"{round(s) // 60} min {round(s) % 60:02} s" for s in (time.perf_counter() - START, time.process_time()))
    print(f"{wall} from the first cell to here, {cpu} of processor time, FAST = {fast}, {torch.get_num_threads()} thread(s)")
