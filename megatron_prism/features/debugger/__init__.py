"""The debugger: stop a rank at a call or at a value, and keep or give back what calls deliver.

flags.py     --prism-break, --prism-watch, --prism-debugger, --prism-payload

options.py   what the flags say
debugger.py  the place to stop, the prompt there, the watch of values
payloads.py  what calls delivered, kept and given back
files.py     two recordings, as prism compare takes them
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags", files="files")
