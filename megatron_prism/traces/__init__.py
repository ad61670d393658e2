"""Traces of real jobs: read them, turn them into programs with times, say where the time varies and
where a prediction is wrong; write graphs that others read."""
