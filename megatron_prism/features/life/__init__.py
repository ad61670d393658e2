"""The life of a process as parts: start, model, optimizer, loading, steps, evaluation, saving.

Megatron's own code runs each part on tier meta; emulate/rank/monitor.py names them (PARTS), and
slices keep the most that is allocated in each.

flags.py     --prism-life: a capture also loads, evaluates and saves
ending.py    the job's end behind the captured iteration
parts.py     slices and figures of the train steps -> peaks of the parts, and the one that decides
sections.py  the same, in the answer of prism fit
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags", fit_sections="sections", uses="fit")
