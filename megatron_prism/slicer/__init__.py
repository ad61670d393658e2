"""How does a running rank become a program?  ``recorder`` collects the ops, ``watch`` hears of
streams, events and host waits, ``kernels`` weighs what runs between them, ``owners`` says whose
memory comes and goes.

Megatron runs unchanged; nothing here knows a schedule.
"""
