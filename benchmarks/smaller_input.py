"""Outputs of docs/smaller-input.md, which need cuDNN: made here and stored, so that the page is built without it.

    python benchmarks/smaller_input.py --cudnn ~/cuda-torch    # writes benchmarks/results/smaller_input/ and the page

The path is an environment with a CUDA build of torch; the page shows `~/cuda-torch` for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]
from cuda_accuracy import RESULTS, ROOT, page_tool  # noqa: E402  # found by the line above

FOLDER = RESULTS / "smaller_input"
PAGE = ROOT / "docs" / "smaller-input.md"
SHOWN = "~/cuda-torch"
LAYER = "memplan sweep torch.nn:Conv3d --arg in_channels={} --arg out_channels={} --arg kernel_size={} --arg padding={}"
COMMANDS = {
    "size": LAYER.format(64, 64, 3, 1) + " --input 1x64x127x127x127 --size 127,128 --device h100",
    "batch": LAYER.format(16, 32, 3, 1)
    + " --input 6x16x32x32x32 --batch 6,7 --dtype fp16 --device h100",
    "kernel": LAYER.format(128, 128, 3, 0)
    + " --input 1x128x64x64x64 --set .kernel_size=3,4 --dtype fp16 --device h100",
    "361": LAYER.format(64, 32, 3, 1)
    + " --input 1x64x361x370x251 --size 361x370x251,362x370x251 --dtype fp16 --device a100-80gb",
    "depth": LAYER.format(256, 64, 3, 0)
    + " --input 1x256x4x1090x1922 --size 4x1090x1922,5x1090x1922 --device a100-80gb",
}  # fmt: skip


def shown(command: str, environment: str) -> str:
    """A command and its output, with the environment under the name that the page has for it."""
    asked = f"{command} --no-train --cudnn {environment}"
    output = page_tool().output(asked).replace(environment, SHOWN)
    return f"```console\n$ {command} --no-train --cudnn {SHOWN}\n{output}\n```\n"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cudnn", required=True, metavar="PATH", help="environment whose cuDNN is asked")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        text = shown(command, options.cudnn)
        print(text)
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    PAGE.write_text(page_tool().filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
