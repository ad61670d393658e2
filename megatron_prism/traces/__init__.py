"""Traces of real jobs: read them, turn them into programs with times, say where the time varies and
where a prediction is wrong; write graphs that others read.

events.py    what was recorded of one rank: Kineto, Nsight Systems, Flight Recorder
timing.py    one rank's iterations out of it: calls, and times between them
pairing.py   which traced call is which captured one
programs.py  programs with times, as a capture writes them: ``prism.import_traces``
variance.py  between whom and over what times vary, and who is slow
compare.py   a prediction beside the real job
"""
