"""What the notebooks share and a reader may skip: the look of the pictures, drawings of the models, moving pictures, a
script's source shown in place, a progress line, and the checking of exercises.

A notebook's first cell finds the repository, puts it and this folder on sys.path, and then does `from teaching import *`.
"""
import base64
import inspect
import io
import os
import re
import textwrap
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import HTML, Markdown, Pretty, display
from matplotlib.animation import FuncAnimation
from matplotlib_inline.backend_inline import set_matplotlib_formats
from PIL import Image

__all__ = ["plt", "COLOURS", "BLUE", "ORANGE", "GREEN", "PINK", "SKY", "RED", "YELLOW", "GREY", "animate", "arrow", "box",
           "check", "draw_loop_with_readouts", "draw_maps", "draw_placements", "draw_two_channels", "elapsed", "progress", "show_source"]

# Okabe and Ito's palette, told apart by colour-blind readers and in print (with the line styles that go round with it).
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800"
COLOURS, GREY = [BLUE, ORANGE, GREEN, PINK, SKY, RED], "#666666"
START = time.perf_counter()

plt.rcParams.update({  # for a projector: as wide as a page, and no letter below 12 points
    "figure.figsize": (12, 4.6), "figure.dpi": 72, "figure.constrained_layout.use": True, "font.size": 14,
    "axes.titlesize": 16, "axes.labelsize": 15, "legend.fontsize": 13, "lines.linewidth": 2.4, "lines.markersize": 7,
    "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=COLOURS, linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2))]),
})
if os.environ.get("FAST", "0") == "0":
    set_matplotlib_formats("retina")  # twice the dots
else:  # a quick check of the notebook: each picture is drawn once, without a look at what fits where
    set_matplotlib_formats("png", bbox_inches=None)
    plt.rcParams["figure.constrained_layout.use"] = False


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


class NothingReturned(Exception):
    """A student's function has no `return`."""


def check(number, answer, test, right):
    """Print 'Right: ...' or 'Not yet: ...' with the reason for exercise `number`; never raises.

    test(answer) returns None when the answer is right, else a sentence that says why it is not. An answer of `...`, also
    as what an unfinished function returns (test should then return `...`), counts as not yet given.
    """
    def called(*inputs, **named):
        value = answer(*inputs, **named)
        if value is None:
            raise NothingReturned
        return value

    try:
        why = ... if answer is ... else test(called if callable(answer) else answer)
    except NothingReturned:
        why = "your function returns nothing: it needs a `return`."
    except Exception as error:  # whatever the student's code raises
        why = f"trying your answer raised {type(error).__name__}: {error}"
    if why is ...:
        why = f"exercise {number} still holds `...`. Write your answer in the cell above, run it, then run this cell again."
    print(f"Not yet: {why}" if why else f"Right: {right}")


def elapsed(fast):
    """Print how long the notebook has run, and how much of that it computed (on a busy machine it also waits)."""
    wall, cpu = (f"{round(s) // 60} min {round(s) % 60:02} s" for s in (time.perf_counter() - START, time.process_time()))
    print(f"{wall} from the first cell to here, {cpu} of processor time, FAST = {fast}, {torch.get_num_threads()} thread(s)")


def show_source(*objects):
    """Show the source of functions or classes as it stands in its file, so that lesson and script cannot drift apart."""
    parts = []
    for thing in objects:
        lines, first = inspect.getsourcelines(thing)
        place = f"`{Path(inspect.getsourcefile(thing)).name}`, from line {first}"
        parts.append(f"{place}\n\n```python\n{textwrap.dedent(''.join(lines))}```")
    display(Markdown("\n\n".join(parts)))


# matplotlib takes the icons of its buttons from a server; these are in every font.
ICONS = {"minus": "−", "fast-backward": "|◀", "step-backward": "◂", "play fa-flip-horizontal": "◀", "pause": "❚❚",
         "play": "▶", "step-forward": "▸", "fast-forward": "▶|", "plus": "+"}


def animate(figure, draw, frames, milliseconds=400):
    """Show a moving picture with a slider, without a network: draw(frame) changes the figure for each frame.

    Where no script may run (a notebook that is not trusted, a preview) the last frame stands still in its place.
    """
    figure.canvas.draw()
    figure.set_layout_engine("none")  # as laid out for the first frame, so that nothing jumps
    movie = FuncAnimation(figure, draw, frames=frames, interval=milliseconds)
    page = movie.to_jshtml(default_mode="once")
    plt.close(figure)
    page = re.sub(r'"data:image/png;base64,([^"]*)"', lambda found: f'"data:image/png;base64,{smaller_png(found[1])}"', page)
    page = re.sub(r'<link rel="stylesheet"\s+href="[^"]*">', "", page)
    for name, icon in ICONS.items():
        page = page.replace(f'<i class="fa fa-{name}"></i>', icon)
    last = re.findall(r'"(data:image/png;base64,[^"]*)"', page)[-1]
    page = re.sub(r'<img id="(_anim_img\w+)">', lambda found: f'<img id="{found[1]}" src="{last}" style="max-width: 100%">', page)
    display(HTML(page))


