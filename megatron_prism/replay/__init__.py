"""When does everything happen?  ``issue`` reads what a rank does before what, ``dag`` joins ranks,
``maxplus`` computes times, ``events`` does so with shared ``links`` and faults, ``timeline`` says
what the times mean.  ``whatif``, ``scale`` and ``reschedule`` change programs and prices, and
``scenario`` puts them together.  ``release`` says when virtual ranks answer local ones
(``transfer`` is its loop).
"""
