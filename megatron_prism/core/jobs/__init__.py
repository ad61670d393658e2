"""Jobs: what ranks are started with.

recipe.py  model_flops.py  jobs in YAML, of Megatron's own flags; what their models compute
megatron_flags.py          flags of Megatron that several answers read, under all their names
job_settings.py            what tells one job from another
megatron_source.py         releases of megatron-core: tested, installed, what its source defines
"""
