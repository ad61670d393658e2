"""The virtual world: ``torch.distributed`` with absent ranks.

Read in this order: ``session`` (start and stop a world), ``backend`` (the process group),
``answers`` (one local member), ``hybrid`` (several), ``values`` (what peers hold), ``parts`` (what
they give where mirrors would be wrong), ``patches`` (object collectives and group creation),
``tally`` (how much was communicated), ``work`` (handles).
When they answer: ``pacing`` (which stream, which call; ``batch``, ``streams``, ``driver``),
``moves`` (what one kernel can answer), ``pace_kernel``, ``pace_source`` (the device waits) and
``pace_moves`` (and moves), ``pace_shared`` (several local ranks), ``pace_report``.  Whether they
would make the call at all: ``rendezvous``.
"""
