"""Launch scripts: a shell script runs dry, and the first command that trains is the job."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags")
