"""The Megatron side: flags, seams and the two ways to start.

Read in this order: ``flags`` (what the user asked), ``launch`` (how a job becomes an emulated one),
``hooks`` (how a module is changed right after its import), ``seams`` (what is changed in Megatron
and why), ``monitor`` (did it train?), ``ending`` (may this process exit 0?), ``job`` (the main job
without a Megatron checkout).  Apart from these: ``stock_capture``, ``slice_source`` and ``pace*``
(slices of a job, and peers that take their time), ``model_flops`` (what MFU is a share of),
``links`` (NVLinks of a rank alone), ``calibrate*`` (what calls cost here).
"""
