"""Loads of devices against a plain count, device by device."""

import itertools

import numpy as np
import pytest

from muon_optax.sharding.planning.loads import Loads, rest_owners
from muon_optax.sharding.planning.workload import Workload

SIZES = (("r", 2), ("o", 3), ("f", 4))


def work(flops, *replica_axes):
    return Workload(8, 8, 4, flops, ("f",), replica_axes, SIZES)


def counted(loads, its, offset, count):
    """FLOPs of each device, by its place on the mesh, after a rest has been added."""
    owners = rest_owners(offset, count, its).tolist()
    found = dict(loads)
    for r, o, f in found:
        owner = r * 4 + f if its.replica_axes else f
        found[r, o, f] += its.flops * (owner in owners)
    return found


@pytest.mark.parametrize("unit", [1, 2**80])
@pytest.mark.parametrize("replica_axes", [(), ("r",)])
def test_peaks_and_the_best_first_owner(replica_axes, unit):
    its, loads = work(10 * unit, *replica_axes), Loads(SIZES)
    loads.add_to_all(7 * unit)
    devices = {at: 7 * unit for at in itertools.product(range(2), range(3), range(4))}
    for count in (1, 3, 2, 3, 1):
        peaks = []
        for offset in range(its.owners):
            after = counted(devices, its, offset, count)
            peaks.append(max(v for k, v in after.items() if v > devices[k]))
            assert loads.peak_with(offset, count, its) == peaks[-1]
        offset = loads.best_first_owner(count, its)
        assert offset == int(np.argmin(peaks))
        loads.add_to_rest(offset, count, its)
        devices = counted(devices, its, offset, count)
        assert loads.peak == max(devices.values())
