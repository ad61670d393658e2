"""Another number of microbatches: captured steps in the order of Megatron's scheduler.

In : Programs of M microbatches, and a Scheduler, which runs Megatron's own with stub steps
(``emulate.schedule.schedules``).  Out: Programs of N microbatches.

``cut`` takes a program apart into steps and what lies between them, ``order`` runs the scheduler
until it gives the captured order, ``captured`` compares the bodies of captured steps, ``choice``
says which captured piece stands for each wanted one, ``arrangement`` joins the pieces and gives
their ops new handles and batches, ``memory`` and ``history`` do so for storages,
``message_buffers`` says when Python drops the tensors of messages, and ``change`` is the whole.
"""
