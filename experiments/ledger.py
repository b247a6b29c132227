"""The ledger: every claim of the three papers in claims.py, beside what the runs here show.

    python experiments/ledger.py                # what is missing, and how to train it; the verdicts
    python experiments/ledger.py --runs=out     # the same of your own runs
    python experiments/ledger.py --collect=out  # copy tables and logs from there, no weights
    python experiments/ledger.py --write        # compute the tables of experiments/README.md

Figures and verdicts are computed from the single values that the sweeps have written, which are
kept in experiments/runs: nothing is trained here.
"""
import collections
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train
from experiments.claims import CLAIMS, percent, show
from experiments.sweeps import WHERE, read_cells, update_csv
from train import UserError, check_fields

SEEDS = "--seeds=42,101,202"
TABLE1 = f"blind_spot.py table1 --max_steps=300 --eval_interval=20 {SEEDS}"
SWEEPS = {  # {name: (folder of its runs, what is typed behind `python experiments/`)}
    "table1": ("looped_gpt-tiny-table1", TABLE1),
    "leap": ("looped_gpt-tiny-leap", TABLE1.replace("table1", "leap")),
    "addition": ("stars-addition-addition", f"stability.py addition {SEEDS}"),
    "normalization": ("stars-small-normalization",
                      f"stability.py normalization --max_steps=1000 {SEEDS}"),
    "ablation": ("stars-small-ablation", f"stability.py ablation {SEEDS}"),
    "random": ("stars-addition-ablation", f"stability.py ablation --preset=addition --only=random "
                                          f"{SEEDS}"),
    "optimizer": ("stars-small-optimizer", "stability.py optimizer"),
    "scratch": ("tiny_ouro-sums-scratch", f"tiny_ouro.py scratch {SEEDS}"),
    "passes": ("fullbandwidth-tiny-passes", f"feedback.py passes {SEEDS}"),
    "stabilisers": ("fullbandwidth-tiny-stabilisers", f"feedback.py stabilisers {SEEDS}"),
    "fusion": ("fullbandwidth-tiny-fusion", f"feedback.py fusion --eval_interval=50 {SEEDS}"),
    "running-sum": ("fullbandwidth-running-sum-running-sum", f"feedback.py running-sum {SEEDS}"),
    "sum-fusion": ("fullbandwidth-running-sum-sum-fusion", f"feedback.py sum-fusion {SEEDS}"),
    "tokens": ("fullbandwidth-tiny-tokens", f"feedback.py tokens --dataset=wikitext-2-heldout.txt "
                                            f"--stride=64 --max_steps=350 {SEEDS}"),
    "statetrack": ("fullbandwidth-statetrack-statetrack",
                   f"state_tracking.py statetrack {SEEDS}"),
}


class Missing(Exception):
    """A claim asks for a value that no run has given."""


class Runs:
    """The single values of a sweep: runs(condition, table, column) is the array of its seeds'."""

    def __init__(self, folder):
        self.values = {}
        for path in sorted(folder.glob("*.csv")):
            for cell in read_cells(path):
                key = cell["condition"], cell["table"], cell["column"], cell.get("row", "")
                self.values.setdefault(key, {})[cell["seed"]] = cell["value"]

    def of_seeds(self, condition, table, column, row=""):
        """{seed: value}"""
        if (condition, table, column, row) not in self.values:
            raise Missing(f"{condition}: {table} {column} {row}")
        return self.values[condition, table, column, row]

    def __call__(self, *key):
        of_seeds = self.of_seeds(*key)
        return np.array([of_seeds[seed] for seed in sorted(of_seeds)])

    def common(self, figures):
        """The same values, only of the seeds that have all for which figures(runs) asks: so that
        two conditions are compared seed by seed."""
        asked = []

        def note(*key):
            asked.append(set(self.of_seeds(*key)))
            return np.ones(1)
        figures(note)
        seeds = sorted(set.intersection(*asked))
        if not seeds:
            raise Missing("no seed has them all")
        return lambda *key: np.array([self.of_seeds(*key)[seed] for seed in seeds])


def judge(claim, runs):
    """(our figures, verdict) of a claim, from {name of a sweep: its Runs}."""
    if claim.instead:
        return claim.instead, claim.yes
    try:
        holds, figures = claim.figures(runs[claim.sweep].common(claim.figures))
    except Missing:
        return "not run yet", "open"
    if holds.any() and not holds.all():
        return figures, f"in {holds.sum()} of {len(holds)} seeds"
    verdict = claim.yes if holds.all() else claim.no
    few = {1: "one observation: ", 2: "two seeds: "}.get(len(holds), "")
    return figures, few + verdict


# --------------------------------------------------------------------------------------------------
# experiments/README.md: what stands between a mark <!-- .. --> and <!-- end --> is computed

def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
                     for line in lines)


def whole_ledger(runs):
    """The commands of the sweeps, how often each verdict was given, and a table for each paper."""
    commands = [[name, f"`python experiments/{command}`"] for name, (_, command) in SWEEPS.items()]
    judged = [(claim, *judge(claim, runs)) for claim in CLAIMS]
    parts = [markdown(["runs", "command"], commands)]
    for ours, name in ((False, "claims of the papers"), (True, "questions of ours")):
        verdicts = collections.Counter(verdict for claim, _, verdict in judged
                                       if claim.ours == ours)
        counted = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common())
        parts.append(f"{verdicts.total()} {name}: {counted}.")
    rows = collections.defaultdict(list)
    for number, (claim, figures, verdict) in enumerate(judged, start=1):
        theirs = "(a question of ours)" if claim.ours else claim.theirs
        rows[claim.paper].append([str(number), claim.text, theirs, figures, claim.sweep, verdict])
    for paper, of_paper in rows.items():
        header = ["", f"arXiv {paper}: the claim", "the paper", "here", "runs", "verdict"]
        parts.append(markdown(header, of_paper))
    return "\n\n".join(parts)


