"""When does everything happen?  ``dag`` turns the world graph into who waits for whom, ``maxplus``
computes times, ``timeline`` says what they mean.
"""
