"""What the notebooks share and a reader may skip: the look of the pictures, a progress line, and the checking of exercises.

A notebook's first cell finds the repository, puts it and this folder on sys.path, and then does `from teaching import *`.
"""
import inspect
import re
import textwrap
import time

import matplotlib.pyplot as plt
import torch
from IPython.display import HTML, Markdown, Pretty, display
from matplotlib.animation import FuncAnimation
from matplotlib_inline.backend_inline import set_matplotlib_formats

__all__ = ["plt", "COLOURS", "BLUE", "ORANGE", "GREEN", "PINK", "SKY", "RED", "YELLOW", "GREY", "progress", "check",
           "elapsed", "show_source", "show_film", "draw_placements", "draw_maps"]

# Okabe and Ito's palette, told apart by colour-blind readers and in print (with the line styles that go round with it).
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800"
COLOURS, GREY = [BLUE, ORANGE, GREEN, PINK, SKY, RED], "#666666"
START = time.perf_counter()

set_matplotlib_formats("retina")
plt.rcParams.update({
    "figure.figsize": (9, 3.8), "figure.dpi": 72, "figure.constrained_layout.use": True, "font.size": 13,
    "axes.titlesize": 14, "axes.labelsize": 13, "legend.fontsize": 12, "lines.linewidth": 2.2, "lines.markersize": 6,
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


# Notebooks 02 and 04: their drawings, a film with a slider, and a piece of a script

def show_source(*objects):
    """Show the source of functions, methods or classes as highlighted code."""
    display(Markdown("\n\n".join(f"```python\n{textwrap.dedent(inspect.getsource(o)).rstrip()}\n```" for o in objects)))


def show_film(figure, draw, frames, milliseconds=250):
    """Show draw(0) .. draw(frames - 1) of a figure as a film with a slider, without a network."""
    html = FuncAnimation(figure, draw, frames=frames, interval=milliseconds).to_jshtml(default_mode="once")
    plt.close(figure)
    html = re.sub(r'<link rel="stylesheet"\s+href="https?://[^>]*>', "", html)  # the icons' font, from a server
    for icon, sign in (("fast-backward", "⏮"), ("step-backward", "◁|"), ("play fa-flip-horizontal", "◀"), ("pause", "⏸"),
                       ("play", "▶"), ("step-forward", "|▷"), ("fast-forward", "⏭"), ("minus", "−"), ("plus", "+")):
        html = html.replace(f'<i class="fa fa-{icon}"></i>', sign)
    display(HTML(html))


def box(axis, x, y, text, colour, width=0.9, height=0.5):
    """A labelled box with its centre at (x, y), which hides what is behind it."""
    axis.add_patch(plt.Rectangle((x - width / 2, y - height / 2), width, height, facecolor=colour, edgecolor="none", zorder=4))
    axis.text(x, y, text, ha="center", va="center", fontsize=13, zorder=5)


def arrow(axis, start, end, colour="black", width=1.6):
    axis.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color=colour, linewidth=width, shrinkA=0, shrinkB=0))


def draw_placements():
    """One sublayer of notebook 02 with its norms in each of the four places, read from below."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 4.8))
    for axis, (name, formula, inside, outside) in zip(axes, (
            ("pre", "$x + f(\\mathrm{norm}(x))$", (True, False), False),
            ("pre_sandwich", "$x + \\mathrm{norm}(f(\\mathrm{norm}(x)))$", (True, True), False),
            ("post", "$\\mathrm{norm}(x + f(x))$", (False, False), True),
            ("post_sandwich", "$\\mathrm{norm}(x + f(\\mathrm{norm}(x)))$", (True, False), True))):
        arrow(axis, (0, 0), (0, 3.35), GREY, 3)  # the residual path
        axis.plot([0, 1.1], [0.45, 0.45], color="black", linewidth=1.6, linestyle="-")
        axis.plot([1.1, 1.1], [0.45, 3.5], color="black", linewidth=1.6, linestyle="-", zorder=0)
        arrow(axis, (1.1, 3.5), (0.17, 3.5))
        for present, y in zip(inside, (1.1, 2.7)):
            if present:
                box(axis, 1.1, y, "norm", ORANGE)
        box(axis, 1.1, 1.9, "sublayer f", "#CCCCCC", 1.25)
        axis.plot(0, 3.5, "o", markersize=20, markerfacecolor="white", markeredgecolor="black")
        axis.text(0, 3.48, "+", ha="center", va="center", fontsize=18)
        arrow(axis, (0, 3.68), (0, 5.2), GREY, 3)
        if outside:
            box(axis, 0, 4.3, "norm", SKY)
        axis.text(0.15, 0.05, "x", fontsize=14, style="italic")
        axis.set(xlim=(-0.75, 1.95), ylim=(-0.1, 5.3))
        axis.set_title(f"{name}\n{formula}", fontsize=14)
        axis.axis("off")
    figure.suptitle("Orange norms stand on the branch: the sum still grows. Blue norms stand on the sum and bound it.", fontsize=15)
    plt.show()


def draw_maps():
    """The three maps of notebook 04, unrolled three times over four positions."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 5))
    for axis, (name, forward, losses) in zip(axes, (
            ("looped GPT: same position,\na loss at every state", False, (1, 2, 3)),
            ("STARS: same position,\na loss at the last state", False, (3,)),
            ("full-bandwidth: next position,\na loss at every pass", True, (1, 2, 3)))):
        for k in (1, 2, 3):
            for t in range(1, 5):
                axis.plot(t, k, "o", markersize=17, color=BLUE)
                if k in losses:
                    axis.plot(t + 0.27, k + 0.2, "^", markersize=9, color=GREEN)
                if k == 3:
                    continue
                first = t + 1 if forward else t
                for later in range(first + 1, 5):  # attention takes it to the positions behind
                    arrow(axis, (t, k + 0.14), (later, k + 0.86), GREY, 0.7)
                if first < 5:
                    arrow(axis, (t, k + 0.14), (first, k + 0.86), RED, 3)
        axis.set(xlim=(0.5, 4.6), ylim=(0.6, 3.5), xticks=(1, 2, 3, 4), yticks=(1, 2, 3), xlabel="position t")
        axis.set_title(name, fontsize=14)
        axis.grid(False)
    axes[0].set_ylabel("state k")
    figure.suptitle("Thick: where the state is fed in. Grey: where attention takes it in the same run. Triangle: read by a loss.", fontsize=14)
    plt.show()