def show_as(form, values):
    """form: percent, number, or a format of Python's."""
    if form == "percent":
        return percent(values)
    return show(values) if form == "number" else show(values, form)


def one_table(runs, mark):
    """A table of the mark `SWEEP | TITLE | COLUMN, COLUMN, .. | form`: one row for each condition,
    mean and spread over its seeds."""
    sweep, title, columns, form = (part.strip() for part in mark.split(" | "))
    columns = [train.number_or_word(column.strip()) for column in columns.split(",")]
    names = dict.fromkeys((condition, row) for condition, t, _, row in runs[sweep].values
                          if t == title)
    rows = []
    for condition, row in names:
        cells = []
        for column in columns:
            try:
                values = runs[sweep](condition, title, column, row)
                cells.append(show_as(form, values))
            except Missing:
                cells.append("")
        rows.append([" ".join((condition, row)).strip(), *cells])
    if not rows:
        return f"Not run yet: `python experiments/{SWEEPS[sweep][1]}`"
    return markdown([title, *map(str, columns)], rows)


def fill(text, runs):
    """The README with everything between marks computed from the runs."""
    def compute(match):
        mark = match[1]
        content = whole_ledger(runs) if mark == "ledger" else one_table(runs, mark)
        return f"<!-- {mark} -->\n\n{content}\n\n<!-- end -->"
    return re.sub(r"<!-- (ledger|[\w-]+ \| .*?) -->.*?<!-- end -->", compute, text, flags=re.S)


# --------------------------------------------------------------------------------------------------
# python experiments/ledger.py

def collect(source, destination):
    """Copy tables, logs and configs of the sweeps in `source`; nothing that is large."""
    if destination.exists() and source.samefile(destination):
        raise UserError(f"--collect={source}: that is where they are collected; name the folder "
                        f"that your sweeps are in, as out")
    if not any((source / folder).is_dir() for folder, _ in SWEEPS.values()):
        raise UserError(f"--collect={source}: no folder of a sweep is in it, as "
                        f"{SWEEPS['table1'][0]}; name their parent, as out")
    for folder, _ in SWEEPS.values():
        for path in (source / folder).glob("*.csv"):
            update_csv(place_of_copy(path, source, destination), read_cells(path))
        for config in (source / folder).glob("*/config.json"):
            run = config.parent
            if is_finished(run):
                warn_of_other_options(run, destination / folder)
                for path in (config, run / "log.csv"):
                    shutil.copyfile(path, place_of_copy(path, source, destination))
            else:
                print(f"left out, since it is not finished: {run}")


def place_of_copy(path, source, destination):
    """Where a file of `source` is copied to, in a folder that exists."""
    copy = destination / path.relative_to(source)
    copy.parent.mkdir(parents=True, exist_ok=True)
    print(copy)
    return copy


def is_finished(run):
    """Whether a run has trained to the end. One of equal compute has more steps than its option,
    so that only the checkpoint knows; without one, as after collecting, its log decides."""
    if (run / "ckpt.pt").exists():
        ckpt = train.load_checkpoint(run)
        return ckpt["step"] >= ckpt["max_steps"]
    steps = [row["step"] for row in train.read_csv(run / "log.csv") if "step" in row]
    return bool(steps) and steps[-1] >= fields_of(run)["max_steps"]


# What may differ between the seeds of a condition: where and how it ran.
MAY_DIFFER = (*WHERE, "seed", "device", "dtype", "compile")


def warn_of_other_options(run, folder):
    """Say where a run differs from the other seeds of its condition in more than its seed."""
    own = fields_of(run)
    condition = run.name.rpartition("-seed")[0]
    for other in sorted(folder.glob(f"{condition}-seed*")):
        for field, value in fields_of(other).items():
            differs = own.get(field, value) != value and field not in MAY_DIFFER
            if differs and other.name != run.name:
                print(f"warning: {run} was trained with --{field}={own[field]}, {other} with "
                      f"--{field}={value}")


def fields_of(run):
    """The fields of the model and the options that a run was trained with."""
    saved = train.read_config(run, None)
    return saved["config"] | saved["options"]


@dataclass
class Arguments:
    runs: str = str(HERE / "runs")  # the folder of the sweeps' folders
    collect: str = ""  # a folder like it, from which to copy there what the ledger needs
    write: bool = False  # compute the tables of experiments/README.md

    __post_init__ = check_fields


def main(argv):
    values = train.Parser("python experiments/ledger.py [--runs=FOLDER]", Arguments).parse(argv)
    a = Arguments(**values)
    for folder in filter(None, (a.runs, a.collect)):
        if not Path(folder).is_dir():
            raise UserError(f"{folder}: no such folder")
    if a.collect:
        collect(Path(a.collect), Path(a.runs))
    runs = {name: Runs(Path(a.runs) / folder) for name, (folder, _) in SWEEPS.items()}
    missing = {}  # the sweeps that an open claim asks for, once each, in order
    for number, claim in enumerate(CLAIMS, start=1):
        figures, verdict = judge(claim, runs)
        print(f"{number:3d}  {verdict}: {claim.text}\n     {figures}")
        if verdict == "open":
            missing[claim.sweep] = SWEEPS[claim.sweep][1]
    for command in missing.values():
        print(f"missing, wholly or in part: python experiments/{command}")
    if a.write:
        path = HERE / "README.md"
        text = fill(path.read_text(encoding="utf-8"), runs)
        with train.atomic_write(path, "w") as f:
            f.write(text)


if __name__ == "__main__":
    train.command_line(main)
