from __future__ import annotations

import weakref

from torch import nn

from memplan.trace.recording.place import Place


def test_a_module_with_the_id_of_one_that_is_gone_is_the_last() -> None:
    place, gone, first, last = Place(), nn.Module(), nn.Module(), nn.Module()
    place.modules[id(last)] = weakref.ref(gone)  # as if `last` lay where `gone` did
    del gone
    for module in (first, last, first):
        place.add_modules(module)
    assert list(place.live_modules()) == [first, last]