def smaller_png(text):
    """A PNG in base64, with at most 64 colours: a third of the size, and enough for lines on white."""
    picture = Image.open(io.BytesIO(base64.b64decode(text.replace("\\\n", "")))).convert("RGB")
    result = io.BytesIO()
    picture.quantize(64).save(result, "png", optimize=True)
    return base64.b64encode(result.getvalue()).decode()


# The drawings of the models.

def box(axis, x, y, text, colour="white", width=1.0, height=0.6, **text_style):
    """A box with round corners around (x, y), which hides what is behind it."""
    axis.add_patch(plt.matplotlib.patches.FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.1", facecolor=colour,
        edgecolor="black", linewidth=1.3, zorder=4))
    axis.text(x, y, text, ha="center", va="center", zorder=5, **text_style)


def arrow(axis, start, end, colour="black", linewidth=1.8, linestyle="-"):
    axis.annotate("", end, start, arrowprops=dict(
        arrowstyle="-|>", color=colour, linewidth=linewidth, linestyle=linestyle, shrinkA=0, shrinkB=0, mutation_scale=16))


def draw_loop_with_readouts(num_loops=4):
    """Paper 1's model: one stack applied again and again, and a readout of the state after every loop."""
    figure, axis = plt.subplots(figsize=(12, 4.3))
    axis.set(xlim=(0, 12), ylim=(0, 4.3), aspect="equal")
    axis.axis("off")
    y, above = 1.0, 2.35
    box(axis, 0.95, y, "embeddings\n$H_0$", SKY, 1.5, 0.8)
    for k in range(1, num_loops + 1):
        left = 2.15 + 2.45 * (k - 1)
        arrow(axis, (1.7 if k == 1 else left - 0.65, y), (left, y))
        box(axis, left + 0.45, y, "$F$", ORANGE, 0.9, 0.8, fontsize=18)
        arrow(axis, (left + 0.9, y), (left + 1.3, y))
        state = left + 1.6
        axis.text(state, y, f"$H_{k}$", ha="center", va="center", fontsize=18)
        arrow(axis, (state, y + 0.3), (state, above - 0.3))
        box(axis, state, above, "readout $r$", "#dddddd", 1.45, 0.6)
        arrow(axis, (state, above + 0.3), (state, above + 0.75))
        axis.text(state, above + 1.0, f"logits $E\\,r(H_{k})$", ha="center", va="center")
        axis.text(state, above + 1.45, f"CE$_{k}$", ha="center", va="center", color=BLUE, fontsize=16)
    axis.text(6, 0.2, "$H_k = F(H_{k-1})$: the same layers, the same weights, $K$ times", ha="center", va="center")
    plt.show()


def draw_two_channels():
    """Paper 3's two tokens: what goes from one position to the next in a standard decoder, and with the state fed back."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.7))
    for axis, feedback in zip(axes, (False, True)):
        axis.set(xlim=(0, 6.2), ylim=(0, 5.2), aspect="equal")
        axis.axis("off")
        for x, t in ((0.9, "t-1"), (5.2, "t")):
            box(axis, x, 0.45, f"token$_{{{t}}}$", "white", 1.2, 0.55)
            box(axis, x, 2.75, "stack of\n$L$ layers", SKY, 1.5, 1.5)
            box(axis, x, 4.35, f"$h_{{{t}}}$", ORANGE, 1.2, 0.55, fontsize=17)
            arrow(axis, (x, 3.5), (x, 4.08))
            axis.text(x + 0.15, 0.98, f"$e_{{{t}}}$", fontsize=16, va="center")
            if feedback and t == "t":
                arrow(axis, (x, 0.72), (x, 1.22))
                axis.add_patch(plt.Circle((x, 1.45), 0.23, facecolor="white", edgecolor="black", linewidth=1.3))
                axis.text(x, 1.44, "$\\otimes$", ha="center", va="center", fontsize=18)
                arrow(axis, (x, 1.68), (x, 2.0))
            else:
                arrow(axis, (x, 0.72), (x, 2.0))
        arrow(axis, (1.65, 2.3), (4.45, 3.1), GREY, 1.4, "--")
        axis.text(2.55, 2.95, "attention:\none layer lower", color="#444444", ha="center", va="bottom", fontsize=12)
        elbow(axis, (1.5, 4.35), 3.75, (4.6, 0.45), "black", 1.2)
        axis.text(3.62, 0.62, "one of $V$ ids", ha="right", va="center")
        if feedback:
            elbow(axis, (1.5, 4.5), 4.1, (4.97, 1.45), ORANGE, 7)
            axis.text(2.9, 4.75, "the state: $D$ numbers", ha="center", color="#8a5a00")
        axis.set_title("With the state fed back" if feedback else "A standard decoder: one id goes on")
    plt.show()


def elbow(axis, start, x, end, colour, linewidth):
    """An arrow that goes across to x, down, and across again."""
    corners = plt.matplotlib.path.Path([start, (x, start[1]), (x, end[1]), end])
    axis.add_patch(plt.matplotlib.patches.FancyArrowPatch(path=corners, arrowstyle="-|>", color=colour, linewidth=linewidth,
                                                          mutation_scale=12 + 2.5 * linewidth))


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
