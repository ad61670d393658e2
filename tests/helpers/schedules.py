"""Check a schedule by passing its messages between stages."""

from collections import Counter, defaultdict

PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"


def name(case):
    return " ".join(f"{key}={value}" for key, value in case.items())


class Pipeline:
    """Passes messages between stages, in FIFO order per group and directed pair of ranks.

    A wait for a receive needs the message, a wait for a send the posted receive (as for messages
    that are too large to be buffered).  What is in a message is known from who sends it, never from
    what the receiver says about it.
    """

    def __init__(self, programs):
        self.size = programs.world.size
        self.chunks = programs.world.chunks
        self.ops = [list(programs.of(rank)) for rank in range(self.size)]
        self.sent, self.posted = defaultdict(list), Counter()
        self.held = [defaultdict(int) for _ in self.ops]  # tensors that arrived and wait for use
        self.made = [set() for _ in self.ops]  # what steps of this stage put out
        self.handles = [{} for _ in self.ops]
        self.steps = [[] for _ in self.ops]

    def run(self):
        at = [0] * self.size
        while any(at[rank] < len(self.ops[rank]) for rank in range(self.size)):
            before = list(at)
            for rank in range(self.size):
                while at[rank] < len(self.ops[rank]) and self.step(rank, self.ops[rank][at[rank]]):
                    at[rank] += 1
            assert at != before, f"deadlock at {at}"
        return self

    def channel(self, rank, op):
        other = (rank + op.peer) % self.size
        return (op.group, rank, other) if op.name == "send" else (op.group, other, rank)

    def step(self, rank, op):
        if op.name == "compute":
            self.compute(rank, op)
        elif op.name == "send":
            tensor = "shape" if op.dtype == "int64" else (op.phase, self.place(rank, op))
            if tensor != "shape":
                assert tensor in self.made[rank], f"rank {rank} sends {tensor} before making it"
                self.made[rank].remove(tensor)
            channel = self.channel(rank, op)
            self.handles[rank][op.handle] = ("send", channel, len(self.sent[channel]))
            self.sent[channel].append(tensor)
        elif op.name == "recv":
            channel = self.channel(rank, op)
            self.handles[rank][op.handle] = ("recv", channel, self.posted[channel], op)
            self.posted[channel] += 1
        elif op.name == "wait":
            return self.wait(rank, *self.handles[rank][op.handle])
        return True

    def wait(self, rank, kind, channel, number, op=None):
        if kind == "send":
            return self.posted[channel] > number
        if number >= len(self.sent[channel]):
            return False
        tensor = self.sent[channel][number]
        if tensor != "shape" and op is not None:
            self.held[rank][tensor] += 1
            phase, (chunk, microbatch) = tensor
            used = (chunk + (1 if phase == "forward" else -1), microbatch)
            assert (op.phase, self.place(rank, op)) == (phase, used)  # the program says so as well
        self.handles[rank][op.handle] = ("done", channel, -1, None)
        return True

    def place(self, rank, op):
        """(chunk of the whole model, microbatch)."""
        return max(op.chunk, 0) * self.size + rank, op.microbatch

    def compute(self, rank, op):
        chunk, microbatch = self.place(rank, op)
        first, last = chunk == 0, chunk == self.size * self.chunks - 1
        forward = op.phase == "forward"
        if not (first if forward else last):
            needs = (op.phase, (chunk - 1 if forward else chunk + 1, microbatch))
            assert self.held[rank][needs] == 1, f"rank {rank} runs {op.label} without {needs}"
            del self.held[rank][needs]
        if not (last if forward else first):
            self.made[rank].add((op.phase, (chunk, microbatch)))
        self.steps[rank].append((op.phase, op.microbatch, op.chunk))
