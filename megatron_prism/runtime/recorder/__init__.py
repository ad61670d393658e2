"""How does a running rank become a program?  ``recorder`` collects the ops, ``watch`` hears of
streams, events and host waits, ``kernels`` weighs what runs between them, ``owners`` says whose
memory comes and goes, ``busy`` tells kernels from the host's delays on a GPU, ``launches`` where
the device can run through a segment and how much of it is products, ``clock`` times a host that is
not recorded, ``recordings`` makes one program of several iterations; ``paced`` records a rank
whose virtual peers take their time.

Megatron runs unchanged; nothing here knows a schedule.
"""
