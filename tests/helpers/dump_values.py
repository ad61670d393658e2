"""A dump as a value to edit, and the verdict on such dumps."""

from helpers.flight_dumps import judged

NAMES = {"tp": "TENSOR_MODEL_PARALLEL_GROUP", "dp": "DATA_PARALLEL_GROUP",
         "pp": "PIPELINE_MODEL_PARALLEL_GROUP", "mp": "MODEL_PARALLEL_GROUP"}  # fmt: skip


class Dump:
    """What one rank's recorder holds; ``groups``: of its own, kind -> ranks."""

    def __init__(self, groups):
        number = {"tp": 100, "dp": 200, "pp": 300, "mp": 400}  # torch's names are numbers
        self.names = {kind: str(number[kind] + ranks[0]) for kind, ranks in groups.items()}
        self.groups, self.entries, self.made = groups, [], dict.fromkeys(groups, 0)
        self.ended = dict(self.made)

    def call(self, kind, what="all_reduce", done=False, size=8, count=1, **more):
        """``count`` of them; a message names the other side, as torch does: ``send 0->1``."""
        for _ in range(count):
            self.made[kind] += 1
            self.ended[kind] += done
            pair = "->" in what or "<-" in what
            self.entries.append({
                "record_id": len(self.entries), "pg_id": list(self.groups).index(kind),
                "process_group": (self.names[kind], NAMES[kind]), "is_p2p": pair,
                "collective_seq_id": self.made[kind], "p2p_seq_id": self.made[kind] if pair else 0,
                "profiling_name": f"nccl:{what}", "retired": done,
                "state": "completed" if done else "scheduled", "timeout_ms": 600_000,
                "input_sizes": [[size]], "output_sizes": [[size]], "input_dtypes": ["Float"],
                "output_dtypes": ["Float"], "time_created_ns": 1000 + len(self.entries),
            } | more)  # fmt: skip

    def value(self):
        status = {str(i): {"last_enqueued_collective": self.made[kind], "last_started_collective":
                  -1, "last_completed_collective": self.ended[kind]}
                  for i, kind in enumerate(self.groups)}  # fmt: skip
        config = {self.names[kind]: {"name": self.names[kind], "desc": NAMES[kind],
                  "ranks": str(list(ranks))} for kind, ranks in self.groups.items()}  # fmt: skip
        return {"version": "2.10", "pg_config": config, "pg_status": status,
                "entries": self.entries}  # fmt: skip


def verdict(dumps):
    return judged({rank: dump.value() for rank, dump in dumps.items()})
