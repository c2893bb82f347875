"""What all tests share."""

from __future__ import annotations

import gc

# A worker holds millions of objects that thousands of tests imported: searched at Python's own thresholds, they take a
# tenth of the suite's processor time. The recorder runs the collector where cycles matter.
gc.set_threshold(100_000, 50, 100)
