"""Keep a trained run here, small enough to be shipped:

    python notebooks/runs/make.py RUN NAME

writes notebooks/runs/NAME with the weights of RUN's last checkpoint in half precision, its config and its log.
The scripts read it like any run, but it cannot be resumed: it has no optimiser's state. The runs here are of:

    python experiments/stability.py addition --only=bf16,baseline             # stars, stars-baseline
    python train.py looped_gpt                                                # looped_gpt
    python train.py looped_gpt --readout=raw --out_dir=out/looped_gpt-raw     # looped_gpt-raw
    python train.py fullbandwidth --preset=running-sum                        # running-sum
"""
import shutil
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import train


def pack(path, name):
    ckpt = train.load_checkpoint(path)
    small = {key: ckpt[key] for key in train.CHECKPOINT}
    small["options"] |= {"out_dir": f"notebooks/runs/{name}", "data_dir": "data"}
    small["weights"] = {key: weight.half() for key, weight in ckpt["weights"].items()}
    out = HERE / name
    out.mkdir(exist_ok=True)
    torch.save(small, out / "ckpt.pt")
    train.write_json(out / "config.json", {key: small[key] for key in ("model", "preset", "config", "options")})
    shutil.copy(train.run_directory(path) / "log.csv", out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB")


def main(argv):
    if len(argv) != 2:
        raise train.UserError("expected python notebooks/runs/make.py RUN NAME")
    pack(*argv)


if __name__ == "__main__":
    train.command_line(main)
