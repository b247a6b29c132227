"""What the experiments share: a sweep over conditions and seeds, its tables and its figure.

A sweep trains every condition with every seed, each into a run directory of its own, and finds
there what is trained already. A *measure* then takes a run directory and yields rows of tables,
each (title of the table, names of its columns, name of the row, values); a row may have fewer
values than its table has columns.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch

import train
from train import Options, Seed, UserError, check_value


@dataclass
class Sweep:
    conditions: dict  # {name: {field: value}}
    report: Callable  # report({(condition, seed): run directory}, folder of the sweep)
    preset: str = None  # the one that it belongs to; None: the first of the script


# --------------------------------------------------------------------------------------------------
# The command line of an experiment

def main(argv, module, sweeps, report):
    """Train and tabulate one of the sweeps {name: Sweep}, or report(path) on one trained run of the
    script `module`."""
    usage = (f"python experiments/NAME.py SWEEP [--preset=NAME] [--seeds=A,B,...] [--only=A,B,...] "
             f"[--field=value ...]\n       python experiments/NAME.py RUN\n"
             f"SWEEP is one of {', '.join(sweeps)}; RUN is a run of {script_name(module)}")
    parser = train.training_parser(usage, module)
    parser.add_argument("--seeds", help="as in 42,101,202 [the one of --seed]")
    parser.add_argument("--only", help="conditions of the sweep, separated by commas [all]")
    parser.add_argument("what", metavar="SWEEP|RUN")
    overrides = parser.parse(argv or ["--help"])
    preset, seeds, only, what = (overrides.pop(k) for k in ("preset", "seeds", "only", "what"))
    if seeds and "seed" in overrides:
        raise UserError("--seed and --seeds: choose one")
    if what in sweeps:
        seeds = seed_list(seeds) if seeds else [overrides.get("seed", Options.seed)]
        names = choose(only, sweeps[what].conditions)
        return run_sweep(module, what, sweeps[what], preset, overrides, names, seeds)
    if not Path(what).exists():
        raise UserError(f"{what}: neither a sweep nor a run; {train.nearest(what, list(sweeps))}")
    overrides.pop("data_dir", None)  # where its text is looked for
    if overrides or preset or seeds or only:
        raise UserError(f"{what} is a run: its options are its own")
    report(Path(what))


def script_name(module):
    return Path(module.__file__).stem


def seed_list(text):
    try:
        seeds = [int(seed) for seed in text.split(",")]
        for seed in seeds:
            check_value("--seeds", seed, Seed)
    except ValueError:
        raise UserError(f"--seeds={text}: expected whole numbers, as in 42,101,202") from None
    return seeds


def choose(only, conditions):
    """The names of the conditions that --only lists; of all of them without it."""
    if only is None:
        return list(conditions)
    names = only.split(",")
    for name in names:
        if name not in conditions:
            raise UserError(f"--only={name}: no such condition; "
                            f"{train.nearest(name, list(conditions))}")
    return names


# --------------------------------------------------------------------------------------------------
# Training

def run_sweep(module, sweep_name, sweep, preset, overrides, names, seeds):
    """Train the named conditions with every seed, resuming what is there; then report on them."""
    script = script_name(module)
    preset = preset or sweep.preset or next(iter(module.PRESETS))
    out = Path(overrides.get("out_dir") or f"out/{script}-{preset}-{sweep_name}")
    conditions = {name: sweep.conditions[name] for name in names}
    check_conditions(conditions, overrides)
    defaults = vars(module.Config()) | vars(Options()) | module.PRESETS[preset]
    runs = {}
    for name, fields in conditions.items():
        for seed in seeds:
            path = out / f"{name}-seed{seed}"
            values = defaults | overrides | fields | {"seed": seed, "out_dir": str(path)}
            saved = None if overrides.get("overwrite") else train.read_config(path, script)
            if saved:
                check_same_fields(path, saved["config"] | saved["options"], values)
            if train.is_main_process():
                print(f"--- {name}, seed {seed}", flush=True)
            try:
                train.launch(script, module, preset, values | {"resume": saved is not None})
            except UserError as error:
                if saved and str(path / "ckpt.pt") in str(error):  # it cannot be read
                    error = f"{error}; to train it anew, delete {path} and repeat this command"
                raise UserError(error) from None
            except SystemExit:  # stopped by a signal
                if train.is_main_process() and not overrides.get("overwrite"):
                    print("or repeat this command, which goes on with the sweep")
                raise
            runs[name, seed] = path
    if train.is_main_process():
        sweep.report(runs, out)


def check_conditions(conditions, overrides):
    """UserError if the user has set a field that a condition sets to something else."""
    for name, fields in conditions.items():
        for k in fields.keys() & overrides:
            if overrides[k] != fields[k]:
                raise UserError(f"--{k}={overrides[k]}: the sweep sets --{k}={fields[k]} itself, "
                                f"in {name}")


WHERE = ("resume", "overwrite", "out_dir", "data_dir")  # fields that say nothing of a training


def check_same_fields(path, saved, values):
    """UserError unless the run there was trained with the values that a sweep would give it."""
    for k, was in saved.items():
        if values.get(k, was) != was and k not in WHERE:
            raise UserError(f"{path} was trained with --{k}={was}: choose another --out_dir for "
                            f"--{k}={values[k]}")


# --------------------------------------------------------------------------------------------------
# Tables and figures

def tabulate(measure, axes, runs, out):
    """Print the tables of a measure, over the seeds of each condition; write every single value
    into out/MEASURE.csv, and draw the tables whose title is in axes."""
    csv_rows = []
    tables = {}  # {(title, columns): {row: [the values of each seed]}}
    for (condition, seed), run in runs.items():
        for title, columns, row, values in measure(run):
            values = torch.as_tensor(values).double().cpu()
            table = tables.setdefault((title, tuple(columns)), {})
            table.setdefault(f"{condition}{row}", []).append(values)
            csv_rows += csv_cells(condition, seed, title, row.strip(", "), columns, values.tolist())
    for (title, columns), table in tables.items():
        print_table(title, columns, table)
    update_csv(out / f"{measure.__name__}.csv", csv_rows)
    draw(tables, axes, out / f"{measure.__name__}.png")
    print(f"\nwritten to {out}/{measure.__name__}.csv", flush=True)


def csv_cells(condition, seed, title, row, columns, values):
    """The rows of a CSV of single values: one for each column of a row of a table."""
    return [{"condition": condition, "seed": seed, "table": title, "row": row, "column": column,
             "value": value} for column, value in zip(columns, values)]


def read_cells(path):
    """The single values in a CSV of a sweep."""
    rows = train.read_csv(path)
    for row in rows:
        if not {"condition", "seed", "table", "column", "value"} <= row.keys():
            raise UserError(f"{path} is damaged: restore it, or delete it and repeat its sweep")
    return rows


def update_csv(path, rows):
    """Write a table of single values, and keep what was there of other runs: so seeds and
    conditions may be trained one by one, on several machines."""
    measured = {(row["condition"], row["seed"]) for row in rows}
    kept = [row for row in read_cells(path)
            if (row["condition"], row["seed"]) not in measured]
    train.write_csv(path, kept + rows)


def print_table(title, columns, table):
    """Print each row's mean and, of several seeds, its sample standard deviation below."""
    width = max(len(title), *(len(row) for row in table))
    cell = max(12, *(len(str(column)) + 2 for column in columns))
    print(f"\n{title:{width}}" + "".join(f"{column!s:>{cell}}" for column in columns))
    for row, of_seeds in table.items():
        values = torch.stack(of_seeds)  # (seeds, columns)
        mean = values.mean(0).tolist()
        print(f"{row:{width}}" + "".join(f"{value:>{cell}.4g}" for value in mean))
        if len(values) > 1:
            spread = values.std(0).tolist()
            print(f"{'  +-':{width}}" + "".join(f"{value:>{cell}.4g}" for value in spread))


