"""What a duration rests on: a measurement, a model, or nothing."""

from __future__ import annotations

from enum import IntEnum


class Provenance(IntEnum):
    """What a duration rests on.

    Arrays of ``Prices`` hold the values; ``Prices.sources`` has a text for each of them, in the
    order in which reports list them.
    """

    # computing
    MEASURED_SEGMENT = 0
    ROOFLINE = 1
    NO_SEGMENT = 2

    # calls of a calibration, or of a model without one
    CALIBRATED_CALL = 3
    MODELLED_CALL = 4

    # computing that no GPU ran
    OP_TABLE = 5
    OP_TABLE_AND_ROOFLINE = 6

    # a call that was calibrated with other settings of NCCL
    RESCALED_CALL = 7

    # a segment that says neither how long it takes nor what it computes
    UNKNOWN_SEGMENT = 8

    # the host
    HOST_OF_SEGMENT = 9
    HOST_OF_CALL = 10

    # other calls
    MEASURED_CALL = 11
    CALL_BETWEEN_NODES = 12
    CALL_OF_OTHER_GPUS = 13
    EXPERT_CALL = 14

    # computing of which a part is on the host, or copied there
    HOST_MEMORY = 15
