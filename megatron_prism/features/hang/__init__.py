"""Hang: which rank made a job hang; dumps, logs or programs in, a verdict out (``prism hang``).

diagnose.py      all ways to a verdict: ``prism.hang``
calls.py         the calls of a rank, as entries and as columns
dumps.py         Flight Recorder dumps: calls, groups and status
recorded.py      the calls of a dump, a column at a time
cut_json.py      what stands before the cut of a dump in JSON
log_kinds.py     kinds of lines of a log
log_grammar.py   what a line of a log says: one table, each row with its source
log_lines.py     lines of logs, whole, whose they are, and the calls that they name
log_errors.py    exceptions in a rank's log: those that ended it, those that it handled
launchers.py     which processes ended by themselves, by reports of launchers
attempts.py      what earlier attempts of a job printed, left out
logs.py          what the job printed, as dumps and events
fingerprints.py  whose call differs, by torch's own check
group_names.py   groups that share a name, told apart by their members
ras.py           what NCCL's RAS reports
dump_clocks.py   dumps of another attempt of the job, by their clocks
consistency.py   dumps of another job or of another moment
state.py         outstanding calls of every rank
mismatch.py      ranks whose call differs from that of the members of its group
siblings.py      ranks that left the order in which their siblings call
waits.py         which rank waits for which, and where that ends
rules.py         the rules that name culprits, in one table, and their exceptions
analyze.py       from all of these to culprits and victims
advice.py        what to do next: the first watchdog, what would decide, where to stop
verdict.py       the verdict
alignment.py     where every rank stood in its program
hypotheses.py    single faults that leave exactly these dumps, and the verdict on the programs
fault_plan.py    faults, by name and parameters
planting.py      faults put into programs
export.py        dumps that a stalled job would leave
live.py          a job that still runs on this host
confirm.py       the suspects' real code, run into the state of the dumps
report.py        a verdict as Markdown, page and trace
command.py       prism hang
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(
    command="command",
    renderers="report",
    api={
        "Diagnosis": "verdict:Diagnosis",
        "diagnose_faults": "diagnose:diagnose_faults",
        "hang": "diagnose:diagnose",
    },
)
