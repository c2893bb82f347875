"""Which kernels compute while steps are compared on a card, and how precisely."""

from __future__ import annotations

import json
import subprocess
import sys

SETTINGS = {
    "nothing": "pass",
    "products in TF32": "torch.backends.cuda.matmul.allow_tf32 = True",
    "products in less": "torch.set_float32_matmul_precision('medium')",
    "no TF32": "b.cudnn.allow_tf32 = False",
    "convolutions by the newer setting": "b.cudnn.conv.fp32_precision = 'ieee'",
    "products by the newer setting": "b.cuda.matmul.fp32_precision = 'tf32'",
    "all by the newer setting": "b.fp32_precision = 'tf32'",
}
PROGRAM = """
import json, os, sys, torch, traceback
from memplan.verification.measurement.card_kernels import full_float32
b = torch.backends
def read(what):
    try:
        return what()
    except RuntimeError:
        return "mixed"
def newer():
    return [one.fp32_precision for one in (b.cudnn.conv, b.cudnn.rnn, b.cuda.matmul, b.mkldnn.matmul)]
def now():
    older = lambda: b.cudnn.allow_tf32, lambda: b.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision
    return [read(one) for one in older], newer(), b.cudnn.fp32_precision, b.fp32_precision
def check(setting):
    exec(setting)
    before = now()
    try:
        with full_float32():
            assert "tf32" not in newer(), newer()
            raise KeyError
    except KeyError:
        pass
    assert now() == before, (now(), before)
failed = 0
for name, setting in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        try:
            check(setting)
        except BaseException:
            print(name, file=sys.stderr)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed += os.wait()[1] != 0
sys.exit(failed)
"""


def test_float32_is_in_full_and_all_settings_come_back() -> None:
    """Each setting in a process of its own: torch keeps which of its two settings a program has ever used."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(SETTINGS)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
