"""Several local ranks, one table: who waits for whom through shared memory, and whose clock it is.

With two GPUs each rank has its own, with one they take turns.
"""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import torch
from helpers.answer_tables import random_table

from megatron_prism.features.pacing.shared_memory import Shared, layout

COUNT, ITERATIONS = 12, 3


def table_of_two():
    """Interactions of rank 0 alone, rank 1 alone, and both; terms across them."""
    seats = [(one, j) for j in range(COUNT) for one in ((0,), (1,), (0, 1))[j % 3]]
    member, of = zip(*seats, strict=True)
    return random_table(member, of, (0, 1), seed=7, most=3)


def launches_of(table, process):
    return [[j] for j in table.of[table.member == process].tolist()]


class Store(dict):
    """A store of one process."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key, default=None):
        return self[key]

    def add(self, key, number):
        self[key] = self.get(key) + number if key in self else number
        return self[key]

    def wait(self, keys):
        assert all(key in self for key in keys)


def check(table, stamps, shared):
    """Ends are the table's for arrivals that every local rank wrote down."""
    here, before = shared.array("here"), []
    for iteration in range(ITERATIONS):
        assert (stamps["tag"][iteration] == iteration + 1).all()
        arrivals = np.zeros(COUNT, np.int64)
        np.maximum.at(arrivals, table.of, here[iteration])
        ends = table.ends(arrivals, before)
        slack = np.abs(stamps["end"][iteration] - ends)
        assert slack.max() <= 100, slack  # a clock that drifts is read twice
        before.insert(0, ends)


def test_two_ranks_on_one_device():
    from megatron_prism.features.pacing.device import RING, Launcher

    table, store = table_of_two(), Store()
    device = torch.device("cuda", torch.cuda.current_device())
    places = layout(RING, len(table), len(table.of), 2)
    both, streams = [], [torch.cuda.Stream(), torch.cuda.Stream()]
    for process in range(2):
        shared = Shared(store, process, 2, places, "table")
        both.append(Launcher(table, launches_of(table, process), device, shared))
    for number in range(3):
        for launcher in both:
            launcher.compare_clocks(number)
    clock = both[1].clock()
    assert 0 < clock["round_trip"] < 50_000
    assert abs(clock["offset"]) <= clock["round_trip"]  # it is the same clock
    for iteration in range(ITERATIONS):
        for launcher, stream in zip(both, streams, strict=True):
            for launch in range(len(launcher.launches)):
                blocks = 1 + launch % 3
                if launch % 2:
                    launcher.arrive(stream.cuda_stream, launch, iteration)
                launcher.release(stream.cuda_stream, launch, iteration, 0, not launch % 2, blocks)
    stamps = both[0].stamps()
    assert stamps["stuck"][0] == both[1].stamps()["stuck"][0] == 0
    check(table, stamps, both[0].shared)
    # whoever strays is not waited for
    both[0].shared.leave(ITERATIONS)
    begin = time.perf_counter()
    for launch in range(len(both[1].launches)):
        both[1].release(streams[1].cuda_stream, launch, ITERATIONS, 0, True, 1)
    assert both[1].stamps()["stuck"][0] == 0
    assert time.perf_counter() - begin < 5


def one_of_two(process, port):
    """What each of two processes does."""
    from megatron_prism.features.pacing.device import RING, Launcher

    device = torch.device("cuda", process % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = torch.distributed.TCPStore(
        "localhost", port, 2, process == 0, timedelta(seconds=60), wait_for_workers=False
    )
    table = table_of_two()
    places = layout(RING, len(table), len(table.of), 2)
    shared = Shared(store, process, 2, places, "table")
    launcher = Launcher(table, launches_of(table, process), device, shared)
    launcher.meet()
    stream = torch.cuda.current_stream().cuda_stream
    for iteration in range(ITERATIONS):
        launcher.compare_clocks(iteration + 1)
        for launch in range(len(launcher.launches)):
            launcher.release(stream, launch, iteration, 0, True, 1)
    stamps, clock = launcher.stamps(), launcher.clock()
    assert stamps["stuck"][0] == 0
    shared.meet("end")
    check(table, launcher.stamps(), shared)
    if process == 0:
        store.wait(["bye"])
    else:
        store.set("bye", "1")
    sys.stdout.write(json.dumps(clock) + "\n")


def test_two_processes():
    port = str(20_000 + int(time.time()) % 20_000)
    words = [sys.executable, __file__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([*words, str(p), port], stdout=subprocess.PIPE, text=True, env=env)
        for p in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    clock = json.loads(said[1].splitlines()[-1])
    assert clock["round_trip"] > 0
    print(f"clocks of two processes: {clock}")


if __name__ == "__main__":
    one_of_two(int(sys.argv[1]), int(sys.argv[2]))