def draw(tables, axes, path):
    """A panel for each table whose title, `QUANTITY at COLUMN`, is in axes, {title: (scale of x,
    scale of y, message)}: the rows' means, over the columns."""
    drawn = {key: table for key, table in tables.items() if key[0] in axes}
    if not drawn:
        return
    figure, panels = train.new_figure(len(drawn))
    in_legend = list(next(iter(drawn.values())))  # the rows of the first panel
    for panel, ((title, columns), table) in zip(panels, drawn.items()):
        xscale, yscale, message = axes[title]
        means = [torch.stack(of_seeds).mean(0) for of_seeds in table.values()]
        positive = torch.cat([mean[mean > 0] for mean in means])
        if yscale == "log" and len(positive) and positive.max() < 10 * positive.min():
            yscale = "linear"  # less than a decade
            panel.set_ylim(0, 1.1 * positive.max().item())
        for i, (row, mean) in enumerate(zip(table, means)):
            style = "o-" if i < 10 else "o--"  # there are ten colours
            if yscale == "log":
                mean = mean.where(mean > 0, torch.nan)  # of which there is no logarithm
            panel.plot(columns[:len(mean)], mean.tolist(), style, markersize=3, label=row)
        ylabel, xlabel = title.split(" at ")
        panel.set(title=message, xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale)
        if xscale == "linear":
            panel.xaxis.get_major_locator().set_params(integer=True)
        if list(table) != in_legend:
            panel.legend(fontsize="x-small")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper",
                  fontsize="small")
    figure.savefig(path, dpi=120)
